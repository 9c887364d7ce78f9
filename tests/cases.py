"""The registry of cases: layout x pattern x shape x dtype. A new pattern is one row here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

import ds_ring
from ds_ring import Causal, Full, RingLayoutError, SlidingWindow, make_layout
from ds_ring.masks.pattern import Pattern
from ds_ring.plugin import LAYOUTS as LAYOUT_ROWS
from ds_ring.plugin import PUBLIC
from ds_ring.schedule import lowering
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.plan import _build_plan
from ds_ring_launcher.demo.lm_data import PackedBytes

Row = TypeVar("Row")

RING_SIZES = (1, 2, 3, 4, 8)
LAYOUTS = tuple(LAYOUT_ROWS)
LENGTHS = (500, 511)  # neither divides by 3, 8 or 16


def document_ids(tokens: int, mean: int = 60, seed: int = 0) -> np.ndarray:
    """Ids of packed documents of random lengths; int64 [tokens]."""
    generator = np.random.default_rng(seed)
    return np.repeat(np.arange(tokens), generator.integers(1, 2 * mean, tokens))[:tokens]


def not_one_of_three(batch: Any, head: Any, q: Any, k: Any) -> Any:
    """A mask function that no other pattern expresses."""
    return (q - k) % 3 != 1


def rows_of(name: str, rows: Callable[[Any], dict[str, Row]]) -> dict[str, Row]:
    """Rows of a table for a public pattern; none in a copy of the tree without it (tests/removals.py)."""
    return rows(getattr(ds_ring, name)) if name in PUBLIC else {}


# For a sequence of so many tokens.
PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "causal": lambda tokens: Causal(),
    "full": lambda tokens: Full(),
    "window": lambda tokens: SlidingWindow(50),
    "window both ways": lambda tokens: SlidingWindow(20, causal=False),
    **rows_of(
        "Dilated",
        lambda dilated: {
            "dilated": lambda tokens: dilated((64, 128, 2048), (1, 2, 4)),
            "dilated, not nested, not causal": lambda tokens: dilated((75, 210), (3, 5), False, "torchscale"),
        },
    ),
    "documents": lambda tokens: ds_ring.Documents(document_ids(tokens)),
    "documents, causal": lambda tokens: ds_ring.Documents(document_ids(tokens)) & Causal(),
    **rows_of(
        "MaskMod",
        lambda mask_mod: {"mask function, causal": lambda tokens: mask_mod(not_one_of_three) & Causal()},
    ),
}


def library_documents(tokens: int, sample: int = 0) -> Pattern:
    """Causal attention within the files of Python's standard library, packed as the quick start does."""
    ids = PackedBytes(tokens, document_ids=True)[sample]["document_ids"]
    return ds_ring.Documents(ids.numpy()) & Causal()


def longnet(tokens: int, shortest: int = 2048, growth: int = 2, causal: bool = True) -> Pattern:
    """Segments from `shortest` to the whole sequence, dilated in proportion."""
    count = 1
    while shortest * growth**count <= tokens:
        count += 1
    return ds_ring.Dilated(
        tuple(shortest * growth**i for i in range(count)), tuple(growth**i for i in range(count)), causal
    )


# What long sequences are trained with: for balance and traffic at realistic sizes.
LONG_PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "causal": lambda tokens: Causal(),
    "window 1024": lambda tokens: SlidingWindow(1024),
    "window 4096": lambda tokens: SlidingWindow(4096),
    "documents": library_documents,
    "more documents": lambda tokens: library_documents(tokens, 2),
    **rows_of(
        "Dilated",
        lambda _: {"LongNet": longnet, "LongNet, growth 4": lambda tokens: longnet(tokens, 1024, 4)},
    ),
}


def layout_for(name: str, pattern: Pattern, *, tokens: int, ring_size: int, multiple_of: int = 1) -> Layout:
    """The layout of that name for a pattern. Orders made for another pattern serve this one, too."""
    sizes = {"tokens": tokens, "ring_size": ring_size, "multiple_of": multiple_of}
    try:
        return make_layout(name, pattern=pattern, **sizes)
    except RingLayoutError:
        if name == "document_zigzag":
            return make_layout(name, pattern=ds_ring.Documents(document_ids(tokens)), **sizes)
        if name == "private":  # runs of that layout of another pattern
            if tokens < 2:  # there is no such sequence
                return make_layout("contiguous", **sizes)
            half = ds_ring.BlockDiffusion(7, tokens // 2, padding=tokens % 2)
            return make_layout(name, pattern=half, **sizes)
        if name != "residue":
            raise
        from ds_ring.patterns.dilated.residue_layout import ResidueLayout

        window = 6 * max(1, sizes["tokens"] // 96)  # runs of a few tokens: every pair of runs is a tile
        return ResidueLayout(**sizes, window=window, moduli=(2, 6), chunks_per_rank=2)


@dataclass(frozen=True)
class Shape:
    """Global sizes of q, k and v."""

    batch: int = 2
    query_heads: int = 8
    kv_heads: int = 2
    tokens: int = 1000
    head_dim: int = 16


def tensors(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    b, h, g, t, d = shape.batch, shape.query_heads, shape.kv_heads, shape.tokens, shape.head_dim
    sizes = [(b, h, t, d), (b, g, t, d), (b, g, t, d), (b, h, t, d)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@contextmanager
def least_kept(queries: int) -> Iterator[None]:
    """Keep parts of so few queries for the end of a backward pass, in plans that are made meanwhile."""
    before = lowering.LEAST_KEPT
    try:
        lowering.LEAST_KEPT = queries
        _build_plan.cache_clear()  # plans keep their steps
        yield
    finally:
        lowering.LEAST_KEPT = before
        _build_plan.cache_clear()
