"""The deadline of a first pass: ranks compile at their own pace there, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from ds_ring import Causal, RingMesh, RingPeerError
from ds_ring.runtime import context as context_module
from ds_ring.runtime.autograd import ring_attention_op
from ds_ring.runtime.context import Options, context_for
from ds_ring.runtime.kernels.cpu import CpuKernel
from tests.dist.harness import RankPool

HOP_S, SKEW_S = 1.0, 2.5


def passes(rank: int, world_size: int) -> tuple[float, str]:
    """A slow first pass of rank 1, then a slow second one: seconds of the first, error of the second.

    Backward: a rank returns gradients when it has computed them.
    """

    def backward(kernel: CpuKernel, *arguments: Any) -> Iterator[Any]:
        time.sleep(SKEW_S if rank == 1 else 0.0)
        return real(kernel, *arguments)

    real, mesh = CpuKernel.backward, RingMesh.from_world(world_size)
    options = Options(hop_timeout_s=HOP_S, first_pass_timeout_s=60.0)
    context = context_for(Causal(), "zigzag", mesh, options)
    q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    with (
        mock.patch.object(context_module, "COMPILES_NOTHING", set()),  # as if the CPU compiled
        mock.patch.object(CpuKernel, "backward", backward),
    ):
        before = time.monotonic()
        ring_attention_op(q, k, v, context.handle)[0].sum().backward()
        seconds = time.monotonic() - before
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
