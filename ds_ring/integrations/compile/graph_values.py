"""Read which values a float mask in a Dynamo graph can have: hidden or seen, or a bias.

Owns the reading of the nodes that make the tensor. A mask of zeros and of large negative numbers hides
tokens, so a pattern may stand for it; any other number added to the scores (ALiBi, a learned bias) is
mathematics that ring attention does not compute, and replacing it would train another model without a word.
Nothing is guessed: what is not known here is refused.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ds_ring.errors import RingPatternError

# Describe what a mask in a Dynamo graph can state, and where its nodes are computed.
#
# Owns the meanings that graph_masks.py reads, and the scopes of graphs that call graphs.

QUERY, KEY = 2, 3  # axes of a mask [B, H, S, S]


class Along(NamedTuple):
    """Hold a number for every slot along one axis: the slot itself, or what a table holds for it."""

    axis: int  # 0 batch, 1 head, 2 query, 3 key
    # what is looked up: ("slots", None), ("positions", node), ("documents", node of positions) or ("values",
    # node)
    table: tuple[str, Node | None] = ("slots", None)
    minus: int = 0  # what is subtracted


class Distance(NamedTuple):
    """Stand for query minus key."""

    table: tuple[str, Node | None]


class Facts(NamedTuple):
    """State what a mask says; all of it holds."""

    causal: bool = False  # no later key is seen
    window: int | None = None  # tokens that are seen, itself included; only beside `causal`
    documents: bool = False  # only keys of the same run of consecutive positions are seen
    positions: Node | None = None  # the node of the position ids; None for a mask over slots alone

    def __and__(self, other: Facts) -> Facts:
        if None not in (self.positions, other.positions) and self.positions is not other.positions:
            raise RingPatternError("it is computed from two different tensors of positions")
        windows = [one for one in (self.window, other.window) if one is not None]
        return Facts(
            self.causal or other.causal,
            min(windows, default=None),
            self.documents or other.documents,
            self.positions if self.positions is not None else other.positions,
        )


@dataclass
class Scope:
    """Hold a graph, and what its placeholders are in the graph that calls it."""

    module: GraphModule  # the graph
    outer: Scope | None = None  # the scope of the call; None for the whole graph
    # the outer node, or the meaning itself, for each placeholder
    given: dict[Node, Any] = field(default_factory=dict)

    @property
    def root(self) -> Scope:
        """Return the whole graph."""
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


def where(node: Node) -> str:
    """Return the user's line that a node comes from, in words; empty if nobody knows."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    return f", at {lines[-2]}: {lines[-1]}" if len(lines) > 1 else ""


_HIDDEN = -1e4  # at most: no softmax in any precision sees such a token; the least of float16 is -65504
_MOST_VALUES = 8

Values = frozenset[float]


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


def _values(value: Any, scope: Scope) -> Values:
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
    reader = _READERS.get(name)
    if reader is None:
        raise _may_be_a_bias(f"and is made by {name}{where(value)}, of which the values are not known")
    return reader(value, scope)


def _argument(node: Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _same(node: Node, scope: Scope) -> Values:
    return _values(node.args[0], scope)


def _constant(number: float) -> Callable[[Node, Scope], Values]:
    return lambda node, scope: frozenset({number})


def _full(node: Node, scope: Scope) -> Values:
    return _values(_argument(node, 2 if name_of(node) == "new_full" else 1, "fill_value"), scope)


def _number(node: Node, scope: Scope) -> Values:
    return _values(node.args[0], scope)


def _triangle(node: Node, scope: Scope) -> Values:
    return _values(node.args[0], scope) | {0.0}


def _where(node: Node, scope: Scope) -> Values:
    return _values(_argument(node, 1, "input"), scope) | _values(_argument(node, 2, "other"), scope)


def _filled(node: Node, scope: Scope) -> Values:
    return _values(node.args[0], scope) | _values(_argument(node, 2, "value"), scope)


def _joined(combine: Callable[[float, float], float]) -> Callable[[Node, Scope], Values]:
    """Return a reader of an operation on two operands, element by element."""

    def read(node: Node, scope: Scope) -> Values:
        left, right = (_values(arg, scope) for arg in node.args[:2])
        found = frozenset(combine(a, b) for a, b in itertools.product(left, right))
        if len(found) > _MOST_VALUES:
            raise _may_be_a_bias(f"and is made by {name_of(node)}{where(node)}, with many values")
        return found

    return read


_SHAPES = (
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "clone", "contiguous", "detach", "expand",
    "expand_as", "broadcast_to", "repeat", "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute",
    "getitem", "narrow", "flatten",
)  # fmt: skip
_READERS: dict[str, Callable[[Node, Scope], Values]] = {
    **dict.fromkeys(_SHAPES, _same),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero_"), _constant(0.0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _constant(1.0)),
    **dict.fromkeys(("full", "full_like", "new_full"), _full),
    **dict.fromkeys(("tensor", "scalar_tensor"), _number),
    **dict.fromkeys(("triu", "tril", "triu_", "tril_"), _triangle),
    "where": _where,
    **dict.fromkeys(("masked_fill", "masked_fill_"), _filled),
    **dict.fromkeys(("mul", "imul", "mul_"), _joined(operator.mul)),
    **dict.fromkeys(("add", "iadd", "add_"), _joined(operator.add)),
    **dict.fromkeys(("sub", "isub", "sub_"), _joined(operator.sub)),
    "rsub": _joined(lambda a, b: b - a),
    "neg": lambda node, scope: frozenset(-value for value in _values(node.args[0], scope)),
}
