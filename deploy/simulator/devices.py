"""Devices: what APNs knows of each, how often each was asked for, and what each would show.

Source for what is shown: Apple, "Sending notification requests to APNs" (apns-collapse-id): of several pushes with
one collapse id a device shows the latest; a push without one stands by itself. Background pushes show nothing.
"""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Final

from pydantic import ConfigDict, TypeAdapter

from deploy.simulator.request import Arrival

_SHOWN_WITHOUT_COLLAPSE: Final = 50


@dataclass(frozen=True, slots=True)
class DeviceRule:
    """How APNs treats this device token; times in milliseconds since the epoch.

    unregistered_since, expired_since: 410 from that time on. topics: the bundle ids it belongs to (else
    DeviceTokenNotForTopic). reason: every push gets this (e.g. BadDeviceToken: of the other environment).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    unregistered_since: int | None = None
    expired_since: int | None = None
    topics: tuple[str, ...] | None = None
    reason: str | None = None

    def refusal(self, bundle: str, now_ms: int) -> tuple[str, int | None] | None:
        """Reason and timestamp, or None."""
        if self.reason is not None:
            return self.reason, self.unregistered_since
        if self.topics is not None and bundle not in self.topics:
            return "DeviceTokenNotForTopic", None
        if self.unregistered_since is not None and self.unregistered_since <= now_ms:
            return "Unregistered", self.unregistered_since
        if self.expired_since is not None and self.expired_since <= now_ms:
            return "ExpiredToken", self.expired_since
        return None


_RULE: TypeAdapter[DeviceRule] = TypeAdapter(DeviceRule)


def read_rule(value: object) -> DeviceRule:
    return _RULE.validate_python(value)


class Device:
    """Counters always; the notifications on its screen as far as they are kept (see Devices)."""

    __slots__ = ("_collapsed", "_separate", "background", "delivered", "has_screen", "requests", "rule")

    def __init__(self) -> None:
        self.rule: DeviceRule | None = None
        self.requests = 0
        self.delivered = 0
        self.background = 0
        self.has_screen = False
        self._collapsed: dict[bytes, tuple[Arrival, int]] | None = None
        self._separate: deque[Arrival] | None = None

    def show(self, arrival: Arrival) -> None:
        """Of two pushes with one collapse id the one that arrived later stays, in whatever order they end."""
        collapse_id = arrival.request.collapse_id
        if collapse_id is None:
            if self._separate is None:
                self._separate = deque(maxlen=_SHOWN_WITHOUT_COLLAPSE)
            self._separate.append(arrival)
            return
        if self._collapsed is None:
            self._collapsed = {}
        on_screen, count = self._collapsed.get(collapse_id, (arrival, 0))
        self._collapsed[collapse_id] = (max(on_screen, arrival, key=lambda one: one.sequence), count + 1)

    def as_json(self) -> dict[str, object]:
        """`shown`: one entry per notification on the screen; `collapsed` counts the pushes that made it."""
        entries = [(arrival, count) for arrival, count in (self._collapsed or {}).values()]
        entries += [(arrival, 1) for arrival in self._separate or ()]
        entries.sort(key=lambda entry: entry[0].sequence)
        return {
            "requests": self.requests,
            "delivered": self.delivered,
            "background": self.background,
            "rule": None if self.rule is None else asdict(self.rule),
            "shown": [{**arrival.as_json(), "collapsed": count} for arrival, count in entries],
        }


class Devices:
    """Every device asked for. Screens are kept for the first `screens` devices, the counters for all."""

    def __init__(self, screens: int) -> None:
        self._devices: dict[str, Device] = {}
        self._screens_left = screens
        self._screens = screens
        self.any_rule = False

    def __len__(self) -> int:
        return len(self._devices)

    def at(self, token: str) -> Device:
        device = self._devices.get(token)
        if device is None:
            device = self._devices[token] = Device()
        return device

    def find(self, token: str) -> Device | None:
        return self._devices.get(token)

    def listed(self, offset: int, limit: int) -> dict[str, dict[str, int]]:
        chosen = list(self._devices.items())[offset : offset + limit]
        return {token: {"requests": one.requests, "delivered": one.delivered} for token, one in chosen}

    def put_rule(self, token: str, rule: DeviceRule | None) -> None:
        self.at(token).rule = rule
        self.any_rule = self.any_rule or rule is not None

    def deliver(self, arrival: Arrival) -> None:
        device = self.at(arrival.request.device)
        device.delivered += 1
        if arrival.request.push_type == "background":
            device.background += 1
            return
        if not device.has_screen and self._screens_left > 0:
            self._screens_left -= 1
            device.has_screen = True
        if device.has_screen:
            device.show(arrival)

    def forget(self, rules_too: bool) -> None:
        """Forget what was sent; the rules stay unless told."""
        rules = {} if rules_too else {token: one.rule for token, one in self._devices.items() if one.rule}
        self._devices = {}
        self._screens_left = self._screens
        self.any_rule = False
        for token, rule in rules.items():
            self.put_rule(token, rule)

    def forget_rules(self) -> None:
        for device in self._devices.values():
            device.rule = None
        self.any_rule = False
