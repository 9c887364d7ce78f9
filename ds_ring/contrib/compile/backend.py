"""Put the ring into a model that does not know it: `torch.compile(model, backend="ds_ring")`.

The attention of the graph is replaced by the ring's; the graph is then passed to Inductor, or to the backend
that `inner` names.

    options = {"mesh": mesh, "pattern": ds_ring.Causal(), "layout": layout}
    model = torch.compile(model, backend="ds_ring", options=options)
    logits = model(input_ids=ids_local, position_ids=positions_local, use_cache=False).logits

Under `ds_ring.initialize` say `engine.compile(backend="ds_ring")`: the session knows the rest.

Inner graphs (activation checkpoints) are rewritten as well; the sharding is computed once outside and handed
in, so that a recomputation is the same attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch._dynamo import list_backends, lookup_backend
from torch.fx import GraphModule, Node

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig, pattern_from_config
from ds_ring.contrib.compile.graph_attention import (
    AttentionNode,
    MaskMeaning,
    Scope,
    get_inner_graph,
    get_name,
    is_tensor,
    list_scopes,
    read_flex,
    read_sdpa,
    refuse_other_attention,
    where,
)
from ds_ring.contrib.compile.graph_sharding import (
    RegisteredSource,
    SessionSource,
    StaticSource,
    ask_for_greatest_positions,
)
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError, RingError, RingMeshError, RingPatternError
from ds_ring.models.backend_mark import needs_backend_op
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options

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
        for scope in list_scopes(module):
            for node in list(scope.module.graph.nodes):
                if node.op == "call_function" and node.target in _MARKS:  # this is the backend
                    node.replace_all_uses_with(node.args[0])
                    scope.module.graph.erase_node(node)
            ask_for_greatest_positions(scope.module, self.source)
        scopes = list(list_scopes(module))
        attentions = [attention for scope in scopes for attention in self._attentions(scope)]
        windows = {None if attention.facts is None else attention.facts.window for attention in attentions}
        for attention in attentions:
            self._replace(attention, len(windows) > 1)
        # From the inside out: a call's arguments are unused once its graph no longer reads them.
        for scope in reversed(scopes):
            graph = scope.module.graph
            for node in reversed(list(graph.nodes)):  # masks, above all, which take O(S^2) memory
                if not node.users and node.op != "placeholder" and not node.is_impure():
                    graph.erase_node(node)
            scope.module.recompile()
        return len(attentions)

    def _attentions(self, scope: Scope) -> Iterator[AttentionNode]:
        for node in scope.module.graph.nodes:
            name = get_name(node)
            try:
                if name == "scaled_dot_product_attention":
                    yield read_sdpa(node, scope, self.replace_masks)
                elif name == "flex_attention":
                    yield read_flex(node, scope, self.replace_masks)
                else:
                    refuse_other_attention(node, name)
            except RingPatternError as error:
                raise type(error)(f"attention{where(node)}: {error}") from None

    def _replace(self, attention: AttentionNode, mixed: bool) -> None:
        graph, node = attention.scope.module.graph, attention.node
        which = self._choose_source(attention, mixed)
        q, k, v = (self._instead.get(x, x) for x in (attention.q, attention.k, attention.v))
        # K/V heads before they were repeated for grouped queries: that much less is sent.
        plain_k, plain_v = _before_repeat(k), _before_repeat(v)
        if plain_k is not None and plain_v is not None:
            k, v = plain_k, plain_v
        with graph.inserting_before(node):
            pair = graph.call_function(torch.ops.ds_ring.placed_attention.default, (q, k, v, which))
            out = graph.call_function(operator.getitem, (pair, 0))
        if get_name(node) == "flex_attention":
            for user in list(node.users):
                if user.args[1] == 0:
                    user.replace_all_uses_with(out)
                    self._instead[user] = out
                graph.erase_node(user)
        else:
            node.replace_all_uses_with(out)
            self._instead[node] = out
        graph.erase_node(node)

    def _choose_source(self, attention: AttentionNode, mixed: bool) -> Node:
        """Return the node with the sharding's number; one for all attentions that ask the same."""
        facts = attention.facts or MaskMeaning()
        root = attention.scope.root
        request = (attention.scale, None if attention.facts is None else facts.causal, facts.window, mixed)
        at = facts.positions
        if at is None:  # any tensor of the whole graph will do: nothing is read off it
            at = next(n for n in root.module.graph.nodes if is_tensor(n))
        elif at.graph is not root.module.graph:
            raise RingPatternError("its mask is computed inside an activation checkpoint; make it outside")
        key = (facts.positions, *request)
        if key not in self._which:
            graph = root.module.graph
            with graph.inserting_after(
                graph.find_nodes(op="placeholder")[-1] if at.op == "placeholder" else at
            ):
                like = graph.call_method("detach", (at,))
            with graph.inserting_after(like):
                arguments = (like, facts.positions is not None, self.source, *request)
                self._which[key] = graph.call_function(torch.ops.ds_ring.place_attention.default, arguments)
        return _resolve_placeholders(self._which[key], attention.scope)


def _before_repeat(node: Node) -> Node | None:
    """Return x of `x[:, :, None].expand(B, G, n, S, D).reshape(B, G * n, S, D)`; None for others."""
    if get_name(node) not in ("reshape", "view"):
        return None
    wide = node.args[0]
    if not isinstance(wide, Node) or get_name(wide) != "expand" or not isinstance(wide.args[0], Node):
        return None
    split = wide.args[0]
    plain = split.args[0] if get_name(split) in ("getitem", "unsqueeze") else None
    if not isinstance(plain, Node) or not all(is_tensor(n) for n in (node, wide, split, plain)):
        return None
    (b, g, s, d), wanted = plain.meta["example_value"].shape, list(wide.meta["example_value"].shape)
    n = wanted[2] if len(wanted) == 5 else 0
    shapes = [list(x.meta["example_value"].shape) for x in (split, node)]
    fits = wanted == [b, g, n, s, d] and shapes == [[b, g, 1, s, d], [b, g * n, s, d]]
    return plain if fits else None


def _resolve_placeholders(which: Node, scope: Scope) -> Node:
    """Return `which` of the whole graph as a node of the scope: one argument more of each call on the way."""
    if scope.outer is None:
        return which
    outside = _resolve_placeholders(which, scope.outer)
    for placeholder, meaning in scope.meanings.items():
        if meaning is outside:
            return placeholder
    graph = scope.module.graph
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        placeholder = graph.placeholder("ds_ring_placement")
    for call in scope.outer.module.graph.nodes:
        is_one = get_name(call) == "tag_activation_checkpoint"
        if is_one and get_inner_graph(call.args[0], scope.outer) is scope.module:
            call.args = (*call.args, outside)
    scope.meanings[placeholder] = outside
    return placeholder


NAME = "ds_ring"
_OF_A_PASS = tuple(
    name for name in Options.model_fields if name not in ("scale", "kernel_options", "chunk_bytes")
)
_OF_THE_RING = ("mesh", "pattern", "layout", "config", *_OF_A_PASS)
_OF_THE_BACKEND = ("inner", "inner_options", "masks")

_WHAT_TO_PASS = (
    'pass options={"mesh": RingMesh.from_world(...), "pattern": ds_ring.Causal(), "layout": ...} to'
    ' torch.compile, or start with ds_ring.initialize and say engine.compile(backend="ds_ring")'
)

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class BackendOptions:
    """The options of the backend."""

    source: StaticSource | SessionSource  # of the layout and the pattern
    inner: str = "inductor"  # the backend for the rewritten graph, by its name
    inner_options: Mapping[str, Any] | None = None  # that backend's own options
    # "check" raises for masks that cannot be read; "replace": every mask tensor means the pattern
    masks: str = "check"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> BackendOptions:
        """Read the options of torch.compile; with a session, mesh and pattern are its own."""
        values = dict(options)
        session = values.pop("session", None)
        known = _OF_THE_BACKEND if session is not None else (*_OF_THE_RING, *_OF_THE_BACKEND)
        for key in values:
            if key not in known:
                close = get_close_matches(str(key), known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                why = " (the session of ds_ring.initialize knows the ring)" if session is not None else ""
                raise RingConfigError(f"options: expected some of {', '.join(known)}{why}, got {key!r}{hint}")
        backend_values = {key: values.pop(key) for key in _OF_THE_BACKEND if key in values}
        if backend_values.get("inner", "inductor") not in list_backends(exclude_tags=()):
            raise RingConfigError.wrong(
                "options: inner", f"one of {', '.join(list_backends())}", backend_values["inner"], "name one"
            )
        if backend_values.get("masks", "check") not in ("check", "replace"):
            raise RingConfigError(
                f"options: masks: expected one of check, replace, got {backend_values['masks']!r}"
            )
        if session is None:
            return cls(
                _make_static_source(values, backend_values.get("masks") == "replace"), **backend_values
            )
        if not isinstance(session, RingSession):
            raise RingConfigError.wrong(
                "options: session", "an engine.ring", type(session).__name__, "use it"
            )
        return cls(SessionSource(session), **backend_values)


def _make_static_source(values: dict[str, Any], replace_masks: bool) -> StaticSource:
    mesh, config = values.pop("mesh", None), values.pop("config", None)
    if not isinstance(mesh, RingMesh):
        got = "none" if mesh is None else type(mesh).__name__
        raise RingMeshError(f'backend="{NAME}": expected to be told the mesh, got {got}; {_WHAT_TO_PASS}')
    if config is not None:
        if not isinstance(config, RingConfig) or set(values) - {"layout", "pattern"}:
            raise RingConfigError.wrong(
                "options: config", "a RingConfig, mesh, layout and pattern", sorted(values), "drop others"
            )
        options = Options.make(config)
        values = {"layout": config.layout, "pattern": pattern_from_config(config), **values}
    missing = [key for key in ("pattern", "layout") if values.get(key) is None]
    if missing:
        raise RingConfigError(f"options: expected {' and '.join(missing)}, got none; {_WHAT_TO_PASS}")
    pattern, layout = values.pop("pattern"), values.pop("layout")
    if config is None:
        options = Options(**values)
    make_ring_context(
        pattern, layout, mesh, options
    )  # raises for a wrong pattern, or a layout of another ring
    # If no mask is read, padding slots cannot be distinguished from tokens.
    if replace_masks and isinstance(layout, str) and mesh.ring_size > 1:
        raise RingConfigError.wrong(
            "options: layout", "a Layout with masks='replace'", layout, "pass ds_ring.make_layout(...)"
        )
    return StaticSource(mesh, pattern, layout, options)


# [Note: refusals of a backend]
# Dynamo wraps an error of a backend into one of its own. So a refused graph becomes a function that raises
# the original RingError whenever it is called, and, with a mesh, notifies the other ranks first.
def backend(
    module: GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **further: Any
) -> Compiled:
    """Compile a Dynamo graph, as torch.compile calls a backend by its name.

    Raises:
        RingError: nothing here; the function that it returns does ([Note: refusals of a backend]).
    """
    options = options or {}
    session = options.get("session")
    mesh = session.run_mesh if isinstance(session, RingSession) else options.get("mesh")
    try:
        read = BackendOptions.read(options)
        mesh, registered = read.source.mesh, RegisteredSource(read.source)
        Rewriting(registered.handle, read.masks == "replace").run(module)
    except RingError as error:
        refusal = error

        def refused(*_: Any) -> Any:  # [Note: refusals of a backend]
            if not isinstance(mesh, RingMesh):
                raise copy(refusal)
            with collective(mesh, "attention"):
                raise copy(refusal)  # each call is a collective that refuses

        return refused
    inner = {"options": dict(read.inner_options)} if read.inner_options else {}
    compiled = lookup_backend(read.inner)(module, list(inputs), **further, **inner)

    def run(*args: Any) -> Any:
        assert registered.source is read.source  # keeps the number in the graph alive
        return compiled(*args)

    return run


def backend_of(session: RingSession) -> Callable[..., Compiled]:
    """Return the backend that knows a session; torch.compile's `options` say the rest."""

    def ds_ring(
        module: GraphModule,
        inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        **further: Any,
    ) -> Compiled:
        return backend(module, inputs, options={"session": session} | dict(options or {}), **further)

    return ds_ring
