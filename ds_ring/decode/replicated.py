"""Run `decode_attention`: every rank has the same few queries; keys and values stay on their ranks.

A rank attends from all queries to its own shard; the partial results are merged on all ranks. This is for
decoding with a long cache and for cross attention. Many queries belong on the ring (`RingPass`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.comm.exchange import Exchange
from ds_ring.decode.tiles import HeadTiles
from ds_ring.kernels.interface import Kernel
from ds_ring.ring.merge import get_accumulator_dtype, make_empty_results, merge_


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


@dataclass(frozen=True)
class ReplicatedPass:
    """The inputs of both passes. Q is the number of queries, S the number of this rank's key slots.

    Attributes:
        classes: the tiles of every class of heads (heads whose patterns are equal).
        kernel: computes the tiles.
        exchange: for the all-reduce; None for a ring of one rank.
        scale: factor of the scores.
    """

    classes: tuple[HeadTiles, ...]
    kernel: Kernel
    exchange: Exchange | None
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention of all queries over the keys of all ranks.

        Args:
            q: [B, H, Q, D], the same on all ranks.
            k, v: [B, G, S, D] and [B, G, S, E], this rank's shard.

        Returns:
            out [B, H, Q, E] in q's dtype, contiguous; lse [B, H, Q], float32 (float64 for float64 inputs).
            The same bits on all ranks.
        """
        out, lse = make_empty_results(q, v.shape[-1], get_accumulator_dtype(q.dtype))
        for heads, kv_heads, tiles in self.classes:
            out_w, lse_w = out[:, heads], lse[:, heads]
            operands = (q[:, heads], k[:, kv_heads], v[:, kv_heads])
            for part in self.kernel.select_heads(heads).forward(*operands, tiles, self.scale):
                rows, heads_here = part.q_rows, part.heads
                merge_(
                    rows.select(out_w[:, heads_here]),
                    rows.select(lse_w[:, heads_here]),
                    part.out_BHSD,
                    part.lse_BHS,
                )
        if self.exchange is not None:
            # [B * H * Q, E + 1]: the lse is one more column, in the same message.
            rows_ND = torch.cat([out, lse.unsqueeze(-1)], dim=-1).flatten(0, 2)
            whole = all_reduce(self.exchange, rows_ND, merge_rows).view(*q.shape[:3], -1)
            out, lse = whole[..., :-1], whole[..., -1].contiguous()
        return out.to(q.dtype).contiguous(), lse

    # [Note: gradients of replicated queries] The result is the same on all ranks, so by convention each rank
    # computes the same loss from it: grad_out is equal on all ranks and counts once. Then dq is the whole
    # gradient, equal on all ranks (the sum of the contributions of their shards), and dk, dv are the
    # gradients of this rank's shard. Nothing is multiplied by P. If an engine sums parameter gradients over
    # the ring, the gradients upstream of k and v are right, but those upstream of q are P times too large:
    # scale dq by 1 / P there. If ranks compute different losses (each of some rows, say), they must sum
    # grad_out over the ring before this pass.
    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the whole dq, and this rank's dk, dv; see [Note: gradients of replicated queries].

        Args:
            grad_out: [B, H, Q, E], the same on all ranks.
            q, k, v, out, lse: inputs and results of `forward`.
            grad_lse: [B, H, Q], the same on all ranks; None for 0.

        Returns:
            dq, dk, dv, contiguous, in the dtypes of q, k, v.
        """
        dtype = get_accumulator_dtype(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        for heads, kv_heads, tiles in self.classes:
            grad_w, q_w, out_w, lse_w, dq_w = (x[:, heads] for x in (grad_out, q, out, lse, dq))
            k_w, v_w, dk_w, dv_w = (x[:, kv_heads] for x in (k, v, dk, dv))
            grad_lse_w = None if grad_lse is None else grad_lse[:, heads]
            inputs = (grad_w, q_w, k_w, v_w, out_w, lse_w, tiles, self.scale, grad_lse_w)
            for part in self.kernel.select_heads(heads).backward(*inputs):
                part.add_to(dq_w, dk_w, dv_w)
        if self.exchange is not None:
            # dk and dv need no message, since the keys are on this rank only.
            dq = all_reduce(self.exchange, dq.flatten(0, 2), sum_rows).view(q.shape)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
