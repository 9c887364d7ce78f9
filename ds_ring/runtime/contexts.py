"""Find the context of a call: by its integer handle, or by pattern, layout, mesh and options.

Owns the table of each mesh. A context is kept alive by that table and by whoever holds it.
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

KEPT_CONTEXTS = 128  # per mesh; whoever holds an older one keeps it alive


def context_of(handle: int) -> RingContext:
    """Return the context behind a handle."""
    context = CONTEXTS.get(handle)
    assert context is not None, (
        f"ring attention context {handle} is gone: its mesh was dropped before this call"
    )
    return context


def context_for(pattern: Pattern, layout: Layout | str, mesh: RingMesh, options: Options) -> RingContext:
    """Return the one context for these arguments; made when first asked for, dropped with its mesh.

    Raises:
        RingPatternError, RingLayoutError: no pattern or layout at all, or a layout for another ring.
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
            f"layout: expected one for the mesh's ring, got one that is for {layout.ring_size} ranks, the"
            f" mesh's ring has {mesh.ring_size}; build it with make_layout(..., ring_size={mesh.ring_size})"
        )
    return _kept(mesh, (pattern, layout, options), lambda: RingContext(pattern, layout, mesh, options))


def first_queries(
    context: RingContext, local_tokens: int, device: torch.device
) -> tuple[RingContext, Tensor]:
    """Return the context that computes again what `options.recompute` says, and the slots that it leaves out.

    Args:
        context: of the whole pass.
        local_tokens: slots of a rank's shard.
        device: of the tensors.

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
    """Return a context whose every call raises `error`: for arguments that are refused before there is one.

    Why not raise at once: the other ranks are about to call, and would wait (agreement's [Note: refusals]).
    And in a compiled graph only an operator can raise an error as it is.
    """
    key = (type(error), str(error))
    return _kept(mesh, key, lambda: RingContext(Causal(), "contiguous", mesh, Options(), refused=error))


def _kept(mesh: RingMesh, key: tuple[Any, ...], make: Callable[[], RingContext]) -> RingContext:
    """Return the context of a key; the oldest go, since documents make a new one for every batch."""
    table: OrderedDict[Any, RingContext] = mesh.contexts
    if key not in table:
        table[key] = make()
    table.move_to_end(key)
    # A handle in a compiled graph is used for as long as the graph, so its context is never dropped.
    passing = [old for old, context in table.items() if not context.in_a_graph]
    if len(passing) > KEPT_CONTEXTS:
        del table[passing[0]]
    return table[key]
