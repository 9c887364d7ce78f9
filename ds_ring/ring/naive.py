"""Ring attention on one page, for readers: the formulas of `ring_pass.py` without plans, tiles or buffers.

Shapes: B samples, H query heads, G K/V heads, S local queries, T keys of a hop, D head dim, E value dim.

Every rank owns one shard. In each pass K/V go around the ring once. In the backward pass dK and dV travel
with K/V. After the last hop dK and dV go one rank further, to their owner. The functions do not check their
input, skip masked pairs or overlap messages with computation. `tests/dist/test_naive.py` compares `forward`
and `backward` with `ring_attention` and with dense attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# Takes a ring rank; returns the mask of the local queries and that rank's keys, bool [S, T] or [B, H, S, T].
Visible = Callable[[int], Tensor]


def rotate(*tensors: Tensor) -> list[Tensor]:
    """Send tensors to the next rank of the ring, and return the tensors of the previous rank."""
    rank, ring_size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(x) for x in tensors]
    operations = [dist.P2POp(dist.isend, x, (rank + 1) % ring_size) for x in tensors]
    operations += [dist.P2POp(dist.irecv, x, (rank - 1) % ring_size) for x in received]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def repeat_heads(x_BGTD: Tensor, query_heads: int) -> Tensor:
    """Return K or V for each query head: query head h reads K/V head h // (H / G)."""
    return x_BGTD.repeat_interleave(query_heads // x_BGTD.shape[1], dim=1)


def sum_heads(x_BHTD: Tensor, kv_heads: int) -> Tensor:
    """Return dK or dV: sum the gradients of the query heads that read the same K/V head."""
    return x_BHTD.unflatten(1, (kv_heads, -1)).sum(2)


def compute_scores(q_BHSD: Tensor, k_BHTD: Tensor, visible: Tensor) -> Tensor:
    """Return the scores [B, H, S, T]; masked pairs have -inf."""
    return (q_BHSD @ k_BHTD.mT * q_BHSD.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))


def subtract_and_exp(x: Tensor, lse: Tensor) -> Tensor:
    """Return exp(x - lse). In rows without a key x and lse are -inf, and the result is 0."""
    return torch.exp(x - lse.clamp_min(torch.finfo(lse.dtype).min))


def forward(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
    """Return out [B, H, S, E] and lse [B, H, S, 1] of the local queries over the keys of all ranks."""
    rank, ring_size, heads = dist.get_rank(), dist.get_world_size(), q_BHSD.shape[1]
    out_BHSE = q_BHSD.new_zeros((*q_BHSD.shape[:-1], v_BGSE.shape[-1]))
    lse_BHS1 = q_BHSD.new_full((*q_BHSD.shape[:-1], 1), float("-inf"))
    k_BGTD, v_BGTE = k_BGSD, v_BGSE
    for hop in range(ring_size):
        if hop > 0:  # `rotate` returns K/V of the rank `hop` places before this rank
            k_BGTD, v_BGTE = rotate(k_BGTD, v_BGTE)
        scores_BHST = compute_scores(q_BHSD, repeat_heads(k_BGTD, heads), visible((rank - hop) % ring_size))
        hop_lse_BHS1 = scores_BHST.logsumexp(-1, keepdim=True)
        hop_out_BHSE = subtract_and_exp(scores_BHST, hop_lse_BHS1) @ repeat_heads(v_BGTE, heads)
        # Merge two results over disjoint keys. A result's weight is its share of the sum of exponentials.
        merged_lse_BHS1 = torch.logaddexp(lse_BHS1, hop_lse_BHS1)
        out_BHSE = out_BHSE * subtract_and_exp(lse_BHS1, merged_lse_BHS1)
        out_BHSE = out_BHSE + hop_out_BHSE * subtract_and_exp(hop_lse_BHS1, merged_lse_BHS1)
        lse_BHS1 = merged_lse_BHS1
    return out_BHSE, lse_BHS1


def backward(
    grad_out_BHSE: Tensor, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, out_BHSE: Tensor, lse_BHS1: Tensor,
    visible: Visible,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the local q, k and v; out and lse are the results of `forward`."""
    rank, ring_size, heads, kv_heads = (
        dist.get_rank(),
        dist.get_world_size(),
        q_BHSD.shape[1],
        k_BGSD.shape[1],
    )
    dq_BHSD, dk_BGTD, dv_BGTE = (torch.zeros_like(x) for x in (q_BHSD, k_BGSD, v_BGSE))
    k_BGTD, v_BGTE = k_BGSD, v_BGSE
    delta_BHS1 = (grad_out_BHSE * out_BHSE).sum(-1, keepdim=True)
    for hop in range(ring_size):
        if hop > 0:
            k_BGTD, v_BGTE, dk_BGTD, dv_BGTE = rotate(k_BGTD, v_BGTE, dk_BGTD, dv_BGTE)
        k_BHTD, v_BHTE = repeat_heads(k_BGTD, heads), repeat_heads(v_BGTE, heads)
        scores_BHST = compute_scores(q_BHSD, k_BHTD, visible((rank - hop) % ring_size))
        # lse covers the keys of all ranks, so these weights are columns of the whole softmax.
        weights_BHST = subtract_and_exp(scores_BHST, lse_BHS1)
        dscores_BHST = weights_BHST * (grad_out_BHSE @ v_BHTE.mT - delta_BHS1) * q_BHSD.shape[-1] ** -0.5
        dq_BHSD += dscores_BHST @ k_BHTD
        dk_BGTD += sum_heads(dscores_BHST.mT @ q_BHSD, kv_heads)
        dv_BGTE += sum_heads(weights_BHST.mT @ grad_out_BHSE, kv_heads)
    dk_BGSD, dv_BGSE = rotate(dk_BGTD, dv_BGTE)
    return dq_BHSD, dk_BGSD, dv_BGSE
