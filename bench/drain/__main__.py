"""Drain beside stock aioapns and Node's @parse/node-apn: pushes per second and per CPU second, in one run.

Starts its own PostgreSQL and APNs simulator. Each round measures, one after the other and against the same
simulator: the real process ``python -m drain run``, claims and settles included; the same with a latency at APNs,
which must not lower the rate; aioapns as it comes; node-apn (installed by npm into a folder that goes away; skipped
without node). The others are bare loops without a database. Rounds alternate, so that a noisy machine harms all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.drain.daemon import MeasuredDrain
from bench.drain.figures import (
    AIOAPNS_TARGET,
    LATENCY_TARGET,
    NODE_TARGET,
    Comparison,
    Figure,
    by_rate,
    median,
    per_cpu,
)
from bench.drain.peers import NODE_APN, Peer, Skipped, node_apn, stock_aioapns
from deploy.local.postgres import PrivatePostgres
from deploy.simulator.process import SimulatorProcess

REPORT = Path(__file__).resolve().parents[1] / "report" / "drain.txt"
PAYLOAD = json.dumps({"aps": {"alert": {"title": "Order 4711", "body": "is on its way"}, "sound": "default"}})
WARM = 1000
"""Pushes of every sender before the first round: prepared statements, connections, Node's compiler."""

DRAIN, STOCK, NODE = "drain", "aioapns", "node-apn"


class Bench:
    """Senders that take turns, and what they said."""

    def __init__(self, options: argparse.Namespace, simulator: SimulatorProcess) -> None:
        self.options = options
        self.simulator = simulator
        self.lines: list[str] = []
        self.figures: dict[str, list[Figure]] = {}

    def say(self, line: str) -> None:
        """Print, and keep for the report."""
        self.lines.append(line)
        print(line, flush=True)

    def target(self) -> dict[str, Any]:
        """Address and key of the simulator, in the words of the peers."""
        ready = self.simulator.ready
        return {
            "host": ready.host,
            "port": ready.port,
            "ca_file": ready.ca_file,
            "key_file": ready.key_file,
            "key_id": ready.key_id,
            "team_id": ready.team_id,
            "topic": ready.topics[0],
        }

    def run(self, drain: MeasuredDrain, stock: Peer, node: Peer | None) -> None:
        """All rounds; each prints its line."""
        late = f"drain, {self.options.latency * 1000:g} ms"
        senders: dict[str, Callable[[int], Figure]] = {DRAIN: drain.push}
        if self.options.latency:
            senders[late] = lambda count: self.with_latency(drain, count)
        senders[STOCK] = stock.push
        if node is not None:
            senders[NODE] = node.push
        self.figures = {name: [] for name in senders}
        for push in senders.values():
            push(min(WARM, self.options.pushes))
        self.say("round  " + "  ".join(f"{name:>20}" for name in senders))
        for number in range(1, self.options.rounds + 1):
            # There and back, so that a load that comes or goes favours nobody.
            for name in list(senders) if number % 2 else reversed(senders):
                self.figures[name].append(senders[name](self.options.pushes))
            self.say(f"{number:>5}  " + "  ".join(cell(rows[-1]) for rows in self.figures.values()))
        self.say("       " + "  ".join(f"{'push/s | push/CPU s':>20}" for _ in senders))
        self.say("median " + "  ".join(cell(median(rows)) for rows in self.figures.values()))
        self.say(
            f"drain: {median(self.figures[DRAIN]).cpu_us:.0f} us of CPU a push, "
            f"{drain.statements_per_push():.3f} statements a push (target below 0.1), RSS {drain.rss:.0f} MB"
        )

    def with_latency(self, drain: MeasuredDrain, count: int) -> Figure:
        """The same round while APNs takes its time for every answer."""
        client = self.simulator.client
        client.configure(latency={"kind": "fixed", "seconds": self.options.latency})
        try:
            return drain.push(count)
        finally:
            client.configure(latency={"kind": "none"})

    def verdict(self) -> list[Comparison]:
        """The targets of the senders that took part."""
        ours = self.figures[DRAIN]
        found = [per_cpu("per CPU second, drain / aioapns", ours, self.figures[STOCK], AIOAPNS_TARGET)]
        if NODE in self.figures:
            found.append(per_cpu("per CPU second, drain / node-apn", ours, self.figures[NODE], NODE_TARGET))
        found += [
            by_rate("per second, with latency / without", rows, ours, LATENCY_TARGET)
            for name, rows in self.figures.items()
            if name not in (DRAIN, STOCK, NODE)
        ]
        return found


def cell(figure: Figure) -> str:
    """Both figures of one sender."""
    return f"{figure.rate:>8.0f} | {figure.per_cpu_second:>9.0f}"


def measure(options: argparse.Namespace) -> tuple[Bench, list[Comparison]]:
    """Start everything, measure, end everything."""
    with contextlib.ExitStack() as stack:
        simulator = stack.enter_context(SimulatorProcess())
        bench = Bench(options, simulator)
        bench.say(
            f"{options.pushes} pushes a round, bodies of {len(PAYLOAD)} bytes; aioapns with "
            f"{options.aioapns_in_flight} in flight, {NODE_APN} with {options.node_in_flight}; {os.cpu_count()} cores, "
            f"load before {os.getloadavg()[0]:.1f} (others' work slows all down and inflates CPU times)"
        )
        peer = {**bench.target(), "payload": PAYLOAD}
        node: Peer | None = None
        if options.no_node:
            bench.say("SKIPPED: node-apn, by --no-node")
        else:
            try:
                node = stack.enter_context(node_apn(peer, options.node_in_flight))
            except Skipped as why:
                bench.say(f"SKIPPED: node-apn: {why}")
        stock = stack.enter_context(stock_aioapns(peer, options.aioapns_in_flight))
        postgres = stack.enter_context(PrivatePostgres(fast=options.no_fsync))
        settings = dict(pair.split("=", 1) for pair in options.set)
        drain = MeasuredDrain(postgres, simulator.client, bench.target(), PAYLOAD, settings)
        stack.callback(drain.close)
        bench.run(drain, stock, node)
        verdict = bench.verdict()
    for comparison in verdict:
        bench.say(str(comparison))
    return bench, verdict


def main() -> int:
    """Read the command line, measure, judge."""
    arguments = argparse.ArgumentParser(prog="python -m bench.drain", description=__doc__)
    arguments.add_argument("--pushes", type=int, default=4000, help="of one round")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument(
        "--latency", type=float, default=0.04, help="seconds at APNs in the second round of drain; 0: none"
    )
    arguments.add_argument("--aioapns-in-flight", type=int, default=50, help="what suits it best")
    arguments.add_argument("--node-in-flight", type=int, default=200, help="what suits it best")
    arguments.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of drain (repeatable)"
    )
    arguments.add_argument("--no-node", action="store_true", help="leave node-apn out")
    arguments.add_argument("--no-fsync", action="store_true", help="PostgreSQL without fsync")
    arguments.add_argument("--report", action="store_true", help=f"write {REPORT.name} into bench/report too")
    arguments.add_argument("--strict", action="store_true", help="exit 1 when a target is missed")
    options = arguments.parse_args()
    bench, verdict = measure(options)
    met = all(comparison.met for comparison in verdict)
    bench.say("targets met" if met else "targets NOT met")
    if options.report:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text("\n".join(bench.lines) + "\n")
    return 0 if met or not options.strict else 1


if __name__ == "__main__":
    sys.exit(main())
