"""Compare the ways in which a sequence can span nodes: one ring, two levels, Ulysses inside the nodes.

Owns which ways there are for a setting, what each takes, and the advice. Each is estimated as any setting is,
so the estimate is of the runtime's own choice for these sizes: `choose_directions` of `schedule/plan.py`
takes two levels by itself, the JSON sets Ulysses ranks. One ring of all ranks is a comparison,
which the runtime makes only where two levels would send no less between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ds_ring.plugin import PASSES

from .estimate import Estimate, estimate
from .layer_passes import plans_of, slowest_passes, total_cost
from .other_layers import Selection
from .pass_time import EXPOSED, PassCost
from .training_setting import TrainingSetting, like_in_hops

# The shortest shard for which compute hides transfers, by bisection on the cost model.

MIN_TOKENS, MAX_TOKENS = 1 << 6, 1 << 22  # tokens of a shard that are looked at
STEP = 4  # between two shards on the way down
FINE = 64  # the search ends when it is exact to 1 / FINE
HOPS_ALIKE = 0.05  # of seconds waited for one of compute, at lengths a factor of STEP apart: as good as equal


class Hiding(NamedTuple):
    """Say from which shard on transfers hide, or why they never do."""

    tokens: int | None  # of a ring rank's shard, from which on they hide, to 1 / 64; None if they never do
    never: str | None  # why not; None if they do


def hides(cost: PassCost) -> bool:
    """Return whether no computing hop waits, and the whole pass waits at most 5 % of its time."""
    # (The last gradients come home when nothing is left to compute: they count in the whole only.)
    return cost.late_hops == 0 and waiting(cost) <= EXPOSED


def waiting(cost: PassCost) -> float:
    """Return the share of the pass, between 0 and 1, in which the device waits for messages."""
    return cost.exposed_s / cost.seconds if cost.seconds else 0.0


# [Note: from which on]
# Very short shards hide because posting a message takes longer than the message; longer ones may not, until
# compute, which grows faster, has caught up. The search therefore comes down from long shards to the first
# that does not hide, and bisects between that one and the last that does.
def hiding_shard(setting: TrainingSetting) -> Hiding:
    """Return the fewest tokens per ring rank from which on transfers hide; [Note: from which on].

    Raises:
        RingError: layout and pattern do not go together.
    """
    if setting.ring_size == 1:
        return Hiding(None, "a ring of one sends nothing")
    if not setting.mix:
        return Hiding(None, "all attention is over chosen keys, of which the rows are asked for")
    if not setting.overlap:
        return Hiding(None, 'with "overlap": false every hop waits for its transfer')
    low = high = _most(setting)
    if not hides(_cost(setting, high)):
        return Hiding(None, _why(setting, high))
    while hides(_cost(setting, low)):
        high, low = low, low // STEP
        if low < max(MIN_TOKENS, setting.ulysses_size):
            return Hiding(high, None)
    unit = setting.ulysses_size
    while high - low > max(low // FINE, unit):
        middle = (low + high) // 2 // unit * unit
        low, high = (low, middle) if hides(_cost(setting, middle)) else (middle, high)
    return Hiding(high, None)


def _most(setting: TrainingSetting) -> int:
    """Return a power of two, times the Ulysses size, no shorter than the setting's own shard."""
    most = MAX_TOKENS * setting.ulysses_size
    while most * setting.ring_size < setting.tokens:
        most *= STEP
    return most


def _cost(setting: TrainingSetting, local_tokens: int) -> PassCost:
    """Return the cost of all layers on the slowest of up to eight ranks, over the planned ring's links."""
    return total_cost(slowest_passes(like_in_hops(setting, local_tokens), setting.bytes_per_s))


def _why(setting: TrainingSetting, most: int) -> str:
    long, shorter = _cost(setting, most), _cost(setting, most // STEP)
    wait = f"{waiting(long):.0%} of a pass waits at T/P = {most:,}"
    now, before = (cost.exposed_s / cost.compute_s for cost in (long, shorter))
    if now > (1 - HOPS_ALIKE) * before:
        return f"transfers and compute of this pattern and layout grow alike ({wait})"
    return f"no shard that was looked at is long enough for these links ({wait})"


ALIKE = 0.02  # of a step's time: less is no reason to change anything


class NodeOrder(NamedTuple):
    """Hold one way to span the nodes."""

    name: str  # for the table
    setting: TrainingSetting  # with its sizes
    runs: bool  # whether the runtime does this with those sizes; else it is there for comparison
    # attention_s, waiting_s, step_s: of a step, its attention, and of that waiting for messages
    attention_s: float
    waiting_s: float
    step_s: float
    peak_bytes: int  # of a device
    fits: bool  # whether it does


class NodeOrders(NamedTuple):
    """Hold all ways, the setting's own first, and what to do."""

    rows: tuple[NodeOrder, ...]  # the ways
    best: NodeOrder  # the one to take, of those that run
    one_ring_hides: Hiding  # from which shard on one ring of all ranks waits at most 5 % of its time
    advice: str  # one sentence


def node_orders(found: Estimate) -> NodeOrders | None:
    """Return the ways in which a plan's sequence can span its nodes; None where it has one node."""
    setting = found.setting
    if setting.ring_size * setting.ulysses_size <= setting.hardware.devices_per_node:
        return None
    rows = (_row(setting, found), *map(_row, _others(setting)), *_tiles(setting))
    running = [row for row in rows if row.runs]
    fitting = [row for row in running if row.fits] or running
    best = min(fitting, key=lambda row: row.step_s)
    if rows[0] in fitting and rows[0].step_s <= (1 + ALIKE) * best.step_s:
        best = rows[0]
    hides = hiding_shard(_one_ring(setting))
    others = sorted((row for row in rows if row is not best), key=lambda row: row.attention_s)
    figures = "; ".join(
        f"{row.name} {row.attention_s:.3g} s, {_share(row)}{'' if row.fits else ', does not fit'}"
        for row in others
    )
    advice = f"{best.name}: {best.attention_s:.3g} s of attention a step, {_share(best)}"
    advice += f" ({figures})" if figures else ""
    if best is not rows[0]:
        sizes = f'"ring_size": {best.setting.ring_size}, "ulysses_size": {best.setting.ulysses_size}'
        if best.setting.transport != setting.transport:
            sizes += f', "transport": "{best.setting.transport}"'
        advice = f"across nodes take {sizes}: {advice}"
    if hides.tokens is not None:
        advice += f"; from T/P = {hides.tokens:,} on one ring of all hides its transfers"
    return NodeOrders(rows, best, hides, advice)


def _one_ring(setting: TrainingSetting) -> TrainingSetting:
    ring = setting.ring_size * setting.ulysses_size
    return replace(setting, ring_size=ring, ulysses_size=1, ring_ranks_per_node=0)


def _others(setting: TrainingSetting) -> Iterator[TrainingSetting]:
    """Yield the other ways."""
    whole = replace(setting, ring_size=setting.ring_size * setting.ulysses_size, ulysses_size=1)
    inside = math.gcd(setting.model.kv_heads, setting.model.heads, setting.hardware.devices_per_node)
    ways = [whole] if _has_levels(whole) else []
    ways.append(_one_ring(setting))
    selects = any(isinstance(kind, Selection) for kind in setting.model.other_layers)  # not with Ulysses
    if inside > 1 and whole.ring_size % inside == 0 and not selects:
        ways.append(replace(setting, ring_size=whole.ring_size // inside, ulysses_size=inside))
    own = _sizes(setting)
    yield from (way for way in ways if _sizes(way) != own)


def _sizes(setting: TrainingSetting) -> tuple[int, int, bool]:
    return setting.ring_size, setting.ulysses_size, _has_levels(setting)


def _has_levels(setting: TrainingSetting) -> bool:
    """Return whether some layer's plan has two levels."""
    ways = (plan.classes[0].directions for plan, _ in plans_of(setting))
    return any(way.ranks_per_node > 0 for directions in ways for way in directions)


def _row(setting: TrainingSetting, found: Estimate | None = None) -> NodeOrder:
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


def _tiles(setting: TrainingSetting) -> Iterator[NodeOrder]:
    """Yield the row of two-dimensional tiles, where the package has them."""
    if "tiles" not in PASSES:
        return
    from .tile_passes import grids_that_run, on_tiles

    planned = on_tiles(setting)
    if planned is None:
        return
    found = estimate(planned)
    grids = grids_that_run(planned, found.layout, planned.mix[0][0])
    name = " and ".join(dict.fromkeys(f"{grid.key_ranks} x {grid.query_ranks}" for grid in grids))
    times = (found.attention_s, found.exposed_s + found.swap_s, found.step_s)
    yield NodeOrder(f"tiles {name}", planned, True, *times, found.peak.total, found.fits)


def _share(row: NodeOrder) -> str:
    return f"{row.waiting_s / row.attention_s:.0%} waiting" if row.attention_s else "none waiting"
