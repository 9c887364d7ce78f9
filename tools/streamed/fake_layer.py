"""A transformer layer on one rank of a large ring, on fake tensors: nothing is allocated.

Attention is the production pass in an autograd function of its own: through the operator, fake tensors would
only see its fake implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from common import fake_mesh
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ring import make_layout
from ds_ring.errors import RingMeshError
from ds_ring.ops.context import context_for, context_of
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import run_backward, run_forward
from ds_ring.patterns.dilated.pattern import Dilated
from streamed.long_run import LongRun

HEADS = 4
# few and large calls: each fake operator costs milliseconds; the workspace is the larger for it
FEW_CALLS: dict[str, Any] = {"block": 1 << 17, "triangle": 128}
KINDS = {"PARAM": "parameters", "GRAD": "their gradients", "ACT": "activations", "TEMP": "backward"}


class _Attention(torch.autograd.Function):
    """The ring pass, as the operator has it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, handle: int) -> Tensor:
        out, lse = run_forward(context_of(handle), q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.handle = handle
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*run_backward(context_of(ctx.handle), grads[0], q, k, v, out, lse), None)


class Layer(nn.Module):
    """Norm, attention, norm, MLP of four times the width; x [1, S, H * D]."""

    def __init__(self, head_dim: int, handle: int) -> None:
        super().__init__()
        width = HEADS * head_dim
        self.head_dim, self.handle = head_dim, handle
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.mix = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, HEADS, self.head_dim)
        q, k, v = self.qkv(self.before_attention(x)).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        attended = _Attention.apply(q, k, v, self.handle).transpose(1, 2).reshape(x.shape)
        x = x + self.mix(attended)
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


def fake_layer(job: LongRun, rank: int) -> dict[str, float]:
    """Peak MiB of one rank, forward + backward, by its use; activations include the ring's buffers.

    Raises:
        RingMeshError: no such rank.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    if not 0 <= rank < job.ring_size:
        raise RingMeshError(f"--fake: expected ranks from 0 to {job.ring_size - 1}, got {rank}")
    with fake_mesh(rank, job.ring_size) as mesh:
        layout = make_layout("contiguous", tokens=job.tokens, ring_size=job.ring_size)
        dilated = job.pattern
        pattern = Dilated(dilated.segment_lengths, dilated.dilation_rates, head_offsets="zero")
        options = Options(kernel="cpu", kernel_options=FEW_CALLS, chunk_bytes=1 << 40)
        context = context_for(pattern, layout, mesh, options)
        with FakeTensorMode():
            layer, tracker = Layer(job.head_dim, context.handle), MemTracker()
            tracker.track_external(layer)
            with tracker:
                x = torch.empty(1, job.local_tokens, HEADS * job.head_dim, requires_grad=True)
                out = layer(x)
                out.backward(torch.empty_like(out))
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    found = {KINDS[kind]: value for key, value in peak.items() if (kind := str(key).split(".")[-1]) in KINDS}
    return {name: round(size / 2**20, 1) for name, size in {**found, "total": peak["Total"]}.items()}
