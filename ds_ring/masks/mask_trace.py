"""A mask_mod looked at once: what it depends on, what it captured, and its values, as FlexAttention has them.

Owns what a trace says of a mask function (does it depend on batch or head, a digest that ranks compare) and
its evaluation through vmap. The graph is read in `mask_graph.py`; the pattern is in `mask_mod.py`.

[Note: all pairs at once]
vmap costs a millisecond a call, and a strided layout can have thousands of small tiles. A graph of nothing
but elementwise operators and look-ups of integers gives the same for tensors that broadcast as for 0-d ones
one by one, so it is called as it is. (With captured floats, type promotion could differ.)
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from ds_ring.masks.mask_graph import (
    constant_of,
    dependence_of,
    digest_of,
    first_line,
    graph_of,
    is_elementwise,
    refusal,
)
from ds_ring.masks.pair_mask import MaskFunction

_STATE_DEPTH = 4  # functions within functions whose captured values are looked at


class MaskFacts(NamedTuple):
    """Hold what a trace says of a mask function; [Note: the trace of a mask].

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
        """Return whether a captured tensor was written to since the trace."""
        return any(version_of(tensor) != version for tensor, version in self.tensors)


def trace_mask(function: MaskFunction) -> MaskFacts:
    """Trace a mask function, twice.

    Raises:
        RingPatternError: it raises, returns no boolean tensor without dimensions, draws random numbers,
            writes to what it was given or has captured, or is not the same function every time.
    """
    # random numbers of Python and numpy leave no node in the graph, but change this state
    before = random.getstate(), repr(np.random.get_state())
    first, second = (graph_of(function) for _ in range(2))
    contents = digest_of(first)
    if contents != digest_of(second):
        raise refusal(function, "a mask that is the same at every call", "two traces that differ")
    if before != (random.getstate(), repr(np.random.get_state())):
        raise refusal(function, "a mask without random numbers", "one that draws them")
    by_batch, by_head = dependence_of(first)
    constants = (constant_of(first, node) for node in first.graph.nodes if node.op == "get_attr")
    # a captured tensor may stand in several nodes
    unique = {id(tensor): tensor for tensor in constants}
    versions = tuple((tensor, version_of(tensor)) for tensor in unique.values())
    elementwise = first.forward if is_elementwise(first) else None
    return MaskFacts(by_batch, by_head, contents, versions, elementwise)


def evaluate(
    function: MaskFunction, facts: MaskFacts, samples: int, heads: tuple[int, ...], q: Tensor, k: Tensor
) -> Tensor:
    """Evaluate the mask of lists of positions, through vmap.

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
    # 0, without a dimension, for a number that the result does not depend on
    batch = torch.arange(samples, device=q.device) if facts.by_batch else torch.zeros_like(q[0])
    numbers: Any = heads if facts.by_head else 0
    head = torch.tensor(numbers, dtype=torch.int64, device=q.device)
    if facts.elementwise is not None:
        every = batch.view(-1, 1, 1, 1), head.view(-1, 1, 1), q[:, None], k[None]
        shape = batch.numel(), head.numel(), len(q), len(k)
        found = _call(function, facts.elementwise, nullcontext(), *every).expand(shape)
        return found if facts.by_batch or facts.by_head else found[0, 0]
    # the innermost vmap makes the last dimension: keys, then queries, heads, samples
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
    """Evaluate the mask of pairs (q[i], k[i]) of positions for one query head of the first sample; bool [n].

    Raises:
        RingPatternError: as `evaluate`.
    """
    asked = torch.vmap(function, in_dims=(None, None, 0, 0))
    mode = TransformGetItemToIndex()
    return _call(function, asked, mode, torch.zeros_like(q[0]), torch.full_like(q[0], head), q, k)


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def captured_values(function: object, depth: int = _STATE_DEPTH) -> Iterator[object]:
    """Yield the numbers, texts and identities of other objects that a function captured, in a fixed order.

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
    """Return those of the known things that the code of a function names."""
    names = function.__code__.co_names if isinstance(function, types.FunctionType) else ()
    return [known[name] for name in names if name in known]


def _value(part: object, depth: int) -> Iterator[object]:
    if part is None or isinstance(part, (bool, int, float, str, bytes)):
        yield part
    elif isinstance(part, (list, tuple)) and depth:
        # the length tells lists of lists apart that have the same items
        yield len(part)
        for one in part:
            yield from _value(one, depth - 1)
    else:
        # a tensor is told by its identity here; that its values changed, by its version
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
        raise refusal(function, f"a mask of {where}", first_line(error)) from error
    if found.dtype != torch.bool:
        raise refusal(function, "a tensor of torch.bool", f"{found.dtype}")
    return found
