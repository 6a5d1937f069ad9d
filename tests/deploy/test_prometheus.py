"""The Prometheus files: valid, true to the code, each alert with cases and a section of the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.catalog import families
from tests.deploy.prometheus_names import series

ROOT = Path(__file__).parent.parent.parent
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
CASES = sorted((PROMETHEUS / "tests").glob("*.yml"))

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="PROMETHEUS RULES NOT TESTED: promtool is missing (Debian: apt-get install prometheus)",
)


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for path in RULES
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def exported() -> set[str]:
    return {name for family in families() for name in family.series}


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_configuration_and_rules_are_valid() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    promtool("check", "rules", *RULES)


@needs_promtool
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_rules_fire_and_stay_silent_as_their_cases_say(cases: Path) -> None:
    promtool("test", "rules", cases)


def test_every_series_of_a_rule_is_exported_or_recorded() -> None:
    known = exported() | {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        missing = series(rule["expr"]) - known
        assert not missing, f"{rule.get('alert') or rule['record']} uses {missing}, which nothing exports"


def test_every_label_of_a_rule_is_a_label_of_its_metric() -> None:
    labels = {name: set(family.labels) for family in families() for name in family.series}
    for rule in rules():
        for name, matchers in re.findall(r"([a-z_:]+)\{([^{}]*)\}", rule["expr"]):
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) - {"job", "namespace", "instance"}
            assert used <= labels[name] | {"le"}, f"{name} has no label {used - labels[name]}"


def test_every_label_value_of_a_rule_exists() -> None:
    """A misspelt value selects nothing and alerts never."""
    values = {name: family.labels for family in families() for name in family.series}
    for rule in rules():
        for name, matchers in re.findall(r"([a-z_:]+)\{([^{}]*)\}", rule["expr"]):
            for label, value in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers):
                if allowed := values[name].get(label):
                    assert set(value.split("|")) <= set(allowed), (rule, label)


def test_a_gauge_of_the_database_is_never_summed_over_replicas() -> None:
    """Every replica exports the same number (deploy/catalog.py knows which): max by (...) comes first."""
    names = {family.name for family in families() if family.from_database}
    for rule in rules():
        for name in series(rule["expr"]) & names:
            inner = re.findall(r"(\w+) by \([^()]*\) \(\s*" + name + r"\b", rule["expr"])
            assert inner == ["max"], f"{rule.get('alert') or rule['record']}: {name} below {inner}"


def test_every_alert_has_a_level_a_text_and_a_runbook_section() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8"), re.M)
    names = [rule["alert"] for rule in alerts()]
    assert sorted(headings) == sorted(set(names)) == sorted(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert {"summary", "description"} <= set(rule["annotations"])
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_every_link_within_the_runbook_leads_somewhere() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    anchors = {heading.lower() for heading in re.findall(r"^## (\w+)$", text, re.M)}
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= anchors


def test_every_metric_of_the_runbook_is_exported() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    used = set(re.findall(r"`(?:\w+\()?((?:relay|drain|worker|outbox|notifications)_[a-z_]+)[`\[{]", text))
    used -= {"relay_drain"}  # the schema
    assert used - exported() - {family.name for family in families()} == set()


def test_every_alert_has_a_firing_and_a_silent_case() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for path in CASES:
        for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            for test in case.get("alert_rule_test", []):
                (fires if test["exp_alerts"] else silent).add(test["alertname"])
            for test in case.get("promql_expr_test", []):
                found = re.search(r'ALERTS\{alertname=~?"([^"]+)"', test["expr"])
                if found is not None and not test["exp_samples"]:
                    silent |= {name for name in _names() if re.fullmatch(found.group(1), name)}
    assert fires == _names()
    assert silent == _names()


def _names() -> set[str]:
    return {rule["alert"] for rule in alerts()}


def test_expressions_are_read_as_prometheus_reads_them() -> None:
    assert series(
        'sum by (a) (rate(x_total{b="c"}[5m] offset 5m)) / on (d) group_left (e) y:z:max > 1e3'
    ) == {
        "x_total",
        "y:z:max",
    }
    assert series("histogram_quantile(0.99, sum by (le) (rate(h_bucket[$__rate_interval])))") == {"h_bucket"}
