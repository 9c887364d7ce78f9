"""FlexAttention's functions of pairs: a mask function as a pattern (`MaskMod`), and a `ScoreMod` of scores.

[Note: a mask function is a branch]
A `MaskMod` is one branch with a mask function, which is evaluated inside blocks of 256 x 256 positions
(`joins.py`).

The function is traced when the pattern is made (`traced.py`), and the trace is evaluated and compared. Batch
or head matter if the graph uses them.

[Note: all pairs at once]
A call through vmap costs a millisecond, and a strided layout can have thousands of small tiles. A graph that
has only elementwise operators and look-ups of integers gives the same result for broadcast tensors as for
0-d tensors under vmap, so the graph is called directly. (With captured floats, type promotion could differ.)

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
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, fx
from torch.nn.functional import pad

from ds_ring.errors import RingConfigError, RingPatternError, shown, true_or_false
from ds_ring.masks.branches import Branch
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.slots import IntArray
from ds_ring.masks.tiles import MaskFunction
from ds_ring.masks.traced import (
    ByIdentity,
    CapturedValues,
    Traced,
    constant_of,
    first_line,
    functorch_allowed,
    indexed_by_tensors,
    name_of,
    trace,
    without_modes,
    writes_to,
)

_aten = torch.ops.aten
_SAMPLED = 64  # positions at which a mask is tried before the first pass; the first and the last are added


def _refusal(function: MaskFunction, expected: str, got: str) -> RingPatternError:
    """Return the error for a function that is no mask."""
    return RingPatternError(
        f"MaskMod {name_of(function)}: expected {expected}, got {got}; write it like FlexAttention's"
        " mask_mod, with 0-d tensors of global positions: torch operators only, one boolean for each pair"
    )


def _is_elementwise(graph: fx.GraphModule) -> bool:
    """Return whether the graph may be called with tensors that broadcast; [Note: all pairs at once]."""

    def accepts(node: fx.Node) -> bool:
        if node.op == "get_attr":
            constant = constant_of(graph, node)
            return not (constant.is_floating_point() or constant.is_complex())
        if node.op != "call_function":
            return True
        if not node.all_input_nodes:  # it makes a tensor
            return node.kwargs.get("dtype") in (torch.bool, torch.int32, torch.int64)
        if node.target is not _aten.index.Tensor:
            return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
        table, indices = cast(tuple[fx.Node, list[fx.Node]], node.args)
        return table.op == "get_attr" and len(indices) == constant_of(graph, table).dim()

    return all(map(accepts, graph.graph.nodes))


class MaskFacts(NamedTuple):
    """Properties of a mask function that its trace shows."""

    traced: Traced
    by_batch: bool  # whether the result depends on the index of the sample
    by_head: bool  # ... and of the query head
    elementwise: bool  # the graph may be called for all positions; [Note: all pairs at once]


def trace_mask(function: MaskFunction) -> MaskFacts:
    """Trace a mask function, or refuse it."""

    def check(result: Any) -> None:
        is_tensor = isinstance(result, Tensor)
        if not is_tensor or result.dtype != torch.bool or result.dim():
            got = f"{result.dtype} of shape {tuple(result.shape)}" if is_tensor else type(result).__name__
            raise _refusal(function, "a boolean tensor without dimensions", got)

    arguments = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(4)]
    signature = "a mask_mod(batch, head, q_position, k_position)"
    traced = trace(function, arguments, lambda *why: _refusal(function, *why), "a mask", signature, check)
    batch, head, *_ = traced.graph.graph.nodes
    return MaskFacts(traced, bool(batch.users), bool(head.users), _is_elementwise(traced.graph))


def _evaluate(
    function: MaskFunction, facts: MaskFacts, samples: int, heads: tuple[int, ...], q: Tensor, k: Tensor
) -> Tensor:
    """Evaluate a mask function for all pairs of two lists of positions, int64 [n] and [m].

    Returns bool [n, m]; [samples or 1, len(heads) or 1, n, m] if the mask differs by sample or by head.
    """
    # an index that the result does not depend on is a 0-d tensor of 0
    batch = torch.arange(samples, device=q.device) if facts.by_batch else torch.zeros_like(q[0])
    numbers: Any = heads if facts.by_head else 0
    head = torch.tensor(numbers, dtype=torch.int64, device=q.device)
    own = facts.traced.function(q.device)
    if facts.elementwise:
        every = batch.view(-1, 1, 1, 1), head.view(-1, 1, 1), q[:, None], k[None]
        shape = batch.numel(), head.numel(), len(q), len(k)
        found = _call(function, own, *every).expand(shape)
        return found if facts.by_batch or facts.by_head else found[0, 0]
    # The innermost vmap makes the last dimension, so the order is keys, queries, heads, samples.
    mapped: Callable[..., Tensor] = torch.vmap(own, in_dims=(None, None, None, 0))
    mapped = torch.vmap(mapped, in_dims=(None, None, 0, None))
    if facts.by_head:
        mapped = torch.vmap(mapped, in_dims=(None, 0, None, None))
    if facts.by_batch:
        mapped = torch.vmap(mapped, in_dims=(0, None, None, None))
    found = _call(function, mapped, batch, head, q, k)
    if facts.by_batch and not facts.by_head:
        return found.unsqueeze(1)
    return found.unsqueeze(0) if facts.by_head and not facts.by_batch else found


def _call(function: MaskFunction, mapped: Callable[..., Tensor], *args: Tensor) -> Tensor:
    try:
        with torch.no_grad(), functorch_allowed():
            return mapped(*args)
    except Exception as error:
        where = f"positions up to {int(args[2].max())} and {int(args[3].max())}"
        raise _refusal(function, f"a mask of {where}", first_line(error)) from error


@dataclass(frozen=True, eq=False)
class MaskMod(Pattern):
    """Attend by a FlexAttention `mask_mod` of global positions; torch's `and_masks`, `or_masks` compose it.

    It is evaluated as FlexAttention does: with 0-d tensors, by vmap over samples, heads, queries and keys.
    One that depends on the head is evaluated for each head, with the head's number among all query heads of
    the model; one that depends on the batch for each sample, numbered in this rank's batch.

    The function is traced here, and the pattern is a value: it holds copies of the tensors that the function
    captured. Two are equal if their code and all captured values are, tensors included; ranks compare them
    before anything is sent. If you change a captured value, make a new MaskMod: the old one is refused where
    the change can be detected (numbers, lists, dicts, arrays, tensors, attributes).

    The plan does not know which pairs the function hides: every pair counts as work, and every key travels,
    unless `&` adds a pattern that hides them, too (`MaskMod(f) & SlidingWindow(1024)`).

    Attributes:
        function: `mask_mod(batch, head, q_position, k_position) -> bool`, of int64 tensors without
            dimensions.
        is_known_causal: set it if the function never shows a key after its query; with `&` Causal() it
            need not be.

    Raises:
        RingPatternError: no function; at its first use, a function that raises, draws random numbers, writes
            to a captured tensor, or returns no boolean for a pair.
    """

    function: MaskFunction
    is_known_causal: bool = False
    made_in_a_graph: bool = field(default=False, init=False, repr=False, compare=False)
    _tried: set[tuple[int, int, int, str]] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise RingPatternError.wrong(
                "MaskMod", "a mask_mod(batch, head, q_position, k_position)", self.function, "pass a function"
            )
        true_or_false(self.is_known_causal, "MaskMod: is_known_causal", RingPatternError)
        if torch.compiler.is_compiling():  # it is made again while the graph is traced
            object.__setattr__(self, "made_in_a_graph", True)
        else:
            assert self._traced

    @cached_property
    def _traced(self) -> tuple[CapturedValues, MaskFacts | RingPatternError]:
        captured = CapturedValues.by(self.function)
        try:
            return captured, trace_mask(self.function)
        except RingPatternError as error:  # raised by `facts`, where all ranks learn of it
            return captured, error

    @property
    def facts(self) -> MaskFacts:
        """Return the facts of the traced function; raise RingPatternError if it cannot be traced."""
        found = self._traced[1]
        if isinstance(found, RingPatternError):
            raise found.with_traceback(None)
        return found

    @cached_property
    def _value(self) -> tuple[object, ...]:
        found = self._traced[1]
        value: tuple[object, ...] = (ByIdentity(self.function),)  # of a refused function
        if isinstance(found, MaskFacts):
            value = found.traced.value
        return (name_of(self.function), self.is_known_causal, *value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskMod) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskMod, (self.function, self.is_known_causal)

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(masks=(HeadMask(self, (head.number,)),)),)

    def __str__(self) -> str:
        """Return the function's name, with a digest of its code and of its captured values."""
        found = self._traced[1]
        # a function that is none is refused at its first use; a text of it must not
        contents = f", contents {found.traced.digest}" if isinstance(found, MaskFacts) else ""
        return f"MaskMod({name_of(self.function)}{contents})"


@dataclass(frozen=True)
class HeadMask:
    """The function of a `MaskMod` for some query heads; empty if the function does not depend on the head.

    Other files of this folder, which do not need torch, call it `PairMask`.
    """

    whole: MaskMod
    heads: tuple[int, ...] = ()

    def __call__(self, samples: int, q: Tensor, k: Tensor) -> Tensor:
        """Return the mask of positions int64 [n] and [m], bool [n, m]; batch and head lead if they matter."""
        return _evaluate(self.whole.function, self.whole.facts, samples, self.heads, q, k)

    def function(self, device: torch.device) -> MaskFunction:
        """Return the traced mask_mod on a device."""
        return self.whole.facts.traced.function(device)

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        """Try the function at some positions, once for each kind of call; see `Pattern.check`."""
        whole, facts = self.whole, self.whole.facts
        key = (tokens, samples, query_heads, device)
        if key not in whole._tried:
            # spread over the whole sequence, first and last position included
            some = torch.linspace(0, tokens - 1, min(_SAMPLED, tokens), device=device).long()
            _evaluate(whole.function, facts, samples, tuple(range(query_heads)), some, some)
            whole._tried.add(key)

    def check_unchanged(self) -> None:
        """Refuse a mask whose function has captured other values since it was traced."""
        captured, _ = self.whole._traced
        if _is_changed(self.whole.function, captured, self.whole.facts.traced):
            raise RingPatternError(
                f"MaskMod {name_of(self.whole.function)}: expected unchanged captured values, got others than"
                " when it was made; make a new MaskMod for a new mask"
            )

    def pairs(self, q: IntArray, k: IntArray) -> IntArray:
        """Return bool of pairs of positions for the first head; refuse a mask that differs by sample."""
        function, facts = self.whole.function, self.whole.facts
        if facts.by_batch:
            raise _refusal(function, "a mask that is the same for all samples here", "one that is not")
        if not q.size:
            return np.zeros(q.shape, dtype=bool)
        ours, theirs = (torch.from_numpy(x.flatten()) for x in (q, k))  # copies: q and k may be read-only
        pairwise = torch.vmap(self.function(ours.device), in_dims=(None, None, 0, 0))
        found = _call(function, pairwise, torch.tensor(0), torch.tensor(self.heads[0]), ours, theirs)
        return found.numpy().reshape(q.shape)


def _is_changed(function: Callable[..., Any], captured: CapturedValues, traced: Traced) -> bool:
    """Return whether a function has captured other values since its trace, as far as Python lets us look."""
    written = any(writes_to(tensor) != count for tensor, count in traced.captured)
    return written or captured.values != CapturedValues.by(function).values


ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Softcap:
    """Limit scores to -cap .. cap by cap * tanh(score / cap), as Gemma 2 does: a `score_mod`."""

    cap: float

    def __call__(self, score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)


@dataclass(frozen=True)
class Alibi:
    """Add slope * (key position - query position) to the scores of each head: a `score_mod`."""

    slopes: tuple[float, ...]  # of the model's query heads

    def __call__(self, score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        slopes = torch.tensor(self.slopes, dtype=score.dtype, device=score.device)
        return score + slopes[head] * (key - query)


_WIDTH = 8  # head dims of kernels are multiples of it


def with_key_terms(q: Tensor, k: Tensor, terms: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return q and k with more dimensions, which add a term of each key to its scores. Differentiable.

    So terms travel with the keys, every kernel adds them, and they get their gradient.

    Args:
        q, k: [B, H, S, D] and [B, G, S, D].
        terms: [B, G, S], finite; added to the scores after these are multiplied by `scale`.
        scale: factor of the scores.
    """
    # 1 / scale as a sum of two numbers, which in bfloat16 have 16 bits together.
    inverse = torch.tensor(1 / scale, dtype=torch.float64)
    high = inverse.to(q.dtype)
    low = (inverse - high.double()).to(q.dtype)
    both = torch.stack([high, low]).to(q.device).expand(*q.shape[:-1], 2)
    terms = terms.to(k.dtype).unsqueeze(-1).expand(-1, -1, -1, 2)
    fill = -(q.shape[-1] + 2) % _WIDTH
    return pad(torch.cat([q, both], dim=-1), (0, fill)), pad(torch.cat([k, terms], dim=-1), (0, fill))


VALUE, DERIVATIVE = 0, 1  # results of the graph of a score_mod
_SIGNATURE = "a score_mod(score, batch, head, q_position, k_position) of torch operators"


def _examples(dtype: torch.dtype) -> list[Tensor]:
    """Return a score, four indices and a gradient, six distinct tensors, as a trace needs them."""
    score, grad = (torch.zeros((), dtype=dtype, device="cpu") for _ in range(2))
    return [score, *(torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(4)), grad]


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

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise RingConfigError(
                "score_mod: expected a function (score, batch, head, q_position, k_position) -> score, got"
                f" {shown(self.function)}; write it as for FlexAttention"
            )
        self.__dict__["captured"] = CapturedValues.by(self.function)
        self.traced(torch.float32)

    @classmethod
    def lookup(cls, function: ScoreFunction) -> ScoreMod:
        """Return the ScoreMod of a function as it is now, the one of before if it captured numbers alone."""
        found = None
        with suppress(Exception):  # a function that has no hash, or no weak references
            found = _score_mods.get(function)
        if found is not None and found.captured.is_all and not found.is_changed():
            return found
        found = cls(function)
        with suppress(Exception):
            _score_mods[function] = found
        return found

    captured: CapturedValues = field(init=False, repr=False)

    def traced(self, dtype: torch.dtype) -> Traced:
        """Return the trace for scores of a dtype, which is a constant of the graph."""
        if dtype not in self._by_dtype:
            if self._by_dtype:
                self.check_unchanged()
            self._by_dtype[dtype] = self._trace(dtype)
        return self._by_dtype[dtype]

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
            f"score_mod {name_of(self.function)}: expected {expected}, got {got}; write it as for"
            " FlexAttention: torch operators on tensors without dimensions"
        )

    def is_changed(self) -> bool:
        """Return whether the function has captured other values since it was traced."""
        return _is_changed(self.function, self.captured, self._by_dtype[torch.float32])

    @cached_property
    def needs_gradient(self) -> bool:
        """Return whether the score depends on a captured tensor that requires a gradient."""

        def work() -> bool:
            with indexed_by_tensors():
                return bool(self.function(*_examples(torch.float32)[:5]).requires_grad)

        return without_modes(work)

    @cached_property
    def has_own_derivative(self) -> bool:
        """Return whether an autograd.Function inside has a backward pass that its operators do not say."""
        value = self.traced(torch.float32).function()

        def both(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor, grad: Tensor) -> Any:
            found, pull, *_ = torch.func.vjp(lambda x: value(x, batch, head, q, k, x), score)
            return found, pull(grad.to(found.dtype))[0]

        try:
            derived = trace(both, _examples(torch.float32), self._refusal, "a score_mod", _SIGNATURE)
        except RingConfigError:  # an operator without a derivative
            return True
        return derived.digest != self.traced(torch.float32).digest

    @cached_property
    def untraced(self) -> Callable[..., Tensor]:
        """Return the function itself, with the arguments of its trace."""
        function = self.function

        def of_pairs(
            score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor, grad: Tensor
        ) -> Tensor:
            return function(score, batch, head, q, k)

        return of_pairs

    def check_unchanged(self) -> None:
        """Raise RingConfigError for a function that captured other values since it was traced."""
        if self.is_changed():
            raise self._refusal("captured values that stay as they were", "others; pass the function anew")

    def check_gradient(self) -> None:
        """Raise RingConfigError for a captured tensor that requires a gradient now: it would get none."""
        if torch.is_grad_enabled() and self.needs_gradient:
            raise RingConfigError(
                f"score_mod {name_of(self.function)}: expected captured tensors that require no gradient, got"
                " one that does; detach it inside the function, or use torch.no_grad()"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoreMod) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    @cached_property
    def _value(self) -> tuple[object, ...]:
        return name_of(self.function), self.needs_gradient, *self.traced(torch.float32).value

    def __str__(self) -> str:
        return f"{name_of(self.function)}, contents {self.traced(torch.float32).digest}"


_score_mods: WeakKeyDictionary[ScoreFunction, ScoreMod] = WeakKeyDictionary()


class Scores(NamedTuple):
    """Hold a score_mod and the numbers of the query heads that a kernel is given, among all of the model."""

    mod: ScoreMod
    heads: range

    def of(self, heads: slice) -> Scores:
        """Return the same for some of the heads."""
        return self._replace(heads=self.heads[heads])

    def changed(self, scores_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return the scores of all pairs as the function changes them."""
        return self._evaluated(VALUE, scores_BHQK, scores_BHQK, q_positions, k_positions)

    def gradient(self, scores_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the scores, from the gradient of the result of `changed`."""
        return self._evaluated(DERIVATIVE, scores_BHQK, grad, q_positions, k_positions)

    def _evaluated(
        self, result: int, scores_BHQK: Tensor, grad_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> Tensor:
        device = scores_BHQK.device
        evaluate: Callable[..., Tensor] = self.mod.traced(scores_BHQK.dtype).function(device, result)
        for argument in (4, 3, 2, 1):  # keys, queries, heads, samples: the innermost is the last dimension
            dims = [0, None, None, None, None, 0]
            dims[argument] = 0
            evaluate = torch.vmap(evaluate, in_dims=tuple(dims))
        batch, heads = (torch.tensor(x, device=device) for x in (range(len(scores_BHQK)), self.heads))
        with torch.no_grad(), functorch_allowed():
            found = evaluate(scores_BHQK, batch, heads, q_positions, k_positions, grad_BHQK)
        return found.to(scores_BHQK.dtype)
