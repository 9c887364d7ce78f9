"""A Dynamo graph with its attention replaced by the ring's.

Owns which nodes are attention, what of their arguments a ring computes, and the surgery. What masks mean is
read in graph_masks.py, and whether the pattern may stand for them is decided in every run by
graph_placement.py. Whatever is not understood raises: a graph must never attend to one rank's tokens only.

Inner graphs (activation checkpoints) are rewritten as well; the placement is computed once outside and handed
in, so that a recomputation is the same attention.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.integrations.graph_masks import Along, Facts, Scope, name_of, read_mask, where
from ds_ring.integrations.graph_placement import needs_backend_op

_SDPA = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_LONG = ("query", "key", "value")
_NO_TABLES = 1 << 30  # the block size with which FlexAttention says that there is no block mask

_WHAT_TO_DO = (
    "A mask over one rank's tokens says nothing about the sequence: say it with the configured pattern, leave"
    " attention_mask out of the batch, or, if the pattern is what the mask means, set options={'masks':"
    " 'replace'}"
)


class Attention(NamedTuple):
    """An attention node, understood.

    Attributes:
        node, scope: where it stands.
        q, k, v: its inputs.
        scale: None for 1 / sqrt(D).
        facts: what it masks; None if the pattern replaces that whatever it is.
    """

    node: Node
    scope: Scope
    q: Node
    k: Node
    v: Node
    scale: float | None
    facts: Facts | None


@dataclass
class Rewriting:
    """One pass over a graph.

    Attributes:
        source: number of the `Places` that the graph asks.
        replace_masks: masks that cannot be read are the pattern's.
    """

    source: int
    replace_masks: bool
    _which: dict[Any, Node] = field(default_factory=dict)

    def run(self, module: GraphModule) -> int:
        """Rewrite a graph in place; how many attentions it had.

        Raises:
            RingError: something in it cannot be honoured.
        """
        for scope in _scopes(module):
            _take_marks_away(scope.module)
        scopes = list(_scopes(module))
        found = [one for scope in scopes for one in self._attentions(scope)]
        windows = {None if one.facts is None else one.facts.window for one in found}
        mixed = min((w for w in windows if w is not None), default=None) if len(windows) > 1 else None
        for one in found:
            self._replace(one, mixed)
        for scope in reversed(scopes):
            _erase_unused(scope.module)
            scope.module.recompile()
        return len(found)

    def _attentions(self, scope: Scope) -> Iterator[Attention]:
        for node in scope.module.graph.nodes:
            name = name_of(node)
            try:
                if name == "scaled_dot_product_attention":
                    yield self._sdpa(node, scope)
                elif name == "flex_attention":
                    yield self._flex(node, scope)
                else:
                    _refuse_other_attention(node, name)
            except RingPatternError as error:
                raise type(error)(f"attention{where(node)}: {error}") from None

    def _sdpa(self, node: Node, scope: Scope) -> Attention:
        given = dict(zip(_SDPA, node.args, strict=False)) | dict(node.kwargs)
        q, k, v = (given.get(name, given.get(long)) for name, long in zip("qkv", _LONG, strict=True))
        if given.get("dropout_p", 0.0) != 0.0:
            raise RingConfigError(
                f"attention: expected dropout_p 0, got {given['dropout_p']}: there is none in ring attention;"
                " set attention_dropout to 0 in the model's configuration (dropout elsewhere is fine)"
            )
        facts = self._facts(given.get("attn_mask"), scope)
        if given.get("is_causal", False) is not False:
            facts = None if facts is None else facts & Facts(causal=True)
        return _checked(Attention(node, scope, q, k, v, _number(given.get("scale")), facts))

    def _facts(self, mask: Any, scope: Scope) -> Facts | None:
        """None if the mask is the pattern's, unread."""
        if mask is None:
            return Facts()
        if self.replace_masks:
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

    def _flex(self, node: Node, scope: Scope) -> Attention:
        q, k, v, score_mod, block_mask, scale = node.args[:6]
        score = _inner(score_mod, scope).graph
        first, output = next(iter(score.nodes)), next(iter(reversed(score.nodes)))
        if output.args[0] is not first:
            raise RingPatternError(
                "its score_mod changes the scores (a bias, a soft cap), which ring attention does not compute;"
                " leave it out"
            )
        for user in node.users:
            if user.args[1] != 0 and user.users:
                raise RingPatternError(
                    "its log-sum-exp is used, and the ring's carries no gradient; call"
                    " ds_ring.ring_attention yourself"
                )
        others = node.args[8] if len(node.args) > 8 else ()
        facts = self._mask_mod(block_mask, others, scope)
        return _checked(Attention(node, scope, q, k, v, _number(scale), facts))

    def _mask_mod(self, block_mask: Any, others: Any, scope: Scope) -> Facts | None:
        if self.replace_masks:
            return None
        *sizes, mask_mod = block_mask[-3:]
        inner = Scope(_inner(mask_mod, scope), scope)
        placeholders = [node for node in inner.module.graph.nodes if node.op == "placeholder"]
        meanings = [*(Along(axis) for axis in range(4)), *others]
        inner.given.update(zip(placeholders, meanings, strict=False))
        output = next(iter(reversed(inner.module.graph.nodes))).args[0]
        facts = self._facts(output, inner)
        if facts == Facts() and any(not isinstance(s, int) or s < _NO_TABLES for s in sizes):
            raise RingPatternError(
                f"its block mask may hide what its mask_mod does not say: build it with create_block_mask."
                f" {_WHAT_TO_DO}"
            )
        return facts

    def _replace(self, one: Attention, mixed_window: int | None) -> None:
        graph, node = one.scope.module.graph, one.node
        which = self._which_of(one, mixed_window)
        k, v = _without_repeats(one.k, one.v)
        with graph.inserting_before(node):
            pair = graph.call_function(
                torch.ops.ds_ring.placed_attention.default, (one.q, k, v, which)
            )
            out = graph.call_function(operator.getitem, (pair, 0))
        if name_of(node) == "flex_attention":
            for user in list(node.users):
                if user.args[1] == 0:
                    user.replace_all_uses_with(out)
                graph.erase_node(user)
        else:
            node.replace_all_uses_with(out)
        graph.erase_node(node)

    def _which_of(self, one: Attention, mixed_window: int | None) -> Node:
        """The node with the placement's number; one for all attentions that ask the same."""
        facts = one.facts or Facts()
        root = one.scope.root
        asked = (
            one.scale,
            None if one.facts is None else facts.causal,
            facts.window,
            mixed_window,
        )
        if facts.positions is None:  # any tensor of the whole graph will do: nothing is read off it
            any_tensor = next(n for n in root.module.graph.nodes if _is_tensor(n))
            at = any_tensor
        elif facts.positions.graph is not root.module.graph:
            raise RingPatternError(
                "its mask is computed inside an activation checkpoint; compute it outside, once for all layers"
            )
        else:
            at = facts.positions
        key = (facts.positions, *asked)
        if key not in self._which:
            graph = root.module.graph
            with graph.inserting_after(_last_placeholder(graph) if at.op == "placeholder" else at):
                like = graph.call_method("detach", (at,))
            with graph.inserting_after(like):
                arguments = (like, facts.positions is not None, self.source, *asked)
                self._which[key] = graph.call_function(torch.ops.ds_ring.place_attention.default, arguments)
        return _handed_in(self._which[key], one.scope)


def _scopes(module: GraphModule, outer: Scope | None = None, call: Node | None = None) -> Iterator[Scope]:
    """The graph and the graphs that it calls, with what each is called with; not those of FlexAttention."""
    scope = Scope(module, outer)
    if call is not None:
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        scope.given.update(zip(placeholders, call.args[1:], strict=False))
    yield scope
    for node in list(module.graph.nodes):
        inner = [arg for arg in node.args if isinstance(arg, Node) and _is_graph(arg, module)]
        if not inner or name_of(node) == "flex_attention":
            continue
        if name_of(node) == "tag_activation_checkpoint":
            yield from _scopes(_inner(inner[0], scope), scope, node)
            continue
        for arg in inner:
            for part in _inner(arg, scope).graph.nodes:
                if _is_attention(part):
                    raise RingPatternError(
                        f"attention inside {name_of(node)}{where(part)} cannot be rewritten; move it out"
                    )


def _is_graph(node: Node, module: GraphModule) -> bool:
    return node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), GraphModule)


def _inner(node: Any, scope: Scope) -> GraphModule:
    found = getattr(scope.module, str(node.target))
    assert isinstance(found, GraphModule), node
    return found


def _is_attention(node: Node) -> bool:
    return name_of(node) in ("scaled_dot_product_attention", "flex_attention")


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _take_marks_away(module: GraphModule) -> None:
    """`needs_backend` has done its duty: this is the backend."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in (
            torch.ops.ds_ring.needs_backend.default,
            torch.ops.ds_ring.needs_backend,
            needs_backend_op,
        ):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _refuse_other_attention(node: Node, name: str) -> None:
    """Attention that is written out, or that another package computes."""
    if node.op not in ("call_function", "call_method"):
        return
    what = str(node.target)
    if ("attention" in what or "attn" in what) and "ds_ring" not in what:
        raise RingPatternError(
            f"{what} attends to this rank's tokens only and cannot be rewritten; use attn_implementation='sdpa'"
        )
    if name in ("softmax", "_softmax", "_safe_softmax") and _comes_from_a_product(node):
        raise RingPatternError(
            "a softmax of a product of matrices is attention written out, over this rank's tokens only; use"
            " torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa')"
        )


_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "__matmul__")
_BETWEEN = ("mul", "truediv", "div", "add", "sub", "iadd", "imul", "to", "float", "where", "tanh")
_BETWEEN += ("masked_fill", "masked_fill_", "type_as", "view", "reshape", "truediv_", "add_", "mul_", "clamp")


def _comes_from_a_product(node: Node) -> bool:
    """Scores: a product of two computed tensors, scaled and masked. A router multiplies by its weights."""
    seen, open_ = set(), list(node.all_input_nodes[:1])
    while open_:
        one = open_.pop()
        if one in seen:
            continue
        seen.add(one)
        if name_of(one) in _PRODUCTS:
            return all(arg.op not in ("placeholder", "get_attr") for arg in one.all_input_nodes)
        if name_of(one) in _BETWEEN:
            open_ += one.all_input_nodes
    return False


def _number(scale: Any) -> float | None:
    if scale is None or isinstance(scale, (int, float)):
        return None if scale is None else float(scale)
    raise RingPatternError(f"its scale is computed in the graph ({scale}); make it a constant")


def _checked(one: Attention) -> Attention:
    """Shapes that a ring can take; the rest is checked where it runs."""
    fakes = [x.meta.get("example_value") if isinstance(x, Node) else None for x in (one.q, one.k, one.v)]
    shapes = [None if fake is None else list(fake.shape) for fake in fakes]
    for name, shape in zip("qkv", shapes, strict=True):
        if shape is not None and len(shape) != 4:
            raise RingShapeError(
                f"attention{where(one.node)}: {name}: expected [batch, heads, tokens, head_dim], got {shape}"
            )
    q, k = shapes[:2]
    if q is not None and k is not None and str(q[2]) != str(k[2]):
        raise RingShapeError(
            f"attention{where(one.node)}: expected as many keys as queries, {q[2]}, got {k[2]}; a cache or cross"
            " attention is not supported: pass use_cache=False"
        )
    return one


def _without_repeats(k: Node, v: Node) -> tuple[Node, Node]:
    """K/V heads before they were repeated for grouped queries: what travels is then that much less."""
    plain_k, plain_v = _before_repeat(k), _before_repeat(v)
    return (k, v) if plain_k is None or plain_v is None else (plain_k, plain_v)


def _before_repeat(node: Node) -> Node | None:
    """x [B, G, S, D] of `x[:, :, None].expand(B, G, n, S, D).reshape(B, G * n, S, D)`; None for others."""
    if name_of(node) not in ("reshape", "view"):
        return None
    wide = node.args[0]
    if not isinstance(wide, Node) or name_of(wide) != "expand" or not isinstance(wide.args[0], Node):
        return None
    split = wide.args[0]
    plain = split.args[0] if name_of(split) in ("getitem", "unsqueeze") else None
    if not isinstance(plain, Node) or not all(_is_tensor(n) for n in (node, wide, split, plain)):
        return None
    (b, g, s, d), wanted = plain.meta["example_value"].shape, list(wide.meta["example_value"].shape)
    n = wanted[2] if len(wanted) == 5 else 0
    shapes = [list(x.meta["example_value"].shape) for x in (split, node)]
    fits = wanted == [b, g, n, s, d] and shapes == [[b, g, 1, s, d], [b, g * n, s, d]]
    return plain if fits else None


def _last_placeholder(graph: torch.fx.Graph) -> Node:
    return [node for node in graph.nodes if node.op == "placeholder"][-1]


def _handed_in(which: Node, scope: Scope) -> Node:
    """`which` of the whole graph, as a node of the scope: an argument more of each call on the way."""
    if scope.outer is None:
        return which
    outside = _handed_in(which, scope.outer)
    for placeholder, given in scope.given.items():
        if given is outside:
            return placeholder
    calls = [
        node
        for node in scope.outer.module.graph.nodes
        if name_of(node) == "tag_activation_checkpoint" and _inner(node.args[0], scope.outer) is scope.module
    ]
    graph = scope.module.graph
    with graph.inserting_after(_last_placeholder(graph)):
        placeholder = graph.placeholder("ds_ring_placement")
    for call in calls:
        call.args = (*call.args, outside)
    scope.given[placeholder] = outside
    return placeholder


def _erase_unused(module: GraphModule) -> None:
    """The nodes that computed masks: a mask is O(S^2), and nobody asks for it any more."""
    for node in reversed(list(module.graph.nodes)):
        if not node.users and node.op != "placeholder" and not node.is_impure():
            module.graph.erase_node(node)

