"""The statements and commands of docs/runbook.md are ones that work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drain.cli.main import parser as drain_parser
from relay.cli.main import parser as relay_parser

TEXT = (Path(__file__).parent.parent.parent / "docs" / "runbook.md").read_text(encoding="utf-8")
STATEMENTS = [re.sub(r"^ +", "", each, flags=re.M) for each in re.findall(r"```sql\n(.*?)```", TEXT, re.S)]
COMMANDS = sorted(set(re.findall(r"`((?:relay|drain) [a-z][^`]*)`", TEXT)))


@pytest.mark.parametrize("statement", STATEMENTS, ids=range(len(STATEMENTS)))
async def test_a_statement_of_the_runbook_runs(database, statement: str) -> None:
    async with database.session() as connection:
        await connection.execute(statement)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_runbook_is_understood(command: str) -> None:
    daemon, *arguments = re.findall(r"'[^']*'|\S+", command)
    parser = {"relay": relay_parser, "drain": drain_parser}[daemon]()
    try:
        parser.parse_args([argument.strip("'") for argument in arguments])
    except SystemExit as stop:
        pytest.fail(f"{command}: exit code {stop.code}")


def test_there_are_statements_and_commands() -> None:
    assert len(STATEMENTS) >= 5
    assert len(COMMANDS) >= 6
