"""The senders that drain is compared with: bare loops in processes of their own, told what to do by lines."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.drain.figures import Figure

NODE_APN = "@parse/node-apn@8.1.0"
NPM_SECONDS = 90.0
PACKAGES = ("PATH", "HOME", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""What npm may see of our environment, besides its own settings."""


class Skipped(Exception):
    """A peer can not run here; the message says why."""


class Peer:
    """A bare loop that stays: connected and warm. It ends when its standard input does, so also with us."""

    def __init__(self, argv: Sequence[str], wait: float = 60.0) -> None:
        self._wait = wait
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def push(self, count: int) -> Figure:
        """Have it send so many pushes.

        Raises:
            SystemExit: it ended, took too long, or not all were accepted.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout], [], [], self._wait)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            raise SystemExit(f"no figures from {self._process.args!r} (exit status {self._process.poll()})")
        told: dict[str, Any] = json.loads(line)
        if told["accepted"] != count:
            raise SystemExit(f"{told['accepted']} of {count} pushes accepted of {self._process.args!r}")
        return Figure(count / told["seconds"], told["cpu"] / count * 1e6)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def stock_aioapns(target: dict[str, Any], in_flight: int) -> Iterator[Peer]:
    """aioapns as it comes."""
    told = json.dumps({**target, "in_flight": in_flight, "connections": 10})
    peer = Peer([sys.executable, "-m", "bench.drain.stock", told])
    try:
        yield peer
    finally:
        peer.close()


@contextlib.contextmanager
def node_apn(target: dict[str, Any], in_flight: int) -> Iterator[Peer]:
    """Node's client, installed into a folder that goes away in the end.

    Raises:
        Skipped: node or npm is missing, or the package can not be had.
    """
    missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    if missing:
        raise Skipped(f"{' and '.join(missing)} not found")
    with tempfile.TemporaryDirectory(prefix="bench-drain-") as folder:
        install(Path(folder))
        script = Path(__file__).with_name("node_apn.js")
        library = Path(folder, "node_modules", "@parse", "node-apn")
        told = json.dumps({**target, "in_flight": in_flight})
        peer = Peer(["node", str(script), str(library), told])
        try:
            yield peer
        finally:
            peer.close()


def install(folder: Path) -> None:
    """Run npm, without the packages' own scripts; what npm has cached is not fetched again."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.upper() in PACKAGES or name.lower().startswith("npm_")
    }
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    try:
        done = subprocess.run(
            [*command, "--prefix", str(folder), NODE_APN],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=NPM_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise Skipped(f"npm install {NODE_APN} took longer than {NPM_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise Skipped(f"npm install {NODE_APN}: {done.stderr.strip()[-300:]}")
