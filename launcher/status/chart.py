"""Draw the course of a run as inline SVG: one figure over optimizer steps, a line for each attempt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

WIDTH, HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 14, 30
MOST_POINTS = 1500  # of a chart: more than it has columns of pixels
COLOURS = 6  # classes c0 to c5 of the page's style

_Scale = Callable[[float], float]


class Point(NamedTuple):
    """Hold a value of an attempt after a step; nan and infinite ones are marked at the top."""

    attempt: int
    step: int
    value: float


def chart(
    title: str, points: Sequence[Point], fault_steps: Sequence[int] = (), from_zero: bool = False
) -> str:
    """Return an <svg> element.

    Args:
        title: what is drawn, plain text.
        points: in the order in which they happened.
        fault_steps: the steps in which attempts failed: a dashed line each.
        from_zero: the axis begins at 0.
    """
    points = _thinned(points)
    finite = [point for point in points if _is_drawn(point)]
    if not finite:
        return f'<p class="none">{escape(title)}: nothing is known yet.</p>'
    low, high, ticks = _axis([point.value for point in finite], from_zero)
    first, last, step_ticks = _step_axis([point.step for point in points])

    def x_of(step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (step - first) / max(last - first, 1)

    def y_of(value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)

    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
    ]
    for value in ticks:
        y = y_of(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{short(value)}</text>')
    for step in step_ticks:
        parts.append(f'<text class="x" x="{x_of(step):.1f}" y="{HEIGHT - 10}">{step:,}</text>')
    for step in fault_steps:
        if first <= step <= last:
            x = x_of(step)
            parts.append(
                f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
                f"<title>a fault in step {step:,}</title></line>"
            )
    for attempt, own in groupby(points, key=lambda point: point.attempt):
        parts += _line(attempt, list(own), x_of, y_of)
    return "".join([*parts, "</svg>"])


def short(value: float) -> str:
    """Return a number of about four digits."""
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.2e}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _line(attempt: int, points: list[Point], x_of: _Scale, y_of: _Scale) -> list[str]:
    colour, found = f"c{(attempt - 1) % COLOURS}", list[str]()
    for good, run in groupby(points, key=_is_drawn):
        places = [(x_of(point.step), y_of(point.value) if good else _TOP) for point in run]
        if good and len(places) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            found.append(
                f'<polyline class="line {colour}" points="{line}">{_tip(f"attempt {attempt}")}</polyline>'
            )
            continue
        kind, said = (f"dot {colour}", f"attempt {attempt}") if good else ("odd", "not finite")
        found += [
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3">{_tip(said)}</circle>' for x, y in places
        ]
    return found


def _is_drawn(point: Point) -> bool:
    return abs(point.value) < 1e100  # neither nan nor infinite, nor so large that arithmetic is


def _tip(text: str) -> str:
    return f"<title>{text}</title>"


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MOST_POINTS points, the last one among them."""
    every = -(-len(points) // MOST_POINTS)
    return list(points) if every <= 1 else list(points[(len(points) - 1) % every :: every])


def _axis(values: list[float], from_zero: bool) -> tuple[float, float, list[float]]:
    low, high = (0.0 if from_zero else min(values)), max(values)
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-300):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    unit = _round_unit((high - low) / 4)
    low, high = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    return low, high, [low + unit * number for number in range(round((high - low) / unit) + 1)]


def _step_axis(steps: list[int]) -> tuple[int, int, list[int]]:
    first, last = min(steps), max(steps)
    unit = max(int(_round_unit((last - first) / 6 or 1)), 1)
    return first, last, list(range(-(-first // unit) * unit, last + 1, unit))


def _round_unit(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not below `least`."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-300)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
