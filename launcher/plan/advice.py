"""Find what to do about an estimate: whether it fits, whether transfers hide, and what would help."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .capacity_search import fewest_devices, longest_sequence
from .cost import EXPOSED
from .estimate import Estimate
from .hiding import Hiding, hiding_shard, waiting
from .remedies import Remedy, remedies

GIB = 2**30
MOSTLY = 0.5  # of the peak: what takes more is named


class Advice(NamedTuple):
    """Hold the limits around a setting, and sentences about it."""

    longest_tokens: int  # the most that fit these devices, to 1 / 64; 0 if none
    fewest_devices: int | None  # that fit these tokens, a power of two; None if none do
    hiding: Hiding  # the shard from which on transfers hide, or why there is none
    warnings: tuple[str, ...]  # sentences
    remedies: tuple[Remedy, ...]  # what would make it fit, cheapest first; none where it fits


def advise(found: Estimate, say: Callable[[str], None] = lambda what: None) -> Advice:
    """Search around a setting and warn of what is wrong with it; `say` is called with each search."""
    say("the longest sequence that fits")
    longest = longest_sequence(found.setting)
    say("the fewest devices that fit")
    smallest = fewest_devices(found.setting)
    devices = None if smallest is None else smallest.devices
    say("the shard whose transfers hide")
    hiding = hiding_shard(found.setting)
    warnings = [*_memory(found, longest, devices), *_exposed(found, hiding), *_state_of_things(found)]
    if found.fits:
        return Advice(longest, devices, hiding, tuple(warnings), ())
    say("what would make it fit")
    return Advice(longest, devices, hiding, tuple(warnings), remedies(found.setting))


def _memory(found: Estimate, longest: int, devices: int | None) -> list[str]:
    if found.fits:
        return []
    setting, peak = found.setting, found.peak
    most = max(peak.components, key=lambda name: peak.components[name])
    text = (
        f"does not fit: {peak.total / GIB:.1f} GiB at the {peak.name}, of"
        f" {setting.usable_bytes / GIB:.1f} GiB that tensors can have; {most} take"
        f" {peak.components[most] / GIB:.1f} GiB"
    )
    ways = [f"at most {longest:,} tokens fit {setting.devices} devices"] if longest else []
    ways += [f"{devices} devices fit {setting.tokens:,} tokens"] if devices else []
    return ["; ".join([text, *ways])]


def _exposed(found: Estimate, hiding: Hiding) -> list[str]:
    cost, setting = found.attention, found.setting
    share = waiting(cost)
    if setting.ring_size == 1 or share <= EXPOSED:
        return []
    here = found.layout.local_tokens
    advice = (
        f"never: {hiding.never}" if hiding.tokens is None else f"from T/P = {hiding.tokens:,} on it hides"
    )
    return [
        f"transfers do not hide behind compute: {share:.0%} of each pass waits ({cost.exposed_hops} of"
        f" {cost.hops} hops) at T/P = {here:,}; {advice}, or take a smaller ring and more Ulysses ranks"
    ]


def _state_of_things(found: Estimate) -> list[str]:
    setting, warnings = found.setting, []
    if setting.hardware.kind == "cuda":
        warnings.append("the figures for GPUs are computed, not measured: ds_ring has not been timed on one")
    if setting.zero.stage in (1, 2, 3) and setting.zero.bucket_elements > setting.model.parameters:
        size = setting.zero.bucket_elements * setting.zero.element_bytes / GIB
        warnings.append(
            f"reduce_bucket_size {setting.zero.bucket_elements:,} is more than the model has parameters: each"
            f" bucket takes {size:.2f} GiB; {setting.model.largest_parameter:,} is enough"
        )
    return warnings
