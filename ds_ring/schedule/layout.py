"""Layouts: which token of the sequence lies in which slot of which rank.

A layout gives every ring rank an ordered list of runs (arithmetic progressions of positions). The real
tokens of a shard come first; slots that are left over, because the length does not divide, are padding at
the end of the shard: no tile covers them, nobody attends to them, and `gather_sequence` strips them.
Layouts know nothing of tensors; `runtime/shard.py` applies them.

Zigzag pairs chunk p with chunk 2P-1-p so that a causal mask gives every rank the same work (Zhu 2024,
ring-flash-attention; Brandon et al. 2023, Striped Attention, for the striped form).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ds_ring.errors import RingLayoutError

if TYPE_CHECKING:
    from ds_ring.schedule.pattern import Pattern

IntArray = np.ndarray  # int64 throughout this package


@dataclass(frozen=True)
class Layout(ABC):
    """The bijection position <-> (ring rank, slot) for `tokens` tokens over `ring_size` ranks.

    Attributes:
        tokens: length T of the real sequence.
        ring_size: number of shards P.
        multiple_of: every shard is padded to a multiple of this many slots.
    """

    tokens: int
    ring_size: int
    multiple_of: int = 1

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which `make_layout` builds this layout."""

    @abstractmethod
    def runs(self, ring_rank: int) -> IntArray:
        """Runs of one shard in slot order: int64 [n, 3] of (start, step, length), none empty."""

    @property
    @abstractmethod
    def longest_shard(self) -> int:
        """Real tokens of the fullest shard."""

    @property
    def local_tokens(self) -> int:
        """Slots of every shard, padding included; the local length S of a sharded tensor."""
        return -(-max(self.longest_shard, 1) // self.multiple_of) * self.multiple_of

    def valid_tokens(self, ring_rank: int) -> int:
        """Real tokens of one shard; they fill slots 0 .. valid_tokens-1."""
        return int(self.runs(ring_rank)[:, 2].sum())

    def positions(self, ring_rank: int) -> IntArray:
        """Global position of every slot of a shard, int64 [local_tokens]; -1 for padding slots."""
        positions = np.full(self.local_tokens, -1, dtype=np.int64)
        real = expand_runs(self.runs(ring_rank))
        positions[: len(real)] = real
        return positions

    def slots_by_position(self) -> IntArray:
        """For every position, its index ring_rank * local_tokens + slot; int64 [tokens]."""
        order = np.empty(self.tokens, dtype=np.int64)
        for ring_rank in range(self.ring_size):
            real = expand_runs(self.runs(ring_rank))
            order[real] = ring_rank * self.local_tokens + np.arange(len(real))
        return order

    def __str__(self) -> str:
        return f"{self.name} layout of {self.tokens} tokens over {self.ring_size} ranks"


def expand_runs(runs: IntArray) -> IntArray:
    """The members of runs (start, step, length), one after the other; int64 [sum of lengths]."""
    start, step, length = runs[:, 0], runs[:, 1], runs[:, 2]
    total = int(length.sum())
    first = np.cumsum(length) - length
    within = np.arange(total) - np.repeat(first, length)
    return np.repeat(start, length) + np.repeat(step, length) * within


def _as_runs(rows: list[tuple[int, int, int]]) -> IntArray:
    kept = [row for row in rows if row[2] > 0]
    return np.array(kept, dtype=np.int64).reshape(len(kept), 3)


@dataclass(frozen=True)
class ChunkLayout(Layout):
    """The sequence cut into consecutive chunks, each given to one rank.

    Chunk lengths differ by at most one token, so that a ragged length leaves every rank the same work.
    """

    chunks_per_rank: int = 1

    @property
    def name(self) -> str:
        return "contiguous" if self.chunks_per_rank == 1 else "zigzag"

    @property
    def chunks(self) -> int:
        """Number of chunks of the whole sequence."""
        return self.ring_size * self.chunks_per_rank

    def boundary(self, chunk: int) -> int:
        """Position at which a chunk begins."""
        return self.tokens * chunk // self.chunks

    def chunks_of(self, ring_rank: int) -> list[int]:
        """The chunks of a rank, ascending: p alone, or p and its mirror image."""
        if self.chunks_per_rank == 1:
            return [ring_rank]
        return [ring_rank, self.chunks - 1 - ring_rank]

    def runs(self, ring_rank: int) -> IntArray:
        bounds = [(self.boundary(c), self.boundary(c + 1)) for c in self.chunks_of(ring_rank)]
        merged: list[tuple[int, int, int]] = []
        for start, end in bounds:  # the last rank's two chunks touch: one run
            if merged and merged[-1][0] + merged[-1][2] == start:
                merged[-1] = (merged[-1][0], 1, end - merged[-1][0])
            else:
                merged.append((start, 1, end - start))
        return _as_runs(merged)

    @property
    def longest_shard(self) -> int:
        return max(
            sum(self.boundary(c + 1) - self.boundary(c) for c in self.chunks_of(rank))
            for rank in range(self.ring_size)
        )


@dataclass(frozen=True)
class StripedLayout(Layout):
    """Token t lies on rank t mod P (Brandon et al. 2023, Striped Attention)."""

    @property
    def name(self) -> str:
        return "striped"

    def runs(self, ring_rank: int) -> IntArray:
        length = len(range(ring_rank, self.tokens, self.ring_size))
        return _as_runs([(ring_rank, self.ring_size, length)])

    @property
    def longest_shard(self) -> int:
        return -(-self.tokens // self.ring_size)


_BUILDERS: dict[str, Callable[[int, int, int], Layout]] = {
    "contiguous": lambda tokens, ring, multiple: ChunkLayout(tokens, ring, multiple, 1),
    "zigzag": lambda tokens, ring, multiple: ChunkLayout(tokens, ring, multiple, 2),
    "striped": StripedLayout,
}


@lru_cache(maxsize=256)
def make_layout(
    name: str = "auto",
    *,
    tokens: int,
    ring_size: int,
    pattern: Pattern | None = None,
    multiple_of: int = 1,
) -> Layout:
    """Build a layout by name.

    Args:
        name: "contiguous", "zigzag", "striped", or "auto", which takes the one that suits `pattern`.
        tokens: length T of the sequence; any T >= 1.
        ring_size: number of shards P.
        pattern: what will be attended; only "auto" looks at it.
        multiple_of: pad every shard to a multiple of this many slots.

    Raises:
        RingLayoutError: unknown name or sizes that are not positive integers.
    """
    for label, value in (("tokens", tokens), ("ring_size", ring_size), ("multiple_of", multiple_of)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RingLayoutError(f"make_layout: {label}: expected a positive integer, got {value!r}")
    if name == "auto":
        name = "zigzag" if pattern is not None and pattern.is_causal else "contiguous"
    if name not in _BUILDERS:
        raise RingLayoutError(
            f"unknown layout {name!r}: expected one of {', '.join(sorted(_BUILDERS))} or auto"
        )
    return _BUILDERS[name](tokens, ring_size, multiple_of)
