"""./deploy/up: real runs from the start to the account; nothing of them is left, nothing lost goes unseen."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from deploy.live import folder, options
from deploy.live.folder import RunFolder
from deploy.local.processes import StartFailed, private_directory, remove_directory
from deploy.local.supervise import REPOSITORY
from tests.support.up import Up, runs

MARKED = "00000000-0000-4000-8000-00000000dead"


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
