"""Which rows of a batch may be sent together, and what became of each. Pure.

A row that might close the channel is sent alone, with nothing else in flight, so that the bad row names itself and
the others are sent once: the first row to an exchange that took no publish on this connection yet (it may be
missing, or refused to this user), a very large one, and, once the channel was closed during a wave, every row.
Rows of one ordering key go one after another, and one that is not published holds back those behind it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from relay.flight import CONFIRMED, PENDING, REFUSED
from relay.message import Encoder, Message
from relay.model import PUBLISHED, Failed, Left, Nacked, OutboxRow, Unroutable, Verdict

# A larger body goes alone: the broker does not tell its max_message_size and closes the channel when it is passed,
# and one round trip is little beside such a transfer.
ALONE_BYTES = 256 * 1024

# Bodies of one write: what a batch holds in memory twice, once as rows and once as frames, stays small.
WAVE_BYTES = 4 * 1024 * 1024

_NOT_FOUND, _ACCESS_REFUSED = 404, 403


class Batch:
    """The rows of one publish call, those of one key in id order. Rows are named by their position."""

    def __init__(
        self,
        rows: Sequence[OutboxRow],
        encoder: Encoder,
        frame_max: int,
        *,
        one_at_a_time: bool = False,
        accept_unroutable: bool = False,
    ) -> None:
        self._rows = rows
        self._one_at_a_time = one_at_a_time
        self._accept_unroutable = accept_unroutable
        self._messages: list[Message] = []
        self._verdicts: list[Verdict | None] = [None] * len(rows)
        self._halted: dict[str, int] = {}  # ordering key -> id of its row that is not published
        self._refused: dict[str, str] = {}  # exchange -> why nothing can be published to it now
        self._pending: list[int] = []
        self.unroutable: list[str] = []  # exchange of each message that came back
        self._exchanges: set[str] = set()
        self._plain = (
            True  # no ordering key among the rows, no large body, and all of them fit into one write
        )
        size = 0
        for position, row in enumerate(rows):
            encoded = encoder.encode(row, frame_max)
            if isinstance(encoded, Message):
                self._pending.append(position)
                self._messages.append(encoded)
                self._exchanges.add(encoded.exchange)
                size += len(row.body)
                if row.ordering_key is not None or len(row.body) > ALONE_BYTES or size > WAVE_BYTES:
                    self._plain = False
            else:
                self._settle(position, encoded)
                self._messages.append(_NOT_SENT)

    def next_wave(self, proven: Container[str]) -> list[int]:
        """Take the rows to send now; empty when every row has its verdict.

        Args:
            proven: exchanges that took a publish on this connection.
        """
        if (
            self._plain
            and not self._one_at_a_time
            and all(exchange in proven for exchange in self._exchanges)
        ):
            wave, self._pending = self._pending, []  # the usual batch: no key, nothing to be careful with
            return wave
        wave, held = [], []
        busy: set[str] = set()
        alone = -1
        size = 0
        for place, i in enumerate(self._pending):
            message = self._messages[i]
            key = self._rows[i].ordering_key
            if key is not None:
                if key in self._halted:
                    self._verdicts[i] = Left(f"behind row {self._halted[key]} of its ordering key")
                    continue
                if key in busy:
                    held.append(i)
                    continue
                busy.add(key)
            if message.exchange in self._refused:
                self._settle(i, Failed(self._refused[message.exchange]))
            elif self._one_at_a_time:
                self._pending = self._pending[place + 1 :]
                return [i]
            elif message.exchange in proven and len(message.body) <= ALONE_BYTES:
                size += len(message.body)
                (wave if size <= WAVE_BYTES else held).append(i)
            else:
                held.append(i)
                alone = i if alone < 0 else alone
        if not wave and alone >= 0:
            held.remove(alone)
            wave = [alone]
        self._pending = held
        return wave

    def messages(self, wave: Sequence[int]) -> list[Message]:
        """What to write for a wave."""
        return [self._messages[i] for i in wave]

    def judge(self, wave: Sequence[int], states: bytes | bytearray, returned: dict[int, str]) -> list[int]:
        """Give a verdict to each row that the broker answered for; return the others.

        Args:
            states: for each row of the wave, as `relay.flight` has them.
            returned: place in the wave -> why, of the messages that no queue took.
        """
        if not returned and states.count(CONFIRMED) == len(wave):
            for i in wave:
                self._verdicts[i] = PUBLISHED
            return []
        unanswered: list[int] = []
        for place, i in enumerate(wave):
            state = states[place]
            if place in returned and not (self._accept_unroutable and state == PENDING):
                self.unroutable.append(self._messages[i].exchange)
                self._settle(i, PUBLISHED if self._accept_unroutable else Unroutable(returned[place]))
            elif state == CONFIRMED:
                self._verdicts[i] = PUBLISHED
            elif state == REFUSED:
                self._settle(i, Nacked("nack: a queue refused the message (full, or rejecting)"))
            else:
                unanswered.append(i)
        return unanswered

    def channel_closed(self, wave: Sequence[int], unanswered: list[int], code: int, text: str) -> None:
        """The broker closed the channel during a wave: one row's fault. A wave of one names it."""
        if len(wave) > 1:
            self._pending = sorted(self._pending + unanswered)
            self._one_at_a_time = True
            return
        for i in unanswered:
            self._settle(i, Failed(text))
            if code == _NOT_FOUND or (code == _ACCESS_REFUSED and "access to exchange" in text):
                # True of every row of this exchange: no need to lose a channel for each of them.
                self._refused[self._messages[i].exchange] = text

    def exchanges(self, wave: Sequence[int]) -> set[str]:
        """The exchanges that a wave goes to."""
        return {self._messages[i].exchange for i in wave}

    def finish(self, why: str) -> list[Verdict]:
        """Return the verdicts, aligned with the rows; rows without one are left, for this reason."""
        left = Left(why)
        return [left if verdict is None else verdict for verdict in self._verdicts]

    def _settle(self, position: int, verdict: Verdict) -> None:
        self._verdicts[position] = verdict
        row = self._rows[position]
        if row.ordering_key is not None and verdict is not PUBLISHED:
            self._halted.setdefault(row.ordering_key, row.id)


_NOT_SENT = Message(0, "", b"", b"", b"")
