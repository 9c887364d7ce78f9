"""Packed documents, new for every batch: lengths of a named distribution or of a file.

Lengths are drawn until a sequence is full; none is longer than a quarter of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ds_ring import Causal, Documents
from ds_ring.errors import RingConfigError, shown
from ds_ring.masks.pattern import Pattern

Draw = Callable[[np.random.Generator, int], np.ndarray]  # so many lengths, above 0
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


def read_lengths(source: str) -> Draw:
    """Return how lengths are drawn: by the name of a distribution, or from the numbers of a file.

    Raises:
        RingConfigError: neither, or a file without positive integers.
    """
    if source in DISTRIBUTIONS:
        return DISTRIBUTIONS[source]
    try:
        text = Path(source).read_text()
        values = json.loads(text) if text.lstrip().startswith("[") else text.split()
        numbers = np.array(values, dtype=np.int64)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise RingConfigError(
            f"lengths: expected {', '.join(DISTRIBUTIONS)} or a file of lengths, got {shown(source)}"
            f" ({type(error).__name__}); write one positive integer for each document"
        ) from error
    if numbers.ndim != 1 or not len(numbers) or numbers.min() < 1:
        raise RingConfigError.wrong(
            "lengths", "positive lengths", shown(source), "write one positive integer for each document"
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


def make_document_pattern(lengths: Sequence[int] | np.ndarray) -> Pattern:
    """Return causal attention inside each of the documents that follow one another."""
    if len(lengths) == 1:
        return Causal()
    return Documents(np.repeat(np.arange(len(lengths)), lengths)) & Causal()
