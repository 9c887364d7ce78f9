"""Log-linear attention over a sharded sequence: `log_linear_attention`.

A token at position t of its document reads the tokens before it in buckets, one for each set bit of t, as a
Fenwick tree has them. The level of a pair (t, s) is the bit length of t xor s, and weighs the pair. The state
at p is one matrix for each bit. Tokens before p that share bucket j are in bucket max(j, msb(p xor e)) at e,
so a run is affine in these states: M is a 0/1 matrix over buckets, which merges them, times the decay of the
run. `ring_scan` with `matrix` composes such maps. A run may begin anywhere, inside a bucket too.

Shapes: B samples, S local slots, L tokens of a piece, C of a chunk, H heads, G groups of heads, K and V head
dims, N levels, J = N - 1 buckets; b pieces times samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.device_tables import on_device
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.streams import is_fake
from ds_ring.errors import RingShapeError, whole_number
from ds_ring.layers.scan.context import ScanContext, scan_context
from ds_ring.layers.scan.recurrence import Computed, recurrence_of_pieces
from ds_ring.layers.scan.sequence_runs import positions_in_documents
from ds_ring.masks.slots import IntArray
from ds_ring.ops.checks import check_floats
from ds_ring.ops.handles import never_traced
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout


@never_traced
def log_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, level_scales: Tensor, *, layout: Layout, mesh: RingMesh,
    documents: Documents | Tree | None = None, scale: float | None = None, chunk_size: int = 64,
    hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Compute log-linear attention with decays over a sharded sequence. Differentiable.

    Guo et al. 2025, "Log-Linear Attention" (arXiv 2506.04761), in the form of log-linear Mamba 2: out_t is
    the sum over s <= t of exp(g_(s+1) + ... + g_t) level_scales_t[level(t, s)] (q_t . k_s) v_s.

    Args:
        q, k: local [B, S, G, K].
        v: local [B, S, H, V]; H a multiple of G.
        g: logarithms of decays, [B, S, H].
        level_scales: the weights of the levels, [B, S, H, N]: level 0 is the token itself. N is more than the
            bit length of the last position of the longest document.
        layout: the rank and slot of each token; its runs have no gaps (zigzag, contiguous, balanced).
        mesh: this process's place; every rank of the sequence must call, also in the backward pass.
        documents: positions count from the first token of a document, or along the path of a tree.
        scale: factor of the scores; None is 1 / sqrt(K).
        chunk_size: tokens whose scores are computed at once.
        hop_timeout_s: seconds after which a message that has not arrived raises.

    Returns:
        out [B, S, H, V] in v's dtype. States are float32, or float64 if v is.

    Raises:
        RingShapeError: shapes that do not fit each other, or too few levels.
        RingLayoutError, RingPatternError, RingMismatchError, RingPeerError: as `halo`.
    """
    context = scan_context(layout, mesh, documents, hop_timeout_s)
    with collective(mesh, "log_linear_attention", alone=is_fake(q)) as agreement:
        check_floats("log_linear_attention", q=q, k=k, v=v, g=g, level_scales=level_scales)
        whole_number(chunk_size, "log_linear_attention: chunk_size", RingShapeError)
        _check_shapes(q, k, v, g, level_scales)
        _check_levels(context, level_scales.shape[-1])
        factor = k.shape[-1] ** -0.5 if scale is None else scale
        agreement.agree({"scale": factor})
    groups = v.shape[2] // k.shape[2]
    scaled = q * factor
    positions = on_device(_own_positions(context), v.device).expand(len(v), -1)
    dtype = torch.promote_types(v.dtype, torch.float32)

    def call(tensors: Sequence[Tensor], continues: bool) -> Computed:
        *given, where = tensors
        q, k, v, g, scales = (x.to(dtype) for x in given)
        q, k = (x.repeat_interleave(groups, dim=2) for x in (q, k))
        return _pieces(q, k, v, g.transpose(1, 2), scales.transpose(1, 2), where, continues, chunk_size)

    out, _ = recurrence_of_pieces(
        context, [scaled, k, v, g, level_scales, positions], call, matrix=True, dim=1
    )
    return out.to(v.dtype)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, level_scales: Tensor) -> None:
    fits = (
        q.dim() == v.dim() == 4
        and k.shape == q.shape
        and v.shape[:2] == q.shape[:2]
        and v.shape[2] % q.shape[2] == 0
        and g.shape == v.shape[:3] == level_scales.shape[:-1]
    )
    if not fits:
        shapes = tuple(tuple(x.shape) for x in (q, k, v, g, level_scales))
        raise RingShapeError.wrong(
            "log_linear_attention: q, k, v, g, level_scales",
            "[B, S, G, K] twice, [B, S, H, V] (H a multiple of G), [B, S, H], [B, S, H, N]",
            f"{shapes}", "transpose them",
        )  # fmt: skip


def _check_levels(context: ScanContext, levels: int) -> None:
    needed = (
        int(positions_in_documents(context.documents, context.layout.tokens).max(initial=0)).bit_length() + 1
    )
    if levels < needed:
        raise RingShapeError.wrong(
            "log_linear_attention: level_scales", f"at least {needed} levels for documents of this length",
            levels, "pass a weight for each level",
        )  # fmt: skip


def _own_positions(context: ScanContext) -> IntArray:
    """Return the positions of this rank's slots in their documents, [S]; 0 for padding."""
    whole, runs = positions_in_documents(context.documents, context.layout.tokens), context.runs
    found = np.zeros(runs.local_tokens, dtype=np.int64)
    for run in runs.of_rank(context.mesh.sequence_rank).tolist():
        start, slot, length = int(runs.starts[run]), int(runs.slots[run]), int(runs.lengths[run])
        found[slot : slot + length] = whole[start : start + length]
    return found


def _bit_length(x: Tensor) -> Tensor:
    """Return the bit lengths of whole numbers below 2^53."""
    return torch.frexp(x.double()).exponent.long()


def _merged(first: Tensor, end: Tensor, buckets: Tensor) -> Tensor:
    """Return [b, J, J]: 1 where tokens in bucket j (column) at `first` are in bucket i (row) at `end`."""
    at_end = torch.maximum(buckets, _bit_length(first ^ end)[:, None] - 1)
    return at_end[:, None, :] == buckets[:, None]


def _pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scales: Tensor,
    where: Tensor,
    continues: bool,
    chunk_size: int,
) -> Computed:
    """Compute pieces that begin with states of zeros.

    Args:
        q, k, v: [b, L, H, .].
        g, scales: [b, H, L], [b, H, L, N].
        where: positions in documents, [b, L].
        continues, chunk_size: see `recurrence_of_pieces`, `log_linear_attention`.
    """
    buckets = torch.arange(scales.shape[-1] - 1, device=q.device)

    def weights_of_buckets(first: Tensor, t: Tensor, scales: Tensor) -> Tensor:
        """Return the weights that tokens t give to the buckets at `first`, [b, H, C, J]."""
        levels = torch.maximum(buckets + 1, _bit_length(t ^ first[:, None])[..., None])
        return scales.gather(-1, levels[:, None].expand(*scales.shape[:-1], -1))

    states = q.new_zeros(len(q), q.shape[2], len(buckets), q.shape[3], v.shape[3])
    outs = []
    for start in range(0, q.shape[1], chunk_size):
        chunk = slice(start, start + chunk_size)
        t, decay = where[:, chunk], g[:, :, chunk].cumsum(dim=2)  # [b, C], [b, H, C]
        first, end = t[:, 0], t[:, -1] + 1
        levels = _bit_length(t[:, :, None] ^ t[:, None, :])  # [b, C, C]
        between = decay[..., :, None] - decay[..., None, :]
        future = torch.ones(between.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        of_pairs = scales[:, :, chunk].gather(-1, levels[:, None].expand_as(between))
        scores = torch.einsum("bthk,bshk->bhts", q[:, chunk], k[:, chunk])
        scores = scores * between.masked_fill(future, -torch.inf).exp() * of_pairs
        weights = weights_of_buckets(first, t, scales[:, :, chunk]) * decay.exp()[..., None]
        outs.append(
            torch.einsum("bhts,bshv->bthv", scores, v[:, chunk])
            + torch.einsum("bthk,bhjkv,bhtj->bthv", q[:, chunk], states, weights)
        )
        own = (_bit_length(t ^ end[:, None]) - 1)[..., None] == buckets  # [b, C, J]
        left = (decay[..., -1:] - decay).exp()
        new = torch.einsum("bshk,bshv,bhs,bsj->bhjkv", k[:, chunk], v[:, chunk], left, own.to(q.dtype))
        merged = _merged(first, end, buckets).to(q.dtype)
        kept = torch.einsum("bij,bhjkv->bhikv", merged, states)
        states = kept * decay[..., -1, None, None, None].exp() + new
    decay = g.cumsum(dim=2)
    merged = _merged(where[:, 0], where[:, -1] + 1, buckets)[:, None].to(q.dtype)

    def reach(before: Tensor) -> Tensor:
        weights = weights_of_buckets(where[:, 0], where, scales) * decay.exp()[..., None]
        return torch.einsum("bthk,bhjkv,bhtj->bthv", q, before.unflatten(-1, states.shape[-2:]), weights)

    transition = merged * decay[..., -1, None, None].exp()
    return Computed(torch.cat(outs, dim=1), states.flatten(3), transition, reach if continues else None)
