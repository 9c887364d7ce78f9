"""Tiles of branches: the one function that makes the tiles of all patterns. Owns no pattern.

[Note: joins]
A run is an arithmetic progression of tokens; a rectangle is a query run x a key run. The tiles of a branch
are computed in three steps: cut both sides of each rectangle into runs of one label, join the runs with equal
labels, and drop the rows and columns of the result that have no pair in the band of distances. Several
branches with the same band are handled together. If they are all combinations of two lists (each document
with each dilation), the rectangles are refined by the documents first, then by the dilations. A primitive may
have a faster way to refine by several of its kind (`Primitive.refine_sum`). Both are optimisations: the plain
derivation gives the same pairs, as tests show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ds_ring.masks.branches import ALL, Branch, Joined, Partition, Pieces, Primitive
from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import Axis, Tiles

if TYPE_CHECKING:
    from ds_ring.masks.pair_masks import PairMask

MASK_BLOCK = 256  # side of the blocks inside which a mask function is evaluated, tokens

BandOfPairs = tuple[int, int, tuple["PairMask", ...]]  # least and most distance, mask functions


def split_by_head(
    branches_by_head: tuple[tuple[Branch, ...], ...], rectangles: Tiles, plain: bool = False
) -> Tiles:
    """Return the non-empty tiles of whole rectangles; see [Note: joins].

    Args:
        branches_by_head: the branches of every query head of a group; one entry if all heads are equal.
        rectangles: without a band.
        plain: skip the optimisations and handle each branch by itself.
    """
    # An empty table, put first wherever tables are concatenated, so that there is at least one.
    nothing = rectangles.rows(np.zeros(len(rectangles), dtype=bool))
    # Group by band, so that the rectangles of all heads are cut by a band in one call.
    bands: dict[BandOfPairs, list[tuple[int, list[Branch]]]] = {}
    for number, whole in enumerate(branches_by_head):
        of_head: dict[BandOfPairs, list[Branch]] = {}
        for branch in whole:
            of_head.setdefault((branch.least, branch.most, branch.masks), []).append(branch)
        for band, alike in of_head.items():
            bands.setdefault(band, []).append((number if len(branches_by_head) > 1 else -1, alike))
    parts = []
    for (least, most, masks), jobs in bands.items():
        # Before the joins: rectangles outside the band need no refinement.
        near = may_touch(rectangles, least, most)
        refined = [nothing]
        for head_in_group, branches in jobs:
            refined += _refine(near.for_head(head_in_group), branches, least >= 0, plain)
        tiles = refined[1] if len(refined) == 2 else Tiles.concat(refined)
        if masks:
            from ds_ring.masks.pair_masks import MaskInside

            # The mask function includes the band, so blocks are kept or dropped, but not cut.
            blocks = may_touch(_split_blocks(tiles), least, most)
            column = np.zeros(len(blocks), dtype=np.int64)
            parts.append(replace(blocks, mask=column, masks=(MaskInside(masks, least, most),)))
        else:
            parts.append(select_distances(tiles, least, most))
    return parts[0] if len(parts) == 1 else Tiles.concat([nothing, *parts])


def may_touch(tiles: Tiles, least: int, most: int) -> Tiles:
    """Drop rectangles that are entirely outside the band."""
    nearest, farthest = tiles.distances
    keep = (farthest >= least) & (nearest <= most)
    return tiles if keep.all() else tiles.rows(keep)


def _split_blocks(tiles: Tiles) -> Tiles:
    """Cut every rectangle into blocks of at most `MASK_BLOCK` x `MASK_BLOCK` tokens."""
    q_parts, k_parts = -(-tiles.q.length // MASK_BLOCK), -(-tiles.k.length // MASK_BLOCK)
    row, which = repeat_rows(q_parts * k_parts)
    q_first, k_first = which // k_parts[row] * MASK_BLOCK, which % k_parts[row] * MASK_BLOCK
    cut = tiles.rows(row)
    q_length = np.minimum(MASK_BLOCK, cut.q.length - q_first)
    return cut.take(q_first, q_length, k_first, np.minimum(MASK_BLOCK, cut.k.length - k_first))


def _refine(tiles: Tiles, branches: list[Branch], causal: bool, plain: bool) -> list[Tiles]:
    """Return the rectangles of branches with one band, before they are cut by the band."""
    by_ranges: dict[tuple[Partition, Partition], list[tuple[Joined, ...]]] = {}
    for branch in branches:
        ranges = replace(branch.queries, primitives=()), replace(branch.keys, primitives=())
        by_ranges.setdefault(ranges, []).append(branch.compared_labels)
    parts = []
    for (queries, keys), joined in by_ranges.items():
        near = tiles
        if queries != ALL or keys != ALL:
            q = tiles.q if queries == ALL else tiles.q.between(queries.first, queries.end)
            near = tiles.sides(q, tiles.k if keys == ALL else tiles.k.between(keys.first, keys.end))
        products = [[[pair] for pair in masks] for masks in joined] if plain else _find_factors(joined)
        for factors in products:
            refined = near
            for factor in factors:
                refined = _refine_by(refined, factor, causal, plain)
            parts.append(refined)
    return parts


def _find_factors(joined: list[tuple[Joined, ...]]) -> list[list[list[Joined]]]:
    """Write alternatives, each a conjunction, as products of sums: one product if all combinations occur."""
    columns = [list(dict.fromkeys(column)) for column in zip(*joined, strict=False)]
    lengths = {len(masks) for masks in joined}
    # If there are as many distinct conjunctions as combinations, they are all combinations.
    whole = math.prod(len(column) for column in columns)
    if len(lengths) == 1 and len(joined) == len(set(joined)) == whole:
        return [columns]
    return [[[pair] for pair in masks] for masks in joined]


def _refine_by(tiles: Tiles, factor: list[Joined], causal: bool, plain: bool) -> Tiles:
    """Return the rectangles refined by a sum of alternatives."""
    kinds = {type(queries) for queries, _ in factor}
    if not plain and len(kinds) == 1 and all(queries == keys for queries, keys in factor):
        refined = kinds.pop().refine_sum(tiles, [queries for queries, _ in factor], causal)
        if refined is not None:
            return refined
    parts = [join(tiles, queries, keys) for queries, keys in factor]
    return parts[0] if len(parts) == 1 else Tiles.concat(parts)


def join(tiles: Tiles, queries: Primitive, keys: Primitive) -> Tiles:
    """Cut every rectangle into rectangles whose two sides have one and the same label."""
    (q_least, q_greatest), (k_least, k_greatest) = queries.bounds(tiles.q), keys.bounds(tiles.k)
    # only labels that may occur on both sides can be equal
    least, greatest = np.maximum(q_least, k_least), np.minimum(q_greatest, k_greatest)
    q_row, q, q_label = _select_pieces(queries, tiles.q, least, greatest)
    k_row, k, k_label = _select_pieces(keys, tiles.k, least, greatest)
    # One number for each (rectangle, label). All labels are from least to greatest, so that the numbers of
    # two rectangles never overlap.
    width = 1 + int((greatest - least).max(initial=0))
    ours, theirs = (q_row * width + q_label - least[q_row]), (k_row * width + k_label - least[k_row])
    # If each number occurs once and in the same order on both sides, pieces pair up without a search.
    if np.array_equal(ours, theirs) and (np.diff(ours) > 0).all():
        return tiles.rows(q_row).sides(q, k)
    # all pairs of equal numbers, in the order of `ours`
    order = np.argsort(theirs, kind="stable")
    ordered = theirs[order]
    first = np.searchsorted(ordered, ours, side="left")
    count = np.searchsorted(ordered, ours, side="right") - first
    q_index, which = repeat_rows(count)
    k_index = order[first[q_index] + which]
    return tiles.rows(q_row[q_index]).sides(q.rows(q_index), k.rows(k_index))


def _select_pieces(primitive: Primitive, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
    """Return the pieces of every row with labels from least to greatest; `split` may return others."""
    pieces = primitive.split(axis, least, greatest)
    is_inside = (pieces.label >= least[pieces.row]) & (pieces.label <= greatest[pieces.row])
    return (
        pieces
        if is_inside.all()
        else Pieces(pieces.row[is_inside], pieces.axis.rows(is_inside), pieces.label[is_inside])
    )


def select_distances(tiles: Tiles, least: int, most: int) -> Tiles:
    """Keep the pairs with least <= query position - key position <= most.

    Rectangles that a bound cuts lose the rows and columns that have no pair. Before that they are split until
    both sides have the same position step.
    """
    tiles = replace(tiles, least=np.maximum(tiles.least, least), most=np.minimum(tiles.most, most))
    nearest, farthest = tiles.distances
    whole = (nearest >= tiles.least) & (farthest <= tiles.most)
    # tiles that are neither whole nor cut are outside the bounds and are dropped
    cut = ~whole & (farthest >= tiles.least) & (nearest <= tiles.most)
    if not cut.any():
        return tiles if whole.all() else tiles.rows(whole)
    return Tiles.concat([tiles.rows(whole), trimmed(_split_equal_steps(tiles.rows(cut)))])


def trimmed(tiles: Tiles) -> Tiles:
    """Drop rows and columns of tiles that have no pair in their band, and tiles without any."""
    low, high = tiles.band
    # row i sees a key only if low <= i < keys + high; columns likewise
    q_first, k_first = np.maximum(0, low), np.maximum(0, -high)
    q_end = np.minimum(tiles.q.length, tiles.k.length + high)
    k_end = np.minimum(tiles.k.length, tiles.q.length - low)
    keep = (q_end > q_first) & (k_end > k_first) & (low <= high)
    if not keep.all():
        tiles = tiles.rows(keep)
        q_first, q_end, k_first, k_end = q_first[keep], q_end[keep], k_first[keep], k_end[keep]
    return tiles.take(q_first, q_end - q_first, k_first, k_end - k_first)


def cut_queries(tiles: Tiles, slots: Sequence[int]) -> list[Tiles]:
    """Return the tiles of a shard with itself in parts: queries before the first slot, up to the second, ...

    Each part has all keys of its queries. They are cut where its queries begin, so that the parts of a
    triangle are triangles and rectangles.
    """
    parts, rest, begin = [], tiles.q, 0
    for end in (*slots, None):
        here, rest = (rest, rest) if end is None else rest.cut(end)
        parts.append(Tiles.concat([trimmed(tiles.sides(here, keys)) for keys in tiles.k.cut(begin)]))
        begin = end or 0
    return parts


def find_middle_slot(tiles: Tiles) -> int:
    """Return the slot in the middle of the queries, or the first one of a run that begins near it."""
    starts = np.unique(tiles.q.slot)
    end = int((tiles.q.slot + (tiles.q.length - 1) * tiles.q.slot_step).max(initial=-1)) + 1
    away = np.abs(starts - end / 2)
    return int(starts[away.argmin()]) if (away <= end / 8).any() else end // 2


def _split_equal_steps(tiles: Tiles) -> Tiles:
    """Split rows so that both sides have the same position step."""
    q_step, k_step = tiles.q.position_step, tiles.k.position_step
    if (q_step == k_step).all():
        return tiles
    # each side is split into common // step interleaved progressions; all combinations are rows
    common = np.lcm(q_step, k_step)
    row, which = repeat_rows((common // q_step) * (common // k_step))
    tiles, q_parts, k_parts = tiles.rows(row), (common // q_step)[row], (common // k_step)[row]
    q_first, k_first = which // k_parts, which % k_parts
    q = tiles.q.take(q_first, np.maximum(-((q_first - tiles.q.length) // q_parts), 0), q_parts)
    k = tiles.k.take(k_first, np.maximum(-((k_first - tiles.k.length) // k_parts), 0), k_parts)
    return tiles.sides(q, k)
