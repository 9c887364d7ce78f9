"""Which pass is the first one of a shape."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ring import Causal, RingMesh
from ds_ring.runtime.context import RingContext
from ds_ring.runtime.options import Options
from tests.host_waits import cuda_guard, fake_ring


def deadline(
    mesh: RingMesh, device: str, operation: str, heads: int, tokens: int = 64, hop: float = 5
) -> float:
    context = RingContext(
        Causal(), "zigzag", mesh, Options(hop_timeout_s=hop, first_pass_timeout_s=50, kernel="flex")
    )
    with FakeTensorMode():
        q, k = (torch.empty(1, n, tokens, 64, device=device) for n in (heads, 2))
        context.agree(operation, q, k, None)
    assert context.exchange is not None
    return context.exchange.hop_timeout_s


def test_the_first_pass_of_a_shape_on_a_gpu_has_a_deadline_of_its_own() -> None:
    with cuda_guard(), fake_ring(1, 4) as mesh:
        found = [
            deadline(mesh, "cuda", "attention forward", 4),
            deadline(mesh, "cuda", "attention forward", 4, tokens=128),  # compiled for any number of tokens
            deadline(mesh, "cuda", "attention backward", 4),
            deadline(mesh, "cuda", "attention backward", 4),
            deadline(mesh, "cuda", "attention forward", 8),
            deadline(mesh, "cuda", "attention forward", 6, hop=90),  # the longer of both
            deadline(mesh, "cpu", "attention forward", 10),
        ]
    assert found == [50, 5, 50, 5, 50, 90, 5]
