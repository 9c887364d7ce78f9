"""Who reads which tokens of every shard, and who sends them, for one class of heads. Index arithmetic.

A class is the K/V heads whose patterns are equal. Terms: the origin of a shard is the rank that owns it. At
each hop, one rank, the reader, computes with the shard; the slots that it reads are the held slots of the
hop. At hop 0 the reader is the origin, and all slots are held. The relayed slots of a hop are the held slots
that the rank before the reader holds as well.

[Note: relays and direct sends]
In a ring of P ranks with direction d (+1 or -1), rank (o + d * s) mod P computes at hop s with the shard of
rank o. The rank receives only the tokens that it reads (unless the option `prune` is False), and each token
once. So the number of tokens sent is minimal. If the reader at hop s - 1 holds a token that the reader at hop
s reads, the first of the two sends the token to the second (a relay). If not, the origin sends the token to
the reader (a direct send). A direct send does not wait for another message. `Causal` on a contiguous or
zigzag layout has no direct sends.

For LongNet (segments 512, 2048, 8192, rates 1, 2, 4, causal, 8 heads; zigzag) with 16,384 tokens on 8 ranks,
8 % of the tokens are sent directly. If relays carried every token up to the token's last reader, 14 % more
tokens would be sent. If only neighbours are linked, a direct send to the reader at hop s crosses s links. The
number of tokens sent does not depend on the direction. `directions.py` chooses the fewest crossings of links.

[Note: where gradients are added]
The option `gradient_payload` is "float32" by default. Then the sum of a token's dK and dV follows the token's
keys from reader to reader, and each reader adds its own part. A reader returns the sum to the origin if the
next rank does not hold the token, or is in another node. If a later rank reads the token, a second sum begins
at that rank. In stages ([Note: stages] in `rank_plan.py`), each reader returns its own part to the origin.

A sum that is rounded to bfloat16 at every hop has, with 64 ranks, 5.5 to 5.9 times the error of one rank. So
if `gradient_payload` is "bfloat16" in a ring of one level, each reader returns its own part to the origin.
The origin adds the parts in float32. The error is then 1.3 times the error of one rank, for every ring size.
With two levels, sums travel in float32 inside a node, and only messages to the origin are in bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ds_ring.errors import RingPatternError, shown
from ds_ring.masks.joins import trimmed
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import (
    IntArray,
    SlotRanges,
    count_sets,
    count_slots,
    intersect_slots,
    join_sets,
    locate_slots,
    no_slots,
    ranges_by_set,
    split_sets,
    subtract_slots,
)
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.rank_plan import (
    Direction,
    DirectionPlan,
    DirectSend,
    GradientReturn,
    HeadClassPlan,
    HopPlan,
)

OriginAndHop = tuple[int, int]
OriginAndReader = tuple[int, int]


def find_reads(
    pattern: Pattern, reader_runs: Sequence[IntArray], origin_runs: Sequence[IntArray]
) -> dict[tuple[int, int], SlotRanges]:
    """Return the slots that readers read of shards, by (reader, origin): indices into both lists of runs.

    Pairs that read nothing are left out.
    """
    # Make one table for all: the runs of the shards follow one another in its slots.
    (q, q_ends), (k, k_ends) = (_concat_shards(runs) for runs in (reader_runs, origin_runs))
    table = pattern.tiles(q, k)
    reader, origin = (
        np.searchsorted(ends, axis.slot, side="right")
        for ends, axis in ((q_ends, table.q), (k_ends, table.k))
    )
    slot = table.k.slot - np.append(0, k_ends)[origin]
    rows = np.stack([slot, table.k.slot_step, table.k.length], axis=1)
    ranges = ranges_by_set(rows, reader * len(origin_runs) + origin)
    return {divmod(pair, len(origin_runs)): slots for pair, slots in ranges.items()}


def _concat_shards(shards: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Return the runs of several shards as those of one, and the end of each shard in its slots."""
    runs = np.concatenate([np.empty((0, 3), dtype=np.int64), *shards])
    last = np.cumsum([len(shard) for shard in shards], dtype=np.int64)  # the number of runs up to each shard
    return runs, np.append(0, np.cumsum(runs[:, 2]))[last]


def map_tiles_to_payload(tiles: Tiles, held: SlotRanges) -> Tiles:
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
            cuts[key] = _split_progressions(_locate(key[0] + key[1] * np.arange(key[2]), held))
        if len(cuts[key]) > 1:
            broken[row], tile = True, tiles.rows(np.array([row]))
            pieces += [trimmed(tile.take(0, tile.q.length, first, count)) for first, count in cuts[key]]
    if pieces:
        tiles = Tiles.concat([tiles.rows(~broken), *pieces])
    first = _locate(tiles.k.slot, held)
    last = _locate(tiles.k.slot + (tiles.k.length - 1) * tiles.k.slot_step, held)
    if (short := last - first < tiles.k.length - 1).any():
        raise _make_error(int(tiles.k.slot[short][0]) + 1, held)
    step = np.where(tiles.k.length > 1, (last - first) // np.maximum(tiles.k.length - 1, 1), 1)
    return replace(tiles, k=replace(tiles.k, slot=first, slot_step=step))


def _locate(slots: IntArray, held: SlotRanges) -> IntArray:
    """Return the index of each slot in the packed payload; RingPatternError for a slot that it omits."""
    if not len(held):
        raise _make_error(int(slots[0]), held)
    row = np.searchsorted(held[:, 0], slots, side="right") - 1
    outside = (row < 0) | (slots >= held[row, 1])
    if outside.any():
        raise _make_error(int(slots[outside][0]), held)
    return locate_slots(slots, held)


def _make_error(slot: int, held: SlotRanges) -> RingPatternError:
    return RingPatternError(
        f"tiles: expected keys among the {count_slots(held)} slots of the payload, got slot {slot}, which is"
        f" not in {shown(held[:4].tolist())}; the label of a token must depend on its position alone, so look"
        " at the primitives of the pattern"
    )


def _split_progressions(slots: IntArray) -> list[tuple[int, int]]:
    """Cut ascending slots into progressions, each as long as it can be: (index of the first, length)."""
    pieces, first = [], 0
    while first < len(slots):
        stride = np.diff(slots[first:])
        changes = np.flatnonzero(stride != stride[:1])  # where the stride changes
        count = int(changes[0]) + 1 if len(changes) else len(slots) - first
        pieces.append((first, count))
        first += count
    return pieces


@dataclass(frozen=True)
class ReadsOfShards:
    """The slots that every rank reads of every shard of a layout; computed on demand and cached.

    A look-up computes one table of tiles: a rank's queries x all shards, or all ranks' queries x one shard.
    """

    pattern: Pattern  # bound to the query heads of one K/V head
    layout: Layout
    _slots: dict[tuple[int, int], SlotRanges] = field(default_factory=dict, repr=False, compare=False)
    _readers: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)  # by origin
    _origins: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)  # by reader

    @cached_property
    def runs(self) -> tuple[IntArray, ...]:
        """Return the runs of every rank."""
        return tuple(self.layout.runs(rank) for rank in range(self.layout.ring_size))

    @cached_property
    def shards(self) -> tuple[SlotRanges, ...]:
        """Return all slots of every shard."""
        valid = np.diff(_concat_shards(self.runs)[1], prepend=0).tolist()
        return tuple(np.array([[0, tokens]]) if tokens else no_slots() for tokens in valid)

    def slots(self, origin: int, reader: int) -> SlotRanges:
        """Return the slots of a shard that another rank reads."""
        if origin not in self._readers:
            self.origins(reader)
        return self._slots.get((origin, reader), _NONE)

    def origins(self, reader: int) -> list[int]:
        """Return the other ranks of whose shards a rank reads something, ascending."""
        self.find_origins([reader])
        return self._origins[reader]

    def find_origins(self, readers: Iterable[int]) -> None:
        """Compute what several ranks read with one table."""
        self._find_peers(readers, self._origins, True)

    def _find_peers(self, ranks: Iterable[int], table: dict[int, list[int]], are_readers: bool) -> None:
        """Add the origins of several readers to a table, or the readers of several origins."""
        new = [rank for rank in dict.fromkeys(ranks) if rank not in table]
        if not new:
            return
        runs = [self.runs[rank] for rank in new]
        sides = (runs, self.runs) if are_readers else (self.runs, runs)
        peers: dict[int, list[int]] = {rank: [] for rank in new}
        for (first, second), slots in find_reads(self.pattern, *sides).items():
            reader, origin = (new[first], second) if are_readers else (first, new[second])
            if reader != origin:
                self._slots[origin, reader] = slots
                rank, peer = (reader, origin) if are_readers else (origin, reader)
                peers[rank].append(peer)
        table.update(peers)  # whole lists, after their slots: another thread may read them at once

    def find_all(self) -> dict[OriginAndReader, SlotRanges]:
        """Return what all ranks read of the shards of others, by (origin, reader)."""
        self.find_origins(range(self.layout.ring_size))
        return self._slots

    def find_origins_around(self, reader: int) -> None:
        """Compute what a rank reads and what those before and after it do, unless all is known."""
        size = self.layout.ring_size
        if len(self._readers) < size:
            self.find_origins((reader + offset) % size for offset in (-1, 0, 1))

    def readers(self, origin: int) -> list[int]:
        """Return the other ranks that read something of a shard, ascending."""
        self.find_readers([origin])
        return self._readers[origin]

    def find_readers(self, origins: Iterable[int]) -> None:
        """Compute the readers of several shards with one table."""
        self._find_peers(origins, self._readers, False)


_NONE = no_slots()


class Travel(NamedTuple):
    """How some shards travel in one direction: a row for each shard and hop at which it is read."""

    origin: IntArray
    hop: IntArray
    held: IntArray  # number of slots that the reader at the hop holds
    relayed: IntArray  # number of them that the rank before it passes on


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

    @property
    def pattern(self) -> Pattern:
        """Return the pattern, bound to the query heads of one K/V head."""
        return self.reads.pattern

    @property
    def ways(self) -> str:
        """Return how shards travel, as text."""
        if stages := self.directions[0].stages:
            return f"from owner to reader, hops in stages of {', '.join(map(str, (1, *stages)))}"
        return " and ".join("up" if direction.sign > 0 else "down" for direction in self.directions)

    @property
    def _size(self) -> int:
        return self.reads.layout.ring_size

    @cached_property
    def _width(self) -> int:
        """Return a number above every slot.

        Slots of set i (of several hops) are shifted by i times this number, so that sets do not overlap.
        """
        return self.reads.layout.local_tokens + 1

    def unpruned(self, origin: int) -> SlotRanges:
        """Return the slots of a shard that go all the way round where `prune` is False."""
        return self.reads.shards[origin]

    def held(self, origin: int, direction: Direction, hop: int) -> SlotRanges:
        """Return the slots of a shard that its reader at `hop` holds: those it reads, at hop 0 all slots."""
        if hop == 0:
            return self.reads.shards[origin]
        if not self.prune and hop <= direction.limit:
            return self.unpruned(origin)
        if hop > direction.limit:
            return _NONE
        return self.reads.slots(origin, direction.reader(origin, hop, self._size))

    def _find_held(self, origin: int, direction: Direction) -> dict[int, SlotRanges]:
        """Return what is held of a shard at hop 0 and at each hop at which some rank reads tokens of it."""
        shard = self.reads.shards[origin]
        if not self.prune:
            return {0: shard, **dict.fromkeys(range(1, direction.limit + 1), self.unpruned(origin))}
        readers = self.reads.readers(origin)
        hops = direction.hop(origin, np.array(readers, dtype=np.int64), self._size).tolist()
        pairs = sorted(zip(hops, readers, strict=True))
        held = {hop: self.reads.slots(origin, reader) for hop, reader in pairs if hop <= direction.limit}
        return {0: shard, **held}

    def _find_hops(self, reader: int, direction: Direction) -> list[int]:
        """Return the hops of a direction at which a rank holds tokens, hop 0 always."""
        if not self.prune:
            later = range(1, direction.limit + 1)
            origins = [direction.origin(reader, hop, self._size) for hop in later]
            return [
                0,
                *(hop for hop, origin in zip(later, origins, strict=True) if len(self.unpruned(origin))),
            ]
        read = np.array(self.reads.origins(reader), dtype=np.int64)
        hops = np.sort(direction.hop(read, reader, self._size))
        return [0, *hops[hops <= direction.limit].tolist()]

    def _find_shared(self, direction: Direction, held: SlotRanges, near: Sequence[SlotRanges]) -> SlotRanges:
        """Return the held slots that a rank next to each reader, before or after it, also holds.

        One of the two passes them on to the other. `held` has the sets of several hops, joined; `near` those
        of the ranks next to the readers. In stages nothing is passed on, so the result is empty.
        """
        return _NONE if direction.stages else intersect_slots(held, join_sets(near, self._width))

    def _has_sums(self, direction: Direction, hop: int) -> bool:
        """Return whether the rank at `hop` receives sums of the gradients of the tokens relayed to it.

        See [Note: where gradients are added]. The owner itself sends no sum: its own part stays on it.
        """
        apart = direction.stages or (self.rounded and not direction.ranks_per_node)
        return hop > 1 and not apart and direction.is_next(hop)

    def travel(self, origins: Sequence[int], direction: Direction) -> Travel:
        """Return how some shards travel in one direction."""
        if self.prune:
            self.reads.find_readers(origins)
        rows, sets, before = [], list[SlotRanges](), list[SlotRanges]()
        for origin in origins:
            by_hop = self._find_held(origin, direction)
            hops = list(by_hop)[1:]
            rows += [(origin, hop) for hop in hops]
            sets += [by_hop[hop] for hop in hops]
            before += [by_hop.get(direction.before(hop), _NONE) for hop in hops]
        held = join_sets(sets, self._width)
        counts = (
            count_sets(x, self._width, len(rows)) for x in (held, self._find_shared(direction, held, before))
        )
        return Travel(*np.array(rows, dtype=np.int64).reshape(-1, 2).T, *counts)

    def tokens_sent(self, origins: Sequence[int]) -> int:
        """Return the tokens of some shards that are sent in a forward pass, per K/V head."""
        return sum(int(self.travel(origins, direction).held.sum()) for direction in self.directions)

    def tokens_needed(self, origin: int) -> int:
        """Return the minimum traffic for one shard: the number of (token, other rank that reads it) pairs."""
        return sum(count_slots(self.reads.slots(origin, reader)) for reader in self.reads.readers(origin))

    def rank(self, ring_rank: int) -> HeadClassPlan:
        """Return the plan of one rank."""
        if self.prune:
            self.reads.find_origins_around(ring_rank)
        directions = tuple(self._make_direction(ring_rank, direction) for direction in self.directions)
        return HeadClassPlan(self.kv_heads, directions, max(direction.steps for direction in self.directions))

    def _make_direction(self, ring_rank: int, direction: Direction) -> DirectionPlan:
        incoming = self._find_hops(ring_rank, direction)
        plans = self._make_hop_plans(ring_rank, direction, incoming)
        hops: list[HopPlan | None] = [None] * (incoming[-1] + 1)  # the index is the hop's number
        for plan in plans:
            hops[plan.hop] = plan
        # This rank is the owner: it sends the slots that no rank before the reader relays, in stages all.
        # Gradients that the reader does not pass on as a sum return to this rank directly.
        by_hop = self._find_held(ring_rank, direction)
        outgoing = list(by_hop)[1:]
        held = join_sets([by_hop[hop] for hop in outgoing], self._width)
        relayed = self._find_shared(
            direction, held, [by_hop.get(direction.before(hop), _NONE) for hop in outgoing]
        )
        after = [
            by_hop.get(hop + 1, _NONE) if self._has_sums(direction, hop + 1) else _NONE for hop in outgoing
        ]
        sums = self._find_shared(direction, held, after)
        direct_sends, gradient_returns = [], []
        left = (split_sets(subtract_slots(held, x), self._width, len(outgoing)) for x in (relayed, sums))
        for hop, leaving, ending in zip(outgoing, *left, strict=True):
            reader = direction.reader(ring_rank, hop, self._size)
            if len(leaving):
                direct_sends.append(DirectSend(hop, reader, leaving))
            if len(ending):
                gradient_returns.append(GradientReturn(hop, reader, ending))
        messages = tuple(direct_sends), tuple(gradient_returns)
        return DirectionPlan(tuple(hops), *messages, direction, self.rounded)

    def _make_hop_plans(self, ring_rank: int, direction: Direction, hops: list[int]) -> list[HopPlan]:
        """Return the plans of all hops at which a rank holds tokens, computed together."""
        size, inner, width = self._size, direction.ranks_per_node, self._width
        keys = [(direction.origin(ring_rank, hop, size), hop) for hop in hops]
        held = [self.held(origin, direction, hop) for origin, hop in keys]
        joined = join_sets(held, width)

        def shared(neighbour: Callable[[int], int], needed: Callable[[int], bool]) -> list[SlotRanges]:
            """Return the held slots that the reader at another hop also holds, at hops where needed."""
            theirs = [
                self.held(origin, direction, neighbour(hop)) if needed(hop) else _NONE for origin, hop in keys
            ]
            return split_sets(self._find_shared(direction, joined, theirs), width, len(keys))

        came = shared(direction.before, lambda hop: hop > 0)
        forward = shared(lambda hop: hop + 1, lambda hop: direction.is_next(hop + 1))
        # the reader is the first rank of its node to get the shard
        inter_node = shared(lambda hop: hop + inner, lambda hop: inner > 0 and hop % inner == 0)
        tables = self._make_tables(ring_rank, keys, held)
        return [
            HopPlan(
                hop,
                origin,
                recv_rank=direction.reader(origin, direction.before(hop), size) if hop else ring_rank,
                send_rank=direction.reader(origin, hop + 1, size),
                held=held[index],
                relayed=came[index],
                forward=forward[index],
                inter_node=inter_node[index],
                inter_node_to=direction.reader(origin, hop + inner, size),
                grad_recv=came[index] if self._has_sums(direction, hop) else _NONE,
                grad_send=forward[index] if hop and self._has_sums(direction, hop + 1) else _NONE,
                tiles=tables[index],
            )
            for index, (origin, hop) in enumerate(keys)
        ]

    def _make_tables(
        self, ring_rank: int, keys: Sequence[OriginAndHop], held: list[SlotRanges]
    ) -> list[Tiles]:
        """Return the tiles of a rank with the shard of every hop; key slots index the hop's payload."""
        runs, ends = _concat_shards([self.reads.runs[origin] for origin, _ in keys])
        tiles = self.pattern.tiles(self.reads.runs[ring_rank], runs)
        hop = np.searchsorted(ends, tiles.k.slot, side="right")
        # At hop 0 keys are used in place: the tiles' key slots are slots of the shard already.
        own_tiles, tiles, hop = tiles.rows(hop == 0), tiles.rows(hop > 0), hop[hop > 0]
        if not len(tiles):
            return [own_tiles, *([tiles] * (len(keys) - 1))]
        # Payloads follow one another as the shards do.
        begins, counts = [0, *ends.tolist()], [count_slots(slots) for slots in held]
        every = [slots + begin for slots, begin in zip(held, begins, strict=False)]
        tiles = map_tiles_to_payload(tiles, np.concatenate(every))
        ends = np.cumsum(counts)
        hop = np.searchsorted(ends, tiles.k.slot, side="right")
        tiles = replace(tiles, k=replace(tiles.k, slot=tiles.k.slot - (ends - counts)[hop]))
        order = np.argsort(hop, kind="stable")
        tiles, bounds = tiles.rows(order), np.searchsorted(hop[order], np.arange(1, len(keys) + 1)).tolist()
        return [own_tiles, *(tiles.rows(slice(*pair)) for pair in itertools.pairwise(bounds))]
