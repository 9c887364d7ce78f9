"""Stand for logits that are computed in tiles, when the loss is known: `DeferredLogits`.

A model computes logits in its head, may scale or cap them, and gives them to a loss function. Owns the
object that replaces the logits in between: it records elementwise operations, refuses others, and computes
the loss of `tiled_loss`. It is no tensor, so nothing takes it for one (hooks of
DeepSpeed do so with every tensor that they find).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import linear

from ds_ring.errors import RingConfigError
from ds_ring.memory.tiles.tiled_call import tiled_call
from ds_ring.memory.tiles.tiled_loss import tiled_loss

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
    """Logits that are not computed were read; an AttributeError, too, for `hasattr`."""


class DeferredLogits:
    """Stand for logits [..., V] that are computed tile by tile, in `loss`.

    Args:
        hidden: hidden states [..., H].
        call_head: calls the head's module on hidden states with a job, so that hooks around it run.
        tile: tokens of a tile.
        vocabulary: V.
        strict: refuse operations that are not elementwise; else compute all logits then, with a warning.
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

    def logprobs(self, labels: Tensor, of_logits: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return what `of_logits` makes of logits and labels (log-probabilities, say), tile by tile."""

        def job(hidden: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
            def compute_loss(hidden: Tensor, labels: Tensor) -> Tensor:
                logits = self._change(linear(hidden, weight_VH, bias_V))
                return of_logits(logits, labels[..., 0])

            parameters = [weight_VH] if bias_V is None else [weight_VH, bias_V]
            return tiled_call(
                compute_loss, [hidden, labels.to(hidden.device)[..., None]], parameters, self._tile
            )

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
        """Return the deferred logits after a function of theirs."""
        # An operand is one number (or a dtype, a device, a flag), and gets no gradient.
        plain = (
            operand.numel() == 1 and not operand.requires_grad
            if isinstance(operand, Tensor)
            else not isinstance(operand, DeferredLogits)
            for operand in (*operands, *kwargs.values())
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
        deferred = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)]
        if not deferred or deferred[0]._strict:
            _refuse(name)
        whole = {id(x): x._all(name) for x in deferred}
        operands = [whole.get(id(x), x) for x in args]
        return func(*operands, **{key: whole.get(id(x), x) for key, x in (kwargs or {}).items()})


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


@functools.lru_cache(maxsize=256)
def _say_once(name: str) -> None:
    log.warning(
        '"tiled_loss": "auto": all logits of this rank are computed, since %s is no function of each logit by'
        " itself; true would refuse it",
        name,
    )
