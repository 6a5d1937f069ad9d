"""docs/claiming.md quotes the statements of the code, and every clause that it explains stands in them."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.support.documents import ROOT, Block, blocks, squeezed

DOCUMENT = ROOT / "docs" / "claiming.md"
QUOTED = [block for block in blocks(DOCUMENT) if block.language == "sql" and "." in block.info]


def statement(block: Block) -> str:
    module, _, name = block.info.rpartition(".")
    return str(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("block", QUOTED, ids=lambda block: block.info)
def test_the_quoted_statement_is_the_code(block: Block) -> None:
    assert squeezed(block.text) == squeezed(statement(block))


def test_all_statements_that_a_team_must_trust_are_quoted() -> None:
    wanted = {
        *(f"relay.sql.{name}" for name in ("BEGIN", "BEGIN_TRANSACTION_TIMEOUT", "MARK_PUBLISHED")),
        *(f"relay.sql.{name}" for name in ("CLAIM_FRESH", "CLAIM_RETRY")),
        *(f"relay.sql.{name}" for name in ("CLAIM_HEADS", "CLAIM_FOLLOWERS")),
        *(f"drain.sql.{name}" for name in ("CLAIM", "SETTLE")),
    }
    assert {block.info for block in QUOTED} == wanted


def explained() -> list[tuple[str, str]]:
    """Each clause at the head of a list item (``- `clause` - why``), with the statement that was quoted last."""
    found: list[tuple[str, str]] = []
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    starts = {block.line: block for block in QUOTED}
    last: Block | None = None
    for number, line in enumerate(lines, start=1):
        last = starts.get(number, last)
        if line.startswith("## "):
            last = None
        if last is not None and line.startswith("- `"):
            item = line
            for more in lines[number:]:
                if not more.startswith("  "):
                    break
                item += " " + more.strip()
            head = item.split(" - ", 1)[0]
            found += [(last.info, clause) for clause in re.findall(r"`([^`]+)`", head)]
    return found


def test_every_clause_that_is_explained_stands_in_its_statement() -> None:
    found = explained()
    assert len(found) > 40
    texts = {block.info: squeezed(statement(block)) for block in QUOTED}
    missing = [(name, clause) for name, clause in found if squeezed(clause) not in texts[name]]
    assert not missing
