"""What was measured, as a table and as two drawings: for the terminal, and SVG for the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

TARGET = 2.0
"""The last point of a curve may be so many times the first."""
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")


@dataclass(frozen=True, slots=True)
class Curve:
    """Medians in milliseconds over a number of rows; ``claimed`` is what each claim took."""

    name: str
    claimed: int
    points: tuple[tuple[int, float], ...]
    bounded: bool = True
    """Whether the target is about this curve; else it is shown for comparison."""

    @property
    def growth(self) -> float:
        """Last point over first."""
        return self.points[-1][1] / self.points[0][1]

    @property
    def flat(self) -> bool:
        """Whether the curve keeps the target, or is not bound to it."""
        return not self.bounded or self.growth <= TARGET


def short(rows: int) -> str:
    """1500000 -> 1.5 M."""
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if rows >= size:
            return f"{rows / size:g} {unit}"
    return str(rows)


def table(curves: Sequence[Curve]) -> list[str]:
    """One line for each curve, one column for each number of rows."""
    sizes = sorted({rows for curve in curves for rows, _ in curve.points})
    width = max(len(curve.name) for curve in curves)
    lines = [
        f"{'milliseconds':<{width}}  {'rows':>5}" + "".join(f"{short(n):>9}" for n in sizes) + "   growth"
    ]
    for curve in curves:
        found = dict(curve.points)
        cells = "".join(f"{found[n]:>9.2f}" if n in found else f"{'':>9}" for n in sizes)
        verdict = "" if not curve.bounded else "" if curve.flat else f"  more than {TARGET:g}"
        lines.append(f"{curve.name:<{width}}  {curve.claimed:>5}{cells}   {curve.growth:5.2f}{verdict}")
    return lines


def ascii_chart(curves: Sequence[Curve], height: int = 14, column: int = 9) -> list[str]:
    """Draw the curves over logarithmic axes; each is a letter."""
    sizes = sorted({rows for curve in curves for rows, _ in curve.points})
    values = [value for curve in curves for _, value in curve.points]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05
    grid = [[" "] * (column * len(sizes)) for _ in range(height)]
    for number, curve in enumerate(curves):
        for rows, value in curve.points:
            line = round((high - math.log10(value)) / (high - low) * (height - 1))
            place = column * sizes.index(rows) + 1 + number % (column - 1)
            grid[line][place] = chr(ord("a") + number)
    lines = []
    for line, cells in enumerate(grid):
        scale = 10 ** (high - (high - low) * line / (height - 1))
        lines.append(f"{scale:>8.2f} |" + "".join(cells).rstrip())
    lines.append(" " * 9 + "+" + "-" * (column * len(sizes)))
    lines.append(" " * 10 + "".join(f"{short(n):<{column}}" for n in sizes) + " rows")
    lines += [f"{'':>10}{chr(ord('a') + number)}  {curve.name}" for number, curve in enumerate(curves)]
    return lines


def svg(title: str, curves: Sequence[Curve]) -> str:
    """Draw the curves over logarithmic axes."""
    wide, high, left, top = 900, 420, 70, 40
    plot_w, plot_h = 500, 320
    sizes = [rows for curve in curves for rows, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    x0, x1 = math.log10(min(sizes)), math.log10(max(max(sizes), min(sizes) * 10))
    y0, y1 = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(rows: float) -> float:
        return left + (math.log10(rows) - x0) / (x1 - x0) * plot_w

    def y(value: float) -> float:
        return top + (y1 - math.log10(value)) / (y1 - y0) * plot_h

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="12">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for power in range(y0, y1 + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{left} {at:.1f}H{left + plot_w}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} ms</text>')
    for rows in sorted(set(sizes)):
        parts.append(f'<path d="M{x(rows):.1f} {top}V{top + plot_h}" stroke="#eee"/>')
        parts.append(
            f'<text x="{x(rows):.1f}" y="{top + plot_h + 18}" text-anchor="middle">{short(rows)}</text>'
        )
    parts.append(f'<text x="{left + plot_w / 2}" y="{top + plot_h + 38}" text-anchor="middle">rows</text>')
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        dashes = "" if curve.bounded else ' stroke-dasharray="5 4"'
        line = " ".join(f"{x(rows):.1f},{y(value):.1f}" for rows, value in curve.points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts += [f'<circle cx="{x(r):.1f}" cy="{y(v):.1f}" r="3" fill="{colour}"/>' for r, v in curve.points]
        at = top + 14 + 20 * number
        parts.append(
            f'<path d="M{left + plot_w + 20} {at - 4}h22" stroke="{colour}" stroke-width="2"{dashes}/>'
        )
        label = f"{curve.name} (x {curve.growth:.2f})"
        parts.append(f'<text x="{left + plot_w + 48}" y="{at}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])
