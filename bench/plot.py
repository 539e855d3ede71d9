"""Diagrams over one time axis, as SVG."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH, LEFT, HEIGHT, GAP = 860, 90, 90, 34
COLOURS = ("#1f5fa8", "#c4561a", "#3a8a3a")
Point = tuple[float, float]


@dataclass(frozen=True)
class Panel:
    """One diagram: a title, the ticks of its vertical axis, and lines of times and values."""

    title: str
    ticks: Sequence[float]
    lines: Sequence[Sequence[Point]]
    logarithmic: bool = False

    def height(self, value: float) -> float:
        """Return how far above the panel's bottom a value is, from 0 to 1."""
        low, high = self.ticks[0], self.ticks[-1]
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def stairs(points: Sequence[Point], end: float) -> list[Point]:
    """Return the points with each value kept until the next one, and the last one until the end."""
    following = [at for at, _ in points[1:]]
    kept = zip(points, [*following, end], strict=True)
    return [corner for (at, value), until in kept for corner in ((at, value), (until, value))]


def draw(
    panels: Sequence[Panel], marks: Iterable[float], end: float, step: int = 30, unit: str = "s"
) -> str:
    """Return an SVG of panels over one time axis.

    Args:
        panels: from top to bottom.
        marks: times at which the load changes.
        end: of the axis.
        step: between its labels.
        unit: of times.
    """
    marks, bottom = list(marks), len(panels) * (HEIGHT + GAP) + 10

    def x(time: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * time / end

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 30}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        base = index * (HEIGHT + GAP) + GAP + HEIGHT
        parts.append(f'<text x="{LEFT}" y="{base - HEIGHT - 8}">{panel.title}</text>')
        for tick in panel.ticks:
            y = base - HEIGHT * panel.height(tick)
            parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 20}" stroke="#ddd"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for line, colour in zip(panel.lines, COLOURS, strict=False):
            points = " ".join(
                f"{x(at):.1f},{base - HEIGHT * panel.height(value):.1f}" for at, value in line
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            )
    parts += [
        f'<path d="M{x(at):.1f} {GAP}V{bottom - 10}" stroke="#888" stroke-dasharray="3 3"/>'
        for at in marks
    ]
    parts += [
        f'<text x="{x(at):.1f}" y="{bottom + 8}" text-anchor="middle">{at} {unit}</text>'
        for at in range(0, int(end) + 1, step)
    ]
    return "\n".join([*parts, "</svg>\n"])
