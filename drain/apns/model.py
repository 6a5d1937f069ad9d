"""The values that travel between drain's loop and APNs. No I/O, no settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path

PRODUCTION_HOST = "api.push.apple.com"
SANDBOX_HOST = "api.sandbox.push.apple.com"
PORTS = (443, 2197)
"""Apple listens on both; 2197 is there for firewalls that keep 443 for web traffic."""


@dataclass(frozen=True, slots=True)
class Push:
    """One request, already validated and serialised (content.py makes it)."""

    notification_id: str
    """Canonical lower-case UUID: the `apns-id`, the same on every attempt."""
    device_token: str
    """Even-length hex."""
    topic: str
    push_type: str
    priority: int | None
    """None: no `apns-priority` header."""
    expiration: int | None
    """UNIX seconds; 0 asks for one attempt without storage; None: no `apns-expiration` header."""
    collapse_id: str | None
    body: bytes
    """Exactly the bytes that are written."""


@dataclass(frozen=True, slots=True)
class Answered:
    """APNs answered: `status` is HTTP's, `reason` is None for 200 and for a body that is not Apple's JSON."""

    status: int
    reason: str | None
    timestamp_ms: int | None
    """Apple's timestamp of a 410, UNIX milliseconds."""
    retry_after: float | None
    """Seconds, when the answer had the header in seconds. Apple documents none."""
    seconds: float
    """From the write of the request to the end of the answer."""
    renewed: bool = False
    """The push already went out on the fresh token or connection that replaced a refused one (403
    ExpiredProviderToken, UnrelatedKeyIdInToken): refused again, it is our configuration or our clock."""


@dataclass(frozen=True, slots=True)
class NotSent:
    """Provably not processed: refused, above GOAWAY's last stream id, or never written."""

    why: str
    config: bool = False
    """It is ours to mend: key file, client certificate, CA, proxy credentials. Waiting will not help."""


@dataclass(frozen=True, slots=True)
class MaybeDelivered:
    """The stream or the connection ended without an answer after the request was written."""

    why: str


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The push timeout passed after the request was written; the stream was reset, no other was harmed."""

    seconds: float


Reply = Answered | NotSent | MaybeDelivered | NoAnswer


@dataclass(frozen=True, slots=True)
class ApnsTarget:
    """Where one app's pushes go and as whom: the three token fields, or `certificate_file`.

    ValueError names the field that does not fit.
    """

    topic: str
    """Bundle id, without the suffix of a push type."""
    host: str = PRODUCTION_HOST
    port: int = 443
    team_id: str | None = None
    key_id: str | None = None
    key_file: Path | None = None
    """The .p8 (PEM, PKCS#8, P-256); read again when it changes."""
    certificate_file: Path | None = None
    """PEM with the client certificate (and its key, unless `certificate_key_file`); read for every connection."""
    certificate_key_file: Path | None = None
    ca_file: Path | None = None
    """PEM of the CAs to trust in place of the system's."""
    proxy_url: str | None = field(default=None, repr=False)
    """`http://user:password@host:port` of a CONNECT proxy. Never logged."""

    def __post_init__(self) -> None:
        token = (self.team_id, self.key_id, self.key_file)
        if self.certificate_file is None and None in token:
            raise ValueError("APNs needs team_id, key_id and key_file, or certificate_file")
        if self.certificate_file is not None and token != (None, None, None):
            raise ValueError("APNs takes a token (team_id, key_id, key_file) or certificate_file, not both")
        for name in ("topic", "host", "team_id", "key_id"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[!-~]{1,255}", value):
                raise ValueError(
                    f"APNs {name} {value!r} must be 1 to 255 printable ASCII characters without spaces"
                )
        if not 0 < self.port < 65536:
            raise ValueError(f"APNs port {self.port} is not between 1 and 65535")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session. Times are seconds. ValueError names the one that does not fit."""

    push_timeout: float = 20.0
    """From the write of a request to its answer. Must stay well under the lease."""
    max_connections: int = 4
    """At once, for new pushes. One more may stand for moments while it takes over from a worn one, and those
    that only wait for the answers they owe are not counted (at most as many again)."""
    streams_per_connection: int = 250
    """Our own cap, so that load spreads; the peer's MAX_CONCURRENT_STREAMS applies as well."""
    grow_seconds: float = 0.05
    """Pushes that find no free stream for this long ask for one more connection."""
    connect_timeout: float = 5.0
    """Name, TCP and the proxy's CONNECT."""
    handshake_timeout: float = 5.0
    """TLS, and then the peer's SETTINGS."""
    close_timeout: float = 1.0
    """For TLS close_notify; asyncio's default of 30 s would outlive a grace period."""
    idle_seconds: float = 3600.0
    """A connection beyond the first without a push for this long is closed. The first is kept."""
    ping_interval: float = 5.0
    """A peer that owes answers and is silent for this long gets a PING, and no new push until it speaks."""
    idle_ping_interval: float = 240.0
    """The same on a connection that owes nothing; below the 350 s after which a NAT forgets it."""
    ping_timeout: float = 10.0
    """A peer that sends nothing for this long after a PING is dead: interval + timeout <= 30 s."""
    requests_per_connection: int = 50_000
    """Never more on one connection (edamov/pushok#169: APNs refuses then); a successor is made at 90 %."""
    max_age: float = 24 * 3600.0
    """Spread by +-10 %, so that connections do not all leave at once; DNS is looked up for each new one."""
    drain_seconds: float = 20.0
    """How long a connection that said GOAWAY, or is being replaced, waits for the answers it owes."""
    strikes: int = 3
    """So many bad signs in a row (500, refused stream, no answer) replace the connection (pushy#529)."""
    backoff_base: float = 0.5
    backoff_cap: float = 60.0
    """Between attempts to connect: full jitter under base * 2^failures, at most the cap."""
    calm_seconds: float = 60.0
    """Pause before connecting again after ENHANCE_YOUR_CALM; jittered upwards by as much again."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not value > 0:
                raise ValueError(f"APNs {item.name} {value} must be greater than 0")
        if self.ping_interval + self.ping_timeout > 30:
            raise ValueError(
                f"APNs ping_interval {self.ping_interval} + ping_timeout {self.ping_timeout} must stay within 30 s"
            )
