"""The time of a claim over the backlog, over history, and with a snapshot held while rows are published.

Starts its own PostgreSQL; the statements are those of the daemons. Each point is a median. The report (table, chart
as SVG) goes to bench/report.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg

from bench.claims import stock
from bench.claims.figures import Curve, ascii_chart, svg, table
from deploy.local.postgres import PrivatePostgres

REPORT = Path(__file__).resolve().parents[1] / "report"

Fill = Callable[[int], Awaitable[None]]


class Bench:
    """One database, filled again and again."""

    def __init__(
        self, connection: asyncpg.Connection, database_url: str, options: argparse.Namespace
    ) -> None:
        self.connection = connection
        self.database_url = database_url
        self.runs: int = options.runs
        self.rows: int = options.rows
        self.held: int = options.held
        self.sizes = [size for size in (1000, 10_000, 100_000, 1_000_000, 5_000_000) if size < self.rows]
        self.sizes.append(self.rows)

    async def curve(self, name: str, claim: stock.Claim, claimed: int, fill: Fill, start: int = 0) -> Curve:
        """Grow a table and time the claim at each size."""
        points: list[tuple[int, float]] = []
        filled = start
        for size in self.sizes:
            await fill(size - filled)
            filled = size
            await stock.settle(self.connection)
            points.append((size, await stock.timed(self.connection, claim, self.runs, claimed)))
            print(f"  {name:<32} {size:>9,} rows  {points[-1][1]:7.2f} ms", flush=True)
        await stock.empty(self.connection)
        return Curve(name, claimed, tuple(points))

    async def backlog(self) -> list[Curve]:
        """Nothing but unpublished rows, from a thousand to the limit."""
        c = self.connection
        return [
            await self.curve(
                "relay fresh, backlog", stock.relay_fresh(), stock.RELAY_ROWS, lambda n: stock.outbox(c, n)
            ),
            await self.curve(
                "relay keyed, backlog",
                stock.relay_keyed(),
                stock.RELAY_ROWS,
                lambda n: stock.outbox(c, n, keyed=True),
            ),
            await self.curve(
                "drain, backlog", stock.drain_due(), stock.DRAIN_ROWS, lambda n: stock.ledger(c, n)
            ),
        ]

    async def history(self) -> list[Curve]:
        """A thousand open rows, and published or sent ones from a thousand to the limit."""
        c = self.connection
        await stock.outbox(c, 1000)
        fresh = await self.curve(
            "relay fresh, history",
            stock.relay_fresh(),
            stock.RELAY_ROWS,
            lambda n: stock.outbox(c, n, published=True),
        )
        await stock.outbox(c, 1000, keyed=True)
        keyed = await self.curve(
            "relay keyed, history",
            stock.relay_keyed(),
            stock.RELAY_ROWS,
            lambda n: stock.outbox(c, n, keyed=True, published=True),
        )
        await stock.ledger(c, 1000)
        due = await self.curve(
            "drain, history", stock.drain_due(), stock.DRAIN_ROWS, lambda n: stock.ledger(c, n, sent=True)
        )
        return [fresh, keyed, due]

    async def snapshot(self) -> list[Curve]:
        """A snapshot is held while rows are published (sent): the claim from the cursor, and from the beginning."""
        fresh = await self.held_outbox(keyed=False)
        keyed = await self.held_outbox(keyed=True)
        return [*fresh, *keyed, *await self.held_ledger()]

    async def held_outbox(self, keyed: bool) -> list[Curve]:
        """Relay's claims while the index still has an entry for each published row."""
        c, size = self.connection, stock.RELAY_ROWS
        await stock.outbox(c, 1000, keyed=keyed)
        await stock.settle(c)
        claims = {
            "relay keyed, snapshot, new rows" if keyed else "relay fresh, snapshot, cursor": (
                stock.relay_keyed_new if keyed else stock.relay_fresh,
                True,
            ),
            "relay keyed, snapshot, pass" if keyed else "relay fresh, snapshot, sweep": (
                lambda _: stock.relay_keyed() if keyed else stock.relay_fresh(),
                False,
            ),
        }
        plain = [await stock.timed(c, claim(0), self.runs, size) for claim, _ in claims.values()]
        await stock.empty(c)
        await stock.outbox(c, self.held, keyed=keyed)
        await stock.settle(c)
        async with Held(self.database_url):
            await c.execute(f"UPDATE {stock.SCHEMA}.outbox SET published_at = clock_timestamp()", timeout=600)
            await stock.outbox(c, 1000, keyed=keyed)
            await stock.settle(c)
            curves = [
                self.two_points(
                    name, size, before, await stock.timed(c, claim(self.held), self.runs, size), bounded
                )
                for before, (name, (claim, bounded)) in zip(plain, claims.items(), strict=True)
            ]
        await stock.empty(c)
        return curves

    async def held_ledger(self) -> list[Curve]:
        """Drain's claim while the index still has an entry for each delivery that was sent."""
        c, size = self.connection, stock.DRAIN_ROWS
        await stock.ledger(c, 1000)
        await stock.settle(c)
        plain = await stock.timed(c, stock.drain_due(), self.runs, size)
        await stock.empty(c)
        await stock.ledger(c, self.held)
        await stock.settle(c)
        async with Held(self.database_url):
            deliveries = f"{stock.SCHEMA}.notification_deliveries"
            cursor = await c.fetchval(f"SELECT max(next_attempt_at) FROM {deliveries}")
            await c.execute(f"UPDATE {deliveries} SET status = 'sent', finished_at = now()", timeout=600)
            await stock.ledger(c, 1000)
            await stock.settle(c)
            curves = [
                self.two_points(name, size, plain, await stock.timed(c, claim, self.runs, size), bounded)
                for name, claim, bounded in (
                    ("drain, snapshot, cursor", stock.drain_due(cursor), True),
                    ("drain, snapshot, sweep", stock.drain_due(), False),
                )
            ]
        await stock.empty(c)
        return curves

    def two_points(self, name: str, claimed: int, plain: float, held: float, bounded: bool) -> Curve:
        """A curve from the fresh table to the held snapshot."""
        print(f"  {name:<32} fresh table {plain:.2f} ms, {self.held:,} rows later {held:.2f} ms", flush=True)
        return Curve(name, claimed, ((1000, plain), (self.held, held)), bounded)


class Held:
    """A snapshot that somebody holds: a report, a backup, a session that was forgotten."""

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url

    async def __aenter__(self) -> None:
        self._connection = await asyncpg.connect(self._database_url)
        await self._connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await self._connection.fetchval(f"SELECT count(*) FROM {stock.SCHEMA}.outbox", timeout=600)

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()


async def measure(database_url: str, options: argparse.Namespace) -> dict[str, list[Curve]]:
    """All curves, by the title of their chart."""
    connection = await asyncpg.connect(database_url)
    try:
        bench = Bench(connection, database_url, options)
        return {
            "Claim time over the backlog": await bench.backlog(),
            "Claim time over history": await bench.history(),
            f"Claim time with a snapshot held for {options.held:,} rows": await bench.snapshot(),
        }
    finally:
        await connection.close()


def report(charts: dict[str, list[Curve]]) -> list[str]:
    """Tables and charts for the terminal."""
    lines: list[str] = []
    for title, curves in charts.items():
        lines += [title, "", *table(curves), "", *ascii_chart(curves), ""]
    return lines


def main(argv: list[str] | None = None) -> int:
    """Read the command line, start the server, measure, draw."""
    arguments = argparse.ArgumentParser(prog="python -m bench.claims", description=__doc__)
    arguments.add_argument("--rows", type=int, default=1_000_000, help="the largest table")
    arguments.add_argument(
        "--held", type=int, default=300_000, help="rows published while the snapshot is held"
    )
    arguments.add_argument("--runs", type=int, default=50, help="of each claim; the median counts")
    arguments.add_argument("--output", type=Path, default=REPORT, help="folder of the report")
    arguments.add_argument("--strict", action="store_true", help="exit 1 when a curve grows more than it may")
    options = arguments.parse_args(argv)
    with PrivatePostgres() as postgres:
        database_url = postgres.admin.create("bench")
        subprocess.run(
            [sys.executable, "-m", "migrations", "upgrade"],
            env=os.environ | {"DATABASE_URL": database_url},
            check=True,
            capture_output=True,
        )
        charts = asyncio.run(measure(database_url, options))
    lines = report(charts)
    print("\n" + "\n".join(lines))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "claims.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for number, (title, curves) in enumerate(charts.items(), start=1):
        (options.output / f"claims-{number}.svg").write_text(svg(title, curves), encoding="utf-8")
    grown = [curve.name for curves in charts.values() for curve in curves if not curve.flat]
    print("every claim is flat" if not grown else f"NOT flat: {', '.join(grown)}")
    print(f"written: {options.output}/claims.txt, claims-1.svg, claims-2.svg, claims-3.svg")
    return 1 if grown and options.strict else 0


if __name__ == "__main__":
    sys.exit(main())
