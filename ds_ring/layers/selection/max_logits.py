"""The largest score of each head over the whole sequence: `max_logits`."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.errors import RingShapeError
from ds_ring.layers.selection.context import selection_context
from ds_ring.layers.selection.select import checked_scores, walk_tokens
from ds_ring.masks.catalog import Causal
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.checks import check_floats
from ds_ring.ops.tracing import forbid_tracing
from ds_ring.ring.merge import get_accumulator_dtype
from ds_ring.schedule.layout import Layout


@forbid_tracing
def max_logits(
    q: Tensor, k: Tensor, *, layout: Layout, mesh: RingMesh, pattern: Pattern | None = None,
    scale: float | None = None, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return the largest score of each head over the whole sequence, the same on all ranks of the ring.

    MuonClip rescales the projections of heads whose largest score is above a bound (Kimi Team 2025, "Kimi
    K2", arXiv 2507.20534, section 2.1). Keys travel once more, without values, and the scores of one tile
    exist at a time.

    Args:
        q, k: local queries [B, H, S, D] and keys [B, G, S, D]; H a multiple of G.
        layout, mesh, hop_timeout_s: see `ring_select`.
        pattern: which query attends to which key; None is `Causal()`.
        scale: factor of the scores; None is 1 / sqrt(D).

    Returns:
        [H], float32 (float64 for float64), without a gradient; -inf for a head that sees no key, NaN for one
        with a NaN among its scores.

    Raises:
        as `ring_select`.
    """
    check_mesh(mesh)
    with collective(mesh, "max_logits") as call, torch.no_grad():
        check_floats("max_logits", q=q, k=k)
        fits = q.dim() == k.dim() == 4 and q.shape[::2] == k.shape[::2] and q.shape[3] == k.shape[3]
        if not fits or q.shape[1] % k.shape[1]:
            raise RingShapeError(
                f"max_logits: expected H a multiple of G in q and k, got {list(q.shape)}, {list(k.shape)}"
            )
        groups, heads, dtype = k.shape[1], q.shape[1], get_accumulator_dtype(q.dtype)
        keys, pattern = k.detach().transpose(1, 2).contiguous(), Causal() if pattern is None else pattern
        context = selection_context(pattern, layout, mesh, hop_timeout_s, scale, by_head=True)
        factor = context.get_scale(q)

        def scores(rows: slice, keys: Tensor, _: Tensor) -> Tensor:  # of keys [B, n, G, D]
            grouped = q[:, :, rows].unflatten(1, (groups, -1)).to(dtype)
            return torch.einsum("bgrqd,bngd->bgrqn", grouped, keys.to(dtype)).flatten(1, 2) * factor

        checked_scores(scores, 1, keys, context, None, heads)
        context.agree(call, q, k)
        greatest = torch.full((heads,), -torch.inf, dtype=dtype, device=q.device)

        def merge(rows: slice, of_tile: Tensor, _: Tensor) -> None:
            torch.maximum(greatest, of_tile.amax(dim=(0, 2, 3)), out=greatest)  # NaN stays

        walk_tokens(merge, scores, heads, keys, context, pattern.bind(tuple(range(heads)), heads, groups))
        if context.exchange is None:
            return greatest
        return torch.stack(context.exchange.all_gather(greatest, mesh.ring_group, mesh.ring_size)).amax(0)
