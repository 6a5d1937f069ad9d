"""Clients that were not written for this simulator: stock aioapns (h2) and jh2 get along with it."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import jh2.config
import jh2.connection
import jh2.events
from aioapns import APNs, NotificationRequest, PushType
from aioapns.connection import APNsProductionClientProtocol

from deploy.simulator.client import SimulatorClient
from deploy.simulator.process import Ready
from tests.simulator.wire import DEVICE, PAYLOAD, Peer, open_tls


async def test_stock_aioapns(apns: SimulatorClient, ready: Ready) -> None:
    apns.unregister("cd" * 32, since_ms=1_700_000_000_000)

    class Here(APNsProductionClientProtocol):
        APNS_SERVER = "localhost"
        APNS_PORT = ready.port

    async def quiet(request: Any, result: Any) -> None: ...

    client = APNs(
        key=Path(ready.key_file).read_text(),
        key_id=ready.key_id,
        team_id=ready.team_id,
        topic=ready.topics[0],
        max_connections=1,
        ssl_context=ssl.create_default_context(cafile=ready.ca_file),
        err_func=quiet,
    )
    client.pool.protocol_class = Here

    def push(device: str) -> Any:
        message = {"aps": {"alert": "hello"}}
        return client.send_notification(
            NotificationRequest(device_token=device, message=message, push_type=PushType.ALERT)
        )

    results = await asyncio.gather(*(push(f"{at:064x}") for at in range(50)), push("cd" * 32))
    assert [one.status for one in results] == ["200"] * 50 + ["410"]
    assert (results[-1].description, results[-1].timestamp) == ("Unregistered", 1_700_000_000_000)
    client.pool.close()
    stats = apns.wait(at_most={"connections_open": 0})
    assert (stats["requests"], stats["delivered"], stats["distinct_tokens"]) == (51, 50, 1)


async def test_jh2_finds_nothing_to_object_to(peer: Peer, apns: SimulatorClient, ready: Ready) -> None:
    reader, writer = await open_tls(ready)
    connection = jh2.connection.H2Connection(
        jh2.config.H2Configuration(client_side=True, header_encoding="utf-8")
    )
    connection.initiate_connection()
    for stream, changes in ((1, {}), (3, {"apns_topic": None}), (5, {"apns_priority": "5"})):
        connection.send_headers(stream, peer.headers(DEVICE, **changes))
        connection.send_data(stream, PAYLOAD, end_stream=True)
    connection.ping(b"12345678")
    writer.write(connection.data_to_send())
    statuses: dict[int, str] = {}
    ended: set[int] = set()
    async with asyncio.timeout(5):
        while len(ended) < 3:
            for event in connection.receive_data(await reader.read(65_536)):
                if isinstance(event, jh2.events.ResponseReceived):
                    statuses[event.stream_id] = dict(event.headers)[":status"]
                elif isinstance(event, jh2.events.StreamEnded):
                    ended.add(event.stream_id)
            writer.write(connection.data_to_send())
    assert statuses == {1: "200", 3: "400", 5: "200"}
    connection.close_connection()
    writer.write(connection.data_to_send())
    await apns.until(pings=1)
    writer.transport.abort()
