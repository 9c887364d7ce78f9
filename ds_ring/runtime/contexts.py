"""Find the context of a call: by its integer handle, or by pattern, layout, mesh and options.

Owns the table of each mesh. A context is kept alive by that table and by other references.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.errors import RingError, RingLayoutError, RingPatternError, shown
from ds_ring.masks.dense import Causal
from ds_ring.masks.first_queries import FirstQueries
from ds_ring.masks.pattern import Pattern
from ds_ring.runtime.context import CONTEXTS, RingContext
from ds_ring.runtime.mesh import RingMesh, check_mesh
from ds_ring.runtime.options import Options
from ds_ring.runtime.to_device import active_fake_mode, to_device
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.layouts import check_layout_name

KEPT_CONTEXTS = 128  # per mesh; an older context lives as long as something else refers to it


def context_of(handle: int) -> RingContext:
    """Return the context of a handle."""
    context = CONTEXTS.get(handle)
    assert context is not None, (
        f"ring attention context {handle} is gone: its mesh was dropped before this call"
    )
    return context


def context_for(pattern: Pattern, layout: Layout | str, mesh: RingMesh, options: Options) -> RingContext:
    """Return the context for these arguments; it is created on first use and dropped with its mesh.

    Raises:
        RingPatternError, RingLayoutError: not a pattern or layout, or a layout for another ring size.
    """
    check_mesh(mesh)
    if not isinstance(pattern, Pattern):
        raise RingPatternError(
            f"pattern: expected a pattern, got {shown(pattern)}; use ds_ring.Causal() or ds_ring.Full()"
        )
    if not isinstance(layout, (Layout, str)):
        raise RingLayoutError(
            f'layout: expected a layout or its name, got {shown(layout)}; use make_layout(...), or "zigzag"'
        )
    if isinstance(layout, str):
        check_layout_name(layout)
    elif layout.ring_size != mesh.ring_size:
        raise RingLayoutError(
            f"layout: expected one for {mesh.ring_size} ranks (the mesh's ring), got one for"
            f" {layout.ring_size} ranks; build it with make_layout(..., ring_size={mesh.ring_size})"
        )
    return _kept(mesh, (pattern, layout, options), lambda: RingContext(pattern, layout, mesh, options))


def first_queries(
    context: RingContext, local_tokens: int, device: torch.device
) -> tuple[RingContext, Tensor]:
    """Return the context that recomputes what `options.recompute` asks for, and the slots it leaves out.

    Args:
        context: context of the whole pass.
        local_tokens: number of slots of a rank's shard.
        device: device of the tensors.

    Returns:
        the context of the sequence's first queries, and this rank's slots of later ones, int64 on the device.
    """
    key = (local_tokens, device, active_fake_mode())
    if key not in context.first_queries:
        layout, options = context.layout_for(local_tokens, device.type), context.options
        count = max(1, int(layout.tokens * options.recompute))
        first = context_for(context.pattern & FirstQueries(count), layout, context.mesh, options)
        later = np.flatnonzero(layout.positions(context.mesh.ring_rank) >= count)
        context.first_queries[key] = first, to_device(torch.from_numpy(later), device)
    return context.first_queries[key]


def refusing_context(mesh: RingMesh, error: RingError) -> RingContext:
    """Return a context whose every call raises `error`, for arguments that are wrong before any call.

    The error is not raised at once, because the other ranks are about to call and would wait ([Note:
    refusals] in agreement.py). Also, in a compiled graph only an operator can raise an error unchanged.
    """
    key = (type(error), str(error))
    return _kept(mesh, key, lambda: RingContext(Causal(), "contiguous", mesh, Options(), refused=error))


def _kept(mesh: RingMesh, key: tuple[Any, ...], make: Callable[[], RingContext]) -> RingContext:
    """Return the context of a key; the oldest are dropped, since documents make a new one for every batch."""
    table: OrderedDict[Any, RingContext] = mesh.contexts
    if key not in table:
        table[key] = make()
    table.move_to_end(key)
    # A compiled graph may use its handle at any time, so never drop its context.
    passing = [old for old, context in table.items() if not context.in_a_graph]
    if len(passing) > KEPT_CONTEXTS:
        del table[passing[0]]
    return table[key]
