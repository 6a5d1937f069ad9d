"""Both directions of HTTP/2 flow control, and the stream limit (RFC 9113, sections 5.1.2, 5.2 and 6.9)."""

from collections import deque
from typing import Final, Protocol

from deploy.simulator import frames
from deploy.simulator.frames import DEFAULT_WINDOW, FRAME_LIMIT, WireError

_TOP_UP_AT: Final = DEFAULT_WINDOW // 2


class ReceiveWindow:
    """What the client may still send on this connection, and what it will be given back."""

    __slots__ = ("_consumed", "available", "held")

    def __init__(self, held: bool) -> None:
        self.available = DEFAULT_WINDOW
        self._consumed = 0
        self.held = held

    def take(self, size: int) -> None:
        """Raises WireError when the client sent more than its window allows."""
        if size > self.available:
            raise WireError("FLOW_CONTROL_ERROR", f"{size} bytes for a window of {self.available}")
        self.available -= size
        self._consumed += size

    def due(self, at_least: int = _TOP_UP_AT) -> int:
        """The increment to announce now, 0 for none; counts as announced."""
        if self.held or self._consumed < max(1, at_least):
            return 0
        increment, self._consumed = self._consumed, 0
        self.available += increment
        return increment


class StreamCap:
    """MAX_CONCURRENT_STREAMS as announced, and as the client has acknowledged it."""

    __slots__ = ("_unacknowledged", "acknowledged", "announced")

    def __init__(self) -> None:
        self.announced = 2**31
        self.acknowledged = 2**31
        self._unacknowledged: deque[int] = deque()

    def announce(self, streams: int) -> None:
        """Call once per SETTINGS frame: the client acknowledges them in order."""
        self.announced = streams
        self._unacknowledged.append(streams)

    def acknowledge(self) -> None:
        if self._unacknowledged:
            self.acknowledged = self._unacknowledged.popleft()

    def in_force(self, enforced: str) -> int:
        """`enforced`: announced, acknowledged, or no."""
        if enforced == "no":
            return 2**31
        return self.announced if enforced == "announced" else self.acknowledged


class Sending(Protocol):
    """The part of a stream that sending needs; `send_window` may be negative after SETTINGS (section 6.9.2)."""

    id: int
    send_window: int


class SendSide:
    """The peer's windows, and the bodies that wait for them (first come, first served)."""

    __slots__ = ("_waiting", "initial_window", "window")

    def __init__(self) -> None:
        self.window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self._waiting: dict[int, tuple[Sending, deque[bytes], bool]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def body(self, stream: Sending, chunks: list[bytes], finish: bool) -> tuple[list[bytes], bool]:
        """The DATA frames that may go now, and whether that was all; the rest waits for `more`."""
        queue = deque(chunks)
        out: list[bytes] = []
        if not self._waiting and self._send(stream, queue, finish, out):
            return out, True
        self._waiting[stream.id] = (stream, queue, finish)
        return out, False

    def more(self) -> tuple[list[bytes], list[Sending]]:
        """After a window grew: the frames that may go now, and the streams that are through with it."""
        out: list[bytes] = []
        through: list[Sending] = []
        for stream, queue, finish in list(self._waiting.values()):
            if self._send(stream, queue, finish, out):
                del self._waiting[stream.id]
                if finish:
                    through.append(stream)
            if self.window <= 0:
                break
        return out, through

    def forget(self, stream_id: int) -> None:
        self._waiting.pop(stream_id, None)

    def _send(self, stream: Sending, queue: deque[bytes], finish: bool, out: list[bytes]) -> bool:
        while queue:
            chunk = queue.popleft()
            room = min(self.window, stream.send_window, FRAME_LIMIT)
            if chunk and len(chunk) > room:
                if room > 0:
                    out.append(frames.frame(frames.DATA, 0, stream.id, chunk[:room]))
                    self._spend(stream, room)
                queue.appendleft(chunk[max(room, 0) :])
                if min(self.window, stream.send_window) <= 0:
                    return False
                continue
            last = frames.END_STREAM if finish and not queue else 0
            out.append(frames.frame(frames.DATA, last, stream.id, chunk))
            self._spend(stream, len(chunk))
        return True

    def _spend(self, stream: Sending, size: int) -> None:
        self.window -= size
        stream.send_window -= size
