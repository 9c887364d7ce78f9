"""Describe what a mask in a Dynamo graph can state, and where its nodes are computed.

Owns the meanings that graph_masks.py reads, and the scopes of graphs that call graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from ds_ring.errors import RingPatternError

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
