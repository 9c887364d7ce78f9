"""A ring whose ranks are all this process: real messages of the production exchange on one GPU.

All shards are equal, so a rank of such a ring sends the tensors that it would receive from others: NCCL sends
them to the same process, through the exchange's batches, buffers, streams and watch. The results are those of
attention over one shard (a softmax over equal copies), the log-sum-exp is greater by log P. So a hop that is
lost, or added twice, shows in the log-sum-exp and in the gradients of keys and values, and a buffer that is
read too early as NaN. gloo cannot send to
itself ("Pair is not connected"): on the CPU copies in this process replace the messages.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ds_ring import Full, RingMesh
from ds_ring.comm import exchange
from ds_ring.comm.exchange import Exchange, start_batch
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.schedule.grid import Grid

MIDDLE = 1  # the rank of the ring that is computed; all have the same tensors


class SelfMesh(RingMesh):
    """A mesh of one rank of a ring whose members are all this process."""

    def global_rank_of(self, ring_rank: int) -> int:
        """Return 0, the only rank of the world."""
        return 0


class Done:
    """A work that has ended."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def copied(operations: list[Any]) -> list[Any]:
    """Replace `batch_isend_irecv` to oneself: copy the n-th tensor sent into the n-th received."""
    sides = ([x.tensor for x in operations if x.op is act] for act in (dist.isend, dist.irecv))
    for sent, received in zip(*sides, strict=True):
        if (sent.shape, sent.dtype) != (received.shape, received.dtype):
            raise RuntimeError(
                f"a message of {sent.shape} {sent.dtype} for {received.shape} {received.dtype}"
            )
        received.copy_(sent)
    return [Done() for _ in operations]


def poisoned(route: Any, sent: Any, received: Any) -> Any:
    """Start a batch whose buffers hold NaN until the messages are there: a stale one holds equal numbers."""
    for x in received:
        x.fill_(math.nan)
    return start_batch(route, sent, received)


@contextmanager
def self_group(device: str, start: Callable[..., Any] = start_batch) -> Iterator[None]:
    """Make a process group of this process that may send to itself; `start` starts its batches."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{folder}/store", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        patch = mock.patch.object
        stack.enter_context(patch(distributed_c10d, "_check_not_self_rank"))
        stack.enter_context(patch(Exchange, "spread", lambda _, header: torch.stack([header, header])))
        stack.enter_context(patch(exchange, "start_batch", start))
        if device != "cuda":
            stack.enter_context(patch(dist, "batch_isend_irecv", copied))
        yield


@contextmanager
def self_ring(
    operands: Sequence[Tensor], ring_size: int, options: Options
) -> Iterator[Callable[[], tuple[Tensor, ...]]]:
    """Return a forward and a backward pass of a rank whose ring is this process; within `self_group`.

    Args:
        operands: q, k, v and the gradient of out of every shard.

    Returns:
        The function that computes out, lse, dq, dk and dv.
    """
    *leaves, grad = (x.detach() for x in operands)
    for x in leaves:
        x.requires_grad_()
    grid = Grid(ring_size, ring_size)
    mesh = SelfMesh(grid, MIDDLE, ring_group=dist.group.WORLD, sequence_group=dist.group.WORLD)
    context = make_ring_context(Full(), "contiguous", mesh, options)

    def passes() -> tuple[Tensor, ...]:
        out, lse = ring_attention_op(*leaves, context.handle)
        return out.detach(), lse, *torch.autograd.grad(out, leaves, grad)

    try:
        yield passes
        mesh.synchronize()
    finally:
        mesh.close()
