"""The connection pool of one daemon: every wait has a deadline, no connection in doubt is used again.

A connection is given back only after its statement, or its whole transaction, went well. After any error, a
time-out or a cancellation it is cut instead: the server rolls back, the locks are gone, and the next use opens a
new one (MagicStack/asyncpg#955, #1307; graphile/worker#449: a pool pinned to a demoted primary).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

import asyncpg

from common.errors import DATABASE_ERRORS
from common.settings import SharedSettings

# SQLSTATE classes and codes that say: not now. Anything else is an error in the statement or in the data.
_WAITING_HELPS = ("08", "53", "57", "25006", "25P03", "25P04", "40", "55P03", "0A000")


class PoolMeter(Protocol):
    """What the pool tells the metrics."""

    def acquired(self, seconds: float) -> None:
        """A connection was handed out after this wait."""

    def pool_size(self, in_use: int, size: int) -> None:
        """Connections handed out, connections open."""


class Database:
    """One pool; created without a connection, so that a daemon can start before its database."""

    def __init__(
        self, settings: SharedSettings, application_name: str, meter: PoolMeter | None = None
    ) -> None:
        self._settings = settings
        self._name = application_name
        self._meter = meter
        self._pool: asyncpg.Pool | None = None
        self._in_use = 0

    @property
    def in_use(self) -> int:
        """Connections that are handed out now."""
        return self._in_use

    @property
    def size(self) -> int:
        """Connections that are open now."""
        return self._pool.get_size() if self._pool is not None else 0

    async def open(self) -> None:
        """Create the pool; opens no connection."""
        self._pool = await asyncpg.create_pool(
            **connect_arguments(self._settings, self._name),
            min_size=0,
            max_size=self._settings.database_pool_size,
            max_inactive_connection_lifetime=60.0,
            reset=_no_reset,
        )

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection]:
        """Hand out a connection; cut it when the block ends with any exception.

        Raises:
            TimeoutError: none was free, or none could be opened, in time.
            OSError, asyncpg.PostgresError: the database refused.
        """
        if self._pool is None:
            raise RuntimeError("Database.open() comes first")
        began = time.monotonic()
        connection = await self._pool.acquire(timeout=self._settings.database_acquire_timeout)
        self._in_use += 1
        self._tell(began)
        try:
            yield connection
        except BaseException:
            # When the server ended it, the pool has let go of it already and refuses; the error to tell is the first.
            with contextlib.suppress(asyncpg.InterfaceError):
                connection.terminate()
            raise
        finally:
            self._in_use -= 1
            await self._pool.release(connection, timeout=self._settings.database_command_timeout)
            self._tell(None)

    async def suspect(self) -> None:
        """Replace every idle connection at its next use: the server behind them may have been demoted."""
        if self._pool is not None:
            await self._pool.expire_connections()

    async def close(self, timeout: float) -> None:
        """Close the pool within ``timeout`` seconds, cutting what has not ended by then."""
        if self._pool is None:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._pool.close()
        except DATABASE_ERRORS:
            self._pool.terminate()
        self._pool = None

    def _tell(self, began: float | None) -> None:
        if self._meter is not None:
            if began is not None:
                self._meter.acquired(time.monotonic() - began)
            self._meter.pool_size(self._in_use, self.size)


async def _no_reset(_: asyncpg.Connection) -> None:
    """Statements leave nothing behind (only SET LOCAL is used), so the reset's round trip is saved."""


def connect_arguments(settings: SharedSettings, application_name: str) -> dict[str, Any]:
    """Arguments of ``asyncpg.connect`` that are the same for the pool and for single connections."""
    return {
        "dsn": settings.database_url.get_secret_value(),
        "timeout": settings.database_connect_timeout,
        "command_timeout": settings.database_command_timeout,
        "statement_cache_size": settings.database_statement_cache,
        "server_settings": {"application_name": application_name},
    }


def waiting_helps(error: BaseException) -> bool:
    """Whether an error is the database's state (away, silent, read-only, full) and not a fault of ours."""
    if isinstance(error, TimeoutError | OSError | asyncpg.InterfaceError | asyncpg.InternalClientError):
        return True
    state = getattr(error, "sqlstate", None)
    return isinstance(error, asyncpg.PostgresError) and state is not None and state.startswith(_WAITING_HELPS)
