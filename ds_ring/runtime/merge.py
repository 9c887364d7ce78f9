"""Merge partial attention results over disjoint keys. Owns this formula and nothing else.

    lse = logaddexp(lse1, lse2),  out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)

(Liu et al. 2023, Ring Attention, section 3; Dao et al. 2022, FlashAttention, for the online softmax.)
A row that saw no key has out 0 and lse -inf, and stays so without a NaN: the weights are computed against a
finite stand-in, so that no (-inf) - (-inf) is ever formed. `logaddexp` subtracts the maximum first, so any
gap between the two is exact and finite (the popular `log1p(exp(gap))` overflows at a gap of 89 in float32).
Not `lerp`, though it is one pass: its rounding depends on strides, and a head's bits must not depend on
which other heads it is computed with.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out_BHSD: Tensor, lse_BHS: Tensor, part_out_BHSD: Tensor, part_lse_BHS: Tensor) -> None:
    """Merge a partial result into an accumulator, in place.

    Args:
        out_BHSD: accumulated output, [batch, heads, tokens, head_dim], float32 or float64; changed.
        lse_BHS: accumulated natural-log log-sum-exp, [batch, heads, tokens], same dtype; changed.
        part_out_BHSD, part_lse_BHS: what is added, over keys not seen so far; not changed.
    """
    part_lse_BHS = part_lse_BHS.to(lse_BHS.dtype)
    merged_BHS = torch.logaddexp(lse_BHS, part_lse_BHS)
    # Changes rows without keys only: their weights are exp(-inf) = 0.
    finite_BHS = merged_BHS.clamp_min(torch.finfo(merged_BHS.dtype).min)
    old_weight = torch.exp(lse_BHS - finite_BHS).unsqueeze(-1)
    new_weight = torch.exp(part_lse_BHS - finite_BHS).unsqueeze(-1)
    out_BHSD.mul_(old_weight).addcmul_(part_out_BHSD.to(out_BHSD.dtype), new_weight)
    lse_BHS.copy_(merged_BHS)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what results are accumulated in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
