"""Starts the daemons as their operators do, and reads what they say: JSON log lines, /metrics, probes.

Each process is ended by its own id; all die with the process that started them (guard.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from deploy.local.processes import Child, StartFailed, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]

Line = dict[str, Any]
"""One log line: ``event`` and its fields. A line that is no JSON is ``{"event": "", "text": line}``."""


class LineReader:
    """Collects the lines of a pipe in a thread, and wakes those who wait for one."""

    def __init__(self, stream: IO[bytes], on_line: Callable[[Line], None] | None = None) -> None:
        self.lines: list[Line] = []
        self.closed = False
        self._on_line = on_line
        self._changed = threading.Condition()
        self._stream = stream
        self._thread = threading.Thread(target=self._read, name="lines", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream, contextlib.suppress(ValueError, OSError):
            for raw in self._stream:
                line = parse(raw)
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()
                if self._on_line is not None:
                    self._on_line(line)
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wait(self, wanted: Callable[[Line], bool], timeout: float, start: int = 0) -> Line | None:
        """Return the first line from ``start`` on that is wanted; None: time is up, or no more lines can come."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                while start < len(self.lines):
                    if wanted(self.lines[start]):
                        return self.lines[start]
                    start += 1
                left = deadline - time.monotonic()
                if left <= 0 or self.closed:
                    return None
                self._changed.wait(left)

    def join(self, timeout: float = 5.0) -> None:
        """Wait for the last line of a process that has ended."""
        self._thread.join(timeout)


def parse(raw: bytes) -> Line:
    """Read one line of a log."""
    text = raw.decode(errors="replace").rstrip("\n")
    with contextlib.suppress(ValueError):
        line = json.loads(text)
        if isinstance(line, dict):
            return {"event": "", **line}
    return {"event": "", "text": text}


class Daemon:
    """One real process of ours with its log.

    Args:
        argv: arguments after the Python interpreter, e.g. ``["-m", "relay", "run"]``.
        env: variables of the daemon; of our own environment only what a program needs to run is passed on.
        stream: where its JSON lines are: ``stderr`` (daemons), ``stdout`` (simulator). The other is kept as text.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        name: str = "",
        cwd: Path | None = None,
        stream: str = "stderr",
        on_line: Callable[[Line], None] | None = None,
    ) -> None:
        self.name = name or " ".join(argv)
        self.env = {**clean_environment(), **(env or {})}
        self._child = Child(
            [sys.executable, *argv],
            env=self.env,
            cwd=cwd or Path("/"),  # not the repository: a .env there must not reach a test
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        process = self._child.process
        assert process.stdout is not None
        assert process.stderr is not None
        said, other = (
            (process.stderr, process.stdout) if stream == "stderr" else (process.stdout, process.stderr)
        )
        self._log = LineReader(said, on_line)
        self._other = LineReader(other)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether it runs (a paused one does)."""
        return self._child.alive

    @property
    def returncode(self) -> int | None:
        """Exit code; -9 for SIGKILL; None while it runs."""
        return self._child.returncode

    @property
    def lines(self) -> list[Line]:
        """All log lines so far."""
        return list(self._log.lines)

    @property
    def output(self) -> str:
        """What it wrote where no log lines are expected."""
        return "\n".join(str(line.get("text", line)) for line in self._other.lines)

    def events(self, event: str, **fields: Any) -> list[Line]:
        """The log lines of one event whose fields have these values."""
        return [line for line in self.lines if _is(line, event, fields)]

    def mark(self) -> int:
        """Number of log lines so far, to be given to :meth:`wait_for` as ``start``."""
        return len(self._log.lines)

    def wait_for(self, event: str, timeout: float = 20.0, *, start: int = 0, **fields: Any) -> Line:
        """Wait (blocking) for a log event whose fields have these values.

        Raises:
            StartFailed: it did not come in time, or the process ended without it; with the end of its log.
        """
        line = self._log.wait(lambda line: _is(line, event, fields), timeout, start)
        if line is None:
            if self._log.closed:  # its end of the pipe goes a moment before the process itself
                wait_until(lambda: not self.alive, 1.0)
            wanted = f"{event} {fields}" if fields else event
            what = (
                f"no log event {wanted} in {timeout:g} s"
                if self.alive
                else f"ended before log event {wanted}"
            )
            raise StartFailed(
                f"{self.name} (pid {self.pid}, exit code {self.returncode}): {what}\n{self.tail()}"
            )
        return line

    async def seen(self, event: str, timeout: float = 20.0, *, start: int = 0, **fields: Any) -> Line:
        """:meth:`wait_for` that leaves the event loop free."""
        deadline = time.monotonic() + timeout
        while True:
            if found := [line for line in self.lines[start:] if _is(line, event, fields)]:
                return found[0]
            if time.monotonic() >= deadline or self._log.closed:
                return self.wait_for(event, 0.01, start=start, **fields)
            await asyncio.sleep(0.01)

    def send(self, number: int) -> None:
        """Send a signal to this process alone."""
        self._child.send(number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP."""
        self._child.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self._child.resume()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._child.kill()
        self._join()

    def wait(self, timeout: float = 30.0) -> int:
        """Wait (blocking) for the process to end; return its exit code.

        Raises:
            TimeoutError: it still runs.
        """
        code = self._child.wait(timeout)
        self._join()
        return code

    async def ended(self, timeout: float = 30.0) -> int:
        """:meth:`wait` that leaves the event loop free."""
        deadline = time.monotonic() + timeout
        while self.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return self.wait(0.01)

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM, then wait; return the exit code."""
        self.terminate()
        return self.wait(timeout)

    def close(self) -> None:
        """End it whatever it does; for the end of a test."""
        self._child.kill()
        self._join()

    def tail(self, count: int = 25) -> str:
        """The end of its log, for a message."""
        lines = [json.dumps(line, default=str) for line in self.lines[-count:]]
        return "\n".join([*lines, self.output[-2000:]])

    @property
    def probe_port(self) -> int:
        """Port of /metrics, /livez and /readyz, from the event ``started``."""
        return int(self.wait_for("started", 0.5)["probe_port"])

    def get(self, path: str, timeout: float = 5.0) -> tuple[int, str]:
        """GET a path of the probe server; status and body.

        Raises:
            OSError: nobody answers.
        """
        url = f"http://127.0.0.1:{self.probe_port}{path}"
        try:
            with _opener.open(url, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metrics(self) -> Metrics:
        """Scrape /metrics."""
        return Metrics(self.get("/metrics")[1])

    def _join(self) -> None:
        self._log.join()
        self._other.join()


class Metrics:
    """Samples of one scrape."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        """The value of exactly this series; None when it is not there."""
        return self.samples.get((name, frozenset(labels.items())))

    def sum(self, name: str, **labels: str) -> float:
        """Sum over all series of a name that have at least these labels; 0 when there is none."""
        wanted = set(labels.items())
        return sum(
            value for (found, having), value in self.samples.items() if found == name and wanted <= having
        )


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def clean_environment() -> dict[str, str]:
    """What a Python program of this repository needs to run, and nothing that could configure it."""
    kept = ("PATH", "HOME", "TZ", "LANG", "LC_ALL", "SSL_CERT_FILE", "LD_LIBRARY_PATH", "TMPDIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return {
        **environment,
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", ""),
    }


def _is(line: Line, event: str, fields: Mapping[str, Any]) -> bool:
    return line["event"] == event and all(line.get(name) == value for name, value in fields.items())
