"""The graph of a mask function: what can be read off it. Owns its refusals, and knows no pattern.

[Note: the trace of a mask]
The function is traced with 0-d tensors, as FlexAttention does. In the graph it can be read off exactly
whether batch or head reach the result (and_masks calls `batch.new_ones`, which takes no value from it), and
which tensors were captured. The graph in a canonical form, with a hash of those tensors, is the digest: equal
on two ranks only if the functions are the same one. A second trace has to be equal: a counter would show.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from ds_ring.errors import RingPatternError
from ds_ring.masks.pair_mask import MaskFunction

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
