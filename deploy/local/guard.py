"""Ends our children when we are killed ourselves: a helper process that outlives us just long enough for that.

PR_SET_PDEATHSIG would do it only on Linux, is lost when a child changes its user, and fires when the *thread* that
started the child ends. A pipe is portable: when its writing end closes, whatever the reason, the owner is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil

_HELPER = Path(__file__).resolve()


class Guard:
    """Tells the helper which process groups are ours; started with the first of them. Safe in threads."""

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
    for line in sys.stdin:
        sign, pid, *born = line.split()
        if sign == "+":
            watched[int(pid)] = float(born[0])
        else:
            watched.pop(int(pid), None)
    for pid, born_at in watched.items():
        # The number may belong to somebody else by now; the time of birth does not.
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if psutil.Process(pid).create_time() == born_at:
                os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
