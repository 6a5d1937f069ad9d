"""The processes of one test: relay, drain, simulator."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from deploy.local.proxy import SilentProxy
from deploy.local.supervise import Daemon
from deploy.simulator.client import SimulatorClient
from tests.support.broker import Broker
from tests.support.database import Database

T = TypeVar("T")

APP = "shop"
"""The APNs app that ``drain`` knows when a test says nothing else."""


class Processes:
    """Everything that one test started; :meth:`close` ends it, the youngest first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = contextlib.ExitStack()
        self.daemons: list[Daemon] = []

    def start(self, argv: Sequence[str], env: dict[str, str] | None = None, **options: Any) -> Daemon:
        """Start a Python process of this repository."""
        daemon = Daemon(argv, env, cwd=self.directory, **options)
        self._stack.callback(daemon.close)
        self.daemons.append(daemon)
        return daemon

    def proxy(self, port: int) -> SilentProxy:
        """Start a proxy in front of a port of loopback."""
        return self.enter(SilentProxy(port))

    def enter(self, context: contextlib.AbstractContextManager[T]) -> T:
        """Start anything else that is a context manager."""
        return self._stack.enter_context(context)

    def close(self) -> None:
        """End everything."""
        self._stack.close()


class Simulator:
    """The APNs simulator as a process: addresses in its READY line, ``control`` to script it and to count."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.ready = daemon.wait_for("ready")
        self.host = "127.0.0.1"
        self.port = int(self.ready["port"])
        self.ca_file = str(self.ready["ca_file"])
        self.key_file = str(self.ready["key_file"])
        self.key_id = str(self.ready["key_id"])
        self.team_id = str(self.ready["team_id"])
        self.topic = str(self.ready["topics"][0])
        self.control = SimulatorClient(self.ready["control_url"])

    def app(self, **changes: Any) -> dict[str, Any]:
        """One app for ``DRAIN_APPS`` that is served here; ``changes`` win (``port`` of a proxy, …)."""
        return {
            "topic": self.topic,
            "team_id": self.team_id,
            "key_id": self.key_id,
            "key_file": self.key_file,
            "host": self.host,
            "port": self.port,
            "ca_file": self.ca_file,
            **changes,
        }


def daemon_environment(database: Database, settings: dict[str, object]) -> dict[str, str]:
    """What both daemons are told in a test; capitals are settings, ``None`` takes a default away."""
    environment: dict[str, object] = {
        "DATABASE_URL": database.url,
        "DATABASE_SCHEMA": database.schema,
        "PROBE_PORT": 0,
        "LOG_FORMAT": "json",
        "LOG_LEVEL": "info",
        "SECRETS_DIR": os.devnull,
        **settings,
    }
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in environment.items()
        if value is not None
    }


class RelayFactory:
    """``relay(RELAY_TICK=0.2)`` starts ``python -m relay run`` and waits for ``started``.

    Args of the call:
        settings: environment variables; other than strings are written as JSON.
        database, broker: instead of the fixtures.
        wait_for: log event to wait for; None: return at once.
        argv: instead of ``-m relay run``.
    """

    def __init__(
        self, processes: Processes, database: Callable[[], Database], broker: Callable[[], Broker]
    ) -> None:
        self._processes, self._database, self._broker = processes, database, broker

    def __call__(
        self,
        *,
        database: Database | None = None,
        broker: Broker | None = None,
        wait_for: str | None = "started",
        argv: Sequence[str] = ("-m", "relay", "run"),
        **settings: object,
    ) -> Daemon:
        if "RELAY_AMQP_URL" not in settings:
            settings["RELAY_AMQP_URL"] = (broker or self._broker()).url
        env = daemon_environment(database or self._database(), {"RELAY_TICK": 0.2, **settings})
        daemon = self._processes.start(argv, env, name=f"relay {len(self._processes.daemons)}")
        if wait_for is not None:
            daemon.wait_for(wait_for)
        return daemon


class DrainFactory:
    """``drain(DRAIN_LEASE=30)`` starts ``python -m drain run`` for the app ``shop`` of the simulator.

    Args of the call: as of RelayFactory, and ``simulator``.
    """

    def __init__(
        self, processes: Processes, database: Callable[[], Database], simulator: Callable[[], Simulator]
    ) -> None:
        self._processes, self._database, self._simulator = processes, database, simulator

    def __call__(
        self,
        *,
        database: Database | None = None,
        simulator: Simulator | None = None,
        wait_for: str | None = "started",
        argv: Sequence[str] = ("-m", "drain", "run"),
        **settings: object,
    ) -> Daemon:
        if "DRAIN_APPS" not in settings:
            settings["DRAIN_APPS"] = {APP: (simulator or self._simulator()).app()}
        env = daemon_environment(database or self._database(), {"DRAIN_POLL_INTERVAL": 0.2, **settings})
        daemon = self._processes.start(argv, env, name=f"drain {len(self._processes.daemons)}")
        if wait_for is not None:
            daemon.wait_for(wait_for)
        return daemon
