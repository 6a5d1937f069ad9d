"""The short form of bench/claims: it measures, draws, and sees growth where there is some."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

from bench.claims.figures import Curve, ascii_chart, svg, table
from deploy.local.supervise import REPOSITORY


async def test_the_short_form_measures_every_claim_and_draws_it(tmp_path):
    done = await asyncio.to_thread(
        subprocess.run,
        [
            sys.executable,
            "-m",
            "bench.claims",
            "--rows",
            "2000",
            "--held",
            "5000",
            "--runs",
            "5",
            "--output",
            tmp_path,
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("relay fresh, backlog", "relay keyed, history", "drain, snapshot, cursor", "growth"):
        assert words in done.stdout
    assert (tmp_path / "claims.txt").read_text() in done.stdout
    for number in (1, 2, 3):
        assert ET.parse(tmp_path / f"claims-{number}.svg").getroot().tag.endswith("svg")


def test_a_claim_that_grows_with_the_backlog_is_seen():
    flat = Curve("flat", 100, ((1000, 1.0), (10_000, 1.1), (1_000_000, 1.3)))
    grows = Curve("grows", 100, ((1000, 1.0), (10_000, 4.0), (1_000_000, 60.0)))
    shown = Curve("only shown", 100, ((1000, 1.0), (1_000_000, 60.0)), bounded=False)
    assert (flat.flat, grows.flat, shown.flat) == (True, False, True)
    lines = table([flat, grows, shown])
    assert "more than 2" in lines[2]
    assert "more than 2" not in lines[1] + lines[3]
    drawn = "\n".join(ascii_chart([flat, grows, shown]))
    assert all(
        f"{letter}  {name}" in drawn
        for letter, name in zip("abc", ("flat", "grows", "only shown"), strict=True)
    )
    assert svg("A chart", [flat, grows, shown]).count("<polyline") == 3
