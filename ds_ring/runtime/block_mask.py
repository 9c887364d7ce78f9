"""Turn tiles of a hop into what FlexAttention reads: blocks to visit, and token labels for what is inside.

Owns the rounding to blocks and the tables on the device. The mask inside a block is evaluated from the rule
that the tiles were cut from (`masks/branches.py`). Tokens that no tile covers have no label and are not
seen.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ring.masks.blocks import blocks_of_tiles
from ds_ring.masks.branches import Branch
from ds_ring.masks.pair_mask import MaskFunction
from ds_ring.masks.partitions import NO_LABEL
from ds_ring.masks.pattern import BoundPattern
from ds_ring.masks.slot_ranges import IntArray
from ds_ring.masks.tiles import Axis, Tiles

FARTHEST = (1 << 31) - 1  # positions are int32 on the device, and a distance has to fit as well
KEPT_BYTES = 1 << 30  # of tables on a device; the ones used longest ago go


class BlockTable(NamedTuple):
    """Hold blocks row by row: how many int32 [1, heads, rows], which int32 [1, heads, rows, widest]."""

    counts: Tensor
    blocks: Tensor


class Tokens(NamedTuple):
    """Hold the queries or the keys of a hop, from the first block a tile touches to the last slot of one.

    Attributes:
        position: int32 [n]; 0 where no tile covers the slot.
        labels: int32 [heads, n] for each branch; -1 for no label.
    """

    position: Tensor
    labels: tuple[Tensor, ...]


class BandTensors(NamedTuple):
    """Hold what limits a branch beside its labels.

    Attributes:
        least, most: of query position - key position; int32, 0-d.
        functions: masks of single pairs; Python, the same objects for every hop.
    """

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
    """Hold one hop: where in the local tensors its tokens lie, and its tensors.

    Attributes:
        q_rows, k_rows: first slot, a multiple of the block, and number of slots.
        tensors: the rest.
    """

    q_rows: tuple[int, int]
    k_rows: tuple[int, int]
    tensors: HopTensors


def hop_mask(tiles: Tiles, block: int, device: torch.device, shortest: int = 0, slots: int = 0) -> HopMask:
    """Return the mask of a table of tiles (not empty); the same object gives the same answer at once.

    Args:
        tiles: of one hop, with a rule.
        block: side of a block in slots.
        device: where the tables are to lie.
        shortest: at least so many queries, of `slots` that there are.
    """
    key = (tiles, block, device, shortest, slots)
    found = _kept.get(key)
    if found is None:
        found = _build(tiles, block, device, shortest, slots)
        _kept[key] = found
        while len(_kept) > 1 and sum(mask.tensors.nbytes for mask in list(_kept.values())) > KEPT_BYTES:
            _kept.popitem(last=False)
    else:
        _kept.move_to_end(key)
    return found


_kept: OrderedDict[tuple[Tiles, int, torch.device, int, int], HopMask] = OrderedDict()


@dataclass(frozen=True)
class _Side:
    """Hold `Tokens` in numpy, padded to whole blocks with no label; labels [heads, branches, n]."""

    first: int
    length: int
    position: IntArray
    labels: IntArray

    def blocks(self, block: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return each block's least and greatest position, and its label if all of it has one (or -1)."""
        position = self.position.reshape(-1, block)
        labels = self.labels.reshape(*self.labels.shape[:2], -1, block)
        least = labels.min(-1)
        return position.min(-1), position.max(-1), np.where(labels.max(-1) == least, least, NO_LABEL)

    def on(self, device: torch.device) -> Tokens:
        labels = torch.from_numpy(self.labels[..., : self.length].astype(np.int32)).to(device)
        position = torch.from_numpy(self.position[: self.length].astype(np.int32)).to(device)
        return Tokens(position, tuple(x.contiguous() for x in labels.unbind(1)))


def _build(tiles: Tiles, block: int, device: torch.device, shortest: int, slots: int) -> HopMask:
    rule = tiles.rule
    assert len(tiles) and rule is not None, "flex: tiles that are empty, or cut from no rule"
    q, k = _sides(tiles, block, shortest, slots)
    partial, full = [], []
    # Blocks are counted from the first one that a tile touches, as `_part` in flex.py cuts the tensors.
    shifted = replace(tiles, q=_from(tiles.q, q.first), k=_from(tiles.k, k.first))
    for head_in_group in range(q.labels.shape[0]):
        found = blocks_of_tiles(shifted.for_head(head_in_group), block)
        is_full = _are_full(found, head_in_group, q.blocks(block), k.blocks(block), rule.branches_by_head[0])
        of_head = np.concatenate([np.full((len(found), 1), head_in_group), found], axis=1)
        partial.append(of_head[~is_full])
        full.append(of_head[is_full])
    shape = q.labels.shape[0], len(q.position) // block, len(k.position) // block
    rows, full_rows, columns, full_columns = (
        _table(np.concatenate(blocks), shape, by_key, device)
        for by_key in (False, True)
        for blocks in (partial, full)
    )
    tensors = HopTensors(
        q.on(device),
        k.on(device),
        _bands(rule, device),
        rows,
        full_rows,
        columns,
        full_columns,
        torch.tensor(_heads_of(rule), dtype=torch.int64, device=device),
        rule.counts_twice,
    )
    return HopMask((q.first, q.length), (k.first, k.length), tensors)


def _sides(tiles: Tiles, block: int, shortest: int, slots: int) -> tuple[_Side, _Side]:
    """Return both sides, labelled together."""
    assert tiles.rule is not None
    sides = [_positions(tiles.q, block, shortest, slots), _positions(tiles.k, block)]
    both = np.concatenate([position for _, _, position in sides])
    assert both.max(initial=0) <= FARTHEST, f"position {both.max()} does not fit into 32 bits"
    # Slots that no tile covers (-1) are labelled as position 0 would be, then lose the label.
    parts = tiles.rule.labels(*(np.maximum(position, 0) for _, _, position in sides))
    q, k = (
        _Side(first, length, np.maximum(position, 0), np.where(position < 0, NO_LABEL, part))
        for (first, length, position), part in zip(sides, parts, strict=True)
    )
    return q, k


def _positions(axis: Axis, block: int, shortest: int = 0, slots: int = 0) -> tuple[int, int, IntArray]:
    """Return first slot, number of slots, and the position of each (-1: none), padded to whole blocks."""
    columns = (axis.slot, axis.slot_step, axis.position, axis.position_step, axis.length)
    # Tiles share runs: each distinct one is written once.
    slot, slot_step, position, step, length = np.unique(np.stack(columns, axis=1), axis=0).T
    first = int(slot.min()) // block * block
    # Too few queries would make Inductor compile anew: the part begins earlier, or ends later.
    if slots:
        first = min(first, (slots - shortest) // block * block)
    end = max(int((slot + (length - 1) * slot_step).max()) + 1, first + shortest)
    found = np.full(-(-(end - first) // block) * block, -1, dtype=np.int64)
    row = np.repeat(np.arange(len(length)), length)
    within = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
    found[slot[row] - first + slot_step[row] * within] = position[row] + step[row] * within
    return first, end - first, found


def _from(axis: Axis, first: int) -> Axis:
    return replace(axis, slot=axis.slot - first)


def _are_full(
    found: IntArray,
    head_in_group: int,
    q: tuple[IntArray, ...],
    k: tuple[IntArray, ...],
    branches: tuple[Branch, ...],
) -> IntArray:
    """Return True for the blocks (query block, key block) of which every pair is attended.

    A block is one if some branch without a mask has all its queries and keys under one label, within its
    band; others that are full cost a mask and are still right.
    """
    (q_least, q_most, q_label), (k_least, k_most, k_label) = q, k
    i, j = found.T
    # Bounds of query position - key position in each block.
    nearest, farthest = q_least[i] - k_most[j], q_most[i] - k_least[j]
    full = np.zeros(len(found), dtype=bool)
    for number, branch in enumerate(branches):
        if not branch.masks:
            ours, theirs = q_label[head_in_group][number, i], k_label[head_in_group][number, j]
            within = (nearest >= branch.least) & (farthest <= branch.most)
            full |= within & (ours == theirs) & (ours >= 0)
    return full


def _bands(rule: BoundPattern, device: torch.device) -> tuple[BandTensors, ...]:
    """Return what limits the branches beside their labels, once where all are alike; see `BandTensors`."""
    branches = rule.branches_by_head[0]
    bands = [(b.least, b.most, tuple(mask.function for mask in b.masks)) for b in branches]
    if len(set(bands)) == 1:
        bands = bands[:1]
    found = []
    for *bounds, functions in bands:
        # No distance is beyond these, so a bound that is none stays without effect.
        clipped = (max(-FARTHEST, min(bound, FARTHEST)) for bound in bounds)
        least, most = (torch.tensor(x, dtype=torch.int32, device=device) for x in clipped)
        found.append(BandTensors(least, most, functions))
    return tuple(found)


def _heads_of(rule: BoundPattern) -> tuple[int, ...]:
    """Return the numbers of the query heads of a group, where a mask depends on them."""
    heads = [
        next((m.heads for b in branches for m in b.masks if m.heads), ())
        for branches in rule.branches_by_head
    ]
    return sum(heads, ()) or (0,)


# [Note: tables of blocks]
# `BlockMask.from_kv_blocks` is not used: it turns the rows into columns through a dense table of all (n /
# B)^2 blocks. Both directions are sorted from the list of blocks here, trimmed to the widest row. No side of
# a table is below 2: torch.compile takes a size of 1 for a constant and would compile again.
def _table(found: IntArray, shape: tuple[int, int, int], by_key: bool, device: torch.device) -> BlockTable:
    """Sort blocks (head_in_group, query block, key block) row by row; [Note: tables of blocks]."""
    heads, rows = shape[0], max(shape[2] if by_key else shape[1], 2)
    row = found[:, 0] * rows + found[:, 2 if by_key else 1]
    column = found[:, 1 if by_key else 2]
    # By row, then by column: lexsort's last key counts first.
    order = np.lexsort([column, row])
    row, column = row[order], column[order]
    count = np.bincount(row, minlength=heads * rows)
    index = np.zeros((heads * rows, max(int(count.max()), 2)), dtype=np.int32)
    # The place of an entry in its row: its number less those of the rows before.
    index[row, np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)] = column
    counts = torch.from_numpy(count.astype(np.int32)).view(1, heads, rows)
    return BlockTable(counts.to(device), torch.from_numpy(index).view(1, heads, rows, -1).to(device))
