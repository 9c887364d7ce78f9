"""Plan one virtual rank in blocks of queries, for shards that are larger than memory.

Owns the cut of a rank's work into what a block of its queries reads of its own shard (hop 0, once per block)
and what any of its queries reads of other shards (all later hops, once per rank, over the queries concerned,
packed). Both are plans of production type, executed by the production `RingPass`; results merge exactly.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ds_ring.errors import RingLayoutError
from ds_ring.masks.branches import Primitive, Remainder, Segment
from ds_ring.masks.pattern import BoundPattern
from ds_ring.masks.slots import SlotRanges, no_slots, ranges_of_progressions
from ds_ring.masks.tiles import Axis, Tiles
from ds_ring.patterns.dilated.residues import Residue
from ds_ring.schedule.head_class import tiles_of_payload
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.rank_plan import DirectionPlan, HeadClassPlan, HopPlan, RankPlan

KEPT_TABLES = 64


class LocalQueries(NamedTuple):
    """Hold queries first .. first + length - 1 of a shard, against the shard's own keys."""

    # first, length: slots of the queries
    first: int
    length: int
    held: SlotRanges  # slots of the keys that they read
    plan: RankPlan  # hop 0 alone, over the packed keys


class Remote(NamedTuple):
    """Hold what a rank reads of other shards."""

    queries: SlotRanges  # slots of the queries that read any of it, packed in this order
    plan: RankPlan  # a hop for each shard that is read; hop 0 has no tiles


def shift_key(pattern: BoundPattern, start: int, length: int) -> tuple[Any, ...] | None:
    """Return a key that is equal for ranges of positions with the same mask, up to a shift of positions.

    Two ranges start .. start + length - 1 of one length with equal keys have the same mask relative to their
    starts, so their tiles are computed once. None: unknown, the tiles must be computed.
    """
    found: list[Any] = []
    for branch in (branch for branches in pattern.branches_by_head for branch in branches):
        if branch.masks:
            return None
        for side in (branch.queries, branch.keys):
            # the intersection of the side's range of positions with this range, relative to its start
            if not side.is_everywhere:
                found.append(tuple(min(max(x - start, 0), length) for x in (side.first, side.end)))
        for ours, theirs in branch.labels_of:
            # Two different primitives may change differently with the start, so no key is known for them.
            key = primitive_key(ours, start, length) if ours == theirs else None
            if key is None:
                return None
            found.append(key)
    return tuple(found)


def primitive_key(primitive: Primitive, start: int, length: int) -> tuple[Any, ...] | None:
    """Do the same for the pairs of positions to which a primitive gives equal labels."""
    if isinstance(primitive, Remainder):
        return ()  # a shift renames the labels; equal ones stay equal
    if not isinstance(primitive, Segment | Residue):
        return None
    if start // primitive.length != (start + length - 1) // primitive.length:
        return (start % primitive.length,)
    if isinstance(primitive, Segment):
        return ()  # inside one segment all tokens have one label
    # Inside one segment, only the index of the first token that takes part matters; -1 if there is none. The
    # key has two entries, so it never equals one of several segments.
    first = (primitive.offset - start % primitive.length) % primitive.rate
    return -1, first if first < length else -1


@dataclass
class BlockPlanner:
    """Plans of the queries of one head, rank by rank; keeps only tables that serve several blocks.

    Raises:
        RingLayoutError: another layout, or ranks without tokens.
    """

    pattern: BoundPattern  # bound to that head
    layout: Layout  # contiguous chunks
    _tables: OrderedDict[bytes, Tiles] = field(default_factory=OrderedDict, repr=False)
    _blocks: OrderedDict[Any, tuple[SlotRanges, Tiles]] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        if self.layout.name != "contiguous" or self.layout.tokens < self.layout.ring_size:
            raise RingLayoutError.wrong(
                "blocks", "a contiguous layout", f"{self.layout}", "use ds_ring.simulate"
            )

    def block(self, ring_rank: int, first: int, count: int) -> LocalQueries:
        """Return the work of a block of queries at hop 0."""
        ((start, _, length),) = self.layout.runs(ring_rank).tolist()
        end = min(first + count, length)
        shape = shift_key(self.pattern, start, length)
        key = (first, end, length, shape)
        if shape is None or key not in self._blocks:
            self._blocks[key] = self._own_tiles(start, first, end, length)
        held, tiles = self._blocks[key]
        self._blocks.move_to_end(key)
        if shape is None or len(self._blocks) > KEPT_TABLES:
            self._blocks.popitem(last=shape is None)
        hop_plan = HopPlan(0, ring_rank, ring_rank, ring_rank, held, no_slots(), no_slots(), tiles)
        return LocalQueries(first, end - first, held, self._rank_plan(ring_rank, [hop_plan]))

    def _own_tiles(self, start: int, first: int, end: int, length: int) -> tuple[SlotRanges, Tiles]:
        """Return what queries first .. end - 1 read of their own shard, and the tiles over it packed."""
        runs = np.array([[start + first, 1, end - first]])
        # the keys that these queries may read, by the band of distances alone
        least, most = self.pattern.distance
        low = max(first - most, 0) if most < length else 0
        high = min(end - least, length) if least > -length else length
        tiles = self.pattern.tiles(runs, np.array([[start + low, 1, high - low]]))
        tiles = replace(tiles, k=replace(tiles.k, slot=tiles.k.slot + low))
        held = _slots_of(tiles.k)
        return held, tiles_of_payload(tiles, held) if len(tiles) else tiles

    def remote(self, ring_rank: int) -> Remote:
        """Return the work of all later hops."""
        size = self.layout.ring_size
        own = self.layout.runs(ring_rank)
        (q, _, n), (least, most) = own[0].tolist(), self.pattern.distance
        others, runs = [], []
        for origin in range(size):
            theirs = self.layout.runs(origin)
            k, _, m = theirs[0].tolist()
            if origin != ring_rank and q + n - 1 - k >= least and q - (k + m - 1) <= most:
                others.append(origin)
                runs.append(theirs)
        none = self.pattern.tiles(own[:0], own[:0])
        table = self.pattern.tiles(own, np.concatenate(runs)) if runs else none
        ends = np.cumsum([int(run[:, 2].sum()) for run in runs]) if runs else np.empty(0, dtype=np.int64)
        where = np.searchsorted(ends, table.k.slot, side="right")
        queries = _slots_of(table.q)
        hops: list[HopPlan | None] = [self._hop_plan(ring_rank, 0, ring_rank, none, no_slots())]
        hops += [None] * (size - 1)
        for index in np.unique(where).tolist():
            origin, hop = others[index], (ring_rank - others[index]) % size
            tiles = table.rows(where == index)
            begin = int(ends[index] - runs[index][:, 2].sum())
            tiles = replace(tiles, k=replace(tiles.k, slot=tiles.k.slot - begin))
            held = _slots_of(tiles.k)
            # `tiles_of_payload` packs queries as well, if queries and keys change places
            tiles = _turned(tiles_of_payload(_turned(tiles_of_payload(tiles, held)), queries))
            hops[hop] = self._hop_plan(ring_rank, hop, origin, self._shared(tiles), held)
        while hops[-1] is None:
            hops.pop()
        return Remote(queries, self._rank_plan(ring_rank, hops))

    # [Note: straight from the origin]
    # Between real ranks K/V are handed on from neighbour to neighbour. Here each hop's payload is looked up,
    # without its sender, and gradients return to the owner at once: hops of a `Remote` hold the tokens of the
    # plan's hops and compute the same tiles, but relay and send nothing. (`simulate` counts the bytes sent.)
    #
    # Tables that are the same up to positions are one object, so that what a kernel derives from a table is
    # derived once. Tables of blocks that are equal by the pattern's `shift_key` are made once.
    def _hop_plan(self, ring_rank: int, hop: int, origin: int, tiles: Tiles, held: SlotRanges) -> HopPlan:
        """Return a hop that relays nothing; [Note: straight from the origin]."""
        return HopPlan(hop, origin, origin, ring_rank, held, no_slots(), no_slots(), tiles)

    def _rank_plan(self, ring_rank: int, hops: list[HopPlan | None] | list[HopPlan]) -> RankPlan:
        direction = DirectionPlan(tuple(hops), (), ())
        return RankPlan(ring_rank, (HeadClassPlan(slice(0, 1, 1), (direction,), 0),), 1, 1)

    def _shared(self, tiles: Tiles) -> Tiles:
        """Return an equal table that was seen before; positions count only as far as weights vary."""
        if tiles.masks:
            return tiles
        key = _signature(tiles)
        known = self._tables.get(key)
        if known is None:
            known = self._tables[key] = tiles
        self._tables.move_to_end(key)
        if len(self._tables) > KEPT_TABLES:
            self._tables.popitem(last=False)
        return known


def _signature(tiles: Tiles) -> bytes:
    """Return the inputs of a kernel's choice, as bytes."""
    columns = [getattr(axis, name) for axis in (tiles.q, tiles.k) for name in ("slot", "slot_step", "length")]
    columns += [*tiles.band, tiles.head_in_group, tiles.multiplicity, tiles.weight]
    for axis in (tiles.q, tiles.k):
        for number, weights in enumerate(tiles.weights):
            here = tiles.weight == number
            columns += [np.where(here, axis.position % weights.period, 0)]
            columns += [np.where(here, axis.position_step % weights.period, 0)]
    return (
        np.stack([np.asarray(column, dtype=np.int64) for column in columns]).tobytes()
        + repr(tiles.weights).encode()
    )


def _slots_of(axis: Axis) -> SlotRanges:
    """Return the slots of one side of a table."""
    if not len(axis.slot):
        return no_slots()
    return ranges_of_progressions(np.stack([axis.slot, axis.slot_step, axis.length], axis=1))


def _turned(tiles: Tiles) -> Tiles:
    """Swap queries and keys."""
    return replace(tiles, q=tiles.k, k=tiles.q, least=-tiles.most, most=-tiles.least)
