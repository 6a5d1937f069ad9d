"""The commands of relay and drain as their operators run them: real processes, with or without a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local.supervise import clean_environment

PATIENCE = 60.0
"""Seconds; a command takes half of one, on a busy machine many times that."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which is one JSON value."""
        return json.loads(self.out)


class CommandLine:
    """``relay("status", "--json")`` runs ``python -m relay status --json`` to its end, without a terminal."""

    def __init__(self, program: str, directory: Path, environment: dict[str, str]) -> None:
        self.program, self.directory = program, directory
        # Compiling all modules again takes longer than a command does.
        cache = {"PYTHONPYCACHEPREFIX": str(directory.parent / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
        self.environment = {**clean_environment(), **cache, **environment}

    def _argv(self, arguments: tuple[object, ...]) -> list[str]:
        return [sys.executable, "-m", self.program, *map(str, arguments)]

    def __call__(self, *arguments: object, **environment: str) -> Result:
        """Run to the end; the exit code is for the caller to look at."""
        done = subprocess.run(
            self._argv(arguments),
            cwd=self.directory,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    def ok(self, *arguments: object, **environment: str) -> Result:
        """Run, and insist on exit code 0."""
        result = self(*arguments, **environment)
        assert result.code == 0, result
        return result

    @contextlib.contextmanager
    def started(self, *arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """A command that runs meanwhile; it is ended at last."""
        process = subprocess.Popen(
            self._argv(arguments),
            cwd=self.directory,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def on_terminal(self, *arguments: object, answer: str, interrupt: bool = False) -> Result:
        """Run on a terminal of its own and type an answer (or Ctrl-C) once it asks; both outputs are in ``out``."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.directory)
            os.execve(sys.executable, self._argv(arguments), self.environment)
        said, typed, deadline = "", False, time.monotonic() + PATIENCE
        try:
            while True:
                ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    os.kill(pid, signal.SIGKILL)
                    raise AssertionError(f"no end and no question in time: {said}")
                try:
                    chunk = os.read(terminal, 4096)
                except OSError:  # the other end is closed
                    break
                if not chunk:
                    break
                said += chunk.decode()
                if not typed and "[y/N]" in said:
                    typed = True
                    os.write(terminal, b"\x03" if interrupt else answer.encode() + b"\n")
        finally:
            _, status = os.waitpid(pid, 0)
            os.close(terminal)
        assert "Traceback" not in said, said
        return Result(os.waitstatus_to_exitcode(status), said.replace("\r\n", "\n"), "")
