"""The CUDA path, settled by one run on a GPU: kernel "flex" against float64, virtual ranks on one device.

Nothing here is judged by itself: out, lse and every gradient are held against dense float64 on the same
inputs, rounded to the dtype first. Run it with torch 2.13 and with 2.11 (gradients by a recomputed hop).
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from ds_ring import Causal, SlidingWindow
from ds_ring.kernels.flex.kernel import FlexKernel
from ds_ring.kernels.select import get_kernel
from ds_ring.masks.pattern import Pattern
from tests.cases import PATTERNS, Shape
from tests.gpu.against_float64 import hold_kernel

# Of the largest magnitude. float32 matrix products are set to full precision; parts of a ring in 16 bits are
# rounded hop by hop before they are merged in float32.
LIMITS = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LAYOUTS = {"dilated": "residue", "window": "contiguous"}
BLOCKS = 660  # tokens: five blocks and a part of one. Two blocks a rank hide tables that are read wrongly.
SHAPE = Shape(batch=2, query_heads=8, kv_heads=2, tokens=5 * BLOCKS, head_dim=64)


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.set_float32_matmul_precision("highest")


def hold(
    pattern: Pattern,
    ring_size: int,
    dtype: torch.dtype = torch.float32,
    layout_name: str = "zigzag",
    shape: Shape = SHAPE,
    kernel: FlexKernel | None = None,
) -> None:
    chosen = kernel or get_kernel("flex", "cuda")
    hold_kernel(chosen, pattern, layout_name, shape, dtype, ring_size, LIMITS[dtype])


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("name", list(PATTERNS))
def test_every_pattern_and_dtype(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    hold(PATTERNS[name](SHAPE.tokens), 4, dtype, LAYOUTS.get(name, "zigzag"))


@pytest.mark.parametrize("ring_size", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", ["causal", "dilated", "documents, causal"])
def test_every_ring_size(name: str, ring_size: int) -> None:
    torch._dynamo.reset()
    shape = Shape(1, 4, 2, max(ring_size, 5) * BLOCKS, 64)
    hold(PATTERNS[name](shape.tokens), ring_size, layout_name=LAYOUTS.get(name, "zigzag"), shape=shape)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_heads_and_their_groups(heads: int, kv_heads: int, head_dim: int) -> None:
    torch._dynamo.reset()
    shape = Shape(1, heads, kv_heads, 3 * BLOCKS, head_dim)
    hold(Causal(), 3, shape=shape)
    hold(PATTERNS["dilated"](shape.tokens), 3, shape=shape)


def test_all_hops_ranks_and_patterns_of_one_kind_are_one_compilation() -> None:
    torch._dynamo.reset()
    counters.clear()
    for pattern, layout_name in ((Causal(), "zigzag"), (SlidingWindow(300), "contiguous")):
        for ring_size in (2, 5):
            hold(pattern, ring_size, layout_name=layout_name)
    hold(PATTERNS["documents"](SHAPE.tokens), 3)
    assert counters["stats"]["unique_graphs"] == 2  # forward and backward


@pytest.mark.parametrize("recompute", [False, True])
def test_both_ways_back(recompute: bool) -> None:
    """The operator with the global out and lse, and the recomputed hop, which older versions take."""
    from ds_ring.compat.torch_kernels import derives_joint_graph

    if not recompute and not derives_joint_graph():
        pytest.skip(f"torch {torch.__version__} does not compile flex_attention_backward by itself")
    torch._dynamo.reset()
    kernel = FlexKernel(recompute=recompute)
    hold(Causal(), 3, kernel=kernel)
    hold(PATTERNS["dilated"](SHAPE.tokens), 3, kernel=kernel)


def test_kernel_options_and_block_sizes() -> None:
    for block in (64, 256):
        torch._dynamo.reset()
        hold(Causal(), 2, kernel=FlexKernel(block, fwd_BLOCK_M=64, fwd_BLOCK_N=32))


def test_autocast_does_not_reach_the_kernel() -> None:
    torch._dynamo.reset()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        hold(Causal(), 2)
