"""Measure how far rounding takes a model from itself on one process, and judge differences by it.

Owns the measure and the verdict of `ds-ring check-model`: which differences between a ring and one process
rounding explains. What is compared, and how, is first_batch.py's.

[Note: judged by the model's own rounding]
One process runs in float32 and in float64; a model that cannot runs with weights that are moved by about a
unit in the last place. A difference is rounding up to 10 times that error; less than 1e-6 counts as 1e-6,
more than 1e-4 as 1e-4. Of all beyond this, runs with moved weights tell whether rounding tips a threshold (an
activation that is cut off, a choice of an expert): then some of them jump as the ring does. Since a fault
could hide in the jump, the ring then runs in float64, too, where nothing is near a threshold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_ring.engines.first_batch.first_batch import Difference, Numbers, compare

TIMES = 10.0
_MIN_ERROR, _MAX_ERROR = 1e-6, 1e-4
_MOVED_BY, _MOVED_RUNS = 2.0**-22, 8

RoundingMeasure = Literal["float64", "moved weights"]
Model = TypeVar("Model", bound=nn.Module)
Alone = Callable[[nn.Module], Numbers]


@dataclass(frozen=True)
class Rounding:
    """Hold the errors that rounding makes on one process.

    Attributes:
        measured: how.
        errors: the error of everything that was compared.
    """

    measured: RoundingMeasure
    errors: tuple[Difference, ...]

    def beyond(self, differences: Iterable[Difference]) -> list[Difference]:
        """Return the differences that rounding does not explain, in their order."""
        return self._above(differences, _MAX_ERROR)

    def jumps(self, differences: Iterable[Difference]) -> list[Difference]:
        """Return the differences that are larger than a threshold's that rounding tips."""
        return self._above(differences, float("inf"))

    def _above(self, differences: Iterable[Difference], most: float) -> list[Difference]:
        errors = {(difference.kind, difference.name): difference.error for difference in self.errors}
        outputs = [difference.error for difference in self.errors if difference.kind in ("layer", "logits")]
        gradients = [difference.error for difference in self.errors if difference.kind == "gradient"]
        # Rounding of outputs adds up from layer to layer; a gradient's may be small by chance.
        typical = {"layer": max(outputs), "logits": max(outputs), "gradient": median(gradients or [0.0])}
        wrong = []
        for difference in differences:
            error = max(
                errors.get((difference.kind, difference.name), 0.0),
                typical.get(difference.kind, 0.0),
                _MIN_ERROR,
            )
            if not difference.error <= TIMES * min(error, most):
                wrong.append(difference)
        return wrong


def in_float64(model: Model) -> Model:
    """Return a copy of a model in float64, whose experts are computed by operators that have it."""
    copied = copy.deepcopy(model).double()
    set_experts: Any = getattr(copied, "set_experts_implementation", None)
    if set_experts is not None:  # its grouped products have no float64
        set_experts("eager")
    return copied


class InFloat64(TorchFunctionMode):
    """Compute in float64 what a model computes in float32 whatever its weights are: its delta rule, say."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave tensors of float64 as they are where float32 is asked for."""
        options = kwargs or {}
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if tensor is not None and tensor.dtype == torch.float64:
            if function is Tensor.float:
                return tensor
            if function is Tensor.to:
                args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
        if options.get("dtype") is torch.float32:
            options = options | {"dtype": torch.float64}
        return function(*args, **options)


def measure_rounding(model: nn.Module, run: Alone, expected: Numbers) -> Rounding:
    """Measure a model's rounding by float64; by moved weights where it cannot run in float64, or gives NaN.

    torch's SDPA has NaN in float64 for queries without keys: padding of packed windows, say.

    Args:
        model: in float32.
        run: what a model on one process computes of the batch.
        expected: what `model` does.
    """
    with suppress(Exception):  # of an operator without float64
        errors = tuple(compare(expected, run(in_float64(model))))
        if all(isfinite(difference.error) for difference in errors):
            return Rounding("float64", errors)
    return measure_moved_rounding(model, run, expected)


def measure_moved_rounding(model: nn.Module, run: Alone, expected: Numbers) -> Rounding:
    """Measure a model's rounding by moved weights."""
    worst: dict[tuple[str, str], Difference] = {}
    for number in range(_MOVED_RUNS):
        moved = copy.deepcopy(model)
        move(moved, number)
        for difference in compare(run(moved), expected):
            key = (difference.kind, difference.name)
            worst[key] = max(worst.get(key, difference), difference, key=lambda difference: difference.error)
    return Rounding("moved weights", tuple(worst.values()))


@torch.no_grad()
def move(model: nn.Module, seed: int) -> None:
    """Move each weight by about a unit in the last place of float32."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1.0 + _MOVED_BY * torch.randn(parameter.shape, generator=generator))
