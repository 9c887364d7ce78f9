"""The layout "balanced": pieces of the sequence, dealt out so that all ranks have the same work."""

from __future__ import annotations

import numpy as np

from ds_ring.errors import RingLayoutError
from ds_ring.masks.slots import IntArray
from ds_ring.schedule.choose import (
    COMPARED,
    EVEN,
    Candidate,
    bind_one_head,
    choose_best,
    count_run_work,
    imbalance,
    rated,
)  # fmt: skip
from ds_ring.schedule.layout import ChunkLayout, Layout, Mix
from ds_ring.schedule.pieces import PieceLayout

SLACK = 1.10  # maximum length of the longest shard over the mean
PIECES_PER_RANK = (2, 4, 8, 16, 32)


def make_balanced(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> Layout:
    """Assign pieces of the sequence so that all ranks have the same work; [Note: the cost of a layout]."""
    if not mix:
        raise RingLayoutError('layout "balanced" needs the pattern: make_layout(..., pattern=...)')
    bound = tuple((bind_one_head(pattern), layers) for pattern, layers in mix)
    options = even_pieces(tokens, ring_size, multiple_of, bound)
    return (
        choose_best(bound, options)[0].layout if options else ChunkLayout(tokens, ring_size, multiple_of, 1)
    )


def even_pieces(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> list[Candidate]:
    """Return contiguous shards of equal work, and pieces dealt out in two ways, until some are even."""
    sizes, candidates = (tokens, ring_size, multiple_of), []
    # at most one piece per token; 0 if there are fewer tokens than ranks
    finest = min(PIECES_PER_RANK[-1] * ring_size, tokens // ring_size * ring_size)
    if not finest:
        return []
    bounds, finest_works = _pieces(mix, tokens, finest)
    cuts = _even_cuts(*sizes, bounds, np.sum(finest_works, axis=0))
    if cuts is not None:
        candidates.append(rated(mix, cuts))
    for per_rank in PIECES_PER_RANK:
        pieces = ring_size * per_rank
        if finest % pieces:
            continue
        # coarser pieces are unions of the finest
        works = [work.reshape(pieces, -1).sum(1) for work in finest_works]
        borders = tuple(bounds[:: finest // pieces].tolist())
        for deal in (_snake, _nearest):
            owners = deal(np.sum(works, axis=0), ring_size)
            loads = [np.bincount(owners, weights=work, minlength=ring_size) for work in works]
            candidates.append(
                Candidate(PieceLayout(*sizes, borders, tuple(owners.tolist())), imbalance(loads))
            )
        # Refine the pieces only until there are enough even layouts to compare.
        if sum(option.imbalance <= EVEN for option in candidates) >= COMPARED:
            break
    return candidates


def _pieces(mix: Mix, tokens: int, pieces: int) -> tuple[IntArray, list[np.ndarray]]:
    """Return the borders of equal pieces and, for each pattern over all of its layers, the pairs of each."""
    each, rest = divmod(tokens, pieces)
    number = np.arange(pieces + 1)
    bounds = each * number + rest * number // pieces  # tokens * number // pieces
    runs = np.stack([bounds[:-1], np.ones(pieces, dtype=np.int64), np.diff(bounds)], axis=1)
    return bounds, [layers * count_run_work(pattern, runs, tokens) for pattern, layers in mix]


def _even_cuts(
    tokens: int, ring_size: int, multiple_of: int, bounds: IntArray, work: np.ndarray
) -> Layout | None:
    """Return contiguous shards of equal work; None if lengths differ by more than the slack."""
    total = np.concatenate([[0], np.cumsum(work)])
    # the work before each cut; interpolated linearly inside a piece
    goals = total[-1] * np.cumsum(np.full(ring_size, 1 / ring_size))[:-1]
    cuts = [0, *np.interp(goals, total, bounds).astype(np.int64).tolist(), tokens]
    if max(np.diff(cuts)) > SLACK * tokens / ring_size or min(np.diff(cuts)) < 1:
        return None
    return PieceLayout(tokens, ring_size, multiple_of, tuple(cuts), tuple(range(ring_size)))


def _snake(work: np.ndarray, ring_size: int) -> IntArray:
    """Deal out pieces by falling work, to ranks 0 .. P-1 and back; every rank gets the same number."""
    place = np.argsort(-work, kind="stable")
    turn, seat = np.divmod(np.arange(len(work)), ring_size)
    owners = np.empty(len(work), dtype=np.int64)
    owners[place] = np.where(turn % 2 == 0, seat, ring_size - 1 - seat)
    return owners


def _nearest(work: np.ndarray, ring_size: int) -> IntArray:
    """Start from contiguous shards; swap pieces of the fullest and the emptiest rank while that helps."""
    pieces = np.arange(len(work)).reshape(ring_size, -1)  # of each rank
    works, per_rank = work[pieces], len(work) // ring_size
    goal = 1 / ring_size * work.sum()
    load = works.sum(1) - goal  # beyond the goal
    enough = (EVEN - 1) / 2 * goal
    gains, away = np.empty((2, per_rank, per_rank))
    rows, columns = list(works), list(works[:, :, None])
    for _ in range(4 * ring_size):
        full, empty = int(load.argmax()), int(load.argmin())
        most, least = load.item(full), load.item(empty)
        # the two ranks would be equally far from the goal after moving this much work
        excess = (most - least) / 2
        if most <= enough:
            break
        # [pieces of the fullest, pieces of the emptiest]: work moved by each swap
        np.subtract(columns[full], rows[empty], gains)
        np.subtract(gains, excess, away)
        best = int(np.abs(away, away).argmin())
        gain = gains.item(best)
        # stop if no swap brings the two ranks closer together
        if not 0 < gain < 2 * excess:
            break
        load[full], load[empty] = most - gain, least + gain
        give, take = divmod(best, per_rank)
        for table in (pieces, works):
            table[full, give], table[empty, take] = table[empty, take], table[full, give]
    owners = np.empty(len(work), dtype=np.int64)
    owners[pieces] = np.arange(ring_size)[:, None]
    return owners
