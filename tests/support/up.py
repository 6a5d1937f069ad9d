"""Runs of ./deploy/up as processes, with or without a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from deploy.local.supervise import clean_environment

PATIENCE = 240.0
"""Seconds; a tenth on an idle machine."""


class Up:
    """One run of ``python -m deploy.live``; ``terminal`` gives it one of its own, else its output is a pipe."""

    def __init__(self, *arguments: str, terminal: bool = False, **environment: str) -> None:
        argv = [sys.executable, "-P", "-m", "deploy.live", *arguments]
        env = {
            **clean_environment(),
            "TERM": "xterm-256color",
            "COLUMNS": "140",
            "LINES": "50",
            **environment,
        }
        ours, theirs = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(
            argv,
            env=env,
            cwd="/",
            stdin=theirs if terminal else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal if terminal else None,
        )
        os.close(theirs)
        self.descriptor = ours
        self._chunks: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.family: list[psutil.Process] = []

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end of a terminal is closed
            while chunk := os.read(self.descriptor, 65_536):
                self._chunks.append(chunk)

    @property
    def said(self) -> str:
        """Its output without what only a terminal understands."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(self._chunks).decode(errors="replace"))

    def until(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.said}"
            assert self.process.poll() is None, f"ended before {what}:\n{self.said}"
            time.sleep(0.1)

    def is_up(self) -> None:
        """Wait until all of it runs; remember its processes."""
        self.until(lambda: " logs " in self.said, "all of it runs")
        self.remember()

    def remember(self) -> None:
        """Its processes as they are now."""
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def found(self, pattern: str) -> str:
        match = re.search(pattern, self.said)
        assert match is not None, f"no {pattern} in:\n{self.said}"
        return match.group(1)

    @property
    def psql(self) -> str:
        return self.found(r"psql +(postgresql://\S+)")

    @property
    def folder(self) -> Path:
        return Path(self.found(r"logs +(\S+)/logs"))

    @property
    def ports(self) -> set[str]:
        return set(re.findall(r"127\.0\.0\.1:(\d+)", self.said))

    def end(self) -> int:
        """Wait for its end, and for that of its processes; none may be left."""
        code = self.process.wait(PATIENCE)
        self._thread.join(10)
        deadline = time.monotonic() + 20
        while left := [each for each in self.family if runs(each)]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the guard ends its processes
        self.process.wait()
        self._thread.join(10)
        os.close(self.descriptor)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
