"""What a pass as a whole has done: every pair of the mask computed once, every gradient returned once.

Owns the comparison of what the ranks compute with the plan's pattern and layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ds_ring.errors import RingScheduleError
from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import Axis, Tiles
from ds_ring.schedule.plan import Plan
from ds_ring.schedule.steps import SHARD, Compute, Schedule
from tests.schedule_proof.symbolic import ORIGIN_BITS, SymbolicRank

SLOT = (1 << ORIGIN_BITS) - 1  # of a token's number


class Coverage:
    """Record what was computed so far.

    Args:
        plan: the expected work.
        schedules: of all ranks.
    """

    def __init__(self, plan: Plan, schedules: Sequence[Schedule]) -> None:
        self.layout, self.group = plan.layout, plan.group
        self.backward = schedules[0].backward
        chunks = schedules[0].chunks
        classes = [
            next(
                i
                for i, head_class in enumerate(plan.classes)
                if chunk.kv_heads.start in heads_of(head_class.kv_heads)
            )
            for chunk in chunks
        ]
        due = {
            (rank, which): _pairs_due(plan, rank, which)
            for rank in range(len(schedules))
            for which in set(classes)
        }
        # by ring rank and chunk: int64 [ring_size], pairs still due with the keys of each rank
        self.left = {
            (rank, index): due[rank, which].copy()
            for rank in range(len(schedules))
            for index, which in enumerate(classes)
        }
        words = -(-len(schedules) // 64)
        self.readers = {  # by chunk and owner: one bit for each rank that has computed with a token
            (index, owner): np.zeros((schedule.chunks[index].steps.buffers[SHARD].slots, words), np.uint64)
            for index in range(len(chunks))
            for owner, schedule in enumerate(schedules)
        }
        self._positions = lru_cache(maxsize=len(schedules))(self.layout.positions)

    def computed(self, rank: SymbolicRank, index: int, step: Compute, tokens: IntArray) -> None:
        """Take note of a step that reads a buffer with these tokens.

        Raises:
            RingScheduleError: tiles that are not about these tokens, or pairs that were computed before.
        """
        tiles = step.tiles
        if len(tokens):
            # all tokens of the buffer, whether a tile reads them or not: dK and dV are made for all of them
            word, bit = rank.rank // 64, np.uint64(1) << np.uint64(rank.rank % 64)
            for origin in step.origins:
                self.readers[index, origin][tokens[tokens >> ORIGIN_BITS == origin] & SLOT, word] |= bit
        if not len(tiles):
            return
        k_slots, k_positions = _members(tiles.k)
        if k_slots.max() >= len(tokens):
            rank.refuse(f"tiles over {len(tokens)} keys", f"key slot {int(k_slots.max())}")
        for origin in step.origins:
            there = tokens[k_slots] >> ORIGIN_BITS == origin
            if (self._positions(origin)[tokens[k_slots[there]] & SLOT] != k_positions[there]).any():
                rank.refuse(
                    "tiles over the keys that are in the buffer", "tiles over keys of other positions"
                )
        q_slots, q_positions = _members(tiles.q)
        if (self._positions(rank.rank)[q_slots] != q_positions).any():
            rank.refuse("tiles over the queries of this rank", "tiles over queries of other positions")
        left, owner = self.left[rank.rank, index], tokens[tiles.k.slot] >> ORIGIN_BITS
        if (tokens[tiles.k.slot + tiles.k.slot_step * (tiles.k.length - 1)] >> ORIGIN_BITS != owner).any():
            rank.refuse("tiles over keys of one rank each", "a tile over keys of two")
        for origin in step.origins:
            pairs = _pairs(tiles, self.group)[owner == origin].sum()
            if pairs > left[origin]:
                text = f"{pairs} pairs: some are computed twice"
                rank.refuse(f"at most {left[origin]} pairs with keys of ring rank {origin}", text)
            left[origin] -= pairs

    def check(self, ranks: Sequence[SymbolicRank]) -> None:
        """Refuse pairs that no rank computed and gradients that did not return."""
        for (rank, index), left in self.left.items():
            if left.any():
                owner = int(np.flatnonzero(left)[0])
                expected = f"head chunk {index} to compute every pair with keys of ring rank {owner}"
                raise RingScheduleError(rank, None, "", expected, f"{left[owner]} pairs left")
        for one in ranks if self.backward else ():
            for index, home in one.homes.items():
                assert home.added is not None
                # ranks that computed with a token and whose part is not in its gradient
                missing = self.readers[index, one.rank] & ~home.added
                if missing.any():
                    row, word = np.argwhere(missing)[0].tolist()
                    reader = 64 * word + int(missing[row, word]).bit_length() - 1
                    expected = f"gradients of all readers of head chunk {index} to return"
                    got = f"none of ring rank {reader} for {int((missing[:, word] != 0).sum())} tokens"
                    raise RingScheduleError(one.rank, None, "", expected, got)


def heads_of(heads: slice) -> range:
    """Return the numbers of the heads of a slice."""
    return range(heads.start, heads.stop, heads.step or 1)


def _pairs(tiles: Tiles, group: int) -> IntArray:
    """Return pairs of every tile over the query heads that share a K/V head."""
    return tiles.pairs * np.where(tiles.head_in_group < 0, group, 1)


def _pairs_due(plan: Plan, rank: int, which: int) -> IntArray:
    """Return the pairs of a rank's queries with the keys of every rank; int64 [ring_size]."""
    runs = [plan.layout.runs(owner) for owner in range(plan.ring_size)]
    tiles = plan.classes[which].pattern.tiles(runs[rank], np.concatenate(runs))
    # key slots count the real tokens of all shards, one shard after the other
    ends = np.cumsum([int(run[:, 2].sum()) for run in runs])
    owners = np.searchsorted(ends, tiles.k.slot, side="right")
    due = np.zeros(plan.ring_size, dtype=np.int64)
    np.add.at(due, owners, _pairs(tiles, plan.group))
    return due


def _members(axis: Axis) -> tuple[IntArray, IntArray]:
    """Return slot and position of every token of every tile."""
    row, number = repeat_rows(axis.length)
    slots = axis.slot[row] + number * axis.slot_step[row]
    return slots, axis.position[row] + number * axis.position_step[row]
