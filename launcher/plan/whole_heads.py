"""Compare two ways of a delta rule's states: a scan over all ranks, and Ulysses by `states_by_heads()`.

A scan sends states, log2 of the runs times one after the other, whatever the length of the sequence, and its
kernels compute the transition as further columns. By heads two all-to-alls move q, k, v, gates and outputs;
a scan between ring ranks, of a rank's heads, is left where there is more than one. Owns the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ds_ring.layers.scan.sequence_runs import sequence_runs
from ds_ring.schedule.layout import Layout

from .estimate import SWAPS, Estimate, swap_seconds
from .layer_passes import layout_of, sampled_ranks
from .other_layers import FLOAT, LayerCost, LayerSetting, Recurrence, layer_cost
from .training_setting import ELEMENT_BYTES, TrainingSetting


class StatesWay(NamedTuple):
    """Hold one way, of one layer in both passes."""

    bytes_sent: int  # by the rank that sends most
    depth: int  # messages that wait for each other, of a pass
    seconds: float  # waiting and arithmetic of the states


class StatesAdvice(NamedTuple):
    """Say which way is faster for the layers of a kind."""

    kind: str
    ulysses_size: int  # of the second way; another one than the plan's where that has none
    scan: StatesWay
    by_heads: StatesWay
    # T/P below which the second way is faster; 0 if it never is, None if always
    pays_below_tokens_per_rank: int | None

    @property
    def takes_heads(self) -> bool:
        """Return whether the second way is faster here."""
        return self.by_heads.seconds < self.scan.seconds


def states_by_heads(found: Estimate) -> tuple[StatesAdvice, ...]:
    """Return the comparison for each kind of layer whose heads Ulysses can divide."""
    advice = []
    for cost in found.other_layers:
        kind, setting = cost.kind, found.setting
        if not isinstance(kind, Recurrence) or not kind.heads:
            continue
        setting = _with_ulysses(setting, kind.heads)
        if setting.ulysses_size > 1 and kind.heads % setting.ulysses_size == 0:
            advice.append(_compared(kind, cost, found, setting))
    return tuple(advice)


def _with_ulysses(setting: TrainingSetting, heads: int) -> TrainingSetting:
    """Return the setting if it has Ulysses ranks, else one with the most that its heads allow."""
    ranks = setting.ring_size
    if setting.ulysses_size > 1:
        return setting
    sizes = (heads, setting.model.heads, setting.model.kv_heads, ranks)
    most = max(size for size in range(1, ranks + 1) if not any(n % size for n in sizes))
    return replace(setting, ring_size=ranks // most, ulysses_size=most, ring_ranks_per_node=None)


def _compared(kind: Recurrence, scan: LayerCost, planned: Estimate, setting: TrainingSetting) -> StatesAdvice:
    layout, size, hardware = layout_of(setting), setting.ulysses_size, setting.hardware
    element, ranks = ELEMENT_BYTES[setting.dtype], sampled_ranks(setting.ring_size)
    cut = LayerSetting(layout, size, setting.batch, element, setting.mix[0][0])
    of_cut = sorted({rank * size + part for rank in ranks for part in (0, size - 1)})
    rates = hardware, setting.dtype, setting.bytes_per_s, setting.kernel_that_runs
    halo = layer_cost(kind._replace(state=0, transition=0), 1, cut, of_cut, *rates)
    # On one ring rank the whole sequence is one run, of which no transition is computed.
    mine = kind._replace(
        before=0, state=kind.state // size, transition=kind.transition // size,
        matrix=kind.matrix and setting.ring_size > 1,
    )  # fmt: skip
    rest = layer_cost(mine, 1, cut._replace(parts=1), ranks, *rates)
    tokens = layout.local_tokens // size
    own = setting.batch * tokens * (kind.swapped * element + kind.swapped_floats * FLOAT)
    moving = swap_seconds(own, size, hardware)
    waiting = SWAPS * (hardware.link_latency_s + hardware.hop_overhead_s)
    again = 1 + setting.checkpointing  # forward passes

    def seconds(cost: LayerCost) -> float:
        return again * cost.forward_s + cost.backward_s

    swaps = (again + 1) * (moving + waiting)
    parts = (halo, rest)
    by_heads = StatesWay(
        _bytes(parts, setting.checkpointing) + (again + 1) * (own * (size - 1) // size),
        SWAPS + _depth(kind._replace(state=0), layout, size) + _depth(mine, layout, 1),
        sum(map(seconds, parts)) + swaps,
    )
    depth = _depth(kind, planned.layout, planned.setting.ulysses_size)
    whole = StatesWay(_bytes((scan,), setting.checkpointing), depth, seconds(scan))
    computed = [seconds(one) - again * one.waits[0] - one.waits[1] for one in (scan, rest)]
    slower_a_token = ((again + 1) * moving - computed[0] + computed[1]) / tokens
    return StatesAdvice(
        kind.name,
        size,
        whole,
        by_heads,
        _pays_below(tokens, whole.seconds - by_heads.seconds, slower_a_token),
    )


def _pays_below(tokens: int, gained_s: float, slower_a_token: float) -> int | None:
    """Return up to which T/P a way is faster that gains so much here, and loses so much with each token."""
    fixed_s = gained_s + slower_a_token * tokens  # gained without any token
    if slower_a_token <= 0:
        return None if fixed_s >= 0 else 0
    return max(0, int(fixed_s / slower_a_token))


def _bytes(parts: Sequence[LayerCost], checkpointing: bool) -> int:
    return sum((1 + checkpointing) * one.bytes_sent[0] + one.bytes_sent[1] for one in parts)


def _depth(kind: Recurrence, layout: Layout, parts: int) -> int:
    """Return how many messages of a forward pass wait for each other: a halo, a scan's rounds, its shift."""
    runs = sequence_runs(layout, parts).ranks
    if not (runs != runs[0]).any():
        return 0
    return bool(kind.before) + ((len(runs) - 1).bit_length() + 1 if kind.state else 0)


def sentences(found: Estimate) -> list[str]:
    """Return what the report says of each comparison."""
    return [_sentence(one, found) for one in states_by_heads(found)]


def _sentence(one: StatesAdvice, found: Estimate) -> str:
    setting, below = found.setting, one.pays_below_tokens_per_rank
    here = f"{setting.tokens // (setting.ring_size * setting.ulysses_size):,}"
    always = {None: "at every length", 0: "never faster"}
    when = always.get(below, f"faster below T/P = {below or 0:,} (here {here})")
    own = one.ulysses_size == setting.ulysses_size
    needs = "" if own else f'"ulysses_size": {one.ulysses_size} and '
    scan, heads = one.scan, one.by_heads
    return (
        f"{one.kind}: {'take' if one.takes_heads else 'keep the scan, not'} {needs}"
        f"engine.ring.states_by_heads(). The figures are those of a scan: a layer {scan.seconds * 1e3:.3g}"
        f" ms, {scan.bytes_sent / 1e6:,.1f} MB sent, {scan.depth} messages in a row a pass. By heads"
        f" {heads.seconds * 1e3:.3g} ms, {heads.bytes_sent / 1e6:,.1f} MB, {heads.depth} in a row: {when}"
    )
