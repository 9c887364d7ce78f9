"""A mask function of FlexAttention as a pattern: `MaskMod`.

[Note: a mask function is a branch]
A `MaskMod` is one branch with a mask function, which is evaluated inside blocks of 256 x 256 positions
(`joins.py`).

The function is traced when the pattern is made (`traced.py`), and the trace is evaluated and compared. Batch
or head matter if the graph uses them.

[Note: all pairs at once]
A call through vmap costs a millisecond, and a strided layout can have thousands of small tiles. A graph that
has only elementwise operators and look-ups of integers gives the same result for broadcast tensors as for
0-d tensors under vmap, so the graph is called directly. Except for types: a 0-d tensor does not widen the
type of a tensor with dimensions, if both are whole numbers, but it widens that of another 0-d tensor. So
where an operator takes a captured number and something of the pair, both rules must give one type
(`_has_one_type`). (With captured floats, type promotion could differ, too.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, fx

from ds_ring.errors import RingPatternError, check_bool
from ds_ring.masks.branches import Branch
from ds_ring.masks.pair_masks import ByIdentity, MaskFunction, PairMask
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.slots import IntArray
from ds_ring.patterns.captured.traced import (
    SAMPLED,
    CapturedValues,
    Traced,
    first_line,
    functorch_allowed,
    get_constant,
    name_function,
    trace,
)

_aten = torch.ops.aten


def _refusal(function: MaskFunction, expected: str, got: str) -> RingPatternError:
    """Return the error for a function that is no mask."""
    return RingPatternError(
        f"MaskMod {name_function(function)}: expected {expected}, got {got}; write it like FlexAttention's"
        " mask_mod, with 0-d tensors of global positions: torch operators only, one boolean for each pair"
    )


def _is_elementwise(graph: fx.GraphModule) -> bool:
    """Return whether the graph may be called with tensors that broadcast; [Note: all pairs at once]."""

    of_pairs: set[fx.Node] = set()  # what has dimensions when the tensors broadcast

    def accepts(node: fx.Node) -> bool:
        if node.op == "placeholder" or not of_pairs.isdisjoint(node.all_input_nodes):
            of_pairs.add(node)
        if node.op == "get_attr":
            constant = get_constant(graph, node)
            return not (constant.is_floating_point() or constant.is_complex())
        if node.op != "call_function":
            return True
        if not node.all_input_nodes:  # it makes a tensor
            return node.kwargs.get("dtype") in (torch.bool, torch.int32, torch.int64)
        if node.target is not _aten.index.Tensor:
            is_pointwise = (
                isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
            )
            return is_pointwise and _has_one_type(graph, node, of_pairs)
        table, indices = cast(tuple[fx.Node, list[fx.Node]], node.args)
        return table.op == "get_attr" and len(indices) == get_constant(graph, table).dim()

    return all(map(accepts, graph.graph.nodes))


def _has_one_type(graph: fx.GraphModule, node: fx.Node, of_pairs: set[fx.Node]) -> bool:
    """Return whether an operator computes in one type, with 0-d tensors and with those that broadcast."""
    dtypes: list[set[torch.dtype]] = [set(), set()]  # of what broadcasts, and of numbers
    for source in node.all_input_nodes:
        value = get_constant(graph, source) if source.op == "get_attr" else source.meta["val"]
        dtypes[source not in of_pairs].add(value.dtype)
    if len(dtypes[0] | dtypes[1]) == 1 or not all(dtypes):
        return True
    try:
        broadcast, number = (functools.reduce(torch.promote_types, side) for side in dtypes)
        both = torch.empty(1, dtype=broadcast, device="cpu"), torch.empty((), dtype=number, device="cpu")
        return torch.result_type(*both) == torch.promote_types(broadcast, number)
    except RuntimeError:  # types that do not mix
        return False


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
    traced = facts.traced.function(q.device)
    if facts.elementwise:
        every = batch.view(-1, 1, 1, 1), head.view(-1, 1, 1), q[:, None], k[None]
        shape = batch.numel(), head.numel(), len(q), len(k)
        values = _call(function, traced, *every).expand(shape)
        return values if facts.by_batch or facts.by_head else values[0, 0]
    # The innermost vmap makes the last dimension, so the order is keys, queries, heads, samples.
    mapped: Callable[..., Tensor] = torch.vmap(traced, in_dims=(None, None, None, 0))
    mapped = torch.vmap(mapped, in_dims=(None, None, 0, None))
    if facts.by_head:
        mapped = torch.vmap(mapped, in_dims=(None, 0, None, None))
    if facts.by_batch:
        mapped = torch.vmap(mapped, in_dims=(0, None, None, None))
    values = _call(function, mapped, batch, head, q, k)
    if facts.by_batch and not facts.by_head:
        return values.unsqueeze(1)
    return values.unsqueeze(0) if facts.by_head and not facts.by_batch else values


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
    the call, those of other Ulysses ranks included; one that depends on the batch for each sample, numbered
    in this rank's batch.

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
    made_in_graphs: bool = field(default=False, init=False, repr=False, compare=False)
    _tried: set[tuple[int, int, int, str]] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise RingPatternError.wrong(
                "MaskMod", "a mask_mod(batch, head, q_position, k_position)", self.function, "pass a function"
            )
        check_bool(self.is_known_causal, "MaskMod: is_known_causal", RingPatternError)
        if torch.compiler.is_compiling():  # it is made again while the graph is traced
            object.__setattr__(self, "made_in_graphs", True)
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
        facts = self._traced[1]
        if isinstance(facts, RingPatternError):
            raise facts.with_traceback(None)
        return facts

    @cached_property
    def _value(self) -> tuple[object, ...]:
        facts = self._traced[1]
        value: tuple[object, ...] = (ByIdentity(self.function),)  # of a refused function
        if isinstance(facts, MaskFacts):
            value = facts.traced.value
        return (name_function(self.function), self.is_known_causal, *value)

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
        facts = self._traced[1]
        # a function that is none is refused at its first use; a text of it must not
        contents = f", contents {facts.traced.digest}" if isinstance(facts, MaskFacts) else ""
        return f"MaskMod({name_function(self.function)}{contents})"


@dataclass(frozen=True)
class HeadMask(PairMask):
    """The function of a `MaskMod` for some query heads."""

    whole: MaskMod
    heads: tuple[int, ...] = ()

    @property
    def identity(self) -> int:
        return id(self.whole)

    @property
    def captured_bytes(self) -> int:
        _, facts = self.whole._traced
        return facts.traced.captured_bytes if isinstance(facts, MaskFacts) else 0

    @property
    def is_known_causal(self) -> bool:
        return self.whole.is_known_causal

    def for_heads(self, heads: tuple[int, ...]) -> HeadMask:
        return replace(self, heads=heads if heads and self.whole.facts.by_head else ())

    def __call__(self, samples: int, q: Tensor, k: Tensor) -> Tensor:
        return _evaluate(self.whole.function, self.whole.facts, samples, self.heads, q, k)

    def function(self, device: torch.device) -> MaskFunction:
        return self.whole.facts.traced.function(device)

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        # once for each kind of call
        whole, facts = self.whole, self.whole.facts
        key = (tokens, samples, query_heads, device)
        if key not in whole._tried:
            facts.traced.check_rows(0, samples, RingPatternError, f"MaskMod {name_function(whole.function)}")
            # spread over the whole sequence, first and last position included
            number = min(SAMPLED, tokens)
            some = torch.linspace(0, tokens - 1, number, dtype=torch.float64, device=device).long()
            _evaluate(whole.function, facts, samples, tuple(range(query_heads)), some, some)
            whole._tried.add(key)

    def check_unchanged(self) -> None:
        captured, _ = self.whole._traced
        if self.whole.facts.traced.is_changed(self.whole.function, captured):
            raise RingPatternError(
                f"MaskMod {name_function(self.whole.function)}: expected unchanged captured values, got"
                " others than when it was made; give each call of ring_attention a new MaskMod (a mask of the"
                " JSON is fixed for the run: see configs/examples/batch_mask.py)"
            )

    def pairs(self, q: IntArray, k: IntArray) -> IntArray:
        function, facts = self.whole.function, self.whole.facts
        if facts.by_batch:
            raise _refusal(function, "a mask that is the same for all samples here", "one that is not")
        if not q.size:
            return np.zeros(q.shape, dtype=bool)
        ours, theirs = (torch.from_numpy(x.flatten()) for x in (q, k))  # copies: q and k may be read-only
        pairwise = torch.vmap(self.function(ours.device), in_dims=(None, None, 0, 0))
        values = _call(
            function,
            pairwise,
            torch.tensor(0, device="cpu"),
            torch.tensor(self.heads[0], device="cpu"),
            ours,
            theirs,
        )
        return values.numpy().reshape(q.shape)
