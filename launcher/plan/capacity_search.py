"""Search settings for the longest sequence and the fewest devices.

Each asks `estimate.py` again and again, on rings of at most four ranks with the tokens per rank
that are asked about, so that a search over a thousand devices takes a second.
"""

from __future__ import annotations

from dataclasses import replace

from .estimate import least_step, training_step
from .layer_passes import rough_pass_memory
from .options import fits_somehow, sets_that_fit
from .training_setting import Setting, like_in_memory

MOST_TOKENS = 1 << 40
MOST_DEVICES = 1 << 14
FINE = 64  # a search ends when it is exact to 1 / FINE
FEW_STEPS = 4


def peak_bytes(setting: Setting, local_tokens: int) -> int:
    """Return the peak of a device with so many tokens per rank, or a part of it that is too much."""
    smaller = like_in_memory(setting, local_tokens)
    # Cheap lower bound first: most of a search's settings need no plan.
    least = least_step(smaller).peak().total
    if least > setting.usable_bytes:
        return least
    layout, memory = rough_pass_memory(smaller)
    return training_step(smaller, layout.local_tokens, memory).peak().total


def can_hold(setting: Setting, local_tokens: int) -> bool:
    """Return whether devices and hosts hold so many tokens per rank, with options added where they may be."""
    smaller = like_in_memory(setting, local_tokens)
    least = least_step(smaller)
    if not fits_somehow(smaller, least.tokens.inside // smaller.batch, least.ring):
        return False
    layout, memory = rough_pass_memory(smaller)
    return fits_somehow(smaller, layout.local_tokens, memory)


def longest_sequence(setting: Setting) -> int:
    """Return the most tokens T whose step fits the setting's devices, to 1 / 64; 0 if none does."""
    unit = setting.ulysses_size
    low, high = 0, 64 * unit
    while high * setting.ring_size <= MOST_TOKENS and can_hold(setting, high):
        low, high = high, 2 * high
    while high - low > max(low // FINE, unit):
        middle = (low + high) // 2 // unit * unit
        low, high = (middle, high) if can_hold(setting, middle) else (low, middle)
    return low * setting.ring_size


def longest_with_options(setting: Setting) -> Setting | None:
    """Return the longest sequence with the cheapest options that make it fit, None if none does."""
    tokens = longest_sequence(replace(setting, may_add_options=True))
    # The search looks at a small ring: the whole one may need a little more.
    for _ in range(FEW_STEPS):
        found = sets_that_fit(replace(setting, tokens=tokens)) if tokens else []
        if found:
            return found[0].estimate.setting
        tokens -= tokens // FINE
    return None


def fewest_devices(setting: Setting) -> Setting | None:
    """Return the setting on the smallest power of two of devices that fit, all in one ring, or None."""
    size = setting.ulysses_size
    while size <= MOST_DEVICES:
        ring = size // setting.ulysses_size
        tried = replace(setting, ring_size=ring, zero=replace(setting.zero, world=size))
        local = -(-setting.tokens // size) * setting.ulysses_size
        if can_hold(tried, local):
            return tried
        if local <= setting.ulysses_size:
            break
        size *= 2
    return None
