"""A mask_mod looked at once: what it depends on, what it captured, and its values, as FlexAttention has them.

Owns the trace of a mask function (which of batch and head it goes by, randomness, side effects, a digest of
code and captured values that ranks compare) and its evaluation through vmap. The pattern is `mask_mod.py`'s.

[Note: the trace of a mask]
The function is traced with 0-d tensors, as FlexAttention does. In the graph it can be read off exactly
whether batch or head reach the result (and_masks calls `batch.new_ones`, which takes no value from it), and
which tensors were captured. The graph in a canonical form, with a hash of those tensors, is the digest: equal
on two ranks only if the functions are the same one. A second trace has to be equal: a counter would show.

[Note: all pairs at once]
vmap costs a millisecond a call, and a strided layout can have thousands of small tiles. A graph of nothing
but elementwise operators and look-ups of integers gives the same for tensors that broadcast as for 0-d ones
one by one, so it is called as it is. (With captured floats, type promotion could differ.)
"""

from __future__ import annotations

import functools
import hashlib
import random
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from ds_ring.errors import RingPatternError
from ds_ring.masks.pair_mask import MaskFunction

# Operators that take shape and dtype of their first argument, but none of its values.
_SHAPE_ONLY = ("new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like")
_STATE_DEPTH = 4  # functions within functions whose captured values are looked at


class MaskFacts(NamedTuple):
    """What a trace says of a mask function; [Note: the trace of a mask].

    Attributes:
        by_batch, by_head: whether the result depends on the number of the sample, or of the query head.
        contents: digest of code and captured values.
        tensors: those captured, with their version at the trace (None where torch keeps none).
        elementwise: the graph, if it may be called with all positions at once; [Note: all pairs at once].
    """

    by_batch: bool
    by_head: bool
    contents: str
    tensors: tuple[tuple[Tensor, int | None], ...]
    elementwise: Callable[..., Tensor] | None

    def tensors_changed(self) -> bool:
        """True if a captured tensor was written to since the trace."""
        return any(version_of(tensor) != version for tensor, version in self.tensors)


def trace_mask(function: MaskFunction) -> MaskFacts:
    """Trace a mask function, twice.

    Raises:
        RingPatternError: it raises, returns no boolean tensor without dimensions, draws random numbers,
            writes to what it was given or has captured, or is not the same function every time.
    """
    before = random.getstate(), repr(np.random.get_state())
    first, second = (_graph_of(function) for _ in range(2))
    contents = _digest(first)
    if contents != _digest(second):
        raise refusal(function, "a mask that is the same at every call", "two traces that differ")
    if before != (random.getstate(), repr(np.random.get_state())):
        raise refusal(function, "a mask without random numbers", "one that draws them")
    by_batch, by_head = _dependence(first)
    constants = (_constant(first, node) for node in first.graph.nodes if node.op == "get_attr")
    unique = {id(tensor): tensor for tensor in constants}
    versions = tuple((tensor, version_of(tensor)) for tensor in unique.values())
    elementwise = first.forward if _is_elementwise(first) else None
    return MaskFacts(by_batch, by_head, contents, versions, elementwise)


def evaluate(
    function: MaskFunction, facts: MaskFacts, samples: int, heads: tuple[int, ...], q: Tensor, k: Tensor
) -> Tensor:
    """The mask of lists of positions, through vmap.

    Args:
        function, facts: the mask, and its trace.
        samples: size of the batch.
        heads: numbers of the query heads asked for.
        q, k: int64 [n] and [m], positions.

    Returns:
        bool [n, m]; [samples or 1, len(heads) or 1, n, m] where it differs by sample or by head.

    Raises:
        RingPatternError: the function raises at these positions, or returns no bool.
    """
    batch = torch.arange(samples, device=q.device) if facts.by_batch else torch.zeros_like(q[0])
    numbers: Any = heads if facts.by_head else 0
    head = torch.tensor(numbers, dtype=torch.int64, device=q.device)
    if facts.elementwise is not None:
        every = batch.view(-1, 1, 1, 1), head.view(-1, 1, 1), q[:, None], k[None]
        shape = batch.numel(), head.numel(), len(q), len(k)
        found = _call(function, facts.elementwise, nullcontext(), *every).expand(shape)
        return found if facts.by_batch or facts.by_head else found[0, 0]
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
    """The mask of pairs (q[i], k[i]) of positions for one query head of the first sample; bool [n].

    Raises:
        RingPatternError: as `evaluate`.
    """
    asked = torch.vmap(function, in_dims=(None, None, 0, 0))
    mode = TransformGetItemToIndex()
    return _call(function, asked, mode, torch.zeros_like(q[0]), torch.full_like(q[0], head), q, k)


def refusal(function: MaskFunction, expected: str, got: str) -> RingPatternError:
    """The error for a function that is no mask."""
    return RingPatternError(
        f"MaskMod {name_of(function)}: expected {expected}, got {got}; write it like FlexAttention's"
        " mask_mod, with 0-d tensors of global positions: torch operators only, one boolean for each pair"
    )


def name_of(function: MaskFunction) -> str:
    """Module and qualified name of a function, of the class of any other callable."""
    if isinstance(function, functools.partial):
        return f"partial of {name_of(function.func)}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def captured_values(function: object, depth: int = _STATE_DEPTH) -> Iterator[object]:
    """The numbers, texts and identities of other objects that a function captured, in a fixed order.

    Two equal lists mean that a trace of the function would be the same, as far as Python can be looked into.
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
    """Those of the known things that the code of a function names."""
    names = function.__code__.co_names if isinstance(function, types.FunctionType) else ()
    return [known[name] for name in names if name in known]


def _value(part: object, depth: int) -> Iterator[object]:
    if part is None or isinstance(part, (bool, int, float, str, bytes)):
        yield part
    elif isinstance(part, (list, tuple)) and depth:
        yield len(part)
        for one in part:
            yield from _value(one, depth - 1)
    else:
        yield id(part)
        if depth and callable(part) and not isinstance(part, (type, types.BuiltinFunctionType)):
            yield from captured_values(part, depth - 1)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a function that refers to itself and is not finished
        return False


def _call(
    function: MaskFunction, asked: Callable[..., Tensor], mode: AbstractContextManager[Any], *args: Tensor
) -> Tensor:
    try:
        with torch.no_grad(), mode:
            found = asked(*args)
    except Exception as error:
        where = f"positions up to {int(args[2].max())} and {int(args[3].max())}"
        raise refusal(function, f"a mask of {where}", _of(error)) from error
    if found.dtype != torch.bool:
        raise refusal(function, "a tensor of torch.bool", f"{found.dtype}")
    return found


def _of(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:100] if text else ''}"


def _graph_of(function: MaskFunction) -> fx.GraphModule:
    arguments = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
    results = []

    def kept(*args: Tensor) -> Any:
        results.append(function(*args))
        return results[-1]

    try:
        with torch.no_grad(), TransformGetItemToIndex():
            graph = make_fx(kept, tracing_mode="real")(*arguments)
    except Exception as error:
        raise refusal(function, "a mask_mod(batch, head, q_position, k_position)", _of(error)) from error
    (result,) = results
    if not isinstance(result, Tensor):
        raise refusal(function, "a boolean tensor without dimensions", f"{type(result).__name__}")
    if result.dtype != torch.bool or result.dim():
        got = f"{result.dtype} of shape {tuple(result.shape)}"
        raise refusal(function, "a boolean tensor without dimensions", got)
    if any(
        node.op == "get_attr" and not isinstance(_constant(graph, node), Tensor) for node in graph.graph.nodes
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
        if any(_origin(value).op != "call_function" for value in written if isinstance(value, fx.Node)):
            raise refusal(function, "a mask that writes to no tensor but its own", f"a call of {node.target}")


def _origin(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        arguments = zip(node.args, node.target._schema.arguments, strict=False)
        viewed = [v for v, a in arguments if a.alias_info is not None and isinstance(v, fx.Node)]
        if not viewed:
            break
        node = viewed[0]
    return node


def _dependence(graph: fx.GraphModule) -> tuple[bool, bool]:
    """Whether values of batch and of head reach the result."""
    nodes = list(graph.graph.nodes)
    batch, head = nodes[:2]
    writes = any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in nodes)
    reached, left = set(), nodes if writes else [nodes[-1]]
    while left:
        node = left.pop()
        if node not in reached:
            reached.add(node)
            left += [] if _takes_no_value(node) else node.all_input_nodes
    asked = {used for node in reached if not _takes_no_value(node) for used in node.all_input_nodes}
    return batch in asked, head in asked


def _is_elementwise(graph: fx.GraphModule) -> bool:
    """[Note: all pairs at once]."""
    nodes = graph.graph.nodes
    constants = [_constant(graph, node) for node in nodes if node.op == "get_attr"]
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
    """True for one element of a captured table."""
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    table, indices = node.args
    if not isinstance(table, fx.Node) or table.op != "get_attr":
        return False
    return isinstance(indices, list) and len(indices) == _constant(graph, table).dim()


def _takes_no_value(node: fx.Node) -> bool:
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name.removeprefix("aten::") in _SHAPE_ONLY


def _constant(graph: fx.GraphModule, node: fx.Node) -> Tensor:
    found: Any = functools.reduce(getattr, str(node.target).split("."), graph)
    return cast(Tensor, found)


def _digest(graph: fx.GraphModule) -> str:
    """Of the graph in a form that is the same in every process, and of the values of its constants."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.graph.nodes)}
    found = hashlib.sha256()

    def shown(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return numbers[x]
        return x.type if isinstance(x, torch.device) else x

    for node in graph.graph.nodes:
        target = _hash_of(_constant(graph, node)) if node.op == "get_attr" else str(node.target)
        target = node.op if node.op == "placeholder" else target
        arguments = fx.node.map_aggregate((node.args, node.kwargs), shown)
        found.update(f"{node.op} {target} {arguments}\n".encode())
    return found.hexdigest()[:16]


def _hash_of(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    data = values.view(torch.uint8) if values.numel() and values.dtype != torch.bool else values
    digest = hashlib.sha256(bytes(data.numpy().tobytes())).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest}"
