"""The values that travel between drain's loop and APNs. No I/O, no settings."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class NotSent:
    """Provably not processed: refused, above GOAWAY's last stream id, or never written."""

    why: str


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
    """Where one app's pushes go and as whom. Either the three token fields or `certificate_file`."""

    topic: str
    """Bundle id, without the suffix of a push type."""
    host: str = PRODUCTION_HOST
    port: int = 443
    team_id: str | None = None
    key_id: str | None = None
    key_file: Path | None = None
    """The .p8 (PEM, PKCS#8, P-256); read again when it changes."""
    certificate_file: Path | None = None
    """PEM with certificate and key (or the key in `certificate_key_file`); read for every new connection."""
    certificate_key_file: Path | None = None
    ca_file: Path | None = None
    """PEM of the CAs to trust in place of the system's."""
    proxy_url: str | None = None
    """`http://user:password@host:port` of a CONNECT proxy. Never logged."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session. Times are seconds."""

    push_timeout: float = 20.0
    """From the write of a request to its answer. Must stay well under the lease."""
    max_connections: int = 4
    streams_per_connection: int = 500
    """Our own cap; the peer's MAX_CONCURRENT_STREAMS applies as well."""
    connect_timeout: float = 5.0
    """TCP (and the proxy's CONNECT)."""
    handshake_timeout: float = 5.0
    close_timeout: float = 1.0
    """For TLS close_notify; asyncio's default of 30 s would outlive a grace period."""
    idle_seconds: float = 3600.0
    """A connection without a push for this long is closed; Apple wants them kept for hours."""
    ping_interval: float = 15.0
    """Bytes may be owed for this long before a PING asks whether the peer lives."""
    idle_ping_interval: float = 900.0
    """The same on a connection without requests in flight (a NAT forgets idle ones)."""
    ping_timeout: float = 10.0
    """A peer that sends nothing for this long after a PING is dead: interval + timeout <= 30 s."""
    requests_per_connection: int = 50_000
    """Then it is replaced before APNs refuses (edamov/pushok#169)."""
    max_age: float = 24 * 3600.0
    """Spread by +-10 %, so that connections do not all leave at once; DNS is looked up for each new one."""
    drain_seconds: float = 20.0
    """How long a connection that said GOAWAY, or is being replaced, waits for the answers it owes."""
    server_errors_to_close: int = 3
    """As many answers 500 in a row close the connection (pushy#529: one can answer 500 for ever)."""
    backoff_base: float = 0.5
    backoff_cap: float = 60.0
    """Between attempts to connect: full jitter under base * 2^n, at most the cap."""
    calm_seconds: float = 60.0
    """Pause before connecting again after ENHANCE_YOUR_CALM."""
