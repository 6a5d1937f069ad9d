"""What the simulator can be told to do to a request or to a connection: two closed unions, read from JSON.

A step of a script is one `RequestAction`; POST /connections/act takes one `ConnectionAction`. The field `do`
names the action; README.md lists them with examples.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter

from deploy.simulator.frames import ERROR_CODES, MAX_STREAM_ID
from deploy.simulator.reasons import STATUS_OF, TIMESTAMPED

_STRICT = ConfigDict(extra="forbid")
_REFUSED_STREAM = ERROR_CODES["REFUSED_STREAM"]


def _code(value: object) -> object:
    if isinstance(value, str):
        if value not in ERROR_CODES:
            raise ValueError(f"unknown HTTP/2 error code {value!r}; known: {', '.join(ERROR_CODES)}")
        return ERROR_CODES[value]
    return value


ErrorCode = Annotated[int, BeforeValidator(_code), Field(ge=0, lt=2**32)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]
StreamId = Annotated[int, Field(ge=0, le=MAX_STREAM_ID)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """`times`: this step serves so many requests. `chance`: else the request passes (the step is used up all the
    same). `for_connection`: the connection gives this to every later request too. `delivered`: whether the device
    got the push although there was no 200; None: what the fault makes plausible.
    """

    __pydantic_config__ = _STRICT

    times: Annotated[int, Field(ge=1)] = 1
    chance: Annotated[float, Field(ge=0, le=1)] = 1.0
    for_connection: bool = False
    delivered: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass(_Step):
    """Treat the request as if there were no script."""

    do: Literal["pass"] = "pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(_Step):
    """An HTTP answer. `status` follows from `reason`; both absent: 200.

    `body` replaces the JSON body; `no_body` ends the stream with HEADERS. `timestamp` is in ms. `delay` in seconds
    replaces the latency. `apns_id`: echo, missing, upper, random or a literal; None: as configured. `unfinished`:
    END_STREAM never comes.
    """

    do: Literal["answer"] = "answer"
    status: Annotated[int, Field(ge=200, le=599)] | None = None
    reason: str | None = None
    timestamp: int | None = None
    headers: dict[str, str] | None = None
    body: str | None = None
    no_body: bool = False
    body_frames: Annotated[int, Field(ge=1, le=64)] | None = None
    empty_data: bool = False
    apns_id: str | None = None
    delay: Seconds | None = None
    unfinished: bool = False

    @property
    def code(self) -> int:
        if self.status is not None:
            return self.status
        return 200 if self.reason is None else STATUS_OF.get(self.reason, 400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(_Step):
    """Keep the request open until POST /release; then it is answered normally."""

    do: Literal["hold"] = "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence(_Step):
    """Never answer this stream; the connection lives on."""

    do: Literal["silence"] = "silence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset(_Step):
    """RST_STREAM on this stream; to a connection: on all its open streams."""

    do: Literal["reset"] = "reset"
    code: ErrorCode = _REFUSED_STREAM


@dataclass(frozen=True, slots=True, kw_only=True)
class GoAway(_Step):
    """GOAWAY. Streams up to the last stream id are answered, those above are never processed.

    last_stream_id: "this" (the stream at hand; to a connection: the highest seen), "before" (just below the
    stream at hand; to a connection: below its lowest open stream), "max" (a graceful notice), or a number.
    `reason` and `timestamp` make APNs' JSON debug data; `debug` is literal. `close`: when the connection ends.
    """

    do: Literal["goaway"] = "goaway"
    last_stream_id: Literal["this", "before", "max"] | StreamId = "this"
    code: ErrorCode = 0
    reason: str | None = None
    timestamp: int | None = None
    debug: str | None = None
    close: Literal["when_done", "now", "never"] = "when_done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(_Step):
    """Abort the TCP connection with everything in flight; `rst`: with a RST instead of a FIN."""

    do: Literal["drop"] = "drop"
    rst: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Mute(_Step):
    """The connection goes on reading, and never writes again (until unmute)."""

    do: Literal["mute"] = "mute"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReading(_Step):
    """Stop reading the socket; `seconds` None: until resume_reading. The request at hand is answered normally."""

    do: Literal["stop_reading"] = "stop_reading"
    seconds: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimit(_Step):
    """SETTINGS with another MAX_CONCURRENT_STREAMS. The request at hand is answered normally."""

    do: Literal["stream_limit"] = "stream_limit"
    streams: StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldWindow(_Step):
    """No WINDOW_UPDATE any more, until release_window. The request at hand is answered normally."""

    do: Literal["hold_window"] = "hold_window"


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage(_Step):
    """Write these bytes (hex) into the connection as they are; the request at hand is never answered."""

    do: Literal["garbage"] = "garbage"
    hex: Annotated[str, Field(pattern=r"^([0-9a-fA-F]{2})+$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(_Step):
    """Close the connection in good order: TLS close_notify, then FIN. No GOAWAY."""

    do: Literal["close"] = "close"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmute:
    __pydantic_config__ = _STRICT
    do: Literal["unmute"] = "unmute"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReading:
    __pydantic_config__ = _STRICT
    do: Literal["resume_reading"] = "resume_reading"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseWindow:
    __pydantic_config__ = _STRICT
    do: Literal["release_window"] = "release_window"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """A PING from the server; the acknowledgement shows in the connection's `ping_acks`."""

    __pydantic_config__ = _STRICT
    do: Literal["ping"] = "ping"


WireFault = (
    Silence | Reset | GoAway | Drop | Mute | StopReading | StreamLimit | HoldWindow | Garbage | Close
)  # fmt: skip
RequestAction = Pass | Answer | Hold | WireFault
ConnectionAction = (
    Reset | GoAway | Drop | Mute | StopReading | StreamLimit | HoldWindow | Garbage | Close
    | Unmute | ResumeReading | ReleaseWindow | Ping
)  # fmt: skip

_REQUEST_ACTIONS: TypeAdapter[list[RequestAction]] = TypeAdapter(
    list[Annotated[RequestAction, Field(discriminator="do")]]
)
_CONNECTION_ACTION: TypeAdapter[ConnectionAction] = TypeAdapter(
    Annotated[ConnectionAction, Field(discriminator="do")]
)

OK = Answer()
REJECTION = {reason: Answer(reason=reason) for reason in STATUS_OF}


def rejection(reason: str, timestamp: int | None = None) -> Answer:
    """Apple's answer for this reason."""
    if timestamp is not None and reason in TIMESTAMPED:
        return Answer(reason=reason, timestamp=timestamp)
    return REJECTION.get(reason) or Answer(reason=reason)


def read_steps(value: object) -> list[RequestAction]:
    """pydantic.ValidationError names the step and field that is wrong."""
    return _REQUEST_ACTIONS.validate_python(value)


def read_connection_action(value: object) -> ConnectionAction:
    return _CONNECTION_ACTION.validate_python(value)


def plausibly_delivered(action: RequestAction) -> bool:
    """Whether the device has the push after this fault, when the step does not say."""
    if action.delivered is not None:
        return action.delivered
    match action:
        case Reset(code=code):
            return code != _REFUSED_STREAM
        case Answer():
            return action.code == 200
        case _:
            return True
