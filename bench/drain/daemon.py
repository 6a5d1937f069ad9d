"""The measured drain: the real process, with rows in a real PostgreSQL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import psycopg

from bench.drain.figures import Figure
from bench.process import cpu_seconds, rss_megabytes
from deploy.local.postgres import PrivatePostgres
from deploy.local.supervise import Daemon
from deploy.simulator.client import SimulatorClient

APP = "shop"
POLL_SECONDS = 0.05
PATIENCE = 120.0

ENQUEUE = """
SELECT count(relay_drain.enqueue_delivery(%s, lpad(to_hex(n), 64, '0'), %s::jsonb, priority => 10))
FROM generate_series(1, %s) AS n
"""
OPEN = "SELECT 1 FROM relay_drain.notification_deliveries WHERE status IN ('pending', 'claimed') LIMIT 1"
ENDED = "SELECT status, count(*) FROM relay_drain.notification_deliveries GROUP BY status"


class MeasuredDrain:
    """`python -m drain run` with its defaults, and a database that is its own."""

    def __init__(
        self,
        postgres: PrivatePostgres,
        simulator: SimulatorClient,
        app: dict[str, Any],
        payload: str,
        settings: dict[str, str],
    ) -> None:
        self._simulator = simulator
        self._payload = payload
        self.url = postgres.admin.create("bench")
        subprocess.run(
            [sys.executable, "-m", "migrations", "upgrade"],
            env=os.environ | {"DATABASE_URL": self.url},
            check=True,
            capture_output=True,
        )
        self.rss = 0.0
        self.rows = 0
        self.statements = 0.0
        """Claim and settle statements so far."""
        environment = {
            "DATABASE_URL": self.url,
            "DRAIN_APPS": json.dumps({APP: app}),
            "PROBE_PORT": "0",
            "LOG_FORMAT": "json",
            "SECRETS_DIR": os.devnull,
            **settings,
        }
        self.process = Daemon(["-m", "drain", "run"], environment, name="drain")
        self.process.wait_for("started")

    def push(self, count: int) -> Figure:
        """One round: rows appear in one commit, and all are pushed and settled.

        CPU is of the whole round, from idle to idle, so all claims and settles are in it. The rate is from the
        arrival of the first tenth at APNs to the last row settled: an idle drain looks once in a poll interval.

        Raises:
            SystemExit: not every row was sent, or APNs saw another number of pushes.
        """
        pid = self.process.pid
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE relay_drain.notification_deliveries")
            connection.execute("CHECKPOINT")
            arrived = self._simulator.stats()["requests"]
            before = cpu_seconds(pid)
            connection.execute(ENQUEUE, (APP, self._payload, count))
            first = count // 10
            self._simulator.wait(PATIENCE, requests=arrived + first)
            began = time.perf_counter()
            self._simulator.wait(PATIENCE, requests=arrived + count)
            deadline = time.monotonic() + PATIENCE
            while connection.execute(OPEN).fetchone() is not None:
                if time.monotonic() > deadline:
                    raise SystemExit("drain did not settle everything within two minutes")
                time.sleep(POLL_SECONDS)
            seconds = time.perf_counter() - began
            used = cpu_seconds(pid) - before
            ended: dict[str, int] = dict(connection.execute(ENDED).fetchall())
        self.rss = max(self.rss, rss_megabytes(pid))
        self.rows += count
        requests = self._simulator.stats()["requests"] - arrived
        if ended != {"sent": self.rows} or requests != count:
            raise SystemExit(f"{count} rows enqueued, {requests} pushes arrived, rows ended as {ended}")
        return Figure((count - first) / seconds, used / count * 1e6)

    def statements_per_push(self) -> float:
        """Claims and settles for each row, over all rounds (idle claims included)."""
        metrics = self.process.metrics()
        return (metrics.sum("drain_claims_total") + metrics.sum("drain_settles_total")) / self.rows

    def close(self) -> None:
        """End it in good order."""
        self.process.close()
