"""Find the attention nodes of a Dynamo graph, and read what of their arguments a ring computes.

These are `scaled_dot_product_attention` and `flex_attention`, in the graph and in those that it calls.
Attention that cannot be read raises: a graph must never attend to one rank's tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.integrations.compile.graph_masks import (
    MaskMeaning,
    Scope,
    TableColumn,
    name_of,
    read_mask,
    refuse_bias,
    where,
)

_SDPA = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_LONG = ("query", "key", "value")
_NO_TABLES = 1 << 30  # the block size with which FlexAttention says that there is no block mask

_WHAT_TO_DO = (
    "A mask over one rank's tokens says nothing about the sequence: say it with the configured pattern, leave"
    " attention_mask out of the batch, or, if the pattern is what the mask means, set options={'masks':"
    " 'replace'}"
)


class AttentionNode(NamedTuple):
    """An attention node and its arguments."""

    node: Node
    scope: Scope  # the graph that it stands in
    q: Node
    k: Node
    v: Node
    scale: float | None  # None for 1 / sqrt(D)
    facts: MaskMeaning | None  # what it masks; None if the pattern replaces that whatever it is


def read_sdpa(node: Node, scope: Scope, replace_masks: bool) -> AttentionNode:
    given = dict(zip(_SDPA, node.args, strict=False)) | dict(node.kwargs)
    q, k, v = (given.get(name, given.get(long)) for name, long in zip("qkv", _LONG, strict=True))
    if given.get("dropout_p", 0.0) != 0.0:
        raise RingConfigError(
            f"attention: expected dropout_p 0, got {given['dropout_p']}: there is none in ring attention;"
            " set attention_dropout to 0 in the model's configuration (dropout elsewhere is fine)"
        )
    facts = _facts(given.get("attn_mask"), scope, replace_masks)
    if given.get("is_causal", False) is not False:
        facts = None if facts is None else facts & MaskMeaning(causal=True)
    return _checked(node, scope, (q, k, v), given.get("scale"), facts)


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
    score = inner_graph(score_mod, scope).graph
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
    facts = _mask_mod(block_mask, others, scope, replace_masks)
    return _checked(node, scope, (q, k, v), scale, facts)


def _mask_mod(block_mask: Any, others: Any, scope: Scope, replace_masks: bool) -> MaskMeaning | None:
    if replace_masks:
        return None
    *sizes, mask_mod = block_mask[-3:]
    inner = Scope(inner_graph(mask_mod, scope), scope)
    placeholders = [node for node in inner.module.graph.nodes if node.op == "placeholder"]
    meanings = [*(TableColumn(axis) for axis in range(4)), *others]
    inner.given.update(zip(placeholders, meanings, strict=False))
    output = next(iter(reversed(inner.module.graph.nodes))).args[0]
    facts = _facts(output, inner, replace_masks)
    if facts == MaskMeaning() and any(not isinstance(s, int) or s < _NO_TABLES for s in sizes):
        raise RingPatternError(
            f"its block mask may hide what its mask_mod does not say: build it with create_block_mask."
            f" {_WHAT_TO_DO}"
        )
    return facts


def scopes_of(module: GraphModule, outer: Scope | None = None, call: Node | None = None) -> Iterator[Scope]:
    """Yield the graph and the graphs that it calls, with their arguments; not those of FlexAttention."""
    scope = Scope(module, outer)
    if call is not None:
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        scope.given.update(zip(placeholders, call.args[1:], strict=False))
    yield scope
    for node in list(module.graph.nodes):
        attributes = [arg for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"]
        inner = [arg for arg in attributes if isinstance(getattr(module, str(arg.target)), GraphModule)]
        if not inner or name_of(node) == "flex_attention":
            continue
        if name_of(node) == "tag_activation_checkpoint":
            yield from scopes_of(inner_graph(inner[0], scope), scope, node)
            continue
        for arg in inner:
            for part in inner_graph(arg, scope).graph.nodes:
                if name_of(part) in ("scaled_dot_product_attention", "flex_attention"):
                    raise RingPatternError(
                        f"attention inside {name_of(node)}{where(part)} cannot be rewritten; move it out"
                    )


def inner_graph(node: Any, scope: Scope) -> GraphModule:
    found = getattr(scope.module, str(node.target))
    assert isinstance(found, GraphModule), node
    return found


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def refuse_other_attention(node: Node, name: str) -> None:
    """Refuse attention that is written out, or that another package computes."""
    if node.op not in ("call_function", "call_method"):
        return
    what = str(node.target)
    if ("attention" in what or "attn" in what) and "ds_ring" not in what:
        raise RingPatternError(
            f"{what} attends to this rank's tokens only and cannot be rewritten; use"
            " attn_implementation='sdpa'"
        )
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
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if name_of(one) in _PRODUCTS:
            fakes = [arg.meta.get("example_value") for arg in one.all_input_nodes]
            return all(not isinstance(fake, torch.Tensor) or fake.ndim != 2 for fake in fakes)
        if name_of(one) in _BETWEEN:
            todo += one.all_input_nodes
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
            f"attention{where(node)}: expected as many keys as queries, {q[2]}, got {k[2]}; a cache or"
            " cross attention is not supported: pass use_cache=False"
        )
    return AttentionNode(node, scope, *qkv, None if scale is None else float(scale), facts)
