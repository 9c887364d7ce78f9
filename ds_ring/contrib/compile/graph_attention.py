"""Find the attention nodes of a Dynamo graph, and read what their masks and other arguments mean.

These are `scaled_dot_product_attention` and `flex_attention`, in the graph and in those that it calls.
Attention that cannot be read raises: a graph must never attend to one rank's tokens only. Of masks, known is
what transformers' `masking_utils` and hand-written masks of FlexAttention are made of: comparisons of query
and key positions (or slots), joined by `&`. Nothing is guessed: a node that is not known here makes the mask
unreadable, with the node's name and line. graph_sharding.py decides whether a pattern may replace the mask.

[Note: a mask is read]
The backend compares the facts that it reads with the pattern, and position ids with the layout in every run.
A mask that cannot be read raises, unless the option "masks" is "replace", by which the user guarantees that
the pattern equals it. To run the mask's subgraph (`fx.Interpreter`) would not do: it gives the mask of one
rank's S slots in O(S^2) memory, in which a window wider than the shard, and documents, look like no
restriction. A model that is left to the backend carries an operator that raises when it runs (`needs_backend`
in backend_mark.py); only the backend takes it out.


"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError

QUERY, KEY = 2, 3  # axes of a mask [B, H, S, S]


class TableColumn(NamedTuple):
    """A number for every slot along one axis: the slot itself, or what a table holds for it."""

    axis: int  # 0 batch, 1 head, 2 query, 3 key
    # ("slots", None), ("positions", node), ("documents", node of positions) or ("values", node)
    table: tuple[str, Node | None] = ("slots", None)
    minus: int = 0  # subtracted from the number


class QueryMinusKey(NamedTuple):
    """The query's number minus the key's."""

    table: tuple[str, Node | None]


class MaskMeaning(NamedTuple):
    """The conditions of a mask; a pair must meet all of them."""

    causal: bool = False  # no later key is seen
    window: int | None = None  # tokens that are seen, itself included; only with `causal`
    documents: bool = False  # only keys of the same document (consecutive positions) are seen
    positions: Node | None = None  # the node of the position ids; None for a mask over slots alone

    def __and__(self, right: MaskMeaning) -> MaskMeaning:
        if None not in (self.positions, right.positions) and self.positions is not right.positions:
            raise RingPatternError("it is computed from two different tensors of positions")
        windows = [window for window in (self.window, right.window) if window is not None]
        return MaskMeaning(
            self.causal or right.causal,
            min(windows, default=None),
            self.documents or right.documents,
            self.positions if self.positions is not None else right.positions,
        )


@dataclass
class Scope:
    """A graph, and what its placeholders are in the graph that calls it."""

    module: GraphModule
    outer: Scope | None = None  # the scope of the call; None for the whole graph
    # the outer node, or the meaning itself, for each placeholder
    meanings: dict[Node, Any] = field(default_factory=dict)

    @property
    def root(self) -> Scope:
        """The whole graph."""
        return self if self.outer is None else self.outer.root


def resolve(value: Any, scope: Scope) -> tuple[Any, Scope]:
    """Return a node in the graph that computes it: a placeholder of an inner graph becomes its argument."""
    while isinstance(value, Node) and value.op == "placeholder" and scope.outer is not None:
        value, scope = scope.meanings.get(value), scope.outer
    return value, scope


def get_name(node: Node) -> str:
    """Return the bare name of what a node calls: `and_`, `cumsum`, `scaled_dot_product_attention`."""
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
    return str(node.target) if node.op == "call_method" else node.op


def argument(node: Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def where(node: Node) -> str:
    """Return the user's line that a node comes from, in words; empty if unknown."""
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
    name, meaning = get_name(value), None
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
            meaning = _combine_facts(name, left, right)
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
            "it hides single tokens (padding): leave it out for padding on the right, else pass documents"
        )
    raise RingPatternError(
        f"it is made by {get_name(node)}{where(node)}, which is not known to be causal, a window or documents"
    )


def _combine_facts(name: str, left: Any, right: Any) -> TableColumn | QueryMinusKey | MaskMeaning | None:
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
    if len(index) == 4 and all(part is None or part == slice(None) for part in index):
        axes = [axis for axis, part in enumerate(index) if part is not None]
        return TableColumn(axes[0]) if len(axes) == 1 and _is_arange(base, scope) else None
    if len(index) != 2 or not all(isinstance(part, Node) for part in index):
        return None
    row, slot = (_read(part, scope) for part in index)
    if row != TableColumn(0) or not isinstance(slot, TableColumn) or slot != TableColumn(slot.axis):
        return None
    return slot._replace(table=_table(base, scope))


def _is_arange(node: Any, scope: Scope) -> bool:
    """Return whether a node is 0, 1, 2, ... for each slot."""
    node, scope = resolve(node, scope)
    if not isinstance(node, Node):
        return False
    if get_name(node) == "add" and node.args[1] == 0:
        return _is_arange(node.args[0], scope)
    return get_name(node) == "arange" and (len(node.args) == 1 or node.args[:-1] == (0,))


def _table(base: Any, scope: Scope) -> tuple[str, Node | None]:
    """Return whether a table of [B, S] holds positions or the documents that are counted off them."""
    node = _plain(base, scope)
    if not isinstance(node, Node):
        return "values", None
    if get_name(node) == "cumsum":
        positions = _find_document_positions(node, scope)
        return ("documents", positions) if positions is not None else ("values", node)
    fake = node.meta.get("example_value")
    is_positions = isinstance(fake, torch.Tensor) and fake.dtype in (torch.int64, torch.int32)
    return ("positions" if is_positions else "values"), node


def _plain(value: Any, scope: Scope) -> Any:
    """Return the source tensor of expands and of copies that change no value."""
    value, scope = resolve(value, scope)
    while isinstance(value, Node) and get_name(value) in ("expand", "contiguous", "clone"):
        value, scope = resolve(value.args[0], scope)
    return value


def _find_document_positions(node: Node, scope: Scope) -> Node | None:
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
    if not isinstance(node, Node) or get_name(node) != name:
        return None
    return node if second is None or node.args[1] == second else None


# Which values a float mask can have. A mask of zeros and of large negative numbers hides tokens, so a pattern
# may replace it. Ring attention does not add any other number to the scores (ALiBi, a learned bias): a
# pattern in its place would silently train another model.

_HIDDEN = -1e4  # at most: no softmax in any precision sees such a token; the least of float16 is -65504
_MAX_VALUES = 8


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
    """Return all values that a tensor may have."""
    value, scope = resolve(value, scope)
    if isinstance(value, (bool, int, float)):
        return frozenset({float(value)})
    if not isinstance(value, Node):
        raise _may_be_a_bias(f"made of {type(value).__name__}")
    fake = value.meta.get("example_value")
    if isinstance(fake, torch.Tensor) and fake.dtype == torch.bool:
        return frozenset({0.0, 1.0})
    name = get_name(value)
    if value.op in ("placeholder", "get_attr"):
        raise _may_be_a_bias("and comes into the graph from outside, where its values cannot be read")
    if name in _CONSTANTS:
        return frozenset({_CONSTANTS[name]})
    if name in _CHOICES:
        values = frozenset[float]().union(
            *(_values(argument(value, *choice), scope) for choice in _CHOICES[name])
        )
        return values | {0.0} if name.startswith("tri") else values
    if name == "neg":
        return frozenset(-number for number in _values(value.args[0], scope))
    if name not in _ARITHMETIC:
        raise _may_be_a_bias(f"and is made by {name}{where(value)}, of which the values are not known")
    left, right = (_values(arg, scope) for arg in value.args[:2])
    values = frozenset(_ARITHMETIC[name](a, b) for a, b in itertools.product(left, right))
    if len(values) > _MAX_VALUES:
        raise _may_be_a_bias(f"and is made by {name}{where(value)}, with many values")
    return values


_SDPA = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_LONG = ("query", "key", "value")
_NO_TABLES = 1 << 30  # FlexAttention's block size without a block mask

_WHAT_TO_DO = (
    "A mask over one rank's tokens says nothing about the sequence: say it with the configured pattern, leave"
    " attention_mask out of the batch, or, if the pattern is what the mask means, set options={'masks':"
    " 'replace'}"
)


class AttentionNode(NamedTuple):
    """An attention node and its arguments."""

    node: Node
    scope: Scope  # the graph that it is in
    q: Node
    k: Node
    v: Node
    scale: float | None  # None for 1 / sqrt(D)
    facts: MaskMeaning | None  # of its mask; None if the pattern replaces the mask unread


def read_sdpa(node: Node, scope: Scope, replace_masks: bool) -> AttentionNode:
    arguments = dict(zip(_SDPA, node.args, strict=False)) | dict(node.kwargs)
    q, k, v = (arguments.get(name, arguments.get(long)) for name, long in zip("qkv", _LONG, strict=True))
    if arguments.get("dropout_p", 0.0) != 0.0:
        raise RingConfigError.wrong(
            "attention", "dropout_p 0", arguments["dropout_p"], "set attention_dropout to 0"
        )
    facts = _facts(arguments.get("attn_mask"), scope, replace_masks)
    if arguments.get("is_causal", False) is not False:
        facts = None if facts is None else facts & MaskMeaning(causal=True)
    return _checked(node, scope, (q, k, v), arguments.get("scale"), facts)


def _facts(mask: Any, scope: Scope, replace_masks: bool) -> MaskMeaning | None:
    """Read a mask; None if it is the pattern's, unread."""
    if mask is None:
        return MaskMeaning()
    if replace_masks:
        refuse_bias(mask, scope)
        return None
    try:
        facts = read_mask(mask, scope)
    except RingPatternError as error:
        fake = mask.meta.get("example_value")
        shape = "" if fake is None else f" {list(fake.shape)}"
        raise RingPatternError(f"its mask{shape} cannot be honoured: {error}. {_WHAT_TO_DO}") from None
    if facts.window is not None and not facts.causal:
        raise RingPatternError(f"its mask has a window and is not causal. {_WHAT_TO_DO}")
    return facts


def read_flex(node: Node, scope: Scope, replace_masks: bool) -> AttentionNode:
    q, k, v, score_mod, block_mask, scale = node.args[:6]
    score = get_inner_graph(score_mod, scope).graph
    first, output = next(iter(score.nodes)), next(iter(reversed(score.nodes)))
    if output.args[0] is not first:
        raise RingPatternError("its score_mod changes the scores (a bias, a soft cap); leave it out")
    for user in node.users:
        if user.args[1] != 0 and user.users:
            raise RingPatternError("its log-sum-exp is used, without a gradient; call ring_attention")
    others = node.args[8] if len(node.args) > 8 else ()
    facts = _mask_mod(block_mask, others, scope, replace_masks)
    return _checked(node, scope, (q, k, v), scale, facts)


def _mask_mod(block_mask: Any, others: Any, scope: Scope, replace_masks: bool) -> MaskMeaning | None:
    if replace_masks:
        return None
    *sizes, mask_mod = block_mask[-3:]
    inner = Scope(get_inner_graph(mask_mod, scope), scope)
    placeholders = [node for node in inner.module.graph.nodes if node.op == "placeholder"]
    meanings = [*(TableColumn(axis) for axis in range(4)), *others]
    inner.meanings.update(zip(placeholders, meanings, strict=False))
    output = next(iter(reversed(inner.module.graph.nodes))).args[0]
    facts = _facts(output, inner, replace_masks)
    if facts == MaskMeaning() and any(not isinstance(s, int) or s < _NO_TABLES for s in sizes):
        raise RingPatternError(
            f"its block mask may differ from its mask_mod: use create_block_mask. {_WHAT_TO_DO}"
        )
    return facts


def list_scopes(module: GraphModule, outer: Scope | None = None, call: Node | None = None) -> Iterator[Scope]:
    """Yield the graph and the graphs that it calls, with their arguments; not those of FlexAttention."""
    scope = Scope(module, outer)
    if call is not None:
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        scope.meanings.update(zip(placeholders, call.args[1:], strict=False))
    yield scope
    for node in list(module.graph.nodes):
        attributes = [arg for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"]
        inner = [arg for arg in attributes if isinstance(getattr(module, str(arg.target)), GraphModule)]
        if not inner or get_name(node) == "flex_attention":
            continue
        if get_name(node) == "tag_activation_checkpoint":
            yield from list_scopes(get_inner_graph(inner[0], scope), scope, node)
            continue
        for arg in inner:
            for part in get_inner_graph(arg, scope).graph.nodes:
                if get_name(part) in ("scaled_dot_product_attention", "flex_attention"):
                    raise RingPatternError(
                        f"attention inside {get_name(node)}{where(part)} cannot be rewritten; move it out"
                    )


def get_inner_graph(node: Any, scope: Scope) -> GraphModule:
    inner = getattr(scope.module, str(node.target))
    assert isinstance(inner, GraphModule), node
    return inner


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def refuse_other_attention(node: Node, name: str) -> None:
    """Refuse attention that is written out, or that another package computes."""
    if node.op not in ("call_function", "call_method"):
        return
    what = str(node.target)
    if ("attention" in what or "attn" in what) and "ds_ring" not in what:
        raise RingPatternError(f"{what} attends to this rank's tokens only; use attn_implementation='sdpa'")
    if name in ("softmax", "_softmax", "_safe_softmax") and _comes_from_a_product(node):
        raise RingPatternError(
            "a softmax of a product of matrices is attention written out, over this rank's tokens only; use"
            " torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa')"
        )


_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "__matmul__")
_BETWEEN = (
    "mul", "truediv", "div", "add", "sub", "iadd", "imul", "to", "float", "where", "tanh", "masked_fill",
    "masked_fill_", "type_as", "view", "reshape", "truediv_", "add_", "mul_", "clamp",
)  # fmt: skip


def _comes_from_a_product(node: Node) -> bool:
    """Return whether a node holds scores: a product of two batches of matrices, scaled and masked."""
    seen, todo = set(), list(node.all_input_nodes[:1])
    while todo:
        source = todo.pop()
        if source in seen:
            continue
        seen.add(source)
        if get_name(source) in _PRODUCTS:
            fakes = [arg.meta.get("example_value") for arg in source.all_input_nodes]
            return all(not isinstance(fake, torch.Tensor) or fake.ndim != 2 for fake in fakes)
        if get_name(source) in _BETWEEN:
            todo += source.all_input_nodes
    return False


def _checked(
    node: Node, scope: Scope, qkv: tuple[Any, Any, Any], scale: Any, facts: MaskMeaning | None
) -> AttentionNode:
    """Check the scale, and shapes that a ring can take; the rest is checked where it runs."""
    if not isinstance(scale, int | float | None):
        raise RingPatternError(f"its scale is computed in the graph ({scale}); make it a constant")
    shapes = {}
    for name, x in zip("qkv", qkv, strict=True):
        assert isinstance(x, Node), f"attention over {x!r}"
        if (fake := x.meta.get("example_value")) is not None:
            shapes[name] = list(fake.shape)
            if fake.ndim != 4:
                raise RingShapeError(
                    f"attention{where(node)}: {name}: expected [batch, heads, tokens, head_dim], got"
                    f" {shapes[name]}"
                )
    q, k = shapes.get("q"), shapes.get("k")
    if q is not None and k is not None and str(q[2]) != str(k[2]):
        raise RingShapeError(
            f"attention{where(node)}: expected as many keys as queries, {q[2]}, got {k[2]}; a cache or cross"
            " attention is not supported: pass use_cache=False"
        )
    return AttentionNode(node, scope, *qkv, None if scale is None else float(scale), facts)
