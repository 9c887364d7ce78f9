"""Mamba 3 over a sharded sequence: `mamba3_scan`.

The recurrence is h_t = a_t R_t h_(t-1) + b_t R_t k_(t-1) v_(t-1)^T + c_t k_t v_t^T and out_t = q_t^T h_t.
a = exp(adt), b = (1 - trap) dt a (the trapezoidal rule's part of the token before), c = trap dt. R_t rotates
by minus the token's angles: the imaginary part of the transition. Over a run this is affine in h. M is the
product of the decays times the rotation by the sum of the angles, in 2 x 2 blocks, so `ring_scan` with
`matrix` computes the states. The token before a run is a halo of one token of k and v. Its term belongs to B.

Shapes: B samples, S local slots, L tokens of a piece, C of a chunk, H heads, R ranks of MIMO, N states, P
channels, A angles; b pieces times samples.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingShapeError, whole_number
from ds_ring.layers.scan.context import scan_context
from ds_ring.layers.scan.halo import halo
from ds_ring.layers.scan.recurrence import Computed, recurrence_of_pieces
from ds_ring.ops.checks import check_floats
from ds_ring.ops.handles import never_traced
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout


@never_traced
def mamba3_scan(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, angles: Tensor, *,
    layout: Layout, mesh: RingMesh, documents: Documents | Tree | None = None, chunk_size: int = 64,
    hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Compute the recurrence of Mamba 3 over a sharded sequence. Differentiable.

    Lahoti et al. 2026, "Mamba-3": exponential-trapezoidal steps, data-dependent rotations of the state, and
    several inputs and outputs a step (MIMO). Projections, norms, biases of q and k, the skip D v and the gate
    are of single tokens: compute them outside.

    Args:
        q, k: C and B of the paper, local [B, S, H, R, N] with biases, not rotated; N is even, R is 1 for one
            input. Pairs (2i, 2i + 1) of the N states rotate together.
        v: x of the paper, [B, S, H, R, P].
        adt: the step times A, [B, S, H]: logarithms of decays.
        dt: the step, [B, S, H].
        trap: the weight of the token itself in its step, in (0, 1), [B, S, H].
        angles: by which the token rotates the first A pairs of states, [B, S, H, A]; A at most N / 2.
        layout: the rank and slot of each token; its runs have no gaps (zigzag, contiguous, balanced).
        mesh: this process's place; every rank of the sequence must call, also in the backward pass.
        documents: each document, or path of a tree, begins with a state of zeros.
        chunk_size: tokens whose scores are computed at once.
        hop_timeout_s: seconds after which a message that has not arrived raises.

    Returns:
        out [B, S, H, R, P] in v's dtype. States are float32, or float64 if v is.

    Raises:
        RingShapeError: shapes that do not fit each other.
        RingLayoutError, RingPatternError, RingMismatchError, RingPeerError: as `halo`.
    """
    context = scan_context(layout, mesh, documents, hop_timeout_s)
    with collective(mesh, "mamba3_scan"):
        check_floats("mamba3_scan", q=q, k=k, v=v, adt=adt, dt=dt, trap=trap, angles=angles)
        whole_number(chunk_size, "mamba3_scan: chunk_size", RingShapeError)
        _check_shapes(q, k, v, adt, dt, trap, angles)
    fronts = [
        halo(x, 1, dim=1, layout=layout, mesh=mesh, documents=documents, hop_timeout_s=hop_timeout_s)
        .squeeze(2)
        .transpose(0, 1)
        for x in (k, v)
    ]
    dtype = torch.promote_types(v.dtype, torch.float32)
    out, _ = recurrence_of_pieces(
        context, [q, k, v, adt, dt, trap, angles],
        lambda tensors, continues: _pieces([x.to(dtype) for x in tensors], continues, chunk_size),
        matrix=True, dim=1, fronts=fronts,
    )  # fmt: skip
    return out.to(v.dtype)


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, angles: Tensor
) -> None:
    shapes = tuple(tuple(x.shape) for x in (q, k, v, adt, dt, trap, angles))
    heads = q.shape[:3]
    fits = (
        q.dim() == v.dim() == 5
        and k.shape == q.shape
        and q.shape[4] % 2 == 0
        and v.shape[:4] == q.shape[:4]
        and all(x.shape == heads for x in (adt, dt, trap))
        and angles.shape[:-1] == heads
        and angles.shape[-1] <= q.shape[4] // 2
    )
    if not fits:
        raise RingShapeError.wrong(
            "mamba3_scan: q, k, v, adt, dt, trap, angles",
            "[B, S, H, R, N] twice (N even), [B, S, H, R, P], [B, S, H] three times, [B, S, H, A <= N / 2]",
            f"{shapes}", "repeat groups of heads before",
        )  # fmt: skip


def rotated(x: Tensor, phase: Tensor) -> Tensor:
    """Rotate the pairs of [..., N] by the phases [..., N / 2]."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = phase.cos(), phase.sin()
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)


def _pieces(tensors: list[Tensor], continues: bool, chunk_size: int) -> Computed:
    """Compute pieces that begin with a state of zeros, and with the token before of the last two tensors.

    Inside a piece b_t u_(t-1) is a_t times (1 - trap_t) dt_t u_(t-1), u = k v^T. So each token adds
    c_t + (1 - trap_(t+1)) dt_(t+1) times its u to the state, and its own output lacks the second term.
    """
    q, k, v, adt, dt, trap, angles, k_before, v_before = tensors
    angles = F.pad(angles, (0, q.shape[-1] // 2 - angles.shape[-1]))
    phase = angles.cumsum(dim=1)  # from the beginning of the piece
    q, k = (rotated(x, phase.unsqueeze(3)) for x in (q, k))
    own, after = trap * dt, (1 - trap) * dt
    added = own + F.pad(after[:, 1:], (0, 0, 0, 1))
    state = torch.einsum("bhrn,bhrp,bh->bhnp", k_before, v_before, after[:, 0])
    outs = []
    for first in range(0, q.shape[1], chunk_size):
        chunk = slice(first, first + chunk_size)
        decay = adt[:, chunk].cumsum(dim=1).transpose(1, 2)  # [b, H, C]
        between = decay[..., :, None] - decay[..., None, :]
        future = torch.ones(between.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        weights = between.masked_fill(future, -torch.inf).exp() * added[:, chunk].transpose(1, 2)[:, :, None]
        self_ = torch.diag_embed((added - own)[:, chunk].transpose(1, 2))
        scores = torch.einsum("bthrn,bshjn->bhtrsj", q[:, chunk], k[:, chunk])
        scores = scores * (weights - self_)[:, :, :, None, :, None]
        out = torch.einsum("bhtrsj,bshjp->bthrp", scores, v[:, chunk])
        outs.append(out + torch.einsum("bthrn,bhnp,bht->bthrp", q[:, chunk], state, decay.exp()))
        left = (decay[..., -1:] - decay).exp().transpose(1, 2) * added[:, chunk]
        new = torch.einsum("bshrn,bshrp,bsh->bhnp", k[:, chunk], v[:, chunk], left)
        state = state * decay[..., -1, None, None].exp() + new
    decay, last = adt.cumsum(dim=1), phase[:, -1]  # [b, L, H], [b, H, N / 2]
    cos, sin = last.cos(), last.sin()
    # From the frame of the piece's beginning, in which q and k were rotated, to that of its end.
    rotation = torch.stack([torch.stack([cos, sin], dim=-1), torch.stack([-sin, cos], dim=-1)], dim=-2)
    final = rotation @ state.unflatten(2, (-1, 2))  # [b, H, N / 2, 2, P]

    def reach(before: Tensor) -> Tensor:
        return torch.einsum("bthrn,bhnp,bth->bthrp", q, before.flatten(2, 3), decay.exp())

    transition = decay[:, -1, :, None, None, None].exp() * rotation
    return Computed(torch.cat(outs, dim=1), final, transition, reach if continues else None)
