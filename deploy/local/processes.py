"""Child processes: started in a group of their own, watched by the guard, ended and paused with their children."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from deploy.local.guard import GUARD


class StartFailed(RuntimeError):
    """A process ended, or was not ready in time; the message ends with the last lines that it wrote."""


@dataclass(frozen=True, slots=True)
class User:
    """Whom a child runs as."""

    name: str
    uid: int
    gid: int


class Child:
    """One process with its descendants.

    Not in a shell, with an empty standard input. ``user`` needs root. The descendants may leave the group (those of
    PostgreSQL do), so signals to all of them go by the tree of processes.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: int | IO[bytes] | None = subprocess.DEVNULL,
        stderr: int | IO[bytes] | None = subprocess.DEVNULL,
        user: User | None = None,
    ) -> None:
        self.argv = list(argv)
        self.process = subprocess.Popen(
            self.argv,
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            user=None if user is None else user.uid,
            group=None if user is None else user.gid,
            extra_groups=None if user is None else [],
        )
        self.pid = self.process.pid
        GUARD.watch(self.pid)

    @property
    def alive(self) -> bool:
        """Whether the process itself (not only a descendant) still runs."""
        return self.process.poll() is None

    @property
    def returncode(self) -> int | None:
        """As of subprocess: negative is a signal; None while it runs."""
        return self.process.poll()

    def tree(self) -> list[psutil.Process]:
        """The process and its descendants that run now, the process first."""
        try:
            leader = psutil.Process(self.pid)
            return [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def send(self, number: int) -> None:
        """Send a signal to the process alone; nothing happens when it has ended."""
        if self.alive:
            self.process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP the whole tree; no process of it runs any more on return."""
        self.send(signal.SIGSTOP)
        stopped: set[int] = {self.pid}
        while fresh := [process for process in self.tree() if process.pid not in stopped]:
            for process in fresh:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
                stopped.add(process.pid)

    def resume(self) -> None:
        """SIGCONT the whole tree, the leaves first."""
        for process in reversed(self.tree()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def wait(self, timeout: float) -> int:
        """Wait for the process to end, return its code.

        Raises:
            TimeoutError: it still runs after ``timeout`` seconds.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.argv[0]} (pid {self.pid}) still runs after {timeout:g} s") from None
        self._ended()
        return code

    def kill(self, timeout: float = 10.0) -> None:
        """SIGKILL the whole tree at once and wait until nothing of it is left."""
        tree = self.tree()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what lost its parent and is in no tree any more
        self.process.wait(timeout)
        if not wait_until(lambda: all(_gone(process) for process in tree[1:]), timeout, 0.005):
            raise TimeoutError(f"children of {self.argv[0]} survived SIGKILL: {tree[1:]}")
        self._ended()

    def stop(self, number: int = signal.SIGTERM, timeout: float = 10.0) -> int | None:
        """Send ``number``, wait, and kill the whole tree when that was not enough; return the exit code."""
        tree = self.tree()
        self.send(signal.SIGCONT)
        self.send(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        wait_until(lambda: all(_gone(process) for process in tree[1:]), 2.0, 0.005)
        for process in tree[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.kill()
        return self.returncode

    def _ended(self) -> None:
        GUARD.forget(self.pid)


def _gone(process: psutil.Process) -> bool:
    """Whether it has ended; an orphan may stay a zombie until the system's first process looks at it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(ready: Callable[[], bool], timeout: float, interval: float = 0.01) -> bool:
    """Ask ``ready`` until it says yes; False after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval)
    return True


def last_lines(path: Path, count: int = 20) -> str:
    """The end of a log file, for a message."""
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
    except OSError:
        return f"({path} can not be read)"


def private_directory(prefix: str, user: User | None = None) -> Path:
    """Make a new folder, gone with this process at the latest, that ``user`` owns.

    Its path is short: that of a Unix socket has at most 103 bytes.
    """
    path = Path(tempfile.mkdtemp(prefix=prefix))
    if len(str(path)) > 60:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    GUARD.remove(path)
    if user is not None:
        os.chown(path, user.uid, user.gid)
    return path


def remove_directory(path: Path) -> None:
    """Remove a folder with all that is in it; what can not be removed stays."""
    shutil.rmtree(path, ignore_errors=True)


def unprivileged_user() -> User | None:
    """Whom to run a server as that refuses root: ``postgres`` where it exists, else ``nobody``; None: not root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return User(name, entry.pw_uid, entry.pw_gid)
    raise StartFailed("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody")
