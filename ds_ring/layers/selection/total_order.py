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

    NaN counts as -inf. See [Note: a total order].
    """
    k, least = best.scores.shape[-1], torch.finfo(scores.dtype).min
    both = torch.cat([best.scores, scores.nan_to_num(float("-inf"), float("inf"), float("-inf"))], dim=-1)
    where = torch.cat([best.positions, positions.expand(scores.shape)], dim=-1)
    top = both.topk(k, dim=-1, sorted=False)
    last, index = top.values.amin(-1, keepdim=True), top.indices
    # Which of the entries that equal the k-th best one topk took is not defined. Order them by position; on
    # the CPU, where the host waits for nothing, only if they do not all fit.
    if both.is_cuda or bool(((both >= last.clamp_min(least)).sum(-1) > k).any()):
        order = where.masked_fill(both < last, torch.iinfo(torch.int64).max)
        # of a better score: before every position, and before -1 for none
        index = order.masked_fill_(both > last, -2).topk(k, dim=-1, largest=False, sorted=False).indices
    torch.gather(where, -1, index, out=best.positions)
    torch.gather(both, -1, index, out=best.scores)


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
        return _select_first_equal(*args, **(kwargs or {}))


def _select_first_equal(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, indices = x.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))
