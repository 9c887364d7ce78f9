"""check_finite names rank, tensor and hop; without it NaN and infinities pass through, as in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_ring import Causal, Full, RingMesh
from ds_ring.kernels.flash.executors import OnCpu
from tests import calls
from tests.dist.harness import Pool, RankOutcome, catch_refusal, run_ranks_collect


def attend(rank: int, world_size: int, where: str, check: bool, queries: str = "sharded") -> tuple[str, bool]:
    """Rank 1 has something that is not finite; the error of this rank, and whether its output is finite."""
    mesh = RingMesh.from_world(world_size)
    torch.manual_seed(3)
    q, k, v, grad = (torch.randn(1, 2, 8, 4) for _ in range(4))
    if rank == 1 and where in "qkv":
        {"q": q, "k": k, "v": v}[where][0, 1, 3, 2] = float("nan")
    sinks = torch.zeros(2)
    if rank == 1 and where == "sinks":
        sinks[1] = float("nan")
    if rank == 1 and where == "grad_out":
        grad[0, 0, 0, 0] = float("inf")
    if rank == 1 and where == "overflow":
        k *= 1e38
        q *= 1e38
    for x in (q, k, v):
        x.requires_grad_()
    pattern = Full() if queries == "replicated" else Causal()
    outs: list[torch.Tensor] = []

    def run() -> None:
        outs.append(calls.attend(
            q, k, v, pattern=pattern, layout="contiguous", mesh=mesh, sinks=sinks, check_finite=check,
            queries=queries,
        ))  # fmt: skip
        outs[0].backward(grad)

    return catch_refusal(run), bool(outs and outs[0].isfinite().all())


def outcomes(where: str, check: bool, *extra: str) -> list[RankOutcome]:
    return run_ranks_collect(attend, 2, where, check, *extra, timeout_s=60)


@pytest.mark.parametrize("where", ["q", "k", "v", "sinks", "grad_out"])
def test_inputs_are_named_before_anything_is_sent(rank_pool: Pool, where: str) -> None:
    peer, culprit = rank_pool(2).run(attend, where, True)
    assert culprit[0].startswith("RingFiniteError"), culprit
    count = 2 if where == "sinks" else 64
    assert f"in {where} of ring rank 1 before the first hop, got 1 of {count}" in culprit[0]
    assert peer[0].startswith("RingMismatchError") and f"in {where} of ring rank 1" in peer[0], peer


def test_what_overflows_in_a_hop_is_named_with_the_hop() -> None:
    peer, culprit = (item.value for item in outcomes("overflow", True))
    assert culprit[0].startswith("RingFiniteError") and "rank 1 after hop 0" in culprit[0], culprit
    assert peer[0].startswith("RingPeerError") and "RingFiniteError" in peer[0], peer


def fail_in_kernel(rank: int, world_size: int) -> str:
    """The error of this rank, where the kernel of rank 1 fails in the backward pass."""

    def fails(*inputs: Any) -> Any:
        raise RuntimeError("CUDA error: misaligned address")

    mesh = RingMesh.from_world(world_size)
    q, k, v = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3))
    out = calls.attend(q, k, v, pattern=Causal(), layout="contiguous", mesh=mesh, kernel="flash")
    if rank == 1:
        OnCpu.backward = fails  # type: ignore[method-assign]
    return catch_refusal(out.sum().backward)


def test_a_kernel_that_fails_is_named_on_every_rank() -> None:
    peer, culprit = (item.value for item in run_ranks_collect(fail_in_kernel, 2, timeout_s=60))
    assert culprit.startswith("RingKernelError") and '"implementation": "FA2"' in culprit, culprit
    assert peer.startswith("RingPeerError") and "misaligned address" in peer and "rank 1" in peer, peer


def test_replicated_queries_are_checked_too(rank_pool: Pool) -> None:
    peer, culprit = rank_pool(2).run(attend, "k", True, "replicated")
    assert peer[0].startswith("RingMismatchError") and culprit[0].startswith("RingFiniteError")


def test_without_the_check_they_pass_through(rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(attend, "v", False)
    assert (first, second) == (("", True), ("", False))
