"""Say what is asked of each peer, and compute the answer densely in float64 in one process.

q [B, H, T, D]    k, v [B, G, T, D]    positions: of a rank's tokens, -1 for padding
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BATCH, HEAD_DIM = 1, 16
NAMES = ("out", "dq", "dk", "dv")
# Of the largest value: float32 sums in another order; bfloat16 has three digits, and peers add up in it.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Cell:
    """Describe one question."""

    name: str
    causal: bool = True
    tokens: int = 64
    heads: int = 4
    kv_heads: int = 4
    window: int | None = None  # keys that a query sees, itself included
    documents: tuple[int, ...] = ()  # lengths of packed documents
    scale: float = 1.0  # of q
    dtype: torch.dtype = torch.float32

    @cached_property
    def allowed(self) -> Tensor:
        """Return whether a query sees a key, [T, T]."""
        q, k = torch.arange(self.tokens)[:, None], torch.arange(self.tokens)[None]
        seen = q >= k if self.causal else torch.ones_like(q >= k)
        if self.window is not None:
            seen = seen & (q - k < self.window)
        ids = self.document_ids
        return seen & (ids[:, None] == ids[None])

    @property
    def document_ids(self) -> Tensor:
        """Return the document of each position."""
        lengths = torch.tensor(self.documents or (self.tokens,))
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    @property
    def ends(self) -> Tensor:
        """Return where documents begin, and the end, as int32: what flash-attn calls cu_seqlens."""
        return torch.tensor([0, *torch.tensor(self.documents or (self.tokens,)).cumsum(0)], dtype=torch.int32)

    def operands(self) -> tuple[Tensor, ...]:
        """Return q, k, v and the gradient of out, of all tokens, the same in every process."""
        random = torch.Generator().manual_seed(7)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        tensors = [torch.randn(BATCH, h, self.tokens, HEAD_DIM, generator=random) for h in heads]
        tensors[0] *= self.scale
        return tuple(x.to(self.dtype) for x in tensors)

    def answer(self) -> dict[str, Tensor]:
        """Return out and the gradients, float64."""
        q, k, v, grad = (x.double() for x in self.operands())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        wide = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        keys, values = wide
        scores = (q @ keys.mT / math.sqrt(HEAD_DIM)).masked_fill(~self.allowed, -math.inf)
        out = scores.softmax(-1) @ values
        results = (out, *torch.autograd.grad(out, leaves, grad))
        return dict(zip(NAMES, (x.detach() for x in results), strict=True))


CELLS = (
    Cell("full", causal=False),
    Cell("causal"),
    Cell("8:2 heads", heads=8, kv_heads=2),
    Cell("window of 13", window=13),
    Cell("4 documents", documents=(11, 30, 2, 21)),
    Cell("67 tokens", tokens=67),
    Cell("scores of 200", scale=50.0),
    Cell("bfloat16", dtype=torch.bfloat16),
)


def worst_errors(
    cell: Cell, answer: dict[str, Tensor], results: dict[str, Tensor], positions: Tensor
) -> dict[str, float]:
    """Return the largest error of each tensor of a rank, relative to the whole answer's largest value."""
    real = positions >= 0
    errors = {}
    for name, x in results.items():
        expected = answer[name][:, :, positions[real]]
        error = (x[:, :, real].double() - expected).abs().max() / answer[name].abs().max()
        errors[name] = float(error) if torch.isfinite(error) else math.inf
    return errors
