"""Private servers: nothing of theirs is where a system's server is, two live side by side, all of it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from deploy.local.certificates import Certificates
from deploy.local.installations import machine_binaries, wheel_binaries
from deploy.local.pgbouncer import PrivatePgbouncer
from deploy.local.postgres import PrivatePostgres, Tls
from deploy.local.processes import StartFailed, private_directory, remove_directory, unprivileged_user
from deploy.local.rabbitmq import PrivateRabbit, greets
from deploy.local.supervise import REPOSITORY, clean_environment
from tests.support.broker import Broker
from tests.support.database import Database


def naming(text: str) -> list[int]:
    """Processes that have this text in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(text in part for part in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def family(pid: int) -> list[psutil.Process]:
    leader = psutil.Process(pid)
    return [leader, *leader.children(recursive=True)]


def none_runs(processes: list[psutil.Process], patience: float = 5.0) -> bool:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            return True
        time.sleep(0.02)
    return False


def answers(server: PrivatePostgres) -> bool:
    try:
        with psycopg.connect(server.url, connect_timeout=2) as connection:
            return connection.execute("SELECT 1").fetchone() == (1,)
    except psycopg.OperationalError:
        return False


def binaries() -> list[Path]:
    return [wheel_binaries(), *machine_binaries().values()]


@pytest.fixture(scope="module")
def broker_node() -> Iterator[PrivateRabbit]:
    with PrivateRabbit() as server:
        yield server


@pytest.mark.parametrize("folder", binaries(), ids=str)
def test_postgres_of_every_version_here_runs_beside_another_and_leaves_nothing(folder: Path) -> None:
    with PrivatePostgres(binaries=folder) as one, PrivatePostgres(binaries=folder) as two:
        assert one.port != two.port
        assert 5432 not in (one.port, two.port)
        assert one.admin.run("SHOW unix_socket_directories") == [(str(one.directory),)]
        one.admin.create("shop")
        assert not two.admin.exists("shop")
        started = family(one.pid or 0) + family(two.pid or 0)
    assert len(started) > 8
    assert none_runs(started)
    assert not two.directory.exists()
    assert naming(str(two.directory)) == []


def test_postgres_keeps_its_port_and_what_was_committed_when_it_is_killed() -> None:
    with PrivatePostgres() as server:
        server.admin.run("CREATE TABLE kept AS SELECT 1 AS one")
        port, started = server.port, family(server.pid or 0)
        server.kill()
        assert none_runs(started, 0.0) or none_runs(started, 1.0)
        assert not answers(server)
        server.start()
        assert server.port == port
        assert server.admin.run("SELECT one FROM kept") == [(1,)]
        before = server.pid
        server.restart()
        assert server.pid != before
        assert server.admin.run("SELECT one FROM kept") == [(1,)]


def test_paused_postgres_keeps_its_sockets_and_is_silent() -> None:
    with PrivatePostgres() as server, psycopg.connect(server.url) as connection:
        server.pause()
        statuses = {process.status() for process in family(server.pid or 0)}
        assert statuses == {psutil.STATUS_STOPPED}
        with socket.create_connection((server.admin.host, server.port), 2) as silent:
            silent.settimeout(0.3)
            silent.sendall(
                b"\0\0\0\x08\x04\xd2\x16\x2f"
            )  # SSLRequest: answered at once by a server that lives
            with pytest.raises(TimeoutError):
                silent.recv(1)
        server.resume()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_postgres_that_can_not_start_says_why() -> None:
    server = PrivatePostgres(settings={"shared_buffers": "nonsense"})
    try:
        with pytest.raises(StartFailed, match="shared_buffers"):
            server.start()
        assert server.pid is None
    finally:
        server.close()


def test_postgres_in_a_folder_that_is_kept_finds_its_data_again() -> None:
    folder = private_directory("rd-kept-", unprivileged_user())
    try:
        with PrivatePostgres(folder) as first:
            first.admin.create("shop")
        with PrivatePostgres(folder) as second:
            assert second.port != first.port
            assert second.admin.exists("shop")
    finally:
        remove_directory(folder)


def test_postgres_touches_no_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    owner = tmp_path.stat().st_uid
    with pytest.raises(StartFailed, match="something else"):
        PrivatePostgres(tmp_path).start()
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    assert tmp_path.stat().st_uid == owner


def test_postgres_without_its_programs_is_refused_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=str(tmp_path)):
        PrivatePostgres(binaries=tmp_path)


@pytest.mark.skipif(
    not machine_binaries(), reason="TLS needs a distribution's PostgreSQL, the wheel has none"
)
def test_postgres_with_tls_takes_the_client_that_knows_its_authority(certificates: Certificates) -> None:
    tls = Tls(certificates.good.certificate, certificates.good.key)
    with PrivatePostgres(binaries=next(iter(machine_binaries().values())), tls=tls) as server:
        url = f"{server.url}?sslmode=verify-full"
        with psycopg.connect(f"{url}&sslrootcert={certificates.ca}") as connection:
            row = connection.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
            assert row == (True,)
        with pytest.raises(psycopg.OperationalError, match="certificate verify failed"):
            psycopg.connect(f"{url}&sslrootcert={certificates.other_ca}").close()


def test_rabbit_is_nowhere_near_the_usual_ports_and_folders(broker_node: PrivateRabbit) -> None:
    ports = {broker_node.port, broker_node.node_port, broker_node.epmd_port, broker_node.door_port}
    assert len(ports) == 4
    assert not ports & {5672, 25672, 4369}
    pid = broker_node.pid or 0
    listening = {c.laddr.port for p in family(pid) for c in p.net_connections("tcp") if c.status == "LISTEN"}
    assert listening == ports - {broker_node.epmd_port}
    addresses = {c.laddr.ip for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"}
    assert addresses == {"127.0.0.1"}
    opened = {file.path for file in psutil.Process(pid).open_files()}
    assert all(Path(path).is_relative_to(broker_node.directory) for path in opened if "rabbit" in path)


def test_rabbitmqctl_reaches_the_private_node(broker_node: PrivateRabbit) -> None:
    broker_node.admin.add_vhost("of ctl/ä")
    assert "of ctl/ä" in broker_node.ctl("list_vhosts", "name").splitlines()
    broker_node.admin.delete_vhost("of ctl/ä")
    assert "of ctl/ä" not in broker_node.ctl("list_vhosts", "name").splitlines()


def test_door_is_shut_without_its_token(broker_node: PrivateRabbit) -> None:
    stranger = type(broker_node.admin)(broker_node.port, broker_node.door_port, "wrong")
    with pytest.raises(OSError, match="closed its door"):
        stranger.eval("1.")
    with pytest.raises(RuntimeError, match="badarith"):
        broker_node.admin.eval("1/0.")
    assert broker_node.admin.eval("1 + 1.") == "2"


async def test_rabbit_keeps_ports_and_durable_messages_through_stop_kill_and_restart(
    broker_node: PrivateRabbit,
) -> None:
    broker_node.admin.add_vhost("kept")
    broker = Broker("kept", broker_node.admin)
    queue = await broker.declare()
    await broker.publish(b"1", "k", delivery_mode=2)
    broker_node.admin.stop_app()
    assert not greets(broker_node.port)
    broker_node.admin.start_app()
    assert broker.depth(queue) == 1
    started = family(broker_node.pid or 0)
    broker_node.kill()
    assert none_runs(started)
    broker_node.start()
    assert [message.body for message in await broker.take(queue, 1)] == [b"1"]


async def test_memory_alarm_blocks_publishers_until_it_is_cleared(broker_node: PrivateRabbit) -> None:
    admin = broker_node.admin
    assert admin.alarms() == "[]"
    admin.set_memory_alarm()
    assert "memory" in admin.alarms()
    admin.clear_memory_alarm()
    assert admin.alarms() == "[]"


def test_paused_rabbit_is_silent(broker_node: PrivateRabbit) -> None:
    broker_node.pause()
    assert not greets(broker_node.port, timeout=0.3)
    broker_node.resume()
    assert greets(broker_node.port)


def test_two_brokers_side_by_side_end_with_all_they_started(broker_node: PrivateRabbit) -> None:
    with PrivateRabbit() as second:
        second.admin.add_vhost("only here")
        assert "only here" not in broker_node.admin.eval("rabbit_vhost:list_names().")
        assert second.node != broker_node.node
        started = family(second.pid or 0)
        assert len(set(naming(str(second.epmd_port))) - {process.pid for process in started}) == 1, "its epmd"
        second.stop()
        assert none_runs(started)
        assert naming(str(second.epmd_port)) == []
    assert not second.directory.exists()
    assert greets(broker_node.port)


def test_servers_die_and_leave_no_folder_when_their_owner_is_killed(tmp_path: Path) -> None:
    """SIGKILL of pytest or of ./deploy/up leaves neither a server nor a folder behind."""
    script = (
        "import time\n"
        "from deploy.local.postgres import PrivatePostgres\n"
        "server = PrivatePostgres(); server.start()\n"
        "print(server.pid, server.directory, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], env=clean_environment(), stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        started = family(int(pid))
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    assert none_runs(started)
    deadline = time.monotonic() + 5
    while Path(directory).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(directory).exists()
    assert REPOSITORY.exists()


def test_pgbouncer_gives_each_transaction_any_of_its_connections(
    database: Database, pgbouncer: PrivatePgbouncer
) -> None:
    url = pgbouncer.url_of(database.name)
    with psycopg.connect(url, autocommit=True) as one, psycopg.connect(url, autocommit=True) as two:
        backends = {
            connection.execute("SELECT pg_backend_pid()").fetchone() for connection in (one, two, one)
        }
    assert len(backends) == 1
    pgbouncer.stop()
    assert naming(str(pgbouncer.directory)) == []
