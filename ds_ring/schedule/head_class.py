"""Who reads which tokens of every shard, and who sends them, for one class of heads. Index arithmetic.

A class is the K/V heads whose patterns are equal. Terms: the origin of a shard is the rank that owns it. At
each hop, one rank, the reader, computes with the shard; the slots that it reads are the held slots of the
hop. The relayed slots are those held slots that the rank before the reader reads as well.

[Note: relays and direct sends]
In a ring of P ranks and a direction of sign d, rank (o + d * s) mod P computes at hop s with the shard of
rank o. It receives exactly the tokens that it reads, each once. Some of these tokens are also read by the
rank before it on the shard's way. That rank sends them on (a relay). The origin sends the others (a direct
send, which never waits for another message). So the traffic is minimal. Passing everything from neighbour to
neighbour would send up to 16 % more for LongNet on zigzag shards, and 45 % more for a window on shards of
many short runs. Direct sends do not occur for contiguous shards with dense, windowed and dilated patterns,
nor for zigzag shards with a dense causal pattern. They are 2 to 9 % of the tokens for LongNet on zigzag
shards, and up to 30 % for a window on short runs. Suppose that only neighbours on the ring are linked. A
direct send then crosses a link for each hop of its way. Compared with relaying, these tokens cross as many
links for LongNet, and 9 to 37 % more for windows. Both directions send the same bytes; we choose by the
number of links that tokens cross (`links`).

[Note: where gradients are added]
With a float32 payload, the sum of a token's dK and dV is passed on with its keys, and each rank adds its own
part. Rounded to bfloat16 at every hop, that sum would lose a bit for every fourfold number of ranks: the
error with 64 ranks is 5.5 to 5.9 times that of one rank. So with a bfloat16 payload each rank returns its own
part to the owner, which adds in float32: the number of bytes is the same, and the error is 1.3 times that of
one rank for every ring size. Only inside a node, where links are fast, sums are passed on, in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ds_ring.errors import RingPatternError, shown
from ds_ring.masks.joins import trimmed
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import (
    IntArray,
    SlotRanges,
    count_slots,
    intersect_slots,
    locate_slots,
    no_slots,
    ranges_of_progressions,
    subtract_slots,
)
from ds_ring.masks.tiles import Tiles
from ds_ring.registry import CodecRow
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.rank_plan import (
    Direction,
    DirectionPlan,
    DirectSend,
    GradientReturn,
    HeadClassPlan,
    HopPlan,
)


class Reads(NamedTuple):
    """Progressions of a shard's slots that other ranks read, and the distance up the ring to each reader."""

    slots: IntArray  # [n, 3] of (slot, slot step, length); no row occurs twice for one distance
    distances: IntArray  # [n], ascending; reader = origin + distance (mod P)

    def at(self, distance: int) -> SlotRanges:
        """Return the slots that the reader at one distance reads."""
        first, end = np.searchsorted(self.distances, [distance, distance + 1])
        return ranges_of_progressions(self.slots[first:end])


def find_reads(pattern: Pattern, reader_runs: list[IntArray], origin_runs: IntArray) -> Reads:
    """Return what every reader reads of a shard; readers are ordered by distance 1, 2, ... up the ring."""
    if not reader_runs or not len(origin_runs):
        return Reads(np.empty((0, 3), dtype=np.int64), np.empty(0, dtype=np.int64))
    runs = np.concatenate(reader_runs)
    distance_of_run = np.repeat(np.arange(1, len(reader_runs) + 1), [len(r) for r in reader_runs])
    # Make one table for all readers: their runs follow one another in its query slots.
    table = pattern.tiles(runs, origin_runs)
    first_slots = np.cumsum(runs[:, 2]) - runs[:, 2]
    distances = distance_of_run[np.searchsorted(first_slots, table.q.slot, side="right") - 1]
    rows = np.stack([distances, table.k.slot, table.k.slot_step, table.k.length], axis=1)
    # Several queries of one reader often read the same keys. The sort is by distance first.
    rows = np.unique(rows, axis=0)
    return Reads(rows[:, 1:], rows[:, 0])


def tiles_of_payload(tiles: Tiles, held: SlotRanges) -> Tiles:
    """Return the same tiles with key slots that index the packed payload.

    A tile's keys are an arithmetic progression of the shard's slots. Where the payload omits slots between
    them, the packed keys may have another stride; the tile is cut there.

    Raises:
        RingPatternError: a tile has keys that the payload omits. A kernel would read other keys, or none.
    """
    # Neighbouring slots stay neighbours when packed, and two keys are always a progression.
    suspicious = (tiles.k.slot_step > 1) & (tiles.k.length > 2) & (len(held) > 1)
    broken, pieces = np.zeros(len(tiles), dtype=bool), []
    # Tiles of different queries share their keys, so look at each progression once.
    cuts: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for row in np.flatnonzero(suspicious):
        key = int(tiles.k.slot[row]), int(tiles.k.slot_step[row]), int(tiles.k.length[row])
        if key not in cuts:
            cuts[key] = _equal_strides(_located(key[0] + key[1] * np.arange(key[2]), held))
        if len(cuts[key]) > 1:
            broken[row], one = True, tiles.rows(np.array([row]))
            pieces += [trimmed(one.take(0, one.q.length, first, count)) for first, count in cuts[key]]
    if pieces:
        tiles = Tiles.concat([tiles.rows(~broken), *pieces])
    first = _located(tiles.k.slot, held)
    last = _located(tiles.k.slot + (tiles.k.length - 1) * tiles.k.slot_step, held)
    if (short := last - first < tiles.k.length - 1).any():
        raise _not_held(int(tiles.k.slot[short][0]) + 1, held)
    step = np.where(tiles.k.length > 1, (last - first) // np.maximum(tiles.k.length - 1, 1), 1)
    return replace(tiles, k=replace(tiles.k, slot=first, slot_step=step))


def _located(slots: IntArray, held: SlotRanges) -> IntArray:
    """Return the index of each slot in the packed payload; RingPatternError for a slot that it omits."""
    if not len(held):
        raise _not_held(int(slots[0]), held)
    row = np.searchsorted(held[:, 0], slots, side="right") - 1
    outside = (row < 0) | (slots >= held[row, 1])
    if outside.any():
        raise _not_held(int(slots[outside][0]), held)
    return locate_slots(slots, held)


def _not_held(slot: int, held: SlotRanges) -> RingPatternError:
    return RingPatternError(
        f"tiles: expected keys among the {count_slots(held)} slots of the payload, got slot {slot}, which is"
        f" not in {shown(held[:4].tolist())}; the label of a token must depend on its position alone, so look"
        " at the primitives of the pattern"
    )


def _equal_strides(slots: IntArray) -> list[tuple[int, int]]:
    """Cut ascending slots into progressions, each as long as it can be: (index of the first, length)."""
    pieces, first = [], 0
    while first < len(slots):
        stride = np.diff(slots[first:])
        other = np.flatnonzero(stride != stride[:1])  # where the stride changes
        count = int(other[0]) + 1 if len(other) else len(slots) - first
        pieces.append((first, count))
        first += count
    return pieces


@dataclass(frozen=True)
class ReadsOfShards:
    """The slots that every rank reads of every shard of a layout; computed on demand and cached."""

    pattern: Pattern  # bound to the query heads of one K/V head
    layout: Layout
    _reads: dict[int, Reads] = field(default_factory=dict, repr=False, compare=False)
    _slots: dict[tuple[int, int], SlotRanges] = field(default_factory=dict, repr=False, compare=False)

    def slots(self, origin: int, distance: int) -> SlotRanges:
        """Return the slots of a shard that the rank `distance` up the ring reads."""
        key = origin, distance
        if key not in self._slots:
            # Computing a shard's reads makes tiles for all ranks; skip it if the band excludes this reader.
            near = origin in self._reads or self._may_touch(origin, distance)
            self._slots[key] = self._of_shard(origin).at(distance) if near else no_slots()
        return self._slots[key]

    def distances(self, origin: int) -> list[int]:
        """Return the distances up the ring from a shard's origin to its readers, ascending."""
        return np.unique(self._of_shard(origin).distances).tolist()

    def _of_shard(self, origin: int) -> Reads:
        if origin not in self._reads:
            runs = _runs_of_all(self.layout)
            readers = [*runs[origin + 1 :], *runs[:origin]]
            self._reads[origin] = find_reads(self.pattern, readers, runs[origin])
        return self._reads[origin]

    def _may_touch(self, origin: int, distance: int) -> bool:
        """Return False if the band of distances alone shows that the rank reads nothing."""
        least, most = self.pattern.distance
        q_first, q_last = _hull(self.layout, (origin + distance) % self.layout.ring_size)
        k_first, k_last = _hull(self.layout, origin)
        return q_last - k_first >= least and q_first - k_last <= most


@dataclass(frozen=True)
class HeadClass:
    """How all shards travel for one class of K/V heads; [Note: relays and direct sends].

    `prune=False` sends every shard all the way round, also to ranks that do not read it (for comparison).
    """

    reads: ReadsOfShards  # classes that differ only in directions may share it
    kv_heads: slice
    directions: tuple[Direction, ...]
    prune: bool = True
    rounded: bool = False  # dK and dV return in bfloat16; [Note: where gradients are added]
    codec: CodecRow | None = None  # writes K and V that travel; [Note: encoded keys] in `lowering.py`

    @property
    def pattern(self) -> Pattern:
        """Return the pattern, bound to the query heads of one K/V head."""
        return self.reads.pattern

    def held(self, origin: int, direction: Direction, hop: int) -> SlotRanges:
        """Return the slots of a shard that its reader at `hop` holds: those it reads, at hop 0 all slots."""
        if hop == 0 or (not self.prune and 0 < hop <= direction.limit):
            valid = self.reads.layout.valid_tokens(origin)
            return np.array([[0, valid]]) if valid else no_slots()
        if hop > direction.limit:
            return no_slots()
        # Reads are indexed by the distance up the ring, hops by the direction of travel.
        size = self.reads.layout.ring_size
        return self.reads.slots(origin, (direction.reader(origin, hop, size) - origin) % size)

    def relayed(self, origin: int, direction: Direction, hop: int) -> SlotRanges:
        """Return the held slots that the rank before the reader also holds, and therefore passes on to it.

        In stages none are: [Note: stages] in `rank_plan.py`.
        """
        if direction.stages:
            return no_slots()
        before = direction.before(hop)
        return intersect_slots(self.held(origin, direction, hop), self.held(origin, direction, before))

    def sums(self, origin: int, direction: Direction, hop: int) -> SlotRanges:
        """Return the slots for which the rank at `hop` receives a sum of gradients.

        See [Note: where gradients are added]. The owner itself sends no sum: its own part stays on it.
        """
        apart = direction.stages or (self.rounded and not direction.ranks_per_node)
        if hop <= 1 or apart or not direction.is_next(hop):
            return no_slots()
        return self.relayed(origin, direction, hop)

    def _hops(self, origin: int, direction: Direction) -> Iterator[int]:
        """Yield the hops of a direction, from 1 on, at which some rank reads tokens of the shard."""
        if not self.prune:
            yield from range(1, direction.limit + 1)
            return
        size = self.reads.layout.ring_size
        distances = self.reads.distances(origin)
        hops = (direction.hop(origin, (origin + distance) % size, size) for distance in distances)
        yield from (hop for hop in hops if hop <= direction.limit)

    def tokens_sent(self, origin: int) -> int:
        """Return the tokens of one shard that are sent in a forward pass, over all hops, per K/V head."""
        return sum(
            count_slots(self.held(origin, direction, hop))
            for direction in self.directions
            for hop in self._hops(origin, direction)
        )

    def links(self, origin: int) -> int:
        """Return the sum over tokens sent of the links that each crosses: 1 relayed, s sent directly."""
        total = 0
        for direction in self.directions:
            for hop in self._hops(origin, direction):
                relayed = count_slots(self.relayed(origin, direction, hop))
                total += relayed + hop * (count_slots(self.held(origin, direction, hop)) - relayed)
        return total

    def busiest_adapter(self, origins: Iterable[int], ranks_per_node: int) -> int:
        """Return the tokens of some shards that cross between nodes through the busiest network adapters.

        Each rank has one adapter. Those at the same place in every node are counted together.
        """
        size, left = self.reads.layout.ring_size, [0] * ranks_per_node
        ways = ((one, way, hop) for one in origins for way in self.directions for hop in self._hops(one, way))
        for origin, direction, hop in ways:
            node = direction.reader(origin, hop, size) // ranks_per_node
            before = direction.reader(origin, direction.before(hop), size)
            if node == before // ranks_per_node == origin // ranks_per_node:
                continue
            relayed = count_slots(self.relayed(origin, direction, hop))
            left[before % ranks_per_node] += relayed if before // ranks_per_node != node else 0
            if origin // ranks_per_node != node:
                left[origin % ranks_per_node] += count_slots(self.held(origin, direction, hop)) - relayed
        return max(left)

    def tokens_needed(self, origin: int) -> int:
        """Return the minimum traffic for one shard: the number of (token, other rank that reads it) pairs."""
        return sum(count_slots(self.reads.slots(origin, d)) for d in self.reads.distances(origin))

    def rank(self, ring_rank: int) -> HeadClassPlan:
        """Return the plan of one rank."""
        directions = tuple(self._direction(ring_rank, direction) for direction in self.directions)
        return HeadClassPlan(self.kv_heads, directions, max(direction.steps for direction in self.directions))

    def _direction(self, ring_rank: int, direction: Direction) -> DirectionPlan:
        hops = [self._hop_plan(ring_rank, direction, hop) for hop in range(direction.limit + 1)]
        # Remove empty hops at the end only, because the index in the tuple is the hop's number.
        while len(hops) > 1 and hops[-1] is None:
            hops.pop()
        direct_sends, gradient_returns = [], []
        for hop in range(1, direction.limit + 1):
            held = self.held(ring_rank, direction, hop)
            if not len(held):
                continue
            reader = direction.reader(ring_rank, hop, self.reads.layout.ring_size)
            # This rank is the owner: it sends the slots that the rank before the reader does not have.
            leaving = subtract_slots(held, self.relayed(ring_rank, direction, hop))
            if len(leaving):
                direct_sends.append(DirectSend(hop, reader, leaving))
            # Gradients that the reader does not pass on as a sum return to this rank directly.
            ending = subtract_slots(held, self.sums(ring_rank, direction, hop + 1))
            if len(ending):
                gradient_returns.append(GradientReturn(hop, reader, ending))
        messages = tuple(direct_sends), tuple(gradient_returns)
        return DirectionPlan(tuple(hops), *messages, direction, self.rounded, self.codec)

    def _hop_plan(self, ring_rank: int, direction: Direction, hop: int) -> HopPlan | None:
        size, inner = self.reads.layout.ring_size, direction.ranks_per_node
        origin = direction.origin(ring_rank, hop, size)
        held = self.held(origin, direction, hop)
        if hop and not len(held):
            return None
        runs = _runs_of_all(self.reads.layout)
        tiles = self.pattern.tiles(runs[ring_rank], runs[origin])
        # At hop 0 keys are used in place, so the tiles' key slots are slots of the shard already.
        if hop and len(tiles):
            tiles = tiles_of_payload(tiles, held)
        enters = inner > 0 and hop % inner == 0  # the reader is the first rank of its node to get the shard
        none = no_slots()
        return HopPlan(
            hop,
            origin,
            recv_rank=direction.reader(origin, direction.before(hop), size) if hop else ring_rank,
            send_rank=direction.reader(origin, hop + 1, size),
            held=held,
            relayed=self.relayed(origin, direction, hop) if hop else none,
            forward=self.relayed(origin, direction, hop + 1) if direction.is_next(hop + 1) else none,
            inter_node=self.relayed(origin, direction, hop + inner) if enters else none,
            inter_node_to=direction.reader(origin, hop + inner, size),
            grad_recv=self.sums(origin, direction, hop),
            grad_send=self.sums(origin, direction, hop + 1) if hop else none,
            tiles=tiles,
        )


@lru_cache(maxsize=16)
def _runs_of_all(layout: Layout) -> tuple[IntArray, ...]:
    return tuple(layout.runs(rank) for rank in range(layout.ring_size))


@lru_cache(maxsize=1 << 14)
def _hull(layout: Layout, ring_rank: int) -> tuple[int, int]:
    """Return the first and last position of a shard; first > last if the shard is empty."""
    runs = _runs_of_all(layout)[ring_rank]
    if not len(runs):
        # beyond UNBOUNDED, so that no band reaches an empty shard
        return 1 << 62, -(1 << 62)
    return int(runs[:, 0].min()), int((runs[:, 0] + (runs[:, 2] - 1) * runs[:, 1]).max())
