"""The compose files: no secret in them, grace longer than the daemons' own deadlines, each secret for its reader."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.compose.passwords import Places, contents, write
from deploy.compose.roles import LOGINS
from drain.settings import CLOSE_TIMEOUT as DRAIN_CLOSE
from drain.settings import load_settings as load_drain
from relay.settings import CLOSE_TIMEOUT as RELAY_CLOSE
from relay.settings import load_settings as load_relay

ROOT = Path(__file__).parent.parent.parent
DEMO, PRODUCTION = ROOT / "docker-compose.yml", ROOT / "docker-compose.production.yml"
OURS = ("relay", "drain", "migrate", "roles", "simulator", "demo-producer", "demo-consumer")


def services(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]
    return found


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "m": 60}[unit]


def environment(path: Path, name: str) -> dict[str, str]:
    return dict(services(path)[name].get("environment", {}))


@pytest.mark.parametrize("path", [DEMO, PRODUCTION], ids=["demo", "production"])
def test_relay_may_finish_before_it_is_killed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRETS_DIR", "/dev/null")
    for name, value in environment(path, "relay").items():
        monkeypatch.setenv(name, value)
    relay = load_relay().relay
    grace = seconds(services(path)["relay"]["stop_grace_period"])
    assert relay.grace == grace, "the daemon checks against another number than the platform's"
    assert relay.stop_deadline + RELAY_CLOSE < grace


@pytest.mark.parametrize("path", [DEMO, PRODUCTION], ids=["demo", "production"])
def test_drain_may_finish_before_it_is_killed_and_before_its_leases_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRETS_DIR", "/dev/null")
    given = environment(path, "drain")
    if given["DRAIN_APPS"].startswith("${"):
        key = {"topic": "t", "team_id": "t", "key_id": "k", "key_file": "/run/secrets/apns_key.p8"}
        given["DRAIN_APPS"] = json.dumps({"shop": key})
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    drain = load_drain().drain
    grace = seconds(services(path)["drain"]["stop_grace_period"])
    assert drain.grace == grace
    assert drain.drain_deadline + drain.flush_deadline + DRAIN_CLOSE < grace < drain.lease


@pytest.mark.parametrize("path", [DEMO, PRODUCTION], ids=["demo", "production"])
def test_there_is_no_secret_in_the_file(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for service in services(path).values():
        for variable in service.get("environment", {}):
            assert variable.endswith("_FILE") or not re.search("PASSWORD|PASS$|SECRET|TOKEN", variable)
    for line in text.splitlines():
        if not line.lstrip().startswith("#"):
            assert "://" not in line or "127.0.0.1" in line, line


def test_every_image_can_be_named_by_a_variable_and_has_an_official_default() -> None:
    for name, service in services(DEMO).items():
        assert re.fullmatch(r"\$\{[A-Z_]+_IMAGE:-[a-z/-]+:[a-z0-9.-]+\}", service["image"]), name


@pytest.mark.parametrize("path", [DEMO, PRODUCTION], ids=["demo", "production"])
def test_our_containers_are_confined(path: Path) -> None:
    for name, service in services(path).items():
        if name in OURS:
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]
            assert "user" not in service, "the image's own user is no root"


def test_nothing_listens_beyond_this_machine() -> None:
    for path in (DEMO, PRODUCTION):
        for service in services(path).values():
            for port in service.get("ports", []):
                assert port.startswith("127.0.0.1:")


def test_a_secret_is_seen_by_its_reader_alone() -> None:
    readers: dict[str, set[str]] = {}
    for name, service in services(DEMO).items():
        for volume in service.get("volumes", []):
            if volume.startswith("secrets-") and name != "passwords":
                assert volume.endswith(":/run/secrets:ro")
                readers.setdefault(volume.partition(":")[0], set()).add(name)
    assert readers == {
        "secrets-postgres": {"postgres"},
        "secrets-rabbitmq": {"rabbitmq"},
        "secrets-owner": {"migrate", "roles"},
        "secrets-relay": {"relay"},
        "secrets-drain": {"drain"},
        "secrets-shop": {"demo-producer", "demo-consumer"},
        "secrets-grafana": {"grafana"},
    }
    folders = set(contents(Places(), lambda name: name))
    assert {f"secrets-{folder}:/secrets/{folder}" for folder in folders} == set(
        services(DEMO)["passwords"]["volumes"]
    )


def test_passwords_are_made_once_and_only_their_reader_may_read_them(tmp_path: Path) -> None:
    assert write(tmp_path / "made", Places())
    first = {path: path.read_bytes() for path in (tmp_path / "made").rglob("*") if path.is_file()}
    assert not write(tmp_path / "made", Places())
    assert first == {path: path.read_bytes() for path in (tmp_path / "made").rglob("*") if path.is_file()}
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0
    assert (tmp_path / "made" / "relay" / "database_url").stat().st_mode & 0o777 == 0o400
    owner = {path.name for path in (tmp_path / "made" / "owner").iterdir()}
    assert owner >= {f"{login}_password" for login in LOGINS}
    write(tmp_path / "others", Places())
    for path, content in first.items():
        if content and path.name != "complete":
            assert (tmp_path / "others" / path.relative_to(tmp_path / "made")).read_bytes() != content


def test_passwords_that_a_crash_left_half_made_are_made_anew(tmp_path: Path) -> None:
    write(tmp_path, Places())
    (tmp_path / "owner" / "complete").unlink()
    (tmp_path / "relay" / "database_url").unlink()
    assert write(tmp_path, Places())
    relay = (tmp_path / "relay" / "database_url").read_text(encoding="utf-8")
    assert (tmp_path / "owner" / "relay_password").read_text(encoding="utf-8") in relay


@pytest.mark.parametrize("path", [DEMO, PRODUCTION], ids=["demo", "production"])
def test_compose_understands_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAIN_APPS", "{}")
    commands = [
        command
        for command in (["docker", "compose"], ["docker-compose"])
        if shutil.which(command[0])
        and subprocess.run([*command, "version"], capture_output=True).returncode == 0
    ]
    if not commands:
        pytest.skip("COMPOSE FILES NOT READ BY COMPOSE: neither docker compose nor docker-compose is here")
    for command in commands:
        done = subprocess.run([*command, "-f", str(path), "config", "-q"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_production_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "${DRAIN_APPS:?" in services(PRODUCTION)["drain"]["environment"]["DRAIN_APPS"]
    wanted = set(yaml.safe_load(PRODUCTION.read_text(encoding="utf-8"))["secrets"])
    head = PRODUCTION.read_text(encoding="utf-8").partition("x-daemon")[0]
    assert all(f"secrets/{name}" in head for name in wanted)
