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
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.gpu_rates import Shape
from benchmarks.measuring import ResultRow
from torch import Tensor
from torch.distributed import distributed_c10d

from ds_ring import Full, RingMesh
from ds_ring.comm import exchange
from ds_ring.comm.exchange import Exchange, start_batch
from ds_ring.ops.context import context_for
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.registry import KV_PAYLOADS
from ds_ring.schedule.grid import Grid
from tests.reference import dense_attention, relative_error

FLOAT8_NAN = 127  # the byte of e4m3fn
MIDDLE = 1  # the rank of the ring that is computed; all have the same tensors


class SelfMesh(RingMesh):
    """A mesh of one rank of a ring whose members are all this process."""

    def global_rank_of(self, ring_rank: int) -> int:
        """Return 0, the only rank of the world."""
        return 0


class _Done:
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
    return [_Done() for _ in operations]


def _poisoned(route: Any, sent: Any, received: Any) -> Any:
    """Start a batch whose buffers hold NaN until the messages are there: a stale one holds equal numbers."""
    for x in received:
        x.fill_(math.nan if x.is_floating_point() else FLOAT8_NAN)
    return start_batch(route, sent, received)


@contextmanager
def self_group(device: str) -> Iterator[None]:
    """Make a process group of this process that may send to itself."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{folder}/store", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        patch = mock.patch.object
        stack.enter_context(patch(distributed_c10d, "_check_not_self_rank"))
        stack.enter_context(patch(Exchange, "spread", lambda _, header: torch.stack([header, header])))
        stack.enter_context(patch(exchange, "start_batch", _poisoned))
        if device != "cuda":
            stack.enter_context(patch(dist, "batch_isend_irecv", copied))
        yield


def self_ring_row(
    shape: Shape,
    local_tokens: int,
    ring_size: int,
    kernel: str,
    stage_bytes: int = 0,
    kv_payload: str = "as_is",
) -> ResultRow:
    """Return the errors of a forward and a backward pass against float64, relative to the largest value.

    Call it within `self_group`. `stage_bytes` and `kv_payload` are those of the JSON; 0: hop by hop.
    """
    torch.manual_seed(0)
    grid = Grid(ring_size, ring_size)
    mesh = SelfMesh(grid, MIDDLE, ring_group=dist.group.WORLD, sequence_group=dist.group.WORLD)
    q, grad = (shape.tensor(shape.heads, local_tokens) for _ in range(2))
    k, v = (shape.tensor(shape.kv_heads, local_tokens) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    begin = time.perf_counter()
    try:
        options = Options(kernel=kernel, stage_bytes=stage_bytes, kv_payload=kv_payload)
        out, lse = ring_attention_op(*leaves, context_for(Full(), "contiguous", mesh, options).handle)
        grads = torch.autograd.grad(out, leaves, grad)
        mesh.synchronize()
    finally:
        mesh.close()
    seconds = time.perf_counter() - begin
    want = dense_attention(*(x.detach().cpu() for x in (q, k, v, grad)), Full())
    parts: dict[str, tuple[Tensor, Tensor]] = {
        "out": (out, want.out), "lse": (lse, want.lse + math.log(ring_size)),
        "dq": (grads[0], want.dq), "dk": (grads[1], want.dk), "dv": (grads[2], want.dv),
    }  # fmt: skip
    case = {"ring_size": ring_size, "kernel": kernel, "local_tokens": local_tokens}
    case |= {"keys_travel": "in stages" if stage_bytes else "hop by hop", "kv_payload": kv_payload}
    errors = {name: relative_error(got.cpu(), expected) for name, (got, expected) in parts.items()}
    limit = 0.15 if not KV_PAYLOADS[kv_payload].exact else 2e-2 if shape.dtype.itemsize == 2 else 1e-5
    wrong = f"expected errors below {limit:g}" if max(errors.values()) >= limit else ""
    results = {f"error_{name}": f"{error:.1e}" for name, error in errors.items()}
    return ResultRow(case, results | {"first_pass_s": round(seconds, 2)}, wrong)
