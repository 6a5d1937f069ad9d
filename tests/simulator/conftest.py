"""One simulator process for all tests here; each test starts from its defaults, on connections of its own."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from deploy.simulator.client import SimulatorClient
from deploy.simulator.process import Ready, SimulatorProcess
from tests.simulator.wire import Peer

Connect = Callable[..., Awaitable[Peer]]


@pytest.fixture(scope="session")
def simulator_process() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--seed", "7", "--receive-buffer", "4096") as process:
        yield process


@pytest.fixture
def ready(simulator_process: SimulatorProcess) -> Ready:
    return simulator_process.ready


@pytest.fixture
def apns(simulator_process: SimulatorProcess) -> SimulatorClient:
    """The control client of a simulator that has forgotten everything, connections included."""
    client = simulator_process.client
    client.reset("connections", "traffic", "devices", "scripts", "config")
    return client


@pytest.fixture
async def connect(apns: SimulatorClient, ready: Ready) -> AsyncIterator[Connect]:
    peers: list[Peer] = []

    async def new(**options: Any) -> Peer:
        peer = await Peer.connect(ready, **options)
        peers.append(peer)
        await peer.until(lambda: peer.settings)  # now the simulator knows the connection too
        return peer

    yield new
    for peer in peers:
        await peer.close()


@pytest.fixture
async def peer(connect: Connect) -> Peer:
    return await connect()
