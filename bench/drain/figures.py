"""What is measured, and what is made of it. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

AIOAPNS_TARGET = 1.5
NODE_TARGET = 0.5
LATENCY_TARGET = 0.9
"""Of the rate without latency: a tenth is noise of a shared machine."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One round of one sender."""

    rate: float
    """Pushes in a second."""
    cpu_us: float
    """Microseconds of the sending process's CPU for each push."""

    @property
    def per_cpu_second(self) -> float:
        """Pushes in a second of CPU."""
        return 1e6 / self.cpu_us


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio of two senders: the median over the rounds of that round's own ratio."""

    name: str
    ratio: float
    target: float

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.ratio >= self.target

    def __str__(self) -> str:
        return f"{self.name} {self.ratio:.2f} (target {self.target:.2f}{'' if self.met else ', MISSED'})"


def median(figures: Sequence[Figure]) -> Figure:
    """Medians of both figures."""
    return Figure(
        statistics.median(figure.rate for figure in figures),
        statistics.median(figure.cpu_us for figure in figures),
    )


def per_cpu(name: str, ours: Sequence[Figure], theirs: Sequence[Figure], target: float) -> Comparison:
    """Pushes per CPU second, ours by theirs."""
    ratios = [a.per_cpu_second / b.per_cpu_second for a, b in zip(ours, theirs, strict=True)]
    return Comparison(name, statistics.median(ratios), target)


def by_rate(name: str, ours: Sequence[Figure], theirs: Sequence[Figure], target: float) -> Comparison:
    """Pushes per second, ours by theirs."""
    ratios = [a.rate / b.rate for a, b in zip(ours, theirs, strict=True)]
    return Comparison(name, statistics.median(ratios), target)
