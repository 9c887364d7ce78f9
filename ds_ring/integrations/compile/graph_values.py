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
from typing import Any

import torch
from torch.fx import Node

from ds_ring.errors import RingPatternError
from ds_ring.integrations.compile.graph_facts import Scope, name_of, resolve, where

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
