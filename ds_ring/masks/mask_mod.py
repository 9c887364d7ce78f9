"""`MaskMod`: a FlexAttention mask function as a pattern. Owns its checks, and nothing of tiles or blocks.

The other patterns are labels and bands, in numpy; what a function shows is evaluated with tensors.

[Note: a mask function is a branch]
A `MaskMod` is one branch with a predicate. The predicate is evaluated inside blocks of 256 positions
(`joins.py`). The trace says whether it depends on the head or the batch, and its digest is part of the header
that ranks compare ([Note: the trace of a mask] in mask_mod.py).
"""

from __future__ import annotations

import functools
import hashlib
import random
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from ds_ring.checked_numbers import true_or_false
from ds_ring.errors import RingPatternError, shown
from ds_ring.masks.branches import Branch
from ds_ring.masks.pattern import Head, Pattern
from ds_ring.masks.tiles import IntArray, MaskFunction

# The graph of a mask function: what can be read off it. Owns its refusals, and knows no pattern.
#
# [Note: the trace of a mask]
# The function is traced with 0-d tensors, as FlexAttention does. In the graph it can be read off exactly
# whether batch or head reach the result (and_masks calls `batch.new_ones`, which takes no value from it), and
# which tensors were captured. The graph in a canonical form, with a hash of those tensors, is the digest:
# equal on two ranks only if the functions are the same one. A second trace has to be equal: a counter would
# show.

# Operators that take shape and dtype of their first argument, but none of its values.
_SHAPE_ONLY = ("new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like")


def refusal(function: MaskFunction, expected: str, got: str) -> RingPatternError:
    """Return the error for a function that is no mask."""
    return RingPatternError(
        f"MaskMod {name_of(function)}: expected {expected}, got {got}; write it like FlexAttention's"
        " mask_mod, with 0-d tensors of global positions: torch operators only, one boolean for each pair"
    )


def name_of(function: Callable[..., Any]) -> str:
    """Return module and qualified name of a function, of the class of any other callable."""
    if isinstance(function, functools.partial):
        return f"partial of {name_of(function.func)}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of what it says."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:100] if text else ''}"


def graph_of(function: MaskFunction) -> fx.GraphModule:
    """Trace a mask function with 0-d tensors.

    Raises:
        RingPatternError: it raises, returns no boolean tensor without dimensions, or has side effects.
    """
    arguments = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
    # make_fx returns the graph alone; the type of the result is checked as well
    results = []

    def kept(*args: Tensor) -> Any:
        results.append(function(*args))
        return results[-1]

    try:
        # without that mode, table[position] would read the position as a Python number
        with torch.no_grad(), TransformGetItemToIndex():
            graph = make_fx(kept, tracing_mode="real")(*arguments)
    except Exception as error:
        raise refusal(
            function, "a mask_mod(batch, head, q_position, k_position)", first_line(error)
        ) from error
    (result,) = results
    if not isinstance(result, Tensor):
        raise refusal(function, "a boolean tensor without dimensions", f"{type(result).__name__}")
    if result.dtype != torch.bool or result.dim():
        got = f"{result.dtype} of shape {tuple(result.shape)}"
        raise refusal(function, "a boolean tensor without dimensions", got)
    # torch.cond and while_loop keep their branches as submodules of the graph
    if any(
        node.op == "get_attr" and not isinstance(constant_of(graph, node), Tensor)
        for node in graph.graph.nodes
    ):
        raise refusal(function, "torch operators on tensors", "control flow (torch.cond, while_loop)")
    _refuse_side_effects(function, graph)
    return graph


def _refuse_side_effects(function: MaskFunction, graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise refusal(function, "a mask without random numbers", f"a call of {node.target}")
        written = [
            value
            for value, argument in zip(node.args, node.target._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        # the function may write to what a call of its own made, not to arguments or captured tensors
        if any(_origin(value).op != "call_function" for value in written if isinstance(value, fx.Node)):
            raise refusal(function, "a mask that writes to no tensor but its own", f"a call of {node.target}")


def _origin(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view shows."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        arguments = zip(node.args, node.target._schema.arguments, strict=False)
        # an argument with alias information may share its memory with the result
        viewed = [v for v, a in arguments if a.alias_info is not None and isinstance(v, fx.Node)]
        if not viewed:
            break
        node = viewed[0]
    return node


def dependence_of(graph: fx.GraphModule) -> tuple[bool, bool]:
    """Return whether values of batch and of head reach the result."""
    nodes = list(graph.graph.nodes)
    batch, head = nodes[:2]
    writes = any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in nodes)
    # back from the result; from every node where something is written in place, which no edge shows
    reached, left = set(), nodes if writes else [nodes[-1]]
    while left:
        node = left.pop()
        if node not in reached:
            reached.add(node)
            left += [] if _takes_no_value(node) else node.all_input_nodes
    asked = {used for node in reached if not _takes_no_value(node) for used in node.all_input_nodes}
    return batch in asked, head in asked


def is_elementwise(graph: fx.GraphModule) -> bool:
    """Return whether the graph may be called with tensors that broadcast; [Note: all pairs at once]."""
    nodes = graph.graph.nodes
    constants = [constant_of(graph, node) for node in nodes if node.op == "get_attr"]
    calls = [node for node in nodes if node.op == "call_function"]
    return not any(x.is_floating_point() or x.is_complex() for x in constants) and all(
        _takes_no_value(node) or _is_look_up(graph, node) or _is_pointwise(node) for node in calls
    )


def _is_pointwise(node: fx.Node) -> bool:
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in operator.tags and not operator._schema.is_mutable


def _is_look_up(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node reads one element of a captured table."""
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    table, indices = node.args
    if not isinstance(table, fx.Node) or table.op != "get_attr":
        return False
    return isinstance(indices, list) and len(indices) == constant_of(graph, table).dim()


def _takes_no_value(node: fx.Node) -> bool:
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name.removeprefix("aten::") in _SHAPE_ONLY


def constant_of(graph: fx.GraphModule, node: fx.Node) -> Tensor:
    """Return the captured tensor that a node of the graph stands for."""
    found: Any = functools.reduce(getattr, str(node.target).split("."), graph)
    return cast(Tensor, found)


def digest_of(graph: fx.GraphModule) -> str:
    """Hash the graph, in a form that is the same in every process, and the values of its constants."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.graph.nodes)}
    found = hashlib.sha256()

    def shown(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return numbers[x]
        # the kind of device only: its number differs from rank to rank
        return x.type if isinstance(x, torch.device) else x

    for node in graph.graph.nodes:
        target = _hash_of(constant_of(graph, node)) if node.op == "get_attr" else str(node.target)
        # how a function calls its arguments is no part of what it does
        target = node.op if node.op == "placeholder" else target
        arguments = fx.node.map_aggregate((node.args, node.kwargs), shown)
        found.update(f"{node.op} {target} {arguments}\n".encode())
    return found.hexdigest()[:16]


def _hash_of(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    # as bytes: numpy has no bfloat16
    data = values.view(torch.uint8) if values.numel() and values.dtype != torch.bool else values
    digest = hashlib.sha256(bytes(data.numpy().tobytes())).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest}"


# The trace of a mask_mod: what it depends on, which tensors it captured, and its values.
#
# Owns what a trace says about a mask function (whether it depends on batch or head, and a digest that ranks
# compare) and its evaluation by vmap, as FlexAttention does it. `mask_mod.py` reads the graph; the pattern is
# in `mask_mod.py`.
#
# [Note: all pairs at once]
# A call through vmap costs a millisecond, and a strided layout can have thousands of small tiles. A graph
# that has only elementwise operators and look-ups of integers gives the same result for broadcast tensors as
# for 0-d tensors under vmap, so such a graph is called directly. (With captured floats type promotion could
# differ.)

_STATE_DEPTH = 4  # how deep nested functions are searched for captured values


class MaskFacts(NamedTuple):
    """What a trace says about a mask function; [Note: the trace of a mask].

    Attributes:
        by_batch, by_head: whether the result depends on the index of the sample, or of the query head.
        contents: digest of the code and of the captured values.
        tensors: the captured tensors, with their version at the trace (None if torch keeps no version).
        elementwise: the graph, if it may be called with all positions at once; [Note: all pairs at once].
    """

    by_batch: bool
    by_head: bool
    contents: str
    tensors: tuple[tuple[Tensor, int | None], ...]
    elementwise: Callable[..., Tensor] | None

    def tensors_changed(self) -> bool:
        """Return whether a captured tensor was written to after the trace."""
        return any(version_of(tensor) != version for tensor, version in self.tensors)


def trace_mask(function: MaskFunction) -> MaskFacts:
    """Trace a mask function twice and compare the two graphs.

    Raises:
        RingPatternError: it raises, returns anything but a 0-d boolean tensor, draws random numbers, writes
            to its arguments or captured tensors, or gives two different graphs.
    """
    # Random numbers of Python and numpy leave no node in the graph, but they change this state.
    before = random.getstate(), repr(np.random.get_state())
    first, second = (graph_of(function) for _ in range(2))
    contents = digest_of(first)
    if contents != digest_of(second):
        raise refusal(function, "a mask that is the same at every call", "two traces that differ")
    if before != (random.getstate(), repr(np.random.get_state())):
        raise refusal(function, "a mask without random numbers", "one that draws them")
    by_batch, by_head = dependence_of(first)
    constants = (constant_of(first, node) for node in first.graph.nodes if node.op == "get_attr")
    # several nodes may read the same captured tensor
    unique = {id(tensor): tensor for tensor in constants}
    versions = tuple((tensor, version_of(tensor)) for tensor in unique.values())
    elementwise = first.forward if is_elementwise(first) else None
    return MaskFacts(by_batch, by_head, contents, versions, elementwise)


def evaluate(
    function: MaskFunction, facts: MaskFacts, samples: int, heads: tuple[int, ...], q: Tensor, k: Tensor
) -> Tensor:
    """Evaluate a mask function for all pairs of two lists of positions.

    Args:
        function, facts: the mask function and its trace.
        samples: batch size.
        heads: indices of the query heads.
        q, k: positions, int64 [n] and [m].

    Returns:
        bool [n, m]; [samples or 1, len(heads) or 1, n, m] if the mask differs by sample or by head.

    Raises:
        RingPatternError: the function raises at these positions, or returns a dtype other than bool.
    """
    # an index that the result does not depend on is a 0-d tensor of 0
    batch = torch.arange(samples, device=q.device) if facts.by_batch else torch.zeros_like(q[0])
    numbers: Any = heads if facts.by_head else 0
    head = torch.tensor(numbers, dtype=torch.int64, device=q.device)
    if facts.elementwise is not None:
        every = batch.view(-1, 1, 1, 1), head.view(-1, 1, 1), q[:, None], k[None]
        shape = batch.numel(), head.numel(), len(q), len(k)
        found = _call(function, facts.elementwise, nullcontext(), *every).expand(shape)
        return found if facts.by_batch or facts.by_head else found[0, 0]
    # The innermost vmap makes the last dimension, so the order is keys, queries, heads, samples.
    asked: Callable[..., Tensor] = torch.vmap(function, in_dims=(None, None, None, 0))
    asked = torch.vmap(asked, in_dims=(None, None, 0, None))
    if facts.by_head:
        asked = torch.vmap(asked, in_dims=(None, 0, None, None))
    if facts.by_batch:
        asked = torch.vmap(asked, in_dims=(0, None, None, None))
    found = _call(function, asked, TransformGetItemToIndex(), batch, head, q, k)
    if facts.by_batch and not facts.by_head:
        return found.unsqueeze(1)
    return found.unsqueeze(0) if facts.by_head and not facts.by_batch else found


def evaluate_pairs(function: MaskFunction, head: int, q: Tensor, k: Tensor) -> Tensor:
    """Evaluate the mask for pairs (q[i], k[i]) of one query head of the first sample; bool [n].

    Raises:
        RingPatternError: see `evaluate`.
    """
    asked = torch.vmap(function, in_dims=(None, None, 0, 0))
    mode = TransformGetItemToIndex()
    return _call(function, asked, mode, torch.zeros_like(q[0]), torch.full_like(q[0], head), q, k)


def version_of(tensor: Tensor) -> int | None:
    """Return the number of writes to a tensor so far; None if torch does not count them."""
    return None if tensor.is_inference() else tensor._version


def captured_values(function: object, depth: int = _STATE_DEPTH) -> Iterator[object]:
    """Yield what a function captured, in a fixed order: numbers, texts, and the id of any other object.

    If two such lists are equal, a second trace would give the same graph, as far as Python lets us look.
    """
    if isinstance(function, functools.partial):
        parts: list[object] = [function.func, *function.args, *function.keywords.values()]
    elif isinstance(function, types.FunctionType):
        cells = (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
        parts = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        parts += _named(function, function.__globals__)
    else:  # a method, or an object with __call__
        owner = getattr(function, "__self__", function)
        code = getattr(function, "__func__", vars(type(function)).get("__call__"))
        parts = [code, *_named(code, getattr(owner, "__dict__", {}))]
    for part in parts:
        yield from _value(part, depth)


def _named(function: object, known: Mapping[str, object]) -> list[object]:
    """Return those objects of `known` whose names occur in the code of a function."""
    names = function.__code__.co_names if isinstance(function, types.FunctionType) else ()
    return [known[name] for name in names if name in known]


def _value(part: object, depth: int) -> Iterator[object]:
    if part is None or isinstance(part, (bool, int, float, str, bytes)):
        yield part
    elif isinstance(part, (list, tuple)) and depth:
        # The length distinguishes nested lists with the same items, such as [[1], [2]] and [[1, 2]].
        yield len(part)
        for one in part:
            yield from _value(one, depth - 1)
    else:
        # A tensor is identified by its id here; its version tells whether its values have changed.
        yield id(part)
        if depth and callable(part) and not isinstance(part, (type, types.BuiltinFunctionType)):
            yield from captured_values(part, depth - 1)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # the cell is empty: the function refers to itself and is still being defined
        return False


def _call(
    function: MaskFunction, asked: Callable[..., Tensor], mode: AbstractContextManager[Any], *args: Tensor
) -> Tensor:
    try:
        with torch.no_grad(), mode:
            found = asked(*args)
    except Exception as error:
        where = f"positions up to {int(args[2].max())} and {int(args[3].max())}"
        raise refusal(function, f"a mask of {where}", first_line(error)) from error
    if found.dtype != torch.bool:
        raise refusal(function, "a tensor of torch.bool", f"{found.dtype}")
    return found


_SAMPLED = 64  # positions at which a mask is tried before the first pass, beside the first and the last


@dataclass(frozen=True)
class MaskMod(Pattern):
    """Attend by a FlexAttention `mask_mod` of global positions; torch's `and_masks`, `or_masks` compose it.

    It is evaluated as FlexAttention does: with 0-d tensors, by vmap over samples, heads, queries and keys.
    One that depends on the head is asked head by head, with the head's number among all query heads of the
    model; one that depends on the batch is asked sample by sample, numbered in this rank's batch.

    The function is a value: ranks compare its code and what it captured, numbers and tensors, before
    anything is sent. Whoever changes what it captured makes a new MaskMod.

    What the function hides inside a block is not known to the plan: every pair counts as work, and every key
    travels, unless another pattern composed with `&` says otherwise (`MaskMod(f) & SlidingWindow(1024)`).

    Attributes:
        function: `mask_mod(batch, head, q_position, k_position) -> bool`, of int64 tensors without
            dimensions.
        is_known_causal: set it if the function never shows a key after its query; with `&` Causal() it
            need not be.

    Raises:
        RingPatternError: no function; at its first use, a function that raises, draws random numbers, writes
            to what it captured, or returns no boolean for a pair.
    """

    function: MaskFunction
    is_known_causal: bool = False
    _tried: set[tuple[int, int, int, str]] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise RingPatternError(
                "MaskMod: expected a mask_mod(batch, head, q_position, k_position), got"
                f" {shown(self.function)}; pass a function"
            )
        true_or_false(self.is_known_causal, "MaskMod: is_known_causal", RingPatternError)
        # plans are cached by pattern, so it has to hash
        try:
            hash(self.function)
        except Exception as error:
            raise RingPatternError(
                f"MaskMod: expected a hashable function, got {name_of(self.function)}, whose hash raises"
                f" {type(error).__name__}; wrap it into a function"
            ) from error

    @cached_property
    def facts(self) -> MaskFacts:
        """Return what a trace says of the function; made when first asked for.

        Raises:
            RingPatternError: it is no mask.
        """
        # the dataclass is frozen; `AskedMask.check` compares with it later
        self.__dict__["_captured"] = list(captured_values(self.function))
        return trace_mask(self.function)

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (Branch(masks=(AskedMask(self, (head.number,)),)),)

    def __str__(self) -> str:
        """Return the function by name, with a digest of its code and of what it captured."""
        try:
            contents = f", contents {self.facts.contents}"
        # the first use refuses the function; a text of it must not
        except RingPatternError:
            contents = ""
        return f"MaskMod({name_of(self.function)}{contents})"


@dataclass(frozen=True)
class AskedMask:
    """Represent a function as a `PairMask`: see `masks/tiles.py`.

    Attributes:
        whole: the pattern.
        heads: numbers of the query heads it is asked for; empty where all are alike.
    """

    whole: MaskMod
    heads: tuple[int, ...] = ()

    @property
    def function(self) -> MaskFunction:
        return self.whole.function

    def __call__(self, samples: int, q: Tensor, k: Tensor) -> Tensor:
        return evaluate(self.whole.function, self.whole.facts, samples, self.heads, q, k)

    @property
    def is_causal(self) -> bool:
        return self.whole.is_known_causal

    def for_heads(self, heads: tuple[int, ...]) -> AskedMask:
        """Ask for other heads; for none in particular where the function does not depend on them."""
        return AskedMask(self.whole, heads if self.whole.facts.by_head else ())

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        """Try the function at some positions, once for each kind of call; see `Pattern.check`."""
        whole, facts, function = self.whole, self.whole.facts, self.whole.function
        if facts.tensors_changed() or whole.__dict__["_captured"] != list(captured_values(function)):
            raise RingPatternError(
                f"MaskMod {name_of(function)}: expected what it captured to stay as it was at its first"
                " use, got other values; make a new MaskMod for a new mask"
            )
        key = (tokens, samples, query_heads, device)
        if key not in whole._tried:
            # spread over the whole sequence, first and last position included
            some = torch.linspace(0, tokens - 1, min(_SAMPLED, tokens), device=device).long()
            evaluate(function, facts, samples, tuple(range(query_heads)), some, some)
            whole._tried.add(key)

    def pairs(self, q: IntArray, k: IntArray) -> IntArray:
        """Return bool of pairs of positions, for the first of the heads.

        Raises:
            RingPatternError: a function that differs from sample to sample.
        """
        function = self.whole.function
        if self.whole.facts.by_batch:
            raise refusal(function, "a mask that is the same for all samples here", "one that is not")
        if not q.size:
            return np.zeros(q.shape, dtype=bool)
        ours, theirs = (torch.from_numpy(x.flatten()) for x in (q, k))  # copies: q and k may be read-only
        found: IntArray = evaluate_pairs(function, self.heads[0], ours, theirs).numpy().reshape(q.shape)
        return found
