"""Compare the ways in which a sequence can span nodes: one ring, two levels, Ulysses inside the nodes.

Owns which ways there are for a setting, what each takes, and the advice. Each is estimated as any setting is,
so what stands here is what the runtime does with the sizes named: two levels come about by themselves
(`schedule/plan.py`, `choose_directions`), Ulysses ranks by the JSON. One ring of all ranks is a comparison,
which the runtime makes only where two levels would send no less between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from .estimate import Estimate, estimate
from .hiding import Hiding, hiding_shard
from .layer_passes import plans_of
from .training_setting import Setting

ALIKE = 0.02  # of a step's time: less is no reason to change anything


class NodeOrder(NamedTuple):
    """Hold one way to span the nodes.

    Attributes:
        name: what it is.
        setting: with its sizes.
        runs: whether the runtime does this with those sizes; else it is there for comparison.
        attention_s, waiting_s, step_s: of a step, its attention, and of that waiting for messages.
        peak_bytes: of a device.
        fits: whether it does.
    """

    name: str
    setting: Setting
    runs: bool
    attention_s: float
    waiting_s: float
    step_s: float
    peak_bytes: int
    fits: bool


class NodeOrders(NamedTuple):
    """Hold all ways, the setting's own first, and what to do.

    Attributes:
        rows: the ways.
        best: the one to take, of those that run.
        one_ring_hides: from which shard on one ring of all ranks waits at most 5 % of its time.
        advice: one sentence.
    """

    rows: tuple[NodeOrder, ...]
    best: NodeOrder
    one_ring_hides: Hiding
    advice: str


def node_orders(found: Estimate) -> NodeOrders | None:
    """Return the ways in which a plan's sequence can span its nodes; None where it has one node."""
    setting = found.setting
    if setting.ring_size * setting.ulysses_size <= setting.hardware.devices_per_node:
        return None
    rows = (_row(setting, found), *map(_row, _others(setting)))
    running = [row for row in rows if row.runs]
    fitting = [row for row in running if row.fits] or running
    best = min(fitting, key=lambda row: row.step_s)
    if rows[0] in fitting and rows[0].step_s <= (1 + ALIKE) * best.step_s:
        best = rows[0]
    hides = hiding_shard(_one_ring(setting))
    return NodeOrders(rows, best, hides, _advice(rows, best, hides))


def _one_ring(setting: Setting) -> Setting:
    ring = setting.ring_size * setting.ulysses_size
    return replace(setting, ring_size=ring, ulysses_size=1, ring_ranks_per_node=0)


def _others(setting: Setting) -> Iterator[Setting]:
    """Yield the ways beside the setting's own."""
    whole = replace(setting, ring_size=setting.ring_size * setting.ulysses_size, ulysses_size=1)
    inside = math.gcd(setting.model.kv_heads, setting.model.heads, setting.hardware.devices_per_node)
    ways = [whole] if _has_levels(whole) else []
    ways.append(_one_ring(setting))
    if inside > 1 and whole.ring_size % inside == 0:
        ways.append(replace(setting, ring_size=whole.ring_size // inside, ulysses_size=inside))
    own = _sizes(setting)
    yield from (way for way in ways if _sizes(way) != own)


def _sizes(setting: Setting) -> tuple[int, int, bool]:
    return setting.ring_size, setting.ulysses_size, _has_levels(setting)


def _has_levels(setting: Setting) -> bool:
    """Return whether some layer's plan goes by nodes."""
    ways = (plan.classes[0].directions for plan, _ in plans_of(setting))
    return any(way.ranks_per_node > 0 for directions in ways for way in directions)


def _row(setting: Setting, found: Estimate | None = None) -> NodeOrder:
    if found is None:
        found = estimate(setting)
    ring, ulysses, levels = _sizes(setting)
    order = "two levels" if levels else "one ring"
    name = f"{order}, {ring}" if ulysses == 1 else f"Ulysses {ulysses} x ring {ring}"
    # What the runtime does with these sizes may be the other order.
    runs = levels == _has_levels(replace(setting, ring_ranks_per_node=None))
    waiting = found.exposed_s + found.swap_s
    times = (found.attention_s, waiting, found.step_s)
    return NodeOrder(name, setting, runs, *times, found.peak.total, found.fits)


def _advice(rows: tuple[NodeOrder, ...], best: NodeOrder, hides: Hiding) -> str:
    """Return which to take, with the figures that decide."""
    own = rows[0]
    others = sorted((row for row in rows if row is not best), key=lambda row: row.attention_s)
    figures = "; ".join(
        f"{row.name} {row.attention_s:.3g} s, {_share(row)}{'' if row.fits else ', does not fit'}"
        for row in others
    )
    said = f"{best.name}: {best.attention_s:.3g} s of attention a step, {_share(best)}"
    said += f" ({figures})" if figures else ""
    if best is not own:
        sizes = f'"ring_size": {best.setting.ring_size}, "ulysses_size": {best.setting.ulysses_size}'
        said = f"across nodes take {sizes}: {said}"
    if hides.tokens is not None:
        said += f"; from T/P = {hides.tokens:,} on one ring of all hides its transfers"
    return said


def _share(row: NodeOrder) -> str:
    return f"{row.waiting_s / row.attention_s:.0%} waiting" if row.attention_s else "none waiting"
