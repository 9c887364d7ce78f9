"""A ring in one process for kernels: every rank's hops one after the other, merged as the ring pass does."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_ring.kernels.select import Kernel
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import expand_ranges
from ds_ring.ring.merge import get_accumulator_dtype, merge_
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import get_query_heads
from ds_ring.schedule.plan import build_plan
from ds_ring.schedule.rank_plan import HopPlan
from tests.reference import Dense, relative_error


def ring_hops(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    pattern: Pattern,
    layout: Layout,
    gradients: bool = True,
) -> Dense:
    """Out, lse and gradients (or zeros) of global [B, heads, T, D], in the accumulators' dtype."""
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    plan = build_plan(pattern, layout, query_heads=q.shape[1], kv_heads=k.shape[1])
    order = [torch.from_numpy(layout.positions(rank)).to(q.device) for rank in range(layout.ring_size)]
    q_s, k_s, v_s, grad_s = ([_shard(x, where) for where in order] for x in (q, k, v, grad_out))
    dtype = get_accumulator_dtype(q.dtype)
    out, dq, dk, dv = ([torch.zeros_like(x, dtype=dtype) for x in s] for s in (q_s, q_s, k_s, v_s))
    lse = [x.new_full(x.shape[:-1], -torch.inf) for x in out]
    for rank in range(layout.ring_size):
        for heads, kv, hop_plan in _hops(plan.rank(rank).classes, group):
            held = _held(hop_plan, q.device)
            k_p, v_p = (x[hop_plan.origin][:, kv][:, :, held].contiguous() for x in (k_s, v_s))
            for part in kernel.forward(q_s[rank][:, heads], k_p, v_p, hop_plan.tiles, scale):
                rows, own = part.q_rows, part.heads
                merge_(
                    rows.select(out[rank][:, heads][:, own]),
                    rows.select(lse[rank][:, heads][:, own]),
                    *part[2:],
                )
        final = out[rank].to(q.dtype)
        for heads, kv, hop_plan in _hops(plan.rank(rank).classes, group) if gradients else ():
            held = _held(hop_plan, q.device)
            k_p, v_p = (x[hop_plan.origin][:, kv][:, :, held].contiguous() for x in (k_s, v_s))
            queries = (x[:, heads] for x in (grad_s[rank], q_s[rank]))
            results = (final[:, heads], lse[rank][:, heads])
            dk_p, dv_p = (torch.zeros_like(x, dtype=dtype) for x in (k_p, v_p))
            for grads in kernel.backward(*queries, k_p, v_p, *results, hop_plan.tiles, scale):
                grads.add_to(dq[rank][:, heads], dk_p, dv_p)
            for total, part in ((dk, dk_p), (dv, dv_p)):
                total[hop_plan.origin][:, kv] = total[hop_plan.origin][:, kv].index_add(2, held, part)
    whole = (_unshard(parts, order, q.shape[2]) for parts in (out, lse, dq, dk, dv))
    return Dense(*whole)


def worst_relative_error(got: Dense, want: Dense) -> float:
    """The largest relative error of a result; rows that see no key have no lse and an output of 0."""
    sees = want.lse.isfinite()
    assert torch.equal(got.lse.isfinite(), sees) and got.out[~sees].eq(0).all()
    pairs = ((got.lse[sees], want.lse[sees]), (got.out, want.out), *zip(got[2:], want[2:], strict=True))
    return max(relative_error(*pair) for pair in pairs)


def _hops(classes: tuple, group: int) -> Iterator[tuple[slice, slice, HopPlan]]:
    for head_class in classes:
        for hop_plan in head_class.hops:
            yield get_query_heads(head_class.kv_heads, group), head_class.kv_heads, hop_plan


def _held(hop_plan: HopPlan, device: torch.device) -> Tensor:
    return torch.from_numpy(expand_ranges(hop_plan.held)).to(device)


def _shard(x: Tensor, where: Tensor) -> Tensor:
    """Slots of a shard; what is in padding must not matter."""
    return torch.where((where >= 0)[:, None], x[:, :, where.clamp(min=0)], 7.0).to(x.dtype)


def _unshard(parts: list[Tensor], order: list[Tensor], tokens: int) -> Tensor:
    first = parts[0]
    whole = first.new_zeros((*first.shape[:2], tokens, *first.shape[3:]))
    for part, where in zip(parts, order, strict=True):
        whole[:, :, where[where >= 0]] = part[:, :, where >= 0]
    return whole
