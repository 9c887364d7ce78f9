"""Find the shortest shard whose arithmetic hides its transfers, by bisection on the cost model.

Fixed costs of kernel calls and hops hide nothing here: a pass of short shards takes them in full.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from .layer_passes import slowest_passes, total_cost
from .pass_time import EXPOSED, PassCost
from .training_setting import TrainingSetting, like_in_hops

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
    # (Waits after the last hop, in the batches in which gradients return, count in the whole only.)
    return cost.late_hops == 0 and waiting(cost) <= EXPOSED


def waiting(cost: PassCost) -> float:
    """Return the share of the pass, between 0 and 1, in which the device waits for messages."""
    return cost.exposed_s / cost.seconds if cost.seconds else 0.0


# [Note: from which on]
# Arithmetic grows as the square of a shard, transfers as the shard. Where a pattern makes both grow alike,
# shorter shards may hide and longer ones not: the search comes down from long shards to the first that does
# not hide, and bisects between that one and the last that does.
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
    """Return the cost of all layers on the slowest of up to eight ranks, over the planned ring's links.

    Without fixed costs: their time hides no message.
    """
    setting = replace(
        setting,
        hardware=setting.hardware.model_copy(update={"call_overhead_s": 0.0, "hop_overhead_s": 0.0}),
    )
    return total_cost(slowest_passes(like_in_hops(setting, local_tokens), setting.bytes_per_s))


def _why(setting: TrainingSetting, most: int) -> str:
    long, shorter = _cost(setting, most), _cost(setting, most // STEP)
    wait = f"{waiting(long):.0%} of a pass waits at {most // setting.ulysses_size:,} tokens a device"
    now, before = (cost.exposed_s / cost.compute_s for cost in (long, shorter))
    if now > (1 - HOPS_ALIKE) * before:
        return f"transfers and compute of this pattern and layout grow alike ({wait})"
    return f"no shard that was looked at is long enough for these links ({wait})"
