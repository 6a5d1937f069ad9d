"""``python -m deploy.docs``: writes the reference tables of ``docs/`` from the code, so that they can not differ.

- ``docs/metrics.md`` from the registries of both daemons,
- ``docs/logs.md`` from the declared log events and the calls that emit them,
- ``docs/settings.md`` from the settings classes.

``--check`` writes nothing and exits with 1 when a file is not what the code says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from common.settings import SharedSettings, Source, show
from deploy.catalog import Family, event_table, families
from drain.settings import DEFAULT_PROBE_PORT as DRAIN_PORT
from drain.settings import AppSettings, DrainSettings
from relay.settings import DEFAULT_PROBE_PORT as RELAY_PORT
from relay.settings import RelaySettings

ROOT = Path(__file__).parent.parent
NOTE = "<!-- Made by `python -m deploy.docs` from the code; change the code, not this file. -->\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    columns = list(head)
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return ``docs/metrics.md``."""
    text = (
        f"# Metrics\n\n{NOTE}\n"
        "Both daemons serve them at `/metrics` on `PROBE_PORT`. Names whose type is *gauge (database)* are read from\n"
        "the database by every replica alike: aggregate them with `max by (...)`, never with `sum`. They disappear\n"
        "when a look at the database fails; `worker_db_observation_timestamp_seconds` says how fresh they are.\n"
        "Every label set exists from the start with the value 0, so that `increase()` sees the first event.\n"
    )
    everything = families()
    for title, daemons in (
        ("Both daemons", {"relay", "drain"}),
        ("relay", {"relay"}),
        ("drain", {"drain"}),
    ):
        rows = [_metric_row(family) for family in everything if family.daemons == daemons]
        text += f"\n## {title}\n\n{table(('Metric', 'Type', 'Unit', 'Labels', 'Meaning'), rows)}"
    return text


def _metric_row(family: Family) -> list[str]:
    kind = "gauge (database)" if family.from_database else family.kind
    labels = "; ".join(
        f"`{name}`: {', '.join(values)}" if values else f"`{name}`" for name, values in family.labels.items()
    )
    return [f"`{family.name}`", kind, family.unit, labels, family.help]


def logs() -> str:
    """Return ``docs/logs.md``."""
    text = (
        f"# Log events\n\n{NOTE}\n"
        "One JSON object for each line on standard error. Every line has `event`, `level` and `time`, and those of a\n"
        "daemon `daemon` and `instance`. An outage is one line when it begins, one for each minute that it lasts, and\n"
        "one when it ends. Device tokens appear only as `device`, the first ten digits of their SHA-256.\n"
    )
    for package, rows in event_table().items():
        cells = [[f"`{e.name}`", e.level, ", ".join(f"`{f}`" for f in e.fields), e.meaning] for e in rows]
        text += f"\n## {package}\n\n{table(('Event', 'Level', 'Fields of its own', 'Meaning'), cells)}"
    return text


def settings() -> str:
    """Return ``docs/settings.md``."""
    text = (
        f"# Settings\n\n{NOTE}\n"
        "Sources, the first wins: environment, `<VARIABLE>_FILE` (a path whose content is the value), `.env` in the\n"
        "working directory, files named like the variable in lower case under `SECRETS_DIR` (default `/run/secrets`).\n"
        "`relay settings` and `drain settings` print what is in force, and from where. Combinations that would break\n"
        "a promise are refused at the start, with the numbers.\n"
    )
    shared = list(_setting_rows(SharedSettings, {"PROBE_PORT": f"{RELAY_PORT} relay, {DRAIN_PORT} drain"}))
    for title, rows in (
        ("Both daemons", shared),
        ("relay", list(_setting_rows(RelaySettings))),
        ("drain", list(_setting_rows(DrainSettings))),
    ):
        text += f"\n## {title}\n\n{table(('Variable', 'Default', 'Unit', 'Bound', 'Meaning'), rows)}"
    text += "\n## One app of `DRAIN_APPS`\n\n"
    text += "A JSON object from the name in `notification_deliveries.app` to:\n\n"
    text += table(("Field", "Default", "Meaning"), _app_rows())
    return text


def _setting_rows(cls: type[Source], defaults: dict[str, str] | None = None) -> Iterator[list[str]]:
    for line in show(cls.model_construct()):
        field = cls.model_fields[line.variable.removeprefix(_prefix(cls)).lower()]
        default = (defaults or {}).get(line.variable) or _default(field)
        yield [f"`{line.variable}`", default, line.unit, line.bound, line.description]


def _prefix(cls: type[Source]) -> str:
    return str(cls.model_config.get("env_prefix", "")).upper()


def _default(field: FieldInfo) -> str:
    """The documentation shows a secret's default: it is in the code, so it is none."""
    value = field.default
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    return "" if value is None or value == "" else f"`{value}`"


def _app_rows() -> Iterator[list[str]]:
    for name, field in AppSettings.model_fields.items():
        default = "(required)" if field.is_required() else _default(field)
        yield [f"`{name}`", default, field.description or ""]


FILES: dict[str, Callable[[], str]] = {"metrics.md": metrics, "logs.md": logs, "settings.md": settings}


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or say which differ."""
    parser = argparse.ArgumentParser(prog="python -m deploy.docs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    check = parser.parse_args(arguments).check
    code = 0
    for name, make in FILES.items():
        path = ROOT / "docs" / name
        text = make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            print(f"docs/{name} is not what the code says; run: python -m deploy.docs", file=sys.stderr)
            code = 1
        else:
            path.write_text(text, encoding="utf-8")
            print(f"docs/{name} written")
    return code


if __name__ == "__main__":
    sys.exit(main())
