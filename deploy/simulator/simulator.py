"""APNs as a program: takes every request, decides what it gets, and remembers it.

The order for one request: what its connection gives everybody (a wedge), a script that stands before the checks,
the checks, the script, the device, and then 200.
"""

import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from random import Random
from typing import Final

from deploy.simulator.actions import OK, Answer, Pass, RequestAction, plausibly_delivered, rejection
from deploy.simulator.answers import accepted, encode, new_apns_id
from deploy.simulator.checks import AFTER_TOKEN, BEFORE_TOKEN, Rules, bundle_of, first_fault, well_formed_id
from deploy.simulator.config import Config
from deploy.simulator.connection import Connection
from deploy.simulator.devices import Devices
from deploy.simulator.frames import WireError
from deploy.simulator.latency import NoLatency, sample
from deploy.simulator.ledger import Ledger
from deploy.simulator.request import Request
from deploy.simulator.scripts import ScriptBook
from deploy.simulator.stream import Stream
from deploy.simulator.timeline import Timeline
from deploy.simulator.tokens import SigningKey, TokenDesk
from deploy.simulator.wire_faults import perform

_ENDED_CONNECTIONS: Final = 500
_KEPT_ERRORS: Final = 50


class Simulator:
    """The Application of every connection. All state is here; the control API reads and changes it."""

    def __init__(
        self,
        config: Config,
        keys: Iterable[SigningKey],
        seed: int | None,
        log_cap: int,
        id_cap: int,
        screens: int,
    ) -> None:
        self.start_config = config
        self.chance = Random(seed)
        self.desk = TokenDesk(keys)
        self.devices = Devices(screens)
        self.scripts = ScriptBook(self.chance)
        self.timeline = Timeline()
        self.ledger = Ledger(self.devices, log_cap, id_cap)
        self.connections: dict[int, Connection] = {}
        self.ended_connections: deque[dict[str, object]] = deque(maxlen=_ENDED_CONNECTIONS)
        self.connections_opened = 0
        self.protocol_errors: deque[dict[str, object]] = deque(maxlen=_KEPT_ERRORS)
        self.protocol_error_count = 0
        self.pings_ended = 0
        self.held: deque[tuple[Connection, Stream]] = deque()
        self._caps = (log_cap, id_cap)
        self.wedges: dict[int, RequestAction] = {}
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Takes effect with the next request, answer and connection."""
        self.config = config
        self._rules: dict[bool, Rules] = {known: config.rules(known) for known in (False, True)}
        self._token_rules = config.token_rules()
        self._plain = config.answer_apns_id == "echo" and not config.empty_data_after_200

    def now(self) -> float:
        """APNs' clock: seconds since the epoch, moved by clock_offset_seconds."""
        return time.time() + self.config.clock_offset_seconds

    # Application

    def opened(self, connection: Connection) -> None:
        self.connections[connection.number] = connection
        self.connections_opened += 1

    def closed(self, connection: Connection) -> None:
        self.connections.pop(connection.number, None)
        self.wedges.pop(connection.number, None)
        self.pings_ended += connection.pings
        self.ended_connections.append(connection.as_json())

    def broke_protocol(self, connection: Connection, error: WireError) -> None:
        self.protocol_error_count += 1
        self.protocol_errors.append({"connection": connection.number, "code": error.code, "why": error.why})

    def refused(self, connection: Connection, stream: Stream, request: Request) -> None:
        arrival = self.ledger.log(self.now(), connection.number, stream.id, request, b"")
        self.ledger.end(arrival, "refused")

    def requested(self, connection: Connection, stream: Stream, request: Request) -> None:
        body = stream.body[0] if len(stream.body) == 1 else b"".join(stream.body)
        stream.arrival = self.ledger.arrive(self.now(), connection.number, stream.id, request, body)
        apns_id = request.apns_id
        stream.echo_id = apns_id if apns_id is not None and well_formed_id(apns_id) else new_apns_id()
        action = self._decide(connection, request)
        if action.for_connection:
            self.wedges[connection.number] = action
        perform(self, connection, stream, action)

    def ended(self, connection: Connection, stream: Stream, outcome: str) -> None:
        """No answer will be sent on this stream any more."""
        if stream.arrival is None:
            return
        self.ledger.end(stream.arrival, outcome)
        # The request was being processed: whether the device gets it is what the client cannot know.
        uncertain = outcome in ("lost", "cancelled") and self.config.in_flight_on_loss == "delivered"
        if uncertain and stream.due is not None and plausibly_delivered(stream.due):
            self.ledger.deliver(stream.arrival)
        stream.due = None

    # Deciding

    def _decide(self, connection: Connection, request: Request) -> RequestAction:
        wedge = self.wedges.get(connection.number) if self.wedges else None
        if wedge is not None:
            return wedge
        if self.scripts.active:
            action = self.scripts.next(request.device, connection.number, request.apns_id, before_checks=True)
            if not isinstance(action, Pass):
                return action
        reason = self._fault(connection, request)
        if reason is not None:
            return rejection(reason)
        if self.scripts.active:
            action = self.scripts.next(
                request.device, connection.number, request.apns_id, before_checks=False
            )
            if not isinstance(action, Pass):
                return action
        return self.natural_answer(request)

    def _fault(self, connection: Connection, request: Request) -> str | None:
        rules = self._rules[connection.client_certificate]
        reason = first_fault(BEFORE_TOKEN, request, rules)
        if reason is not None:
            return reason
        if request.authorization is not None or not connection.client_certificate:
            bundle = bundle_of(request.topic or "")
            reason = self.desk.reason(
                request.authorization, connection.tokens, bundle, self._token_rules, self.now()
            )
        return reason or first_fault(AFTER_TOKEN, request, rules)

    def natural_answer(self, request: Request) -> Answer:
        """What a request that passed the checks gets from its device."""
        if self.devices.any_rule:
            device = self.devices.find(request.device)
            if device is not None and device.rule is not None:
                refusal = device.rule.refusal(bundle_of(request.topic or ""), int(self.now() * 1000))
                if refusal is not None:
                    return rejection(*refusal)
        return OK

    # Answering

    def answer(self, connection: Connection, stream: Stream, answer: Answer) -> None:
        """Now, or after the latency."""
        delay = answer.delay
        if delay is None:
            latency = self.config.latency
            delay = 0.0 if isinstance(latency, NoLatency) else sample(latency, self.chance)
        stream.due = answer
        if delay > 0:
            self.timeline.after(delay, partial(self._send, connection, stream))
        else:
            self._send(connection, stream)

    def _send(self, connection: Connection, stream: Stream) -> None:
        answer, arrival, request = stream.due, stream.arrival, stream.request
        if answer is None or arrival is None or request is None or not stream.open:
            return
        if connection.closing:
            return  # connection_lost will say what became of it
        if plausibly_delivered(answer):
            self.ledger.deliver(arrival)
        if connection.muted:
            self.ledger.end(arrival, "silent")
            return
        stream.due = None
        status = answer.code
        self.ledger.answer(arrival, status, answer.reason)
        connection.answered += 1
        if answer is OK and self._plain and len(stream.echo_id) == 36:
            connection.answer(stream, accepted(stream.echo_id.encode()), [])
        else:
            block, chunks = encode(answer, request, stream.echo_id, self.config)
            if not connection.answer(stream, block, chunks, finish=not answer.unfinished):
                self.ledger.totals.bodies_blocked += 1
        self._learn(connection, answer, status)

    def _learn(self, connection: Connection, answer: Answer, status: int) -> None:
        """What an answer changes for its connection."""
        config = self.config
        if status == 200:
            if connection.one_stream_until_accepted:
                connection.one_stream_until_accepted = False
                connection.limit_streams(config.max_concurrent_streams)
            return
        if answer.reason in config.wedge_on:
            self.wedges.setdefault(connection.number, answer)
        if answer.reason in config.one_stream_after and connection.cap.announced != 1:
            connection.one_stream_until_accepted = True
            connection.limit_streams(1)
        if 400 <= status < 500 and status != 410:
            connection.errors += 1
            if config.errors_per_connection is not None and connection.errors == config.errors_per_connection:
                connection.go_away(connection.receiver.highest, 0, b"", "when_done")

    def release(self, limit: int | None) -> int:
        """Answers held requests, oldest first, as if they had just come; how many were."""
        released = 0
        while self.held and (limit is None or released < limit):
            connection, stream = self.held.popleft()
            if stream.open and stream.request is not None:
                self.answer(connection, stream, self.natural_answer(stream.request))
                released += 1
        return released

    def forget_traffic(self, rules_too: bool) -> None:
        """Counters, arrivals and screens start again; requests that are still open count as the first ones."""
        self.devices.forget(rules_too)
        self.ledger = Ledger(self.devices, *self._caps)
        for connection in self.connections.values():
            for stream in connection.streams.values():
                self._count_again(connection, stream)
        self.desk.forget_uses()
        self.ended_connections.clear()
        self.protocol_errors.clear()
        self.protocol_error_count = 0
        self.connections_opened = len(self.connections)
        self.pings_ended = -sum(connection.pings for connection in self.connections.values())

    def _count_again(self, connection: Connection, stream: Stream) -> None:
        old = stream.arrival
        if old is None or stream.due is None:
            stream.arrival = None
            return
        stream.arrival = self.ledger.arrive(
            old.at, connection.number, stream.id, old.request, old.body or b""
        )
