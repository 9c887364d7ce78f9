"""Replace the attention of a Dynamo graph by the ring's.

Inner graphs (activation checkpoints) are rewritten as well; the sharding is computed once outside and handed
in, so that a recomputation is the same attention.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ds_ring.errors import RingPatternError
from ds_ring.integrations.compile.graph_attention import (
    AttentionNode,
    inner_graph,
    is_tensor,
    read_flex,
    read_sdpa,
    refuse_other_attention,
    scopes_of,
)
from ds_ring.integrations.compile.graph_masks import MaskMeaning, Scope, name_of, where
from ds_ring.integrations.compile.graph_sharding import ask_for_greatest_positions, needs_backend_op

_MARKS = (torch.ops.ds_ring.needs_backend.default, torch.ops.ds_ring.needs_backend, needs_backend_op)


@dataclass
class Rewriting:
    """Rewrite one graph."""

    source: int  # number of the `RegisteredSource` that the graph asks
    replace_masks: bool  # masks that cannot be read are the pattern's
    _which: dict[Any, Node] = field(default_factory=dict)
    _instead: dict[Node, Node] = field(default_factory=dict)  # of attention that feeds attention

    def run(self, module: GraphModule) -> int:
        """Rewrite a graph in place; return how many attentions it had.

        Raises:
            RingError: something in it cannot be honoured.
        """
        for scope in scopes_of(module):
            for node in list(scope.module.graph.nodes):
                if node.op == "call_function" and node.target in _MARKS:  # this is the backend
                    node.replace_all_uses_with(node.args[0])
                    scope.module.graph.erase_node(node)
            ask_for_greatest_positions(scope.module, self.source)
        scopes = list(scopes_of(module))
        found = [one for scope in scopes for one in self._attentions(scope)]
        windows = {None if one.facts is None else one.facts.window for one in found}
        for one in found:
            self._replace(one, len(windows) > 1)
        # From the inside out: a call's arguments are unused once its graph no longer reads them.
        for scope in reversed(scopes):
            graph = scope.module.graph
            for node in reversed(list(graph.nodes)):  # masks, above all, which take O(S^2) memory
                if not node.users and node.op != "placeholder" and not node.is_impure():
                    graph.erase_node(node)
            scope.module.recompile()
        return len(found)

    def _attentions(self, scope: Scope) -> Iterator[AttentionNode]:
        for node in scope.module.graph.nodes:
            name = name_of(node)
            try:
                if name == "scaled_dot_product_attention":
                    yield read_sdpa(node, scope, self.replace_masks)
                elif name == "flex_attention":
                    yield read_flex(node, scope, self.replace_masks)
                else:
                    refuse_other_attention(node, name)
            except RingPatternError as error:
                raise type(error)(f"attention{where(node)}: {error}") from None

    def _replace(self, one: AttentionNode, mixed: bool) -> None:
        graph, node = one.scope.module.graph, one.node
        which = self._which_of(one, mixed)
        q, k, v = (self._instead.get(x, x) for x in (one.q, one.k, one.v))
        # K/V heads before they were repeated for grouped queries: that much less is sent.
        plain_k, plain_v = _before_repeat(k), _before_repeat(v)
        if plain_k is not None and plain_v is not None:
            k, v = plain_k, plain_v
        with graph.inserting_before(node):
            pair = graph.call_function(torch.ops.ds_ring.placed_attention.default, (q, k, v, which))
            out = graph.call_function(operator.getitem, (pair, 0))
        if name_of(node) == "flex_attention":
            for user in list(node.users):
                if user.args[1] == 0:
                    user.replace_all_uses_with(out)
                    self._instead[user] = out
                graph.erase_node(user)
        else:
            node.replace_all_uses_with(out)
            self._instead[node] = out
        graph.erase_node(node)

    def _which_of(self, one: AttentionNode, mixed: bool) -> Node:
        """Return the node with the sharding's number; one for all attentions that ask the same."""
        facts = one.facts or MaskMeaning()
        root = one.scope.root
        asked = (one.scale, None if one.facts is None else facts.causal, facts.window, mixed)
        at = facts.positions
        if at is None:  # any tensor of the whole graph will do: nothing is read off it
            at = next(n for n in root.module.graph.nodes if is_tensor(n))
        elif at.graph is not root.module.graph:
            raise RingPatternError(
                "its mask is computed inside an activation checkpoint; make it outside, once for all layers"
            )
        key = (facts.positions, *asked)
        if key not in self._which:
            graph = root.module.graph
            with graph.inserting_after(
                graph.find_nodes(op="placeholder")[-1] if at.op == "placeholder" else at
            ):
                like = graph.call_method("detach", (at,))
            with graph.inserting_after(like):
                arguments = (like, facts.positions is not None, self.source, *asked)
                self._which[key] = graph.call_function(torch.ops.ds_ring.place_attention.default, arguments)
        return _handed_in(self._which[key], one.scope)


def _before_repeat(node: Node) -> Node | None:
    """Return x of `x[:, :, None].expand(B, G, n, S, D).reshape(B, G * n, S, D)`; None for others."""
    if name_of(node) not in ("reshape", "view"):
        return None
    wide = node.args[0]
    if not isinstance(wide, Node) or name_of(wide) != "expand" or not isinstance(wide.args[0], Node):
        return None
    split = wide.args[0]
    plain = split.args[0] if name_of(split) in ("getitem", "unsqueeze") else None
    if not isinstance(plain, Node) or not all(is_tensor(n) for n in (node, wide, split, plain)):
        return None
    (b, g, s, d), wanted = plain.meta["example_value"].shape, list(wide.meta["example_value"].shape)
    n = wanted[2] if len(wanted) == 5 else 0
    shapes = [list(x.meta["example_value"].shape) for x in (split, node)]
    fits = wanted == [b, g, n, s, d] and shapes == [[b, g, 1, s, d], [b, g * n, s, d]]
    return plain if fits else None


def _handed_in(which: Node, scope: Scope) -> Node:
    """Return `which` of the whole graph as a node of the scope: one argument more of each call on the way."""
    if scope.outer is None:
        return which
    outside = _handed_in(which, scope.outer)
    for placeholder, given in scope.given.items():
        if given is outside:
            return placeholder
    graph = scope.module.graph
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        placeholder = graph.placeholder("ds_ring_placement")
    for call in scope.outer.module.graph.nodes:
        is_one = name_of(call) == "tag_activation_checkpoint"
        if is_one and inner_graph(call.args[0], scope.outer) is scope.module:
            call.args = (*call.args, outside)
    scope.given[placeholder] = outside
    return placeholder
