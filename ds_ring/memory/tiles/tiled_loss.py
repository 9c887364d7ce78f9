"""Compute a language model's head and its loss in tiles of tokens, gradients included.

Owns the one function whose widest tensor is a tile's logits: no tensor of tokens x vocabulary exists. The
loss is the last thing that a model computes, so the gradients of hidden states and weight are known up to a
factor in the forward pass, where each tile's logits are at hand: no logits are computed twice (the way of
Liger-Kernel's fused linear cross entropy, and of DeepSpeed's TiledFusedLogitsLoss). The weight is an input
of the function and gets one gradient, so that the hooks of data parallel engines see one, whole.

Shapes: N tokens, H hidden, V vocabulary, n tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear

from ds_ring.errors import RingConfigError
from ds_ring.ring.merge import get_accumulator_dtype

IGNORE = -100  # the label of a token without one

Change = Callable[[Tensor], Tensor]


def tiled_loss(
    hidden: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels: Tensor,
    items: Tensor | float,
    tile: int,
    change: Change | None = None,
) -> Tensor:
    """Return the summed cross entropy over all labelled tokens over `items`, a float32 tensor [].

    Args:
        hidden: [..., H].
        weight_VH: of the head, with its bias [V] or None.
        labels: [...], aligned with `hidden`; -100 counts as none.
        items: what the sum is divided by.
        tile: tokens of a tile.
        change: of each token's logits [n, V] before the loss (a scale, a soft cap).
    """
    grads = torch.is_grad_enabled()  # inside the function it never is
    total = _TiledLoss.apply(hidden.flatten(0, -2), weight_VH, bias_V, labels.flatten(), tile, change, grads)
    loss: Tensor = total / items
    return loss


class _TiledLoss(torch.autograd.Function):
    """Sum the cross entropy of all tokens, and their gradients by the hidden states, weight and bias."""

    # The gradients are those of the sum: divided by millions of tokens they would underflow in float16. The
    # weight's is added up in float32, since it is a sum of many tiles.

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        tile: int,
        change: Change | None,
        grads: bool,
    ) -> Tensor:
        device = hidden_NH.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VH.dtype
        wanted = tuple(grads and want for want in ctx.needs_input_grad[:3])
        sums = _Sums(hidden_NH, weight_VH, bias_V, wanted)
        total = torch.zeros((), dtype=get_accumulator_dtype(dtype), device=hidden_NH.device)
        with torch.autocast(device, enabled=False):
            matrix_VH = weight_VH.to(dtype)
            offset_V = None if bias_V is None else bias_V.to(dtype)
            for start in range(0, len(labels_N), tile):
                rows = slice(start, start + tile)
                hidden_nH = hidden_NH[rows].to(dtype)
                logits_nV = linear(hidden_nH, matrix_VH, offset_V)
                loss, gradient_nV = _compute_tile(logits_nV, labels_N[rows], change, any(wanted))
                total += loss
                if gradient_nV is not None:
                    sums.add(rows, gradient_nV, hidden_nH, matrix_VH)
                del logits_nV, gradient_nV
        # Not by save_for_backward: they are results that are handed over once, without a copy.
        ctx.gradients = sums.finished()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RingConfigError.wrong(
                "tiled_loss", "one backward pass through a loss", "a second one", 'set "tiled_loss": false'
            )
        scaled = [None if x is None else x.mul_(gradient.to(x.dtype)) for x in gradients]
        return (*scaled, None, None, None, None)


class _Sums:
    """The gradients while they grow; None for those that are not needed."""

    def __init__(
        self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, wanted: tuple[bool, ...]
    ) -> None:
        self.hidden_NH = torch.empty_like(hidden_NH) if wanted[0] else None
        self.weight_VH, self.bias_V = (
            torch.zeros(x.shape, dtype=get_accumulator_dtype(x.dtype), device=x.device)
            if want and x is not None
            else None
            for x, want in ((weight_VH, wanted[1]), (bias_V, wanted[2]))
        )
        self._dtypes = [None if x is None else x.dtype for x in (hidden_NH, weight_VH, bias_V)]

    def add(self, rows: slice, gradient_nV: Tensor, hidden_nH: Tensor, matrix_VH: Tensor) -> None:
        """Take in the gradient of one tile's logits."""
        if self.hidden_NH is not None:
            self.hidden_NH[rows] = gradient_nV @ matrix_VH
        if self.weight_VH is not None and self.weight_VH.dtype == gradient_nV.dtype:
            self.weight_VH.addmm_(gradient_nV.t(), hidden_nH)
        elif self.weight_VH is not None:
            self.weight_VH += gradient_nV.t() @ hidden_nH
        if self.bias_V is not None:
            self.bias_V += gradient_nV.sum(dim=0, dtype=self.bias_V.dtype)

    def finished(self) -> list[Tensor | None]:
        """Return the gradients in the dtypes of their tensors."""
        sums = (self.hidden_NH, self.weight_VH, self.bias_V)
        return [None if x is None else x.to(dtype) for x, dtype in zip(sums, self._dtypes, strict=True)]


def _compute_tile(
    logits_nV: Tensor, labels_n: Tensor, change: Change | None, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross entropy of a tile, and its gradient by the logits."""
    leaf = logits_nV.detach().requires_grad_(wants_gradient)
    with torch.set_grad_enabled(wants_gradient):
        changed = leaf if change is None else change(leaf)
        wide = changed.to(get_accumulator_dtype(changed.dtype))
        loss = cross_entropy(wide, labels_n, ignore_index=IGNORE, reduction="sum")
    if not wants_gradient:
        return loss, None
    del changed, wide
    (gradient_nV,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient_nV
