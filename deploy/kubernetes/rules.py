"""``python -m deploy.kubernetes.rules``: writes ``components/monitoring/rules.yaml`` from ``deploy/prometheus/rules``.

The operator's PrometheusRule holds the same groups as a rule file, so the rules stand once and are tested once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
RULES = HERE.parent / "prometheus" / "rules"
OUTPUT = HERE / "components" / "monitoring" / "rules.yaml"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, for people."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def prometheus_rule() -> str:
    """The file's text."""
    groups = [
        group
        for path in (RULES / "recording.yml", RULES / "alerts.yml")
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    ]
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "relay-drain"},
        "spec": {"groups": groups},
    }
    head = "# Made by `python -m deploy.kubernetes.rules` from deploy/prometheus/rules; change those, not this file.\n"
    return head + yaml.dump(resource, Dumper=_Dumper, sort_keys=False, width=120)


def main() -> int:
    """Write the file."""
    OUTPUT.write_text(prometheus_rule(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
