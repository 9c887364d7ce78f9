"""Merge attention over disjoint keys by the log-sum-exps of its parts."""

from __future__ import annotations

import torch
from torch import Tensor


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge (out, lse) over disjoint keys. Differentiable; a row without keys has out 0 and lse -inf."""
    (out, lse), (more, more_lse) = one, other
    seen = torch.maximum(lse, more_lse) > -torch.inf
    lse, more_lse = (x.where(seen, 0.0) for x in (lse, more_lse))  # else NaN, in gradients too
    both = torch.logaddexp(lse, more_lse)
    weight, weight_of_more = (torch.exp(x - both).unsqueeze(-1) for x in (lse, more_lse))
    # in float32 at least, as the lse
    total = (weight * out.to(lse.dtype) + weight_of_more * more.to(lse.dtype)).to(out.dtype)
    return total, both.where(seen, -torch.inf)
