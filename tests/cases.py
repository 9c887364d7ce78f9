"""The registry of cases: layout x pattern x shape x dtype. A new pattern or layout is one row here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_ring import Causal, Full
from ds_ring.schedule.pattern import Pattern

RING_SIZES = (1, 2, 3, 4, 8)
LAYOUTS = ("contiguous", "zigzag", "striped")
PATTERNS: dict[str, Pattern] = {"causal": Causal(), "full": Full()}
LENGTHS = (1000, 1023)  # neither divides by 3, 8 or 16


@dataclass(frozen=True)
class Shape:
    """Global sizes of q, k and v."""

    batch: int = 2
    query_heads: int = 8
    kv_heads: int = 2
    tokens: int = 1000
    head_dim: int = 16


def tensors(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    b, h, g, t, d = shape.batch, shape.query_heads, shape.kv_heads, shape.tokens, shape.head_dim
    sizes = [(b, h, t, d), (b, g, t, d), (b, g, t, d), (b, h, t, d)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]
