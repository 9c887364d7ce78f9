"""The pass of one rank of a ring whose other ranks are missing, on a machine without a GPU.

Owns the stand-ins: operators that compute nothing, works that behave as NCCL's, merges of one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_ring import Causal
from ds_ring.comm.exchange import Exchange, Route
from ds_ring.comm.in_flight import Pending
from ds_ring.comm.messages import Message
from ds_ring.comm.streams import Streams
from ds_ring.kernels.flash.executors import Flash, Operators
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.kernels.interface import Kernel
from ds_ring.masks.pattern import Pattern
from ds_ring.ring.pool import Buffers
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule.layout import make_layout
from ds_ring.schedule.plan import build_plan
from tests.host_waits import fake_ring

CAUSAL = Causal()
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 8


class NoOperators:
    """Return tensors of the shapes of FlashAttention's results; each is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.Size, ...], tuple[Tensor, ...]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        if (q.shape,) not in self._made:
            batch, tokens, heads, _width = q.shape
            lse = torch.zeros(batch, heads, tokens)
            self._made[q.shape,] = torch.ones(q.shape, dtype=q.dtype), lse
        return self._made[q.shape,]

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, ...]:
        key = (q.shape, k.shape)
        if key not in self._made:
            self._made[key] = tuple(torch.ones(x.shape, dtype=x.dtype) for x in (q, k, v))
        return self._made[key]


def one_launch(out: Tensor, *_: object) -> None:
    """Replace a merge or a sum of parts: one launch on CUDA, up to some twenty operators here."""
    out.zero_()


class DeviceExchange(Exchange):
    """Wait for works as on a GPU: by the stream, and a thread watches over them."""

    def route(self, *sides: Sequence[Message]) -> Route:
        route = super().route(*sides)
        # NCCL's way: one Work for all messages of a batch
        return route._replace(peers=route.all_peers)

    def start(self, *batch: Any) -> Pending:
        pending = super().start(*batch)
        del pending.works[1:]
        return pending

    def _streams_that_wait(self, tensor: Tensor, group: object) -> Streams:
        return self.streams(tensor)


def flash_without_operators() -> FlashKernel:
    """Return the kernel as on CUDA, with operators that compute nothing."""
    kernel, stand_in = FlashKernel(), NoOperators()
    operators = Operators(flash_forward=stand_in.forward, flash_backward=stand_in.backward)
    kernel.executors = (Flash(operators),)
    return kernel


@torch._dynamo.register_backend
def made_before(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph, for torch.compile, to a function that computes once for each set of shapes."""
    results: dict[tuple[Any, ...], Any] = {}

    def call(*operands: Any) -> Any:
        key = tuple(x.shape if isinstance(x, Tensor) else x for x in operands)
        if key not in results:
            results[key] = module(*operands)
        return results[key]

    return call


@dataclass(frozen=True)
class Hops:
    """Hold one rank of a ring whose other ranks are missing, and its two passes."""

    ring_pass: RingPass
    ring_size: int  # hops of a pass
    operands: tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, grad_out
    results: tuple[Tensor, Tensor]  # out, lse

    def forward(self) -> object:
        q, k, v, _ = self.operands
        return self.ring_pass.forward(q, k, v)

    def backward(self) -> object:
        q, k, v, grad_out = self.operands
        return self.ring_pass.backward(grad_out, q, k, v, *self.results)


@contextmanager
def prepare_hops(
    pattern: Pattern = CAUSAL, layout_name: str = "zigzag", ring_size: int = 8, slots: int = 16,
    whole_merge: bool = False, kernel: Kernel | None = None,
) -> Iterator[Hops]:  # fmt: skip
    """Return the passes of the rank in the middle of a ring."""
    rank = ring_size // 2 - 1
    with ExitStack() as stack:
        mesh = stack.enter_context(fake_ring(rank, ring_size))
        stack.enter_context(mock.patch("ds_ring.kernels.flash.kernel._make_usable", lambda x, width: x))
        # as on CUDA: K and V of one head are one message there
        stack.enter_context(mock.patch("ds_ring.ring.buffers.check_keys_apart", return_value=False))
        if not whole_merge:
            for name in ("merge_", "merge_parts_", "add_parts_"):
                stack.enter_context(mock.patch(f"ds_ring.ring.accumulator.{name}", one_launch))
        layout = make_layout(layout_name, tokens=slots * ring_size, ring_size=ring_size, pattern=pattern)
        plan = build_plan(pattern, layout, query_heads=HEADS, kv_heads=KV_HEADS)
        kernel, exchange = kernel or flash_without_operators(), DeviceExchange(mesh)
        ring_pass = RingPass(plan.rank(rank), kernel, exchange, 0.25, buffers=mesh.owners[Buffers])
        shapes = [(1, heads, slots, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
        q, k, v, grad_out = (torch.ones(shape, dtype=torch.bfloat16) for shape in shapes)
        yield Hops(ring_pass, ring_size, (q, k, v, grad_out), ring_pass.forward(q, k, v))
