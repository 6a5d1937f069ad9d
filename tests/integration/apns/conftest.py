"""Sessions against one simulator process; each test starts from its defaults, on connections of its own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.simulator.client import SimulatorClient
from deploy.simulator.process import Ready, SimulatorProcess
from drain.apns.model import ApnsTarget, Push, Reply, SessionLimits
from drain.apns.session import ApnsSession
from drain.apns.token import ProviderTokens

PATIENCE = 15.0
"""Seconds that a test waits for what must come; nothing waits that long when all is well."""


class Courier:
    """Makes sessions with short deadlines, sends pushes through them and gathers the replies."""

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.sessions: list[ApnsSession] = []
        self.tokens = ProviderTokens()
        self.calls: dict[str, int] = {}

    def target(self, **changes: Any) -> ApnsTarget:
        target = ApnsTarget(
            topic=self.ready.topics[0],
            host="localhost",
            port=self.ready.port,
            team_id=self.ready.team_id,
            key_id=self.ready.key_id,
            key_file=Path(self.ready.key_file),
            ca_file=Path(self.ready.ca_file),
        )
        return replace(target, **changes)

    async def session(
        self,
        target: ApnsTarget | None = None,
        connected: bool = True,
        tokens: ProviderTokens | None = None,
        **limits: Any,
    ) -> ApnsSession:
        quick: dict[str, Any] = {
            "push_timeout": 5.0,
            "backoff_base": 0.02,
            "backoff_cap": 0.2,
            "connect_timeout": 1.0,
            "handshake_timeout": 1.0,
            "close_timeout": 0.5,
        }
        session = ApnsSession(
            target or self.target(), SessionLimits(**{**quick, **limits}), tokens or self.tokens
        )
        self.sessions.append(session)
        await session.start()
        if connected:
            await until(lambda: session.connected)
        return session

    def push(self, **changes: Any) -> Push:
        push = Push(
            notification_id=str(uuid.uuid4()),
            device_token=uuid.uuid4().hex * 2,
            topic=self.ready.topics[0],
            push_type="alert",
            priority=10,
            expiration=None,
            collapse_id=None,
            body=b'{"aps":{"alert":"hello"}}',
        )
        return replace(push, **changes)

    def pushes(self, count: int, **changes: Any) -> list[Push]:
        return [self.push(**changes) for _ in range(count)]

    async def send(
        self,
        session: ApnsSession,
        pushes: Sequence[Push],
        within: float = PATIENCE,
        timeout: float = PATIENCE,
    ) -> list[Reply]:
        """Submit all in one turn of the loop; the replies in the order of the pushes. `within`: for start_by."""
        loop = asyncio.get_running_loop()
        replies: dict[int, Reply] = {}
        done = asyncio.Event()

        def on_reply(number: int, push: Push, reply: Reply) -> None:
            assert push is pushes[number]
            assert number not in replies, "a second reply for one push"
            replies[number] = reply
            if len(replies) == len(pushes):
                done.set()

        for number, push in enumerate(pushes):
            session.submit(push, loop.time() + within, lambda p, r, n=number: on_reply(n, p, r))
        if pushes:
            async with asyncio.timeout(timeout):
                await done.wait()
        return [replies[number] for number in range(len(pushes))]

    def sending(
        self, session: ApnsSession, pushes: Sequence[Push], **options: Any
    ) -> asyncio.Task[list[Reply]]:
        return asyncio.create_task(self.send(session, pushes, **options))


async def until(condition: Any, timeout: float = PATIENCE) -> None:
    """Wait for something without a signal of its own."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def simulator_process() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--seed", "7", "--receive-buffer", "4096") as process:
        yield process


@pytest.fixture
def apns(simulator_process: SimulatorProcess) -> SimulatorClient:
    """The control of a simulator that has forgotten everything, connections included."""
    client = simulator_process.client
    client.act("drop")
    client.wait(at_most={"connections_open": 0})
    client.reset()
    return client


@pytest.fixture
async def courier(apns: SimulatorClient, simulator_process: SimulatorProcess) -> AsyncIterator[Courier]:
    """Closes its sessions; none may leave a socket, a task, or a push without a reply."""
    courier = Courier(simulator_process.ready)
    before = asyncio.all_tasks()
    yield courier
    for session in courier.sessions:
        session.raise_if_broken()
        await session.close(0.0)
        assert session.open_connections == 0
        assert session.in_flight == session.queued == 0
    ours = [task for task in asyncio.all_tasks() - before if "drain" in Path(_file_of(task)).parts]
    assert not ours


def _file_of(task: asyncio.Task[Any]) -> str:
    coroutine: Any = task.get_coro()
    return str(coroutine.cr_code.co_filename)
