"""One PostgreSQL and one RabbitMQ for many processes: started when first asked for, ended with their host.

The pytest controller is the host of its workers. ``python -m deploy.local`` is a host for many runs of pytest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import socketserver
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.local.databases import PostgresAdmin
from deploy.local.door import BrokerAdmin
from deploy.local.postgres import PrivatePostgres
from deploy.local.processes import StartFailed
from deploy.local.rabbitmq import PrivateRabbit
from deploy.local.supervise import REPOSITORY, clean_environment

VARIABLE = "RELAY_DRAIN_TEST_SERVERS"
"""Address of a host that runs already: HOST:PORT:TOKEN."""

START_TIMEOUT = 300.0


class ServerHost:
    """Starts servers for those who know its address. Answers from threads; ends everything with :meth:`close`."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._rabbit_lock = threading.Lock()
        self._postgres: dict[str, PrivatePostgres] = {}
        self._rabbit: PrivateRabbit | None = None
        self._scripts: dict[str, str] = {}
        self._server = _Listener(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="servers", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """What to put into :data:`VARIABLE`."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}:{self.token}"

    def close(self) -> None:
        """End all servers."""
        self._server.shutdown()
        self._server.server_close()
        with self._lock, self._rabbit_lock:
            for server in self._postgres.values():
                server.close()
            if self._rabbit is not None:
                self._rabbit.close()
            self._postgres, self._rabbit = {}, None

    def postgres(self, binaries: str) -> dict[str, Any]:
        """Address of the server of these binaries (empty: the default) and of its migrated template."""
        with self._lock:
            server = self._postgres.get(binaries)
            if server is None:
                server = PrivatePostgres(binaries=Path(binaries) if binaries else None)
                server.start()
                self._postgres[binaries] = server
            return {"admin": asdict(server.admin), "template": migrated_template(server.admin)}

    def schema_script(self) -> dict[str, Any]:
        """The SQL of the newest schema; made once for each state of ``migrations/``."""
        with self._lock:
            state = _state_of_migrations()
            if state not in self._scripts:
                self._scripts[state] = schema_script()
            return {"script": self._scripts[state]}

    def rabbit(self) -> dict[str, Any]:
        """Address of the broker."""
        with self._rabbit_lock:
            if self._rabbit is None:
                rabbit = PrivateRabbit()
                rabbit.start()
                self._rabbit = rabbit
            return {"admin": asdict(self._rabbit.admin)}


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, host: ServerHost) -> None:
        self.host = host
        super().__init__(("127.0.0.1", 0), _Visit)


class _Visit(socketserver.StreamRequestHandler):
    """One question, one answer, both a line of JSON."""

    server: _Listener

    def handle(self) -> None:
        host = self.server.host
        request = json.loads(self.rfile.readline())
        if not secrets.compare_digest(str(request.get("token")), host.token):
            return
        try:
            answer = self._answer(str(request["want"]), str(request.get("binaries", "")))
        except (StartFailed, OSError, subprocess.SubprocessError) as error:
            answer = {"error": str(error)}
        with contextlib.suppress(OSError):
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    def _answer(self, want: str, binaries: str) -> dict[str, Any]:
        match want:
            case "postgres":
                return self.server.host.postgres(binaries)
            case "script":
                return self.server.host.schema_script()
            case _:
                return self.server.host.rabbit()


@dataclass(frozen=True, slots=True)
class Servers:
    """The client's side of a host: what a test process asks for. The first question takes seconds."""

    address: str

    def postgres(self, binaries: str = "") -> tuple[PostgresAdmin, str]:
        """The server of these binaries, and the name of its migrated template database."""
        answer = self._ask(want="postgres", binaries=binaries)
        return PostgresAdmin(**answer["admin"]), str(answer["template"])

    def rabbit(self) -> BrokerAdmin:
        """The broker."""
        return BrokerAdmin(**self._ask(want="rabbit")["admin"])

    def schema_script(self) -> str:
        """The SQL of the newest schema."""
        return str(self._ask(want="script")["script"])

    def _ask(self, **request: str) -> dict[str, Any]:
        host, port, token = self.address.split(":")
        with socket.create_connection((host, int(port)), START_TIMEOUT) as connection:
            connection.sendall(json.dumps({**request, "token": token}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
        if not line:
            raise StartFailed(f"the host of the servers ({VARIABLE}) does not answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise StartFailed(answer["error"])
        return answer


def migrated_template(admin: PostgresAdmin, script: str | None = None) -> str:
    """Make (once for each state of ``migrations/``) a database with the newest schema; return its name.

    With ``script``, what :func:`schema_script` returns, it takes a tenth of the second that Alembic needs.

    Raises:
        StartFailed: the migration failed; with its output.
    """
    name = f"template_{_state_of_migrations()}"
    if admin.exists(name):
        return name
    unfinished = f"{name}_{secrets.token_hex(3)}"
    url = admin.create(unfinished)
    try:
        if script is None:
            _migrations("upgrade", DATABASE_URL=url)
        else:
            admin.run(script, database=unfinished)
    except BaseException:
        admin.drop(unfinished)
        raise
    admin.run(f'ALTER DATABASE "{unfinished}" RENAME TO "{name}"')
    return name


def schema_script() -> str:
    """The SQL of the newest schema, as a DBA gets it.

    Raises:
        StartFailed: with the output.
    """
    return _migrations("sql")


def _state_of_migrations() -> str:
    folder = REPOSITORY / "migrations"
    files = sorted(file for kind in ("*.sql", "*.py") for file in folder.rglob(kind))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _migrations(command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "migrations", command],
        env={**clean_environment(), **environment},
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise StartFailed(f"migrations {command} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
