"""Setting up a machine: which Python is taken, what is said when something is missing, what the lock promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.supervise import REPOSITORY

BASH = "/bin/bash" if Path("/bin/bash").exists() else "bash"


def sourced(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of bash after ``deploy/bootstrap.sh``, in an environment that is empty but for these."""
    script = f'set -euo pipefail; ROOT="{REPOSITORY}"; . "$ROOT/deploy/bootstrap.sh"; {command}'
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", **environment}
    return subprocess.run(
        [BASH, "-c", script], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_old_python_is_passed_over_for_a_newer_one_further_on(tmp_path: Path) -> None:
    program(tmp_path / "a", "python3.11", "exit 1")  # as a shim of pyenv whose version is not active
    program(tmp_path / "b", "python3.12", f'exec "{sys.executable}" "$@"')
    done = sourced("find_python", PATH=f"{tmp_path}/a:{tmp_path}/b:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).samefile(sys.executable)


def test_python_that_is_named_but_too_old_is_refused(tmp_path: Path) -> None:
    old = program(tmp_path, "python3.9", "exit 1")
    done = sourced("find_python", RELAY_DRAIN_PYTHON=str(old))
    assert done.returncode == 1
    assert f"RELAY_DRAIN_PYTHON={old} is no Python 3.11 or newer" in done.stderr


def test_missing_rabbitmq_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    done = sourced("have_rabbitmq() { false; }; is_root() { false; }; install_rabbitmq", PATH="/usr/bin:/bin")
    assert done.returncode == 1
    assert "apt-get install rabbitmq-server" in done.stderr


def test_missing_ensurepip_is_an_error_that_names_the_package(tmp_path: Path) -> None:
    fake = program(
        tmp_path,
        "python3",
        f'case "$*" in *ensurepip*) exit 1;; *version_info\\[*) echo 3.11;; *) exec "{sys.executable}" "$@";; esac',
    )
    done = sourced(
        f'is_root() {{ false; }}; VENV="{tmp_path}/venv"; find_python() {{ echo "{fake}"; }}; make_venv'
    )
    assert done.returncode == 1
    assert re.search(r"apt-get install python3\.\d+-venv", done.stderr)
    assert not (tmp_path / "venv").exists()


def test_fingerprint_follows_the_lock_and_the_place(tmp_path: Path) -> None:
    copy = tmp_path / "requirements" / "dev.lock"
    copy.parent.mkdir()
    copy.write_bytes((REPOSITORY / "requirements" / "dev.lock").read_bytes())
    command = f'ROOT="{tmp_path}"; VENV="{tmp_path}/v"; fingerprint'
    first = sourced(command).stdout
    assert first == sourced(command).stdout
    assert first != sourced(command.replace('/v"', '/w"')).stdout
    with copy.open("a") as lock:
        lock.write("# changed\n")
    assert first != sourced(command).stdout


@pytest.mark.parametrize("name", ["run.lock", "dev.lock"])
def test_lock_pins_every_package_with_hashes_and_names_no_machine(name: str) -> None:
    text = (REPOSITORY / "requirements" / name).read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[a-zA-Z0-9])", re.sub(r"^\s*#.*\n", "", text, flags=re.M))
    entries = [entry for entry in entries if entry.strip() and not entry.startswith("--")]
    assert len(entries) > 20
    assert [entry for entry in entries if not re.match(r"[a-zA-Z0-9._\[\]-]+==\S+ ", entry)] == []
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert re.findall(r"@ file:|https?:|^-", text, flags=re.M) == []


@pytest.mark.parametrize("script", [".ci/run", "deploy/test"])
def test_commands_are_executable_and_parse(script: str) -> None:
    assert os.access(REPOSITORY / script, os.X_OK)
    subprocess.run([BASH, "-n", str(REPOSITORY / script)], check=True)


def test_help_needs_no_setup() -> None:
    done = subprocess.run(
        [BASH, str(REPOSITORY / "deploy" / "test"), "--help"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--quick" in done.stdout
