"""Time real passes: forward and backward of one attention layer on all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ds_ring.module import RingAttention
from ds_ring.runtime.mesh import RingMesh

from .candidates import TuningCandidate, config_of, default_heads, layout_of
from .clock import Clock
from .request import Request

HEARTBEAT_S = 60.0
TINY_TOKENS = 16  # of a rank, where only the number of hops counts


class Passes:
    """Run candidates. All ranks must ask for the same ones in the same order.

    Args:
        request: shapes.
        clock: of all ranks.
        meshes: by ring and Ulysses size, those that there are already.
    """

    def __init__(
        self, request: Request, clock: Clock, meshes: dict[tuple[int, int], RingMesh] | None = None
    ) -> None:
        self.request, self.clock = request, clock
        self.count = 0
        self._meshes = dict(meshes or {})
        self._inputs: dict[tuple[int, ...], list[Tensor]] = {}

    def mesh(self, ring_size: int, ulysses_size: int) -> RingMesh:
        """Return the mesh of these sizes, made when first asked for."""
        sizes = (ring_size, ulysses_size)
        if sizes not in self._meshes:
            self._meshes[sizes] = RingMesh.from_world(*sizes, heartbeat_timeout_s=HEARTBEAT_S)
        return self._meshes[sizes]

    def seconds(self, candidate: TuningCandidate, tokens: int) -> float:
        """Measure one layer's pass on the slowest rank, inputs not counted; the mean where layers differ."""
        ring, ulysses = candidate.ring_size, candidate.ulysses_size
        layout = layout_of(self.request, candidate.layout, ring, ulysses, tokens)
        config, mesh = config_of(candidate, self.request, tokens), self.mesh(ring, ulysses)
        q, k, v, grad = self._tensors(layout.local_tokens // ulysses)
        total, mix = 0.0, self.request.mix
        for pattern, layers in mix:
            attention = RingAttention(config, mesh=mesh, layout=layout, pattern=pattern)

            def step(attention: RingAttention = attention) -> None:
                out = attention(q, k, v)
                torch.autograd.grad(out, (q, k, v), grad)

            self.count += 1
            total += layers * self.clock.together(step)
        return total / sum(layers for _, layers in mix)

    def hop_overhead(self, candidate: TuningCandidate) -> float:
        """Measure seconds of a hop that carries next to nothing; 0 in a ring of one."""
        if candidate.ring_size == 1:
            return 0.0
        tokens = TINY_TOKENS * self.request.sequence_size
        heads = default_heads(self.request, candidate.ring_size, candidate.ulysses_size, tokens)
        candidate = replace(candidate, heads_per_message=heads)  # all that are read alike
        self.seconds(candidate, tokens)
        return min(self.seconds(candidate, tokens) for _ in range(5)) / (2 * candidate.ring_size + 1)

    def close(self) -> None:
        """Free what was made."""
        self._inputs.clear()
        for mesh in self._meshes.values():
            mesh.close()

    def _tensors(self, local_tokens: int) -> list[Tensor]:
        """Return q, k, v and the gradient of out, [B, H, S, D]; those of one length are kept."""
        request = self.request
        shape = (request.batch, request.heads, local_tokens, request.head_dim)
        if shape not in self._inputs:
            # One length at a time: two of them may not fit the device.
            self._inputs.clear()
            dtype, device = getattr(torch, request.dtype), self.clock.device
            shapes = [shape, *[(shape[0], request.kv_heads, *shape[2:])] * 2, shape]
            made = [torch.randn(s, dtype=dtype, device=device) for s in shapes]
            self._inputs[shape] = [*(x.requires_grad_() for x in made[:3]), made[3]]
        return self._inputs[shape]
