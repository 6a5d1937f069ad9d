"""A simulator in a process of its own, for tests, the board and measurements."""

import json
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from deploy.simulator.client import SimulatorClient

_ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Ready:
    """The READY line; paths are absolute."""

    event: str
    host: str
    port: int
    control_port: int
    control_url: str
    ca_file: str
    key_file: str
    key_id: str
    team_id: str
    topics: list[str]
    client_cert_file: str
    unknown_client_cert_file: str


class SimulatorProcess:
    """`with SimulatorProcess("--topic", "com.example.shop") as simulator: simulator.client.stats()`.

    The constructor starts it and returns when it is ready; RuntimeError when it ended before or took too long.
    Its stderr is this process's own.
    """

    def __init__(self, *arguments: str, ready_within: float = 20.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy.simulator", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        try:
            self.ready = Ready(**json.loads(self._first_line(ready_within)))
        except BaseException:
            self.kill()
            raise
        self.client = SimulatorClient(self.ready.control_url)

    def _first_line(self, within: float) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], within)
        line = stdout.readline() if readable else ""
        if not line:
            raise RuntimeError(
                f"the simulator was not ready within {within} s (exit status {self.process.poll()})"
            )
        return line

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP makes it a peer that is silent altogether; SIGCONT brings it back."""
        self.process.send_signal(number)

    def stop(self, within: float = 5.0) -> int:
        """SIGTERM; its exit status. Killed when it takes longer. Safe to call twice."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.returncode
        finally:
            self._close_pipe()

    def kill(self) -> None:
        """SIGKILL: sockets vanish as when the machine's process dies."""
        self.process.kill()
        self.process.wait()
        self._close_pipe()

    def _close_pipe(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> "SimulatorProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
