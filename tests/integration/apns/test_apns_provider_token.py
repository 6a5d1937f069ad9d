"""One provider token for everything that runs, and what a refused one leads to."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from deploy.simulator.client import SimulatorClient
from drain.apns.model import Answered, Reply
from drain.apns.token import LOOK_INTERVAL, ProviderTokens
from tests.integration.apns.conftest import Courier, until
from tests.integration.apns.test_apns_session import statuses


def reasons(replies: list[Reply]) -> list[str | None]:
    return [reply.reason if isinstance(reply, Answered) else type(reply).__name__ for reply in replies]


async def test_replicas_restarts_and_reconnects_use_one_token(
    courier: Courier, apns: SimulatorClient
) -> None:
    """pushy#811, #931, #568; sideshow/apns2#132: TooManyProviderTokenUpdates for thousands of rows."""
    apns.configure(token_floor="key")
    for _ in range(2):  # a restart: nothing is remembered
        replicas = [
            await courier.session(tokens=ProviderTokens(), streams_per_connection=5) for _ in range(3)
        ]
        for _ in range(3):
            sent = await asyncio.gather(*(courier.send(replica, courier.pushes(50)) for replica in replicas))
            assert [statuses(replies) for replies in sent] == [[200] * 50] * 3
            before = [replica.connects for replica in replicas]
            apns.act("drop")
            await until(
                lambda old=before, now=replicas: all(r.connects > n for r, n in zip(now, old, strict=True))
            )
        for replica in replicas:
            await replica.close(1.0)
    assert apns.stats()["distinct_tokens"] == 1
    assert sum(token["uses"] for token in apns.tokens()) == 900


async def test_an_expired_token_costs_each_push_one_more_request_on_a_fresh_connection(
    courier: Courier, apns: SimulatorClient
) -> None:
    """pushy#783, #732: the connection stays wedged after ExpiredProviderToken."""
    session = await courier.session(max_connections=1)
    apns.next_requests(1, "answer", reason="ExpiredProviderToken", for_connection=True)
    pushes = courier.pushes(20)
    replies = await courier.send(session, pushes)
    assert reasons(replies) == ["ExpiredProviderToken"] * 20
    assert not any(reply.renewed for reply in replies if isinstance(reply, Answered))
    assert statuses(await courier.send(session, pushes)) == [200] * 20
    stats = apns.stats()
    assert (stats["requests"], stats["connections_opened"], stats["distinct_tokens"]) == (40, 2, 2)
    assert session.token_changes == 2


async def test_a_token_expired_twice_in_a_row_is_said_to_be_our_fault_and_no_third_is_made(
    courier: Courier, apns: SimulatorClient
) -> None:
    session = await courier.session()
    apns.always("answer", reason="ExpiredProviderToken")
    answers = [(await courier.send(session, courier.pushes(1)))[0] for _ in range(4)]
    assert [answer.renewed for answer in answers if isinstance(answer, Answered)] == [False, True, True, True]
    assert apns.stats()["distinct_tokens"] == 2
    apns.clear_scripts()
    assert statuses(await courier.send(session, courier.pushes(1))) == [200]
    apns.next_requests(1, "answer", reason="ExpiredProviderToken")
    [answer] = await courier.send(session, courier.pushes(1))
    assert isinstance(answer, Answered)
    assert not answer.renewed, "a good answer came in between"


async def test_a_key_id_that_does_not_fit_the_connection_gets_another_connection(
    courier: Courier, apns: SimulatorClient
) -> None:
    session = await courier.session(max_connections=1)
    apns.next_requests(1, "answer", reason="UnrelatedKeyIdInToken", for_connection=True)
    answers = [(await courier.send(session, courier.pushes(1)))[0] for _ in range(2)]
    assert reasons(answers) == ["UnrelatedKeyIdInToken", None]
    stats = apns.stats()
    assert (stats["connections_opened"], stats["distinct_tokens"]) == (2, 1)


async def test_too_many_token_updates_make_no_new_token(courier: Courier, apns: SimulatorClient) -> None:
    session = await courier.session()
    assert statuses(await courier.send(session, courier.pushes(1))) == [200]
    apns.next_requests(5, "answer", reason="TooManyProviderTokenUpdates")
    replies = await courier.send(session, courier.pushes(5))
    assert reasons(replies) == ["TooManyProviderTokenUpdates"] * 5
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5
    issued = {token["issued_at"] for token in apns.tokens()}
    assert len(issued) <= 2
    assert all(at % (35 * 60) == 0 for at in issued), "only tokens that every replica has"


async def test_a_new_key_in_the_file_is_used_on_new_connections(
    courier: Courier, apns: SimulatorClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drain.apns.token.LOOK_INTERVAL", 0.05)
    assert LOOK_INTERVAL > 1
    key_file = tmp_path / "AuthKey.p8"
    key_file.write_bytes(Path(courier.ready.key_file).read_bytes())
    session = await courier.session(courier.target(key_file=key_file))
    right, wrong = courier.push(), courier.push()
    assert reasons(await courier.send(session, [right])) == [None]
    other = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "new.p8").write_bytes(
        other.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    os.replace(tmp_path / "new.p8", key_file)
    await asyncio.sleep(0.1)
    assert reasons(await courier.send(session, [wrong])) == ["InvalidProviderToken"]
    connections = {apns.arrivals(device=push.device_token)[0]["connection"] for push in (right, wrong)}
    assert len(connections) == 2, "a connection is bound to the first key that it saw"


async def test_sessions_of_one_process_share_the_token_and_its_renewal(
    courier: Courier, apns: SimulatorClient
) -> None:
    one, two = await courier.session(), await courier.session()
    apns.next_requests(1, "answer", reason="ExpiredProviderToken")
    await courier.send(one, courier.pushes(1))
    assert statuses(await courier.send(two, courier.pushes(1))) == [200]
    assert apns.stats()["distinct_tokens"] == 2
    assert one.token_changes == two.token_changes == 2
