"""What FlexAttention reads of a hop: tables of the blocks to visit, and a position and labels of each token.

The mask inside a block is evaluated from the branches that the tiles were cut from (`masks/branches.py`).
Tokens that no tile covers have no label and are not attended. Tables are kept on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.device_tables import ByteLRU, leave_inference_mode, to_device
from ds_ring.comm.streams import active_fake_mode
from ds_ring.kernels.flex.blocks import BlockIntervals, find_block_intervals
from ds_ring.kernels.flex.workspace import KEPT_TABLE_BYTES
from ds_ring.masks.branches import NO_LABEL, Partition
from ds_ring.masks.pair_masks import MaskFunction
from ds_ring.masks.pattern import SMALL_BYTES, BoundPattern
from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import Axis, Tiles

# [Note: hops that share a table]
# Hops in which all pairs are attended share one table at all positions. If a mask depends on
# distances only, two hops share a table if one equals the other after a shift of positions. A causal zigzag
# ring of any size has three such geometries: the own shard, half of the keys and half of the queries.

FARTHEST = (1 << 31) - 1  # positions are int32 on the device, and so are distances
FEW_RUNS = 32  # for a side of at most this many runs, positions are computed on the device, run by run


@dataclass(frozen=True)
class SideRuns:
    """The runs of one side of a hop, in `length` slots from `first` on, which is a multiple of the block.

    The distinct runs are int64 [n, 5] of (slot, slot step, position, position step, length).
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
        positions = torch.full((self.length,), -1, dtype=torch.int32, device=device)
        for slot, slot_step, position, step, length in self.runs.tolist():
            at = slot - self.first
            there = positions[at : at + (length - 1) * slot_step + 1 : slot_step]
            torch.arange(
                position, position + length * step, step, dtype=torch.int32, out=there, device=there.device
            )
        return positions

    def host_positions(self) -> IntArray:
        """Return the same as `positions`, in numpy, int64."""
        positions = np.full(self.length, -1, dtype=np.int64)
        slot, slot_step, position, step, length = self.runs.T
        row = np.repeat(np.arange(len(length)), length)
        within = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
        positions[slot[row] - self.first + slot_step[row] * within] = position[row] + step[row] * within
        return positions


@dataclass(frozen=True, eq=False)
class HopGeometry:
    """The data from which the tables of a hop are made; equal for hops of equal keys.

    If `all_full`, every covered query attends to every covered key once; then positions do not matter.
    """

    key: tuple[Any, ...]
    q: SideRuns
    k: SideRuns
    rule: BoundPattern
    all_full: bool

    @property
    def heads(self) -> int:
        """Return the number of query heads of a group that need tables of their own."""
        return len(self.rule.branches_by_head)

    def tokens(self, device: torch.device) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """Return positions and labels of queries and keys, in the form of `Tokens`."""
        positions = [side.positions(device) for side in (self.q, self.k)]
        by_head = self.rule.branches_by_head
        if self.all_full:
            labels = [self._make_one_label(x) for x in positions]
            positions = [torch.zeros_like(x) for x in positions]
        elif any(branch.compared_labels for branches in by_head for branch in branches):
            labels = self._make_labels(device)
        else:  # ranges of positions alone
            labels = [
                tuple(
                    torch.stack([_label_partition(getattr(branch, side), x) for branch in branches])
                    for branches in zip(*by_head, strict=True)
                )
                for side, x in zip(("queries", "keys"), positions, strict=True)
            ]
        return zip([x.clamp_(min=0) for x in positions], labels, strict=True)

    def _make_one_label(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return one label for all covered tokens in the first branch, and no label in the other branches."""
        label = torch.where(positions >= 0, 0, NO_LABEL).to(torch.int32)
        shape = (self.heads, len(positions))
        others = (label.new_full(shape, NO_LABEL) for _ in self.rule.branches_by_head[0][1:])
        return (label.expand(shape).contiguous(), *others)

    def _make_labels(self, device: torch.device) -> list[tuple[Tensor, ...]]:
        """Return the labels that primitives give, for both sides in one numbering."""
        hosts = [side.host_positions() for side in (self.q, self.k)]
        # Slots that no tile covers (-1) are labelled as position 0 first; their labels are removed below.
        tables = self.rule.labels(*(np.maximum(x, 0) for x in hosts))
        labels = []
        for host, part in zip(hosts, tables, strict=True):
            table = np.where(host < 0, NO_LABEL, part).astype(np.int32)
            # One tensor each: views of one tensor differ in storage offset, for which flex would recompile.
            by_branch = (
                np.ascontiguousarray(labels_of_branch) for labels_of_branch in table.transpose(1, 0, 2)
            )
            # In numpy a dimension of size one may have any stride, and flex would recompile for each.
            rows = (torch.from_numpy(row).flatten().view(row.shape) for row in by_branch)
            labels.append(tuple(to_device(row, device) for row in rows))
        return labels


def _label_partition(partition: Partition, positions: Tensor) -> Tensor:
    """Return label 0 for the positions that a branch of ranges alone has on a side, int32."""
    held = (positions >= max(partition.first, 0)) & (positions < min(partition.end, FARTHEST))
    return torch.where(held, 0, NO_LABEL).to(torch.int32)


def make_geometry(tiles: Tiles, block: int, shortest: int, slots: int, positions_matter: bool) -> HopGeometry:
    """Return the geometry of a hop; arguments as in `HopMasks.get`."""
    rule = tiles.rule
    assert len(tiles) and rule is not None, "flex: tiles that are empty, or cut from no rule"
    q, k = _find_side(tiles.q, block, shortest, slots), _find_side(tiles.k, block, shortest=2)
    farthest = max(int((x.runs[:, 2] + (x.runs[:, 4] - 1) * x.runs[:, 3]).max()) for x in (q, k))
    assert farthest <= FARTHEST, f"position {farthest} does not fit into 32 bits"
    all_branches = [branch for branches in rule.branches_by_head for branch in branches]
    masks = any(branch.masks for branch in all_branches)
    plain = (tiles.edges == 0) & (tiles.multiplicity == 1) & (tiles.weight < 0)
    plain &= ~tiles.is_masked & (tiles.head_in_group < 0)
    all_full = not (masks or positions_matter) and bool(plain.all())
    all_full = all_full and int(tiles.pairs.sum()) == q.covered * k.covered
    if all_full:
        branches = len(rule.branches_by_head[0])
        shape = (len(rule.branches_by_head), branches, len(rule.bands), rule.counts_twice)
        what: tuple[Any, ...] = ("full", shape, *(x.slots().tobytes() for x in (q, k)))
    else:
        bands = (
            masks
            or positions_matter
            or not all(
                branch.queries.is_everywhere and branch.keys.is_everywhere and not branch.compared_labels
                for branch in all_branches
            )
        )
        # If only distances matter, subtract the first position, so that shifted hops are equal.
        start = 0 if bands else int(min(q.runs[:, 2].min(), k.runs[:, 2].min()))
        runs = (x.runs - np.array([0, 0, start, 0, 0]) for x in (q, k))
        what = ("rule", rule, positions_matter, *(x.tobytes() for x in runs))
    return HopGeometry((*what, q.first, q.length, k.first, k.length), q, k, rule, all_full)


def _find_side(axis: Axis, block: int, shortest: int = 0, slots: int = 0) -> SideRuns:
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
    return SideRuns(first, end - first, runs)


TABLE_BYTES = 8 << 20  # of a hop's four tables of blocks: above it blocks of twice the side are taken
FEW_INTERVALS = 8  # of blocks in a row: up to here rows are written on the device


class BlockTable(NamedTuple):
    """Hold blocks row by row: how many int32 [1, heads, rows], which int32 [1, heads, rows, widest]."""

    counts: Tensor
    blocks: Tensor


class Tokens(NamedTuple):
    """Hold the queries or the keys of a hop, from the first block a tile touches to the last slot of one.

    The position of a slot that no tile covers is 0, int32 [n]; no label, int32 [heads, n] a branch, is -1.
    """

    position: Tensor
    labels: tuple[Tensor, ...]


class BandTensors(NamedTuple):
    """Hold the bounds of query position - key position of a branch, int32 0-d, and its masks of pairs."""

    least: Tensor
    most: Tensor
    functions: tuple[MaskFunction, ...]


class HopTensors(NamedTuple):
    """Hold one hop on the device: all that a compiled function needs of it, without a number that varies.

    Attributes:
        q, k: its tokens.
        bands: one for all branches where they have the same, else one for each.
        partial_rows, full_rows: key blocks of each query block, with a mask inside and without.
        partial_columns, full_columns: query blocks of each key block.
        head_numbers: of the query heads of a group, for masks that differ by head; int64 [heads], else [0].
        counts_twice: some pair may have m > 1; Python, the same for every hop.
    """

    q: Tokens
    k: Tokens
    bands: tuple[BandTensors, ...]
    partial_rows: BlockTable
    full_rows: BlockTable
    partial_columns: BlockTable
    full_columns: BlockTable
    head_numbers: Tensor
    counts_twice: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tables on the device."""
        tables = (self.partial_rows, self.full_rows, self.partial_columns, self.full_columns)
        tokens = (x for side in (self.q, self.k) for x in (side.position, *side.labels))
        return sum(x.nbytes for table in tables for x in table) + sum(x.nbytes for x in tokens)


class HopMask(NamedTuple):
    """Hold one hop: first slots and numbers of slots in the local tensors, its tensors, a block's side."""

    q_rows: tuple[int, int]
    k_rows: tuple[int, int]
    tensors: HopTensors
    block: int


class TableOptions(NamedTuple):
    """The options of the tables of a hop.

    Attributes:
        block: side of a block in slots; see [Note: how large tables are].
        device: of the tables.
        shortest: least number of query rows of the tables; `slots`: number of queries.
        positions_matter: a score_mod reads positions, too.
    """

    block: int
    device: torch.device
    shortest: int = 0
    slots: int = 0
    positions_matter: bool = False


@dataclass
class _Known:
    """Hold a hop's geometry, and the side of its blocks once its tables were made.

    `masks` are those of a pattern that captured much memory, by fake mode: no other table shares them.
    """

    geometry: HopGeometry
    side: int | None = None
    masks: dict[Any, HopMask] = field(default_factory=dict)


class HopMasks:
    """Cache the masks of hops of a kernel; hops of one geometry share theirs."""

    def __init__(self, max_bytes: int = KEPT_TABLE_BYTES) -> None:
        self.by_geometry: ByteLRU[HopMask] = ByteLRU(max_bytes)
        # Properties by the tiles of a plan, so that a warm pass reads no row of them.
        self._known = weakref.WeakKeyDictionary[Tiles, dict[TableOptions, _Known]]()

    def get(
        self, tiles: Tiles, block: int, device: torch.device, shortest: int = 0, slots: int = 0,
        positions_matter: bool = False,
    ) -> HopMask:  # fmt: skip
        """Return the mask of a table of tiles (not empty, with a rule).

        The other arguments are those of `TableOptions`.
        """
        options = TableOptions(block, device, shortest, slots, positions_matter)
        of_tiles = self._known.setdefault(tiles, {})
        if options not in of_tiles:
            of_tiles[options] = _Known(make_geometry(tiles, block, *options[2:]))
        known = of_tiles[options]
        key = (known.geometry.key, block, device, active_fake_mode())
        is_large = known.geometry.rule.captured_bytes > SMALL_BYTES
        masks = known.masks.get(key[-1]) if is_large else self.by_geometry.get(key)
        if masks is None:
            masks = _build(known.geometry, tiles, block, device)
            if is_large:
                known.masks[key[-1]] = masks
            else:
                self.by_geometry.add(key, masks, masks.tensors.nbytes)
        known.side = masks.block
        return masks

    def side_beforehand(self, tiles: Tiles, options: TableOptions, keys: int) -> int | None:
        """Return the side of a hop's blocks; None if it depends on tables not made yet. `keys`: slots."""
        assert tiles.rule is not None
        # Tables of hops of at most so many slots fit with every pattern, so their blocks stay.
        rows, columns = (max(-(-slots // options.block), 2) for slots in (options.slots, keys))
        heads = len(tiles.rule.branches_by_head)
        if 4 * heads * 2 * (rows * (columns + 1) + columns * (rows + 1)) <= TABLE_BYTES:
            return options.block
        known = self._known.get(tiles, {}).get(options)
        return None if known is None else known.side


# [Note: how large tables are]
# A table of blocks grows with the square of the shard. Blocks of twice the side make it a quarter as large,
# and add half a block of masked pairs to a row of thousands of blocks. So blocks grow until the
# tables of a hop fit TABLE_BYTES: causal zigzag on 64 shards of 256 Ki tokens takes 6 to 7 MiB a hop, for
# three geometries, each made in 10 to 20 ms. Tables of narrow patterns are small at any length, and keep
# their blocks.
@leave_inference_mode
def _build(geometry: HopGeometry, tiles: Tiles, block: int, device: torch.device) -> HopMask:
    q, k = geometry.q, geometry.k
    # Blocks are counted from the first one that a tile touches, as `_part` in kernel.py cuts the tensors.
    axes = ((tiles.q, q.first), (tiles.k, k.first))
    q_axis, k_axis = (replace(axis, slot=axis.slot - first) for axis, first in axes)
    shifted = replace(tiles, q=q_axis, k=k_axis)
    by_head = [shifted.for_head(head_in_group) for head_in_group in range(geometry.heads)]
    while True:
        rows = [find_block_intervals(blocks_by_head, block) for blocks_by_head in by_head]
        columns = [find_block_intervals(blocks_by_head, block, by_key=True) for blocks_by_head in by_head]
        sizes = tuple(-(-side.length // block) for side in (q, k))
        plans = [
            plan
            for by_side, size in ((rows, sizes[0]), (columns, sizes[1]))
            for plan in _make_plan_pair(by_side, size)
        ]
        if sum(plan.nbytes for plan in plans) <= TABLE_BYTES:
            break
        block *= 2
    partial_rows, full_rows, partial_columns, full_columns = (
        plan.on(device, limit) for plan, limit in zip(plans, (sizes[1],) * 2 + (sizes[0],) * 2, strict=True)
    )
    q_tokens, k_tokens = (Tokens(*tokens) for tokens in geometry.tokens(device))
    tensors = HopTensors(
        q_tokens,
        k_tokens,
        _make_bands(geometry, device),
        partial_rows,
        full_rows,
        partial_columns,
        full_columns,
        to_device(torch.tensor(geometry.rule.mask_heads, dtype=torch.int64, device="cpu"), device),
        geometry.rule.counts_twice,
    )
    return HopMask((q.first, q.length), (k.first, k.length), tensors, block)


def _make_bands(geometry: HopGeometry, device: torch.device) -> tuple[BandTensors, ...]:
    """Return the distances and masks of the branches; see `BandTensors`."""
    bands = []
    for *bounds, masks in geometry.rule.bands:
        # No distance is beyond these, so a bound that is none stays without effect.
        limits = (-FARTHEST, FARTHEST) if geometry.all_full else bounds
        clipped = (max(-FARTHEST, min(bound, FARTHEST)) for bound in limits)
        least, most = (torch.full((), x, dtype=torch.int32, device=device) for x in clipped)
        bands.append(BandTensors(least, most, tuple(mask.function(device) for mask in masks)))
    return tuple(bands)


# [Note: tables of blocks]
# `BlockMask.from_kv_blocks` is not used: it turns the rows into columns through a dense table of all (n /
# B)^2 blocks. Both directions are made from intervals here, trimmed to the widest row. No side of a table is
# below 2: torch.compile takes a size of 1 for a constant and would compile again. The intervals are a few
# numbers a row; the table is written from them on the device, and nothing is read back.
#
# The partial and the full table of a side have one shape: kernels of torch before 2.12.1 read the full table
# with the strides of the partial one, so with two widths they would read other blocks, or beyond the table.
class _TablePlan(NamedTuple):
    """Hold the intervals of all heads' rows, and how large their table is; [Note: tables of blocks].

    Rows are counted over all heads; `counts` has the blocks of each, int64 [heads * rows].
    """

    heads: int
    rows: int
    width: int
    intervals: BlockIntervals
    counts: np.ndarray

    @classmethod
    def from_intervals(cls, by_head: list[BlockIntervals], rows: int) -> _TablePlan:
        rows = max(rows, 2)
        heads = len(by_head)
        row = np.concatenate([intervals.row + head * rows for head, intervals in enumerate(by_head)])
        first, end = (np.concatenate([intervals[part] for intervals in by_head]) for part in (1, 2))
        count = np.bincount(row, weights=end - first, minlength=heads * rows).astype(np.int64)
        return cls(heads, rows, max(int(count.max()), 2), BlockIntervals(row, first, end), count)

    @property
    def nbytes(self) -> int:
        return 4 * self.heads * self.rows * (self.width + 1)

    def on(self, device: torch.device, blocks: int) -> BlockTable:
        """Write the table; the numbers of its blocks are below `blocks`."""
        row, first, end = self.intervals
        length = end - first
        # Number of each interval in its row, and of its first block.
        start = np.searchsorted(row, np.arange(self.heads * self.rows))
        number = np.arange(len(row)) - start[row]
        place = np.cumsum(length) - length
        place -= (np.cumsum(self.counts) - self.counts)[row]
        most = int(number.max(initial=0)) + 1
        if most <= FEW_INTERVALS:
            index = self._write_rows(device, number, place, first - place, most, blocks)
        else:
            host = np.zeros((self.heads * self.rows, self.width), dtype=np.int32)
            which, within = repeat_rows(length)
            host[row[which], place[which] + within] = first[which] + within
            index = to_device(torch.from_numpy(host), device)
        counts = to_device(torch.from_numpy(self.counts.astype(np.int32)), device)
        return BlockTable(
            counts.view(1, self.heads, self.rows), index.view(1, self.heads, self.rows, self.width)
        )

    def _write_rows(
        self, device: torch.device, number: np.ndarray, place: np.ndarray, shift: np.ndarray, most: int,
        blocks: int,
    ) -> Tensor:  # fmt: skip
        """Return rows of place + shift, where the shift changes with each interval; int32."""
        # [2, intervals, rows]: from which place on, and what the shift grows by there.
        steps = np.zeros((2, most, self.heads * self.rows), dtype=np.int32)
        row = self.intervals.row
        steps[0, number, row] = place
        steps[1, number, row] = shift
        steps[1, 1:] -= np.where(steps[0, 1:] > 0, steps[1, :-1], 0)
        on_device = to_device(torch.from_numpy(steps), device)
        place_w = torch.arange(self.width, dtype=torch.int32, device=device)
        index = place_w + on_device[1, 0].unsqueeze(1)
        for earlier in range(1, most):
            from_, by = (on_device[part, earlier].unsqueeze(1) for part in (0, 1))
            index += (place_w >= from_) * by
        # Entries after the last block of a row are never read; clamp them to valid indices.
        return index.clamp_(max=max(blocks - 1, 0))


def _make_plan_pair(by_head: list[tuple[BlockIntervals, BlockIntervals]], rows: int) -> list[_TablePlan]:
    """Return the plans of the partial and of the full blocks of a side, of one width."""
    plans = [_TablePlan.from_intervals([pair[full] for pair in by_head], rows) for full in (0, 1)]
    width = max(plan.width for plan in plans)
    return [plan._replace(width=width) for plan in plans]
