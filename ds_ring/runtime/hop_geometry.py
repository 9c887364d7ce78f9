"""Decide which hops can share FlexAttention's tables, and make the tokens of these tables.

Owns the comparison of hops by geometry, and positions and labels on the device. A causal zigzag ring has
three geometries, whatever its size: the own shard, half of the keys and half of the queries.

[Note: hops that share a table]
Hops in which all pairs are attended share one table, whatever their positions. If a mask depends on distances
only, two hops share a table if one equals the other after a shift of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.masks.branches import Branch
from ds_ring.masks.partitions import NO_LABEL, Partition
from ds_ring.masks.pattern import BoundPattern
from ds_ring.masks.slot_ranges import IntArray
from ds_ring.masks.tiles import Axis, Kind, Tiles
from ds_ring.runtime.to_device import to_device

FARTHEST = (1 << 31) - 1  # positions are int32 on the device, and so are distances
FEW_RUNS = 32  # for a side of at most this many runs, positions are computed on the device, run by run


@dataclass(frozen=True)
class Side:
    """The runs (arithmetic progressions of tokens) of one side of a hop.

    Attributes:
        first: first slot, a multiple of the block.
        length: number of slots from there on.
        runs: the distinct runs, int64 [n, 5] of (slot, slot step, position, position step, length).
    """

    first: int
    length: int
    runs: IntArray

    @property
    def covered(self) -> int:
        """Return the number of tokens in the runs."""
        return int(self.runs[:, 4].sum())

    def slots(self) -> IntArray:
        """Return (slot, step, length) of the covered slots; adjacent runs are joined."""
        slots = self.runs[:, [0, 1, 4]]
        if not (slots[:, 1] == 1).all():
            return slots
        begins = np.append(True, slots[1:, 0] != slots[:-1, 0] + slots[:-1, 2])
        return np.stack([slots[begins, 0], np.add.reduceat(slots[:, 2], np.flatnonzero(begins))], axis=1)

    def positions(self, device: torch.device) -> Tensor:
        """Return the position of each slot, int32 [length]; -1 for slots that no run covers."""
        if len(self.runs) > FEW_RUNS:
            return to_device(torch.from_numpy(self.host_positions().astype(np.int32)), device)
        found = torch.full((self.length,), -1, dtype=torch.int32, device=device)
        for slot, slot_step, position, step, length in self.runs.tolist():
            at = slot - self.first
            there = found[at : at + (length - 1) * slot_step + 1 : slot_step]
            torch.arange(position, position + length * step, step, dtype=torch.int32, out=there)
        return found

    def host_positions(self) -> IntArray:
        """Return the same as `positions`, in numpy, int64."""
        found = np.full(self.length, -1, dtype=np.int64)
        slot, slot_step, position, step, length = self.runs.T
        row = np.repeat(np.arange(len(length)), length)
        within = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
        found[slot[row] - self.first + slot_step[row] * within] = position[row] + step[row] * within
        return found


@dataclass(frozen=True, eq=False)
class Geometry:
    """The data from which the tables of a hop are made.

    Attributes:
        key: hashable; equal for hops whose tables are equal.
        q, k: the two sides.
        rule: the pattern.
        all_full: True if every covered query attends to every covered key once; then positions do not matter.
    """

    key: tuple[Any, ...]
    q: Side
    k: Side
    rule: BoundPattern
    all_full: bool

    @property
    def heads(self) -> int:
        """Return the number of query heads of a group that need tables of their own."""
        return len(self.rule.branches_by_head)

    def tokens(self, device: torch.device) -> tuple[tuple[Tensor, tuple[Tensor, ...]], ...]:
        """Return positions and labels of queries and keys, in the form of `block_mask.Tokens`."""
        rule = self.rule
        positions = [side.positions(device) for side in (self.q, self.k)]
        labels: list[tuple[Tensor, ...]]
        if self.all_full:
            labels = [_one_label(x, rule) for x in positions]
            return tuple(zip([torch.zeros_like(x) for x in positions], labels, strict=True))
        if any(branch.labels_of for branches in rule.branches_by_head for branch in branches):
            labels = self._labels(device)
        else:
            labels = [_ranges(x, rule, side) for x, side in zip(positions, ("queries", "keys"), strict=True)]
        return tuple(zip([x.clamp_(min=0) for x in positions], labels, strict=True))

    def _labels(self, device: torch.device) -> list[tuple[Tensor, ...]]:
        """Return the labels that primitives give, for both sides in one numbering."""
        hosts = [side.host_positions() for side in (self.q, self.k)]
        # Slots that no tile covers (-1) are labelled as position 0 first; their labels are removed below.
        found = self.rule.labels(*(np.maximum(x, 0) for x in hosts))
        labels = []
        for host, part in zip(hosts, found, strict=True):
            table = np.where(host < 0, NO_LABEL, part).astype(np.int32)
            # One tensor each: views of one tensor differ in storage offset, for which flex would recompile.
            by_branch = (np.ascontiguousarray(one) for one in table.transpose(1, 0, 2))
            # In numpy a dimension of size one may have any stride, and flex would recompile for each.
            rows = (torch.from_numpy(one).flatten().view(one.shape) for one in by_branch)
            labels.append(tuple(to_device(one, device) for one in rows))
        return labels


def _one_label(positions: Tensor, rule: BoundPattern) -> tuple[Tensor, ...]:
    """Return one label for all covered tokens in the first branch, and no label in the other branches."""
    label = torch.where(positions >= 0, 0, NO_LABEL).to(torch.int32)
    shape = (len(rule.branches_by_head), len(positions))
    others = (label.new_full(shape, NO_LABEL) for _ in rule.branches_by_head[0][1:])
    return (label.expand(shape).contiguous(), *others)


def _ranges(positions: Tensor, rule: BoundPattern, side: str) -> tuple[Tensor, ...]:
    """Return the labels of branches that have only ranges of positions, int32 [heads, n] each."""

    def one(branch: Branch) -> Tensor:
        partition: Partition = getattr(branch, side)
        held = (positions >= max(partition.first, 0)) & (positions < min(partition.end, FARTHEST))
        return torch.where(held, 0, NO_LABEL).to(torch.int32)

    by_branch = zip(*rule.branches_by_head, strict=True)
    return tuple(torch.stack([one(branch) for branch in branches]) for branches in by_branch)


def geometry_of(tiles: Tiles, block: int, shortest: int, slots: int, positions_matter: bool) -> Geometry:
    """Return the geometry of a hop; arguments as in `block_mask.hop_mask`."""
    rule = tiles.rule
    assert len(tiles) and rule is not None, "flex: tiles that are empty, or cut from no rule"
    q, k = _side(tiles.q, block, shortest, slots), _side(tiles.k, block, shortest=2)
    farthest = max(int((x.runs[:, 2] + (x.runs[:, 4] - 1) * x.runs[:, 3]).max()) for x in (q, k))
    assert farthest <= FARTHEST, f"position {farthest} does not fit into 32 bits"
    all_branches = [branch for one in rule.branches_by_head for branch in one]
    masks = any(branch.masks for branch in all_branches)
    all_full = not (masks or positions_matter) and _is_all_full(tiles, q, k)
    if all_full:
        branches = len(rule.branches_by_head[0])
        shape = (len(rule.branches_by_head), branches, len(rule.bands), rule.counts_twice)
        what: tuple[Any, ...] = ("full", shape, *(x.slots().tobytes() for x in (q, k)))
    else:
        kept = masks or positions_matter or any(not _anywhere(branch) for branch in all_branches)
        # If only distances matter, subtract the first position, so that shifted hops are equal.
        start = 0 if kept else int(min(q.runs[:, 2].min(), k.runs[:, 2].min()))
        runs = (x.runs - np.array([0, 0, start, 0, 0]) for x in (q, k))
        what = ("rule", rule, positions_matter, *(x.tobytes() for x in runs))
    return Geometry((*what, q.first, q.length, k.first, k.length), q, k, rule, all_full)


def _anywhere(branch: Branch) -> bool:
    """Return whether a branch depends on distances only."""
    return branch.queries.is_everywhere and branch.keys.is_everywhere and not branch.labels_of


def _is_all_full(tiles: Tiles, q: Side, k: Side) -> bool:
    plain = (tiles.kind == Kind.FULL) & (tiles.multiplicity == 1) & (tiles.weight < 0)
    plain &= tiles.head_in_group < 0
    return bool(plain.all()) and int(tiles.pairs.sum()) == q.covered * k.covered


def _side(axis: Axis, block: int, shortest: int = 0, slots: int = 0) -> Side:
    """Return the distinct runs of one side of a hop, and the range of slots that they cover."""
    columns = (axis.slot, axis.slot_step, axis.position, axis.position_step, axis.length)
    # Several tiles have the same run, so keep each distinct run once.
    runs = np.unique(np.stack(columns, axis=1), axis=0)
    slot, slot_step, _, _, length = runs.T
    first = int(slot.min()) // block * block
    # A smaller number of slots would make Inductor recompile, so begin earlier or end later.
    if slots:
        first = min(first, (slots - shortest) // block * block)
    end = max(int((slot + (length - 1) * slot_step).max()) + 1, first + shortest)
    return Side(first, end - first, runs)
