"""Everything that one run starts, in the order of the flow, and ends in the opposite care: nothing is cut off.

Servers and daemons are found by the ports they were given or took; nothing that runs on the machine is looked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg

from common.schema import qualify
from deploy.demo.consumer import CONSUMER, QUEUE
from deploy.demo.producer import SHOP
from deploy.live import sql
from deploy.live.folder import RunFolder, clear_postmaster
from deploy.live.options import Options
from deploy.live.role import Role, start_all
from deploy.live.signals import Interrupted
from deploy.live.tap import Tap
from deploy.local.ports import free_port
from deploy.local.postgres import PrivatePostgres
from deploy.local.processes import StartFailed
from deploy.local.rabbitmq import PrivateRabbit
from deploy.local.supervise import clean_environment
from deploy.simulator.client import SimulatorClient

SUPPORTED = (13, 18)
"""Versions of PostgreSQL, the first and the last."""
SCHEMA = "relay_drain"
DATABASE = "shop"
APP = "shop"
EXCHANGE = "events"
PATTERNS = ("order.*", "device_token.dead")
"""What the consumer binds: the tap must not make routable what is not."""
UNREGISTERED = 6
"""Customers whose device APNs does not know any more: the last ones."""
LATENCY = "0.02/0.15"
"""Of the simulator, in seconds: median and p99."""

DAEMON_ENV = {"DATABASE_SCHEMA": SCHEMA, "LOG_FORMAT": "json", "SECRETS_DIR": os.devnull}
# Rows stay, so that the account can look at each of them; the ticks are short, for somebody watches.
RELAY_ENV = {"RELAY_TICK": "0.5", "RELAY_RETENTION_DAYS": "-1", "RELAY_INBOX_RETENTION_DAYS": "-1"}
# A lease that somebody who kills a drain can wait for, 30 s instead of 120, and what must be shorter than it.
DRAIN_ENV = {
    "DRAIN_POLL_INTERVAL": "0.5",
    "DRAIN_RETENTION_DAYS": "-1",
    "DRAIN_LEASE": "30",
    "DRAIN_GRACE": "29",
    "DRAIN_DRAIN_DEADLINE": "12",
    "DRAIN_FLUSH_DEADLINE": "10",
    "DRAIN_PUSH_TIMEOUT": "10",
    "DRAIN_SETTLE_MARGIN": "10",
}
DRILL_LEASE = 14.0
DRILL_ENV = {
    "DRAIN_LEASE": str(DRILL_LEASE),
    "DRAIN_GRACE": "13",
    "DRAIN_DRAIN_DEADLINE": "2",
    "DRAIN_FLUSH_DEADLINE": "3",
    "DRAIN_PUSH_TIMEOUT": "6",
    "DRAIN_SETTLE_MARGIN": "3",
    "DATABASE_COMMAND_TIMEOUT": "3",
}


class Stack:
    """All servers and processes of one run.

    Args:
        folder: where everything is.
        say: takes a line about the progress of the start; called from the thread that starts.
        cancelled: asked between the steps of the start.
    """

    def __init__(
        self, folder: RunFolder, options: Options, say: Callable[[str], None], cancelled: Callable[[], bool]
    ) -> None:
        self.folder, self.options = folder, options
        self._say, self._cancelled = say, cancelled
        self._made: list[Role] = []
        self.postgres = PrivatePostgres(folder.path / "postgres", options.postgres_bin, fast=not options.keep)
        self.rabbit = PrivateRabbit(folder.path / "rabbitmq")
        self._check_version()
        if folder.found:
            clear_postmaster(self.postgres.data)
        # The name of a node is the name of its data. Its own epmd keeps it apart from every other node.
        self.rabbit.node = "rd-up@localhost"
        self.tap = Tap(self.rabbit.url, EXCHANGE, PATTERNS)
        state = str(folder.path / "simulator")
        arguments = ["-m", "deploy.simulator", "--latency", LATENCY, "--state-dir", state]
        self.simulator = self.role("simulator", arguments, {}, "ready", "stdout")
        self.relays: list[Role] = []
        self.drains: list[Role] = []
        shop_env = {"DATABASE_URL": self.database_url, "DATABASE_SCHEMA": SCHEMA, "SECRETS_DIR": os.devnull}
        self.consumer = self.role(
            "consumer",
            ["-m", "deploy.demo.consumer"],
            {**shop_env, "AMQP_URL": self.rabbit.url, "DEMO_APP": APP},
            "consumer_ready",
            "stdout",
        )
        producing = ["-m", "deploy.demo.producer", "--rate", f"{options.rate:g}"]
        self.producer = self.role("producer", producing, shop_env, "", "stdout")
        self.sent_before = 0
        """Rows that earlier runs had sent, when the folder was kept: this run's simulator did not see them."""

    @property
    def database_url(self) -> str:
        """URL of the shop's database, over TCP, as the superuser."""
        return self.postgres.admin.url_of(DATABASE)

    @property
    def control(self) -> SimulatorClient:
        """The simulator's control API."""
        assert self.simulator.daemon is not None
        return SimulatorClient(str(self.simulator.daemon.wait_for("ready", 1.0)["control_url"]))

    def roles(self) -> Iterator[Role]:
        """Every process of ours, in the order of the flow."""
        yield self.producer
        yield from self.relays
        yield self.consumer
        yield from self.drains
        yield self.simulator

    def role(
        self, name: str, argv: list[str], env: dict[str, str], ready: str, stream: str = "stderr"
    ) -> Role:
        """A place in the chain; nothing is started."""
        role = Role(name, argv, env, self.folder.logs, ready, stream)
        self._made.append(role)
        return role

    def relay(self, name: str, **changes: str) -> Role:
        """A relay of this chain; ``changes`` are settings."""
        urls = {"DATABASE_URL": self.database_url, "RELAY_AMQP_URL": self.rabbit.url, "INSTANCE": name}
        return self._daemon(name, "relay", RELAY_ENV | urls | changes)

    def drain(self, name: str, **changes: str) -> Role:
        """A drain of this chain; ``changes`` are settings."""
        env = DRAIN_ENV | (DRILL_ENV if self.options.drills else {})
        app = {
            "DATABASE_URL": self.database_url,
            "INSTANCE": name,
            "DRAIN_APPS": json.dumps({APP: self.apns()}),
        }
        return self._daemon(name, "drain", env | app | changes)

    def apns(self) -> dict[str, object]:
        """The simulator as an app of ``DRAIN_APPS``."""
        assert self.simulator.daemon is not None
        ready = self.simulator.daemon.wait_for("ready", 1.0)
        kept = ("team_id", "key_id", "key_file", "host", "port", "ca_file")
        return {"topic": ready["topics"][0], **{name: ready[name] for name in kept}}

    def start(self) -> None:
        """Start everything; returns when all of it works. Runs in a thread.

        Raises:
            StartFailed: something ended or was too slow; the message says what, with the end of its log.
            Interrupted: an end was asked for.
        """
        self._step(f"PostgreSQL {self.postgres.version}, RabbitMQ and the APNs simulator start")
        with ThreadPoolExecutor(3) as pool:
            servers = (self.postgres.start, self.rabbit.start, self.simulator.start)
            for started in [pool.submit(server) for server in servers]:
                started.result()
        self._step("the schema is migrated, the shop opens, the consumer binds its queue")
        self.consumer.launch()  # before relay runs: what no queue takes would come back
        self._make_database()
        self.consumer.await_ready()
        if not self.tap.start():
            raise StartFailed("RabbitMQ runs, but no queue could be bound in time")
        self._step("relay and drain start")
        self.relays = [self.relay(f"relay-{number}") for number in range(1, self.options.relays + 1)]
        self.drains = [self.drain(f"drain-{number}") for number in range(1, self.options.drains + 1)]
        start_all([*self.relays, *self.drains])
        self._step("the shop takes orders")
        self.producer.launch()

    def settle(self) -> list[tuple[str, int]]:
        """End everything in the order of the flow; return the processes of ours that did not end well."""
        for role in self.roles():
            if role is self.simulator:
                self.tap.close()
            role.stop()
        self.rabbit.stop()
        self.postgres.stop()
        return [(role.name, code) for role in self.roles() for code in role.codes if code != 0]

    def kill(self) -> None:
        """End everything at once, by SIGKILL; for what :meth:`settle` left, and for a second signal."""
        self.tap.close(wait=0.0)
        for role in self._made:
            role.close()
        self.rabbit.kill()
        self.postgres.kill()

    def queue_depth(self) -> int:
        """Messages that wait for the consumer, ready or unacknowledged."""
        return self.rabbit.admin.queue_depths("/").get(QUEUE, 0)

    def _daemon(self, name: str, module: str, env: dict[str, str]) -> Role:
        port = free_port()  # the same for its successors, so that its URL stays
        env = {**DAEMON_ENV, "PROBE_PORT": str(port), **env}
        role = self.role(name, ["-m", module, "run"], env, "started")
        role.port = port
        return role

    def _step(self, text: str) -> None:
        if self._cancelled():
            raise Interrupted
        self._say(text)

    def _check_version(self) -> None:
        version, oldest, newest = self.postgres.version, *SUPPORTED
        if not oldest <= version <= newest:
            raise StartFailed(
                f"PostgreSQL {version} in {self.postgres.binaries} is not between {oldest} and {newest}"
            )
        kept = self.postgres.data / "PG_VERSION"
        if kept.exists() and (made_by := kept.read_text(encoding="ascii").strip()) != str(version):
            raise StartFailed(
                f"the kept data are of PostgreSQL {made_by}, {self.postgres.binaries} is {version}: name the "
                "programs of that version with --postgres-bin, or throw the data away with --fresh"
            )

    def _make_database(self) -> None:
        admin = self.postgres.admin
        if not admin.exists(DATABASE):
            admin.create(DATABASE)
        done = subprocess.run(
            [sys.executable, "-m", "migrations", "upgrade"],
            env={**clean_environment(), "DATABASE_URL": self.database_url, "DATABASE_SCHEMA": SCHEMA},
            cwd=self.folder.path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise StartFailed(f"the schema could not be migrated: {(done.stderr or done.stdout).strip()}")
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            connection.execute(SHOP.read_bytes())
            cursor = psycopg.RawCursor(connection)
            self.sent_before = int(cursor.execute(qualify(sql.SENT, SCHEMA)).fetchall()[0][0])
            gone = cursor.execute(sql.LAST_DEVICES, [UNREGISTERED]).fetchall()
        self.control.unregister(*(row[0] for row in gone), since_ms=int(gone[0][1]))


__all__ = ["CONSUMER", "Stack"]
