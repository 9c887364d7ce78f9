"""Packed documents, new for every batch: the layout that `auto` takes, its work, bytes, time and planning.

Lengths come from a named distribution or from a file, drawn until a sequence is full; none is longer than a
quarter of it. Costs are those of `ds_ring/schedule/choose.py`, beside the same of the layout "balanced".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from ds_ring.errors import RingConfigError, shown
from ds_ring.masks.catalog import Causal
from ds_ring.masks.pattern import Pattern
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.schedule.choose import Candidate, bound_to_one_head, timed
from ds_ring.schedule.layout import make_layout
from ds_ring.schedule.lowering import lower_rank
from ds_ring.schedule.plan import build_plan

from ..tables import print_table

Draw = Callable[[np.random.Generator, int], np.ndarray]  # so many lengths, above 0
PERCENTILES = (50, 95, 100)
LONGEST = 4  # a document is at most this part of the sequence


def _heavy_tail(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return nine short documents for each long one."""
    long = rng.random(count) < 0.1
    return np.where(long, rng.lognormal(10.5, 0.8, count), rng.lognormal(6.5, 1.0, count))


DISTRIBUTIONS: dict[str, Draw] = {
    "lognormal": lambda rng, count: rng.lognormal(7.3, 1.5, count),
    "heavy-tail": _heavy_tail,
    "uniform": lambda rng, count: rng.integers(1, 16_385, count),
}


def lengths_of(source: str) -> Draw:
    """Return how lengths are drawn: by the name of a distribution, or from the numbers of a file.

    Raises:
        RingConfigError: neither, or a file without positive integers.
    """
    if source in DISTRIBUTIONS:
        return DISTRIBUTIONS[source]
    try:
        text = Path(source).read_text()
        given = json.loads(text) if text.lstrip().startswith("[") else text.split()
        numbers = np.array(given, dtype=np.int64)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise RingConfigError(
            f"--documents: expected {', '.join(DISTRIBUTIONS)} or a file of lengths, got {shown(source)}"
            f" ({type(error).__name__}); write one positive integer for each document"
        ) from error
    if numbers.ndim != 1 or not len(numbers) or numbers.min() < 1:
        raise RingConfigError.wrong(
            "--documents", "positive lengths", shown(source), "write one positive integer for each document"
        )
    return lambda rng, count: rng.choice(numbers, count)


def draws(draw: Draw, tokens: int, count: int) -> Iterator[np.ndarray]:
    """Yield the lengths of the documents of so many sequences, each of exactly so many tokens."""
    for seed in range(count):
        rng, total, parts = np.random.default_rng(seed), 0, []
        while total < tokens:
            drawn = np.clip(draw(rng, 1024), 1, max(tokens // LONGEST, 1)).astype(np.int64)
            parts.append(drawn)
            total += int(drawn.sum())
        ends = np.minimum(np.cumsum(np.concatenate(parts)), tokens)
        yield np.diff(ends[: int(np.searchsorted(ends, tokens)) + 1], prepend=0)


def pattern_of(lengths: Sequence[int] | np.ndarray) -> Pattern:
    """Return causal attention inside each of the documents that follow one another."""
    if len(lengths) == 1:
        return Causal()
    return Documents(np.repeat(np.arange(len(lengths)), lengths)) & Causal()


class Drawn(NamedTuple):
    """Hold the costs of one sequence of documents."""

    documents: int
    auto: Candidate
    balanced: Candidate
    same: bool  # whether `auto` took the layout "balanced"
    planning_s: float  # processor time: layout, one rank's plan, its steps both ways


def costs(lengths: np.ndarray, ring_size: int) -> Drawn:
    """Return the costs of one sequence; its planning is not cached before."""
    tokens = int(lengths.sum())
    pattern = pattern_of(lengths)
    sizes: dict[str, Any] = {"tokens": tokens, "ring_size": ring_size, "pattern": pattern}
    began = time.process_time()
    auto = make_layout("auto", **sizes)
    rank = build_plan(pattern, auto).rank(ring_size // 3)
    for backward in (False, True):
        lower_rank(rank, backward=backward)
    planning_s = time.process_time() - began
    balanced, mix = make_layout("balanced", **sizes), ((bound_to_one_head(pattern), 1),)
    first, second = timed(mix, (auto, balanced))
    return Drawn(len(lengths), first, second, auto == balanced, planning_s)


class PackedFigures(NamedTuple):
    """Hold percentiles over many sequences, by the names of `rows`."""

    source: str
    tokens: int
    ring_size: int
    draws: int
    documents: float  # of a sequence, mean
    other: int  # draws in which `auto` took another layout than "balanced"
    slower: int  # draws in which `auto` is slower than "balanced" by the model
    rows: dict[str, tuple[float, ...]]  # at `PERCENTILES`


def packed_figures(
    source: str, tokens: int, ring_size: int, count: int, progress: Callable[[], object] = lambda: None
) -> PackedFigures:
    """Return the figures of so many drawn sequences."""
    found = []
    for lengths in draws(lengths_of(source), tokens, count):
        found.append(costs(lengths, ring_size))
        progress()
    gather = tokens * max(ring_size - 1, 1)
    columns: dict[str, list[float]] = {}
    for name in ("auto", "balanced"):
        rated: list[Candidate] = [getattr(one, name) for one in found]
        columns[f"{name}: work max/mean"] = [one.imbalance for one in rated]
        columns[f"{name}: tokens sent / all-gather"] = [one.tokens_sent / gather for one in rated]
        columns[f"{name}: modelled time"] = [one.time for one in rated]
    columns["time auto / balanced"] = [one.auto.time / one.balanced.time for one in found]
    columns["planning, ms"] = [one.planning_s * 1e3 for one in found]
    return PackedFigures(
        source, tokens, ring_size, count,
        documents=float(np.mean([one.documents for one in found])),
        other=sum(not one.same for one in found),
        slower=sum(one.auto.time > one.balanced.time * (1 + 1e-9) for one in found),
        rows={name: tuple(np.percentile(column, PERCENTILES).tolist()) for name, column in columns.items()},
    )  # fmt: skip


def as_json(found: PackedFigures) -> str:
    """Return the figures as JSON."""
    return json.dumps({**found._asdict(), "percentiles": PERCENTILES}, indent=2)


def print_figures(found: PackedFigures) -> None:
    """Print the percentiles as a table."""
    about = f"{found.documents:,.0f} documents ({found.source}), {found.ring_size} ranks, {found.draws} draws"
    table = Table("", "median", "95 %", "worst", title=about, title_justify="left")
    for name, values in found.rows.items():
        table.add_row(name, *(f"{value:.3f}" for value in values))
    print_table(table)
    print(
        f"auto took another layout than balanced in {found.other} of {found.draws} draws; it is slower in"
        f" {found.slower}. Modelled time: of the slowest rank, 1 is the mean work without messages."
    )
