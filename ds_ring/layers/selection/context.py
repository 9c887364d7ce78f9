"""The context of calls over keys that queries choose, whose arguments ring attention checks otherwise."""

from __future__ import annotations

from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.checks import check_layout, check_not_transformed
from ds_ring.ops.context import RingContext, context_for
from ds_ring.ops.options import Options
from ds_ring.schedule.layout import Layout


def selection_context(
    pattern: Pattern, layout: Layout, mesh: RingMesh, hop_timeout_s: float, scale: float | None = None
) -> RingContext:
    """Return the context of a call.

    Raises:
        RingConfigError, RingLayoutError: Ulysses ranks, a layout of another ring, or a torch.func transform.
    """
    check_not_transformed("ring_select and what is built on it")
    if mesh.ulysses_size > 1:
        raise RingConfigError.wrong("ring_select", "ulysses_size 1", mesh.ulysses_size, "use a larger ring")
    # Not a name: the layout of a name depends on the pattern.
    check_layout(layout, mesh.ring_size)
    return context_for(pattern, layout, mesh, Options(scale=scale, hop_timeout_seconds=hop_timeout_s))
