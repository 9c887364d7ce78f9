"""Put the ring into a model that does not know it: `torch.compile(model, backend="ds_ring")`.

The attention of the graph is replaced (graph_rewrite.py); the graph then goes to Inductor, or to the backend
that `inner` names.

    options = {"mesh": mesh, "pattern": ds_ring.Causal(), "layout": layout}
    model = torch.compile(model, backend="ds_ring", options=options)
    logits = model(input_ids=ids_local, position_ids=positions_local, use_cache=False).logits

Under `ds_ring.initialize` say `engine.compile(backend="ds_ring")`: the session knows the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from torch._dynamo import list_backends, lookup_backend
from torch.fx import GraphModule

from ds_ring.config.section import RingConfig, pattern_from_config
from ds_ring.errors import RingConfigError, RingError, RingMeshError
from ds_ring.integrations.compile.graph_rewrite import Rewriting
from ds_ring.integrations.compile.graph_sharding import RegisteredSource, SessionSource, StaticSource
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.module import options_from_config
from ds_ring.runtime.context import Options, context_for, refuse
from ds_ring.runtime.mesh import RingMesh

NAME = "ds_ring"
_OF_A_PASS = tuple(
    f.name for f in fields(Options) if f.name not in ("scale", "kernel_options", "chunk_bytes")
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

    source: StaticSource | SessionSource  # where tokens lie
    inner: str = "inductor"  # the backend for the rewritten graph, by its name
    inner_options: Mapping[str, Any] | None = None  # that backend's own options
    # "check" raises for masks that cannot be read; "replace": every mask tensor means the pattern
    masks: str = "check"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> BackendOptions:
        """Read the options of torch.compile; with a session, mesh and pattern are its own."""
        given = dict(options)
        session = given.pop("session", None)
        known = _OF_THE_BACKEND if session is not None else (*_OF_THE_RING, *_OF_THE_BACKEND)
        for key in given:
            if key not in known:
                close = get_close_matches(str(key), known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                why = " (the session of ds_ring.initialize knows the ring)" if session is not None else ""
                raise RingConfigError(f"options: expected some of {', '.join(known)}{why}, got {key!r}{hint}")
        own = {key: given.pop(key) for key in _OF_THE_BACKEND if key in given}
        if own.get("inner", "inductor") not in list_backends(exclude_tags=()):
            raise RingConfigError(
                f"options: inner: expected one of torch's backends ({', '.join(list_backends())}), got"
                f" {own['inner']!r}"
            )
        if own.get("masks", "check") not in ("check", "replace"):
            raise RingConfigError(f"options: masks: expected one of check, replace, got {own['masks']!r}")
        if session is None:
            return cls(_static_source(given, own.get("masks") == "replace"), **own)
        if not isinstance(session, RingSession):
            raise RingConfigError(
                "options: session: expected the engine.ring of ds_ring.initialize, got"
                f" {type(session).__name__}"
            )
        return cls(SessionSource(session), **own)


def _static_source(given: dict[str, Any], replace_masks: bool) -> StaticSource:
    mesh, config = given.pop("mesh", None), given.pop("config", None)
    if not isinstance(mesh, RingMesh):
        got = "none" if mesh is None else type(mesh).__name__
        raise RingMeshError(f'backend="{NAME}": expected to be told the mesh, got {got}; {_WHAT_TO_PASS}')
    if config is not None:
        if not isinstance(config, RingConfig) or set(given) - {"layout", "pattern"}:
            raise RingConfigError(
                "options: config: expected a RingConfig, and beside it only mesh, layout and pattern, got"
                f" {type(config).__name__} and {', '.join(given) or 'nothing'}"
            )
        options = options_from_config(config)
        given = {"layout": config.layout, "pattern": pattern_from_config(config), **given}
    missing = [key for key in ("pattern", "layout") if given.get(key) is None]
    if missing:
        raise RingConfigError(f"options: expected {' and '.join(missing)}, got none; {_WHAT_TO_PASS}")
    pattern, layout = given.pop("pattern"), given.pop("layout")
    if config is None:
        options = Options(**given)
    context_for(pattern, layout, mesh, options)  # refuses what is no pattern, or a layout of another ring
    # Without a mask that is read nothing tells padding slots from tokens.
    if replace_masks and isinstance(layout, str) and mesh.ring_size > 1:
        raise RingConfigError(
            f"options: layout: expected a layout of known length beside masks='replace', got {layout!r}; pass"
            f" ds_ring.make_layout({layout!r}, tokens=T, ring_size={mesh.ring_size})"
        )
    return StaticSource(mesh, pattern, layout, options)


# [Note: refusals of a backend]
# Dynamo wraps what a backend raises into an error of its own. So a refused graph becomes a function that
# raises the RingError, as it is, whenever it is called, and tells the other ranks first where there is a
# mesh.
def backend(
    module: GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **more: Any
) -> Compiled:
    """Compile a Dynamo graph, as torch.compile calls a backend by its name.

    Raises:
        RingError: nothing here; the function that it returns does ([Note: refusals of a backend]).
    """
    options = options or {}
    session = options.get("session")
    mesh = session.mesh if isinstance(session, RingSession) else options.get("mesh")
    try:
        read = BackendOptions.read(options)
        mesh, registered = read.source.mesh, RegisteredSource(read.source)
        Rewriting(registered.handle, read.masks == "replace").run(module)
    except RingError as error:
        refusal = error

        def refused(*_: Any) -> Any:  # [Note: refusals of a backend]
            if isinstance(mesh, RingMesh):
                refuse(mesh, refusal)
            raise refusal

        return refused
    own = {"options": dict(read.inner_options)} if read.inner_options else {}
    compiled = lookup_backend(read.inner)(module, list(inputs), **more, **own)

    def run(*args: Any) -> Any:
        assert registered.source is read.source  # keeps the number in the graph alive
        return compiled(*args)

    return run


def backend_of(session: RingSession) -> Callable[..., Compiled]:
    """Return the backend that knows a session; torch.compile's `options` say the rest."""

    def ds_ring(
        module: GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **more: Any
    ) -> Compiled:
        return backend(module, inputs, options={"session": session} | dict(options or {}), **more)

    return ds_ring
