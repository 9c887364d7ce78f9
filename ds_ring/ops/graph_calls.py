"""Describe pattern, score_mod and options of a call inside a function that torch.compile traces.

Loaded by the first such call. [Note: handles in compiled code] in `handles.py` says why.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.config.pass_options import PassOptions
from ds_ring.errors import RingConfigError, RingError
from ds_ring.masks.catalog import Causal, Chunked, DilatedWindow, Full, PrefixLM, Sinks, SlidingWindow
from ds_ring.masks.dilated import Dilated
from ds_ring.masks.mask_mod import Alibi, MaskMod, ScoreFunction, Softcap
from ds_ring.masks.pattern import Intersection, Pattern, Union
from ds_ring.ops.frontend import Settings, made_context
from ds_ring.ops.handles import constant, constant_in_graphs, is_constant, number_of
from ds_ring.ops.refusal import Refusal
from ds_ring.schedule.layout import Layout

# Patterns and score_mods that a compiled function may make itself, with their fields: see [Note: handles in
# compiled code]. Others are handed over as objects.
_MADE_OF: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Causal, ()),
    (Full, ()),
    (SlidingWindow, ("window", "causal")),
    (DilatedWindow, ("window", "rate", "causal")),
    (Sinks, ("sinks", "causal")),
    (Chunked, ("chunk", "causal")),
    (PrefixLM, ("prefix",)),
    (Dilated, ("segment_lengths", "dilation_rates", "causal", "head_offsets")),
    (Intersection, ("first", "second")),
    (Union, ("first", "second")),
    (Softcap, ("cap",)),
    (Alibi, ("slopes",)),
)
_PARTS, _OBJECT = "ds_ring parts", "ds_ring object"


def described(value: Any, objects: list[Any]) -> Any:
    """Return a pattern or a score_mod as constants; what is none is put into `objects`. Traced by Dynamo."""
    for kind, names in _MADE_OF:
        if type(value) is kind:
            return (_PARTS, kind, *[described(getattr(value, name), objects) for name in names])
    if type(value) is MaskMod and value.made_in_a_graph:
        objects.append(value.function)
        return (_PARTS, MaskMod, (_OBJECT, len(objects) - 1), value.is_known_causal)
    if isinstance(value, tuple):
        return tuple([described(one, objects) for one in value])
    if value is None or isinstance(value, (bool, int, float, str)):
        return constant(value)
    objects.append(value)
    return _OBJECT, len(objects) - 1


def _made_again(value: Any, objects: tuple[Any, ...]) -> Any:
    """Return what `described` was given."""
    if isinstance(value, tuple) and value[:1] == (_PARTS,):
        return value[1](*(_made_again(one, objects) for one in value[2:]))
    if isinstance(value, tuple) and value[:1] == (_OBJECT,):
        found = objects[value[1]]
        lost = is_dataclass(found) and any(one.init and not hasattr(found, one.name) for one in fields(found))
        if lost:
            kind = type(found).__name__
            raise RingConfigError(
                f"{kind}: expected one that is made outside of the compiled function, got one that is made"
                f" inside, whose attributes torch.compile does not hand over; make the {kind} before the call"
            )
        return found
    if isinstance(value, tuple) and not is_constant(value):
        return tuple(_made_again(one, objects) for one in value)
    return number_of(value)


def handle_of(
    pattern: Pattern, layout: Layout | str, mesh: RingMesh, settings: Settings,
    score_mod: ScoreFunction | None,
) -> int | Refusal:  # fmt: skip
    """Return the handle of a call, or why it is refused, in a function that torch.compile traces."""
    objects: list[Any] = []
    asked = described(pattern, objects), described(score_mod, objects)
    scale, kernel, options = settings
    return _handle_of(*asked, layout, mesh, (constant(scale), kernel), options, *objects)


@constant_in_graphs
def _handle_of(
    pattern: Any, score_mod: Any, layout: Layout | str, mesh: RingMesh, settings: tuple[Any, str],
    options: PassOptions | None, *objects: Any,
) -> int | Refusal:  # fmt: skip
    check_mesh(mesh)
    try:
        asked, mod = _made_again(pattern, objects), _made_again(score_mod, objects)
        scale, kernel = settings
        given = number_of(scale), kernel, options
        context = made_context(asked, layout, mesh, given, mod, keeps_functions=True)
    except RingError as error:
        return type(error).__name__, str(error)
    context.in_a_graph = True
    return context.handle
