"""Titans' linear memory over a sharded sequence: `titans_scan`.

The memory is a matrix M that learns by gradient descent with momentum: S_t = eta_t S_(t-1) - theta_t G_t and
M_t = (1 - alpha_t) M_(t-1) + S_t. For a linear memory the gradient G_t = 2 k_t (k_t^T M - v_t)^T of
|M^T k - v|^2 is affine in M, so a run is affine in the pair (M, S), stacked to [2K, V]. `ring_scan` composes
the runs. A run's transition comes from its own kernel: 2K further columns of values, zeros, begin with the
identity.

Shapes: B samples, S local slots, L tokens of a piece, C of a chunk, H heads, K and V head dims; b pieces
times samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.streams import is_fake
from ds_ring.errors import RingShapeError, whole_number
from ds_ring.layers.scan.context import check_blocks, scan_context
from ds_ring.layers.scan.recurrence import Computed, recurrence_of_pieces
from ds_ring.ops.checks import check_floats
from ds_ring.ops.handles import never_traced
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout


@never_traced
def titans_scan(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, log_keep: Tensor, log_momentum: Tensor, *,
    layout: Layout, mesh: RingMesh, documents: Documents | Tree | None = None, chunk_size: int = 16,
    hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Compute the neural memory of Titans, with a linear memory, over a sharded sequence. Differentiable.

    Behrouz et al. 2025, "Titans: Learning to Memorize at Test Time" (arXiv 2501.00663, equations 9 to 15 and
    section 3.2). All tokens of a chunk take their gradients at the memory with which the chunk begins.

    Args:
        q, k: local [B, S, H, K].
        v: local [B, S, H, V].
        theta: the learning rate of each token, [B, S, H].
        log_keep: the logarithm of 1 - alpha, what the memory keeps, [B, S, H].
        log_momentum: the logarithm of eta, what the momentum keeps, [B, S, H].
        layout: the rank and slot of each token; its runs have no gaps, and inside a document they begin with
            chunks.
        mesh: this process's place; every rank of the sequence must call, also in the backward pass.
        documents: each document, or path of a tree, begins with an empty memory.
        chunk_size: tokens with one memory for their gradients, counted from the beginning of each document.
        hop_timeout_s: seconds after which a message that has not arrived raises.

    Returns:
        out [B, S, H, V] in v's dtype: M_t^T q_t. States are float32, or float64 if v is.

    Raises:
        RingShapeError: shapes that do not fit each other.
        RingLayoutError: a run begins inside a chunk; and as `halo`.
        RingPatternError, RingMismatchError, RingPeerError: as `halo`.
    """
    context = scan_context(layout, mesh, documents, hop_timeout_s)
    with collective(mesh, "titans_scan", alone=is_fake(q)) as agreement:
        given = {"theta": theta, "log_keep": log_keep, "log_momentum": log_momentum}
        check_floats("titans_scan", q=q, k=k, v=v, **given)
        whole_number(chunk_size, "titans_scan: chunk_size", RingShapeError)
        fits = q.dim() == v.dim() == 4 and k.shape == q.shape and v.shape[:3] == q.shape[:3]
        if not fits or any(x.shape != q.shape[:3] for x in (theta, log_keep, log_momentum)):
            shapes = tuple(tuple(x.shape) for x in (q, k, v, theta, log_keep, log_momentum))
            raise RingShapeError.wrong(
                "titans_scan: q, k, v, theta, log_keep, log_momentum",
                "[B, S, H, K] twice, [B, S, H, V], [B, S, H] three times", f"{shapes}", "transpose them",
            )  # fmt: skip
        check_blocks("titans_scan", context, chunk_size)
        agreement.agree({"chunk_size": chunk_size})
    dtype = torch.promote_types(v.dtype, torch.float32)

    def call(tensors: Sequence[Tensor], continues: bool) -> Computed:
        return _pieces([x.to(dtype).transpose(1, 2) for x in tensors], continues, chunk_size)

    tensors = [q, k, v, theta, log_keep, log_momentum]
    return recurrence_of_pieces(context, tensors, call, matrix=True, dim=1)[0].to(v.dtype)


def _pieces(tensors: Sequence[Tensor], continues: bool, chunk_size: int) -> Computed:
    """Compute pieces [b, H, L, .] that begin with an empty memory."""
    width, value_dim = 2 * tensors[0].shape[-1], tensors[2].shape[-1]
    q, k, v, *rates = tensors
    state = v.new_zeros(*v.shape[:2], width, value_dim)
    if continues:
        v = F.pad(v, (0, width))
        identity = torch.eye(width, dtype=v.dtype, device=v.device)
        state = torch.cat([state, identity.expand(*v.shape[:2], -1, -1)], dim=-1)
    outs = []
    for first in range(0, q.shape[2], chunk_size):
        out, state = _chunk(state, *(x[:, :, first : first + chunk_size] for x in (q, k, v, *rates)))
        outs.append(out)
    out, final = torch.cat(outs, dim=2).transpose(1, 2), state[..., :value_dim].contiguous()
    if not continues:
        return Computed(out, final, state.new_zeros(*state.shape[:2], width, width), None)
    reached = out[..., value_dim:]
    return Computed(
        out[..., :value_dim], final, state[..., value_dim:].contiguous(),
        lambda before: torch.einsum("blhk,bhkv->blhv", reached, before),
    )  # fmt: skip


def _chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, theta: Tensor, log_keep: Tensor, log_momentum: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [b, H, C, .] of a chunk, and (M, S) after it."""
    memory, momentum = state.chunk(2, dim=2)
    errors = 2 * theta[..., None] * (k @ memory - v)
    kept, moved = _decays(log_keep), _decays(log_momentum)  # [b, H, C, C]: from a token to a later one
    keep, move = (x.cumsum(dim=-1).exp() for x in (log_keep, log_momentum))  # from the beginning
    steps = kept @ moved  # of a gradient to the memory after a later token
    pushed = (kept @ move[..., None]).squeeze(-1)  # of the momentum at the beginning
    out = keep[..., None] * (q @ memory) + pushed[..., None] * (q @ momentum) - ((q @ k.mT) * steps) @ errors
    last = [x[..., -1, None, None] for x in (keep, pushed, move)]
    after = last[0] * memory + last[1] * momentum - (k * steps[..., -1, :, None]).mT @ errors
    return out, torch.cat([after, last[2] * momentum - (k * moved[..., -1, :, None]).mT @ errors], dim=2)


def _decays(logs: Tensor) -> Tensor:
    """Return the products of the decays after token s up to t, [..., t, s]; 0 for s > t."""
    total = logs.cumsum(dim=-1)
    future = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
