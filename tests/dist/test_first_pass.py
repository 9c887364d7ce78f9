"""The deadline of a first pass: ranks compile at their own pace there, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from ds_ring import Causal, RingMesh, RingPeerError, RingShapeError
from ds_ring.kernels.cpu.kernel import CpuKernel
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.plugin import DEVICES
from tests.dist.harness import Failure, RankPool, catch_failure

HOP_S, SKEW_S = 0.6, 1.5


def passes(rank: int, world_size: int) -> tuple[float, str]:
    """A slow first pass of rank 1, then a slow second one: seconds of the first, error of the second.

    Backward: a rank returns gradients when it has computed them.
    """

    def backward(kernel: CpuKernel, *arguments: Any) -> Iterator[Any]:
        time.sleep(delays.pop() if delays else 0.0)
        return real(kernel, *arguments)

    delays: list[float] = []
    real, mesh = CpuKernel.backward, RingMesh.from_world(world_size)
    options = Options(hop_timeout_seconds=HOP_S, first_pass_timeout_seconds=60.0)
    context = make_ring_context(Causal(), "zigzag", mesh, options)
    q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    with (
        mock.patch.dict(DEVICES, cpu=DEVICES["cuda"]),  # as if the CPU compiled
        mock.patch.object(CpuKernel, "backward", backward),
    ):
        delays += [SKEW_S] if rank == 1 else []
        before = time.monotonic()
        ring_attention_op(q, k, v, context.handle)[0].sum().backward()
        seconds = time.monotonic() - before
        delays += [SKEW_S] if rank == 1 else []
        try:
            ring_attention_op(q, k, v, context.handle)[0].sum().backward()
        except RingPeerError as error:
            return seconds, f"{error.peer}: {error.cause}"
    return seconds, ""


def test_a_slow_first_pass_is_waited_for_and_a_slow_second_one_is_not(
    rank_pool: Callable[[int], RankPool],
) -> None:
    (first, error), (_, _) = rank_pool(2).run(passes)
    assert first > SKEW_S
    assert error.startswith("1: ") and "before the deadline (hop_timeout_seconds;" in error


def refused_by_compiling(rank: int, world_size: int) -> Failure:
    """The error of a pass for which rank 0 cannot say what it compiles."""

    def compiles(kernel: CpuKernel, *arguments: Any) -> bool:
        if rank == 0:
            raise RingShapeError("expected another shape, got this one")
        return False

    mesh = RingMesh.from_world(world_size)
    context = make_ring_context(Causal(), "zigzag", mesh, Options(hop_timeout_seconds=60.0))
    q = k = v = torch.randn(1, 2, 96, 16)  # a shape of its own: nobody has asked for it before
    with (
        mock.patch.dict(DEVICES, cpu=DEVICES["cuda"]),
        mock.patch.object(CpuKernel, "compiles", compiles, create=True),
    ):
        return catch_failure(ring_attention_op, q, k, v, context.handle)


def test_a_refusal_while_asking_what_compiles_reaches_the_others(
    rank_pool: Callable[[int], RankPool],
) -> None:
    first, second = rank_pool(2).run(refused_by_compiling)
    assert (first.error, second.error) == ("RingShapeError", "RingMismatchError")
    assert "expected another shape" in second.text and max(first.seconds, second.seconds) < 30.0
