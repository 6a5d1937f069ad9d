"""The provider token: signature, claims, age, and the floor under new ones."""

import base64
import json
import time
from collections.abc import Callable

import pytest

from deploy.simulator.client import SimulatorClient
from deploy.simulator.process import Ready
from deploy.simulator.provider import provider_token
from tests.simulator.conftest import Connect
from tests.simulator.wire import Peer


def token(ready: Ready, age: float = 0, **changes: object) -> str:
    fields: dict[str, object] = {"key_id": ready.key_id, "team_id": ready.team_id, **changes}
    return "bearer " + provider_token(ready.key_file, issued_at=int(time.time() - age), **fields)  # type: ignore[arg-type]


def with_claims(text: str, **changes: object) -> str:
    head, claims, signature = text.split(".")
    decoded = json.loads(base64.urlsafe_b64decode(claims + "=="))
    encoded = base64.urlsafe_b64encode(json.dumps(decoded | changes).encode()).rstrip(b"=").decode()
    return f"{head}.{encoded}.{signature}"


BAD: dict[str, Callable[[Ready], str]] = {
    "InvalidProviderToken for an unknown key id": lambda ready: token(ready, key_id="NOSUCHKEY0"),
    "InvalidProviderToken for another team": lambda ready: token(ready, team_id="OTHERTEAM0"),
    "InvalidProviderToken for another algorithm": lambda ready: token(ready, algorithm="HS256"),
    "InvalidProviderToken for changed claims": lambda ready: with_claims(
        token(ready), iat=int(time.time()) - 1
    ),
    "InvalidProviderToken for a cut signature": lambda ready: token(ready)[:-4],
    "InvalidProviderToken for an iat in words": lambda ready: with_claims(token(ready), iat="now"),
    "InvalidProviderToken for tomorrow's token": lambda ready: token(ready, age=-86_400),
    "ExpiredProviderToken after an hour": lambda ready: token(ready, age=3_602),
}


@pytest.mark.parametrize("case", BAD)
async def test_refused(peer: Peer, ready: Ready, case: str) -> None:
    answer = await peer.ask(authorization=BAD[case](ready))
    assert (answer.status, answer.reason) == (403, case.split()[0])


async def test_good_until_it_is_an_hour_old(peer: Peer, ready: Ready, apns: SimulatorClient) -> None:
    assert (await peer.ask(authorization=token(ready, age=3_590))).status == 200
    fresh = token(ready)
    assert (await peer.ask(authorization=fresh)).status == 200
    apns.configure(clock_offset_seconds=3_605)
    assert (await peer.ask(authorization=fresh)).reason == "ExpiredProviderToken"


async def test_the_scheme_is_not_case_sensitive(peer: Peer, ready: Ready) -> None:
    assert (await peer.ask(authorization=token(ready).replace("bearer", "Bearer"))).status == 200


async def test_another_key_on_the_same_connection(
    connect: Connect, ready: Ready, apns: SimulatorClient
) -> None:
    key_file = apns.add_key("SECONDKEY1", ready.team_id)
    second = "bearer " + provider_token(key_file, "SECONDKEY1", ready.team_id)
    peer = await connect()
    assert (await peer.ask()).status == 200
    assert (await peer.ask(authorization=second)).reason == "UnrelatedKeyIdInToken"
    assert (await (await connect()).ask(authorization=second)).status == 200
    apns.revoke_key("SECONDKEY1")
    assert (await (await connect()).ask(authorization=second)).reason == "InvalidProviderToken"


async def test_a_key_of_the_other_environment(connect: Connect, ready: Ready, apns: SimulatorClient) -> None:
    key_file = apns.add_key("SANDBOXKEY", ready.team_id, refusal="BadEnvironmentKeyInToken")
    answer = await (await connect()).ask(
        authorization="bearer " + provider_token(key_file, "SANDBOXKEY", ready.team_id)
    )
    assert (answer.status, answer.reason) == (403, "BadEnvironmentKeyInToken")
    apns.revoke_key("SANDBOXKEY")


async def test_a_topic_specific_key(connect: Connect, ready: Ready, apns: SimulatorClient) -> None:
    apns.configure(topics=["com.example.app", "com.example.shop"])
    key_file = apns.add_key("SHOPKEY001", ready.team_id, topics=["com.example.shop"])
    shop = "bearer " + provider_token(key_file, "SHOPKEY001", ready.team_id)
    peer = await connect()
    assert (await peer.ask(authorization=shop, apns_topic="com.example.shop")).status == 200
    assert (await peer.ask(authorization=shop)).reason == "TopicDisallowed"
    apns.revoke_key("SHOPKEY001")


async def test_a_new_token_within_20_minutes_on_one_connection(
    connect: Connect, ready: Ready, apns: SimulatorClient
) -> None:
    apns.configure(token_floor="connection")
    first, second = token(ready, age=30), token(ready, age=20)
    peer = await connect()
    assert (await peer.ask(authorization=first)).status == 200
    refused = await peer.ask(authorization=second)
    assert (refused.status, refused.reason) == (429, "TooManyProviderTokenUpdates")
    assert (await peer.ask(authorization=first)).status == 200, "the previous token stays good"
    assert (await (await connect()).ask(authorization=second)).status == 200, (
        "another connection counts by itself"
    )
    apns.configure(clock_offset_seconds=1_201)
    assert (await peer.ask(authorization=second)).status == 200
    assert (await peer.ask(authorization=first)).status == 200, "replicas may roll over one after the other"
    assert (await peer.ask(authorization=token(ready, age=10))).reason == "TooManyProviderTokenUpdates"


async def test_a_new_token_within_20_minutes_of_one_key(
    connect: Connect, ready: Ready, apns: SimulatorClient
) -> None:
    apns.configure(token_floor="key")
    assert (await (await connect()).ask(authorization=token(ready, age=30))).status == 200
    refused = await (await connect()).ask(authorization=token(ready, age=20))
    assert refused.reason == "TooManyProviderTokenUpdates"


async def test_distinct_tokens_are_counted(peer: Peer, ready: Ready, apns: SimulatorClient) -> None:
    first, second = token(ready, age=30), token(ready, age=20)
    for text in (first, second, first, first):
        await peer.ask(authorization=text)
    assert apns.stats()["distinct_tokens"] == 2
    assert [(one["key_id"], one["uses"]) for one in apns.tokens()] == [(ready.key_id, 3), (ready.key_id, 1)]


async def test_a_connection_wedged_by_an_expired_token(
    connect: Connect, ready: Ready, apns: SimulatorClient
) -> None:
    apns.configure(wedge_on=["ExpiredProviderToken"])
    peer = await connect()
    assert (await peer.ask()).status == 200
    assert (await peer.ask(authorization=token(ready, age=4_000))).reason == "ExpiredProviderToken"
    assert (await peer.ask()).reason == "ExpiredProviderToken", "for ever, whatever the token"
    assert (await (await connect()).ask()).status == 200
