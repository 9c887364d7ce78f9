"""Compare two runs of one model: every layer's output, the logits, the loss and every gradient.

Owns what is recorded of a run, how an error is measured, and how much of it rounding explains. Knows nothing
of rings: a run is handed in with whole tensors. Shapes: B samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Kind = Literal["layer", "logits", "loss", "gradient"]

_FLOOR = 1e-2  # of the root mean square of all gradients' norms


# [Note: measuring a difference]
# Outputs are compared token by token: the norm of the largest difference over the mean norm of a token, so
# that one wrong token among many stays visible. A gradient is compared by norms, by itself: sums over
# parameters would hide a wrong one. Some gradients are zero but for rounding (a key's bias): a norm counts as
# at least a hundredth of the typical one of the model.
@dataclass(frozen=True)
class Tolerance:
    """Hold the relative errors that rounding explains; anything larger is a difference."""

    outputs: float
    loss: float
    gradients: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance of a model of `dtype`, against a run in float32 (float64 for float64)."""
        return {
            torch.float64: cls(1e-6, 1e-7, 1e-6),
            torch.float32: cls(1e-4, 1e-5, 2e-4),
            torch.float16: cls(2e-2, 5e-3, 5e-2),
            torch.bfloat16: cls(1e-1, 2e-2, 2e-1),
        }[dtype]

    def allows(self, kind: Kind) -> float:
        """Return the largest relative error for what is compared."""
        return {"gradient": self.gradients, "loss": self.loss}.get(kind, self.outputs)


class Difference(NamedTuple):
    """Hold one comparison: `name` is a layer's or a parameter's, `error` is relative."""

    kind: Kind
    name: str
    error: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip() + f" by {self.error:.1e}"


@dataclass
class Numbers:
    """Hold what a run of a model computed, over the whole sequence."""

    logits: Tensor  # [B, T, ...], or [B, ...] where there is one result for a sample
    loss: float | None = None  # the mean over labelled tokens; None where nobody computed one
    # outputs [B, T, ...] of the model's layers by their names, in the order of computing
    layers: dict[str, Tensor] = field(default_factory=dict)
    # by the names of parameters; those without one are left out
    gradients: dict[str, Tensor] = field(default_factory=dict)


def compare(got: Numbers, expected: Numbers) -> list[Difference]:
    """Return the error of everything that was compared: layers, logits, loss, gradients."""
    return compare_outputs(got, expected) + compare_gradients(got.gradients, expected.gradients)


def compare_outputs(got: Numbers, expected: Numbers) -> list[Difference]:
    """Return the errors of the layers that both recorded, of the logits, and of the loss if there is one."""
    found = [
        Difference("layer", name, _by_token(got.layers[name], output))
        for name, output in expected.layers.items()
        if name in got.layers
    ]
    found.append(Difference("logits", "", _by_token(got.logits, expected.logits)))
    if got.loss is not None and expected.loss is not None:
        error = abs(got.loss - expected.loss) / max(abs(expected.loss), 1e-6)
        found.append(Difference("loss", "", _finite(error)))
    return found


def beyond(found: list[Difference], tolerance: Tolerance) -> list[Difference]:
    """Return those that rounding does not explain, in the order in which they were computed."""
    return [one for one in found if not one.error <= tolerance.allows(one.kind)]


def largest(found: list[Difference]) -> dict[str, Difference]:
    """Return the largest error of each kind."""
    return {one.kind: one for one in sorted(found, key=lambda one: one.error)}


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the outputs [B, T, ...] of the model's layers (what stands in a ModuleList) meanwhile."""
    outputs: dict[str, Tensor] = {}
    handles = []
    for path, parent in model.named_modules():
        for name, layer in parent.named_children() if isinstance(parent, nn.ModuleList) else ():
            handles.append(layer.register_forward_hook(_recorder(outputs, f"{path}.{name}")))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _recorder(outputs: dict[str, Tensor], name: str) -> Any:
    def record(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor) and first.ndim == 3 and first.is_floating_point():
            outputs[name] = first.detach().clone()

    return record


def _by_token(got: Tensor, expected: Tensor) -> float:
    if got.shape != expected.shape:
        return float("inf")
    got, expected = got.detach().double(), expected.detach().double()
    typical = expected.norm(dim=-1).mean().clamp_min(1e-12)
    return _finite(float((got - expected).norm(dim=-1).max() / typical))


def compare_gradients(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[Difference]:
    """Return the error of each parameter's gradient; one that only one of both has is zero on the other."""
    norms = torch.tensor([float(gradient.norm()) for gradient in expected.values()] or [0.0])
    floor = _FLOOR * float(norms.square().mean().sqrt()) + 1e-30
    found = []
    for name in [*expected, *[name for name in got if name not in expected]]:
        mine, theirs = got.get(name), expected.get(name)
        if mine is None or theirs is None:
            alone = mine if theirs is None else theirs
            assert alone is not None
            difference, norm = float(alone.norm()), 0.0 if theirs is None else float(theirs.norm())
        else:
            difference = float((mine.double() - theirs.double()).norm())
            norm = float(theirs.double().norm())
        found.append(Difference("gradient", name, _finite(difference / max(norm, floor))))
    return found


def _finite(error: float) -> float:
    """Replace NaN, which compares with nothing and must not pass for small, by infinity."""
    return error if error == error else float("inf")
