"""Every answer of APNs has one action: the table line by line, what is not in it, and totality."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drain.apns.answers import (
    _TABLE,
    REASON_CLASSES,
    TOKEN_UPDATE_SECONDS,
    ConfigError,
    Failed,
    GiveBack,
    Outcome,
    RefreshToken,
    Retry,
    RetryPolicy,
    RowFacts,
    Sent,
    TokenDead,
    decide,
    reason_class,
)
from drain.apns.model import Answered, MaybeDelivered, NoAnswer, NotSent, Reply

POLICY = RetryPolicy()
DIED = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
DIED_MS = 1_772_366_400_000


def answered(status: int, reason: str | None = None, **fields: object) -> Answered:
    values = {"timestamp_ms": None, "retry_after": None, "seconds": 0.1, **fields}
    return Answered(status, reason, **values)  # type: ignore[arg-type]


def outcome(reply: Reply, random: float = 0.5, **facts: object) -> Outcome:
    row = RowFacts(**{"attempts": 1, "max_attempts": 8, **facts})  # type: ignore[arg-type]
    return decide(reply, row, POLICY, lambda: random)


APPLE: list[tuple[int, str, Outcome]] = [
    (400, "BadCollapseId", Failed("BadCollapseId")),
    (400, "BadDeviceToken", TokenDead("BadDeviceToken", None, suspect=True)),
    (400, "BadExpirationDate", Failed("BadExpirationDate")),
    (400, "BadMessageId", Failed("BadMessageId")),
    (400, "BadPriority", Failed("BadPriority")),
    (400, "BadTopic", ConfigError("BadTopic")),
    (400, "DeviceTokenNotForTopic", TokenDead("DeviceTokenNotForTopic", None, suspect=True)),
    (400, "DuplicateHeaders", Failed("DuplicateHeaders")),
    (400, "IdleTimeout", GiveBack("IdleTimeout", 0.5)),
    (400, "InvalidPushType", Failed("InvalidPushType")),
    (400, "MissingDeviceToken", Failed("MissingDeviceToken")),
    (400, "MissingTopic", ConfigError("MissingTopic")),
    (400, "PayloadEmpty", Failed("PayloadEmpty")),
    (400, "TopicDisallowed", ConfigError("TopicDisallowed")),
    (403, "BadCertificate", ConfigError("BadCertificate")),
    (403, "BadCertificateEnvironment", ConfigError("BadCertificateEnvironment")),
    (403, "ExpiredProviderToken", RefreshToken("ExpiredProviderToken")),
    (403, "Forbidden", ConfigError("Forbidden")),
    (403, "InvalidProviderToken", ConfigError("InvalidProviderToken")),
    (403, "MissingProviderToken", ConfigError("MissingProviderToken")),
    (403, "UnrelatedKeyIdInToken", RefreshToken("UnrelatedKeyIdInToken")),
    (403, "BadEnvironmentKeyIdInToken", ConfigError("BadEnvironmentKeyIdInToken")),
    (403, "BadEnvironmentKeyInToken", ConfigError("BadEnvironmentKeyInToken")),
    (404, "BadPath", Failed("BadPath")),
    (405, "MethodNotAllowed", Failed("MethodNotAllowed")),
    (410, "ExpiredToken", TokenDead("ExpiredToken", None, suspect=False)),
    (410, "Unregistered", TokenDead("Unregistered", None, suspect=False)),
    (413, "PayloadTooLarge", Failed("PayloadTooLarge")),
    (
        429,
        "TooManyProviderTokenUpdates",
        ConfigError("TooManyProviderTokenUpdates", probe_within=TOKEN_UPDATE_SECONDS),
    ),
    (429, "TooManyRequests", Retry("TooManyRequests", 60.0, "device")),
    (500, "InternalServerError", Retry("InternalServerError", 5.0, "row")),
    (503, "ServiceUnavailable", Retry("ServiceUnavailable", 5.0, "app")),
    (503, "Shutdown", Retry("Shutdown", 0.5, "row")),
]


@pytest.mark.parametrize(("status", "reason", "expected"), APPLE, ids=[line[1] for line in APPLE])
def test_apples_table(status: int, reason: str, expected: Outcome) -> None:
    assert outcome(answered(status, reason)) == expected


def test_the_table_above_has_every_line_of_the_code() -> None:
    assert {(status, reason) for status, reason, _ in APPLE} == set(_TABLE)


def test_200_is_sent() -> None:
    assert outcome(answered(200)) == Sent()


def test_410_keeps_its_timestamp() -> None:
    """Fatal1ty/aioapns#46."""
    assert outcome(answered(410, "Unregistered", timestamp_ms=DIED_MS)) == TokenDead(
        "Unregistered", DIED, suspect=False
    )


@pytest.mark.parametrize("reason", ["Unregistered", "ExpiredToken"])
@pytest.mark.parametrize(
    ("registered", "dead"),
    [(-1, True), (0, True), (1, False), (None, True)],
    ids=["before", "at", "after", "unknown"],
)
def test_a_token_registered_again_after_it_died_stays_alive(
    reason: str, registered: int | None, dead: bool
) -> None:
    """django-push-notifications#650, manaflow-ai/cmux#9319."""
    at = None if registered is None else DIED + timedelta(seconds=registered)
    result = outcome(answered(410, reason, timestamp_ms=DIED_MS), registered_at=at)
    assert isinstance(result, TokenDead if dead else Failed)


def test_a_410_time_that_no_calendar_has_is_no_time() -> None:
    assert outcome(answered(410, "Unregistered", timestamp_ms=10**30)) == TokenDead(
        "Unregistered", None, suspect=False
    )


@pytest.mark.parametrize("reason", ["BadDeviceToken", "DeviceTokenNotForTopic"])
def test_the_probe_of_a_paused_app_kills_no_token(reason: str) -> None:
    assert outcome(answered(400, reason), probe=True) == ConfigError(reason)


@pytest.mark.parametrize("reason", ["ExpiredProviderToken", "UnrelatedKeyIdInToken"])
def test_a_fresh_token_refused_again_is_a_config_error(reason: str) -> None:
    assert outcome(answered(403, reason, renewed=True)) == ConfigError(reason)


@pytest.mark.parametrize(
    ("reply", "facts", "expected"),
    [
        (answered(403, "SomethingNew"), {}, ConfigError("SomethingNew")),
        (answered(403), {}, ConfigError("HTTP 403")),
        (answered(400, "SomethingNew"), {"attempts": 1}, Retry("SomethingNew", 5.0)),
        (answered(400, "SomethingNew"), {"attempts": 3}, Failed("SomethingNew")),
        (answered(410), {"attempts": 1}, Retry("HTTP 410", 5.0)),
        (answered(429), {"attempts": 3}, Failed("HTTP 429")),
        (answered(502), {"attempts": 1}, Retry("HTTP 502", 5.0)),
        (answered(503), {"attempts": 7}, Retry("HTTP 503", 320.0)),
        (answered(302), {"attempts": 1}, Retry("HTTP 302", 5.0)),
        # A known name under a status that is not its own: some proxy's page that quotes one.
        (answered(500, "BadDeviceToken"), {}, Retry("BadDeviceToken", 5.0)),
        (answered(200, "BadDeviceToken"), {}, Sent()),
    ],
)
def test_unknown_answers_by_their_status(reply: Reply, facts: dict[str, int], expected: Outcome) -> None:
    """APNSwift#229: new names do appear."""
    assert outcome(reply, **facts) == expected


def test_not_sent_gives_the_attempt_back_and_waits_a_moment() -> None:
    assert outcome(NotSent("GOAWAY NO_ERROR"), attempts=8) == GiveBack("GOAWAY NO_ERROR", 0.5)


def test_not_sent_for_a_fault_of_ours_pauses() -> None:
    assert outcome(NotSent("proxy answers 407", config=True)) == ConfigError("proxy answers 407")


@pytest.mark.parametrize("reply", [MaybeDelivered("connection lost"), NoAnswer(20.0)])
def test_maybe_delivered_counts_its_attempt(reply: Reply) -> None:
    retried = outcome(reply)
    assert isinstance(retried, Retry)
    assert retried.reason.startswith("maybe delivered")
    assert isinstance(outcome(reply, attempts=8), Failed)


@pytest.mark.parametrize(
    "reply",
    [
        answered(500, "InternalServerError"),
        answered(503, "ServiceUnavailable"),
        answered(503, "Shutdown"),
        answered(429, "TooManyRequests"),
    ],
)
def test_attempts_run_out_to_failed_with_the_last_reason(reply: Answered) -> None:
    assert outcome(reply, attempts=8) == Failed(reply.reason or "")


def test_delays_double_up_to_the_cap_and_spread_down_to_nothing() -> None:
    def delay(attempts: int, random: float) -> float:
        result = outcome(answered(500, "InternalServerError"), random, attempts=attempts, max_attempts=99)
        assert isinstance(result, Retry)
        return result.delay

    assert [delay(n, 0.999) / 0.999 for n in (1, 2, 3, 4)] == pytest.approx([10, 20, 40, 80])
    assert delay(50, 0.999) == pytest.approx(900, rel=0.01)
    assert delay(4, 0.0) == 0


def test_retry_after_is_a_lower_bound_with_a_cap() -> None:
    """The jitter comes on top: those that were told the same second do not come back in it."""
    reply = answered(503, "ServiceUnavailable", retry_after=30.0)
    assert outcome(reply, 0.0) == Retry("ServiceUnavailable", 30.0, "app")
    assert outcome(reply, 0.5) == Retry("ServiceUnavailable", 35.0, "app")
    endless = answered(503, "ServiceUnavailable", retry_after=1e9)
    assert outcome(endless, 0.0) == Retry("ServiceUnavailable", POLICY.retry_after_cap, "app")


statuses = st.integers(0, 999)
reasons = st.none() | st.text(max_size=30) | st.sampled_from(sorted({name for _, name in _TABLE}))
replies: st.SearchStrategy[Reply] = st.one_of(
    st.builds(
        Answered,
        statuses,
        reasons,
        st.none() | st.integers(),
        st.none() | st.floats(-1, 1e12),
        st.floats(0, 100),
        st.booleans(),
    ),
    st.sampled_from([(status, name) for status, name in _TABLE]).map(lambda line: answered(*line)),
    st.builds(NotSent, st.text(), st.booleans()),
    st.builds(MaybeDelivered, st.text()),
    st.builds(NoAnswer, st.floats(0, 100)),
)
times = st.none() | st.datetimes(timezones=st.just(UTC))
rows = st.builds(RowFacts, st.integers(0, 10_000), st.integers(1, 10_000), times, st.booleans())


@given(replies, rows, st.floats(0, 1, exclude_max=True))
def test_every_reply_has_exactly_one_bounded_outcome(reply: Reply, row: RowFacts, random: float) -> None:
    result = decide(reply, row, POLICY, lambda: random)
    if isinstance(result, Retry):
        assert row.attempts < row.max_attempts
        assert 0 <= result.delay <= POLICY.cap + POLICY.retry_after_cap
    if isinstance(result, GiveBack):
        assert 0 <= result.delay <= POLICY.soon
    if isinstance(result, TokenDead):
        assert not (result.since and row.registered_at and row.registered_at > result.since)
    if isinstance(reply, NotSent):
        assert isinstance(result, GiveBack | ConfigError), "what was not sent burns no attempt"


@given(replies)
def test_metric_labels_are_few(reply: Reply) -> None:
    assert reason_class(reply) in REASON_CLASSES
    assert len(REASON_CLASSES) < 12
