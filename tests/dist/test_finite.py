"""check_finite names rank, tensor and hop; without it NaN and infinities pass through, as in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_ring import Causal, Full, RingError, RingMesh
from ds_ring.kernels.flash.executors import OnCpu
from tests import calls
from tests.dist.harness import Pool, RankOutcome, run_ranks_collect


def attend(
    rank: int, world_size: int, where: str, check: bool, queries: str = "sharded"
) -> tuple[str, str, bool]:
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
    try:
        out = calls.attend(
            q, k, v, pattern=pattern, layout="contiguous", mesh=mesh, sinks=sinks, check_finite=check,
            queries=queries,
        )  # fmt: skip
        out.backward(grad)
    except RingError as error:
        return type(error).__name__, str(error), False
    return "", "", bool(out.isfinite().all())


def outcomes(where: str, check: bool, *extra: str) -> list[RankOutcome]:
    return run_ranks_collect(attend, 2, where, check, *extra, timeout_s=60)


@pytest.mark.parametrize("where", ["q", "k", "v", "sinks", "grad_out"])
def test_inputs_are_named_before_anything_is_sent(rank_pool: Pool, where: str) -> None:
    peer, culprit = rank_pool(2).run(attend, where, True)
    assert culprit[0] == "RingFiniteError", culprit
    count = 2 if where == "sinks" else 64
    assert f"in {where} of ring rank 1 before the first hop, got 1 of {count}" in culprit[1]
    assert peer[0] == "RingMismatchError" and f"in {where} of ring rank 1" in peer[1], peer


def test_what_overflows_in_a_hop_is_named_with_the_hop() -> None:
    peer, culprit = (item.value for item in outcomes("overflow", True))
    assert culprit[0] == "RingFiniteError" and "of ring rank 1 after hop 0" in culprit[1], culprit
    assert peer[0] == "RingPeerError" and "RingFiniteError" in peer[1], peer


def fail_in_kernel(rank: int, world_size: int) -> tuple[str, str]:
    """The error of this rank, where the kernel of rank 1 fails in the backward pass."""

    def fails(*inputs: Any) -> Any:
        raise RuntimeError("CUDA error: misaligned address")

    mesh = RingMesh.from_world(world_size)
    q, k, v = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3))
    try:
        out = calls.attend(q, k, v, pattern=Causal(), layout="contiguous", mesh=mesh, kernel="flash")
        if rank == 1:
            OnCpu.backward = fails  # type: ignore[method-assign]
        out.sum().backward()
    except RingError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_kernel_that_fails_is_named_on_every_rank() -> None:
    peer, culprit = (item.value for item in run_ranks_collect(fail_in_kernel, 2, timeout_s=60))
    assert culprit[0] == "RingKernelError" and '"implementation": "FA2"' in culprit[1], culprit
    assert peer[0] == "RingPeerError" and "misaligned address" in peer[1] and "rank 1" in peer[1], peer


def test_replicated_queries_are_checked_too(rank_pool: Pool) -> None:
    peer, culprit = rank_pool(2).run(attend, "k", True, "replicated")
    assert (peer[0], culprit[0]) == ("RingMismatchError", "RingFiniteError")


def test_without_the_check_they_pass_through(rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(attend, "v", False)
    assert (first[0], second[0]) == ("", "") and first[2] and not second[2]
