"""Ends our children and removes their folders when we are killed ourselves: a helper that outlives us for a moment.

PR_SET_PDEATHSIG would do it only on Linux, is lost when a child changes its user, and fires when the *thread* that
started the child ends. A pipe is portable: when its writing end closes, whatever the reason, the owner is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

_HELPER = Path(__file__).resolve()


class Guard:
    """Tells the helper which process groups and folders are ours; it starts with the first. Safe in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def watch(self, pid: int) -> None:
        """End the process group ``pid`` when this process is gone."""
        try:
            born = psutil.Process(pid).create_time()
        except psutil.Error:
            return
        self._tell(f"+ {pid} {born!r}\n")

    def forget(self, pid: int) -> None:
        """The process group has ended."""
        self._tell(f"- {pid}\n")

    def remove(self, folder: Path) -> None:
        """Remove the folder when this process is gone."""
        self._tell(f"d {folder}\n")

    def _tell(self, line: str) -> None:
        with self._lock:
            if self._helper is None or self._owner != os.getpid():
                self._start()
            if self._helper is None or self._helper.stdin is None:
                return
            with contextlib.suppress(OSError):  # the helper was killed: the tests go on without it
                self._helper.stdin.write(line.encode())
                self._helper.stdin.flush()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._helper = subprocess.Popen(
            [sys.executable, "-I", str(_HELPER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self._stop, self._helper)

    def _stop(self, helper: subprocess.Popen[bytes]) -> None:
        if self._owner != os.getpid() or helper.stdin is None:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            helper.stdin.close()
            helper.wait(5)


GUARD = Guard()


def _serve() -> None:
    """The helper: read lines until the pipe closes, then kill what is left."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    watched: dict[int, float] = {}
    folders: list[str] = []
    for line in sys.stdin:
        sign, _, rest = line.rstrip("\n").partition(" ")
        if sign == "+":
            pid_text, born = rest.split()
            watched[int(pid_text)] = float(born)
        elif sign == "-":
            watched.pop(int(rest), None)
        else:
            folders.append(rest)
    for pid, born_at in watched.items():
        # The number may belong to somebody else by now; the time of birth does not.
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if psutil.Process(pid).create_time() == born_at:
                os.killpg(pid, signal.SIGKILL)
    for _ in range(10):  # servers write until they are dead
        folders = [folder for folder in folders if Path(folder).exists()]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not folders:
            break
        time.sleep(0.1)


if __name__ == "__main__":
    _serve()
