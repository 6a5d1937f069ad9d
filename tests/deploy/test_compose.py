"""`docker compose up` as a person would: the chain works, each daemon is killed and stopped, nothing is lost.

Where no image can be pulled, ../shared/docker/standin-images (or the program that $STANDIN_IMAGES names) makes local
stand-ins for the official images; where it is not there, docker must already run. Without docker the test is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.local.ports import free_port

ROOT = Path(__file__).parent.parent.parent
STANDIN = Path(os.environ.get("STANDIN_IMAGES") or ROOT.parent / "shared" / "docker" / "standin-images")
GRACE = {"relay": 30.0, "drain": 60.0}
SETTLED = 180.0

pytestmark = pytest.mark.xdist_group("compose")


def defaults() -> dict[str, str]:
    """The official image of each kind, as the compose file has it."""
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    found = dict(re.findall(r"\$\{(\w+)_IMAGE:-([^}]+)\}", text))
    return {kind.lower(): found[kind] for kind in ("PYTHON", "POSTGRES", "RABBITMQ", "PROMETHEUS")}


def docker_answers() -> bool:
    return (
        shutil.which("docker") is not None
        and subprocess.run(["docker", "info"], capture_output=True).returncode == 0
    )


@pytest.fixture(scope="module")
def images() -> Iterator[None]:
    """Docker runs and has the images, or can pull them."""
    ran_before = docker_answers()
    if os.access(STANDIN, os.X_OK) and os.geteuid() == 0:
        wanted = [f"{kind}={tag}" for kind, tag in defaults().items()]
        done = subprocess.run([STANDIN, *wanted], capture_output=True, text=True, timeout=1200)
        if done.returncode != 0:
            pytest.skip(f"COMPOSE NOT TESTED: {STANDIN.name} failed: {done.stderr[-300:]}")
    elif not ran_before:
        pytest.skip(
            "COMPOSE NOT TESTED: no docker answers, and there is no program that makes stand-in images"
        )
    yield
    pid_file = Path("/var/run/docker.pid")
    if not ran_before and pid_file.exists():  # it was started for this test
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(pid_file.read_text()), signal.SIGTERM)


class Project:
    """One compose project with a name, ports and images of its own."""

    def __init__(self) -> None:
        self.name = f"rd{secrets.token_hex(4)}"
        self.simulator_port = free_port()
        self.environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": self.name,
            "DOCKER_BUILDKIT": "0",  # the classic builder: what it can, BuildKit can
            "COMPOSE_DOCKER_CLI_BUILD": "0",
            "RELAY_DRAIN_IMAGE": "relay-drain:test",
            "RELAY_DRAIN_DEMO_IMAGE": "relay-drain-demo:test",
            "SIMULATOR_PORT": str(self.simulator_port),
            "PROMETHEUS_PORT": str(free_port()),
            "DEMO_RATE": "40",
        }
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
        self._command = ["docker", "compose"] if plugin else ["docker-compose"]

    def run(self, *arguments: str, timeout: float = 300) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def inspect(self, service: str) -> dict[str, Any]:
        container = self.run("ps", "-aq" if self._command[0] == "docker" else "-q", service).split()[0]
        text = subprocess.run(
            ["docker", "inspect", container], capture_output=True, text=True, check=True
        ).stdout
        found: dict[str, Any] = json.loads(text)[0]
        return found

    def healthy(self, service: str) -> bool:
        state = self.inspect(service)["State"]
        return bool(state["Running"] and state["Health"]["Status"] == "healthy")

    def kill(self, service: str) -> None:
        """SIGKILL the container's process from outside, as the kernel would: docker's own kill counts as a stop."""
        found = self.inspect(service)
        try:
            os.kill(found["State"]["Pid"], signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # docker runs in a machine of its own
            subprocess.run(["docker", "kill", "-s", "KILL", found["Id"]], check=True, capture_output=True)
            subprocess.run(["docker", "start", found["Id"]], check=True, capture_output=True)

    def stats(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.simulator_port}/stats"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def sql(self, statement: str) -> str:
        """Run a statement as the owner, inside the database's container."""
        psql = ["psql", "-h", "/var/run/postgresql", "-U", "postgres", "-d", "app", "-AtX", "-c", statement]
        return self.run("exec", "-T", "postgres", *psql).strip()

    def exit_code(self, service: str) -> int:
        return int(self.inspect(service)["State"]["ExitCode"])

    def log(self, service: str) -> str:
        return self.run("logs", "--tail=40", service)


@pytest.fixture
def project(images: None) -> Iterator[Project]:
    project = Project()
    yield project
    project.run("down", "-v", "--remove-orphans")


def until(condition: Callable[[], bool], what: str, seconds: float = SETTLED) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.5)


OPEN = """SELECT (SELECT count(*) FROM relay_drain.outbox WHERE published_at IS NULL)
    + (SELECT count(*) FROM relay_drain.notification_deliveries WHERE status IN ('pending', 'claimed'))
    + (SELECT count(*) FROM shop.orders AS o
        WHERE NOT EXISTS (SELECT FROM shop.notified AS n WHERE n.order_id = o.id))"""


def end_leases_of_the_dead(project: Project) -> None:
    """Move the leases that a killed drain left, instead of waiting for their two minutes."""
    project.sql(
        """UPDATE relay_drain.notification_deliveries SET next_attempt_at = now()
           WHERE status = 'claimed' AND next_attempt_at < now() + interval '100 seconds'"""
    )


def account(project: Project) -> None:
    """Every order became one event, one application of it, one notification that was sent."""
    orders = int(project.sql("SELECT count(*) FROM shop.orders"))
    assert orders > 0
    lost = {
        "orders without an event": "SELECT count(*) FROM shop.orders AS o WHERE NOT EXISTS (SELECT FROM "
        "relay_drain.outbox AS e WHERE e.event_type = 'order.placed' AND e.aggregate_id = o.id::text)",
        "events not published": "SELECT count(*) FROM relay_drain.outbox WHERE published_at IS NULL",
        "orders not applied once": "SELECT count(*) FROM shop.notified WHERE times <> 1",
        "deliveries not sent": "SELECT count(*) FROM relay_drain.notification_deliveries WHERE status <> 'sent'",
    }
    assert {what: project.sql(statement) for what, statement in lost.items()} == dict.fromkeys(lost, "0")
    assert int(project.sql("SELECT count(*) FROM shop.notified")) == orders
    assert int(project.sql("SELECT count(*) FROM relay_drain.notification_deliveries")) == orders


def stop(project: Project, *chosen: str) -> None:
    began = time.monotonic()
    project.run("stop", *chosen)
    seconds = time.monotonic() - began
    assert seconds < max(GRACE.values()), f"took {seconds:.0f} s"
    for daemon in GRACE:
        assert project.exit_code(daemon) == 0, project.log(daemon)
        assert '"event": "stopped"' in project.log(daemon)


def test_the_chain_survives_the_kill_of_each_daemon_and_loses_nothing(project: Project) -> None:
    project.run("build", timeout=1500)
    project.run("up", "-d", timeout=600)
    until(lambda: project.stats()["delivered"] >= 40, "pushes arrive", 180)
    until(lambda: project.healthy("relay") and project.healthy("drain"), "both are ready")

    for daemon in GRACE:
        before = project.inspect(daemon)["RestartCount"]
        project.kill(daemon)
        until(lambda: project.inspect(daemon)["RestartCount"] > before, f"{daemon} is started again")  # noqa: B023
        until(lambda: project.healthy(daemon), f"{daemon} is ready again")  # noqa: B023
        delivered = project.stats()["delivered"]
        until(lambda: project.stats()["delivered"] >= delivered + 40, "pushes go on")  # noqa: B023

    # Under load, both at once: each ends within its grace, by itself and cleanly.
    stop(project, "relay", "drain")
    project.run("start", "relay", "drain")
    project.run("stop", "demo-producer")
    end_leases_of_the_dead(project)
    until(lambda: project.sql(OPEN) == "0", "everything is through", 180)
    account(project)
    stats = project.stats()
    assert stats["distinct_ids"] == int(
        project.sql("SELECT count(*) FROM relay_drain.notification_deliveries")
    )
    assert stats["refused"] == 0

    project.run("start", "demo-producer")
    delivered = stats["delivered"]
    until(lambda: project.stats()["delivered"] > delivered + 20, "pushes go on")
    stop(project)

    # What `docker compose stop` left is there after the next start, and goes through.
    project.run("start", "postgres", "rabbitmq", "simulator")
    until(lambda: project.healthy("postgres") and project.healthy("rabbitmq"), "the servers are back")
    project.run("start", "relay", "drain", "demo-consumer")
    until(lambda: project.sql(OPEN) == "0", "everything is through", 180)
    account(project)
