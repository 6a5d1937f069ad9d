"""What somebody sees while it runs: a live board on a terminal, else a line every few seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.live.figures import Figures, Sampler
from deploy.live.signals import Signals
from deploy.live.stack import Stack

BOARD_INTERVAL = 1.0
LINE_INTERVAL = 5.0
WINDOW = 5.0
"""Seconds that a rate is an average over."""


class Output:
    """Lines on standard output. When nobody reads them any more, the run is asked to end."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._gone = False

    def say(self, text: str = "") -> None:
        """Print one line at once."""
        if self._gone:
            return
        try:
            print(text, flush=True)
        except (OSError, ValueError):
            self._gone = True
            self._signals.request()
            with contextlib.suppress(OSError, ValueError):  # nor is there anything to flush at the end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    @property
    def is_terminal(self) -> bool:
        """Whether a board can be shown."""
        with contextlib.suppress(ValueError, AttributeError):
            return sys.stdout.isatty()
        return False


def connect_lines(stack: Stack) -> Iterator[str]:
    """How to look into the run from another terminal."""
    yield f"  psql       {stack.database_url}"
    yield f"  amqp       {stack.rabbit.url}"
    for role in (*stack.relays, *stack.drains):
        yield f"  {role.name:10} http://127.0.0.1:{role.port}/metrics"
    ready = stack.simulator.await_ready(1.0)
    yield f"  simulator  {ready['control_url']}/stats"
    yield f"  logs       {stack.folder.logs}"


class History:
    """The figures of the last seconds, for rates."""

    def __init__(self) -> None:
        self._kept: deque[Figures] = deque()

    def add(self, figures: Figures) -> None:
        """Take the newest."""
        self._kept.append(figures)
        while len(self._kept) > 2 and self._kept[1].at <= figures.at - WINDOW:
            self._kept.popleft()

    def rate(self, value: Callable[[Figures], int]) -> float:
        """Increase for each second of a count."""
        first, last = self._kept[0], self._kept[-1]
        return max(0.0, (value(last) - value(first)) / (last.at - first.at)) if last.at > first.at else 0.0


def watch(
    stack: Stack, sampler: Sampler, signals: Signals, output: Output, seconds: float | None, title: str
) -> None:
    """Show the run for so many seconds, or until an end is asked for; replace processes that died meanwhile."""
    began = time.monotonic()
    ends = None if seconds is None else began + seconds
    history = History()
    if not output.is_terminal:
        interval, show = LINE_INTERVAL, _plain(history, output, began)
        _loop(stack, sampler, signals, history, interval, show, ends, interval)
        return
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw(figures: Figures) -> None:
            try:
                live.update(_board(stack, history, figures, title, began, ends), refresh=True)
            except OSError:
                signals.request()

        _loop(stack, sampler, signals, history, BOARD_INTERVAL, draw, ends, 0.0)


def _loop(
    stack: Stack,
    sampler: Sampler,
    signals: Signals,
    history: History,
    interval: float,
    show: Callable[[Figures], None],
    ends: float | None,
    first: float,
) -> None:
    history.add(sampler.take())  # the first rate needs a beginning
    due = time.monotonic() + first
    while not signals.requested:
        for role in stack.roles():
            if (
                role is not stack.simulator
            ):  # its ports and what it saw would be gone: its end is shown as it is
                role.tend()
        now = time.monotonic()
        if now >= due:
            figures = sampler.take()
            history.add(figures)
            show(figures)
            due = max(due + interval, time.monotonic() + 0.2)
        if ends is not None and time.monotonic() >= ends:
            return
        step = min(due, ends if ends is not None else due) - time.monotonic()
        signals.wait(min(1.0, max(0.05, step)))


def _plain(history: History, output: Output, began: float) -> Callable[[Figures], None]:
    def show(figures: Figures) -> None:
        tables = figures.tables
        bad = [f"{process.name}: {process.state}" for process in figures.processes if _worry(process.state)]
        parts = [
            f"{figures.at - began:5.0f} s",
            f"orders {tables.orders} ({history.rate(lambda f: f.tables.orders):.1f}/s)",
            f"outbox {tables.unpublished} waiting{_oldest(tables.outbox_age)}",
            f"published {tables.published} ({history.rate(lambda f: f.tables.published):.1f}/s), "
            f"twice {figures.received_again}",
            f"queue {figures.queue}",
            f"applied {tables.accepted}",
            f"deliveries {tables.sent} sent, {tables.failed} failed, {tables.pending} pending, "
            f"{tables.claimed} claimed{_oldest(tables.due_age)}",
            f"pushes {figures.pushes} ({history.rate(lambda f: f.pushes):.1f}/s), "
            f"twice {figures.delivered_again}",
            f"fenced {figures.stale}",
            f"dead tokens {tables.dead_tokens}, home {tables.dead_home}",
            *bad,
            *([figures.problem] if figures.problem else []),
        ]
        output.say(" | ".join(parts))

    return show


def _board(
    stack: Stack, history: History, figures: Figures, title: str, began: float, ends: float | None
) -> Group:
    tables = figures.tables
    flow = Table(expand=True, box=None, padding=(0, 1))
    for name, justify in (("", "left"), ("total", "right"), ("per second", "right"), ("now", "left")):
        flow.add_column(name, justify=justify)  # type: ignore[arg-type]

    def row(name: str, value: Callable[[Figures], int], note: str) -> None:
        flow.add_row(name, f"{value(figures):,}", f"{history.rate(value):.1f}", note)

    row("orders placed", lambda f: f.tables.orders, "each with its event, in one transaction")
    row("events written", lambda f: f.tables.written, f"{tables.quarantined} in quarantine")
    waiting = f"{tables.unpublished} waiting{_oldest(tables.outbox_age)}"
    row("  published by relay", lambda f: f.tables.published, waiting)
    twice = f"{figures.queue} in the queue, {figures.received_again} came twice"
    row("  applied by the consumer", lambda f: f.tables.accepted, twice)
    open_rows = f"{tables.pending} pending, {tables.claimed} claimed{_oldest(tables.due_age)}"
    row("deliveries sent", lambda f: f.tables.sent, open_rows)
    others = f"{tables.expired} expired, {tables.superseded} superseded"
    row("  failed", lambda f: f.tables.failed, others)
    row("pushes at APNs", lambda f: f.pushes, f"{figures.delivered_again} came to a device twice")
    dead = f"{tables.dead_home} reported home to the shop"
    row("device tokens found dead", lambda f: f.tables.dead_tokens, dead)
    row("fenced writes", lambda f: f.stale, "outcomes of a lease that was over: matched no row")

    processes = Table(expand=True, box=None, padding=(0, 1))
    for name in ("process", "pid", "port", "state", "restarts"):
        processes.add_column(name)
    for process in figures.processes:
        style = "bold red" if _worry(process.state) else "green" if process.state == "ready" else ""
        processes.add_row(
            process.name,
            str(process.pid or "-"),
            str(process.port or "-"),
            Text(process.state, style),
            str(process.restarts or ""),
        )
    now = time.monotonic()
    left = "" if ends is None else f", {max(0.0, ends - now):.0f} s left"
    parts = [
        Panel(flow, title=f"{title}, {now - began:.0f} s{left}", title_align="left"),
        Panel(processes, title="try: kill -9 PID, kill -STOP PID, kill -CONT PID", title_align="left"),
        Panel(Text("\n".join(connect_lines(stack))), title="look inside", title_align="left"),
    ]
    if figures.problem:
        parts.append(Panel(Text(figures.problem, "bold red")))
    return Group(*parts, Text("Ctrl-C ends it in order and draws up the account; twice: at once", "dim"))


def _oldest(seconds: float | None) -> str:
    return "" if seconds is None else f", the oldest due for {max(0.0, seconds):.1f} s"


def _worry(state: str) -> bool:
    return state not in ("ready", "runs", "starts", "not started")
