"""One push outside of the ledger, by the daemon's own session: for ``drain send`` and ``drain check``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from drain.apns.model import Push, Reply
from drain.apns.session import ApnsSession
from drain.apns.token import ProviderTokens
from drain.daemon import limits, target
from drain.settings import AppSettings, DrainSettings

LOOK_SECONDS = 0.02


@asynccontextmanager
async def session(
    drain: DrainSettings, app: AppSettings, tokens: ProviderTokens | None = None
) -> AsyncIterator[ApnsSession]:
    """A started session with one connection at most; closed in the end.

    Raises:
        ValueError, OSError: the key or certificate file can not be used.
    """
    opened = ApnsSession(target(app), replace(limits(drain), max_connections=1), tokens)
    await opened.start()
    try:
        yield opened
    finally:
        await opened.close(1.0)


async def connected(opened: ApnsSession, seconds: float) -> str | None:
    """Wait for the connection; None when it stands, else why it does not."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not opened.connected:
        opened.raise_if_broken()
        if opened.problem is not None:
            return opened.problem
        if asyncio.get_running_loop().time() >= deadline:
            return f"no connection within {seconds:g} s"
        await asyncio.sleep(LOOK_SECONDS)
    return None


async def one_push(opened: ApnsSession, push: Push, seconds: float) -> Reply:
    """Send one push and wait for its reply, which always comes: by the push timeout at the latest."""
    loop = asyncio.get_running_loop()
    replied: asyncio.Future[Reply] = loop.create_future()
    opened.submit(push, loop.time() + seconds, lambda _, reply: replied.set_result(reply))
    return await replied


def patience(drain: DrainSettings) -> float:
    """Seconds for TCP, TLS and SETTINGS."""
    return 3 * drain.connect_timeout
