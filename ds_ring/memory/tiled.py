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

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear

from ds_ring.errors import RingConfigError
from ds_ring.ring.merge import accumulator_dtype

Function = Callable[..., Tensor]


@dataclass(eq=False)
class _TiledCall:
    """Hold what both passes need to know of a call, beside its tensors."""

    function: Function
    tile: int
    inputs: int  # the first ones of the tensors are cut, the others are parameters
    saved: Any  # the node that saved the inputs; None if it is `kept`
    kept: tuple[Tensor, ...]
    autocast: tuple[str, bool, torch.dtype]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the inputs again; a checkpointed region around them is run again here."""
        found: tuple[Tensor, ...] = self.kept if self.saved is None else self.saved.saved_tensors
        return found

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
        parameters: all tensors beside the inputs that get a gradient.
        tile: tokens of a tile.
    """
    leading = inputs[0].shape[:-1]
    flat = [x.reshape(-1, x.shape[-1]) for x in inputs]
    # A function for [B, S, H] gets [1, n, H], one for [N, H] gets [n, H].
    shape = (1,) * (len(leading) - 1)
    device = inputs[0].device.type
    autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def of_rows(*rows: Tensor) -> Tensor:
        out = function(*(x.reshape(*shape, *x.shape) for x in rows))
        return out.reshape(rows[0].shape[0], -1)

    saved, kept = None, tuple(flat)
    if torch.is_grad_enabled() and any(x.requires_grad for x in flat):
        flat = list(_Save.apply(*flat))
        saved, kept = next(x.grad_fn for x in flat if x.grad_fn is not None), ()
    call = _TiledCall(of_rows, tile, len(flat), saved, kept, autocast)
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
        found = [torch.empty_like(x) if want else None for x, want in zip(inputs, wanted, strict=False)]
        sums = [torch.zeros(x.shape, dtype=accumulator_dtype(x.dtype), device=x.device) for x in parameters]
        for start in range(0, inputs[0].shape[0], call.tile):
            rows = slice(start, start + call.tile)
            leaves = [x[rows].detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=False)]
            with torch.enable_grad():
                out = call.run(leaves)
            asked = [x for x in leaves if x.requires_grad]
            parts = torch.autograd.grad(out, [*asked, *parameters], gradient[rows], allow_unused=True)
            del out
            _put(found, rows, parts[: len(asked)])
            for total, part in zip(sums, parts[len(asked) :], strict=True):
                if part is not None:
                    total += part
        totals = iter([total.to(x.dtype) for total, x in zip(sums, parameters, strict=True)])
        return (None, *found, *(next(totals) if want else None for want in wanted[call.inputs :]))


def _put(found: list[Tensor | None], rows: slice, parts: Sequence[Tensor | None]) -> None:
    """Write a tile's gradients of the inputs to their rows; one that is not used has none."""
    for whole, part in zip([x for x in found if x is not None], parts, strict=True):
        if part is None:
            whole[rows].zero_()
        else:
            whole[rows] = part


# Compute a language model's head and its loss in tiles of tokens, gradients included.
#
# Owns the one function whose widest tensor is a tile's logits: no tensor of tokens x vocabulary exists. The
# loss is the last thing that a model computes, so the gradients of hidden states and weight are known up to a
# factor in the forward pass, where each tile's logits are at hand: no logits are computed twice (the way of
# Liger-Kernel's fused linear cross entropy, and of DeepSpeed's TiledFusedLogitsLoss). The weight is an input
# of the function and gets one gradient, so that the hooks of data parallel engines see one, whole.
#
# Shapes: N tokens, H hidden, V vocabulary, n tokens of a tile.

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
        change: what is done to each token's logits [n, V] before the loss (a scale, a soft cap).
    """
    grads = torch.is_grad_enabled()  # inside the function it never is
    made = _TiledLoss.apply(hidden.flatten(0, -2), weight_VH, bias_V, labels.flatten(), tile, change, grads)
    loss: Tensor = made / items
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
        total = torch.zeros((), dtype=accumulator_dtype(dtype), device=hidden_NH.device)
        with torch.autocast(device, enabled=False):
            matrix_VH = weight_VH.to(dtype)
            offset_V = None if bias_V is None else bias_V.to(dtype)
            for start in range(0, len(labels_N), tile):
                rows = slice(start, start + tile)
                hidden_nH = hidden_NH[rows].to(dtype)
                logits_nV = linear(hidden_nH, matrix_VH, offset_V)
                loss, gradient_nV = _of_tile(logits_nV, labels_N[rows], change, any(wanted))
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
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise RingConfigError(
                "tiled_loss: expected one backward pass through a loss, got a second one: the gradients were"
                ' handed over; set "tiled_loss": false'
            )
        scaled = [None if one is None else one.mul_(gradient.to(one.dtype)) for one in found]
        return (*scaled, None, None, None, None)


class _Sums:
    """Hold the gradients while they grow; those that nobody wants are None."""

    def __init__(
        self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, wanted: tuple[bool, ...]
    ) -> None:
        self.hidden_NH = torch.empty_like(hidden_NH) if wanted[0] else None
        self.weight_VH, self.bias_V = (
            torch.zeros(one.shape, dtype=accumulator_dtype(one.dtype), device=one.device)
            if want and one is not None
            else None
            for one, want in ((weight_VH, wanted[1]), (bias_V, wanted[2]))
        )
        self._dtypes = [None if one is None else one.dtype for one in (hidden_NH, weight_VH, bias_V)]

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
        found = (self.hidden_NH, self.weight_VH, self.bias_V)
        return [
            None if one is None else one.to(dtype) for one, dtype in zip(found, self._dtypes, strict=True)
        ]


def _of_tile(
    logits_nV: Tensor, labels_n: Tensor, change: Change | None, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross entropy of a tile, and its gradient by the logits."""
    leaf = logits_nV.detach().requires_grad_(wants_gradient)
    with torch.set_grad_enabled(wants_gradient):
        changed = leaf if change is None else change(leaf)
        wide = changed.to(accumulator_dtype(changed.dtype))
        loss = cross_entropy(wide, labels_n, ignore_index=IGNORE, reduction="sum")
    if not wants_gradient:
        return loss, None
    del changed, wide
    (gradient_nV,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient_nV


def logprobs_and_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label [...] (0 without one) and the entropy, [..., 2] in float32.

    Of float64 logits [..., V] they are float64.
    """
    all_of = logits.to(accumulator_dtype(logits.dtype)).log_softmax(dim=-1)
    chosen = all_of.gather(-1, labels.clamp_min(0)[..., None])[..., 0].masked_fill(labels == IGNORE, 0)
    return torch.stack([chosen, -(all_of.exp() * all_of).sum(dim=-1)], dim=-1)


# Stand for logits that are computed in tiles, when the loss is known: `DeferredLogits`.
#
# A model computes logits in its head, may scale or cap them, and gives them to a loss function. Owns the
# object that takes the logits' place in between: it records what is done to each of them by itself, refuses
# what is not, and computes the loss of `tiled_loss`. It is no tensor, so nothing takes it for one (hooks of
# DeepSpeed do so with every tensor that they find).

log = logging.getLogger(__name__)

# What the head makes of hidden states, weight and bias; run by the head, where its weight is whole.
HeadFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_OF_EACH = {
    "tanh", "sigmoid", "neg", "negative", "mul", "multiply", "div", "divide", "true_divide", "add", "sub",
    "subtract", "clamp", "clip", "mul_", "div_", "add_", "sub_", "tanh_",
    "float", "double", "half", "bfloat16", "to", "type", "contiguous",
}  # fmt: skip
_SYMBOLS = {
    "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul_", "__truediv__": "div", "__itruediv__": "div_",
    "__add__": "add", "__radd__": "add", "__iadd__": "add_", "__sub__": "sub", "__isub__": "sub_",
    "__neg__": "neg",
}  # fmt: skip


class NoLogitsError(RingConfigError, AttributeError):
    """Say that logits were asked for that are not computed; an AttributeError, too, for `hasattr`."""


class DeferredLogits:
    """Stand for logits [..., V] that are computed tile by tile, in `loss`.

    Args:
        hidden: hidden states [..., H].
        call_head: calls the head's module on hidden states with a job, so that hooks around it run.
        tile: tokens of a tile.
        vocabulary: V.
        strict: refuse what is not done to each logit by itself; else compute all logits then, and say so.
    """

    def __init__(
        self,
        hidden: Tensor,
        call_head: Callable[[Tensor, HeadFunction], Tensor],
        tile: int,
        vocabulary: int,
        strict: bool = True,
        steps: tuple[Callable[[Tensor], Tensor], ...] = (),
    ) -> None:
        self._hidden, self._call_head, self._tile = hidden, call_head, tile
        self._strict, self._steps = strict, steps
        self.shape = torch.Size((*hidden.shape[:-1], vocabulary))
        self.ndim, self.dtype, self.device = hidden.ndim, hidden.dtype, hidden.device

    def loss(self, labels: Tensor, items: Tensor | float) -> Tensor:
        """Return the summed cross entropy [] of the labelled tokens over `items`; labels are aligned."""

        def job(hidden: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
            change = self._change if self._steps else None
            return tiled_loss(hidden, weight_VH, bias_V, labels.to(hidden.device), items, self._tile, change)

        return self._call_head(self._hidden, job)

    def logprobs(self, labels: Tensor) -> Tensor:
        """Return the log-probability of each label and the entropy, [..., 2], tile by tile."""

        def job(hidden: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
            def of_tile(hidden: Tensor, labels: Tensor) -> Tensor:
                logits = self._change(linear(hidden, weight_VH, bias_V))
                return logprobs_and_entropies(logits, labels[..., 0])

            parameters = [weight_VH] if bias_V is None else [weight_VH, bias_V]
            return tiled_call(of_tile, [hidden, labels.to(hidden.device)[..., None]], parameters, self._tile)

        return self._call_head(self._hidden, job)

    def tensor(self) -> Tensor:
        """Return all logits [..., V]."""

        def job(hidden: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
            return self._change(linear(hidden, weight_VH, bias_V))

        return self._call_head(self._hidden, job)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the logits."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def _change(self, logits: Tensor) -> Tensor:
        for step in self._steps:
            logits = step(logits)
        return logits

    def _after(self, name: str, operands: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what stands for the logits after a function of theirs."""
        # An operand is one number (or a dtype, a device, a flag), and gets no gradient.
        plain = (
            one.numel() == 1 and not one.requires_grad
            if isinstance(one, Tensor)
            else not isinstance(one, DeferredLogits)
            for one in (*operands, *kwargs.values())
        )
        if name not in _OF_EACH or not all(plain):
            if self._strict:
                _refuse(name)
            return getattr(self._all(name), name)(*operands, **kwargs)

        def step(logits: Tensor) -> Tensor:
            changed: Tensor = getattr(logits, name.rstrip("_"))(*operands, **kwargs)
            return changed

        steps = (*self._steps, step)
        if name.endswith("_"):
            self._steps = steps
            return self
        return DeferredLogits(self._hidden, self._call_head, self._tile, self.shape[-1], self._strict, steps)

    def _all(self, name: str) -> Tensor:
        _say_once(name)
        return self.tensor()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (self._strict and not hasattr(Tensor, name)):
            raise AttributeError(name)
        if name in _OF_EACH:
            return lambda *operands, **kwargs: self._after(name, operands, kwargs)
        if self._strict:
            _refuse(name)
        return getattr(self._all(name), name)

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        sizes = dict(zip(range(len(parts)), self.shape, strict=False))
        if all(
            part is Ellipsis or (isinstance(part, slice) and part.indices(sizes[at]) == (0, sizes[at], 1))
            for at, part in enumerate(parts)
            if at in sizes
        ) and len(parts) <= len(self.shape):
            return self
        if self._strict:
            _refuse(f"logits[{index}]")
        return self._all("a part of them")[index]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        first = args[0] if args else None
        if isinstance(first, cls) and name in _OF_EACH:
            return first._after(name, args[1:], kwargs or {})
        found = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)]
        if not found or found[0]._strict:
            _refuse(name)
        whole = {id(x): x._all(name) for x in found}
        given = [whole.get(id(x), x) for x in args]
        return func(*given, **{key: whole.get(id(x), x) for key, x in (kwargs or {}).items()})

    def __repr__(self) -> str:
        return f"DeferredLogits({list(self.shape)}, computed in tiles of {self._tile} tokens with the loss)"


def _symbol(name: str) -> Callable[..., Any]:
    def operator(self: DeferredLogits, *operands: Any) -> Any:
        return self._after(name, operands, {})

    return operator


for _spelled, _meant in _SYMBOLS.items():
    setattr(DeferredLogits, _spelled, _symbol(_meant))


def _refuse(name: str) -> NoReturn:
    raise NoLogitsError(
        f'"tiled_loss" in the "long_sequence" section: expected logits that are scaled, capped or given to'
        f" the loss, got {name}: they are computed in tiles, and never all there are. Take output.loss, or"
        " engine.ring.loss(output.logits, batch); call the model in eval() without labels for logits, or set"
        ' "tiled_loss": false'
    )


@functools.cache
def _say_once(name: str) -> None:
    log.warning(
        '"tiled_loss": "auto": all logits of this rank are computed, since %s is no function of each logit by'
        " itself; true would refuse it",
        name,
    )
