"""Low precision: the error against float64 does not grow with the number of ranks.

Rings that merge in the input's dtype, or send gradients in it, lose a little at every hop; here everything
that is added up is float32, whatever comes in. And the same inputs give the same bits, run after run, with
overlap and without: nothing depends on when a message arrives.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from ds_ring import (
    Causal,
    Dilated,
    Documents,
    RingMesh,
    SlidingWindow,
    make_layout,
)
from ds_ring.masks.pattern import Pattern
from tests.calls import attend
from tests.cases import Shape, document_ids, tensors
from tests.dist.harness import Pool
from tests.parity import NAMES, gathered_pass
from tests.reference import dense_attention

SHAPE = Shape(batch=1, query_heads=4, kv_heads=2, tokens=512, head_dim=32)
PATTERNS: dict[str, tuple[Pattern, str]] = {
    "causal": (Causal(), "zigzag"),
    "window": (SlidingWindow(70), "contiguous"),
    "LongNet": (Dilated((64, 256, 512), (1, 2, 4)), "residue"),
    "documents": (Documents(document_ids(512, mean=60)) & Causal(), "auto"),
}


def passed(rank: int, world_size: int, name: str, dtype: torch.dtype, overlap: bool = True) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence."""
    pattern, layout_name = PATTERNS[name]
    mesh = RingMesh.from_world(world_size)
    layout = make_layout(layout_name, tokens=SHAPE.tokens, ring_size=world_size, pattern=pattern)
    run = partial(attend, pattern=pattern, layout=layout, mesh=mesh, overlap=overlap)
    results = gathered_pass(run, [x.to(dtype) for x in tensors(SHAPE)], layout, mesh)
    assert {x.dtype for x in results} == {dtype}
    return results


def errors(result: list[Tensor], name: str, dtype: torch.dtype) -> list[float]:
    """Relative to the exact result for the rounded inputs, in the Euclidean norm; of out, dq, dk and dv."""
    q, k, v, grad = (x.to(dtype).double() for x in tensors(SHAPE))
    exact = dense_attention(q, k, v, grad, PATTERNS[name][0])
    wanted = (getattr(exact, tensor) for tensor in NAMES)
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(result, wanted, strict=True)]


@pytest.mark.night
@pytest.mark.parametrize("sizes", [(1, 2, 8), (4, 16)], ids=str)
@pytest.mark.parametrize(("name", "dtype"), [("causal", torch.bfloat16), ("LongNet", torch.float16)])
def test_the_error_does_not_grow_with_the_ring(
    rank_pool: Pool, name: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    """It is that of rounding the results once: at most half a unit in the last place, relative."""
    by_size = {
        size: errors(rank_pool(size).run(passed, name, dtype, timeout_s=120)[0], name, dtype)
        for size in sorted({1, *sizes})
    }
    rounding = torch.finfo(dtype).eps / 2
    for size, result in by_size.items():
        for tensor, error, alone in zip(NAMES, result, by_size[1], strict=True):
            assert error < 1.02 * alone, (size, tensor, by_size)
            assert error < rounding, (size, tensor, by_size)


def bits_that_differ(rank: int, world_size: int, name: str, dtype: torch.dtype) -> list[str]:
    """In three more passes, with overlap and without."""
    first = passed(rank, world_size, name, dtype)
    result = []
    for turn in range(3):
        again = passed(rank, world_size, name, dtype, overlap=turn % 2 == 0)
        pairs = zip(NAMES, first, again, strict=True)
        result += [f"pass {turn}: {tensor}" for tensor, x, y in pairs if not torch.equal(x, y)]
    return result


@pytest.mark.day("4-window-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(PATTERNS))
@pytest.mark.parametrize("size", [2, 4])
def test_the_same_inputs_give_the_same_bits(
    rank_pool: Pool, size: int, name: str, dtype: torch.dtype
) -> None:
    assert rank_pool(size).run(bits_that_differ, name, dtype, timeout_s=120) == [[]] * size
