"""Read what a mask in a Dynamo graph means from the nodes that compute it.

Owns the reading only: which facts a mask states (causal, a window, packed documents) and from which position
ids. Whether a pattern may stand for it is graph_sharding.py's. Nothing is guessed: a node that is not known
here makes the mask unreadable, with the node's name and line.

Known is what transformers' `masking_utils` and hand-written masks of FlexAttention are made of, comparisons
of query and key positions (or slots), joined by `&`. A padding mask is a fact that no pattern has.

[Note: a mask is read]
The backend compares the facts that it reads with the pattern, and position ids with the layout in every run.
A mask that cannot be read raises, unless the option "masks" is "replace", which says that the pattern means
it. A model that is left to the backend carries an operator that raises when it runs (`needs_backend` in
graph_sharding.py); only the backend takes it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ds_ring.errors import RingPatternError
from ds_ring.integrations.compile.graph_values import (
    KEY,
    QUERY,
    Along,
    Distance,
    Facts,
    Scope,
    name_of,
    resolve,
    where,
)


def read_mask(mask: Node, scope: Scope) -> Facts:
    """Read the facts of a tensor mask, or of the output of a mask_mod."""
    fake = mask.meta.get("example_value")
    if isinstance(fake, torch.Tensor) and fake.dtype != torch.bool:
        raise RingPatternError(f"it is added to the scores ({str(fake.dtype).removeprefix('torch.')})")
    return _as_facts(_read(mask, scope), mask)


def _read(value: Any, scope: Scope) -> Any:
    value, scope = resolve(value, scope)
    if not isinstance(value, Node):
        return value
    name = name_of(value)
    reader = _READERS.get(name)
    if value.op == "placeholder" or reader is None:
        raise _unreadable(value)
    meaning = reader(value, scope)
    if meaning is None:
        raise _unreadable(value)
    return meaning


def _unreadable(node: Node) -> RingPatternError:
    what = (
        "it comes into the graph from outside (an argument of the model, or a graph break after it was made)"
        if node.op in ("placeholder", "get_attr")
        else f"it is made by {name_of(node)}{where(node)}"
    )
    return RingPatternError(f"{what}, which is not known to be causal, a window or documents")


def _as_facts(meaning: Any, node: Node) -> Facts:
    if isinstance(meaning, Facts):
        return meaning
    if isinstance(meaning, Along) and meaning.axis in (QUERY, KEY) and meaning.table[0] != "slots":
        raise RingPatternError(
            "it hides single tokens (padding); padding on the right needs no mask under a causal pattern,"
            " other padding takes documents"
        )
    raise _unreadable(node)


def _same(node: Node, scope: Scope) -> Any:
    """Read through operations that change shape, device or type, and no value that counts."""
    return _read(node.args[0], scope)


def _everything(node: Node, scope: Scope) -> Facts:
    return Facts()


def _lower_triangle(node: Node, scope: Scope) -> Facts | None:
    diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
    return _as_facts(_read(node.args[0], scope), node) & Facts(causal=True) if diagonal == 0 else None


def _and(node: Node, scope: Scope) -> Facts:
    left, right = (_as_facts(_read(arg, scope), node) for arg in node.args)
    return left & right


def _lookup(node: Node, scope: Scope) -> Along | None:
    """Read `arange[None, None, :, None]`, or a table at [batch, slot]."""
    base, index = node.args
    if not isinstance(index, tuple):
        return None
    if len(index) == 4 and all(one is None or one == slice(None) for one in index):
        axes = [axis for axis, one in enumerate(index) if one is not None]
        return Along(axes[0]) if len(axes) == 1 and _is_arange(base, scope) else None
    if len(index) != 2 or not all(isinstance(one, Node) for one in index):
        return None
    row, slot = (_read(one, scope) for one in index)
    if not (isinstance(row, Along) and isinstance(slot, Along) and row == Along(0)):
        return None
    return slot._replace(table=_table(base, scope)) if slot == Along(slot.axis) else None


def _is_arange(node: Any, scope: Scope) -> bool:
    """Return whether a node is 0, 1, 2, ... for each slot."""
    node, scope = resolve(node, scope)
    if not isinstance(node, Node):
        return False
    name = name_of(node)
    if name == "add" and isinstance(node.args[1], int) and node.args[1] == 0:
        return _is_arange(node.args[0], scope)
    numbers = list(node.args)
    starts_at_0 = len(numbers) == 1 or (len(numbers) == 2 and numbers[0] in (0,))
    return name == "arange" and starts_at_0


def _table(base: Any, scope: Scope) -> tuple[str, Node | None]:
    """Return whether a table of [B, S] holds positions or the documents that are counted off them."""
    node = _plain(base, scope)
    if not isinstance(node, Node):
        return "values", None
    if name_of(node) == "cumsum":
        positions = _positions_of_documents(node, scope)
        return ("documents", positions) if positions is not None else ("values", node)
    fake = node.meta.get("example_value")
    if isinstance(fake, torch.Tensor) and fake.dtype in (torch.int64, torch.int32):
        return "positions", node
    return "values", node


def _plain(value: Any, scope: Scope) -> Any:
    """Return the tensor behind expands and conversions to where it already is."""
    value, scope = resolve(value, scope)
    while isinstance(value, Node) and name_of(value) in ("expand", "contiguous", "clone"):
        value, scope = resolve(value.args[0], scope)
    return value


def _positions_of_documents(node: Node, scope: Scope) -> Node | None:
    """Return p of `(diff(p, prepend=p[:, :1] - 1) != 1).cumsum(-1)`, which rises where p does not go on."""
    breaks = _plain(node.args[0], scope)
    if not (isinstance(breaks, Node) and name_of(breaks) == "ne" and breaks.args[1] == 1):
        return None
    steps = _plain(breaks.args[0], scope)
    if not (isinstance(steps, Node) and name_of(steps) == "diff"):
        return None
    positions = _plain(steps.args[0], scope)
    if not isinstance(positions, Node) or not _is_one_before(steps.kwargs.get("prepend"), positions, scope):
        return None
    return positions


def _is_one_before(node: Any, positions: Node, scope: Scope) -> bool:
    """Return whether a node is `positions[:, :1] - 1`, so that the first slot never breaks."""
    node = _plain(node, scope)
    if not (isinstance(node, Node) and name_of(node) == "sub" and node.args[1] == 1):
        return False
    first = _plain(node.args[0], scope)
    if not (isinstance(first, Node) and name_of(first) == "getitem"):
        return False
    begins: bool = first.args[1] == (slice(None), slice(None, 1))
    whole: object = _plain(first.args[0], scope)
    return begins and whole is positions


def _minus(node: Node, scope: Scope) -> Along | Distance | None:
    left, right = (_read(arg, scope) for arg in node.args)
    if isinstance(left, Along) and isinstance(right, int):
        return left._replace(minus=left.minus + right)
    both = isinstance(left, Along) and isinstance(right, Along)
    if both and (left.axis, right.axis) == (QUERY, KEY) and left.table == right.table:
        return Distance(left.table) if left.minus == right.minus == 0 else None
    return None


def _plus(node: Node, scope: Scope) -> Along | None:
    left, right = (_read(arg, scope) for arg in node.args)
    return (
        left._replace(minus=left.minus - right)
        if isinstance(left, Along) and isinstance(right, int)
        else None
    )


def _equal(node: Node, scope: Scope) -> Facts | None:
    left, right = (_read(arg, scope) for arg in node.args)
    if not (isinstance(left, Along) and isinstance(right, Along)) or left.table != right.table:
        return None
    if {left.axis, right.axis} != {QUERY, KEY} or left.table[0] != "documents":
        return None
    return Facts(documents=True, positions=left.table[1])


def _compare(least: int) -> Callable[[Node, Scope], Facts | None]:
    """Return a reader of `left - right >= least`, for `>` (1) and `>=` (0)."""

    def read(node: Node, scope: Scope) -> Facts | None:
        left, right = (_read(arg, scope) for arg in node.args)
        return _at_least(left, right, least)

    return read


def _compare_reversed(least: int) -> Callable[[Node, Scope], Facts | None]:
    def read(node: Node, scope: Scope) -> Facts | None:
        left, right = (_read(arg, scope) for arg in node.args)
        return _at_least(right, left, least)

    return read


def _at_least(greater: Any, smaller: Any, least: int) -> Facts | None:
    """Read `greater - smaller >= least` as a bound of query minus key: causal from below, a window from
    above.
    """
    if isinstance(greater, Distance) and isinstance(smaller, int):
        return _from_below(smaller + least, greater.table)
    if isinstance(smaller, Distance) and isinstance(greater, int):
        return _from_above(greater - least, smaller.table)
    if not (isinstance(greater, Along) and isinstance(smaller, Along)) or greater.table != smaller.table:
        return None
    bound = least + greater.minus - smaller.minus
    if (greater.axis, smaller.axis) == (QUERY, KEY):
        return _from_below(bound, greater.table)
    if (greater.axis, smaller.axis) == (KEY, QUERY):
        return _from_above(-bound, greater.table)
    return None


def _from_below(bound: int, table: tuple[str, Node | None]) -> Facts | None:
    known = bound == 0 and table[0] in ("slots", "positions")
    return Facts(causal=True, positions=table[1]) if known else None


def _from_above(bound: int, table: tuple[str, Node | None]) -> Facts | None:
    known = bound >= 0 and table[0] in ("slots", "positions")
    return Facts(window=bound + 1, positions=table[1]) if known else None


_READERS: dict[str, Callable[[Node, Scope], Any]] = {
    **dict.fromkeys(("to", "expand", "contiguous", "clone", "bool"), _same),
    **dict.fromkeys(("and_", "and", "logical_and", "__and__", "bitwise_and"), _and),
    **dict.fromkeys(("new_ones", "ones"), _everything),
    "tril": _lower_triangle,
    "getitem": _lookup,
    "sub": _minus,
    "add": _plus,
    "eq": _equal,
    "gt": _compare(1),
    "ge": _compare(0),
    "lt": _compare_reversed(1),
    "le": _compare_reversed(0),
}
