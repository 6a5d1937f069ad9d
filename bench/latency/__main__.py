"""Latency of an idle relay under light load: woken by the trigger, and by a small tick without it.

Starts its own PostgreSQL and RabbitMQ and the real process ``python -m relay run``. One producer commits single
events; four producers commit transactions that overlap, so that lower ids commit later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import aiormq

from bench.latency.measure import Latency, measure
from deploy.local.postgres import PrivatePostgres
from deploy.local.rabbitmq import PrivateRabbit

QUEUE = "latency"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to shorten the wait of an idle relay."""

    name: str
    trigger: bool
    settings: dict[str, str]


WAYS = (
    Way("wake-up, tick 5 s", True, {"RELAY_WAKEUP": "true", "RELAY_TICK": "5"}),
    Way("tick 10 ms", False, {"RELAY_TICK": "0.01"}),
    Way("tick 20 ms", False, {"RELAY_TICK": "0.02"}),
)


def migrate(database_url: str, *arguments: str) -> None:
    """Run the migration tool."""
    subprocess.run(
        [sys.executable, "-m", "migrations", *arguments],
        env=os.environ | {"DATABASE_URL": database_url},
        check=True,
        capture_output=True,
    )


@contextlib.contextmanager
def relay(database_url: str, amqp_url: str, settings: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a relay until the block ends; it is ready when the block begins."""
    env = os.environ | {
        "DATABASE_URL": database_url,
        "RELAY_AMQP_URL": amqp_url,
        "PROBE_PORT": "0",
        "LOG_FORMAT": "json",
        **settings,
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "relay", "run"], env=env, stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    wanted = {"started", "broker_connected"} | ({"wakeup_listening"} if "RELAY_WAKEUP" in settings else set())
    try:
        for line in child.stderr:
            wanted.discard(json.loads(line)["event"])
            if not wanted:
                break
        else:
            raise SystemExit("relay did not start")
        threading.Thread(target=child.stderr.read, daemon=True).start()
        yield child
    finally:
        child.terminate()
        child.wait(40)


async def prepare(amqp_url: str) -> None:
    """Declare the queue."""
    connection = await aiormq.connect(amqp_url)
    channel = await connection.channel()
    await channel.exchange_declare("events", exchange_type="topic", durable=True)
    await channel.queue_declare(QUEUE, durable=True)
    await channel.queue_bind(QUEUE, "events", "#")
    await connection.close()


async def rounds(
    options: argparse.Namespace, database_url: str, amqp_url: str
) -> dict[tuple[str, int], Latency]:
    """Measure every way, with one producer and with four."""
    found: dict[tuple[str, int], Latency] = {}
    await prepare(amqp_url)
    for way in WAYS:
        migrate(database_url, "wakeup", "enable" if way.trigger else "disable")
        with relay(database_url, amqp_url, way.settings):
            await measure(database_url, amqp_url, QUEUE, events=20, rate=options.rate)  # warm
            for producers in (1, 4):
                found[way.name, producers] = await measure(
                    database_url,
                    amqp_url,
                    QUEUE,
                    events=options.events,
                    rate=options.rate,
                    producers=producers,
                )
                print(f"{way.name:<18} {producers} producer(s)  {found[way.name, producers]}", flush=True)
    return found


def main() -> int:
    """Read the command line, start the servers, measure."""
    arguments = argparse.ArgumentParser(prog="python -m bench.latency", description=__doc__)
    arguments.add_argument("--events", type=int, default=1000, help="of one round")
    arguments.add_argument("--rate", type=float, default=50.0, help="events per second")
    arguments.add_argument("--target", type=float, default=25.0, help="milliseconds, of the p99")
    arguments.add_argument("--strict", action="store_true", help="exit 1 when the target is missed")
    options = arguments.parse_args()
    with PrivatePostgres() as postgres, PrivateRabbit() as rabbit:
        database_url = postgres.admin.create("bench")
        migrate(database_url, "upgrade")
        found = asyncio.run(rounds(options, database_url, rabbit.url))
    missed = [way for way, latency in found.items() if latency.quantile(0.99) >= options.target]
    print(f"p99 target {options.target:g} ms: " + ("met" if not missed else f"MISSED by {missed}"))
    return 1 if missed and options.strict else 0


if __name__ == "__main__":
    sys.exit(main())
