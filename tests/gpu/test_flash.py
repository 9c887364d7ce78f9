"""Kernel "flash" on a GPU: every mask that is windows, 16-bit dtype, head dimension and implementation.

Out, lse and every gradient are held against dense float64 on the same inputs, rounded to the dtype first;
virtual ranks on one device. What an H200 showed is in tools/results/gpu_h200.md.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ds_ring import Full
from ds_ring.kernels.flash.kernel import FlashKernel
from tests.cases import LAYOUTS, PATTERNS, Shape
from tests.gpu.against_float64 import hold_kernel

LIMITS = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
WINDOWS = [name for name in PATTERNS if "mask function" not in name]


def hold(
    name: str, layout_name: str, head_dim: int, dtype: torch.dtype, ring_size: int, implementation: str
) -> None:
    shape = Shape(2, 8, 2, 2000, head_dim)
    pattern = PATTERNS[name](shape.tokens)
    kernel, limit = FlashKernel(implementation), LIMITS[dtype]
    hold_kernel(kernel, pattern, layout_name, shape, dtype, ring_size, limit)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_every_pattern_dtype_and_head_dimension(name: str, dtype: torch.dtype, head_dim: int) -> None:
    hold(name, "zigzag", head_dim, dtype, 4, "FA2")


@pytest.mark.parametrize(("name", "layout_name"), list(itertools.product(WINDOWS, LAYOUTS)))
def test_every_layout(name: str, layout_name: str) -> None:
    hold(name, layout_name, 64, torch.bfloat16, 3, "FA2")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", WINDOWS)
def test_cudnn(name: str, head_dim: int) -> None:
    hold(name, "zigzag", head_dim, torch.bfloat16, 4, "cuDNN")


def test_cudnn_after_torchs_own_attention_of_the_same_sizes() -> None:
    """Torch keeps cuDNN's graphs by q, k and v alone; the pass must not meet one of other strides."""
    shape = Shape(2, 8, 2, 500, 64)
    q, k, v = (
        torch.randn(2, heads, 500, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for heads in (8, 2, 2)
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    out.backward(torch.randn_like(out))
    hold_kernel(FlashKernel("cuDNN"), Full(), "contiguous", shape, torch.bfloat16, 1, LIMITS[torch.bfloat16])


@pytest.mark.parametrize("implementation", ["FA3", "FA4"])
@pytest.mark.parametrize("name", WINDOWS)
def test_other_implementations_where_their_packages_are(name: str, implementation: str) -> None:
    module = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}[implementation]
    pytest.importorskip(module, exc_type=ImportError)  # flash-attn 2.8.3 has a part of the latter
    hold(name, "zigzag", 128, torch.bfloat16, 4, implementation)
