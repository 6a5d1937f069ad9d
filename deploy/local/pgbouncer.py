"""A private pgbouncer in front of a private PostgreSQL: session state of one client is gone with its transaction."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
from pathlib import Path
from urllib.parse import quote

from deploy.local.databases import SUPERUSER
from deploy.local.ports import free_port
from deploy.local.processes import (
    Child,
    StartFailed,
    last_lines,
    private_directory,
    remove_directory,
    unprivileged_user,
    wait_until,
)


def pgbouncer_program() -> str | None:
    """Path of pgbouncer; None when this machine has none."""
    found = shutil.which("pgbouncer")
    return found or next((path for path in ("/usr/sbin/pgbouncer",) if Path(path).exists()), None)


class PrivatePgbouncer:
    """Pools the connections to the PostgreSQL on ``port``.

    Args:
        port: of PostgreSQL on loopback.
        mode: ``transaction``, ``session`` or ``statement``.
        size: connections to the server for each database.
    """

    def __init__(self, port: int, mode: str = "transaction", size: int = 10) -> None:
        self._upstream, self._mode, self._size = port, mode, size
        self._user = unprivileged_user()
        self.directory = private_directory("rd-pb-", self._user)
        self.port = free_port()
        self._child: Child | None = None

    @property
    def log_file(self) -> Path:
        """What pgbouncer writes."""
        return self.directory / "pgbouncer.log"

    def url_of(self, database: str) -> str:
        """URL of a database by way of the pool."""
        return f"postgresql://{SUPERUSER}@127.0.0.1:{self.port}/{quote(database, safe='')}"

    def start(self) -> None:
        """Start and wait until it listens.

        Raises:
            StartFailed: there is no pgbouncer, or with the end of its log.
        """
        program = pgbouncer_program()
        if program is None:
            raise StartFailed(
                "no pgbouncer on this machine: apt-get install pgbouncer, or brew install pgbouncer"
            )
        configuration = self._write_configuration()
        with self.log_file.open("ab") as log:
            self._child = Child(
                [program, str(configuration)], cwd=self.directory, stdout=log, stderr=log, user=self._user
            )
        child = self._child
        if not wait_until(lambda: not child.alive or self._listens(), 20.0) or not child.alive:
            written = last_lines(self.log_file)
            self.close()
            raise StartFailed(f"pgbouncer did not start:\n{written}")

    def stop(self) -> None:
        """End it with all its connections."""
        if self._child is not None:
            self._child.stop(signal.SIGTERM)
            self._child = None

    def close(self) -> None:
        """Stop and remove the folder."""
        self.stop()
        remove_directory(self.directory)

    def __enter__(self) -> PrivatePgbouncer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_configuration(self) -> Path:
        users = self.directory / "users.txt"
        users.write_text(f'"{SUPERUSER}" ""\n', encoding="utf-8")
        path = self.directory / "pgbouncer.ini"
        path.write_text(
            f"""[databases]
* = host=127.0.0.1 port={self._upstream}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = {self._mode}
default_pool_size = {self._size}
max_client_conn = 500
ignore_startup_parameters = extra_float_digits
""",
            encoding="utf-8",
        )
        return path

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False
