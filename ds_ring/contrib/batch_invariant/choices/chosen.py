"""Choose keys, and attend to them, one query by itself: `query_by_query`.

A choice is decided by single bits of scores, and the columns of a product depend on how many there are. So
while the mode is on, each score is a sum of its own. Attention of a query runs over its keys in the order of
their positions, `ROWS` keys at a time. Every rank gathers all keys and values for it: slow, and with as much
memory as without a ring.

Shapes: B samples, H query heads, G K/V heads, h = H / G, C choices, Q queries, k chosen keys, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.contrib.batch_invariant.mode import ROWS, BatchInvariant
from ds_ring.data.session import RingSession
from ds_ring.layers.selection.rows import Choices
from ds_ring.models.attention_call import AttentionCall
from ds_ring.ops.passes import count_forward_pass
from ds_ring.ops.shard import gather_sequence

_NUMBERS = 1 << 22  # of chosen keys that exist at a time


@contextmanager
def query_by_query(session: RingSession, mode: BatchInvariant) -> Iterator[None]:
    """Compute scores and chosen attention of a session's mesh query by query, as long as this is on."""
    choices = session.mesh.owners[Choices]
    before = choices.exact, choices.attend
    choices.exact, choices.attend = mode.by_elements, attend_in_order
    try:
        yield
    finally:
        choices.exact, choices.attend = before


def attend_in_order(call: AttentionCall, chosen: Tensor) -> Tensor:
    """Return attention [B, H, Q, E] of the queries of a call over the positions that they chose."""
    layout, mesh = call.sharding.layout, call.sharding.mesh
    count_forward_pass()
    k, v = (gather_sequence(x, layout, mesh=mesh, dim=2) for x in (call.k_BGSD, call.v_BGSE))
    chosen_BCQk = chosen if chosen.dim() == 4 else chosen.unsqueeze(1)
    tokens = k.shape[2]
    # Ascending; none, as which the width is filled up, comes last.
    where = chosen_BCQk.masked_fill(chosen_BCQk < 0, tokens).sort(dim=-1).values
    where = pad(where, (0, -where.shape[-1] % ROWS), value=tokens)
    size = len(k) * k.shape[1] * where.shape[-1] * (k.shape[3] + v.shape[3])
    step = max(1, _NUMBERS // max(1, size))
    scale = k.shape[3] ** -0.5 if call.scale is None else call.scale
    parts = [
        _attend(q, k, v, some, scale, call.sinks)
        for q, some in zip(call.q_BHSD.split(step, dim=2), where.split(step, dim=2), strict=True)
    ]
    return torch.cat(parts, dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, where: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Return attention of queries over positions [B, C, Q, k], of which T is none."""
    groups, dtype = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    query_heads = where.shape[1] == q.shape[1] > groups  # each chooses for itself
    if query_heads:
        k, v = (x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v))
        groups = q.shape[1]
    from_groups = where.repeat_interleave(groups // where.shape[1], dim=1)  # [B, G, Q, k]
    index = from_groups.clamp(max=k.shape[2] - 1).flatten(2).unsqueeze(-1)
    keys, values = (
        x.gather(2, index.expand(-1, -1, -1, x.shape[3])).unflatten(2, from_groups.shape[2:]).to(dtype)
        for x in (k, v)
    )
    none = (from_groups == k.shape[2]).unsqueeze(2)  # [B, G, 1, Q, k]
    of_query = q.unflatten(1, (groups, -1)).to(dtype)  # [B, G, h, Q, D]
    scores = (of_query.unsqueeze(4) * keys.unsqueeze(2)).sum(-1) * scale
    greatest = scores.masked_fill(none, -math.inf).amax(dim=-1, keepdim=True)
    sink = None if sinks is None else sinks.to(dtype).view(1, groups, -1, 1, 1)
    greatest = greatest if sink is None else torch.maximum(greatest, sink)
    greatest = greatest.masked_fill(greatest == -math.inf, 0.0)
    weights = torch.exp(scores - greatest).masked_fill(none, 0.0)
    total = _in_chunks(weights)
    total = total if sink is None else total + torch.exp(sink - greatest)[..., 0]
    # [B, G, h, Q, E, k]
    out = _in_chunks(weights.unsqueeze(4) * values.mT.unsqueeze(2))
    return (out / total.masked_fill(total == 0, 1.0).unsqueeze(-1)).flatten(1, 2).to(q.dtype)


def _in_chunks(x: Tensor) -> Tensor:
    """Return the sums over the last dim, `ROWS` at a time: zeros at the end do not change a bit."""
    parts = x.unflatten(-1, (-1, ROWS)).sum(-1).unbind(-1)
    return sum(parts[1:], parts[0])
