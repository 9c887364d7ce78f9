"""Run `transport="all_gather"`: the reference against which the ring is measured. It is never a fallback.

Every rank gathers all keys and values (O(T) memory), computes the same tiles with the same kernel, and
reduces dK/dV back to their owners. It has its own backward, because torch's differentiable all-gather on gloo
silently returns wrong gradients if the incoming gradient is not contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ring.comm.exchange import Exchange
from ds_ring.kernels.interface import Kernel, value_dim
from ds_ring.masks.tiles import Tiles
from ds_ring.ops.context import RingContext
from ds_ring.ops.prepare import Prepared
from ds_ring.ring.merge import get_accumulator_dtype, make_empty_results, merge_
from ds_ring.schedule.lowering import get_query_heads
from ds_ring.schedule.plan import Plan


def make_pass(
    context: RingContext, prepared: Prepared, finish_header_check: Callable[[], None] | None
) -> GatherPass:
    """Return the pass of a context. It sends all heads at once: no chunks, no overlap, no kept buffers."""
    return GatherPass(
        prepared.plan, context.mesh.ring_rank, prepared.kernel, context.exchange, prepared.scale
    )


@dataclass(frozen=True)
class GatherPass:
    """The inputs of both passes; see `RingPass` for the shapes."""

    plan: Plan
    ring_rank: int
    kernel: Kernel
    exchange: Exchange | None
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Run the forward pass; same contract as `RingPass.forward`."""
        out, lse = make_empty_results(q, value_dim(self.kernel, v), get_accumulator_dtype(q.dtype))
        all_k, all_v = self._gather(k), self._gather(v)
        for origin, heads, kv, tiles in self._tiles():
            kv_pair = all_k[origin][:, kv], all_v[origin][:, kv]
            out_w, lse_w = out[:, heads], lse[:, heads]
            for part in self.kernel.select_heads(heads).forward(q[:, heads], *kv_pair, tiles, self.scale):
                rows, heads_here = part.q_rows, part.heads
                merge_(
                    rows.select(out_w[:, heads_here]),
                    rows.select(lse_w[:, heads_here]),
                    part.out_BHSD,
                    part.lse_BHS,
                )
        return out.to(q.dtype), lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients; same contract as `RingPass.backward`."""
        dtype = get_accumulator_dtype(q.dtype)
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        all_k, all_v = self._gather(k), self._gather(v)
        # Gradients of the keys of all ranks: O(T) memory, in the accumulators' dtype.
        all_dk, all_dv = ([torch.zeros_like(x, dtype=dtype) for x in parts] for parts in (all_k, all_v))
        for origin, heads, kv, tiles in self._tiles():
            kv_pair = all_k[origin][:, kv], all_v[origin][:, kv]
            grad_w, q_w, out_w, lse_w = (x[:, heads] for x in (grad_out, q, out, lse))
            grad_lse_w = None if grad_lse is None else grad_lse[:, heads]
            inputs = (grad_w, q_w, *kv_pair, out_w, lse_w, tiles, self.scale, grad_lse_w)
            dq_w, dk_w, dv_w = dq[:, heads], all_dk[origin][:, kv], all_dv[origin][:, kv]
            for part in self.kernel.select_heads(heads).backward(*inputs):
                part.add_to(dq_w, dk_w, dv_w)
        dk, dv = all_dk[0], all_dv[0]
        if self.exchange is not None:
            group = self.exchange.mesh.ring_group
            dk, dv = (self.exchange.reduce_scatter(parts, group) for parts in (all_dk, all_dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _tiles(self) -> Iterator[tuple[int, slice, slice, Tiles]]:
        """Yield origin, query heads, K/V heads and tiles of everything that this rank computes."""
        layout = self.plan.layout
        mine = layout.runs(self.ring_rank)
        for head_class in self.plan.classes:
            heads = get_query_heads(head_class.kv_heads, self.plan.group)
            for origin in range(self.plan.ring_size):
                # Tiles of whole shards, not of the plan's payloads: here every rank has all keys.
                yield origin, heads, head_class.kv_heads, head_class.pattern.tiles(mine, layout.runs(origin))

    def _gather(self, x: Tensor) -> list[Tensor]:
        if self.exchange is None:
            return [x]
        return self.exchange.all_gather(x, self.exchange.mesh.ring_group, self.plan.ring_size)
