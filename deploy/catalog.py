"""What the code exports and logs, read from the code: for the generated documents and for the tests of
Prometheus rules and dashboards.
"""

from __future__ import annotations

import ast
import importlib
import logging
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from common.logs import LogEvent
from common.metrics import DeliveryGauges, OutboxGauges, WorkerMetrics
from drain.metrics import DrainMetrics
from relay.metrics import RelayMetrics

ROOT = Path(__file__).parent.parent
PACKAGES = ("common", "relay", "drain")
_DECLARATION = re.compile(r"^([A-Z][A-Z0-9_]*) = define\(", re.MULTILINE)
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: the name as exposed, and the label values that exist from the start."""

    name: str
    kind: str
    unit: str
    labels: dict[str, list[str]]
    help: str
    daemons: frozenset[str]
    from_database: bool

    @property
    def series(self) -> set[str]:
        """Names of its series in Prometheus."""
        base = self.name.removesuffix("_total") if self.kind == "counter" else self.name
        return {base + suffix for suffix in SUFFIXES[self.kind]}


def registry(daemon: str) -> tuple[CollectorRegistry, CollectorRegistry]:
    """Return what one daemon registers: about itself, and from the database."""
    own, database = CollectorRegistry(), CollectorRegistry()
    if daemon == "relay":
        WorkerMetrics(own, ("lane-1",))
        RelayMetrics(own, "events")
        OutboxGauges(database)
    else:
        WorkerMetrics(own, ("claim",))
        DrainMetrics(own, ["app"])
        DeliveryGauges(database)
    return own, database


def families() -> list[Family]:
    """Every metric of both daemons, in the order of the code."""
    found: dict[str, Family] = {}
    for daemon in ("relay", "drain"):
        for source, from_database in zip(registry(daemon), (False, True), strict=True):
            for collector in list(source._collector_to_names):
                for family in _families(collector, daemon, from_database):
                    known = found.get(family.name)
                    daemons = family.daemons | (known.daemons if known else frozenset())
                    found[family.name] = replace(family, daemons=daemons)
    return list(found.values())


def _families(collector: Collector, daemon: str, from_database: bool) -> Iterator[Family]:
    if isinstance(collector, MetricWrapperBase):
        # The oldest transaction is the observer's too, although it stands among what both daemons export.
        name = collector._name
        yield _family(collector, daemon, from_database or name.startswith("database_"))
        return
    for metric in collector.collect():  # the library's own: process_*
        name = metric.name + ("_total" if metric.type == "counter" else "")
        yield Family(
            name, metric.type, _unit(name), {}, metric.documentation, frozenset({daemon}), from_database
        )


def _family(metric: MetricWrapperBase, daemon: str, from_database: bool) -> Family:
    kind = str(metric._type)
    name = metric._name + ("_total" if kind == "counter" else "")
    labels: dict[str, list[str]] = {label: [] for label in metric._labelnames}
    for label_values in getattr(metric, "_metrics", {}):
        for label, value in zip(metric._labelnames, label_values, strict=True):
            if value not in labels[label] and not _incidental(label, value):
                labels[label].append(value)
    return Family(name, kind, _unit(name), labels, metric._documentation, frozenset({daemon}), from_database)


def _unit(name: str) -> str:
    return next((unit for unit in ("seconds", "bytes") if unit in name.split("_")), "")


def _incidental(label: str, value: str) -> bool:
    """Values of this machine or of the example above, not of the code."""
    return label in ("version", "commit", "app", "loop")


@dataclass(frozen=True, slots=True)
class Event:
    """One log event with the fields that its call sites give it."""

    name: str
    level: str
    meaning: str
    fields: list[str]


OUTAGE_FIELDS = ("failures", "seconds")
ERROR_FIELDS = ("error", "error_type")


def event_table() -> dict[str, list[Event]]:
    """Every declared event by package, in the order of declaration."""
    fields = _emitted_fields()
    tables: dict[str, list[Event]] = {package: [] for package in PACKAGES}
    for module in declaring_modules():
        declared = constants(module)
        for constant, value in vars(module).items():
            if not isinstance(value, LogEvent) or constant not in declared:
                continue
            level = logging.getLevelName(value.level).lower()
            event = Event(value.name, level, value.meaning, fields.get(constant, []))
            tables[module.__name__.partition(".")[0]].append(event)
    return tables


def declaring_modules() -> Iterator[ModuleType]:
    """Import and return every module that declares events, in the order of their names."""
    for package in PACKAGES:
        root = importlib.import_module(package)
        for info in sorted(pkgutil.walk_packages(root.__path__, package + "."), key=lambda info: info.name):
            path = ROOT / Path(*info.name.split("."))
            if not info.ispkg and _DECLARATION.search(path.with_suffix(".py").read_text(encoding="utf-8")):
                yield importlib.import_module(info.name)


def constants(module: ModuleType) -> list[str]:
    """Names of the events that a module declares; an imported one is no declaration."""
    assert module.__file__ is not None
    return _DECLARATION.findall(Path(module.__file__).read_text(encoding="utf-8"))


def _emitted_fields() -> dict[str, list[str]]:
    """Fields of each event's constant, from ``emit(CONSTANT, error, field=...)`` and ``Outage(logger, A, B)``."""
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            chosen = {
                node.targets[0].id: _constants(node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    _read_call(node, chosen, found)
    return {constant: list(fields) for constant, fields in found.items()}


def _read_call(
    call: ast.Call, chosen: dict[str, list[str]], found: defaultdict[str, dict[str, None]]
) -> None:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function == "emit" and call.args:
        first = call.args[0]
        names = _constants(first) or chosen.get(getattr(first, "id", ""), [])
        for name in names:
            if len(call.args) > 1:
                found[name].update(dict.fromkeys(ERROR_FIELDS))
            found[name].update({keyword.arg: None for keyword in call.keywords if keyword.arg})
    elif function == "Outage" and len(call.args) >= 3:
        for failing in _constants(call.args[1]):
            found[failing].update(dict.fromkeys((*ERROR_FIELDS, *OUTAGE_FIELDS)))
        for recovered in _constants(call.args[2]):
            found[recovered].update(dict.fromkeys(OUTAGE_FIELDS))


def _constants(node: ast.expr) -> list[str]:
    """Names in capitals that an expression can be: one, or the two of ``A if ... else B``."""
    if isinstance(node, ast.IfExp):
        return _constants(node.body) + _constants(node.orelse)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return [name] if name.isupper() else []
