"""Merge attention over disjoint keys by the log-sum-exps of its parts."""

from __future__ import annotations

import torch
from torch import Tensor


def merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge (out, lse) over disjoint keys. Differentiable; a row without keys has out 0 and lse -inf."""
    (out, lse), (second_out, second_lse) = first, second
    seen = torch.maximum(lse, second_lse) > -torch.inf
    lse, second_lse = (x.where(seen, 0.0) for x in (lse, second_lse))  # else NaN, in gradients too
    both = torch.logaddexp(lse, second_lse)
    weight, second_weight = (torch.exp(x - both).unsqueeze(-1) for x in (lse, second_lse))
    # in float32 at least, as the lse
    total = (weight * out.to(lse.dtype) + second_weight * second_out.to(lse.dtype)).to(out.dtype)
    return total, both.where(seen, -torch.inf)
