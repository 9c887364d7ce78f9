"""Say what is asked of each contestant, and compute the answer in one process, some query rows at a time.

q [B, H, T, D]    k, v [B, G, T, D]    positions: of a rank's tokens, -1 for padding
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BATCH = 1
NAMES = ("out", "dq", "dk", "dv")
# Of the largest value: float32 sums in another order; bfloat16 has three digits, and peers add up in it.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
MAX_SCORES = 2**25  # elements of a block of scores


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
    head_dim: int = 16

    def sees(self, q: Tensor, k: Tensor) -> Tensor:
        """Return whether queries at positions q see keys at positions k, [q, k]."""
        rows, columns = q[:, None], k[None]
        seen = rows >= columns if self.causal else torch.ones_like(rows >= columns)
        if self.window is not None:
            seen = seen & (rows - columns < self.window)
        ids = self.document_ids.to(q.device)
        return seen & (ids[q][:, None] == ids[k][None])

    @cached_property
    def allowed(self) -> Tensor:
        """Return whether a query sees a key, [T, T]."""
        return self.sees(torch.arange(self.tokens), torch.arange(self.tokens))

    @cached_property
    def document_ids(self) -> Tensor:
        """Return the document of each position."""
        lengths = torch.tensor(self.documents or (self.tokens,))
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    @property
    def ends(self) -> Tensor:
        """Return where documents begin, and the end, as int32: what flash-attn calls cu_seqlens."""
        return torch.tensor([0, *torch.tensor(self.documents or (self.tokens,)).cumsum(0)], dtype=torch.int32)

    def operands(self, device: str = "cpu") -> tuple[Tensor, ...]:
        """Return q, k, v and the gradient of out, of all tokens, the same in every process."""
        random = torch.Generator(device).manual_seed(7)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(BATCH, count, self.tokens, self.head_dim) for count in heads]
        tensors = [torch.randn(shape, generator=random, device=device) for shape in shapes]
        tensors[0] *= self.scale
        return tuple(x.to(self.dtype) for x in tensors)

    def answer(self, device: str = "cpu") -> dict[str, Tensor]:
        """Return out and the gradients: float64, on a GPU float32."""
        dtype = torch.float64 if device == "cpu" else torch.float32
        q, k, v, grad = (x.to(dtype) for x in self.operands(device))
        out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
        begins, every = self.ends.to(device), torch.arange(self.tokens, device=device)
        rows = max(1, MAX_SCORES // (self.heads * self.tokens))
        for start in range(0, self.tokens, rows):
            stop = min(start + rows, self.tokens)
            first = int(begins[begins <= start].max())  # of the first row's document
            last = stop if self.causal else self.tokens
            leaves = [q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last]]
            leaves = [x.detach().requires_grad_() for x in leaves]
            keys, values = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in leaves[1:])
            seen = self.sees(every[start:stop], every[first:last])
            scores = (leaves[0] @ keys.mT / math.sqrt(self.head_dim)).masked_fill(~seen, -math.inf)
            block = scores.softmax(-1) @ values
            grads = torch.autograd.grad(block, leaves, grad[:, :, start:stop])
            out[:, :, start:stop], dq[:, :, start:stop] = block.detach(), grads[0]
            dk[:, :, first:last] += grads[1]
            dv[:, :, first:last] += grads[2]
        return dict(zip(NAMES, (out, dq, dk, dv), strict=True))


def worst_errors(
    answer: dict[str, Tensor], results: dict[str, Tensor], positions: Tensor
) -> dict[str, float]:
    """Return the largest error of each tensor of a rank, relative to the whole answer's largest value."""
    real = positions >= 0
    errors = {}
    for name, x in results.items():
        expected = answer[name][:, :, positions[real]].to(x.device)
        error = (x[:, :, real.to(x.device)].to(expected.dtype) - expected).abs().max()
        error = error.cpu() / answer[name].abs().max().cpu()
        errors[name] = float(error) if torch.isfinite(error) else math.inf
    return errors
