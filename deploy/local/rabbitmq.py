"""A private RabbitMQ: own node name, ports, folders, cookie and epmd; ended with all it started.

The scripts of the package are called directly: Debian's wrapper in /usr/sbin changes the user and the folders.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.local.door import BrokerAdmin
from deploy.local.ports import free_port
from deploy.local.processes import (
    Child,
    StartFailed,
    last_lines,
    private_directory,
    remove_directory,
    wait_until,
)

START_TIMEOUT = 120.0
"""Seconds; six on an idle machine, a multiple on a busy one."""

_DOOR = Path(__file__).with_name("door.erl.txt")
# One scheduler pair, no busy waiting: a broker of a test leaves the processors to the others.
_ERL_ARGS = (
    "+S 2:2 +SDcpu 1:1 +SDio 2 +sbwt none +sbwtdcpu none +sbwtdio none -kernel inet_dist_use_interface {127,0,0,1} "
    '-eval file:script(os:getenv("DOOR_SCRIPT"))'
)


@dataclass(frozen=True, slots=True)
class BrokerTls:
    """PEM files of a TLS listener; with ``client_ca`` a client must show a certificate of it."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


def scripts() -> Path:
    """The folder of RabbitMQ's own scripts.

    Raises:
        StartFailed: RabbitMQ is not installed, or not where distributions put it.
    """
    candidates = [Path("/usr/lib/rabbitmq/bin")]
    for prefix in ("/opt/homebrew", "/usr/local", "/home/linuxbrew/.linuxbrew"):
        candidates.append(Path(prefix) / "opt" / "rabbitmq" / "sbin")
    on_path = shutil.which("rabbitmq-server")
    if on_path:
        candidates.append(Path(on_path).resolve().parent)
    for folder in candidates:
        if (folder / "rabbitmq-server").exists() and (folder / "rabbitmqctl").exists():
            return folder
    raise StartFailed(
        "no RabbitMQ on this machine: apt-get install rabbitmq-server, or brew install rabbitmq"
    )


class PrivateRabbit:
    """One broker of one node. Every method may be called again; each waits until what it says is true.

    Args:
        directory: a folder for everything; None: a new one, removed by :meth:`close`.
        settings: lines for rabbitmq.conf.
        tls: opens a TLS listener too.
        max_message_size: bytes; a larger body closes the channel with 406.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        tls: BrokerTls | None = None,
        max_message_size: int | None = None,
    ) -> None:
        self.scripts = scripts()
        self._removes = directory is None
        self.directory = directory or private_directory("rd-mq-")
        self.port = free_port()
        self.tls_port = free_port() if tls is not None else None
        self.node_port, self.epmd_port, self.door_port = free_port(), free_port(), free_port()
        self.node = f"rd-{secrets.token_hex(4)}@localhost"
        self._token = secrets.token_hex(16)
        self._settings = dict(settings or {})
        if max_message_size is not None:
            self._settings["max_message_size"] = str(max_message_size)
        self._tls = tls
        self._child: Child | None = None
        self._epmd: Child | None = None

    @property
    def log_file(self) -> Path:
        """The broker's log."""
        return self.directory / "log" / "rabbit.log"

    @property
    def pid(self) -> int | None:
        """Of the Erlang node; None when it does not run."""
        return self._child.pid if self._child is not None and self._child.alive else None

    @property
    def url(self) -> str:
        """AMQP URL of the vhost ``/``."""
        return self.admin.url()

    @property
    def admin(self) -> BrokerAdmin:
        """Addresses and quick administration; may be handed to other processes."""
        return BrokerAdmin(self.port, self.door_port, self._token, tls_port=self.tls_port)

    def start(self) -> None:
        """Start and wait until the broker greets clients and its door is open.

        Raises:
            StartFailed: with the end of the broker's output.
        """
        if self.pid is not None:
            return
        self._write_configuration()
        self._start_epmd()
        output = self.directory / "output.log"
        with output.open("ab") as log:
            argv = [str(self.scripts / "rabbitmq-server")]
            self._child = Child(argv, env=self._environment(), cwd=self.directory, stdout=log, stderr=log)
        child = self._child
        ready = wait_until(lambda: not child.alive or self._ready(), START_TIMEOUT, interval=0.05)
        if not ready or not child.alive:
            code = child.returncode
            self.kill()
            raise StartFailed(f"RabbitMQ did not start (exit code {code}):\n{last_lines(output)}")

    def stop(self) -> None:
        """Stop gracefully (SIGTERM), then end the node's epmd."""
        if self._child is not None:
            self._child.stop(signal.SIGTERM, timeout=30.0)
            self._child = None
        self._stop_epmd()

    def kill(self) -> None:
        """SIGKILL the node at once."""
        if self._child is not None:
            self._child.kill()
            self._child = None
        self._stop_epmd()

    def restart(self) -> None:
        """Stop and start the node; ports and durable queues stay. Six seconds; see also ``admin.stop_app``."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP the node: its sockets stay open and silent."""
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

    def __enter__(self) -> PrivateRabbit:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ctl(self, *arguments: str, timeout: float = 60.0) -> str:
        """Run rabbitmqctl against this node (about a second); return its output.

        Raises:
            subprocess.CalledProcessError: with output and stderr.
        """
        return subprocess.run(
            [str(self.scripts / "rabbitmqctl"), "-q", *arguments],
            env=self._environment(),
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout,
        ).stdout

    def _environment(self) -> dict[str, str]:
        base = self.directory
        kept = {name: os.environ[name] for name in ("PATH", "TZ") if name in os.environ}
        return {
            **kept,
            "HOME": str(base / "home"),
            "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self.node_port),
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_CONF_ENV_FILE": str(base / "no-rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(base / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(base / "no-advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(base / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(base / "data"),
            "RABBITMQ_LOG_BASE": str(base / "log"),
            "RABBITMQ_PID_FILE": str(base / "rabbit.pid"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(base / "generated"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _ERL_ARGS,
            # The script then becomes the node instead of waiting for it: one process, whose id is the node's.
            "RUNNING_UNDER_SYSTEMD": "true",
            "ERL_CRASH_DUMP": "/dev/null",
            "DOOR_SCRIPT": str(base / "door.script"),
            "DOOR_PORT": str(self.door_port),
            "DOOR_TOKEN": self._token,
        }

    def _write_configuration(self) -> None:
        for name in ("home", "data", "log", "generated"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_DOOR, self.directory / "door.script")
        cookie = self.directory / "home" / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(secrets.token_hex(16), encoding="ascii")
            cookie.chmod(0o400)
        (self.directory / "enabled_plugins").write_text("[].\n", encoding="ascii")
        settings = {
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            "log.console": "false",
            "log.file": "rabbit.log",
            "disk_free_limit.absolute": "50MB",
            "vm_memory_high_watermark.relative": "0.4",
            **self._settings,
        }
        if self._tls is not None:
            settings |= {
                "listeners.ssl.1": f"127.0.0.1:{self.tls_port}",
                "ssl_options.certfile": str(self._tls.certificate),
                "ssl_options.keyfile": str(self._tls.key),
                "ssl_options.verify": "verify_none",
            }
            if self._tls.client_ca is not None:
                settings["ssl_options.cacertfile"] = str(self._tls.client_ca)
                settings["ssl_options.verify"] = "verify_peer"
                settings["ssl_options.fail_if_no_peer_cert"] = "true"
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        (self.directory / "rabbitmq.conf").write_text("".join(lines), encoding="utf-8")

    def _start_epmd(self) -> None:
        """Start the node's port mapper ourselves: one that the node starts would outlive it as a daemon."""
        if self._epmd is not None and self._epmd.alive:
            return
        argv = [_epmd(), "-address", "127.0.0.1", "-port", str(self.epmd_port)]
        self._epmd = Child(argv, env=self._environment(), cwd=self.directory)
        epmd = self._epmd
        if not wait_until(lambda: not epmd.alive or _connects(self.epmd_port), 10.0) or not epmd.alive:
            raise StartFailed(f"epmd did not start on port {self.epmd_port}")

    def _stop_epmd(self) -> None:
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd = None

    def _ready(self) -> bool:
        # The door opens when the boot is done; the greeting shows that the listener takes clients.
        return greets(self.port) and _connects(self.door_port)


def greets(port: int, timeout: float = 2.0) -> bool:
    """Whether an AMQP 0-9-1 broker answers on a port of loopback: method frame, Connection.Start."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout) as client:
        client.sendall(b"AMQP\x00\x00\x09\x01")
        return client.recv(11)[:1] == b"\x01"
    return False


def _connects(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _epmd() -> str:
    found = shutil.which("epmd")
    if found:
        return found
    for pattern in ("/usr/lib/erlang", "/opt/homebrew/lib/erlang", "/usr/local/lib/erlang"):
        for candidate in sorted(Path(pattern).glob("erts-*/bin/epmd")):
            return str(candidate)
    raise StartFailed("no epmd on this machine: it is a part of Erlang, which RabbitMQ needs")
