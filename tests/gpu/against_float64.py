"""Hold a kernel's virtual ring on a GPU against dense float64 on the same inputs."""

from __future__ import annotations

import torch

from ds_ring.kernels.select import Kernel
from ds_ring.masks.pattern import Pattern
from tests.cases import Shape, layout_for, tensors
from tests.hops import ring_hops, worst_relative_error
from tests.reference import dense_attention


def hold_kernel(
    kernel: Kernel,
    pattern: Pattern,
    layout_name: str,
    shape: Shape,
    dtype: torch.dtype,
    ring_size: int,
    limit: float,
) -> None:
    """Out, lse and gradients are within a limit of the largest magnitude; rows without keys are empty."""
    q, k, v, grad = (x.cuda() for x in tensors(shape, dtype))
    layout = layout_for(layout_name, pattern, tokens=shape.tokens, ring_size=ring_size)
    got = ring_hops(kernel, q, k, v, grad, pattern, layout)
    error = worst_relative_error(got, dense_attention(q, k, v, grad, pattern))
    assert error < limit, f"{error:.1e}"
