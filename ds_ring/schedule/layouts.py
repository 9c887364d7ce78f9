"""Build a layout by its name. The names and their builders are rows of `ds_ring/registry.py`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from ds_ring.checked_numbers import MOST_RANKS, whole_number
from ds_ring.errors import RingLayoutError, shown
from ds_ring.masks.pattern import Pattern
from ds_ring.registry import LAYOUTS, load
from ds_ring.schedule.layout import Layout, Mix


def check_layout_name(name: str) -> None:
    """Refuse what `make_layout` does not know.

    Raises:
        RingLayoutError: with the names that there are.
    """
    if not isinstance(name, str) or name not in LAYOUTS:
        raise RingLayoutError(
            f"unknown layout {shown(name)}: expected one of {', '.join(LAYOUTS)}, got {shown(name)}"
        )


def make_layout(
    name: str = "auto",
    *,
    tokens: int,
    ring_size: int,
    pattern: Pattern | Mapping[Pattern, int] | None = None,
    multiple_of: int = 1,
    block_size: int = 1,
) -> Layout:
    """Build a layout by name.

    Args:
        name: "contiguous", "zigzag" or "striped"; or one that is made for `pattern`: "residue" (dilated),
            "balanced" (even work), "document_zigzag" (documents), "auto" (contiguous or zigzag, or balanced
            where both are uneven).
        tokens: length T of the sequence; any T >= 1.
        ring_size: number of shards P.
        pattern: what will be attended. Where layers differ, how many layers have each pattern:
            `{SlidingWindow(512): 5, Causal(): 1}`; the layout is chosen for all of them together.
        multiple_of: pad every shard to a multiple of this many slots.
        block_size: side in slots of the blocks in which the kernel computes, for "auto", which takes what
            executes least: that of the JSON with "flex"; 1 with kernels that compute pairs exactly.

    Raises:
        RingLayoutError: unknown name, sizes that are not positive integers, or a pattern that the named
            layout is not made for.
    """
    tokens = whole_number(tokens, "make_layout: tokens", RingLayoutError)
    ring_size = whole_number(ring_size, "make_layout: ring_size", RingLayoutError, MOST_RANKS)
    multiple_of = whole_number(multiple_of, "make_layout: multiple_of", RingLayoutError)
    check_layout_name(name)
    block_size = whole_number(block_size, "make_layout: block_size", RingLayoutError)
    return _made(name, tokens, ring_size, _mix_of(pattern), multiple_of, block_size if name == "auto" else 1)


def _mix_of(pattern: object) -> Mix:
    if pattern is None:
        return ()
    counted = list(pattern.items()) if isinstance(pattern, Mapping) and pattern else [(pattern, 1)]
    mix: list[tuple[Pattern, int]] = []
    for one, layers in counted:
        if not isinstance(one, Pattern):
            raise RingLayoutError(
                f"make_layout: pattern: expected a pattern, patterns with their number of layers, or None,"
                f" got {shown(one)}; use ds_ring.Causal(), say"
            )
        mix.append((one, whole_number(layers, f"make_layout: pattern: layers with {one}", RingLayoutError)))
    return tuple(mix)


# kept, because a layout made for a pattern takes tiles of the whole sequence
@lru_cache(maxsize=256)
def _made(name: str, tokens: int, ring_size: int, mix: Mix, multiple_of: int, block: int) -> Layout:
    more = (block,) if block > 1 else ()  # which "auto" alone takes
    made: Layout = load(LAYOUTS[name])(tokens, ring_size, multiple_of, mix, *more)
    return made
