"""Every switch of the simulator; all of them can be changed while it runs (PATCH /config)."""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from deploy.simulator.checks import Rules
from deploy.simulator.frames import DEFAULT_WINDOW, MAX_STREAM_ID
from deploy.simulator.latency import Latency, NoLatency
from deploy.simulator.tokens import TokenRules

Count = Annotated[int, Field(ge=1)]
Streams = Annotated[int, Field(ge=0, le=MAX_STREAM_ID)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]
Certificate = Literal["good", "wrong_name", "expired", "not_yet_valid", "unknown_ca", "self_signed"]
Accept = Literal["normal", "close", "reset", "hold", "off", "close_after_handshake"]

_AT_ONCE = NoLatency()


@dataclass(frozen=True, slots=True)
class Config:
    """Defaults are APNs on a good day. README.md explains each field under the same name."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    # What is checked.
    topics: tuple[str, ...] = ("com.example.app",)
    device_token_lengths: tuple[Count, ...] = ()
    require_push_type: bool = False
    check_topic_suffix: bool = True
    payload_limit: Count = 4096
    payload_limit_voip: Count = 5120
    token_max_age_seconds: Seconds = 3600.0
    token_floor: Literal["off", "connection", "key"] = "off"
    token_floor_seconds: Seconds = 1200.0
    one_key_per_connection: bool = True
    clock_offset_seconds: float = 0.0

    # How answers look.
    latency: Latency = _AT_ONCE
    answer_apns_id: str = "echo"  # echo | missing | upper | random | any other text, literally
    answer_body: Literal["json", "none", "html"] = "json"
    answer_body_frames: Annotated[int, Field(ge=1, le=64)] = 1
    empty_data_after_200: bool = False
    wedge_on: tuple[str, ...] = ()
    in_flight_on_loss: Literal["delivered", "lost"] = "delivered"

    # Limits of a connection.
    max_concurrent_streams: Streams = 1000
    start_with_one_stream: bool = False
    one_stream_after: tuple[str, ...] = ()
    stream_limit_enforced: Literal["announced", "acknowledged", "no"] = "announced"
    receive_window: Literal["top_up", "hold"] = "top_up"
    initial_window_size: Annotated[int, Field(ge=0, le=MAX_STREAM_ID)] = DEFAULT_WINDOW
    requests_per_connection: Count | None = None
    requests_per_connection_then: Literal["refuse", "goaway", "drop"] = "refuse"
    errors_per_connection: Count | None = None
    answer_pings: bool = True

    # Connections to come.
    accept: Accept = "normal"
    handshake_delay_seconds: Seconds = 0.0
    certificate: Certificate = "good"
    client_certificate: Literal["no", "optional", "required"] = "no"
    require_alpn: bool = False

    def rules(self, client_certificate: bool) -> Rules:
        """A connection with a client certificate has a default topic, as a certificate names its app."""
        return Rules(
            topics=frozenset(self.topics),
            default_topic=self.topics[0] if client_certificate and self.topics else None,
            device_token_lengths=frozenset(self.device_token_lengths),
            require_push_type=self.require_push_type,
            check_topic_suffix=self.check_topic_suffix,
            payload_limit=self.payload_limit,
            payload_limit_voip=self.payload_limit_voip,
        )

    def token_rules(self) -> TokenRules:
        return TokenRules(
            max_age_seconds=self.token_max_age_seconds,
            floor=self.token_floor,
            floor_seconds=self.token_floor_seconds,
            one_key_per_connection=self.one_key_per_connection,
        )

    def changed(self, changes: dict[str, object]) -> "Config":
        """A copy with the changes; pydantic.ValidationError names an unknown field or a bad value."""
        return _CONFIG.validate_python({**asdict(self), **changes})

    def as_json(self) -> dict[str, object]:
        return asdict(self)


_CONFIG: TypeAdapter[Config] = TypeAdapter(Config)
