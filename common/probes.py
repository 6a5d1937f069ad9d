"""Probes and metrics over HTTP, answered by a thread: a blocked event loop can not hang the answer.

- ``/livez``: 200 while the loops turn and the inner tasks live. Looks at nothing outside the process.
- ``/readyz``: 200 when every condition holds (database, broker or APNs seen lately, not stopping).
- ``/startupz``: 200 once the daemon has started.
- ``/metrics``: Prometheus text.

Bodies say which condition fails, and nothing secret.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from common.errors import ConfigurationError

Condition = Callable[[], str | None]
"""Returns None when it holds, else what is wrong."""


class Health:
    """What the loops say about themselves; written by the event loop, read by the probe thread."""

    def __init__(self, live_after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._live_after = live_after
        self._clock = clock
        self._ticks: dict[str, float] = {}
        self._dead: str | None = None
        self.started = False
        self.stopping = False
        self.ready: dict[str, Condition] = {}

    def tick(self, loop: str) -> None:
        """Say that this loop turned."""
        self._ticks[loop] = self._clock()

    def ended(self, loop: str) -> None:
        """Say that this loop ended on purpose and is not watched any more."""
        self._ticks.pop(loop, None)

    def died(self, task: str) -> None:
        """Say that an inner task ended that must not."""
        self._dead = task

    def live_problem(self) -> str | None:
        """Why the process should be restarted, or None."""
        if self._dead is not None:
            return f"inner task {self._dead} ended"
        now = self._clock()
        for loop, at in list(self._ticks.items()):
            if now - at > self._live_after:
                return f"loop {loop} has not turned for {now - at:.0f} s (bound: {self._live_after:g} s)"
        return None

    def ready_problems(self) -> dict[str, str]:
        """What keeps the process from being ready."""
        problems: dict[str, str] = {}
        if not self.started:
            problems["startup"] = "not started yet"
        if self.stopping:
            problems["shutdown"] = "stopping"
        for name, condition in list(self.ready.items()):
            problem = condition()
            if problem is not None:
                problems[name] = problem
        return problems


class _Handler(BaseHTTPRequestHandler):
    server: ProbeServer
    protocol_version = "HTTP/1.1"
    timeout = 10  # a client that connects and says nothing does not hold a thread for ever

    def do_GET(self) -> None:
        """Answer one probe."""
        health = self.server.health
        match self.path.partition("?")[0]:
            case "/livez":
                problem = health.live_problem()
                self._answer({} if problem is None else {"live": problem})
            case "/readyz":
                self._answer(health.ready_problems())
            case "/startupz":
                self._answer({} if health.started else {"startup": "not started yet"})
            case "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._send(200, content_type, encode(self.server.registry))
            case _:
                self._send(404, "text/plain", b"livez, readyz, startupz, metrics\n")

    do_HEAD = do_GET

    def _answer(self, problems: dict[str, str]) -> None:
        body = json.dumps({"ok": not problems, "problems": problems}).encode() + b"\n"
        self._send(503 if problems else 200, "application/json", body)

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        """Tell nothing about the interpreter."""
        return "relay-drain"

    def log_message(self, format: str, *args: Any) -> None:
        """Probes are no events."""


class ProbeServer(ThreadingHTTPServer):
    """The HTTP server; the port is bound when it is made.

    Raises:
        ConfigurationError: the address can not be bound.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, health: Health, registry: CollectorRegistry) -> None:
        self.health = health
        self.registry = registry
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigurationError(f"PROBE_HOST={host}, PROBE_PORT={port}: {error}") from None
        self._thread = threading.Thread(target=self.serve_forever, name="probes", daemon=True)

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self.server_address[1])

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event."""
