"""A real Prometheus scrapes two relays and a drain at work: every rule and every query of the dashboard has data."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.catalog import families
from deploy.grafana.panels import ROWS
from deploy.local.ports import free_port
from deploy.local.processes import Child
from tests.deploy.prometheus_names import series
from tests.deploy.test_prometheus import RULES, alerts, rules

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="NOTHING WAS SCRAPED: prometheus is missing (Debian: apt-get install prometheus)",
)

EVENTS, DELIVERIES, STUCK = 40, 30, 3
BUSY = {
    "Event: written to published",
    "Notification: written to accepted by APNs",
    "One batch of relay",
    "APNs' answers",
    "Lease left when the outcome was written",
    "Wait for a database connection",
    "Event loop lag",
}
"""Graphs of histograms that have seen something: a quantile of nothing is NaN, which would be data too."""


class Prometheus:
    """A server of this test, and its answers."""

    def __init__(self, directory: Path, jobs: dict[str, list[int]]) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}/api/v1"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in RULES],
            "scrape_configs": [
                {
                    "job_name": job,
                    "static_configs": [{"targets": [f"127.0.0.1:{each}" for each in ports]}],
                }
                for job, ports in jobs.items()
            ],
        }
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._log = (directory / "prometheus.log").open("wb")
        self._child = Child(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=self._log,
            stdout=self._log,
        )

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        expression = expression.replace("$__rate_interval", "20s").replace("$namespace", ".*")
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float | None:
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def close(self) -> None:
        self._child.stop()
        self._log.close()


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[Any]:
    started: list[Prometheus] = []

    def start(**jobs: list[int]) -> Prometheus:
        started.append(Prometheus(tmp_path, jobs))
        return started[-1]

    yield start
    for each in started:
        each.close()


async def until(condition: Any, what: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except OSError:
            pass  # not listening yet
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.25)


async def test_every_rule_and_every_query_has_data(
    database, broker, relay, drain, simulator, scraped
) -> None:
    await broker.declare()
    quick = {"OBSERVE_INTERVAL": 1}
    relays = [relay(**quick, RELAY_RETRY_BASE=600) for _ in range(2)]
    drains = [drain(**quick)]
    prometheus = scraped(
        relay=[daemon.probe_port for daemon in relays], drain=[daemon.probe_port for daemon in drains]
    )
    await until(lambda: prometheus.value("count(worker_build_info)") == 3, "three targets are scraped")
    await until(lambda: prometheus.query("relay_published_total"), "the counters were seen at zero")

    # Something of everything: what goes through, what is stuck, a row that nobody claims, a snapshot that is held.
    await database.enqueue_events(EVENTS)
    await database.enqueue_deliveries(DELIVERIES)
    await database.fetch(
        """SELECT count({schema}.enqueue_event('order', 'n', 'order.placed', '{}', exchange => 'missing'))
           FROM generate_series(1, $1::int)""",
        STUCK,
    )
    await database.enqueue_deliveries(1, app="nobodys")
    async with database.session() as holder:
        await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await holder.fetchval("SELECT count(*) FROM relay_drain.outbox")
        await until(
            lambda: prometheus.value("sum(increase(relay_published_total[1m]))"), "events are published"
        )
        await until(
            lambda: (prometheus.value("namespace_job:outbox_unpublished:max") or 0) == STUCK,
            "two relays that see three rows see three rows",
        )
        await until(
            lambda: prometheus.value('sum(drain_outcomes_total{outcome="sent"})') == DELIVERIES, "pushes"
        )
        await until(
            lambda: prometheus.query("database_oldest_transaction_timestamp_seconds"), "a snapshot is seen"
        )
        await until(lambda: not _without_data(prometheus), "every rule and query has data")

        assert _without_data(prometheus) == []
        for row in ROWS:
            for panel in row.panels:
                if panel.title in BUSY:
                    for query in panel.queries.values():
                        values = [float(sample["value"][1]) for sample in prometheus.query(query)]
                        assert not all(math.isnan(value) for value in values), (panel.title, query)
        groups = prometheus.get("rules")["groups"]
        assert sum(len(group["rules"]) for group in groups) == len(rules())
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
        await holder.execute("ROLLBACK")

    # What the code is documented to export is what the processes export.
    documented = {
        daemon: {f.name for f in families() if daemon in f.daemons} for daemon in ("relay", "drain")
    }
    for daemon, name in ((relays[0], "relay"), (drains[0], "drain")):
        text = daemon.get("/metrics")[1]
        exported = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
        assert exported == documented[name]
    for daemon in (*relays, *drains):
        assert daemon.stop() == 0


def _without_data(prometheus: Prometheus) -> list[str]:
    """Recording rules and queries of the dashboard that give nothing, and alerts on series that are not there."""
    recorded = [rule["expr"] for rule in rules() if "record" in rule]
    drawn = [query for row in ROWS for panel in row.panels for query in panel.queries.values()]
    missing = [expression for expression in recorded + drawn if not prometheus.query(expression)]
    for rule in alerts():
        missing += [f"{rule['alert']}: {name}" for name in series(rule["expr"]) if not prometheus.query(name)]
    return missing
