"""What is in flight on a channel: which publishes are confirmed, which refused, which came back. Pure.

RabbitMQ confirms by delivery tag, many at once with `multiple`, in any order; a message that no queue took
comes back before its confirm ("Consumer Acknowledgements and Publisher Confirms", "When Will Published
Messages Be Confirmed by the Broker?"). A batch is one array of states and one future, whatever its size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from relay.message import Message

PENDING, CONFIRMED, REFUSED = 0, 1, 2


class Flight:
    """The publishes of one write: which are confirmed, which refused, which came back."""

    __slots__ = ("_first", "_low", "_messages", "_outstanding", "done", "returned", "states")

    def __init__(self, first_tag: int, messages: Sequence[Message], done: asyncio.Future[None]) -> None:
        self._first = first_tag
        self._messages = messages
        self._low = 0  # everything below is settled
        self._outstanding = len(messages)
        self.states = bytearray(len(messages))  # PENDING, CONFIRMED or REFUSED, by position
        self.returned: dict[int, str] = {}  # position -> why; the broker sends it before the confirm
        self.done = done

    def settle(self, tag: int, multiple: bool, state: int) -> None:
        """Note an Ack or a Nack. With `multiple`, of every tag up to this one; tag 0 is then all."""
        position = tag - self._first
        if multiple:
            end = len(self.states) if tag == 0 else min(position + 1, len(self.states))
            if end > self._low:
                pending = self.states.count(PENDING, self._low, end)
                self.states[self._low : end] = self.states[self._low : end].replace(b"\0", bytes([state]))
                self._low = end
                self._outstanding -= pending
        elif 0 <= position < len(self.states) and self.states[position] == PENDING:
            self.states[position] = state
            self._outstanding -= 1
        if not self._outstanding:
            finish(self.done)

    def give_back(self, row_id: object, why: str) -> bool:
        """Note a returned message; false when it is none of this flight, or one already confirmed."""
        for position, message in enumerate(self._messages):
            if message.row_id == row_id and self.states[position] == PENDING:
                self.returned[position] = why
                return True
        return False


def finish(future: asyncio.Future[Any]) -> None:
    """Wake whoever waits, once."""
    if not future.done():
        future.set_result(None)
