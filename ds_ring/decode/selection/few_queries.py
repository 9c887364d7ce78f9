"""Choose keys, and attend to them, for few queries that every rank has: a step of a generation.

Keys stay on their ranks. Each rank chooses among its own keys, and an all-gather of k scores and positions
makes the choice of all. Each rank then attends to its own chosen keys, and one all-reduce of (out, lse) gives
every rank the same bits. Without a gradient.

Shapes: B samples, C choices (heads that choose for themselves), Q queries, S local slots, k chosen keys.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.device_tables import DeviceTables, to_host
from ds_ring.comm.mesh import RingMesh
from ds_ring.decode.all_reduce import all_reduce, merge_rows
from ds_ring.layers.selection.context import selection_context
from ds_ring.layers.selection.select import ScoresFunction, Visible, keeping, merge_scores
from ds_ring.layers.selection.total_order import BestKeys, in_order, none_so_far
from ds_ring.masks.catalog import Full
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import IntArray
from ds_ring.ops.sinks import add_sinks
from ds_ring.ring.merge import get_accumulator_dtype
from ds_ring.schedule.layout import Layout

NUMBERS = 1 << 24  # of chosen keys that exist at a time


def select_for_all(
    scores_fn: ScoresFunction, k: int, keys: Tensor, *, layout: Layout, mesh: RingMesh, pattern: Pattern,
    q_positions: IntArray, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return the positions of the k best keys of each query, equal on all ranks; see `ring_select`.

    Args:
        scores_fn, k, keys, layout, mesh, pattern, hop_timeout_s: see `ring_select`; slices are of queries.
        q_positions: [Q] of the queries.

    Returns:
        int64 [B, Q, k] or [B, C, Q, k]: the best first, -1 where a query sees fewer keys.
    """
    with collective(mesh, "selection of keys") as call, torch.no_grad():
        context = selection_context(pattern, layout, mesh, hop_timeout_s)
        like = scores_fn(slice(0, 1), keys[:, :1])
        dtype, heads = torch.promote_types(like.dtype, torch.float32), like.shape[:-2]
        described = keys.flatten(2).unsqueeze(1)
        fields = {"k": k, "shape and dtype of scores": (*heads, dtype), "queries": q_positions.tolist()}
        context.agree(call, described, described, fields)
        best = none_so_far(keys, (*heads, len(q_positions)), k, layout, dtype)
        local_positions = layout.positions(mesh.ring_rank)[: layout.valid_tokens(mesh.ring_rank)]
        seen = Visible(pattern.bind((0,), 1, 1), q_positions, local_positions)
        merge_scores(
            keeping(best), lambda rows, some, _: scores_fn(rows, some), math.prod(heads[1:]),
            keys[:, : len(local_positions)], local_positions, seen, mesh.owners[DeviceTables],
        )  # fmt: skip
        if context.exchange is not None:
            parts = [
                torch.cat(context.exchange.all_gather(x, mesh.ring_group, mesh.ring_size), dim=-1)
                for x in best
            ]
            best = BestKeys(*parts)
        return in_order(best)[..., :k].contiguous()


def greatest_for_all(x: Tensor, *, layout: Layout, mesh: RingMesh, hop_timeout_s: float = 60.0) -> Tensor:
    """Return the greatest numbers of all ranks' x, such as scores of blocks that are on several of them.

    Args:
        x: [B, ...], of one shape on all ranks.
        layout, mesh, hop_timeout_s: see `ring_select`.
    """
    with collective(mesh, "scores of blocks") as call, torch.no_grad():
        context = selection_context(Full(), layout, mesh, hop_timeout_s)
        described = x.flatten(1)[:, None, None]
        context.agree(call, described, described, {"shape": tuple(x.shape)})
        if context.exchange is None:
            return x
        return torch.stack(context.exchange.all_gather(x, mesh.ring_group, mesh.ring_size)).amax(dim=0)


def attend_for_all(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, *, layout: Layout, mesh: RingMesh, scale: float | None,
    sinks: Tensor | None = None, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return attention [B, H, Q, E] of each query over the keys that it chose, equal on all ranks.

    Args:
        q: queries [B, H, Q, D], the same on all ranks.
        k, v: local keys [B, G, S, D] and values [B, G, S, E].
        chosen: what `select_for_all` returned: [B, Q, k], or [B, C, Q, k] with C a divisor of G.
        layout, mesh, scale, sinks, hop_timeout_s: see `selected_attention`.
    """
    with collective(mesh, "attention over chosen keys") as call, torch.no_grad():
        context = selection_context(Full(), layout, mesh, hop_timeout_s, scale)
        context.agree(call, q, k, {"head_dim of v": v.shape[-1], "shape of chosen": tuple(chosen.shape)})
        slots_BCQK = _own_slots(chosen if chosen.dim() == 4 else chosen.unsqueeze(1), layout, mesh)
        width = max(1, int(to_host((slots_BCQK >= 0).sum(-1).amax())))
        slots_BCQK = slots_BCQK.topk(width, dim=-1).values  # this rank's, then -1
        step = max(1, NUMBERS // max(1, len(q) * width * k.shape[1] * (k.shape[3] + v.shape[3])))
        parts = [
            _attend(q_, k, v, of_queries, context.get_scale(q))
            for q_, of_queries in zip(q.split(step, dim=2), slots_BCQK.split(step, dim=2), strict=True)
        ]
        rows = torch.cat(parts, dim=2)
        if context.exchange is not None:
            rows = all_reduce(context.exchange, rows.flatten(0, 2), merge_rows).view_as(rows)
        out, _ = add_sinks(rows[..., :-1], rows[..., -1], sinks)
        return out.to(q.dtype).contiguous()


@lru_cache(maxsize=16)
def _slots(layout: Layout, ring_rank: int) -> IntArray:
    """Return the slot of each position on this rank, -1 for those of others and at the end, int64 [T + 1]."""
    positions = layout.positions(ring_rank)
    slots = np.full(layout.tokens + 1, -1, dtype=np.int64)
    slots[positions[positions >= 0]] = np.flatnonzero(positions >= 0)
    return slots


def _own_slots(chosen: Tensor, layout: Layout, mesh: RingMesh) -> Tensor:
    table = mesh.owners[DeviceTables].array(_slots(layout, mesh.ring_rank), chosen.device)
    return table[chosen.long()]  # -1 is the last entry


def _attend(q: Tensor, k: Tensor, v: Tensor, slots_BCQK: Tensor, scale: float) -> Tensor:
    """Return (out, lse) [B, H, Q, E + 1] of queries over chosen slots of this rank, -1 for none."""
    dtype, groups, choices = get_accumulator_dtype(q.dtype), k.shape[1], slots_BCQK.shape[1]
    from_groups = slots_BCQK.repeat_interleave(groups // choices, dim=1)  # [B, G, Q, K]
    index = from_groups.clamp_min(0).flatten(2).unsqueeze(-1)
    k_BGQKD, v_BGQKE = (
        x.gather(2, index.expand(-1, -1, -1, x.shape[3])).unflatten(2, from_groups.shape[2:]).to(dtype)
        for x in (k, v)
    )
    of_query = q.unflatten(1, (groups, -1)).to(dtype)  # [B, G, h, Q, D]
    scores = torch.einsum("bghqd,bgqkd->bghqk", of_query, k_BGQKD) * scale
    scores = scores.masked_fill((from_groups < 0).unsqueeze(2), -math.inf)
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(dtype).min).unsqueeze(-1))
    out = torch.einsum("bghqk,bgqke->bghqe", weights, v_BGQKE)
    return torch.cat([out, lse.unsqueeze(-1)], dim=-1).flatten(1, 2)
