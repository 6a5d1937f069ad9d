"""Which rows go together, and what became of each: decided without a broker."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from relay.flight import CONFIRMED, PENDING, REFUSED, Flight
from relay.message import Encoder, Message, MessageConfig
from relay.model import PUBLISHED, Failed, Left, Nacked, OutboxRow, Published, Rejected, Unroutable, Verdict
from relay.waves import ALONE_BYTES, Batch

ENCODER = Encoder(MessageConfig())
PROVEN = {"events"}


def row(number: int, key: str | None = None, exchange: str | None = None, body: bytes = b"{}") -> OutboxRow:
    return OutboxRow(
        id=number,
        event_id=UUID(int=number),
        aggregate_type="order",
        aggregate_id="1",
        event_type="order.placed",
        exchange=exchange,
        routing_key=None,
        ordering_key=key,
        body=body,
        content_type="application/json",
        headers="{}",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        attempts=0,
    )


def batch(*rows: OutboxRow, one_at_a_time: bool = False, accept: bool = False) -> Batch:
    return Batch(rows, ENCODER, 131072, one_at_a_time=one_at_a_time, accept_unroutable=accept)


def confirm(of: Batch, wave: list[int]) -> None:
    assert of.judge(wave, bytes([CONFIRMED] * len(wave)), {}) == []


def names(verdicts: list[Verdict]) -> list[str]:
    return [type(verdict).__name__ for verdict in verdicts]


def test_rows_without_a_key_go_all_at_once() -> None:
    b = batch(*[row(n) for n in range(1, 101)])
    wave = b.next_wave(PROVEN)
    assert wave == list(range(100))
    confirm(b, wave)
    assert b.next_wave(PROVEN) == []
    assert b.finish("") == [PUBLISHED] * 100


def test_no_row_of_a_key_is_sent_before_the_one_ahead_of_it_is_confirmed() -> None:
    b = batch(row(1, "a"), row(2, "a"), row(3, "b"), row(4), row(5, "a"))
    waves = []
    while wave := b.next_wave(PROVEN):
        waves.append(wave)
        confirm(b, wave)
    assert waves == [[0, 2, 3], [1], [4]]


def test_a_row_that_is_not_published_holds_back_its_own_key_and_no_other() -> None:
    b = batch(row(1, "a"), row(2, "b"), row(3, "a"), row(4, "b"), row(5))
    wave = b.next_wave(PROVEN)
    assert wave == [0, 1, 4]
    assert b.judge(wave, bytes([REFUSED, CONFIRMED, CONFIRMED]), {}) == []
    wave = b.next_wave(PROVEN)
    assert wave == [3]
    confirm(b, wave)
    assert b.next_wave(PROVEN) == []
    verdicts = b.finish("")
    assert names(verdicts) == ["Nacked", "Published", "Left", "Published", "Published"]
    assert verdicts[2] == Left("behind row 1 of its ordering key")


def test_a_row_that_can_not_be_encoded_holds_back_its_key_too() -> None:
    b = batch(row(1, "a", body=b"no json"), row(2, "a"), row(3, "b"))
    assert b.next_wave(PROVEN) == [2]
    confirm(b, [2])
    assert b.next_wave(PROVEN) == []
    assert names(b.finish("")) == ["Rejected", "Left", "Published"]


def test_the_first_row_to_an_unproven_exchange_goes_alone_and_last() -> None:
    b = batch(row(1, exchange="new"), row(2), row(3, exchange="new"))
    assert b.next_wave(PROVEN) == [1]
    confirm(b, [1])
    assert b.next_wave(PROVEN) == [0]
    confirm(b, [0])
    assert b.next_wave(PROVEN | {"new"}) == [2]


def test_a_missing_exchange_fails_all_its_rows_with_one_lost_channel() -> None:
    b = batch(
        row(1, exchange="gone"),
        row(2),
        *[row(n, exchange="gone") for n in range(3, 50)],
        row(50, "k", "gone"),
        row(51, "k"),
    )
    confirm(b, b.next_wave(PROVEN))
    wave = b.next_wave(PROVEN)
    assert wave == [0]
    assert b.judge(wave, bytes([PENDING]), {}) == [0]
    b.channel_closed(wave, [0], 404, "NOT_FOUND - no exchange 'gone' in vhost '/'")
    assert b.next_wave(PROVEN) == []
    verdicts = b.finish("")
    assert names(verdicts) == ["Failed", "Published", *["Failed"] * 48, "Left"]
    assert verdicts[0] == Failed("NOT_FOUND - no exchange 'gone' in vhost '/'")


def test_a_refused_topic_fails_its_own_row_only() -> None:
    b = batch(row(1, exchange="e"), row(2, exchange="e"))
    b.channel_closed(
        b.next_wave(set()), [0], 403, "ACCESS_REFUSED - access to topic 'x' in exchange 'e' refused"
    )
    assert b.next_wave(set()) == [1]


def test_a_large_body_goes_alone() -> None:
    large = b'"' + b"x" * ALONE_BYTES + b'"'
    b = batch(row(1, body=large), row(2), row(3, body=large), row(4))
    assert b.next_wave(PROVEN) == [1, 3]
    assert b.next_wave(PROVEN) == [0]
    assert b.next_wave(PROVEN) == [2]


def test_a_write_is_bounded_and_the_rest_follows_in_order() -> None:
    body = b'"' + b"x" * (ALONE_BYTES - 2) + b'"'
    for key in (None, "k"):
        b = batch(*[row(n, key and f"{key}{n}", body=body) for n in range(1, 41)])
        waves = []
        while wave := b.next_wave(PROVEN):
            waves.append(wave)
            confirm(b, wave)
        assert [len(wave) for wave in waves] == [16, 16, 8]
        assert [i for wave in waves for i in wave] == list(range(40))
    b = batch(row(1, "k", body=body), *[row(n, body=body) for n in range(2, 20)], row(20, "k"))
    assert 19 not in b.next_wave(PROVEN)


def test_after_a_closed_channel_the_rest_goes_one_at_a_time_in_order() -> None:
    b = batch(*[row(n) for n in range(1, 6)], row(6, "k"), row(7, "k"))
    wave = b.next_wave(PROVEN)
    assert wave == [0, 1, 2, 3, 4, 5]
    unanswered = b.judge(wave, bytes([CONFIRMED, PENDING, PENDING, CONFIRMED, PENDING, PENDING]), {})
    assert unanswered == [1, 2, 4, 5]
    b.channel_closed(wave, unanswered, 406, "PRECONDITION_FAILED - message size 9 is larger than 8")
    assert b.next_wave(PROVEN) == [1]
    confirm(b, [1])
    assert b.next_wave(PROVEN) == [2]
    assert b.judge([2], bytes([PENDING]), {}) == [2]
    b.channel_closed([2], [2], 406, "PRECONDITION_FAILED - message size 9 is larger than 8")
    rest = []
    while wave := b.next_wave(PROVEN):
        rest.append(wave)
        confirm(b, wave)
    assert rest == [[4], [5], [6]]
    assert names(b.finish("")) == ["Published", "Published", "Failed", *["Published"] * 4]


def test_suspects_go_one_at_a_time() -> None:
    b = batch(row(1), row(2, "a"), row(3, "a"), one_at_a_time=True)
    waves = []
    while wave := b.next_wave(PROVEN):
        waves.append(wave)
        confirm(b, wave)
    assert waves == [[0], [1], [2]]


def test_unroutable_is_the_rows_fault_or_counts_as_published_by_the_setting() -> None:
    for accept, verdict in ((False, Unroutable("unroutable: 312")), (True, PUBLISHED)):
        b = batch(row(1), row(2), row(3), accept=accept)
        wave = b.next_wave(PROVEN)
        assert b.judge(wave, bytes([CONFIRMED] * 3), {1: "unroutable: 312"}) == []
        assert b.finish("") == [PUBLISHED, verdict, PUBLISHED]
        assert b.unroutable == ["events"]


def test_an_accepted_unroutable_message_is_published_only_once_it_is_confirmed() -> None:
    b = batch(row(1), accept=True)
    assert b.judge(b.next_wave(PROVEN), bytes([PENDING]), {0: "unroutable"}) == [0]
    assert b.finish("late") == [Left("late")]
    b = batch(row(1))
    assert b.judge(b.next_wave(PROVEN), bytes([PENDING]), {0: "unroutable"}) == []
    assert b.finish("late") == [Unroutable("unroutable")]


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b", "c"]), st.sampled_from(["events", "x", "y"]), st.booleans()
        ),
        max_size=30,
    ),
    answers=st.randoms(use_true_random=False),
    one_at_a_time=st.booleans(),
)
def test_whatever_the_broker_answers_every_row_gets_one_verdict_and_keys_keep_their_order(
    rows: list[tuple[str | None, str, bool]], answers: object, one_at_a_time: bool
) -> None:
    """A model broker that confirms, refuses, returns, or closes the channel at random."""
    import random

    assert isinstance(answers, random.Random)
    given_rows = [
        row(n + 1, key, exchange, b"{}" if good else b"bad") for n, (key, exchange, good) in enumerate(rows)
    ]
    b = batch(*given_rows, one_at_a_time=one_at_a_time)
    proven: set[str] = set()
    sent: list[int] = []
    delivered: list[int] = []
    turns = 0
    while wave := b.next_wave(proven):
        turns += 1
        assert turns <= 4 * len(rows) + 4
        keys = [given_rows[i].ordering_key for i in wave if given_rows[i].ordering_key is not None]
        assert len(keys) == len(set(keys)), "two rows of one key in flight"
        states = bytearray(answers.choice([CONFIRMED, CONFIRMED, REFUSED, PENDING]) for _ in wave)
        returned = {place: "back" for place in range(len(wave)) if answers.random() < 0.1}
        delivered += [
            i for place, i in enumerate(wave) if states[place] == CONFIRMED and place not in returned
        ]
        sent += wave
        unanswered = b.judge(wave, states, returned)
        if unanswered:
            b.channel_closed(wave, unanswered, answers.choice([404, 406]), "closed")
        else:
            proven |= b.exchanges(wave)
    verdicts = b.finish("never")
    assert Left("never") not in verdicts
    assert [i for i, verdict in enumerate(verdicts) if isinstance(verdict, Published)] == sorted(delivered)
    for key in ("a", "b", "c"):
        of_key = [i for i, r in enumerate(given_rows) if r.ordering_key == key]
        published = [i for i in of_key if isinstance(verdicts[i], Published)]
        assert published == of_key[: len(published)], "a row overtook the one ahead of it"
        assert [i for i in delivered if i in of_key] == published, "confirmed out of order"
    assert all(isinstance(verdicts[i], Rejected | Left) for i, (_, _, good) in enumerate(rows) if not good)
    assert not [i for i, (_, _, good) in enumerate(rows) if not good and i in sent]
    assert all(isinstance(v, Published | Rejected | Failed | Left | Nacked | Unroutable) for v in verdicts)


def flight(loop: asyncio.AbstractEventLoop, first: int, count: int) -> Flight:
    messages = [Message(100 + n, "events", b"", b"", b"") for n in range(count)]
    return Flight(first, messages, loop.create_future())


async def test_confirms_settle_by_tag_one_by_one_and_many_at_once_in_any_order() -> None:
    f = flight(asyncio.get_running_loop(), 11, 6)
    f.settle(13, False, CONFIRMED)
    f.settle(13, False, CONFIRMED)
    f.settle(14, True, CONFIRMED)
    assert not f.done.done()
    assert list(f.states) == [CONFIRMED] * 4 + [PENDING] * 2
    f.settle(12, True, REFUSED)
    f.settle(15, False, REFUSED)
    assert not f.done.done()
    f.settle(0, True, CONFIRMED)
    assert f.done.done()
    assert list(f.states) == [CONFIRMED] * 4 + [REFUSED, CONFIRMED]


async def test_confirms_of_an_earlier_flight_or_of_no_flight_are_nobodys() -> None:
    f = flight(asyncio.get_running_loop(), 11, 2)
    for tag in (3, 10, 13, 99):
        f.settle(tag, False, CONFIRMED)
    f.settle(10, True, CONFIRMED)
    assert list(f.states) == [PENDING, PENDING]
    f.settle(99, True, CONFIRMED)
    assert f.done.done()


async def test_a_returned_message_is_matched_by_its_row_and_only_while_unconfirmed() -> None:
    f = flight(asyncio.get_running_loop(), 1, 3)
    assert f.give_back(101, "why")
    assert f.returned == {1: "why"}
    f.settle(1, False, CONFIRMED)
    assert not f.give_back(100, "after its confirm")
    assert not f.give_back(999, "not ours")
    assert not f.give_back(None, "no header")


@given(
    count=st.integers(1, 40),
    answers=st.lists(st.tuples(st.integers(0, 45), st.booleans(), st.booleans()), max_size=60),
)
def test_confirms_agree_with_a_plain_model(count: int, answers: list[tuple[int, bool, bool]]) -> None:
    loop = asyncio.new_event_loop()
    try:
        f = flight(loop, 3, count)
        model = [PENDING] * count
        for tag, multiple, ack in answers:
            state = CONFIRMED if ack else REFUSED
            f.settle(tag, multiple, state)
            for position in range(count):
                hit = (tag == 0 or position + 3 <= tag) if multiple else position + 3 == tag
                if hit and model[position] == PENDING:
                    model[position] = state
        assert list(f.states) == model
        assert f.done.done() == (PENDING not in model)
    finally:
        loop.close()
