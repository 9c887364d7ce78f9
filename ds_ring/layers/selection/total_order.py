"""The order of keys by score, and the k best keys of each query in it.

Owns `BestKeys`, which is filled in place tile by tile, and `TotalOrder`, which gives a model on one process
the same order.

[Note: a total order]
Scores are often equal (those of a ReLU are 0 for half of the keys), and `torch.topk` does not define
which of equal entries it returns. So keys are ordered by score, and equal scores by position, the smaller one
first. This order is total: the k best of a union are the k best of the k best of its parts, for every
layout and number of ranks. A comparison with one process must use it there, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_ring.schedule.layout import Layout

ROWS = 2048  # of queries that are sorted at a time


class BestKeys(NamedTuple):
    """The best keys so far of each query, in no order: scores (-inf for none) and positions, [.., S, k]."""

    scores: Tensor
    positions: Tensor


def none_so_far(keys: Tensor, queries: tuple[int, ...], k: int, of: Layout, dtype: torch.dtype) -> BestKeys:
    shape = (*queries, max(1, min(k, of.tokens)))
    return BestKeys(
        keys.new_full(shape, float("-inf"), dtype=dtype), keys.new_full(shape, -1, dtype=torch.int64)
    )


def merge_best(best: BestKeys, scores: Tensor, positions: Tensor) -> None:
    """Merge scores [.., q, n] of keys at `positions` [n] into the best keys of q queries, in place.

    See [Note: a total order].
    """
    k = best.scores.shape[-1]
    # A tile has few candidates once many keys were seen, so only they are sorted.
    least = best.scores.amin(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    candidates = (scores >= least).flatten(0, -2)
    counts = candidates.sum(-1)
    width = int(counts.max())
    if not width:
        return
    new_scores, new_positions = scores.flatten(0, -2), positions.expand(len(counts), -1)
    if 4 * width < len(positions):
        row, column = candidates.nonzero(as_tuple=True)
        place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        found, new_scores = new_scores[row, column], scores.new_full((len(counts), width), float("-inf"))
        new_scores[row, place] = found
        new_positions = positions.new_full((len(counts), width), -1)
        new_positions[row, place] = positions[column]
    else:
        new_scores = new_scores.masked_fill(~candidates, float("-inf"))
    rows = counts > 0
    of_best = rows.view(scores.shape[:-1])  # `best` may be a view that cannot be flattened
    both = torch.cat([best.scores[of_best], new_scores[rows]], dim=-1)
    where = torch.cat([best.positions[of_best], new_positions[rows]], dim=-1)
    top = both.topk(k, dim=-1)
    last, index = top.values[:, -1:], top.indices
    # Entries equal to the k-th best one that did not all fit: which of them topk took is not defined.
    tied = ((both == last).sum(-1) > (top.values == last).sum(-1)) & (last[:, 0] > float("-inf"))
    if bool(tied.any()):
        some, worst = both[tied], last[tied]
        order = where[tied].masked_fill(some < worst, torch.iinfo(torch.int64).max)
        order = order.masked_fill(some > worst, -1)  # of a better score: before every position
        index[tied] = order.topk(k, dim=-1, largest=False).indices
    best.positions[of_best] = where.gather(-1, index)
    best.scores[of_best] = both.gather(-1, index)


def in_order(best: BestKeys) -> Tensor:
    """Return the positions, the best first; -1 at the end for none."""
    chosen = best.positions.masked_fill_(best.scores == float("-inf"), -1)
    for scores, positions in zip(
        best.scores.flatten(0, -2).split(ROWS), chosen.flatten(0, -2).split(ROWS), strict=True
    ):
        positions_sorted, order = positions.sort(dim=-1)
        order = scores.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
        positions.copy_(positions_sorted.gather(-1, order))
    return chosen


class TotalOrder(TorchFunctionMode):
    """Make `torch.topk` return what `ring_select` does, of equal entries those that come first.

    For a model on one process with which one on a ring is compared: [Note: a total order].
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        return _first_of_equal(*args, **(kwargs or {}))


def _first_of_equal(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, indices = x.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))
