"""Every name below the public interface of aioapns and jh2 that drain/apns stands on. An upgrade starts here."""

from __future__ import annotations

import asyncio
import inspect
from importlib import metadata
from pathlib import Path

import hpack
import pytest
from aioapns.connection import (
    APNsBaseClientProtocol,
    APNsBaseConnectionPool,
    APNsTLSClientProtocol,
    AuthorizationHeaderProvider,
    H2Protocol,
)
from jh2._hazmat import Decoder, Encoder, HPACKError

from drain.apns.model import ApnsTarget, SessionLimits
from drain.apns.pool import ApnsPool
from drain.apns.protocol import ApnsConnection
from drain.apns.token import ProviderToken


def test_the_versions_are_those_that_were_read() -> None:
    assert metadata.version("aioapns") == "4.0"
    assert metadata.version("jh2") == "5.0.15"


def test_the_classes_we_stand_on() -> None:
    assert issubclass(ApnsConnection, APNsTLSClientProtocol)
    assert issubclass(APNsTLSClientProtocol, APNsBaseClientProtocol)
    assert issubclass(APNsBaseClientProtocol, H2Protocol)
    assert issubclass(H2Protocol, asyncio.Protocol)
    assert issubclass(ApnsPool, APNsBaseConnectionPool)
    assert issubclass(ProviderToken, AuthorizationHeaderProvider)
    assert list(inspect.signature(AuthorizationHeaderProvider.get_header).parameters) == ["self"]


def test_constructors_take_what_we_give() -> None:
    assert list(inspect.signature(APNsBaseClientProtocol).parameters) == [
        "apns_topic",
        "loop",
        "on_connection_lost",
        "auth_provider",
    ]
    parameters = list(inspect.signature(APNsBaseConnectionPool).parameters)
    assert parameters[:3] == ["topic", "max_connections", "max_connection_attempts"]


@pytest.mark.parametrize(
    "name",
    [
        "connection_made",
        "data_received",
        "connection_lost",
        "flush",
        "is_busy",
        "close",
    ],
)
def test_what_we_override_or_call_in_the_protocol_is_there(name: str) -> None:
    assert hasattr(APNsTLSClientProtocol, name)


def test_what_starts_the_timer_that_closes_idle_connections_is_overridden() -> None:
    callers = {
        name
        for base in (H2Protocol, APNsBaseClientProtocol, APNsTLSClientProtocol)
        for name, function in vars(base).items()
        if inspect.isfunction(function) and "refresh_inactivity_timer()" in inspect.getsource(function)
    }
    assert callers == {"connection_made", "flush"}
    assert callers <= set(vars(ApnsConnection))


def test_closing_closes_the_transport_and_nothing_else_of_aioapns_runs() -> None:
    source = inspect.getsource(APNsTLSClientProtocol.close)
    assert "self.transport.close()" in source
    assert "inactivity_timer" in source
    mixed_in = {
        name
        for name in (
            "send_notification",
            "on_response_received",
            "on_data_received",
            "on_connection_terminated",
        )
        if name in vars(ApnsConnection)
    }
    assert not mixed_in, "those belong to the code paths that are replaced as a whole"


async def test_the_attributes_we_use() -> None:
    loop = asyncio.get_running_loop()
    protocol = APNsTLSClientProtocol("topic", loop)
    assert protocol.loop is loop
    assert protocol.transport is None
    assert protocol.inactivity_timer is None
    assert protocol.APNS_SERVER == "api.push.apple.com"
    assert protocol.APNS_PORT == 443
    assert protocol.INACTIVITY_TIME == 10
    pool = APNsBaseConnectionPool("topic", 3, 1)
    assert pool.connections == []
    assert pool.max_connections == 3
    assert pool.loop is loop
    assert pool.protocol_class is not None
    for name in ("create_connection", "discard_connection", "close"):
        assert callable(getattr(pool, name))


async def test_our_attributes_do_not_shadow_aioapns_ones() -> None:
    target = ApnsTarget(topic="com.example.app", certificate_file=Path("none.pem"))
    theirs = set(vars(APNsTLSClientProtocol("topic", asyncio.get_running_loop())))
    ours = set(vars(ApnsConnection(_Owner(), target, SessionLimits(), 60.0))) - theirs  # type: ignore[arg-type]
    assert ours & set(dir(APNsTLSClientProtocol)) == {"APNS_SERVER", "APNS_PORT"}
    pools = set(vars(APNsBaseConnectionPool("topic")))
    assert not {"breaker", "problem", "connects", "connect_failures"} & (
        pools | set(dir(APNsBaseConnectionPool))
    )


class _Owner:
    pass


def test_jh2s_encoder_never_indexes_what_it_must_not() -> None:
    """APNs' rule for :path and authorization; read back by another implementation."""
    headers = [
        (b":path", b"/3/device/ab", True),
        (b"apns-topic", b"t", False),
        (b"authorization", b"bearer x", True),
    ]
    encoder, decoder = Encoder(), hpack.Decoder()
    for _ in range(2):
        seen = decoder.decode(encoder.encode(headers), raw=True)
        assert [(name, value, not header.indexable) for header in seen for name, value in [header]] == headers
    assert encoder.encode(headers).count(b"bearer") <= 1
    assert len(decoder.header_table.dynamic_entries) == 1


def test_jh2s_encoder_announces_a_smaller_table() -> None:
    encoder, decoder = Encoder(), hpack.Decoder()
    encoder.header_table_size = 0
    block = encoder.encode([(b"apns-topic", b"t", False)])
    assert [tuple(header) for header in decoder.decode(block, raw=True)] == [(b"apns-topic", b"t")]
    assert decoder.header_table_size == 0


def test_jh2s_decoder_says_what_is_wrong() -> None:
    with pytest.raises(HPACKError):
        Decoder().decode(b"\xfe", raw=True)
    assert Decoder().decode(Encoder().encode([(b":status", b"200", False)]), raw=True) == [
        (b":status", b"200", False)
    ]
