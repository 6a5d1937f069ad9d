"""Starting the real daemons, reading what they say, ending them; and servers that are broken under a test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest

from deploy.local.host import VARIABLE
from deploy.local.postgres import PrivatePostgres
from deploy.local.processes import StartFailed
from deploy.local.rabbitmq import PrivateRabbit, greets
from deploy.local.supervise import REPOSITORY, Daemon, clean_environment
from tests.support.broker import Broker
from tests.support.database import Database
from tests.support.processes import DrainFactory, Processes, RelayFactory, Simulator

TALKER = """
import json, signal, sys, time
print("stray output", flush=True)
sys.stderr.write("no json\\n")
for number in range(3):
    sys.stderr.write(json.dumps({"event": "step", "number": number}) + "\\n")
    sys.stderr.flush()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
sys.stderr.write(json.dumps({"event": "started", "probe_port": 1}) + "\\n")
sys.stderr.flush()
time.sleep(60)
"""


@pytest.fixture
def talker(processes: Processes) -> Daemon:
    return processes.start(["-c", TALKER])


def test_wait_for_finds_an_event_by_its_fields(talker: Daemon) -> None:
    assert talker.wait_for("step", number=2) == {"event": "step", "number": 2}
    talker.wait_for("started")
    assert [line["number"] for line in talker.events("step")] == [0, 1, 2]
    assert talker.lines[0] == {"event": "", "text": "no json"}
    assert talker.output == "stray output"


async def test_seen_waits_without_blocking_the_loop(talker: Daemon) -> None:
    assert (await talker.seen("step", number=1))["number"] == 1
    await talker.seen("started")
    talker.terminate()
    assert await talker.ended(5) == 7


def test_event_that_does_not_come_shows_the_log(talker: Daemon) -> None:
    talker.wait_for("started")
    with pytest.raises(StartFailed, match=r"no log event missing in 0\.1 s(.|\n)*started"):
        talker.wait_for("missing", 0.1)
    with pytest.raises(StartFailed, match="no log event step"):
        talker.wait_for("step", 0.1, start=talker.mark())


def test_process_that_ends_early_is_noticed_at_once(processes: Processes) -> None:
    daemon = processes.start(["-c", "import sys; sys.stderr.write('boom'); sys.exit(3)"])
    began = time.monotonic()
    with pytest.raises(StartFailed, match=r"exit code 3\)(.|\n)*boom"):
        daemon.wait_for("started", 30)
    assert time.monotonic() - began < 10


def test_signals_pause_and_exit_codes(talker: Daemon) -> None:
    talker.wait_for("started")
    talker.pause()
    assert psutil.Process(talker.pid).status() == psutil.STATUS_STOPPED
    assert talker.alive
    talker.resume()
    assert talker.stop(5) == 7
    assert not talker.alive


def test_kill_ends_a_paused_process(talker: Daemon) -> None:
    talker.wait_for("started")
    talker.pause()
    talker.kill()
    assert talker.returncode == -signal.SIGKILL


def test_a_daemon_sees_nothing_of_our_own_environment(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://elsewhere/production")
    monkeypatch.setenv("DRAIN_APPS", "{}")
    script = "import json, os, sys; sys.stderr.write(json.dumps({'event': 'env', **os.environ}) + '\\n')"
    line = processes.start(["-c", script], {"RELAY_TICK": "1"}).wait_for("env")
    assert "DATABASE_URL" not in line
    assert "DRAIN_APPS" not in line
    assert line["RELAY_TICK"] == "1"


async def test_relay_and_drain_carry_an_event_and_a_delivery(
    relay: RelayFactory, drain: DrainFactory, database: Database, broker: Broker, simulator: Simulator
) -> None:
    queue = await broker.declare()
    await database.enqueue_events(3)
    await database.enqueue_deliveries(2)
    publisher, pusher = relay(), drain()
    assert len(await broker.take(queue, 3)) == 3
    await simulator.control.until(10.0, requests=2)
    await database.until("SELECT count(*) = 2 FROM {schema}.notification_deliveries WHERE status = 'sent'")
    assert publisher.metrics().sum("relay_published_total") == 3
    assert pusher.get("/livez")[0] == 200
    assert publisher.stop() == 0
    assert pusher.stop() == 0


def test_daemon_that_can_not_start_says_why(relay: RelayFactory) -> None:
    with pytest.raises(StartFailed, match="RELAY_BATCH_SIZE"):
        relay(RELAY_BATCH_SIZE=0)


def test_each_test_finds_its_own_postgres_running_with_its_settings_gone(
    own_postgres: PrivatePostgres,
) -> None:
    assert own_postgres.admin.run("SHOW work_mem") == [("4MB",)]
    own_postgres.admin.configure(work_mem="1MB")
    own_postgres.kill()


def test_the_next_test_does_too(own_postgres: PrivatePostgres, own_database: Database) -> None:
    assert own_postgres.admin.run("SHOW work_mem") == [("4MB",)]
    assert own_database.value("SELECT count(*) FROM relay_drain.outbox") == 0
    own_postgres.admin.set_read_only(own_database.name, True)
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        own_database.run("SELECT relay_drain.accept_event('test', gen_random_uuid())")
    own_postgres.pause()


def test_own_rabbit_may_be_left_stopped(own_rabbit: PrivateRabbit) -> None:
    own_rabbit.admin.set_memory_alarm()
    own_rabbit.admin.stop_app()
    assert not greets(own_rabbit.port)


async def test_and_runs_for_the_next_test_without_alarm(own_broker: Broker) -> None:
    assert own_broker.admin.alarms() == "[]"
    await own_broker.declare()
    await own_broker.publish(b"", "k")


SLOW_TEST = """
import pathlib, os, time
def test_slow(database, broker):
    pathlib.Path(os.environ["STARTED"]).write_text(f"{database.admin.port} {broker.admin.amqp_port}")
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_pytest_that_is_ended_leaves_no_server(tmp_path: Path, number: int) -> None:
    """Ctrl-C, and the SIGKILL of a CI that lost its patience."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_slow.py").write_text(SLOW_TEST)
    (tmp_path / "tmp").mkdir()
    started = tmp_path / "started"
    environment = {**clean_environment(), "STARTED": str(started), "TMPDIR": str(tmp_path / "tmp")}
    environment.pop(VARIABLE, None)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    with subprocess.Popen(
        argv, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        try:
            deadline = time.monotonic() + 120
            while not started.exists() or not started.read_text():
                assert run.poll() is None, "pytest ended early"
                assert time.monotonic() < deadline
                time.sleep(0.05)
            family = psutil.Process(run.pid).children(recursive=True)
            os.kill(run.pid, number)
            run.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                run.kill()
    deadline = time.monotonic() + 20
    while left := [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
    postgres_port, amqp_port = started.read_text().split()
    assert not greets(int(amqp_port))
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(
            f"postgresql://postgres@127.0.0.1:{postgres_port}/postgres", connect_timeout=2
        ).close()
    assert list((tmp_path / "tmp").glob("rd-*")) == []


def test_environment_variable_shares_the_servers_of_another_run(servers: object) -> None:
    """``python -m deploy.local`` prints such an address; pytest then starts none of its own."""
    script = (
        "import os; from deploy.local.host import Servers, VARIABLE;"
        "print(Servers(os.environ[VARIABLE]).postgres()[0].port)"
    )
    environment = {**clean_environment(), VARIABLE: os.environ[VARIABLE]}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().isdigit()


def test_simulator_factory_passes_arguments(simulator_factory: Callable[..., Simulator]) -> None:
    simulator = simulator_factory("--topic", "com.example.other")
    assert simulator.app()["topic"] == "com.example.other"
    assert simulator.control.stats()["requests"] == 0
