"""The arrival log and the counters: exact counts for ever, details for the newest arrivals.

Memory: the log keeps the newest `log_cap` arrivals and the bodies of the newest 10,000; counts per apns-id are
kept for the first `id_cap` ids (about 150 bytes each), and `ids_untracked` counts the requests beyond.
"""

from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

from deploy.simulator.devices import Devices
from deploy.simulator.request import Arrival, Request

_BODIES: Final = 10_000
_DELIVERED_STEP: Final = 1 << 32


@dataclass(slots=True)
class Totals:
    """Requests are complete requests that were processed; refused ones never got that far."""

    requests: int = 0
    answered: int = 0
    delivered: int = 0
    refused: int = 0
    excluded: int = 0
    repeated_requests: int = 0
    repeated_deliveries: int = 0
    never_answered: int = 0
    ids_untracked: int = 0
    bodies_blocked: int = 0


class Ledger:
    """Every count is kept up to date as it happens; reading them costs nothing that grows with the arrivals."""

    def __init__(self, devices: Devices, log_cap: int, id_cap: int) -> None:
        self.devices = devices
        self.totals = Totals()
        self.answers: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self._log: deque[Arrival] = deque(maxlen=log_cap)
        self._with_body: deque[Arrival] = deque()
        self._counts: dict[bytes, int] = {}
        self._shared: dict[int, int] = {}
        self._repeated: dict[bytes, None] = {}
        self._id_cap = id_cap
        self._sequence = 0

    @property
    def distinct_ids(self) -> int:
        return len(self._counts)

    def arrive(self, at: float, connection: int, stream_id: int, request: Request, body: bytes) -> Arrival:
        """Logs and counts a complete request."""
        arrival = self.log(at, connection, stream_id, request, body)
        self.totals.requests += 1
        self.devices.at(request.device).requests += 1
        if request.apns_id is not None and self._count(request.apns_id, 1) & (_DELIVERED_STEP - 1) > 1:
            self.totals.repeated_requests += 1
        return arrival

    def log(self, at: float, connection: int, stream_id: int, request: Request, body: bytes) -> Arrival:
        """Logs without counting: what was refused before it was processed."""
        self._sequence += 1
        arrival = Arrival(self._sequence, at, connection, stream_id, request, body)
        self._log.append(arrival)
        self._with_body.append(arrival)
        if len(self._with_body) > _BODIES:
            self._with_body.popleft().body = None
        return arrival

    def deliver(self, arrival: Arrival) -> None:
        """The device has it. Safe to call twice for one arrival."""
        if arrival.delivered:
            return
        arrival.delivered = True
        self.totals.delivered += 1
        self.devices.deliver(arrival)
        apns_id = arrival.request.apns_id
        if apns_id is not None and self._count(apns_id, _DELIVERED_STEP) >= 2 * _DELIVERED_STEP:
            self.totals.repeated_deliveries += 1

    def answer(self, arrival: Arrival, status: int, reason: str | None) -> None:
        arrival.outcome, arrival.status, arrival.reason = "answered", status, reason
        self.totals.answered += 1
        self.answers[f"{status} {reason}" if reason else str(status)] += 1

    def end(self, arrival: Arrival, outcome: str) -> None:
        """The request ended without an answer, or will never have one."""
        if arrival.outcome is not None:
            return
        arrival.outcome = outcome
        self.outcomes[outcome] += 1
        if outcome == "refused":
            self.totals.refused += 1
            return
        self.totals.never_answered += 1
        if outcome == "excluded":
            self.totals.excluded += 1

    def _count(self, apns_id: str, step: int) -> int:
        try:
            key = bytes.fromhex(apns_id.replace("-", ""))
        except ValueError:
            key = apns_id.encode()[:64]
        before = self._counts.get(key, 0)
        if not before and len(self._counts) >= self._id_cap:
            self.totals.ids_untracked += step == 1
            return 0
        after = before + step
        # Nearly all ids have one of a few counts: sharing the numbers saves 32 bytes per id.
        self._counts[key] = self._shared.setdefault(after, after)
        if after & (_DELIVERED_STEP - 1) > 1 or after >= 2 * _DELIVERED_STEP:
            self._repeated[key] = None
        return after

    def of_id(self, apns_id: str) -> dict[str, object]:
        """Counts and logged arrivals of one push. Walks the log."""
        try:
            key = bytes.fromhex(apns_id.replace("-", ""))
        except ValueError:
            key = apns_id.encode()[:64]
        count = self._counts.get(key, 0)
        wanted = apns_id.lower()
        arrivals = [one.as_json() for one in self._log if (one.request.apns_id or "").lower() == wanted]
        return {
            "requests": count % _DELIVERED_STEP,
            "delivered": count // _DELIVERED_STEP,
            "arrivals": arrivals,
        }

    def repeated(self, limit: int) -> dict[str, dict[str, int]]:
        """Ids that came or were delivered more than once, oldest first."""
        return {
            _written(key): {
                "requests": self._counts[key] % _DELIVERED_STEP,
                "delivered": self._counts[key] // _DELIVERED_STEP,
            }
            for key in islice(self._repeated, limit)
        }

    def arrivals(
        self, device: str | None = None, connection: int | None = None, after: int = 0, limit: int = 1000
    ) -> list[Arrival]:
        """The first `limit` logged arrivals with a sequence above `after`, oldest first."""
        chosen = (
            one
            for one in self._log
            if one.sequence > after
            and (device is None or one.request.device == device)
            and (connection is None or one.connection == connection)
        )
        return list(islice(chosen, limit))


def _written(key: bytes) -> str:
    if len(key) != 16:
        return key.decode("utf-8", "replace")
    text = key.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
