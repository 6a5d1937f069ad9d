"""The dashboard: as its script makes it, true to the metrics of the code, with the alerts' bounds drawn in."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from deploy.catalog import families
from deploy.grafana.dashboard import HERE, OUTPUT, bounds, dashboard
from deploy.grafana.panels import ROWS, Panel
from tests.deploy.prometheus_names import series
from tests.deploy.test_prometheus import exported, rules

PANELS = [panel for row in ROWS for panel in row.panels]


def queries() -> list[tuple[str, str]]:
    return [(panel.title, query) for panel in PANELS for query in panel.queries.values()]


def test_the_file_is_what_the_script_makes() -> None:
    assert json.loads(OUTPUT.read_text(encoding="utf-8")) == dashboard(), "python -m deploy.grafana.dashboard"


def test_it_has_the_four_rows() -> None:
    titles = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert titles == ["Lateness", "Flow", "Outcomes", "Inside"]


@pytest.mark.parametrize(("title", "query"), queries())
def test_every_series_of_a_query_is_exported_or_recorded(title: str, query: str) -> None:
    known = exported() | {rule["record"] for rule in rules() if "record" in rule}
    assert series(query) - known == set()
    labels = {name: set(family.labels) for family in families() for name in family.series}
    for name, matchers in re.findall(r"([a-z_:]+)\{([^{}]*)\}", query):
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) - {"namespace", "job", "instance"}
        assert used <= labels.get(name, set()), f"{title}: {name} has no label {used}"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_legend_names_only_labels_that_the_query_keeps(panel: Panel) -> None:
    for legend, query in panel.queries.items():
        wanted = set(re.findall(r"\{\{(\w+)\}\}", legend))
        kept = {"namespace", "job", "instance"}
        if grouped := re.search(r"by \(([^()]*)\)", query):
            kept = set(grouped.group(1).split(", "))
        else:
            for family in families():
                kept |= set(family.labels) if family.series & series(query) else set()
            for name in series(query):
                kept |= set(name.partition(":")[0].split("_")) if ":" in name else set()
        assert wanted <= kept


def test_a_gauge_of_the_database_is_never_summed() -> None:
    names = {family.name for family in families() if family.from_database}
    for title, query in queries():
        if series(query) & names:
            assert re.search(r"\bmax\b", query), title
            assert not re.search(r"\b(sum|count|avg)\b", query), title


def test_every_bound_of_a_rate_or_an_age_is_drawn_in() -> None:
    drawn = {panel.alert: bounds()[panel.alert] for panel in PANELS if panel.alert}
    lines: dict[str, Any] = {
        panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
        for panel in dashboard()["panels"]
        if panel["type"] != "row"
    }
    for panel in PANELS:
        if panel.alert and drawn[panel.alert]:
            assert lines[panel.title] == drawn[panel.alert]
    assert {name for name, bound in bounds().items() if bound} - set(drawn) == {
        "RelayRowFailuresGrowing",  # the same bound on the same graph
        "WorkerReplicaStalled",  # as WorkerStalled
    }


def test_every_query_asks_the_datasource_that_is_chosen() -> None:
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert {"datasource", "namespace"} <= variables
    text = json.dumps(dashboard())
    assert set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"} <= variables
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"


def test_no_two_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_the_provisioning_finds_the_dashboard_where_compose_mounts_it() -> None:
    provider = yaml.safe_load((HERE / "provisioning/dashboards/relay-drain.yml").read_text(encoding="utf-8"))
    compose = (HERE.parent.parent / "docker-compose.yml").read_text(encoding="utf-8")
    assert f"./deploy/grafana/dashboards:{provider['providers'][0]['options']['path']}:ro" in compose
