"""docs/metrics.md, docs/logs.md and docs/settings.md are the code, and the metrics keep Prometheus' own rules."""

from __future__ import annotations

import re

import pytest

from deploy import docs
from deploy.catalog import Family, event_table, families

UNITS = ("seconds", "bytes")


@pytest.mark.parametrize("name", docs.FILES)
def test_the_table_is_the_code(name: str) -> None:
    written = (docs.ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == docs.FILES[name](), "run: python -m deploy.docs"


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_a_metric_keeps_the_rules_of_naming(family: Family) -> None:
    """prometheus.io/docs/practices/naming: a prefix, base units, _total for counters, no label in the name."""
    assert re.fullmatch(r"(worker|relay|drain|outbox|notifications|database|process)_[a-z0-9_]+", family.name)
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert not re.search(r"_(milliseconds|ms|minutes|kilobytes|count|sum|bucket)(_|$)", family.name)
    if "timestamp" in family.name or "duration" in family.name or family.kind == "histogram":
        assert family.unit in UNITS
    assert family.help.endswith(".")


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_every_label_set_is_there_from_the_start(family: Family) -> None:
    """increase() can not see the first event of a series that begins with it. What is read from the database
    is the exception: a value that is not known is not zero."""
    if family.from_database:
        return
    for label, values in family.labels.items():
        assert values or label in ("app", "loop", "version", "commit"), f"{family.name}: no value of {label}"


def test_labels_are_bounded() -> None:
    """No label could hold a token, an id or a text; apps and exchanges are those of the settings."""
    names = {label for family in families() for label in family.labels}
    assert names <= {
        "app",
        "commit",
        "exchange",
        "loop",
        "outcome",
        "reason_class",
        "source",
        "stage",
        "table",
        "verdict",
        "version",
    }


def test_every_declared_event_is_emitted_somewhere() -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for package in ("common", "relay", "drain")
        for path in (docs.ROOT / package).rglob("*.py")
    )
    for events in event_table().values():
        for event in events:
            used = len(re.findall(rf"\b{event.name.upper()}\b", sources))
            assert used >= 2, f"{event.name} is declared and never emitted"
