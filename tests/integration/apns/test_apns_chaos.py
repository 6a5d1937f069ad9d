"""Faults of every kind, mixed at random: whatever happens, each push has one reply, and the reply is true."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from deploy.simulator.client import Json, SimulatorClient, step
from drain.apns.model import Answered, MaybeDelivered, NoAnswer, NotSent, Push, Reply
from tests.integration.apns.conftest import Courier

FAULTS = [
    step("reset", code="REFUSED_STREAM"),
    step("reset", code="CANCEL"),
    step("reset", code="INTERNAL_ERROR"),
    step("goaway", last_stream_id="this"),
    step("goaway", last_stream_id="before"),
    step("goaway", last_stream_id="max", reason="Shutdown"),
    step("drop"),
    step("drop", rst=False),
    step("close"),
    step("silence"),
    step("answer", delay=0.6),
    step("answer", reason="InternalServerError"),
    step("answer", reason="Shutdown"),
    step("answer", reason="IdleTimeout"),
    step("answer", status=502, body="<html>", body_frames=3),
    step("answer", unfinished=True),
    step("stream_limit", streams=1),
    step("stream_limit", streams=20),
    step("mute"),
    step("garbage", hex="ff" * 20),
]


async def gathered(courier: Courier, count: int) -> list[tuple[Push, Reply]]:
    """Push through the storm with a window of 100, each push once."""
    session = await courier.session(
        push_timeout=0.5,
        ping_interval=0.3,
        ping_timeout=0.3,
        drain_seconds=0.5,
        backoff_base=0.005,
        backoff_cap=0.02,
        streams_per_connection=30,
    )
    loop = asyncio.get_running_loop()
    got: list[tuple[Push, Reply]] = []
    waiting = iter(courier.pushes(count))
    done = asyncio.Event()

    def reply(push: Push, answer: Reply) -> None:
        got.append((push, answer))
        following = next(waiting, None)
        if following is not None:
            session.submit(following, loop.time() + 1.0, reply)
        elif len(got) == count:
            done.set()

    for _ in range(100):
        session.submit(next(waiting), loop.time() + 1.0, reply)
    async with asyncio.timeout(40):
        await done.wait()
    assert session.in_flight == session.queued == 0
    return got


async def test_every_push_has_one_true_reply_whatever_the_connections_go_through(
    courier: Courier, apns: SimulatorClient
) -> None:
    calm: list[Json] = [step("pass", times=40)]
    apns.script([one for fault in FAULTS for one in [*calm, fault]], end="repeat_all")
    got = await gathered(courier, 4000)
    assert len({push.notification_id for push, _ in got}) == len(got) == 4000
    replies = Counter(type(reply).__name__ for _, reply in got)
    assert set(replies) == {"Answered", "NotSent", "MaybeDelivered", "NoAnswer"}, "the storm had everything"

    arrived = {token: seen["requests"] for token, seen in apns.devices().items()}
    delivered = {token: seen["delivered"] for token, seen in apns.devices().items()}
    assert max(arrived.values()) == 1, "nothing is ever sent twice from within"
    for push, reply in got:
        match reply:
            case NotSent():
                assert not delivered.get(push.device_token), "said to be unsent, and the device has it"
            case Answered(status=200):
                assert delivered[push.device_token] == 1
            case Answered() | MaybeDelivered() | NoAnswer():
                pass
    uncertain = replies["MaybeDelivered"] + replies["NoAnswer"]
    assert uncertain < 4000 / 2


@pytest.mark.slow
async def test_sixty_thousand_pushes_where_apns_refuses_after_fifty_thousand(
    courier: Courier, apns: SimulatorClient
) -> None:
    """edamov/pushok#169; with the limits that a production session has."""
    apns.configure(requests_per_connection=50_000)
    session = await courier.session(max_connections=1)
    for _ in range(120):
        replies = await courier.send(session, courier.pushes(500), timeout=60)
        assert {reply.status for reply in replies if isinstance(reply, Answered)} == {200}
        assert len(replies) == 500
    stats = apns.stats()
    assert (stats["requests"], stats["delivered"], stats["refused"]) == (60_000, 60_000, 0)
    assert stats["connections_opened"] == 2
