"""Combine the ranks' partial results of replicated queries: the same bits on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.comm.exchange import Exchange
from ds_ring.ring.merge import merge_


# [Note: one all-reduce] Queries are split into P parts. Every rank sends part r of its partial result to rank
# r. Rank r combines the P partial results in rank order, and an all-gather distributes the combined parts. So
# each rank sends 2 (P - 1) / P of the result's size, however many keys there are, and no rank holds P
# results. All ranks get the same bits, because one rank computes each row. In the forward pass the rows are
# (out, lse) and are merged; in the backward pass they are dq and are summed.
def all_reduce(exchange: Exchange, rows: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Combine all ranks' [N, width] rows in rank order, the same bits everywhere; [Note: one all-reduce]."""
    group, size = exchange.mesh.ring_group, exchange.mesh.ring_size
    missing = -len(rows) % size
    # Pad with rows of zeros to make the parts equally long; they are removed at the end.
    parts = pad(rows, (0, 0, 0, missing)).chunk(size)
    mine = combine(exchange.all_to_all(parts, group))
    return torch.cat(exchange.all_gather(mine, group, size))[: len(rows)]


def merge_rows(partials: list[Tensor]) -> Tensor:
    """Merge rows of (out, lse) over disjoint keys into one."""
    total = partials[0]
    for partial in partials[1:]:
        merge_(total[:, :-1], total[:, -1], partial[:, :-1], partial[:, -1])
    return total


def sum_rows(partials: list[Tensor]) -> Tensor:
    """Add up rows of gradients."""
    total = partials[0]
    for partial in partials[1:]:
        total += partial
    return total
