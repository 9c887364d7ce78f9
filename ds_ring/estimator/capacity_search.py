"""Search settings for the longest sequence and the fewest devices.

Each asks `estimate.py` again and again, on rings of at most four ranks with the tokens per rank
that are asked about, so that a search over a thousand devices takes a second.
"""

from __future__ import annotations

from dataclasses import replace

from ds_ring.estimator.estimate import least_memory, rough_memory
from ds_ring.estimator.training_setting import Setting, smaller_ring

MOST_TOKENS = 1 << 40
MOST_DEVICES = 1 << 14
FINE = 64  # a search ends when it is exact to 1 / FINE


def peak_bytes(setting: Setting, local_tokens: int) -> int:
    """Return the peak of a device with so many tokens per rank, or a part of it that is too much."""
    smaller = smaller_ring(setting, local_tokens, most=4)
    # Cheap lower bound first: most of a search's settings need no plan.
    least = least_memory(smaller)
    if least > setting.usable_bytes:
        return least
    return rough_memory(smaller)


def longest_sequence(setting: Setting) -> int:
    """Return the most tokens T whose step fits the setting's devices, to 1 / 64; 0 if none does."""
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
    """Return the setting on the smallest power of two of devices that fit, all in one ring, or None."""
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
