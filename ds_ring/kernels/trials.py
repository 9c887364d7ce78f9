"""Try a kernel before it is used: small calls, forward and backward, held against the reference kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ring.kernels.interface import Kernel
from ds_ring.kernels.reference import ReferenceKernel
from ds_ring.masks.catalog import Causal, Chunked, Full, SlidingWindow
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles

LIMITS = {torch.bfloat16: 0.05, torch.float16: 0.05, torch.float32: 1e-4, torch.float64: 1e-9}


class Trial(NamedTuple):
    """Describe a call that an implementation has to compute; the last queries of the keys' positions attend.

    With `low_lse` every score is about -120: a kernel that computes exp(-lse) overflows.
    """

    pattern: Pattern
    queries: int
    keys: int
    low_lse: bool = False


# A triangle, a window, sequences of several lengths, and calls in which cuDNN has made NaN of gradients.
TRIALS = (
    Trial(Causal(), 96, 96), Trial(SlidingWindow(50), 96, 160), Trial(Chunked(30), 96, 96),
    Trial(Full(), 64, 192, True), Trial(Full(), 1, 128, True),
)  # fmt: skip
LOW_SCORE = 120.0
TRIAL_HEADS, TRIAL_KV_HEADS = 16, 8  # with fewer K/V heads cuDNN is not asked on sm_100


def try_kernel(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
) -> None:
    """Compare small calls of a kernel with the reference; [Note: a default is a try].

    Raises:
        ArithmeticError: a result differs.
        Exception: what the implementation raises.
    """
    scale = head_dim**-0.5
    draw = torch.Generator().manual_seed(0)
    for pattern, queries, keys, low_lse in TRIALS:
        runs = [np.array([[keys - n, 1, n]]) for n in (queries, keys)]
        tiles = pattern.tiles(*runs)
        heads, kv_heads = TRIAL_HEADS, TRIAL_KV_HEADS
        sizes = (
            (heads, queries, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, value_dim),
            (heads, queries, value_dim),
        )  # fmt: skip
        options: dict[str, Any] = {"generator": draw, "dtype": torch.float32, "device": "cpu"}
        operands = [torch.randn(1, *size, **options) for size in sizes]
        if low_lse:
            # Large queries and keys of one: large keys would make dQ a sum whose terms cancel.
            operands[0][..., 0], operands[1][..., 0] = LOW_SCORE / scale, -1.0
        operands = [x.to(dtype) for x in operands]
        q, k, v, grad_out = (x.double() for x in operands)
        wanted = _compute_results(ReferenceKernel(), grad_out, q, k, v, tiles, scale)
        q, k, v, grad_out = (x.to(device) for x in operands)
        got = _compute_results(kernel, grad_out, q, k, v, tiles, scale)
        for name, ours, exact in zip(("out", "lse", "dq", "dk", "dv"), got, wanted, strict=True):
            error = float((ours.cpu().double() - exact).abs().max() / exact.abs().max())
            if not error <= LIMITS[dtype]:  # also NaN
                raise ArithmeticError(f"{name} of {pattern} differs by {error:.1e} of its largest value")


def _compute_results(
    kernel: Kernel, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float
) -> list[Tensor]:
    """Return out, lse, dq, dk and dv of a forward and a backward pass."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(grad_out, dtype=dtype), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    for part in kernel.forward(q, k, v, tiles, scale):
        total, sums = (part.q_rows.select(x[:, part.heads]) for x in (out, lse))
        merged = torch.logaddexp(sums, part.lse_BHS.to(dtype))
        weights = [torch.exp(x - merged).nan_to_num(0.0).unsqueeze(-1) for x in (sums, part.lse_BHS)]
        total.copy_(total * weights[0] + part.out_BHSD * weights[1])
        sums.copy_(merged)
    out = out.to(q.dtype)
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    for grads in kernel.backward(grad_out, q, k, v, out, lse, tiles, scale):
        grads.add_to(*gradients)
    return [out, lse, *gradients]
