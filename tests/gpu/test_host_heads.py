"""Attention's tensors on the host between its passes, on a GPU: exact, and the memory that is freed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ds_ring
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from tests.one_rank import one_rank_mesh

H, G, D = 32, 8, 128


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[ds_ring.RingMesh]:
    with one_rank_mesh("nccl", tmp_path) as made:
        yield made


def passes(mesh: ds_ring.RingMesh, tokens: int, offload: bool) -> tuple[list[torch.Tensor], int]:
    """Return out and the gradients, and the bytes that are alive between the passes."""
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [
        torch.randn(
            1, n, tokens, D, dtype=torch.bfloat16, device="cuda", generator=generator
        ).requires_grad_()
        for n in (H, G, G)
    ]
    context = make_ring_context(ds_ring.Causal(), "contiguous", mesh, Options(offload_attention=offload))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out, _ = ring_attention_op(*(x * 1 for x in leaves), context.handle)
    kept, loss = out.detach().cpu(), out.float().square().sum()
    del out, _
    torch.cuda.synchronize()
    between = torch.cuda.memory_allocated() - before
    loss.backward()
    return [kept, *(x.grad.cpu() for x in leaves if x.grad is not None)], between


def test_the_same_numbers_and_less_memory(mesh: ds_ring.RingMesh) -> None:
    tokens = 32_768
    torch.use_deterministic_algorithms(True)  # or dQ differs from pass to pass
    try:
        (here, most), (host, least) = (passes(mesh, tokens, offload) for offload in (False, True))
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(here, host, strict=True):
        assert torch.equal(one, other)
    saved = tokens * ((H + 2 * G + H) * D * 2 + H * 4)
    assert most - least > 0.9 * saved
