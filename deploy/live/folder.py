"""The folder of one run: data, logs and keys of everything it starts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

import psutil

from deploy.local.processes import StartFailed, private_directory, remove_directory, wait_until
from deploy.local.supervise import REPOSITORY

PREFIX = "rd-up-"
POINTER = Path(os.environ.get("RELAY_DRAIN_RUN") or REPOSITORY / ".run")
"""Folder that holds the path of what ``--keep`` kept. Not the data themselves: the path of a Unix socket is short, and
PostgreSQL's user, which is never root, may not be able to reach the clone."""
KEPT_BELOW = Path("/var/tmp")  # survives a reboot


class RunFolder:
    """A new folder, gone with this process at the latest; or with ``keep`` the one of the last such run.

    Raises:
        StartFailed: another run has the kept folder, or it can not be made.
    """

    def __init__(self, *, keep: bool, fresh: bool) -> None:
        self.kept = keep
        self.found = False
        """The folder held the data of an earlier run."""
        self._lock: IO[str] | None = None
        try:
            self.path = self._open_kept(fresh) if keep else private_directory(PREFIX)
            # Others may pass through to what is theirs inside (PostgreSQL's user), and list nothing.
            self.path.chmod(0o711)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise StartFailed(f"no folder for the run: {error}") from None

    @property
    def logs(self) -> Path:
        """What each process writes."""
        return self.path / "logs"

    def close(self) -> None:
        """Remove the folder unless it is kept."""
        if not self.kept:
            remove_directory(self.path)
        if self._lock is not None:
            self._lock.close()

    def _open_kept(self, fresh: bool) -> Path:
        POINTER.mkdir(parents=True, exist_ok=True)
        lock = (POINTER / "lock").open("w", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise StartFailed(
                "another ./deploy/up --keep of this clone is running; without --keep a second one runs beside it"
            ) from None
        self._lock = lock
        pointer = POINTER / "folder"
        with contextlib.suppress(OSError):
            path = Path(pointer.read_text(encoding="utf-8").strip())
            if path.name.startswith(PREFIX) and path.is_dir() and path.stat().st_uid == os.geteuid():
                if not fresh:
                    self.found = True
                    return path
                remove_directory(path)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=KEPT_BELOW))
        pointer.write_text(f"{path}\n", encoding="utf-8")
        return path


def clear_postmaster(data: Path, patience: float = 10.0) -> None:
    """Make a data directory ready after its run was killed: its last server is dead, or dies now (guard.py).

    PostgreSQL itself does not start while the process id in its file exists, and that of a dead process does until
    the system's first process has looked at it. The folder's lock says that no other run has it.

    Raises:
        StartFailed: that server still runs.
    """
    file = data / "postmaster.pid"
    try:
        pid = int(file.read_text(encoding="ascii").splitlines()[0])
    except (OSError, ValueError, IndexError):
        return
    if not wait_until(lambda: not _serves(pid, data), patience, 0.1):
        raise StartFailed(f"a PostgreSQL (pid {pid}) still runs in the kept folder {data}")
    file.unlink(missing_ok=True)


def _serves(pid: int, data: Path) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and str(data) in process.cmdline()
    except psutil.Error:
        return False
