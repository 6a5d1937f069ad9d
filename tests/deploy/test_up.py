"""./deploy/up: real runs from the start to the account; nothing of them is left, nothing lost goes unseen."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from common.schema import qualify
from deploy.demo.consumer import CONSUMER
from deploy.demo.producer import SHOP
from deploy.live import folder, options, sql
from deploy.live.folder import RunFolder
from deploy.local.processes import StartFailed, private_directory, remove_directory
from deploy.local.supervise import REPOSITORY, clean_environment
from tests.support.database import SCHEMA, Database

PATIENCE = 240.0
"""Seconds; a tenth on an idle machine."""
MARKED = "00000000-0000-4000-8000-00000000dead"


class Up:
    """One run of ``python -m deploy.live``; ``terminal`` gives it one of its own, else its output is a pipe."""

    def __init__(self, *arguments: str, terminal: bool = False, **environment: str) -> None:
        argv = [sys.executable, "-P", "-m", "deploy.live", *arguments]
        env = {
            **clean_environment(),
            "TERM": "xterm-256color",
            "COLUMNS": "140",
            "LINES": "50",
            **environment,
        }
        ours, theirs = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(
            argv,
            env=env,
            cwd="/",
            stdin=theirs if terminal else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal if terminal else None,
        )
        os.close(theirs)
        self.descriptor = ours
        self._chunks: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.family: list[psutil.Process] = []

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end of a terminal is closed
            while chunk := os.read(self.descriptor, 65_536):
                self._chunks.append(chunk)

    @property
    def said(self) -> str:
        """Its output without what only a terminal understands."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(self._chunks).decode(errors="replace"))

    def until(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.said}"
            assert self.process.poll() is None, f"ended before {what}:\n{self.said}"
            time.sleep(0.1)

    def is_up(self) -> None:
        """Wait until all of it runs; remember its processes."""
        self.until(lambda: " logs " in self.said, "all of it runs")
        self.remember()

    def remember(self) -> None:
        """Its processes as they are now."""
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def found(self, pattern: str) -> str:
        match = re.search(pattern, self.said)
        assert match is not None, f"no {pattern} in:\n{self.said}"
        return match.group(1)

    @property
    def psql(self) -> str:
        return self.found(r"psql +(postgresql://\S+)")

    @property
    def folder(self) -> Path:
        return Path(self.found(r"logs +(\S+)/logs"))

    @property
    def ports(self) -> set[str]:
        return set(re.findall(r"127\.0\.0\.1:(\d+)", self.said))

    def end(self) -> int:
        """Wait for its end, and for that of its processes; none may be left."""
        code = self.process.wait(PATIENCE)
        self._thread.join(10)
        deadline = time.monotonic() + 20
        while left := [each for each in self.family if runs(each)]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the guard ends its processes
        self.process.wait()
        self._thread.join(10)
        os.close(self.descriptor)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def up() -> Iterator[Callable[..., Up]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **others: object) -> Up:
            run = Up(*arguments, **others)  # type: ignore[arg-type]
            stack.callback(run.close)
            return run

        yield start


def test_two_runs_side_by_side_and_what_is_lost_in_one_is_seen_in_its_account(up: Callable[..., Up]) -> None:
    """One runs for 15 s without a terminal. The other has one, loses an event and a relay, and is ended by Ctrl-C."""
    plain, watched = up("--seconds", "15"), up("--rate", "5", terminal=True)
    plain.is_up()
    watched.is_up()
    assert not plain.ports & watched.ports
    watched.until(lambda: re.search(r"deliveries sent +[1-9]", watched.said) is not None, "a delivery")
    relay = int(watched.found(r"relay-1 +(\d+) +\d+ +ready"))
    assert relay in {process.pid for process in watched.family}
    os.kill(relay, signal.SIGKILL)
    with psycopg.connect(watched.psql, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO relay_drain.outbox (event_id, aggregate_type, aggregate_id, event_type, payload, "
            "published_at) VALUES (%s, 'order', '0', 'order.placed', '{}', now())",
            [MARKED],
        )
    watched.until(
        lambda: re.search(r"relay-1 +\d+ +\d+ +ready +1", watched.said) is not None, "the next relay"
    )
    watched.remember()
    os.write(watched.descriptor, b"\x03")
    assert watched.end() == 1
    assert "lost: 1" in watched.said
    assert f"1 events published, and never applied: {MARKED}" in watched.said
    assert not watched.folder.exists()

    assert plain.end() == 0, plain.said
    assert "lost: 0" in plain.said
    assert not plain.folder.exists()
    placed = int(plain.found(r"orders +(\d+) placed"))
    assert placed > 50
    assert f"{placed} placed, {placed} notified, none twice" in plain.said
    written = int(plain.found(r"events +(\d+) written"))
    dead = int(plain.found(r"device tokens +(\d+) found dead"))
    assert written == placed + dead
    assert f"{written} written, {written} published, 0 in quarantine, duplicates: 0" in plain.said
    assert f"{dead} found dead, {dead} reported home" in plain.said
    assert ", 0 open" in plain.said
    assert re.search(r"outbox \d+ waiting.*deliveries \d+ sent", plain.said), "no line meanwhile"


def test_the_three_traces_are_played_with_the_figures_that_were_promised(up: Callable[..., Up]) -> None:
    run = up("--drill", "all")
    run.is_up()
    assert run.end() == 0, run.said
    for figure in (
        "rows claimed: 100, as promised",
        "messages that reached the broker: 40, as promised",
        "rows with published_at: 0, as promised",
        "messages that the broker received: 140, as promised",
        "distinct event_ids among them: 100, as promised",
        "events that the consumer applied: 100, as promised",
        "pushes in all: 88, as promised",
        "notifications pushed twice, of those in flight: 38, as promised",
        "notifications pushed twice, of those that were settled: 0, as promised",
        "doubles that a device shows (apns-collapse-id): 0, as promised",
        "finished rows that were touched: 0, as promised",
        "pushes that it started on its dead leases: 0, as promised",
        "late writes, all to zero rows (drain_stale_outcomes_total): 10, as promised",
        "duplicates: 40",
        "fenced writes: 10",
        "lost: 0",
    ):
        assert figure in run.said, f"{figure} is missing in:\n{run.said}"
    assert run.said.count("all figures as promised") == 3
    assert not run.folder.exists()


def test_a_second_signal_ends_it_at_once_and_leaves_nothing(up: Callable[..., Up]) -> None:
    run = up()
    run.is_up()
    run.process.send_signal(signal.SIGTERM)
    run.until(lambda: "the producer stops" in run.said, "the orderly end")
    run.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert run.end() == 1
    assert time.monotonic() - began < 30
    assert "stopped at once" in run.said
    assert not run.folder.exists()


def test_sigkill_while_it_starts_leaves_nothing(up: Callable[..., Up]) -> None:
    run = up()

    def servers_run() -> bool:
        run.remember()
        return {"postgres", "beam.smp"} <= {process.name() for process in run.family if runs(process)}

    run.until(servers_run, "both servers")
    run.process.kill()
    assert run.end() == -signal.SIGKILL


@pytest.mark.slow
def test_kept_data_are_gone_on_with(up: Callable[..., Up], tmp_path: Path) -> None:
    """Also what was on its way when the first run was killed."""
    first = up("--keep", "--rate", "30", RELAY_DRAIN_RUN=str(tmp_path))
    first.is_up()
    first.until(lambda: re.search(r"applied [1-9]", first.said) is not None, "an applied event")
    first.process.kill()
    first.end()
    second = up("--keep", "--seconds", "5", RELAY_DRAIN_RUN=str(tmp_path))
    second.is_up()
    assert second.folder == first.folder
    third = up("--keep", RELAY_DRAIN_RUN=str(tmp_path))
    assert third.end() == 1
    assert "without --keep a second one runs beside it" in third.said
    assert second.end() == 0, second.said
    assert "lost: 0" in second.said
    assert int(second.found(r"orders +(\d+) placed")) > 30
    assert second.folder.exists()
    fresh = up("--keep", "--fresh", "--seconds", "1", RELAY_DRAIN_RUN=str(tmp_path))
    fresh.is_up()
    assert not second.folder.exists()
    assert fresh.end() == 0, fresh.said
    with RunFolderOf(tmp_path) as kept:
        kept.kept = False


class RunFolderOf:
    """The kept folder that a pointer names, opened as a run does."""

    def __init__(self, pointer: Path, fresh: bool = False) -> None:
        self._pointer, self._fresh = pointer, fresh

    def __enter__(self) -> RunFolder:
        before, folder.POINTER = folder.POINTER, self._pointer
        try:
            self._folder = RunFolder(keep=True, fresh=self._fresh)
        finally:
            folder.POINTER = before
        return self._folder

    def __exit__(self, *_: object) -> None:
        self._folder.close()


def test_kept_folder_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    with RunFolderOf(tmp_path) as first:
        assert not first.found
        (first.path / "data").write_text("kept")
        with pytest.raises(StartFailed, match="without --keep"):
            RunFolderOf(tmp_path).__enter__()
    with RunFolderOf(tmp_path) as second:
        assert second.found
        assert second.path == first.path
        assert (second.path / "data").read_text() == "kept"
    with RunFolderOf(tmp_path, fresh=True) as third:
        assert not third.found
        assert not second.path.exists()
        third.kept = False
    assert not third.path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "5000"], "5000 is not between 0.1 and 1000 orders per second"),
        (["--rate", "nan"], "nan is not between 0.1 and 1000 orders per second"),
        (["--seconds", "soon"], "'soon' is no number of seconds"),
        (["--relays", "0"], "0 is not between 1 and 8 relays"),
        (["--drains", "9"], "9 is not between 1 and 8 drains"),
        (["--drill", "fire"], "'fire'"),
        (["--drill", "zombie", "--seconds", "5"], "exclude each other"),
        (["--postgres-bin", "/nowhere"], "/nowhere holds no program postgres"),
    ],
)
def test_bad_value_is_refused_with_the_value_and_its_bound(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        options.parse(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_postgres_of_an_unknown_version_is_refused_in_one_line(up: Callable[..., Up]) -> None:
    programs = private_directory("rd-old-")
    programs.chmod(0o755)  # the server's user runs them
    for program in ("postgres", "initdb"):
        (programs / program).write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 9.6.24'\n")
        (programs / program).chmod(0o755)
    run = up("--postgres-bin", str(programs))
    assert run.end() == 1
    assert run.said.strip() == f"./deploy/up: PostgreSQL 9 in {programs} is not between 13 and 18"
    remove_directory(programs)


def test_help_of_the_script_lists_every_option() -> None:
    done = subprocess.run(
        [str(REPOSITORY / "deploy" / "up"), "--help"], cwd="/", capture_output=True, text=True, check=True
    )
    listed = set(re.findall(r"^ +(--[a-z-]+)", done.stdout, re.MULTILINE))
    assert listed == {action.option_strings[-1] for action in options.parser()._actions} - {"--help"}


@pytest.fixture
def shop(database: Database) -> Database:
    """A database with one order that went all the way."""
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(SHOP.read_bytes())
    order(database, 1)
    for statement in LOSSES:
        assert ask(database, statement) == []
    return database


LOSSES = (
    sql.ORDERS_WITHOUT_EVENT,
    sql.PUBLISHED_NOT_APPLIED,
    sql.APPLIED_WITHOUT_DELIVERY,
    sql.APPLIED_NOT_NOTIFIED,
    sql.APPLIED_TWICE,
)


def order(database: Database, customer: int) -> None:
    """An order with its event (published), its place in the inbox, its effect and its delivery."""
    database.run(
        f"""WITH placed AS (INSERT INTO shop.orders (customer_id, cents) VALUES (%s, 1) RETURNING id, customer_id),
            event AS (SELECT id, customer_id, {SCHEMA}.enqueue_event('order', id::text, 'order.placed', '{{}}')
                AS event_id FROM placed),
            notified AS (INSERT INTO shop.notified SELECT id, 1 FROM event)
        SELECT {SCHEMA}.accept_event(%s, e.event_id), {SCHEMA}.enqueue_delivery('shop', c.device_token, '{{}}',
            e.event_id) FROM event AS e JOIN shop.customers AS c ON c.id = e.customer_id""",
        [customer, CONSUMER],
    )
    database.run(f"UPDATE {SCHEMA}.outbox SET published_at = now()")


def ask(database: Database, statement: str) -> list[str]:
    with psycopg.connect(database.url) as connection:
        arguments = [CONSUMER] if "$1" in statement else None
        return [
            row[0] for row in psycopg.RawCursor(connection).execute(qualify(statement, SCHEMA), arguments)
        ]


@pytest.mark.parametrize(
    ("loss", "seen_by"),
    [
        (f"DELETE FROM {SCHEMA}.outbox", sql.ORDERS_WITHOUT_EVENT),
        (f"DELETE FROM {SCHEMA}.inbox", sql.PUBLISHED_NOT_APPLIED),
        (f"DELETE FROM {SCHEMA}.notification_deliveries", sql.APPLIED_WITHOUT_DELIVERY),
        ("DELETE FROM shop.notified", sql.APPLIED_NOT_NOTIFIED),
        ("UPDATE shop.notified SET times = 2", sql.APPLIED_TWICE),
    ],
)
def test_each_kind_of_loss_is_seen(shop: Database, loss: str, seen_by: str) -> None:
    shop.run(loss)
    assert {statement for statement in LOSSES if ask(shop, statement)} == {seen_by}


def test_order_of_a_customer_whose_device_is_dead_needs_no_delivery(shop: Database) -> None:
    shop.run(f"DELETE FROM {SCHEMA}.notification_deliveries")
    [(token,)] = [
        tuple(row.values()) for row in shop.run("SELECT device_token FROM shop.customers WHERE id = 1")
    ]
    shop.run(
        f"SELECT {SCHEMA}.accept_event(%s, {SCHEMA}.enqueue_event('device_token', %s, 'device_token.dead', '{{}}'))",
        [CONSUMER, token],
    )
    assert ask(shop, sql.APPLIED_WITHOUT_DELIVERY) == []
    shop.run(
        f"UPDATE {SCHEMA}.inbox SET received_at = received_at - interval '1 minute' WHERE event_id IN "
        f"(SELECT event_id FROM {SCHEMA}.outbox WHERE event_type = 'order.placed')"
    )
    assert len(ask(shop, sql.APPLIED_WITHOUT_DELIVERY)) == 1, "it was applied long before the device died"
