"""Read what a mask in a Dynamo graph means from the nodes that compute it.

Known is what transformers' `masking_utils` and hand-written masks of FlexAttention are made of: comparisons
of query and key positions (or slots), joined by `&`. Nothing is guessed: a node that is not known here makes
the mask unreadable, with the node's name and line. Whether a pattern may stand for the mask is decided in
graph_sharding.py.

[Note: a mask is read]
The backend compares the facts that it reads with the pattern, and position ids with the layout in every run.
A mask that cannot be read raises, unless the option "masks" is "replace", which says that the pattern means
it. To run the mask's subgraph (`fx.Interpreter`) would not do: it gives the mask of one rank's S slots in
O(S^2) memory, and does not tell a window that is wider than the shard, or documents, from no restriction.
A model that is left to the backend carries an operator that raises when it runs (`needs_backend` in
graph_sharding.py); only the backend takes it out.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ds_ring.errors import RingPatternError

QUERY, KEY = 2, 3  # axes of a mask [B, H, S, S]


class TableColumn(NamedTuple):
    """A number for every slot along one axis: the slot itself, or what a table holds for it."""

    axis: int  # 0 batch, 1 head, 2 query, 3 key
    # what is looked up: ("slots", None), ("positions", node), ("documents", node of positions) or
    # ("values", node)
    table: tuple[str, Node | None] = ("slots", None)
    minus: int = 0  # what is subtracted


class QueryMinusKey(NamedTuple):
    """The query's number minus the key's."""

    table: tuple[str, Node | None]


class MaskMeaning(NamedTuple):
    """What a mask says; all of it holds."""

    causal: bool = False  # no later key is seen
    window: int | None = None  # tokens that are seen, itself included; only beside `causal`
    documents: bool = False  # only keys of the same document (consecutive positions) are seen
    positions: Node | None = None  # the node of the position ids; None for a mask over slots alone

    def __and__(self, other: MaskMeaning) -> MaskMeaning:
        if None not in (self.positions, other.positions) and self.positions is not other.positions:
            raise RingPatternError("it is computed from two different tensors of positions")
        windows = [one for one in (self.window, other.window) if one is not None]
        return MaskMeaning(
            self.causal or other.causal,
            min(windows, default=None),
            self.documents or other.documents,
            self.positions if self.positions is not None else other.positions,
        )


@dataclass
class Scope:
    """A graph, and what its placeholders are in the graph that calls it."""

    module: GraphModule
    outer: Scope | None = None  # the scope of the call; None for the whole graph
    # the outer node, or the meaning itself, for each placeholder
    given: dict[Node, Any] = field(default_factory=dict)

    @property
    def root(self) -> Scope:
        """The whole graph."""
        return self if self.outer is None else self.outer.root


def resolve(value: Any, scope: Scope) -> tuple[Any, Scope]:
    """Return a node where it is computed: a placeholder of an inner graph is what it is called with."""
    while isinstance(value, Node) and value.op == "placeholder" and scope.outer is not None:
        value, scope = scope.given.get(value), scope.outer
    return value, scope


def name_of(node: Node) -> str:
    """Return the bare name of what a node calls: `and_`, `cumsum`, `scaled_dot_product_attention`."""
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
    return str(node.target) if node.op == "call_method" else node.op


def argument(node: Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def where(node: Node) -> str:
    """Return the user's line that a node comes from, in words; empty if nobody knows."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    return f", at {lines[-2]}: {lines[-1]}" if len(lines) > 1 else ""


def read_mask(mask: Node, scope: Scope) -> MaskMeaning:
    """Read the facts of a tensor mask, or of the output of a mask_mod."""
    fake = mask.meta.get("example_value")
    if isinstance(fake, torch.Tensor) and fake.dtype != torch.bool:
        raise RingPatternError(f"it is added to the scores ({str(fake.dtype).removeprefix('torch.')})")
    return _as_facts(_read(mask, scope), mask)


_SAME_MASK = ("to", "expand", "contiguous", "clone", "bool")  # change the shape, device or type alone
_AND = ("and_", "and", "logical_and", "__and__", "bitwise_and")
# `left - right >= least` or, reversed, `right - left >= least`
_COMPARISONS = {"gt": (1, False), "ge": (0, False), "lt": (1, True), "le": (0, True)}


def _read(value: Any, scope: Scope) -> Any:
    """Return what a value in the graph means: TableColumn, QueryMinusKey, MaskMeaning or a number."""
    value, scope = resolve(value, scope)
    if not isinstance(value, Node):
        return value
    name, meaning = name_of(value), None
    if value.op == "placeholder":
        pass
    elif name in _SAME_MASK:
        meaning = _read(value.args[0], scope)
    elif name in ("new_ones", "ones"):
        meaning = MaskMeaning()
    elif name == "tril":
        if argument(value, 1, "diagonal") in (0, None):
            meaning = _as_facts(_read(value.args[0], scope), value) & MaskMeaning(causal=True)
    elif name == "getitem":
        meaning = _lookup(value, scope)
    elif name in (*_AND, "sub", "add", "eq", *_COMPARISONS):
        left, right = (_read(arg, scope) for arg in value.args)
        if name in _AND:
            meaning = _as_facts(left, value) & _as_facts(right, value)
        elif name in _COMPARISONS:
            least, is_reversed = _COMPARISONS[name]
            meaning = _at_least(right, left, least) if is_reversed else _at_least(left, right, least)
        else:
            meaning = _combined(name, left, right)
    if meaning is None:
        what = f"it is made by {name}{where(value)}"
        if value.op in ("placeholder", "get_attr"):
            what = "it comes into the graph from outside (an argument of the model, or a graph break after it"
            what += " was made)"
        raise RingPatternError(f"{what}, which is not known to be causal, a window or documents")
    return meaning


def _as_facts(meaning: Any, node: Node) -> MaskMeaning:
    if isinstance(meaning, MaskMeaning):
        return meaning
    if isinstance(meaning, TableColumn) and meaning.axis in (QUERY, KEY) and meaning.table[0] != "slots":
        raise RingPatternError(
            "it hides single tokens (padding); padding on the right needs no mask under a causal pattern,"
            " other padding takes documents"
        )
    raise RingPatternError(
        f"it is made by {name_of(node)}{where(node)}, which is not known to be causal, a window or documents"
    )


def _combined(name: str, left: Any, right: Any) -> TableColumn | QueryMinusKey | MaskMeaning | None:
    """Read `left - right`, `left + right` and `left == right`."""
    if not isinstance(left, TableColumn):
        return None
    if name != "eq" and isinstance(right, int):
        return left._replace(minus=left.minus + (right if name == "sub" else -right))
    if not isinstance(right, TableColumn) or left.table != right.table:
        return None
    if name == "sub" and (left.axis, right.axis) == (QUERY, KEY) and left.minus == right.minus == 0:
        return QueryMinusKey(left.table)
    if name == "eq" and {left.axis, right.axis} == {QUERY, KEY} and left.table[0] == "documents":
        return MaskMeaning(documents=True, positions=left.table[1])
    return None


def _at_least(greater: Any, smaller: Any, least: int) -> MaskMeaning | None:
    """Read `greater - smaller >= least`: a lower bound of query - key is causal, an upper one a window."""
    if isinstance(greater, QueryMinusKey) and isinstance(smaller, int):
        least, table = least + smaller, greater.table
        greater, smaller = TableColumn(QUERY, table), TableColumn(KEY, table)
    elif isinstance(smaller, QueryMinusKey) and isinstance(greater, int):
        least, table = least - greater, smaller.table
        greater, smaller = TableColumn(KEY, table), TableColumn(QUERY, table)
    if not (isinstance(greater, TableColumn) and isinstance(smaller, TableColumn)):
        return None
    if greater.table != smaller.table or greater.table[0] not in ("slots", "positions"):
        return None
    bound, positions = least + greater.minus - smaller.minus, greater.table[1]
    if (greater.axis, smaller.axis) == (QUERY, KEY) and bound == 0:
        return MaskMeaning(causal=True, positions=positions)
    if (greater.axis, smaller.axis) == (KEY, QUERY) and bound <= 0:
        return MaskMeaning(window=1 - bound, positions=positions)
    return None


def _lookup(node: Node, scope: Scope) -> TableColumn | None:
    """Read `arange[None, None, :, None]`, or a table at [batch, slot]."""
    base, index = node.args
    if not isinstance(index, tuple):
        return None
    if len(index) == 4 and all(one is None or one == slice(None) for one in index):
        axes = [axis for axis, one in enumerate(index) if one is not None]
        return TableColumn(axes[0]) if len(axes) == 1 and _is_arange(base, scope) else None
    if len(index) != 2 or not all(isinstance(one, Node) for one in index):
        return None
    row, slot = (_read(one, scope) for one in index)
    if row != TableColumn(0) or not isinstance(slot, TableColumn) or slot != TableColumn(slot.axis):
        return None
    return slot._replace(table=_table(base, scope))


def _is_arange(node: Any, scope: Scope) -> bool:
    """Return whether a node is 0, 1, 2, ... for each slot."""
    node, scope = resolve(node, scope)
    if not isinstance(node, Node):
        return False
    if name_of(node) == "add" and node.args[1] == 0:
        return _is_arange(node.args[0], scope)
    return name_of(node) == "arange" and (len(node.args) == 1 or node.args[:-1] == (0,))


def _table(base: Any, scope: Scope) -> tuple[str, Node | None]:
    """Return whether a table of [B, S] holds positions or the documents that are counted off them."""
    node = _plain(base, scope)
    if not isinstance(node, Node):
        return "values", None
    if name_of(node) == "cumsum":
        positions = _positions_of_documents(node, scope)
        return ("documents", positions) if positions is not None else ("values", node)
    fake = node.meta.get("example_value")
    is_positions = isinstance(fake, torch.Tensor) and fake.dtype in (torch.int64, torch.int32)
    return ("positions" if is_positions else "values"), node


def _plain(value: Any, scope: Scope) -> Any:
    """Return the tensor behind expands and conversions to where it already is."""
    value, scope = resolve(value, scope)
    while isinstance(value, Node) and name_of(value) in ("expand", "contiguous", "clone"):
        value, scope = resolve(value.args[0], scope)
    return value


def _positions_of_documents(node: Node, scope: Scope) -> Node | None:
    """Return p of `(diff(p, prepend=p[:, :1] - 1) != 1).cumsum(-1)`, which rises where p does not go on."""
    breaks = _call(node.args[0], scope, "ne", 1)
    steps = breaks and _call(breaks.args[0], scope, "diff")
    before = steps and _call(steps.kwargs.get("prepend"), scope, "sub", 1)
    # So the first slot never breaks.
    first = before and _call(before.args[0], scope, "getitem", (slice(None), slice(None, 1)))
    if steps is None or first is None:
        return None
    positions: Any = _plain(steps.args[0], scope)
    return positions if isinstance(positions, Node) and _plain(first.args[0], scope) is positions else None


def _call(value: Any, scope: Scope, name: str, second: object = None) -> Node | None:
    """Return the node of a value that is a call of this name, with this second argument, if it is that."""
    node = _plain(value, scope)
    if not isinstance(node, Node) or name_of(node) != name:
        return None
    return node if second is None or node.args[1] == second else None


# Which values a float mask can have. A mask of zeros and of large negative numbers hides tokens, so a pattern
# may stand for it. Any other number added to the scores (ALiBi, a learned bias) is mathematics that ring
# attention does not compute: to replace it would train another model without a word.

_HIDDEN = -1e4  # at most: no softmax in any precision sees such a token; the least of float16 is -65504
_MOST_VALUES = 8


def refuse_bias(mask: Node, scope: Scope) -> None:
    """Raise RingPatternError for a mask that may add anything but 0 and a large negative number to scores."""
    fake = mask.meta.get("example_value")
    if not isinstance(fake, torch.Tensor) or fake.dtype == torch.bool:
        return
    others = sorted(value for value in _values(mask, scope) if value != 0 and not value <= _HIDDEN)
    if others:
        raise _may_be_a_bias(f"with {others[0]:g} among its values")


def _may_be_a_bias(how: str) -> RingPatternError:
    return RingPatternError(
        f"its mask is added to the scores, {how}: a pattern stands for what hides tokens, and a bias"
        " (ALiBi, a learned one) would be lost. Take a bias out of the model; if the mask only hides tokens,"
        " make it of booleans (mask == 0), or of 0 and -inf where the graph sees it"
    )


_SAME_VALUES = (
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "clone", "contiguous", "detach", "expand",
    "expand_as", "broadcast_to", "repeat", "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute",
    "getitem", "narrow", "flatten", "tensor", "scalar_tensor",
)  # fmt: skip
_CONSTANTS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "zero_": 0.0}
_CONSTANTS |= {"ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
# The arguments whose values the result has, by place and name.
_CHOICES: dict[str, tuple[tuple[int, str], ...]] = {
    **dict.fromkeys(_SAME_VALUES, ((0, "input"),)),
    **dict.fromkeys(("triu", "tril", "triu_", "tril_"), ((0, "input"),)),
    **dict.fromkeys(("full", "full_like"), ((1, "fill_value"),)),
    "new_full": ((2, "fill_value"),),
    "where": ((1, "input"), (2, "other")),
    **dict.fromkeys(("masked_fill", "masked_fill_"), ((0, "input"), (2, "value"))),
}
_ARITHMETIC = {
    **dict.fromkeys(("mul", "imul", "mul_"), operator.mul),
    **dict.fromkeys(("add", "iadd", "add_"), operator.add),
    **dict.fromkeys(("sub", "isub", "sub_"), operator.sub),
    "rsub": lambda a, b: b - a,
}


def _values(value: Any, scope: Scope) -> frozenset[float]:
    """Return every number that may stand in a tensor."""
    value, scope = resolve(value, scope)
    if isinstance(value, (bool, int, float)):
        return frozenset({float(value)})
    if not isinstance(value, Node):
        raise _may_be_a_bias(f"made of {type(value).__name__}")
    fake = value.meta.get("example_value")
    if isinstance(fake, torch.Tensor) and fake.dtype == torch.bool:
        return frozenset({0.0, 1.0})
    name = name_of(value)
    if value.op in ("placeholder", "get_attr"):
        raise _may_be_a_bias("and comes into the graph from outside, where its values cannot be read")
    if name in _CONSTANTS:
        return frozenset({_CONSTANTS[name]})
    if name in _CHOICES:
        found = frozenset[float]().union(*(_values(argument(value, *one), scope) for one in _CHOICES[name]))
        return found | {0.0} if name.startswith("tri") else found
    if name == "neg":
        return frozenset(-number for number in _values(value.args[0], scope))
    if name not in _ARITHMETIC:
        raise _may_be_a_bias(f"and is made by {name}{where(value)}, of which the values are not known")
    left, right = (_values(arg, scope) for arg in value.args[:2])
    found = frozenset(_ARITHMETIC[name](a, b) for a, b in itertools.product(left, right))
    if len(found) > _MOST_VALUES:
        raise _may_be_a_bias(f"and is made by {name}{where(value)}, with many values")
    return found
