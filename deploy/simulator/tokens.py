"""Provider tokens: the ES256 signature, the claims, the age, and how often a new one may come.

Source: Apple, "Establishing a token-based connection to APNs": a token at most one hour old, a new one at most
every 20 minutes. Where Apple applies the floor is disputed (per connection: pushy#682; per team and key:
slicc#2448), so both are offered. The interval counts from the first use of the newest token accepted so far;
tokens accepted earlier stay good, so replicas may roll over one after the other.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

_FUTURE_SKEW_SECONDS: Final = 60
_REMEMBERED_TOKENS: Final = 10_000
_TOKENS_PER_SCOPE: Final = 16


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A .p8 key as Apple knows it. `topics`: a topic-specific key; None for a team-scoped one.

    `refusal`: the reason every token of this key gets (e.g. BadEnvironmentKeyInToken), None for a good key.
    """

    key_id: str
    team_id: str
    public_key: ec.EllipticCurvePublicKey
    topics: frozenset[str] | None = None
    refusal: str | None = None


@dataclass(slots=True)
class TokenUse:
    """One distinct provider token: its claims if the signature is good, or its refusal; and its use."""

    digest: str
    key: SigningKey | None
    issued_at: int
    refusal: str | None
    first_used_at: float
    uses: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "sha256": self.digest,
            "key_id": None if self.key is None else self.key.key_id,
            "team_id": None if self.key is None else self.key.team_id,
            "issued_at": self.issued_at,
            "refusal": self.refusal,
            "first_used_at": self.first_used_at,
            "uses": self.uses,
        }


def _segment(text: bytes) -> bytes:
    return base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)


def verify(token: bytes, keys: dict[str, SigningKey]) -> tuple[SigningKey, int] | None:
    """The key that signed this compact JWT and its `iat`; None when anything about it is wrong. Ignores the age."""
    try:
        head_text, claims_text, signature_text = token.split(b".")
        head, claims = json.loads(_segment(head_text)), json.loads(_segment(claims_text))
        signature = _segment(signature_text)
        key = keys.get(head["kid"])
        issued_at = claims["iat"]
        if key is None or head["alg"] != "ES256" or claims["iss"] != key.team_id or len(signature) != 64:
            return None
        if type(issued_at) is not int:
            return None
        der = encode_dss_signature(int.from_bytes(signature[:32]), int.from_bytes(signature[32:]))
        key.public_key.verify(der, head_text + b"." + claims_text, ec.ECDSA(hashes.SHA256()))
    except (ValueError, KeyError, TypeError, binascii.Error, InvalidSignature):
        return None
    return key, issued_at


@dataclass(slots=True)
class TokenFloor:
    """The tokens accepted in one scope (a connection, or a team and key), newest last."""

    accepted: dict[str, None] = field(default_factory=dict)
    newest_since: float = 0.0

    def admit(self, digest: str, now: float, interval: float) -> bool:
        """False when this token is new and the newest one was first used less than `interval` seconds ago."""
        if digest in self.accepted:
            return True
        if self.accepted and now - self.newest_since < interval:
            return False
        self.accepted[digest] = None
        self.newest_since = now
        if len(self.accepted) > _TOKENS_PER_SCOPE:
            del self.accepted[next(iter(self.accepted))]
        return True


@dataclass(slots=True)
class ConnectionTokens:
    """What a connection remembers about its provider tokens."""

    key_id: str | None = None
    floor: TokenFloor = field(default_factory=TokenFloor)


@dataclass(frozen=True, slots=True)
class TokenRules:
    max_age_seconds: float = 3600
    floor: str = "off"  # off | connection | key
    floor_seconds: float = 1200
    one_key_per_connection: bool = True


class TokenDesk:
    """Checks provider tokens; each distinct token's signature is verified once.

    Remembers the newest 10,000 distinct tokens; `distinct` counts them all (one that was forgotten counts again).
    """

    def __init__(self, keys: Iterable[SigningKey]) -> None:
        self.keys = {key.key_id: key for key in keys}
        self.distinct = 0
        self._uses: dict[bytes, TokenUse] = {}
        self._floors: dict[tuple[str, str], TokenFloor] = {}

    def replace_keys(self, keys: Iterable[SigningKey]) -> None:
        """Every remembered token is judged again: a key may have come, gone or changed."""
        self.keys = {key.key_id: key for key in keys}
        for authorization, use in self._uses.items():
            use.key, use.issued_at, use.refusal = self._judge(authorization)

    def forget_uses(self) -> None:
        self.distinct = 0
        self._uses.clear()
        self._floors.clear()

    def uses(self) -> list[TokenUse]:
        return list(self._uses.values())

    def reason(
        self,
        authorization: bytes | None,
        connection: ConnectionTokens,
        bundle: str,
        rules: TokenRules,
        now: float,
    ) -> str | None:
        """Why APNs would refuse this header now, or None. `now`: seconds since the epoch, by APNs' clock."""
        if authorization is None or authorization[:7].lower() != b"bearer ":
            return "MissingProviderToken"
        use = self._uses.get(authorization) or self._first_use(authorization, now)
        use.uses += 1
        key = use.key
        if key is None or use.refusal is not None:
            return use.refusal or "InvalidProviderToken"
        if now - use.issued_at > rules.max_age_seconds:
            return "ExpiredProviderToken"
        if use.issued_at - now > _FUTURE_SKEW_SECONDS:
            return "InvalidProviderToken"
        if rules.one_key_per_connection and connection.key_id not in (None, key.key_id):
            return "UnrelatedKeyIdInToken"
        if rules.floor != "off":
            scope = connection.floor
            if rules.floor == "key":
                scope = self._floors.setdefault((key.team_id, key.key_id), TokenFloor())
            if not scope.admit(use.digest, now, rules.floor_seconds):
                return "TooManyProviderTokenUpdates"
        if key.topics is not None and bundle not in key.topics:
            return "TopicDisallowed"
        connection.key_id = key.key_id
        return None

    def _judge(self, authorization: bytes) -> tuple[SigningKey | None, int, str | None]:
        verified = verify(authorization[7:].strip(), self.keys)
        if verified is None:
            return None, 0, "InvalidProviderToken"
        key, issued_at = verified
        return key, issued_at, key.refusal

    def _first_use(self, authorization: bytes, now: float) -> TokenUse:
        digest = hashlib.sha256(authorization[7:].strip()).hexdigest()[:16]
        use = TokenUse(digest, *self._judge(authorization), first_used_at=now)
        if len(self._uses) >= _REMEMBERED_TOKENS:
            del self._uses[next(iter(self._uses))]
        self._uses[authorization] = use
        self.distinct += 1
        return use
