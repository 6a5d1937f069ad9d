"""``python -m deploy.compose.passwords DIRECTORY``: makes the demo's passwords, once.

A fresh machine has no secret and the repository must not have one. So the first start makes them, each into the
folder of the one service that may read it; a later start finds them and changes nothing. A folder holds files named
like the variables, in lower case: the daemons read ``/run/secrets`` by themselves.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.simulator.certificates import Authority

READER = 65532
"""User of the image; the servers' images read theirs as a user of their own, hence mode 444."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the servers of the demo are."""

    postgres: str = "postgres:5432"
    database: str = "app"
    rabbitmq: str = "rabbitmq:5672"


def contents(places: Places, password: Callable[[str], str]) -> dict[str, dict[str, str]]:
    """Return the text of each file by folder and file; ``password`` gives the one password of each name."""

    def database(role: str) -> str:
        return f"postgresql://{role}:{password(role)}@{places.postgres}/{places.database}"

    amqp = f"amqp://app:{password('rabbitmq')}@{places.rabbitmq}/"
    return {
        "postgres": {"postgres_password": password("postgres")},
        "rabbitmq": {
            # loopback_users: the demo's user comes from other containers.
            "rabbitmq.conf": f"default_user = app\ndefault_pass = {password('rabbitmq')}\nloopback_users = none\n",
        },
        "owner": {
            "database_url": database("postgres"),
            **{f"{role}_password": password(role) for role in ("relay", "drain", "observer", "shop")},
        },
        "relay": {"database_url": database("relay"), "relay_amqp_url": amqp},
        "drain": {"database_url": database("drain")},
        "observer": {"database_url": database("observer")},
        "shop": {"database_url": database("shop"), "amqp_url": amqp},
        "grafana": {"admin_password": password("grafana")},
    }


def write(directory: Path, places: Places) -> bool:
    """Write all files unless they are there; say whether they were written.

    A crash in the middle leaves no file ``complete``, and the next start writes all of them anew: no server has
    read any, for they all wait for the end of this program.
    """
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    done = directory / "owner" / "complete"
    if done.exists():
        return False
    known: dict[str, str] = {}

    def password(name: str) -> str:
        return known.setdefault(name, secrets.token_hex(24))

    for folder, files in contents(places, password).items():
        _write_folder(directory / folder, files, by_server=folder in ("postgres", "rabbitmq", "grafana"))
    done.touch()
    return True


def _write_folder(folder: Path, files: Mapping[str, str], by_server: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o444 if by_server else 0o400)
        if os.geteuid() == 0 and not by_server:
            os.chown(path, READER, READER)
    folder.chmod(0o755 if by_server else 0o700)
    if os.geteuid() == 0 and not by_server:
        os.chown(folder, READER, READER)


def main(arguments: list[str] | None = None) -> int:
    """Write into one folder for each service."""
    parser = argparse.ArgumentParser(prog="python -m deploy.compose.passwords")
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--simulator",
        action="store_true",
        help="also the simulator's CA and key, for where it shares no volume",
    )
    options = parser.parse_args(arguments)
    made = write(options.directory, Places())
    if options.simulator:
        Authority(options.directory / "simulator", ["simulator"]).auth_key("SIMKEY0001")
    print("passwords made" if made else "passwords are there already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
