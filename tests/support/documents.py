"""What stands in the documents: code blocks, links, headings, names of variables.

A code block says in its first line what is done with it besides being read:

- ``sql module.NAME``: is the statement of that name in the code (tests/unit/test_claiming_doc.py),
- ``sql run``, ``sh run``, ``python name``: is run (tests/integration/test_documents.py),
- ``sh``: its commands must exist, with these options (tests/unit/test_documents.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_FENCE = re.compile(r"^( *)```(\w*) *(.*)$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; ``line`` is that of its fence, counted from 1."""

    document: str
    line: int
    language: str
    info: str
    text: str

    @property
    def where(self) -> str:
        """For a test's id or message."""
        return f"{self.document}:{self.line}"


def documents() -> list[Path]:
    """Every document that people read."""
    own = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    others = [path for folder in ("deploy", "tests", "bench") for path in (ROOT / folder).rglob("*.md")]
    return sorted(own) + sorted(path for path in others if ".venv" not in path.parts)


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a document, in order; the indentation of a block within a list is taken off."""
    fence: re.Match[str] | None = None
    began = 0
    lines: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        found = _FENCE.match(line)
        if fence is None and found is not None:
            fence, began, lines = found, number, []
        elif fence is not None and found is not None and not found[2]:
            name = str(path.relative_to(ROOT))
            yield Block(name, began, fence[2], fence[3].strip(), "\n".join(lines) + "\n")
            fence = None
        elif fence is not None:
            lines.append(line.removeprefix(fence[1]))
    assert fence is None, f"{path}:{began}: the block is not closed"


def all_blocks() -> list[Block]:
    """The blocks of all documents."""
    return [block for path in documents() for block in blocks(path)]


def prose(path: Path) -> str:
    """A document without its fenced blocks; their lines are left empty, so that line numbers hold."""
    kept: list[str] = []
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        fence = _FENCE.match(line) is not None
        kept.append("" if inside or fence else line)
        inside ^= fence
    return "\n".join(kept)


def links(path: Path) -> Iterator[str]:
    """Targets of the links and images of a document."""
    for found in _LINK.finditer(re.sub(r"`[^`\n]*`", "", prose(path))):
        yield found[1] or found[2]


def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    seen: dict[str, int] = {}
    found: set[str] = set()
    for line in prose(path).splitlines():
        heading = _HEADING.match(line)
        if heading is None:
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = seen.get(anchor, 0)
        seen[anchor] = count + 1
        found.add(f"{anchor}-{count}" if count else anchor)
    return found


def squeezed(text: str) -> str:
    """A text with every run of white space as one space."""
    return " ".join(text.split())
