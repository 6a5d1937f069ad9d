"""Getting in: refused, held, slow and closed connections; certificates good and bad, the client's too."""

import asyncio
import ssl
import time

import pytest

from deploy.simulator.client import SimulatorClient
from deploy.simulator.process import Ready
from tests.simulator.conftest import Connect
from tests.simulator.wire import Peer, open_tls


async def test_the_port_refuses_and_comes_back(connect: Connect, apns: SimulatorClient, ready: Ready) -> None:
    apns.configure(accept="off")
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            await open_tls(ready)
    assert apns.stats()["listening"] is False
    apns.configure(accept="normal")
    assert (await (await connect()).ask()).status == 200


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_connections_are_accepted_and_closed(apns: SimulatorClient, ready: Ready, how: str) -> None:
    apns.configure(accept=how)
    with pytest.raises((ConnectionError, ssl.SSLError)):
        await open_tls(ready)


async def test_connections_are_held_without_a_word(apns: SimulatorClient, ready: Ready) -> None:
    apns.configure(accept="hold")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await open_tls(ready)


async def test_closed_right_after_the_handshake(apns: SimulatorClient, ready: Ready) -> None:
    apns.configure(accept="close_after_handshake")
    peer = await Peer.connect(ready)
    await peer.gone()
    await peer.close()
    assert apns.wait(connections_opened=1, at_most={"connections_open": 0})["requests"] == 0


async def test_a_slow_handshake(connect: Connect, apns: SimulatorClient) -> None:
    apns.configure(handshake_delay_seconds=0.2)
    started = time.monotonic()
    assert (await (await connect()).ask()).status == 200
    assert time.monotonic() - started >= 0.2


async def test_alpn(connect: Connect, apns: SimulatorClient, ready: Ready) -> None:
    assert (await (await connect(alpn=False)).ask()).status == 200, "Apple does not insist"
    apns.configure(require_alpn=True)
    peer = await Peer.connect(ready, alpn=False)
    await peer.gone()
    await peer.close()
    assert (await (await connect()).ask()).status == 200


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("wrong_name", "Hostname mismatch"),
        ("expired", "expired"),
        ("not_yet_valid", "not yet valid"),
        ("unknown_ca", "unable to get local issuer"),
        ("self_signed", "self.signed"),
    ],
)
async def test_bad_server_certificates(
    connect: Connect, apns: SimulatorClient, ready: Ready, kind: str, complaint: str
) -> None:
    apns.configure(certificate=kind)
    with pytest.raises(ssl.SSLCertVerificationError, match=complaint):
        await open_tls(ready)
    apns.configure(certificate="good")
    assert (await (await connect()).ask()).status == 200


async def test_names_of_the_good_certificate(apns: SimulatorClient, ready: Ready) -> None:
    for name in ("localhost", "127.0.0.1"):
        _, writer = await open_tls(ready, name=name)
        writer.transport.abort()
    with pytest.raises(ssl.SSLCertVerificationError):
        await open_tls(ready, name="api.push.apple.com")


async def test_a_client_certificate_instead_of_a_token(
    connect: Connect, apns: SimulatorClient, ready: Ready
) -> None:
    apns.configure(client_certificate="required")
    peer = await connect(client_cert=ready.client_cert_file)
    assert (await peer.ask(authorization=None)).status == 200
    assert (await peer.ask(authorization=None, apns_topic=None)).status == 200, (
        "the certificate names the app"
    )
    assert apns.connections()[0]["client_certificate"] is True
    for refused in (None, ready.unknown_client_cert_file):
        peer = await Peer.connect(
            ready, client_cert=refused
        )  # TLS 1.3: the client learns of it after the handshake
        await peer.gone()
        await peer.close()
    stats = apns.wait(handshakes_failed=2)
    assert (stats["connections_opened"], stats["requests"]) == (1, 2)


async def test_a_client_certificate_that_is_optional(
    connect: Connect, apns: SimulatorClient, ready: Ready
) -> None:
    apns.configure(client_certificate="optional")
    assert (await (await connect()).ask(authorization=None)).reason == "MissingProviderToken"
    assert (await (await connect(client_cert=ready.client_cert_file)).ask(authorization=None)).status == 200
