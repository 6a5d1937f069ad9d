"""``python -m deploy.grafana.dashboard``: writes ``dashboards/relay-drain.json``.

Four rows: lateness, flow, outcomes, inside. The lines drawn in are the bounds of the alerts, read from
``deploy/prometheus/rules/alerts.yml``. ``--check`` writes nothing and exits with 1 when the file differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from deploy.grafana.panels import ROWS, Panel

HERE = Path(__file__).parent
OUTPUT = HERE / "dashboards" / "relay-drain.json"
ALERTS = HERE.parent / "prometheus" / "rules" / "alerts.yml"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8  # three panels in a row of Grafana's 24 columns


def bounds() -> dict[str, float]:
    """The number behind the last comparison of each alert."""
    found = {}
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            numbers = re.findall(r"> ([0-9.]+)", rule["expr"])
            if numbers:
                found[str(rule["alert"])] = float(numbers[-1])
    return found


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    limits = bounds()
    y = 0
    for row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        y += 1
        for index, panel in enumerate(row.panels):
            x = index % 3 * WIDTH
            place = {"x": x, "y": y + index // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            limit = limits[panel.alert] if panel.alert else None
            panels.append(_panel(panel, len(panels) + 1, place, limit))
        y += -(-len(row.panels) // 3) * HEIGHT
    return {
        "uid": "relay-drain",
        "title": "Relay & Drain",
        "tags": ["relay-drain"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int], limit: float | None) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if limit:  # a line at 0 says nothing
        steps.append({"color": "red", "value": limit})
    about = panel.description
    if panel.alert:
        about = f"{about} Red: alert {panel.alert} (docs/runbook.md#{panel.alert.lower()}).".strip()
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": about,
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for index, (legend, expr) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "thresholds": {"mode": "absolute", "steps": steps},
                "custom": {
                    "lineWidth": 1,
                    "fillOpacity": 20 if panel.stacked else 0,
                    "stacking": {"mode": "normal" if panel.stacked else "none"},
                    "thresholdsStyle": {"mode": "line" if limit else "off"},
                },
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0},
        {
            "name": "namespace",
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": "label_values(worker_build_info, namespace)", "refId": "namespace"},
            "definition": "label_values(worker_build_info, namespace)",
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",  # matches targets without the label too: compose has no namespaces
            "multi": True,
            "current": {"selected": True, "text": "All", "value": "$__all"},
        },
    ]


def main(arguments: list[str] | None = None) -> int:
    """Write the file, or say that it differs."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.dashboard")
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    text = json.dumps(dashboard(), indent=1) + "\n"
    if OUTPUT.exists() and OUTPUT.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(
            f"{OUTPUT.name} is not what the code says; run: python -m deploy.grafana.dashboard",
            file=sys.stderr,
        )
        return 1
    OUTPUT.write_text(text, encoding="utf-8")
    print(f"{OUTPUT.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
