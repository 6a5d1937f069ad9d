"""Scripted answers: one after the other, per device, per push, per connection, for ever."""

import time

import pytest

from deploy.simulator.client import SimulatorClient, SimulatorError, step
from tests.simulator.conftest import Connect
from tests.simulator.wire import Peer

A, B = "aa" * 32, "bb" * 32
BUSY = step("answer", reason="ServiceUnavailable", headers={"retry-after": "7"})


async def statuses(peer: Peer, *devices: str) -> list[int]:
    return [(await peer.ask(device)).status for device in devices]


async def test_a_device_gets_its_steps_one_after_the_other(peer: Peer, apns: SimulatorClient) -> None:
    apns.script([BUSY, step("answer", reason="TooManyRequests"), step("pass")], device=A)
    first = await peer.ask(A)
    assert (first.status, first.reason, first.headers["retry-after"]) == (503, "ServiceUnavailable", "7")
    assert await statuses(peer, B, A, A, A) == [200, 429, 200, 200]


async def test_the_last_step_may_stay(peer: Peer, apns: SimulatorClient) -> None:
    apns.script([step("pass"), BUSY], device=A, end="repeat_last")
    assert await statuses(peer, A, A, A, A) == [200, 503, 503, 503]
    apns.script([step("pass"), BUSY], device=A, end="repeat_all")
    assert await statuses(peer, A, A, A, A) == [200, 503, 200, 503]


async def test_every_answer_is_503(peer: Peer, apns: SimulatorClient) -> None:
    apns.always("answer", reason="ServiceUnavailable")
    assert await statuses(peer, A, B, A) == [503, 503, 503]
    apns.clear_scripts()
    assert await statuses(peer, A) == [200]


async def test_a_devices_own_script_goes_first(peer: Peer, apns: SimulatorClient) -> None:
    apns.always("answer", reason="ServiceUnavailable")
    apns.script([step("pass"), step("answer", reason="InternalServerError")], device=A)
    assert await statuses(peer, A, A, A, B) == [200, 500, 503, 503]
    apns.clear_scripts(device=A)
    assert await statuses(peer, A) == [503]


async def test_the_first_attempt_of_every_push_fails(peer: Peer, apns: SimulatorClient) -> None:
    apns.script([BUSY], scope="each_push")
    ids = [f"00000000-0000-4000-8000-{at:012d}" for at in range(3)]
    assert [(await peer.ask(apns_id=one)).status for one in ids + ids] == [503] * 3 + [200] * 3


async def test_each_device_has_its_own_copy(peer: Peer, apns: SimulatorClient) -> None:
    apns.script([BUSY], scope="each_device")
    assert await statuses(peer, A, B, A, B) == [503, 503, 200, 200]


async def test_403_for_ever_after_the_first_on_each_connection(
    connect: Connect, apns: SimulatorClient
) -> None:
    wedge = step("answer", reason="ExpiredProviderToken", for_connection=True)
    apns.script([step("pass"), wedge], scope="each_connection")
    one, other = await connect(), await connect()
    assert await statuses(one, A, A, A) == [200, 403, 403]
    assert await statuses(other, A, A) == [200, 403]
    apns.clear_scripts()
    assert await statuses(one, A) == [403], "that connection stays wedged"
    assert await statuses(await connect(), A) == [200]
    apns.reset("scripts")
    assert await statuses(one, A) == [200]


async def test_requests_that_are_wrong_use_up_no_step(peer: Peer, apns: SimulatorClient) -> None:
    apns.script([BUSY])
    assert (await peer.ask(apns_topic=None)).reason == "MissingTopic"
    assert (await peer.ask()).status == 503
    apns.script([BUSY], before_checks=True)
    assert (await peer.ask(apns_topic=None)).status == 503
    assert (await peer.ask(apns_topic=None)).reason == "MissingTopic"


async def test_a_share_of_the_requests(peer: Peer, apns: SimulatorClient) -> None:
    apns.always("answer", reason="InternalServerError", chance=0.3)
    answers = await statuses(peer, *[A] * 200)
    assert 30 < answers.count(500) < 90


async def test_a_delay_of_its_own(peer: Peer, apns: SimulatorClient) -> None:
    apns.script([step("answer", delay=0.3)])
    started = time.monotonic()
    slow = peer.push(A)
    assert await statuses(peer, B) == [200]
    assert not peer.answers[slow].ended, "only that request is slow"
    assert (await peer.answer(slow)).status == 200
    assert time.monotonic() - started >= 0.299


async def test_held_requests_are_answered_when_released(peer: Peer, apns: SimulatorClient) -> None:
    apns.script([step("pass", times=2), step("hold")], end="repeat_last")
    streams = [peer.push() for _ in range(6)]
    stats = apns.wait(requests=6, held=4)
    assert (stats["answered"], stats["delivered"], stats["pending"]) == (2, 2, 4)
    assert apns.release(1) == 1
    assert (await peer.answer(streams[2])).status == 200
    assert apns.release() == 3
    assert {(await peer.answer(stream)).status for stream in streams} == {200}


async def test_an_unknown_reason_and_status(peer: Peer, apns: SimulatorClient) -> None:
    apns.script([step("answer", status=418, reason="Teapot"), step("answer", reason="NewInThisYear")])
    first, second = await peer.ask(), await peer.ask()
    assert (first.status, first.reason, second.status, second.reason) == (418, "Teapot", 400, "NewInThisYear")


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([{"do": "dance"}], "dance"),
        ([step("answer", colour="red")], "colour"),
        ([step("reset", code="NO_SUCH_CODE")], "NO_SUCH_CODE"),
        ([step("goaway", last_stream_id="soon")], "last_stream_id"),
        ([step("stream_limit")], "streams"),
        ("none", "list"),
    ],
)
def test_a_step_that_is_wrong_is_refused_by_name(
    apns: SimulatorClient, steps: list[dict[str, object]], named: str
) -> None:
    with pytest.raises(SimulatorError, match=named):
        apns.call("POST", "/scripts", {"steps": steps})
