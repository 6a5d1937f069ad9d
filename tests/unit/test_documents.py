"""The documents name only what exists: files, headings, variables, metrics, log events, commands with their options."""

from __future__ import annotations

import functools
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.settings import SharedSettings, Source
from deploy.catalog import families
from drain.apns.answers import _TABLE, Class
from drain.apns.content import TOPIC_SUFFIX
from drain.cli.main import parser as drain_parser
from drain.settings import AppSettings, DrainSettings
from migrations.__main__ import parser as migrations_parser
from migrations.roles import ROLES
from relay.cli.main import parser as relay_parser
from relay.settings import RelaySettings
from tests.support.documents import ROOT, Block, all_blocks, anchors, documents, links, prose

OWN = [path for path in documents() if path.parent == ROOT or ROOT / "docs" in path.parents]
PREFIX = re.compile(
    r"\b(?:RELAY|DRAIN|DATABASE|PROBE|LOG|OBSERVE|SECRETS|LIVE|STALLED)_[A-Z][A-Z_]*[A-Z]\b|\bINSTANCE\b"
)
OF_TESTS = ("RELAY_DRAIN_",)
"""Variables of ./deploy/up, ./deploy/test and the compose files."""
OF_OTHERS = {
    "after_commit",
    "hot_standby_feedback",
    "list_queues",
    "max_prepared_statements",
    "synchronous_commit",
    "synchronous_standby_names",
    "target_session_attrs",
}
"""Names of PostgreSQL's, pgbouncer's and others' that the code has no need of; those with pg_ besides."""
GENERATED = ("metrics.md", "logs.md", "settings.md")
"""Held to the code by tests/deploy/test_reference_tables.py."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", documents(), ids=name)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    broken = []
    for target in links(path):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and (there.is_dir() or anchor not in anchors(there))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("path", [path for path in OWN if ROOT / "docs" in path.parents], ids=name)
def test_every_document_can_be_reached_from_the_readme(path: Path) -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        current = todo.pop()
        if current in seen or current.suffix != ".md" or not current.is_file():
            continue
        seen.add(current)
        targets = (target.partition("#")[0] for target in links(current) if ":" not in target)
        todo += [(current.parent / target).resolve() for target in targets if target]
    assert path in seen


def known_variables() -> set[str]:
    classes: tuple[type[Source], ...] = (SharedSettings, RelaySettings, DrainSettings)
    names = {
        (str(cls.model_config.get("env_prefix", "")) + field).upper()
        for cls in classes
        for field in cls.model_fields
    }
    return names | {f"{variable}_FILE" for variable in names} | {"SECRETS_DIR"}


@pytest.mark.parametrize("path", OWN, ids=name)
def test_every_variable_that_is_named_is_a_setting(path: Path) -> None:
    named = set(PREFIX.findall(path.read_text(encoding="utf-8")))
    unknown = {variable for variable in named - known_variables() if not variable.startswith(OF_TESTS)}
    assert not unknown


@functools.cache
def words_of_the_code() -> frozenset[str]:
    """Every word of the sources: names of metrics, log events, columns, functions, fields, reasons."""
    found = {family.name for family in families()}
    paths = list(ROOT.glob("*.yml"))
    for folder in ("common", "relay", "drain", "migrations", "deploy", "tests"):
        paths += [
            path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sql", ".yml", ".yaml")
        ]
    for path in paths:
        found.add(path.stem)
        found.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return frozenset(found)


@pytest.mark.parametrize("path", [path for path in OWN if path.name not in GENERATED], ids=name)
def test_every_name_in_the_text_stands_in_the_code(path: Path) -> None:
    """A metric, a log event, a column, a function that was renamed leaves no trace in the documents."""
    inline = " ".join(re.findall(r"`([^`\n]+)`", prose(path)))
    named = set(re.findall(r"(?<![\w.])[a-z]+(?:_[a-z0-9]+)+(?![\w])", inline))
    roles = {f"relay_drain_{role}" for role in ROLES}
    unknown = named - words_of_the_code() - roles - OF_OTHERS
    assert sorted(word for word in unknown if not word.startswith("pg_")) == []


# ----------------------------------------------------------------------------------------------------------- commands


PARSERS = {
    ("relay",): relay_parser,
    ("drain",): drain_parser,
    ("python", "-m", "relay"): relay_parser,
    ("python", "-m", "drain"): drain_parser,
    ("python", "-m", "migrations"): migrations_parser,
    ("relay-drain-migrate",): migrations_parser,
}
SHELL = {"export", "pip", "python3", "psql", "curl", "."}


def commands() -> Iterator[tuple[Block, list[str]]]:
    """The command lines of all ``sh`` blocks of the manuals, without comments and continuations."""
    for block in all_blocks():
        if block.language != "sh" or not block.document.startswith(("README", "docs/")):
            continue
        text = block.text.replace("\\\n", " ")
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield block, words


@pytest.mark.parametrize(
    ("block", "words"),
    [pytest.param(block, words, id=f"{block.where} {' '.join(words)[:60]}") for block, words in commands()],
)
def test_every_command_exists_with_its_options(block: Block, words: list[str]) -> None:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    for start, make in PARSERS.items():
        if tuple(words[: len(start)]) == start:
            make().parse_args(words[len(start) :])
            return
    if words[:2] == ["python", "-m"]:
        importlib.import_module(words[2])
        return
    if words[0].startswith("./"):
        program = ROOT / words[0]
        assert program.exists(), f"{words[0]} does not exist"
        head = "".join(program.read_text(encoding="utf-8").splitlines(keepends=True)[:20])
        missing = [word for word in words[1:] if word.startswith("--") and word not in head]
        assert not missing, f"{words[0]} says nothing of {missing}"
        return
    assert words[0] in SHELL, f"{block.where}: {words[0]} is no command that is known here"


# ------------------------------------------------------------------------------------------------- tables of drain.md


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of drain.md."""
    text = prose(ROOT / "docs" / "drain.md").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_answers_is_the_code() -> None:
    written: dict[tuple[int, str], str] = {}
    for kind, answers, *_ in rows_of("The answers of APNs"):
        if kind == "(200)":
            continue
        for part in answers.split(";"):
            status = 0
            for number, reason in re.findall(r"(?:(\d{3}) )?`(\w+)`", part):
                status = int(number) if number else status
                written[status, reason] = kind.strip("`")
    assert written == {answer: kind.name for answer, kind in _TABLE.items()}
    assert set(written.values()) == {kind.name for kind in Class}


def test_drains_own_reasons_stand_in_the_code() -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "drain").rglob("*.py")
        if "apns" not in path.parts
    )
    for reason, *_ in rows_of("Reasons that are drain's own"):
        if reason.startswith("`"):
            assert f'"{reason.strip("`")}"' in sources or f"'{reason.strip('`')}'" in sources, reason


def test_the_table_of_push_types_is_the_code() -> None:
    written: dict[str, str] = {}
    for types, suffix, *_ in rows_of("What can be sent"):
        for push_type in re.findall(r"`(\w+)`", types):
            written[push_type] = "" if suffix == "nothing" else suffix.strip("`")
    assert written == TOPIC_SUFFIX


def test_the_example_of_drain_apps_is_accepted() -> None:
    examples = [
        json.loads(block.text) for block in all_blocks() if (block.language, block.info) == ("json", "apps")
    ]
    assert examples
    for apps in examples:
        settings = DrainSettings(apps={name: AppSettings(**app) for name, app in apps.items()})
        assert set(settings.apps) == set(apps)


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = set(links(folder / "README.md"))
    assert listed == {path.name for path in folder.glob("0*.md")}
