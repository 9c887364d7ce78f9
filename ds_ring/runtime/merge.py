"""Merging partial attention results over disjoint keys. Owns this formula and nothing else.

    lse = logaddexp(lse1, lse2),  out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)

(Liu et al. 2023, Ring Attention, section 3; Dao et al. 2022, FlashAttention, for the online softmax.)
With w = exp(lse2 - lse) = sigmoid(lse2 - lse1) that is `lerp(out1, out2, w)`, one pass over the outputs.
A row that saw no key has out 0 and lse -inf, and stays so without a NaN: w is computed against a finite
stand-in for lse1, so that no (-inf) - (-inf) is ever formed. `logaddexp` subtracts the maximum first, so any
gap between the two is exact and finite (the popular `log1p(exp(gap))` overflows at a gap of 89 in float32).
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
    part_lse_BHS = part_lse_BHS.to(lse_BHS.dtype)
    finite_BHS = lse_BHS.clamp_min(torch.finfo(lse_BHS.dtype).min)
    weight_BHS = torch.sigmoid(part_lse_BHS - finite_BHS)
    out_BHSD.lerp_(part_out_BHSD.to(out_BHSD.dtype), weight_BHS.unsqueeze(-1))
    lse_BHS.copy_(torch.logaddexp(lse_BHS, part_lse_BHS))


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What results are accumulated in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
