"""A score_mod of FlexAttention as a value: `ScoreMod`, and what a kernel gets of it (`HeadScores`).

[Note: changed scores]
Scores are changed pair by pair as FlexAttention's `score_mod` does: soft caps, ALiBi, any function of a pair,
of global positions and heads. A `score_mod` is a value, as a mask function is: it is traced together with its
derivative, and its digest is part of the header. A kernel gets it with the numbers of the heads that it
computes and the positions of its tiles, and masks after it, and after its derivative: NaN at a hidden pair
has no effect. A kernel that cannot evaluate it never gets it: "auto" takes `reference` where the fast kernel
of the device cannot, and logs a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ring.errors import RingConfigError, shown
from ds_ring.masks.pair_masks import ScoreFunction
from ds_ring.patterns.captured.traced import (
    SAMPLED,
    CapturedValues,
    Traced,
    compiled_as_written,
    first_line,
    functorch_allowed,
    indexed_by_tensors,
    name_function,
    trace,
    uncompiled,
    without_modes,
)

VALUE, DERIVATIVE = 0, 1  # results of the graph of a score_mod
_SIGNATURE = "a score_mod(score, batch, head, q_position, k_position) of torch operators"


def _examples(dtype: torch.dtype) -> list[Tensor]:
    """Return a score, four indices and a gradient, six distinct tensors, as a trace needs them."""
    score, grad = (torch.zeros((), dtype=dtype, device="cpu") for _ in range(2))
    return [score, *(torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(4)), grad]


def _requires_grad(traced: Traced) -> list[bool]:
    return [tensor.requires_grad for tensor, _ in traced.captured]


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """Hold the trace of a score_mod and of its derivative; equal if code and captured values are.

    Attributes:
        function: (score, batch, head, q_position, k_position) -> score, of tensors without dimensions.

    Raises:
        RingConfigError: no function, or one that cannot be traced.
    """

    function: ScoreFunction
    _by_dtype: dict[torch.dtype, Traced] = field(default_factory=dict, init=False, repr=False)
    _tried: set[tuple[int, int, int]] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise RingConfigError(
                "score_mod: expected a function (score, batch, head, q_position, k_position) -> score, got"
                f" {shown(self.function)}; write it as for FlexAttention"
            )
        self.__dict__["captured"] = CapturedValues.by(self.function)
        self.__dict__["_required"] = _requires_grad(self.traced(torch.float32))

    @classmethod
    def lookup(cls, function: ScoreFunction) -> ScoreMod:
        """Return the ScoreMod of a function as it is now, the one of before if it captured numbers alone."""
        mod = None
        with suppress(Exception):  # a function that has no hash
            mod = _score_mods.get(function)
        if mod is not None and mod.captured.is_all and not mod.is_changed():
            return mod
        mod = cls(function)
        if mod.captured.is_all:
            with suppress(Exception):
                _score_mods[function] = mod
            if len(_score_mods) > MAX_SCORE_MODS:
                _score_mods.pop(next(iter(_score_mods)), None)
        return mod

    captured: CapturedValues = field(init=False, repr=False)
    _required: list[bool] = field(init=False, repr=False)  # a gradient, when the function was traced

    def traced(self, dtype: torch.dtype) -> Traced:
        """Return the trace for scores of a dtype, which is a constant of the graph."""
        if dtype not in self._by_dtype:
            if self._by_dtype:
                self.check_unchanged()
            self._by_dtype[dtype] = self._trace(dtype)
        return self._by_dtype[dtype]

    @property
    def captured_bytes(self) -> int:
        """Return the memory of the copies of captured tensors."""
        return sum(traced.captured_bytes for traced in self._by_dtype.values())

    def _trace(self, dtype: torch.dtype) -> Traced:
        def both(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor, grad: Tensor) -> Any:
            value, pull, *_ = torch.func.vjp(lambda x: self.function(x, batch, head, q, k), score)
            return value, pull(grad.to(value.dtype).expand(value.shape))[0]

        def check(results: Any) -> None:
            if results[0].dim():
                raise self._refusal("a score without dimensions", f"one of shape {tuple(results[0].shape)}")

        return trace(both, _examples(dtype), self._refusal, "a score_mod", _SIGNATURE, check)

    def _refusal(self, expected: str, got: str) -> RingConfigError:
        return RingConfigError(
            f"score_mod {name_function(self.function)}: expected {expected}, got {got}; write it as for"
            " FlexAttention: torch operators on tensors without dimensions"
        )

    def for_heads(self, heads: range) -> HeadScores:
        """Return what a kernel gets that computes query heads of these numbers, among all of the model."""
        return HeadScores(self, heads)

    def is_changed(self) -> bool:
        """Return whether what the function captured, or its need of a gradient, changed since the trace."""
        trace = self._by_dtype[torch.float32]
        return self._required != _requires_grad(trace) or trace.is_changed(self.function, self.captured)

    @cached_property
    def needs_gradient(self) -> bool:
        """Return whether the score depends on a captured tensor that requires a gradient."""

        def work() -> bool:
            with indexed_by_tensors(), compiled_as_written():
                return bool(uncompiled(self.function)(*_examples(torch.float32)[:5]).requires_grad)

        return without_modes(work)

    @cached_property
    def has_own_derivative(self) -> bool:
        """Return whether an autograd.Function inside has a backward pass that its operators do not say."""
        value = self.traced(torch.float32).function()

        def both(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor, grad: Tensor) -> Any:
            result, pull, *_ = torch.func.vjp(lambda x: value(x, batch, head, q, k, x), score)
            return result, pull(grad.to(result.dtype))[0]

        try:
            derived = trace(both, _examples(torch.float32), self._refusal, "a score_mod", _SIGNATURE)
        except RingConfigError:  # an operator without a derivative
            return True
        return derived.digest != self.traced(torch.float32).digest

    @cached_property
    def untraced(self) -> Callable[..., Tensor]:
        """Return the function itself, with the arguments of its trace."""
        function = uncompiled(self.function)

        def evaluate_pairs(
            score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor, grad: Tensor
        ) -> Tensor:
            return function(score, batch, head, q, k)

        return evaluate_pairs

    def check_unchanged(self) -> None:
        """Raise RingConfigError for a function that captured other values since it was traced."""
        if self.is_changed():
            raise self._refusal("captured values that stay as they were", "others; pass the function anew")

    def check(self, tokens: int, samples: int, query_heads: int) -> None:
        """Raise RingConfigError for a function that fails for positions, samples or heads of such a call.

        On the CPU, as an index out of bounds ends the use of a GPU; once for each kind of call.
        """
        if (tokens, samples, query_heads) in self._tried:
            return
        name = f"score_mod {name_function(self.function)}"
        self.traced(torch.float32).check_rows(1, samples, RingConfigError, name)
        where = torch.linspace(0, tokens - 1, min(SAMPLED, tokens), dtype=torch.float64, device="cpu").long()
        batch, heads = (torch.tensor(sorted({0, n - 1}), device="cpu") for n in (samples, query_heads))
        scores = torch.zeros(
            len(batch), len(heads), len(where), len(where), dtype=torch.float32, device="cpu"
        )
        try:
            for result in (VALUE, DERIVATIVE):
                _evaluated(self, result, scores, scores, batch, heads, where, where)
        except Exception as error:
            if isinstance(error, RingConfigError):
                raise
            raise self._refusal(f"scores at positions up to {tokens - 1}", first_line(error)) from error
        self._tried.add((tokens, samples, query_heads))

    def check_gradient(self) -> None:
        """Raise RingConfigError for a captured tensor that requires a gradient now: it would get none."""
        if torch.is_grad_enabled() and self.needs_gradient:
            raise RingConfigError(
                f"score_mod {name_function(self.function)}: expected captured tensors that require no"
                " gradient, got one that does, and would get none: DistanceBiasAttention (ds_ring/layers/"
                "distance_bias) trains a term by distance; for a constant, detach it inside the function"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoreMod) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    @cached_property
    def _value(self) -> tuple[object, ...]:
        return name_function(self.function), self.needs_gradient, *self.traced(torch.float32).value

    def __str__(self) -> str:
        return f"{name_function(self.function)}, contents {self.traced(torch.float32).digest}"


MAX_SCORE_MODS = 64
_score_mods: dict[ScoreFunction, ScoreMod] = {}  # of functions that captured numbers alone


class HeadScores(NamedTuple):
    """Hold a score_mod and the numbers of query heads: `Scores` in `kernels/interface.py`."""

    mod: ScoreMod
    heads: range

    def select(self, heads: slice) -> HeadScores:
        return self._replace(heads=self.heads[heads])

    def functions(
        self, dtype: torch.dtype, device: torch.device, derived: bool
    ) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        traced = self.mod.traced(dtype)
        value, derivative = (traced.function(device, result) for result in (VALUE, DERIVATIVE))
        if derived and self.mod.has_own_derivative:  # only the function itself has its gradient
            self.mod.check_unchanged()
            value = self.mod.untraced
        return value, derivative

    def changed(self, scores_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return self._evaluated(VALUE, scores_BHQK, scores_BHQK, q_positions, k_positions)

    def gradient(self, scores_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor, grad: Tensor) -> Tensor:
        return self._evaluated(DERIVATIVE, scores_BHQK, grad, q_positions, k_positions)

    def _evaluated(
        self, result: int, scores_BHQK: Tensor, grad_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> Tensor:
        device = scores_BHQK.device
        batch, heads = (torch.tensor(x, device=device) for x in (range(len(scores_BHQK)), self.heads))
        arguments = scores_BHQK, grad_BHQK, batch, heads, q_positions, k_positions
        return _evaluated(self.mod, result, *arguments).to(scores_BHQK.dtype)


def _evaluated(
    mod: ScoreMod, result: int, scores_BHQK: Tensor, grad_BHQK: Tensor, batch: Tensor, heads: Tensor,
    q_positions: Tensor, k_positions: Tensor,
) -> Tensor:  # fmt: skip
    """Return a result of the function for all samples, heads, queries and keys of these numbers.

    Raises:
        RingConfigError: the function fails.
    """
    device = scores_BHQK.device
    evaluate: Callable[..., Tensor] = mod.traced(scores_BHQK.dtype).function(device, result)
    for argument in (4, 3, 2, 1):  # keys, queries, heads, samples: the innermost is the last dimension
        dims = [0, None, None, None, None, 0]
        dims[argument] = 0
        evaluate = torch.vmap(evaluate, in_dims=tuple(dims))
    try:
        with torch.no_grad(), functorch_allowed():
            return evaluate(scores_BHQK, batch, heads, q_positions, k_positions, grad_BHQK)
    except IndexError as error:
        where = f"scores at positions up to {int(q_positions.max())} and {int(k_positions.max())}"
        raise mod._refusal(where, first_line(error)) from error
