"""The CPU kernel in a ring: the calls of Python of a warm pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_ring import Causal, RingMesh, ring_attention
from tests.dist.harness import Pool


def calls_of(act: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result of a function, the calls of ds_ring's functions that it made, and in how many files."""
    files: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and "/ds_ring/" in frame.f_code.co_filename:
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        result = act()
    finally:
        sys.setprofile(None)
    return result, len(files), len(set(files))


def calls_of_a_warm_pass(rank: int, world_size: int) -> list[int]:
    mesh = RingMesh.from_world(world_size)
    q, k, v = (torch.randn(1, heads, 64, 16, requires_grad=True) for heads in (4, 2, 2))

    def forward() -> Tensor:
        return ring_attention(q, k, v, pattern=Causal(), layout="zigzag", mesh=mesh)

    for _ in range(3):
        forward().sum().backward()
    out, *of_forward = calls_of(forward)
    _, *of_backward = calls_of(lambda: out.sum().backward())
    return of_forward + of_backward


def test_a_warm_pass_makes_few_calls(rank_pool: Pool) -> None:
    """Calls of Python are most of the host time of a hop: 112 in 23 files, and back 140 in 16."""
    forward, files, backward, files_back = rank_pool(2).run(calls_of_a_warm_pass)[0]
    assert 0 < forward <= 120 and files <= 23, (forward, files)
    assert 0 < backward <= 140 and files_back <= 18, (backward, files_back)
