"""The trace of a mask_mod: what it depends on, which tensors it captured, and its values.

Owns what a trace says about a mask function (whether it depends on batch or head, and a digest that ranks
compare) and its evaluation by vmap, as FlexAttention does it. `mask_graph.py` reads the graph; the pattern is
in `mask_mod.py`.

[Note: all pairs at once]
A call through vmap costs a millisecond, and a strided layout can have thousands of small tiles. A graph that
has only elementwise operators and look-ups of integers gives the same result for broadcast tensors as for 0-d
tensors under vmap, so such a graph is called directly. (With captured floats type promotion could differ.)
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
