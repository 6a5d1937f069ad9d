"""The benchmark of drain in its short form: it runs, prints and computes. It sets no limits: machines differ."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.drain.figures import Figure, by_rate, median, per_cpu
from bench.drain.peers import Skipped, node_apn

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_short_form_prints_every_sender_and_the_ratios() -> None:
    command = ["-m", "bench.drain", "--pushes", "500", "--rounds", "1", "--no-fsync", "--no-node"]
    done = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    (row,) = re.findall(r"^ +1  (.*)$", said, re.MULTILINE)
    figures = [int(number) for number in re.findall(r"\d+", row)]
    assert len(figures) == 6, "rate and pushes per CPU second of drain, drain with latency, aioapns"
    assert all(figures)
    (ratio,) = re.findall(r"drain / aioapns ([\d.]+) \(target 1.50", said)
    assert float(ratio) == pytest.approx(figures[1] / figures[5], rel=0.02)
    (slower,) = re.findall(r"with latency / without ([\d.]+) \(target 0.90", said)
    assert float(slower) == pytest.approx(figures[2] / figures[0], rel=0.02)
    assert "SKIPPED: node-apn" in said
    assert re.search(r"^targets (NOT )?met$", said, re.MULTILINE)


def test_ratios_are_medians_of_the_rounds_own_ratios() -> None:
    ours = [Figure(100, 10), Figure(100, 20), Figure(100, 40)]
    theirs = [Figure(200, 20), Figure(50, 10), Figure(100, 40)]
    assert per_cpu("cpu", ours, theirs, 1.5).ratio == 1.0
    assert by_rate("rate", ours, theirs, 0.9).ratio == 1.0
    assert median(ours) == Figure(100, 20)
    assert str(per_cpu("cpu", ours, theirs, 1.5)) == "cpu 1.00 (target 1.50, MISSED)"
    assert ours[0].per_cpu_second == 100_000


def test_without_node_the_comparison_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Skipped, match="node and npm not found"), node_apn({}, 1):
        pytest.fail("it started")
