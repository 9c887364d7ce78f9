"""Layouts: which token of the sequence is in which slot of which rank.

A layout gives every ring rank an ordered list of runs. All shards have the same number of slots. The tokens
of a shard fill its first slots; the other slots are padding. No tile contains padding, and
`gather_sequence` removes padding. `ops/shard.py` applies layouts to tensors.

The zigzag layout cuts the sequence into 2P chunks. Rank p has the chunks p and 2P - 1 - p, so with a causal
mask all ranks have about the same work (Zhu 2024, ring-flash-attention). The striped layout gives token t to
rank t mod P for the same reason (Brandon et al. 2023, Striped Attention).
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import ClassVar

import numpy as np

from ds_ring.errors import RingLayoutError, RingShapeError, check_whole_number, shown
from ds_ring.limits import MAX_RANKS
from ds_ring.masks.pattern import Pattern, cache_by_pattern
from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.plugin import LAYOUTS, load

_log = logging.getLogger(__name__)

Mix = tuple[tuple[Pattern, int], ...]  # patterns, and how many layers have each; empty if no pattern is given


@dataclass(frozen=True)
class Layout(ABC):
    """Map every position of a sequence to a ring rank and a slot of this rank's shard.

    Attributes:
        tokens: length T of the sequence, without padding.
        ring_size: number P of ranks, and of shards.
        multiple_of: the number of slots of a shard is a multiple of this number.
    """

    tokens: int
    ring_size: int
    multiple_of: int = 1
    is_one_sequence: ClassVar[bool] = True  # False if queries and keys are of two sequences

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name under which `make_layout` builds this layout."""

    @abstractmethod
    def runs(self, ring_rank: int) -> IntArray:
        """Return the runs of a shard in slot order: int64 [n, 3], rows (start, step, length), length > 0."""

    @cached_property
    def longest_shard(self) -> int:
        """Return the greatest number of tokens of a shard, without padding."""
        return max(self.valid_tokens(rank) for rank in range(self.ring_size))

    @property
    def local_tokens(self) -> int:
        """Return the number of slots of a shard, padding included."""
        # A shard has at least one slot, so that no local tensor is empty.
        return -(-max(self.longest_shard, 1) // self.multiple_of) * self.multiple_of

    def part_slots(self, parts: int) -> int:
        """Return the number of slots of each of `parts` Ulysses ranks that share a shard.

        Raises:
            RingShapeError: `parts` does not divide the slots of a shard.
        """
        if self.local_tokens % parts:
            raise RingShapeError(
                f"expected shards of a multiple of {parts} slots, as Ulysses ranks, got {self.local_tokens};"
                f" build the layout with multiple_of={parts}"
            )
        return self.local_tokens // parts

    def valid_tokens(self, ring_rank: int) -> int:
        """Return the number of tokens of a shard, without padding; they fill the first slots."""
        return int(self.runs(ring_rank)[:, 2].sum())

    def positions(self, ring_rank: int) -> IntArray:
        """Return the global position of every slot of a shard, int64 [local_tokens]; -1 for padding slots."""
        positions = np.full(self.local_tokens, -1, dtype=np.int64)
        real = expand_runs(self.runs(ring_rank))
        positions[: len(real)] = real
        return positions

    def slots_by_position(self) -> IntArray:
        """Return ring_rank * local_tokens + slot for every position; int64 [tokens]."""
        order = np.empty(self.tokens, dtype=np.int64)
        for ring_rank in range(self.ring_size):
            real = expand_runs(self.runs(ring_rank))
            order[real] = ring_rank * self.local_tokens + np.arange(len(real))
        return order

    def __str__(self) -> str:
        return f"{self.name} layout of {self.tokens} tokens over {self.ring_size} ranks"


def expand_runs(runs: IntArray) -> IntArray:
    """Return the members of runs (start, step, length), one after the other; int64 [sum of lengths]."""
    row, within = repeat_rows(runs[:, 2])
    return runs[row, 0] + runs[row, 1] * within


def split_pieces(starts: IntArray, ends: IntArray, owners: IntArray, ring_size: int) -> list[IntArray]:
    """Return the runs of every rank for ascending, disjoint pieces start .. end - 1; pieces may be empty.

    Adjacent pieces of a rank become one run.
    """
    order = np.argsort(owners, kind="stable")
    order = order[ends[order] > starts[order]]
    starts, ends, owners = starts[order], ends[order], owners[order]
    begins = np.append(True, (starts[1:] != ends[:-1]) | (owners[1:] != owners[:-1]))[: len(starts)]
    starts, ends, owners = starts[begins], ends[np.append(begins[1:], True)[: len(ends)]], owners[begins]
    runs = np.stack([starts, np.ones_like(starts), ends - starts], axis=1)
    cuts = np.searchsorted(owners, np.arange(ring_size + 1)).tolist()
    return [runs[first:end] for first, end in itertools.pairwise(cuts)]


@dataclass(frozen=True)
class ChunkLayout(Layout):
    """Cut the sequence into consecutive chunks: one per rank (contiguous), or two per rank (zigzag).

    The lengths of two chunks differ by at most one token.

    Raises:
        RingLayoutError: chunks_per_rank is neither 1 nor 2.
    """

    chunks_per_rank: int = 1

    def __post_init__(self) -> None:
        if self.chunks_per_rank not in (1, 2):
            raise RingLayoutError(
                f"ChunkLayout: chunks_per_rank: expected 1 (contiguous) or 2 (zigzag), got"
                f' {self.chunks_per_rank}; make_layout("balanced", ...) gives a rank more pieces'
            )

    @property
    def name(self) -> str:
        return "contiguous" if self.chunks_per_rank == 1 else "zigzag"

    @property
    def chunks(self) -> int:
        """Return the number of chunks of the whole sequence."""
        return self.ring_size * self.chunks_per_rank

    def runs(self, ring_rank: int) -> IntArray:
        return self._runs[ring_rank]

    @cached_property
    def _runs(self) -> list[IntArray]:
        edges = np.array([self.tokens * i // self.chunks for i in range(self.chunks + 1)], dtype=np.int64)
        chunk = np.arange(self.chunks)
        owners = np.minimum(chunk, self.chunks - 1 - chunk) if self.chunks_per_rank == 2 else chunk
        return split_pieces(edges[:-1], edges[1:], owners, self.ring_size)


@dataclass(frozen=True)
class StripedLayout(Layout):
    """Put token t on rank t mod P (Brandon et al. 2023, Striped Attention)."""

    name = "striped"

    def runs(self, ring_rank: int) -> IntArray:
        length = len(range(ring_rank, self.tokens, self.ring_size))
        return np.array([[ring_rank, self.ring_size, length]])[: min(length, 1)]


def make_contiguous(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> Layout:
    """Give rank p the p-th part of the sequence."""
    return ChunkLayout(tokens, ring_size, multiple_of, 1)


def make_zigzag(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> Layout:
    """Give rank p parts p and 2P - 1 - p of 2P."""
    return ChunkLayout(tokens, ring_size, multiple_of, 2)


def make_striped(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> Layout:
    """Give rank p every P-th token."""
    return StripedLayout(tokens, ring_size, multiple_of)


def check_layout_name(name: str) -> None:
    """Raise RingLayoutError for a name that `make_layout` does not know."""
    if not isinstance(name, str) or name not in LAYOUTS:
        raise RingLayoutError(f"layout: expected one of {', '.join(LAYOUTS)}, got {shown(name)}")


def make_layout(
    name: str = "auto",
    *,
    tokens: int,
    ring_size: int,
    pattern: Pattern | Mapping[Pattern, int] | None = None,
    multiple_of: int = 1,
    block_size: int = 1,
) -> Layout:
    """Build a layout by name.

    Args:
        name: "contiguous", "zigzag" or "striped"; or one that is made for `pattern`: "residue" (dilated),
            "balanced" (even work), "document_zigzag" (documents), "private" (block diffusion, drafters).
            "auto" takes the best of several: [Note: what auto compares] in `choose.py`.
        tokens: length T of the sequence; any T >= 1.
        ring_size: number of shards P.
        pattern: the pattern of all layers, or the number of layers with each pattern:
            `{SlidingWindow(512): 5, Causal(): 1}`. The layout is chosen for all layers together.
        multiple_of: pad every shard to a multiple of this many slots.
        block_size: rows and columns of the blocks in which the kernel computes. Only "auto" uses it, to
            count the pairs that the kernel computes with each layout. For the kernel "flex", pass the value
            of the JSON key "block_size"; for kernels that compute only the attended pairs, pass 1.

    Raises:
        RingLayoutError: unknown name, sizes that are not positive integers, or a pattern that the named
            layout is not made for.
    """
    tokens = check_whole_number(tokens, "make_layout: tokens", RingLayoutError)
    ring_size = check_whole_number(ring_size, "make_layout: ring_size", RingLayoutError, MAX_RANKS)
    multiple_of = check_whole_number(multiple_of, "make_layout: multiple_of", RingLayoutError)
    block_size = check_whole_number(block_size, "make_layout: block_size", RingLayoutError)
    check_layout_name(name)
    if name == "auto" and pattern is None and ring_size > 1:
        _warn_without_pattern()
    return choose_layout(name, tokens, ring_size, _read_mix(pattern), multiple_of, block_size)


@lru_cache(maxsize=1)  # once a process
def _warn_without_pattern() -> None:
    _log.warning(
        'ds_ring: make_layout("auto") without a pattern is contiguous, which is uneven under a causal one:'
        " pass pattern=, the pattern of the layers"
    )


def _read_mix(pattern: object) -> Mix:
    if pattern is None:
        return ()
    counted = list(pattern.items()) if isinstance(pattern, Mapping) and pattern else [(pattern, 1)]
    mix: list[tuple[Pattern, int]] = []
    for entry, layers in counted:
        if not isinstance(entry, Pattern):
            raise RingLayoutError(
                "make_layout: pattern: expected a pattern, patterns with numbers of layers, or None, got"
                f" {shown(entry)}"
            )
        mix.append(
            (entry, check_whole_number(layers, f"make_layout: pattern: layers with {entry}", RingLayoutError))
        )
    return tuple(mix)


# cached: a layout for a pattern is computed from the tiles of the whole sequence, which takes time
@partial(cache_by_pattern, 256)
def choose_layout(name: str, tokens: int, ring_size: int, mix: Mix, multiple_of: int, block: int) -> Layout:
    """Return the layout of arguments that have been checked."""
    options = {"block": block} if name == "auto" and block > 1 else {}
    layout: Layout = load(LAYOUTS[name].home)(tokens, ring_size, multiple_of, mix, **options)
    return layout
