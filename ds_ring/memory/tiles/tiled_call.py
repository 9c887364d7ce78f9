"""Run a function that treats tokens one by one in tiles of tokens, and again in the backward pass.

Owns the tiles and the two autograd functions around them; which module's forward it is given is not known
here. Of the tiles' insides nothing is saved but the inputs, as DeepSpeed's TiledMLP does; but the parameters
are inputs of the autograd function, so that each gets one gradient, and hooks of data parallel engines see it
once. The parameters' gradients are added up in float32.

[Note: checkpointed regions end here]
The inputs are saved by an autograd function of their own, before anything is computed. Where the region
around is checkpointed by torch without reentrance, its second run ends as soon as the last tensor that
anybody saved is there again: if nothing after this call saves one (a residual addition does not), it ends at
that function, and the tiles are computed twice in a step, forward and backward, and not three times.

Shapes: N tokens, n tokens of a tile.

[Note: hooks see one gradient]
DeepSpeed's TiledMLP and TiledFusedLogitsLoss accumulate in `.grad`, hold DeepSpeed's hooks back by a flag,
and run an MLP three times under checkpointing. Here parameters are inputs of one autograd function, so
DeepSpeed's hooks see one gradient each, at every ZeRO stage. The head computes by a call of its module, and
an MLP is a leaf module of ZeRO 3, so that hooks gather each weight once and not for every tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_ring.ring.merge import get_accumulator_dtype

Function = Callable[..., Tensor]


@dataclass(eq=False)
class _TiledCall:
    """The arguments of a call that both passes need, other than its tensors."""

    function: Function
    tile: int
    inputs: int  # the first ones of the tensors are cut, the others are parameters
    saved: Any  # the node that saved the inputs; None if `eager_tensors` has them
    eager_tensors: tuple[Tensor, ...]
    autocast: tuple[str, bool, torch.dtype]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the inputs again; a checkpointed region around them is run again here."""
        tensors: tuple[Tensor, ...] = self.eager_tensors if self.saved is None else self.saved.saved_tensors
        return tensors

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """Call the function as it was called in the forward pass."""
        device, enabled, dtype = self.autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return self.function(*inputs)


def tiled_call(
    function: Function, inputs: Sequence[Tensor], parameters: Sequence[Tensor], tile: int
) -> Tensor:
    """Return `function(*inputs)`, a tensor of the inputs' leading dimensions, computed tile by tile.

    Args:
        function: takes tensors and returns one, token by token; it draws no random numbers.
        inputs: tensors [..., k] with the same leading dimensions, those of the tokens.
        parameters: all other tensors that get a gradient.
        tile: tokens of a tile.
    """
    leading = inputs[0].shape[:-1]
    flat = [x.reshape(-1, x.shape[-1]) for x in inputs]
    # A function for [B, S, H] gets [1, n, H], one for [N, H] gets [n, H].
    shape = (1,) * (len(leading) - 1)
    device = inputs[0].device.type
    autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def call_rows(*rows: Tensor) -> Tensor:
        out = function(*(x.reshape(*shape, *x.shape) for x in rows))
        return out.reshape(rows[0].shape[0], -1)

    saved, eager_tensors = None, tuple(flat)
    if torch.is_grad_enabled() and any(x.requires_grad for x in flat):
        flat = list(_Save.apply(*flat))
        saved, eager_tensors = next(x.grad_fn for x in flat if x.grad_fn is not None), ()
    call = _TiledCall(call_rows, tile, len(flat), saved, eager_tensors, autocast)
    out: Tensor = _Tiled.apply(call, *flat, *parameters)
    return out.reshape(*leading, out.shape[-1])


class _Save(torch.autograd.Function):
    """Pass tensors on, and save them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in tensors if not x.is_floating_point()))
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


class _Tiled(torch.autograd.Function):
    """Run the tiles: without a graph forward, each with a graph of its own backward."""

    @staticmethod
    def forward(ctx: Any, call: _TiledCall, *tensors: Tensor) -> Tensor:
        ctx.call, ctx.parameters = call, tensors[call.inputs :]
        inputs = tensors[: call.inputs]
        first = call.run([x[: call.tile] for x in inputs])
        rows = inputs[0].shape[0]
        if rows <= call.tile:
            return first
        out = first.new_empty(rows, first.shape[1])
        out[: call.tile] = first
        del first
        for start in range(call.tile, rows, call.tile):
            out[start : start + call.tile] = call.run([x[start : start + call.tile] for x in inputs])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call, inputs = ctx.call, ctx.call.tensors()
        wanted = ctx.needs_input_grad[1:]
        parameters = [x for x, want in zip(ctx.parameters, wanted[call.inputs :], strict=True) if want]
        gradients = [torch.empty_like(x) if want else None for x, want in zip(inputs, wanted, strict=False)]
        sums = [
            torch.zeros(x.shape, dtype=get_accumulator_dtype(x.dtype), device=x.device) for x in parameters
        ]
        for start in range(0, inputs[0].shape[0], call.tile):
            rows = slice(start, start + call.tile)
            leaves = [x[rows].detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=False)]
            with torch.enable_grad():
                out = call.run(leaves)
            differentiated = [x for x in leaves if x.requires_grad]
            parts = torch.autograd.grad(
                out, [*differentiated, *parameters], gradient[rows], allow_unused=True
            )
            del out
            _put(gradients, rows, parts[: len(differentiated)])
            for total, part in zip(sums, parts[len(differentiated) :], strict=True):
                if part is not None:
                    total += part
        totals = iter([total.to(x.dtype) for total, x in zip(sums, parameters, strict=True)])
        return (None, *gradients, *(next(totals) if want else None for want in wanted[call.inputs :]))


def _put(gradients: list[Tensor | None], rows: slice, parts: Sequence[Tensor | None]) -> None:
    """Write a tile's gradients of the inputs to their rows; one that is not used has none."""
    for whole, part in zip([x for x in gradients if x is not None], parts, strict=True):
        if part is None:
            whole[rows].zero_()
        else:
            whole[rows] = part
