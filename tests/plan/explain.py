"""Reads a plan as PostgreSQL executed it: nodes, rows touched, buffers. Bounds are on these, never on cost or time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import asyncpg


@dataclass(frozen=True)
class Plan:
    """One executed plan."""

    tree: dict[str, Any]

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Every node of the plan."""
        stack = [self.tree]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.get("Plans", []))

    def kinds(self) -> set[str]:
        """Names of the node types."""
        return {str(node["Node Type"]) for node in self.nodes()}

    def indexes(self) -> set[str]:
        """Names of the indexes used."""
        return {str(node["Index Name"]) for node in self.nodes() if "Index Name" in node}

    def rows_touched(self) -> float:
        """Rows that scans of tables returned or threw away, over all loops."""
        return sum(
            (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            for node in self.nodes()
            if "Relation Name" in node and "Scan" in node["Node Type"]
        )

    def buffers(self) -> int:
        """Shared buffers touched by the whole statement."""
        return int(self.tree["Shared Hit Blocks"] + self.tree["Shared Read Blocks"])


async def explain(connection: asyncpg.Connection, statement: str, *arguments: Any) -> Plan:
    """Execute a statement under EXPLAIN and undo what it wrote."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        text = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *arguments)
    finally:
        await transaction.rollback()
    return Plan(json.loads(text)[0]["Plan"])
