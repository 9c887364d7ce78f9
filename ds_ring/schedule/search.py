"""Searches over settings: the longest sequence, the fewest devices, the shard that hides its transfers.

Each asks `estimate.py` again and again, on rings of at most four or eight ranks with the tokens per rank
that are asked about, so that a search over a thousand devices takes a second.
"""

from __future__ import annotations

from dataclasses import replace

from ds_ring.schedule.cost import EXPOSED, pass_cost
from ds_ring.schedule.estimate import (
    least_memory,
    parts_of,
    pass_shape,
    plan_of,
    rough_memory,
)
from ds_ring.schedule.setting import Setting, smaller_ring

MOST_TOKENS = 1 << 40
MOST_DEVICES = 1 << 14
FINE = 64  # a search ends when it is exact to 1 / FINE


def peak_bytes(setting: Setting, local_tokens: int) -> int:
    """Peak memory of a device with so many tokens for each rank of the ring, or what is too much of it."""
    smaller = smaller_ring(setting, local_tokens, most=4)
    least = least_memory(smaller)
    if least > setting.usable_bytes:
        return least
    return rough_memory(smaller)


def longest_sequence(setting: Setting) -> int:
    """The most tokens T whose step fits the setting's devices, to 1 / 64; 0 if none does."""
    unit = setting.ulysses_size

    def fits(local_tokens: int) -> bool:
        return peak_bytes(setting, local_tokens) <= setting.usable_bytes

    low, high = 0, 64 * unit
    while high * setting.ring_size <= MOST_TOKENS and fits(high):
        low, high = high, 2 * high
    while high - low > max(low // FINE, unit):
        middle = (low + high) // 2 // unit * unit
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * setting.ring_size


def fewest_devices(setting: Setting) -> Setting | None:
    """The setting on the smallest power of two of devices that it fits, all in one ring; None without."""
    size = setting.ulysses_size
    while size <= MOST_DEVICES:
        ring = size // setting.ulysses_size
        tried = replace(setting, ring_size=ring, zero=replace(setting.zero, world=size))
        local = -(-setting.tokens // size) * setting.ulysses_size
        if peak_bytes(tried, local) <= setting.usable_bytes:
            return tried
        if local <= setting.ulysses_size:
            break
        size *= 2
    return None


def hiding_shard(setting: Setting) -> int | None:
    """The fewest tokens per rank (times a power of two) whose transfers hide behind the arithmetic.

    They hide where less than 5 % of a pass is spent waiting. None if even a thousandfold shard does not.
    """
    local = -(-setting.tokens // setting.ring_size)
    for doubling in range(11):
        tried = smaller_ring(setting, local << doubling)
        if exposed_share(tried, setting.bytes_per_s) <= EXPOSED:
            return local << doubling
    return None


def exposed_share(setting: Setting, bytes_per_s: float) -> float:
    """Share of a pass that its middle rank waits, between 0 and 1, over links of that speed."""
    plan = plan_of(setting)
    cost = pass_cost(
        parts_of(plan, setting.ring_size // 2),
        pass_shape(setting, plan.layout),
        setting.hardware,
        setting.dtype,
        bytes_per_s,
        setting.overlap,
    )
    return cost.exposed_s / cost.seconds if cost.seconds else 0.0
