"""Layouts: which token of the sequence is in which slot of which rank.

A layout gives every ring rank an ordered list of runs (arithmetic progressions of positions). The real
tokens of a shard come first; if the length does not divide, the remaining slots are padding at the end of
the shard: no tile covers them, no query attends to them, and `gather_sequence` strips them.
`ops/shard.py` applies layouts to tensors.

The zigzag layout gives rank p the chunks p and 2P-1-p, so that a causal mask gives every rank the same work
(Zhu 2024, ring-flash-attention). The striped layout deals out single tokens for the same reason (Brandon et
al. 2023, Striped Attention).

`PairLayout` is the layout of two sequences as one, for cross attention.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ds_ring.errors import RingLayoutError, RingPatternError, RingShapeError, shown, whole_number
from ds_ring.limits import MAX_RANKS
from ds_ring.masks.catalog import Documents, Full, Slices
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import IntArray, repeat_rows
from ds_ring.registry import LAYOUTS, load

Mix = tuple[tuple[Pattern, int], ...]  # patterns, and how many layers have each; empty if no pattern is given


@dataclass(frozen=True)
class Layout(ABC):
    """Describe the bijection position <-> (ring rank, slot) for `tokens` tokens over `ring_size` ranks.

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
        """Return the name under which `make_layout` builds this layout."""

    @abstractmethod
    def runs(self, ring_rank: int) -> IntArray:
        """Return the runs of one shard in slot order: int64 [n, 3] of (start, step, length), none empty."""

    @cached_property
    def longest_shard(self) -> int:
        """Count real tokens of the fullest shard."""
        return max(self.valid_tokens(rank) for rank in range(self.ring_size))

    @property
    def local_tokens(self) -> int:
        """Return the slots of every shard, padding included; the local length S of a sharded tensor."""
        # at least one slot, so that no local tensor is empty
        return -(-max(self.longest_shard, 1) // self.multiple_of) * self.multiple_of

    def part_slots(self, parts: int) -> int:
        """Return the slots of each of `parts` Ulysses ranks that share a shard.

        Raises:
            RingShapeError: the shards cannot be split so.
        """
        if self.local_tokens % parts:
            raise RingShapeError(
                f"shards of {self.local_tokens} slots cannot be split over {parts} Ulysses ranks; build the"
                f" layout with multiple_of={parts}"
            )
        return self.local_tokens // parts

    def valid_tokens(self, ring_rank: int) -> int:
        """Count real tokens of one shard; they fill slots 0 .. valid_tokens-1."""
        return int(self.runs(ring_rank)[:, 2].sum())

    def positions(self, ring_rank: int) -> IntArray:
        """Return the global position of every slot of a shard, int64 [local_tokens]; -1 for padding slots."""
        positions = np.full(self.local_tokens, -1, dtype=np.int64)
        real = expand_runs(self.runs(ring_rank))
        positions[: len(real)] = real
        return positions

    def slots_by_position(self) -> IntArray:
        """Return for every position its index ring_rank * local_tokens + slot; int64 [tokens]."""
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


def _runs_of_pieces(starts: IntArray, ends: IntArray) -> IntArray:
    """Return the runs of pieces start .. end - 1, ascending and disjoint; those that touch are one run."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    begins = np.append(True, starts[1:] != ends[:-1])[: len(starts)]
    starts, ends = starts[begins], ends[np.append(begins[1:], True)[: len(ends)]]
    return np.stack([starts, np.ones_like(starts), ends - starts], axis=1)


@dataclass(frozen=True)
class ChunkLayout(Layout):
    """Cut the sequence into consecutive chunks: one per rank (contiguous), or two per rank (zigzag).

    Chunk lengths differ by at most one token, so that all ranks have about the same work even if the number
    of chunks does not divide the length.

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

    def chunks_of(self, ring_rank: int) -> list[int]:
        """Return the chunks of a rank, ascending: p alone, or p and its mirror image."""
        if self.chunks_per_rank == 1:
            return [ring_rank]
        return [ring_rank, self.chunks - 1 - ring_rank]

    def runs(self, ring_rank: int) -> IntArray:
        edges = [[self.tokens * (c + i) // self.chunks for c in self.chunks_of(ring_rank)] for i in (0, 1)]
        return _runs_of_pieces(np.array(edges[0]), np.array(edges[1]))


@dataclass(frozen=True)
class StripedLayout(Layout):
    """Put token t on rank t mod P (Brandon et al. 2023, Striped Attention)."""

    name = "striped"

    def runs(self, ring_rank: int) -> IntArray:
        length = len(range(ring_rank, self.tokens, self.ring_size))
        return np.array([[ring_rank, self.ring_size, length]])[: min(length, 1)]


@dataclass(frozen=True)
class PieceLayout(Layout):
    """Cut the sequence at any `boundaries`, each piece given to any rank; pieces of a rank stay ascending."""

    boundaries: tuple[int, ...] = ()  # positions at which pieces begin, and T at the end; ascending
    owners: tuple[int, ...] = ()  # ring rank of each piece

    name = "balanced"

    def runs(self, ring_rank: int) -> IntArray:
        bounds = np.array(self.boundaries, dtype=np.int64)
        mine = np.flatnonzero(np.array(self.owners) == ring_rank)
        return _runs_of_pieces(bounds[mine], bounds[mine + 1])

    @cached_property
    def longest_shard(self) -> int:
        lengths = np.diff(self.boundaries)
        return int(np.bincount(self.owners, weights=lengths, minlength=self.ring_size).max())

    def __str__(self) -> str:
        return f"{super().__str__()}, {len(self.owners)} pieces, {hash((self.boundaries, self.owners))}"


@dataclass(frozen=True)
class ResidueLayout(Layout):
    """Sort tokens of each window by residue class, so that a dilation becomes block-sparse.

    Inside windows of `window` positions the order is by (p mod moduli[0], p mod moduli[1], ..., p); with
    moduli that divide one another every class of every modulus is a contiguous stretch of slots. Windows
    go to ranks as in a chunk layout.

    """

    window: int = 1  # positions of a window; the smallest segment of the pattern
    moduli: tuple[int, ...] = (1,)  # r_1, lcm(r_1, r_2), ...: each divides the next
    chunks_per_rank: int = 1  # 1 for contiguous chunks, 2 for zigzag

    name = "residue"

    def runs(self, ring_rank: int) -> IntArray:
        # a chunk layout of windows instead of tokens
        chunks = ChunkLayout(-(-self.tokens // self.window), self.ring_size, 1, self.chunks_per_rank)
        windows = expand_runs(chunks.runs(ring_rank)) * self.window
        period = self.moduli[-1]
        residues = np.arange(min(period, self.window))
        # lexsort's last key counts most, so the first modulus comes last
        order = np.lexsort([residues % modulus for modulus in reversed(self.moduli)])
        # one run for each residue of each window, in slot order
        starts = (windows[:, None] + residues[order][None, :]).reshape(-1)
        ends = np.repeat(np.minimum(windows + self.window, self.tokens), len(residues))
        # ceil; 0 where the last window ends before the residue
        length = np.maximum(-((starts - ends) // period), 0)
        runs = np.stack([starts, np.full_like(starts, period), length], axis=1)
        return runs[length > 0]

    def __str__(self) -> str:
        how = f"windows of {self.window}, moduli {self.moduli}, chunks {self.chunks_per_rank}"
        return f"{super().__str__()}, {how}"


@lru_cache(maxsize=64)
def in_whole_blocks(layout: Layout, size: int) -> Layout:
    """Return the layout with its borders moved to the nearest multiples of `size`.

    Raises:
        RingLayoutError: a shard is not consecutive positions.
    """
    rows = []
    for ring_rank in range(layout.ring_size):
        for start, step, length in layout.runs(ring_rank).tolist():
            if step != 1 and length > 1:
                raise RingLayoutError(
                    f"{layout}: expected shards of consecutive positions, since blocks of {size} tokens stay"
                    ' together, got others; use the layout "zigzag", "contiguous" or "balanced"'
                )
            rows.append((start, ring_rank))
    starts, owners = zip(*sorted(rows), strict=True)
    borders = [min((start + size // 2) // size * size, layout.tokens) for start in starts]
    moved = PieceLayout(
        layout.tokens, layout.ring_size, layout.multiple_of, (*borders, layout.tokens), tuple(owners)
    )
    same = all(np.array_equal(moved.runs(r), layout.runs(r)) for r in range(layout.ring_size))
    return layout if same else moved


def whole_blocks(layout: Layout, size: int) -> Layout:
    """Return a layout whose runs begin at multiples of `size`, or raise RingLayoutError."""
    moved = in_whole_blocks(layout, size)
    if moved is not layout:
        raise RingLayoutError(
            f"{layout}: expected runs that begin at multiples of {size} tokens (block_size), got others; use"
            f" ds_ring.schedule.layout.in_whole_blocks(layout, {size}), or a length that the shards divide so"
        )
    return layout


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
        raise RingLayoutError(
            f"unknown layout {shown(name)}: expected one of {', '.join(LAYOUTS)}, got {shown(name)}"
        )


def make_layout(
    name: str = "auto",
    *,
    tokens: int,
    ring_size: int,
    pattern: Pattern | Mapping[Pattern, int] | None = None,
    multiple_of: int = 1,
    block_size: int = 1,
    speeds: Sequence[float] | None = None,
) -> Layout:
    """Build a layout by name.

    Args:
        name: "contiguous", "zigzag" or "striped"; or one that is made for `pattern`: "residue" (dilated),
            "balanced" (even work), "document_zigzag" (documents), "auto" (contiguous or zigzag, or balanced
            where both are uneven).
        tokens: length T of the sequence; any T >= 1.
        ring_size: number of shards P.
        pattern: what will be attended. Where layers differ, how many layers have each pattern:
            `{SlidingWindow(512): 5, Causal(): 1}`; the layout is chosen for all of them together.
        multiple_of: pad every shard to a multiple of this many slots.
        block_size: side in slots of the blocks in which the kernel computes. Only "auto" uses it, to count
            the pairs that are executed with each layout. Pass the block size of the JSON for "flex", and 1
            for kernels that compute only the attended pairs.
        speeds: of the ranks, relative to each other, for "auto" and "balanced": work is dealt out by them.

    Raises:
        RingLayoutError: unknown name, sizes that are not positive integers, or a pattern that the named
            layout is not made for.
    """
    tokens = whole_number(tokens, "make_layout: tokens", RingLayoutError)
    ring_size = whole_number(ring_size, "make_layout: ring_size", RingLayoutError, MAX_RANKS)
    multiple_of = whole_number(multiple_of, "make_layout: multiple_of", RingLayoutError)
    check_layout_name(name)
    block_size = whole_number(block_size, "make_layout: block_size", RingLayoutError)
    block = block_size if name == "auto" else 1
    return _made(
        name, tokens, ring_size, _mix_of(pattern), multiple_of, block, _speeds_of(speeds, name, ring_size)
    )


def _speeds_of(speeds: Sequence[float] | None, name: str, ring_size: int) -> tuple[float, ...]:
    if speeds is None:
        return ()
    numbers = tuple(map(float, speeds))
    if len(numbers) != ring_size or not all(0 < x < math.inf for x in numbers):
        raise RingLayoutError(
            f"make_layout: speeds: expected {ring_size} numbers above 0, one for each rank of the ring, got"
            f" {shown(speeds)}; leave them out for ranks of equal speed"
        )
    if name not in ("auto", "balanced"):
        raise RingLayoutError(
            f'make_layout: speeds: expected the layout "auto" or "balanced", which deal out work, got'
            f' "{name}"; leave the speeds out, or take one of these'
        )
    return numbers if len(set(numbers)) > 1 else ()


def _mix_of(pattern: object) -> Mix:
    if pattern is None:
        return ()
    counted = list(pattern.items()) if isinstance(pattern, Mapping) and pattern else [(pattern, 1)]
    mix: list[tuple[Pattern, int]] = []
    for one, layers in counted:
        if not isinstance(one, Pattern):
            raise RingLayoutError(
                f"make_layout: pattern: expected a pattern, patterns with their number of layers, or None,"
                f" got {shown(one)}; use ds_ring.Causal(), say"
            )
        mix.append((one, whole_number(layers, f"make_layout: pattern: layers with {one}", RingLayoutError)))
    return tuple(mix)


# kept, because a layout made for a pattern takes tiles of the whole sequence
@lru_cache(maxsize=256)
def _made(
    name: str, tokens: int, ring_size: int, mix: Mix, multiple_of: int, block: int, speeds: tuple[float, ...]
) -> Layout:
    more: dict[str, Any] = {"block": block} if block > 1 else {}  # which "auto" alone takes
    more |= {"speeds": speeds} if speeds else {}
    made: Layout = load(LAYOUTS[name])(tokens, ring_size, multiple_of, mix, **more)
    return made


@dataclass(frozen=True)
class BlockLayout(Layout):
    """A layout of blocks of consecutive tokens: a block is on the rank of its first token.

    Blocks begin where the sequence or a document begins, and then at every `size`-th token. They are numbered
    in the order of positions; `tokens` counts them. Padding has no blocks.
    """

    size: int = field(kw_only=True)  # tokens of a block
    of: Layout = field(kw_only=True)  # of the tokens
    documents: Documents | None = field(kw_only=True, default=None)
    whole: bool = field(kw_only=True, default=True)  # omit the incomplete block at the end of a document

    name = "blocks"

    @classmethod
    def of_tokens(
        cls, layout: Layout, size: int, documents: Documents | None = None, whole: bool = True
    ) -> BlockLayout:
        """Return the layout of the blocks of the tokens of `layout`.

        Raises:
            RingLayoutError: shards that are not consecutive tokens.
            RingPatternError: documents of another length, or a document that has gaps.
        """
        for ring_rank in range(layout.ring_size):
            runs = layout.runs(ring_rank)
            if bool((runs[runs[:, 2] > 1, 1] != 1).any()):
                raise RingLayoutError(
                    f"{layout}: expected shards of consecutive positions, since keys are chosen by blocks of"
                    f' {size} tokens, got others; use the layout "zigzag", "contiguous" or "balanced"'
                )
        counts = cls._counts(layout.tokens, size, documents, whole)
        return cls(
            int(counts.sum()), layout.ring_size, size=size, of=layout, documents=documents, whole=whole
        )

    @staticmethod
    def _counts(tokens: int, size: int, documents: Documents | None, whole: bool) -> IntArray:
        """Return the number of blocks of each document."""
        if documents is None:
            lengths, ids = np.array([tokens]), np.array([0])
        else:
            if documents.tokens != tokens:
                raise RingPatternError(
                    f"documents: expected ids for {tokens} tokens (the layout's), got {documents.tokens};"
                    " build both for one length"
                )
            lengths, ids = np.diff([*documents.starts, tokens]), np.array(documents.ids)
            real = ids[ids >= 0]
            if len(np.unique(real)) < len(real):
                raise RingPatternError(
                    f"documents: expected documents of consecutive tokens, since blocks of {size} tokens"
                    " begin with a document, got one with a gap; give each stretch an id of its own"
                )
        return np.where(ids >= 0, (lengths if whole else lengths + size - 1) // size, 0)

    @cached_property
    def starts(self) -> IntArray:
        """Return the position of each block's first token, int64 [tokens], ascending."""
        counts = self._counts(self.of.tokens, self.size, self.documents, self.whole)
        begins = np.array([0] if self.documents is None else self.documents.starts, dtype=np.int64)
        document, within = repeat_rows(counts)
        return begins[document] + within * self.size

    @cached_property
    def ends(self) -> IntArray:
        """Return the end of the document of each block, exclusive, int64 [tokens]."""
        edges = [self.of.tokens] if self.documents is None else [*self.documents.starts, self.of.tokens]
        borders = np.array(edges, dtype=np.int64)
        return borders[np.searchsorted(borders, self.starts, side="right")]

    def runs(self, ring_rank: int) -> IntArray:
        runs = self.of.runs(ring_rank)
        first, end = (np.searchsorted(self.starts, where) for where in (runs[:, 0], runs[:, 0] + runs[:, 2]))
        found = np.stack([first, np.ones_like(first), end - first], axis=1)
        return found[found[:, 2] > 0]

    def __str__(self) -> str:
        return f"blocks of {self.size} tokens (whole={self.whole}, {self.documents}) of the {self.of}"


@dataclass(frozen=True)
class CacheLayout(Layout):
    """The layout of a K/V cache: the prompt in the layout of its ring pass, then generated tokens.

    Token i after the prompt is on rank i mod P, after that rank's shard of the prompt.

    `tokens` counts all reserved slots, used or not: the positions of queries limit the keys that they see.
    """

    prompt: Layout = field(kw_only=True)

    name = "cache"

    def runs(self, ring_rank: int) -> IntArray:
        first = self.prompt.tokens + ring_rank
        generated = len(range(first, self.tokens, self.ring_size))
        own = np.array([[first, self.ring_size, generated]])[: min(generated, 1)]
        return np.concatenate([self.prompt.runs(ring_rank), own])

    def slot(self, ring_rank: int, position: int) -> int | None:
        """Return the slot of a generated token, None on the ranks that do not hold it."""
        turn, owner = divmod(position - self.prompt.tokens, self.ring_size)
        return self.prompt.valid_tokens(ring_rank) + turn if owner == ring_rank else None

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.prompt}"


@dataclass(frozen=True)
class PairLayout(Layout):
    """Lay out two sequences as one, for attention from queries of one to keys of the other.

    Each rank has its slots of the queries' layout, then its slots of the keys' layout; where `parts` Ulysses
    ranks share a shard, each has its part of both. Positions are those of the queries, then of the keys, then
    one for each padding slot of the two layouts. In `pattern_between` only queries attend, and only to keys:
    the slots of the other sequence, and padding, are neither computed nor sent.
    """

    queries: Layout = field(kw_only=True)
    keys: Layout = field(kw_only=True)
    parts: int = field(kw_only=True, default=1)

    name = "pair"

    @classmethod
    def of(cls, queries: Layout, keys: Layout, parts: int = 1) -> PairLayout:
        """Return the layout of both.

        Raises:
            RingLayoutError: layouts of different numbers of ranks.
            RingShapeError: shards that cannot be split over the Ulysses ranks.
        """
        if queries.ring_size != keys.ring_size:
            raise RingLayoutError(
                f"key_layout: expected {queries.ring_size} ranks, as the layout of the queries, got"
                f" {keys.ring_size}; make both for one ring"
            )
        slots = sum(one.part_slots(parts) * parts for one in (queries, keys))
        return cls(slots * queries.ring_size, queries.ring_size, queries=queries, keys=keys, parts=parts)

    def runs(self, ring_rank: int) -> IntArray:
        pads = [
            one.local_tokens - one.valid_tokens(rank)
            for rank in range(ring_rank)
            for one in (self.queries, self.keys)
        ]
        padding = self.queries.tokens + self.keys.tokens + sum(pads)  # its first position
        found = []
        for part in range(self.parts):
            for one, first in zip((self.queries, self.keys), (0, self.queries.tokens), strict=True):
                size, runs = one.part_slots(self.parts), one.runs(ring_rank)
                # places in each run at which the part begins and ends
                before = np.cumsum(runs[:, 2]) - runs[:, 2]
                low, high = (np.clip(end * size - before, 0, runs[:, 2]) for end in (part, part + 1))
                mine = np.stack([first + runs[:, 0] + low * runs[:, 1], runs[:, 1], high - low], axis=1)
                fill = size - int((high - low).sum())
                found += [mine[high > low], np.array([[padding, 1, fill]])[: min(fill, 1)]]
                padding += fill
        return np.concatenate(found)

    def pattern_between(self, pattern: Pattern) -> Pattern:
        """Return a pattern between the two sequences as a pattern over the positions of this layout.

        Args:
            pattern: `Full`, or `Documents` with the ids of the queries, then those of the keys.

        Raises:
            RingPatternError: another one, or documents of another number of tokens.
        """
        queries, both = self.queries.tokens, self.queries.tokens + self.keys.tokens
        found: Pattern = Slices((((0, queries), (queries, both), "full"),))
        for part in pattern.conjuncts:
            if isinstance(part, Full):
                continue
            if not isinstance(part, Documents) or part.tokens != both:
                raise RingPatternError(
                    f"key_layout: expected the pattern Full(), or Documents with {both} ids, of the {queries}"
                    f" queries and then of the {self.keys.tokens} keys, got {part}; positions of two"
                    " sequences have no distance"
                )
            ids = np.repeat(part.ids, np.diff([*part.starts, part.tokens]))
            found = found & Documents(np.concatenate([ids, np.full(self.tokens - both, -1)]))
        return found

    def __str__(self) -> str:
        return f"pair of queries in the {self.queries} and keys in the {self.keys}, {self.parts} parts"
