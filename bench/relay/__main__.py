"""Relay beside a raw pipelined publisher: rate, ratio and CPU per message, in one run.

Starts its own PostgreSQL and RabbitMQ. Each round measures, one after the other: a raw socket that publishes the
same bytes with confirms and no database (``bench/relay/raw.py``), and the real process ``python -m relay run``,
claims and marks included, its CPU read from /proc. Rounds alternate, so that a noisy machine harms both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg

from bench.process import cpu_seconds, rss_megabytes
from bench.relay.raw import body_of
from deploy.local.postgres import PrivatePostgres
from deploy.local.rabbitmq import PrivateRabbit

EXCHANGE = "events"
QUEUE = "bench"

INSERT = """
INSERT INTO relay_drain.outbox (aggregate_type, aggregate_id, event_type, payload)
SELECT 'order', g::text, 'order.placed', %s::jsonb FROM generate_series(1, %s) AS g
"""
# Transactions overlap, and a batch is stamped with the start of its own: from the first start to the last one.
RATE = """
SELECT count(*), extract(epoch FROM max(published_at) - min(published_at))::float8
FROM relay_drain.outbox WHERE published_at >= %s
"""
LEFT = "SELECT 1 FROM relay_drain.outbox WHERE published_at IS NULL LIMIT 1"


@dataclass(frozen=True, slots=True)
class Round:
    """Messages in a second, and microseconds of the publishing process's CPU for each."""

    rate: float
    cpu_us: float


class Bench:
    """Two servers, one queue, and the two publishers that take turns."""

    def __init__(self, options: argparse.Namespace, postgres: PrivatePostgres, rabbit: PrivateRabbit) -> None:
        self.options = options
        self.rabbit = rabbit
        self.database_url = postgres.admin.create("bench")
        self.rss = 0.0
        subprocess.run(
            [sys.executable, "-m", "migrations", "upgrade"],
            env=os.environ | {"DATABASE_URL": self.database_url},
            check=True,
            capture_output=True,
        )
        self.rabbit.admin.eval(
            f'Q = rabbit_misc:r(<<"/">>, queue, <<"{QUEUE}">>), '
            f'X = rabbit_misc:r(<<"/">>, exchange, <<"{EXCHANGE}">>), '
            f'{{new, _}} = rabbit_amqqueue:declare(Q, true, false, [], none, <<"bench">>), '
            f'_ = rabbit_exchange:declare(X, topic, true, false, false, [], <<"bench">>), '
            f'ok = rabbit_binding:add({{binding, X, <<"#">>, Q, []}}, <<"bench">>).'
        )

    def purge(self) -> int:
        """Empty the queue; return how many messages it held."""
        name = f'rabbit_misc:r(<<"/">>, queue, <<"{QUEUE}">>)'
        held = self.rabbit.admin.eval(
            f"{{ok, Q}} = rabbit_amqqueue:lookup({name}), {{ok, N}} = rabbit_queue_type:purge(Q), N."
        )
        return int(held)

    def raw(self) -> Round:
        """One round of the ceiling."""
        options = self.options
        told = subprocess.run(
            [
                sys.executable, "-m", "bench.relay.raw", "--url", self.rabbit.url, "--exchange", EXCHANGE,
                "--count", str(options.messages), "--size", str(options.size), "--window", str(options.window),
            ],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        self.purge()
        return Round(**json.loads(told))

    def relay(self, pid: int) -> Round:
        """One round of the running relay: rows appear in one commit, and are all published."""
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE relay_drain.outbox")
            connection.execute("CHECKPOINT")
            row = connection.execute("SELECT now()").fetchone()
            assert row is not None
            connection.execute(INSERT, (body_of(self.options.size), self.options.messages))
            before = cpu_seconds(pid)
            deadline = time.monotonic() + 120
            while connection.execute(LEFT).fetchone() is not None:
                if time.monotonic() > deadline:
                    raise SystemExit("relay did not publish everything within two minutes")
                time.sleep(0.05)
            used = cpu_seconds(pid) - before
            counted = connection.execute(RATE, (row[0],)).fetchone()
            assert counted is not None
            count, seconds = counted
            self.rss = max(self.rss, rss_megabytes(pid))
        held = self.purge()
        if not count == held == self.options.messages:
            raise SystemExit(f"{self.options.messages} rows, {count} marked, {held} in the queue")
        return Round(count / seconds, used / count * 1e6)

    @contextlib.contextmanager
    def running(self) -> Iterator[int]:
        """Run the real daemon; yield its pid."""
        options = self.options
        env = os.environ | {
            "DATABASE_URL": self.database_url,
            "DATABASE_POOL_SIZE": str(options.lanes + 2),
            "RELAY_AMQP_URL": self.rabbit.url,
            "RELAY_EXCHANGE": EXCHANGE,
            "RELAY_LANES": str(options.lanes),
            "RELAY_BATCH_SIZE": str(options.batch),
            "RELAY_TICK_SECONDS": "0.1",
            "RELAY_TICK": "0.1",
            "PROBE_PORT": "0",
            "LOG_FORMAT": "json",
        }
        with tempfile.TemporaryFile("w+") as log:
            child = subprocess.Popen([sys.executable, "-m", "relay", "run"], env=env, stderr=log)
            try:
                time.sleep(2.0)
                if child.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"relay did not start:\n{log.read()}")
                yield child.pid
            finally:
                child.terminate()
                child.wait(40)

    def run(self) -> int:
        """Measure, print, and say whether the targets are met."""
        options = self.options
        print(
            f"{options.messages} messages of {options.size} bytes a round; relay: {options.lanes} lanes, "
            f"batches of {options.batch}; raw: at most {options.window} unconfirmed; {os.cpu_count()} cores, "
            f"load before {os.getloadavg()[0]:.1f} (others' work slows all three down and inflates CPU times)"
        )
        print(
            f"{'round':>5}  {'raw /s':>8}  {'relay /s':>8}  {'ratio':>5}  {'raw CPU us':>10}  {'relay CPU us':>12}"
        )
        raws: list[Round] = []
        relays: list[Round] = []
        with self.running() as pid:
            self.relay(pid)  # warm: prepared statements, channels, caches
            for number in range(1, options.rounds + 1):
                raw, relay = self.raw(), self.relay(pid)
                raws.append(raw)
                relays.append(relay)
                line = f"{number:>5}  {raw.rate:>8.0f}  {relay.rate:>8.0f}  {relay.rate / raw.rate:>5.2f}"
                print(f"{line}  {raw.cpu_us:>10.1f}  {relay.cpu_us:>12.1f}", flush=True)
        raw_rate = statistics.median(r.rate for r in raws)
        relay_rate = statistics.median(r.rate for r in relays)
        cpu = statistics.median(r.cpu_us for r in relays)
        ratio = statistics.median(b.rate / a.rate for a, b in zip(raws, relays, strict=True))
        print(
            f"median: raw {raw_rate:.0f}/s, relay {relay_rate:.0f}/s, ratio {ratio:.2f} (target 0.80), "
            f"relay CPU {cpu:.1f} us a message (target 40), relay RSS {self.rss:.0f} MB"
        )
        met = ratio >= 0.8 and cpu <= 40
        print("targets met" if met else "targets NOT met")
        return 0 if met or not options.strict else 1


def main() -> int:
    """Read the command line, start the servers, measure."""
    arguments = argparse.ArgumentParser(prog="python -m bench.relay", description=__doc__)
    arguments.add_argument("--messages", type=int, default=20_000, help="of one round (multiple of 100)")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--size", type=int, default=250, help="bytes of the body")
    arguments.add_argument("--lanes", type=int, default=4)
    arguments.add_argument("--batch", type=int, default=500, help="rows of one batch of relay")
    arguments.add_argument(
        "--window", type=int, default=1000, help="unconfirmed messages of the raw publisher"
    )
    arguments.add_argument("--no-fsync", action="store_true", help="PostgreSQL without fsync")
    arguments.add_argument("--strict", action="store_true", help="exit 1 when a target is missed")
    options = arguments.parse_args()
    with PrivatePostgres(fast=options.no_fsync) as postgres, PrivateRabbit() as rabbit:
        return Bench(options, postgres, rabbit).run()


if __name__ == "__main__":
    sys.exit(main())
