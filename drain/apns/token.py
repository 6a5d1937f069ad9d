"""The provider token: the same bytes on every replica and after every restart.

Apple ("Establishing a token-based connection to APNs"): a new token at most once in 20 minutes, at least once in
60. Reports disagree whether that is counted per connection, host, or team and key, so the strictest reading
holds here: every process makes the same token. `iat` is rounded down to a bucket, and the ES256 signature is
deterministic (RFC 6979).

A bucket lasts 35 minutes; a process keeps a token for 20 minutes after it first used it, even across the end of
its bucket; 5 minutes are left for a clock that is wrong: 35 + 20 + 5 = 60 (the bound is uniqush-push's).
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aioapns.connection import AuthorizationHeaderProvider
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from common.logs import Logger
from drain.apns import events

BUCKET = 35 * 60
FLOOR = 20 * 60
SKEW = 5 * 60
MAX_AGE = BUCKET + FLOOR
LOOK_INTERVAL = 10.0
"""Seconds between two looks at the key file's inode and time."""


class KeyFileError(ValueError):
    """The key file cannot be used. The message names the file and the fault, never what is in it."""


@dataclass(frozen=True, slots=True)
class Token:
    """One signed token: `iat` in UNIX seconds, and the value of the authorization header."""

    issued_at: int
    header: bytes


class ProviderToken(AuthorizationHeaderProvider):
    """The token of one team and key, shared by every connection of the process (`ProviderTokens`).

    Raises KeyFileError when it is made; later faults of the file leave the old key in use and are in `problem`.
    `wall` gives UNIX seconds and decides `iat` alone; everything else goes by `monotonic`.
    """

    def __init__(
        self,
        team_id: str,
        key_id: str,
        key_file: Path,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._team_id = team_id
        self._key_id = key_id
        self._file = key_file
        self._wall = wall
        self._monotonic = monotonic
        self._log = Logger(team_id=team_id, key_id=key_id)
        self._stamp = _stamp(key_file)
        self._key = load_key(key_file)
        self._next_look = monotonic() + LOOK_INTERVAL
        self._current: Token | None = None
        self._first_used: float | None = None
        self._renewed_at: float | None = None
        self.generation = 0
        """Goes up when the file holds another key: connections made with the old one must be closed."""
        self.changes = 0
        """Tokens taken into use so far."""
        self.problem: str | None = None

    def get_header(self) -> str:
        """aioapns' interface."""
        return self.header().decode()

    def header(self) -> bytes:
        """The authorization value for a request that is written now; asking counts as using it."""
        now = self._monotonic()
        token = self._current_at(self._wall(), now)
        if self._first_used is None:
            self._first_used = now
        return token.header

    def renew(self, refused: bytes) -> None:
        """After ExpiredProviderToken or UnrelatedKeyIdInToken for `refused`: a younger token, once in 20 minutes.

        Nothing happens when `refused` is not in use any more: many pushes carry one token.
        """
        now = self._monotonic()
        if self._current is None or self._current.header != refused:
            return
        if self._renewed_at is not None and now - self._renewed_at < FLOOR:
            return
        self._renewed_at = now
        wall = self._wall()
        # The other replicas' token if there is a younger one, else one of this very second.
        due = _bucket(wall)
        self._adopt(due if due > self._current.issued_at else int(wall))

    def step_back(self, refused: bytes) -> None:
        """After TooManyProviderTokenUpdates for `refused`: the one before it, if it is still young enough.

        Nothing is signed that was not signed before: tokens are the same bytes whenever they are made.
        """
        if self._current is None or self._current.header != refused:
            return
        issued_at = self._current.issued_at
        earlier = _bucket(issued_at) if issued_at % BUCKET else issued_at - BUCKET
        if self._wall() - earlier <= MAX_AGE:
            self._adopt(earlier)
            self._first_used = self._monotonic()  # Else the next push would go forward again at once.

    def _current_at(self, wall: float, now: float) -> Token:
        due = _bucket(wall)
        current = self._current
        if current is None:
            return self._adopt(due)
        age = wall - current.issued_at
        rested = self._first_used is None or now - self._first_used >= FLOOR
        if age > MAX_AGE or age < -SKEW or (due > current.issued_at and rested):
            return self._adopt(due)
        return current

    def _adopt(self, issued_at: int) -> Token:
        if self._current is not None and self._current.issued_at == issued_at:
            return self._current
        token = Token(issued_at, sign(self._key, self._team_id, self._key_id, issued_at))
        self._current, self._first_used = token, None
        self.changes += 1
        return token

    def look(self) -> None:
        """Read the key file again if it changed; looks at most every 10 s, so it may be called at any rate."""
        now = self._monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_INTERVAL
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            key = load_key(self._file)
        except KeyFileError as error:
            self.problem = str(error)
            self._log.emit(events.APNS_KEY_FILE_UNUSABLE, error)
            return
        self.problem = None
        if key.public_key() != self._key.public_key():
            self._key, self._current = key, None
            self.generation += 1
            self._log.emit(events.APNS_KEY_FILE_RELOADED, file=str(self._file))


class ProviderTokens:
    """One ProviderToken for each team and key of the process."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str, Path], ProviderToken] = {}

    def of(self, team_id: str, key_id: str, key_file: Path) -> ProviderToken:
        """The shared token; made at the first call. Raises KeyFileError."""
        name = (team_id, key_id, key_file)
        token = self._tokens.get(name)
        if token is None:
            token = self._tokens[name] = ProviderToken(team_id, key_id, key_file)
        return token


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key of a .p8 file (PEM, PKCS#8, P-256, not encrypted). Raises KeyFileError."""
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise KeyFileError(f"APNs key file {path}: {error.strerror}") from error
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except TypeError:
        raise KeyFileError(f"APNs key file {path}: the key is encrypted") from None
    except (ValueError, UnsupportedAlgorithm):
        # The cause is left out on purpose: its text may quote the file.
        raise KeyFileError(f"APNs key file {path}: not a PEM private key ({len(pem)} bytes)") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise KeyFileError(f"APNs key file {path}: not an elliptic-curve key on P-256")
    return key


def sign(key: ec.EllipticCurvePrivateKey, team_id: str, key_id: str, issued_at: int) -> bytes:
    """`bearer <JWT>`; equal arguments give equal bytes, on any machine."""
    head = _part({"alg": "ES256", "kid": key_id, "typ": "JWT"})
    signed = head + b"." + _part({"iss": team_id, "iat": issued_at})
    signature = key.sign(signed, ec.ECDSA(hashes.SHA256(), deterministic_signing=True))
    r, s = decode_dss_signature(signature)
    return b"bearer " + signed + b"." + _base64(r.to_bytes(32, "big") + s.to_bytes(32, "big"))


def _part(value: dict[str, object]) -> bytes:
    return _base64(json.dumps(value, separators=(",", ":")).encode())


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _bucket(wall: float) -> int:
    return int(wall // BUCKET) * BUCKET


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
