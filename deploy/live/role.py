"""A place in the chain that one process fills: started, watched, and started again when it died."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.local.supervise import Daemon, Line

READY_TIMEOUT = 60.0
"""Seconds; one on an idle machine."""
STOP_TIMEOUT = 60.0
RESTART_AFTER = 1.0
"""Seconds that a dead process rests, as a process manager would let it."""


class Role:
    """``launch`` and ``await_ready`` start its process, ``stop`` ends it, ``tend`` replaces one that died.

    Args:
        name: for people, and for the log file.
        ready: log event that says that the process works; empty: it says nothing.
        stream: where its JSON lines are.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        logs: Path,
        ready: str,
        stream: str = "stderr",
    ) -> None:
        self.name = name
        self.daemon: Daemon | None = None
        self.port: int | None = None
        """Of its probes and metrics, when it has them."""
        self.restarts = 0
        self.wanted = False
        self.codes: list[int] = []
        """Exit codes of the processes that were asked to end."""
        self._argv, self._env, self._ready, self._stream = list(argv), dict(env), ready, stream
        self._log = (logs / f"{name}.log").open("a", encoding="utf-8")
        self._folder = logs
        self._ended_at: float | None = None

    @property
    def alive(self) -> bool:
        """Whether its process runs (a frozen one does)."""
        return self.daemon is not None and self.daemon.alive

    @property
    def started(self) -> bool:
        """Whether its process runs and said that it works (one that says nothing works when it runs)."""
        return (
            self.daemon is not None
            and self.daemon.alive
            and (not self._ready or bool(self.daemon.events(self._ready)))
        )

    def launch(self) -> None:
        """Start its process and return at once."""
        self.wanted = True
        self._ended_at = None
        self.daemon = Daemon(
            self._argv,
            self._env,
            name=self.name,
            cwd=self._folder,
            stream=self._stream,
            on_line=self._write,
        )

    def await_ready(self, timeout: float = READY_TIMEOUT) -> Line:
        """Wait until its process works.

        Raises:
            StartFailed: it ended, or took too long; with the end of its log.
        """
        assert self.daemon is not None
        return self.daemon.wait_for(self._ready, timeout)

    def start(self) -> Daemon:
        """Start its process and wait until it works. Raises StartFailed."""
        self.launch()
        self.await_ready()
        assert self.daemon is not None
        return self.daemon

    def stop(self, timeout: float = STOP_TIMEOUT) -> int | None:
        """SIGTERM, wait, SIGKILL when that was not enough; the exit code, None when nothing ran."""
        self.wanted = False
        daemon = self.daemon
        if daemon is None or not daemon.alive:
            return None
        daemon.resume()
        daemon.terminate()
        try:
            code = daemon.wait(timeout)
        except TimeoutError:
            daemon.kill()
            code = daemon.returncode or 0
        self.codes.append(code)
        return code

    def kill(self) -> None:
        """SIGKILL."""
        self.wanted = False
        if self.daemon is not None:
            self.daemon.close()

    def close(self) -> None:
        """End it whatever it does."""
        self.kill()
        self._log.close()

    def tend(self) -> bool:
        """Start it again when it died by itself; say whether it was."""
        if not self.wanted or self.alive:
            return False
        now = time.monotonic()
        if self._ended_at is None:
            self._ended_at = now
        if now - self._ended_at < RESTART_AFTER:
            return False
        self.restarts += 1
        self.launch()
        return True

    def _write(self, line: Line) -> None:
        # The thread of a killed process may come late, when the file is closed.
        with contextlib.suppress(ValueError, OSError):
            self._log.write(json.dumps(line, default=str) + "\n")
            self._log.flush()


def start_all(roles: Sequence[Role]) -> None:
    """Start processes together; return when all of them work. Raises StartFailed."""
    for role in roles:
        role.launch()
    for role in roles:
        role.await_ready()


def named(roles: Sequence[Role]) -> str:
    """The names and process ids, for people."""
    return ", ".join(f"{role.name} (pid {role.daemon.pid})" for role in roles if role.daemon is not None)
