"""The context of calls over keys that queries choose, whose arguments ring attention checks otherwise."""

from __future__ import annotations

from functools import partial

from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.masks.pattern import Pattern, cache_by_pattern
from ds_ring.ops.checks import check_layout, check_not_transformed
from ds_ring.ops.context import RingContext, make_ring_context
from ds_ring.ops.options import Options
from ds_ring.schedule.layout import Layout


def selection_context(
    pattern: Pattern, layout: Layout, mesh: RingMesh, hop_timeout_s: float, scale: float | None = None,
    by_head: bool = False,
) -> RingContext:  # fmt: skip
    """Return the context of a call; with `by_head` the pattern may differ between heads.

    Raises:
        RingConfigError, RingLayoutError: Ulysses ranks, a layout of another ring, or a torch.func transform.
        RingPatternError: no pattern, or one that differs between heads.
    """
    check_not_transformed("ring_select and what is built on it")
    if mesh.ulysses_size > 1:
        raise RingConfigError.wrong("ring_select", "ulysses_size 1", mesh.ulysses_size, "use a larger ring")
    # Not a name: the layout of a name depends on the pattern.
    check_layout(layout, mesh.ring_size)
    context = make_ring_context(
        pattern, layout, mesh, Options(scale=scale, hop_timeout_seconds=hop_timeout_s)
    )
    if not by_head and not _is_same_for_heads(pattern):
        # a choice may be that of several query heads, and the number of query heads is not known here
        raise RingPatternError.wrong(
            "pattern", "one that is the same for all heads", f"{pattern}",
            "hide keys of a head in scores_fn: give them the score -inf (with_positions=True)",
        )  # fmt: skip
    return context


_HEADS = 64  # at which two patterns of heads are compared


@partial(cache_by_pattern, 16)
def _is_same_for_heads(pattern: Pattern) -> bool:
    return pattern.bind(tuple(range(_HEADS)), _HEADS, _HEADS).is_same_for_heads
