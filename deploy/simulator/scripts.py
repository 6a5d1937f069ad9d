"""Scripts: what happens to requests one after the other, for one device or for all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal

from deploy.simulator.actions import Pass, RequestAction

Scope = Literal["all", "each_device", "each_connection", "each_push"]
End = Literal["pass", "repeat_last", "repeat_all"]
_PASS: Final = Pass()
_REMEMBERED_POSITIONS: Final = 1_000_000


@dataclass(slots=True)
class Script:
    """Steps consumed in order of arrival.

    scope: who shares the position: "all" requests, or each device, connection or push (apns-id) its own copy.
    end: what follows the last step: requests pass, the last step again, or all of them from the first.
    before_checks: it also takes requests that the checks would reject (else those do not use up a step).
    """

    steps: Sequence[RequestAction]
    end: End = "pass"
    scope: Scope = "all"
    before_checks: bool = False
    used: int = 0
    _positions: dict[object, int] = field(default_factory=dict)
    _ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        total = 0
        for step in self.steps:
            total += step.times
            self._ends.append(total)

    def next(self, device: str, connection: int, push: str | None) -> RequestAction | None:
        """The step for this request; None when the script has no more."""
        key: object = None
        if self.scope == "each_device":
            key = device
        elif self.scope == "each_connection":
            key = connection
        elif self.scope == "each_push":
            key = push
        position = self._positions.get(key, 0)
        if not self._ends:
            return None
        length = self._ends[-1]
        if position >= length:
            if self.end == "pass":
                return None
            position = position % length if self.end == "repeat_all" else length - 1
        if len(self._positions) >= _REMEMBERED_POSITIONS and key not in self._positions:
            del self._positions[next(iter(self._positions))]
        self._positions[key] = position + 1
        self.used += 1
        for index, end in enumerate(self._ends):
            if position < end:
                return self.steps[index]
        raise AssertionError("unreachable: the position is below the last end")


class ScriptBook:
    """The scripts in force: at most one per device and one for every device; the device's own goes first."""

    def __init__(self, chance: Random) -> None:
        self._of_device: dict[str, Script] = {}
        self._of_all: Script | None = None
        self._chance = chance
        self.active = False

    def put(self, device: str | None, script: Script) -> None:
        """Replaces that device's script, or (None) the one for all devices."""
        if device is None:
            self._of_all = script
        else:
            self._of_device[device] = script
        self.active = True

    def clear(self, device: str | None = None, everything: bool = True) -> None:
        if everything:
            self._of_device.clear()
            self._of_all = None
        elif device is None:
            self._of_all = None
        else:
            self._of_device.pop(device, None)
        self.active = self._of_all is not None or bool(self._of_device)

    def next(self, device: str, connection: int, push: str | None, before_checks: bool) -> RequestAction:
        """The step that takes this request, at this moment (before or after the checks)."""
        for script in (self._of_device.get(device), self._of_all):
            if script is None or script.before_checks is not before_checks:
                continue
            step = script.next(device, connection, push)
            if step is not None:
                return step if step.chance >= 1 or self._chance.random() < step.chance else _PASS
        return _PASS

    def as_json(self) -> dict[str, object]:
        def told(script: Script) -> dict[str, object]:
            return {
                "steps": len(script.steps),
                "end": script.end,
                "scope": script.scope,
                "before_checks": script.before_checks,
                "used": script.used,
            }

        return {
            "all_devices": None if self._of_all is None else told(self._of_all),
            "devices": {device: told(script) for device, script in self._of_device.items()},
        }
