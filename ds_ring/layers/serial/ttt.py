"""TTT layers over a sharded sequence: `ttt_linear`, a linear model that learns while it reads.

Its state is a weight W and a bias b. Each mini-batch takes one step down the gradient of a loss through a
layer norm, so the state after it is not linear in the state before it: a serial scan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.layers.serial.serial_scan import serial_scan
from ds_ring.ops.handles import never_traced
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout


@never_traced
def ttt_linear(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, norm: tuple[Tensor, Tensor], initial: Tensor, *,
    layout: Layout, mesh: RingMesh, documents: Documents | Tree | None = None, mini_batch: int = 16,
    batch_parts: int = 1, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Compute TTT-Linear over a sharded sequence, run after run. Differentiable.

    Sun et al. 2024, "Learning to (Learn at Test Time)" (arXiv 2407.04620, sections 2.4 to 2.7): at each token
    the loss is |LN(k W + b) + k - v|^2 / 2, its gradients are taken at the state with which the mini-batch
    begins, and out = LN(q W + b) + q with the state after the token.

    Args:
        q, k, v: local [B, S, H, D].
        eta: the learning rate of each token, [B, S, H].
        norm: weight and bias of the layer norm, [H, D] each.
        initial: W and, in the last row, b: [H, D + 1, D]; equal on all ranks.
        layout: runs inside a document begin with mini-batches, and have no gaps.
        mesh, documents, batch_parts, hop_timeout_s: see `serial_scan`.
        mini_batch: tokens of a mini-batch. They count from the beginning of each document.

    Returns:
        out [B, S, H, D].

    Raises:
        RingShapeError, RingLayoutError, RingPatternError, RingMismatchError, RingPeerError: as `serial_scan`.
    """

    def step(state: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        outs = []
        for q, k, v, eta in zip(*(x.split(mini_batch, dim=1) for x in tensors), strict=True):
            out, state = _mini_batch(state, q, k, v, eta, *norm)
            outs.append(out)
        return torch.cat(outs, dim=1), state

    return serial_scan(
        step, initial.expand(len(q), *initial.shape), [q, k, v, eta], layout=layout, mesh=mesh,
        documents=documents, block_size=mini_batch, batch_parts=batch_parts, hop_timeout_s=hop_timeout_s,
    )  # fmt: skip


_EPSILON = 1e-6


def _mini_batch(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [b, L, H, D] and the state [b, H, D + 1, D] after some tokens."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, H, L, D]
    weight, bias, rate = weight[:, None], bias[:, None], eta.transpose(1, 2)[..., None]
    reached = F.pad(k, (0, 1), value=1.0)  # the bias is a row of the weight
    predicted = reached @ state
    normal, deviation = _normal(predicted)
    wanted = (weight * normal + bias + k - v) * weight
    parts = wanted - wanted.mean(-1, keepdim=True) - normal * (wanted * normal).mean(-1, keepdim=True)
    moves = rate * parts / deviation
    asking = F.pad(q, (0, 1), value=1.0)
    out = asking @ state - (asking @ reached.mT).tril() @ moves
    out = q + weight * _normal(out)[0] + bias
    return out.transpose(1, 2), state - reached.mT @ moves


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x without its mean and by its deviation; and the deviation."""
    deviation = (x.var(-1, unbiased=False, keepdim=True) + _EPSILON).sqrt()
    return (x - x.mean(-1, keepdim=True)) / deviation, deviation
