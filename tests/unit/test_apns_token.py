"""The provider token: one, the same everywhere, changed as seldom as Apple wants it and never too late."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from hypothesis import given, settings
from hypothesis import strategies as st

from drain.apns.token import (
    BUCKET,
    FLOOR,
    LOOK_INTERVAL,
    MAX_AGE,
    SKEW,
    KeyFileError,
    ProviderToken,
    ProviderTokens,
    sign,
)

START = 1_772_366_400.0 // BUCKET * BUCKET
"""The beginning of some bucket, UNIX seconds."""


def pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, password: bytes | None = None) -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


class Clock:
    """Both clocks; `wall` may be set apart."""

    def __init__(self, wall: float = START) -> None:
        self.now = 1000.0
        self.offset = wall - self.now

    def wall(self) -> float:
        return self.now + self.offset

    def monotonic(self) -> float:
        return self.now

    def minutes(self, count: float) -> None:
        self.now += count * 60


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "AuthKey_KEY0000001.p8"
    path.write_bytes(pem(ec.generate_private_key(ec.SECP256R1())))
    return path


def made(key_file: Path, clock: Clock) -> ProviderToken:
    return ProviderToken("TEAM000001", "KEY0000001", key_file, wall=clock.wall, monotonic=clock.monotonic)


def claims(header: bytes) -> tuple[dict[str, object], dict[str, object]]:
    scheme, jwt = header.split(b" ")
    assert scheme == b"bearer"
    head, body, _ = jwt.split(b".")
    return decoded(head), decoded(body)


def decoded(part: bytes) -> dict[str, object]:
    value: dict[str, object] = json.loads(base64.urlsafe_b64decode(part + b"=="))
    return value


def issued_at(header: bytes) -> int:
    value = claims(header)[1]["iat"]
    assert isinstance(value, int)
    return value


def test_the_token_is_signed_by_the_key(key_file: Path, clock: Clock) -> None:
    header = made(key_file, clock).header()
    assert claims(header) == (
        {"alg": "ES256", "kid": "KEY0000001", "typ": "JWT"},
        {"iss": "TEAM000001", "iat": int(START)},
    )
    signed, _, signature = header.removeprefix(b"bearer ").rpartition(b".")
    raw = base64.urlsafe_b64decode(signature + b"==")
    der = encode_dss_signature(int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big"))
    key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    key.public_key().verify(der, signed, ec.ECDSA(hashes.SHA256()))


def test_another_process_makes_the_same_bytes(key_file: Path) -> None:
    """pushy#811, #931, #568: replicas and restarts with tokens of their own get TooManyProviderTokenUpdates."""
    program = (
        "import sys, pathlib; from drain.apns.token import load_key, sign;"
        "print(sign(load_key(pathlib.Path(sys.argv[1])), 'TEAM000001', 'KEY0000001', 1772366400).decode())"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, key_file],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert said.stdout.strip().encode() == sign(key, "TEAM000001", "KEY0000001", 1_772_366_400)


def test_replicas_that_start_at_any_moment_of_a_bucket_have_one_token(key_file: Path) -> None:
    tokens = {made(key_file, Clock(START + second)).header() for second in range(0, BUCKET, 97)}
    assert len(tokens) == 1


def test_it_changes_with_the_bucket_while_it_is_in_use(key_file: Path, clock: Clock) -> None:
    token = made(key_file, clock)
    changes = []
    last = None
    for _ in range(24 * 60):
        if (header := token.header()) != last:
            changes.append(clock.now)
            last = header
        clock.minutes(1)
    gaps = {round((b - a) / 60) for a, b in pairwise(changes)}
    assert gaps == {BUCKET // 60}


def test_a_token_first_used_at_the_end_of_its_bucket_stays_for_twenty_minutes(
    key_file: Path, clock: Clock
) -> None:
    """AndrewBarba/apns2#44, #16: first use at minute 45 of an idle process, replaced ten minutes later."""
    token = made(key_file, clock)
    clock.minutes(34)
    first = token.header()
    clock.minutes(19.9)
    assert token.header() == first
    clock.minutes(0.2)
    assert token.header() != first


def test_an_idle_process_does_not_use_an_old_token(key_file: Path, clock: Clock) -> None:
    token = made(key_file, clock)
    token.header()
    clock.minutes(600)
    assert clock.wall() - issued_at(token.header()) < BUCKET


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=60))
def test_whatever_the_pauses_between_pushes_both_of_apples_bounds_hold(
    tmp_path_factory: pytest.TempPathFactory, pauses: list[float]
) -> None:
    """35 + 20 + 5 = 60: never older than 55 minutes when used, never replaced within 20 of its first use."""
    key_file = tmp_path_factory.getbasetemp() / "bounds.p8"
    if not key_file.exists():
        key_file.write_bytes(pem(ec.generate_private_key(ec.SECP256R1())))
    clock = Clock()
    token = made(key_file, clock)
    first_used: dict[bytes, float] = {}
    current = b""
    for pause in pauses:
        clock.minutes(pause)
        header = token.header()
        assert clock.wall() - issued_at(header) <= MAX_AGE <= 3600 - SKEW
        if header != current:
            if current:
                assert clock.now - first_used[current] >= FLOOR
            current = header
            first_used[header] = clock.now


def test_clocks_that_jump_do_not_keep_a_token_that_apns_refuses(key_file: Path, clock: Clock) -> None:
    token = made(key_file, clock)
    token.header()
    clock.offset += 3600
    assert clock.wall() - issued_at(token.header()) < BUCKET
    clock.offset -= 7200
    assert -SKEW <= clock.wall() - issued_at(token.header()) < BUCKET


def test_an_expired_token_is_replaced_once(key_file: Path, clock: Clock) -> None:
    """The clock is behind: the bucket's token is too old for APNs."""
    token = made(key_file, clock)
    clock.minutes(30)
    refused = token.header()
    token.renew(refused)
    fresh = token.header()
    assert issued_at(fresh) == int(clock.wall())
    for _ in range(500):  # as many pushes as were in flight with the refused one
        token.renew(refused)
    assert token.header() == fresh
    token.renew(fresh)
    assert token.header() == fresh, "twice within 20 minutes is the clock's fault: nothing more is signed"


def test_an_expired_token_of_the_bucket_before_is_replaced_by_the_one_that_all_replicas_use(
    key_file: Path, clock: Clock
) -> None:
    token = made(key_file, clock)
    clock.minutes(34)
    refused = token.header()
    clock.minutes(5)
    assert token.header() == refused
    token.renew(refused)
    assert token.header() == made(key_file, clock).header()


def test_a_renewed_token_gives_way_to_the_next_bucket_not_to_its_own(key_file: Path, clock: Clock) -> None:
    token = made(key_file, clock)
    clock.minutes(10)
    token.renew(token.header())
    fresh = token.header()
    clock.minutes(24)
    assert token.header() == fresh
    clock.minutes(2)
    assert issued_at(token.header()) == int(START) + BUCKET


def test_too_many_updates_goes_back_to_the_token_before_and_signs_nothing_new(
    key_file: Path, clock: Clock
) -> None:
    """A process that restarted at the end of a bucket forgot when it first used the token."""
    before = made(key_file, clock)
    clock.minutes(34.9)
    used = before.header()
    clock.minutes(0.2)
    restarted = made(key_file, clock)
    refused = restarted.header()
    assert refused != used
    for _ in range(50):
        restarted.step_back(refused)
    assert restarted.header() == used
    restarted.step_back(used)
    assert restarted.header() == used, "what is older still would be refused as expired"
    clock.minutes(20.1)
    assert restarted.header() == refused


def test_too_many_updates_keeps_the_token_when_the_one_before_is_too_old(
    key_file: Path, clock: Clock
) -> None:
    token = made(key_file, clock)
    clock.minutes(25)
    refused = token.header()
    token.step_back(refused)
    assert token.header() == refused


def test_a_changed_key_file_is_read_again(key_file: Path, clock: Clock) -> None:
    token = made(key_file, clock)
    old = token.header()
    replacement = key_file.with_suffix(".new")
    replacement.write_bytes(pem(ec.generate_private_key(ec.SECP256R1())))
    os.replace(replacement, key_file)
    token.look()
    assert token.header() == old, "not before the next look"
    clock.now += LOOK_INTERVAL
    token.look()
    assert token.generation == 1
    assert token.header() != old


def test_a_key_file_written_again_with_the_same_key_changes_nothing(key_file: Path, clock: Clock) -> None:
    """Kubernetes swaps the files of a secret as a whole."""
    token = made(key_file, clock)
    old = token.header()
    replacement = key_file.with_suffix(".new")
    replacement.write_bytes(key_file.read_bytes())
    os.replace(replacement, key_file)
    clock.now += LOOK_INTERVAL
    token.look()
    assert token.generation == 0
    assert token.header() == old


@pytest.mark.parametrize("damage", ["gone", "half written"])
def test_a_damaged_key_file_leaves_the_key_in_use_and_says_so(
    key_file: Path, clock: Clock, damage: str
) -> None:
    token = made(key_file, clock)
    old = token.header()
    whole = key_file.read_bytes()
    if damage == "gone":
        key_file.unlink()
    else:
        key_file.write_bytes(whole[:50])
    clock.now += LOOK_INTERVAL
    token.look()
    assert token.header() == old
    assert token.problem is not None
    assert str(key_file) in token.problem
    key_file.write_bytes(whole)
    clock.now += LOOK_INTERVAL
    token.look()
    assert token.problem is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a PEM private key"),
        (b"-----BEGIN PRIVATE KEY-----\nU0VDUkVU\n-----END PRIVATE KEY-----\n", "not a PEM private key"),
        (pem(ec.generate_private_key(ec.SECP256R1()), b"x"), "encrypted"),
        (pem(ec.generate_private_key(ec.SECP384R1())), "P-256"),
        (pem(rsa.generate_private_key(65537, 2048)), "P-256"),
    ],
    ids=["empty", "garbage", "encrypted", "P-384", "RSA"],
)
def test_a_key_file_that_cannot_be_used_is_named_with_its_fault_and_without_its_content(
    tmp_path: Path, clock: Clock, content: bytes, why: str
) -> None:
    path = tmp_path / "bad.p8"
    path.write_bytes(content)
    with pytest.raises(KeyFileError) as error:
        made(path, clock)
    assert str(path) in str(error.value)
    assert why in str(error.value)
    assert "U0VDUkVU" not in repr(error.value) + repr(error.value.__cause__)


def test_a_missing_key_file_is_named(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(KeyFileError, match=r"none\.p8: No such file"):
        made(tmp_path / "none.p8", clock)


def test_the_sessions_of_a_process_share_one_token(key_file: Path) -> None:
    tokens = ProviderTokens()
    assert tokens.of("T", "K", key_file) is tokens.of("T", "K", key_file)
    assert tokens.of("T", "K", key_file) is not tokens.of("T", "K2", key_file)
