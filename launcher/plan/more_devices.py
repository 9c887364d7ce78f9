"""Plan the same step on more devices: seconds, tokens a second and options, a row for each number of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .estimate import Estimate, estimate
from .options import MAX_RANKS, plan_whole
from .training_setting import TrainingSetting

TIMES = (1, 2, 4, 8)


def plan_more_devices(
    setting: TrainingSetting, say: Callable[[str], None] = lambda what: None
) -> list[Estimate]:
    """Return plans on as many devices and on 2, 4 and 8 times as many, in a larger ring.

    Each has what --fit chooses there, beside the options that were asked for; these alone where nothing fits.
    """
    plans = []
    for times in TIMES:
        ring, world = times * setting.ring_size, times * setting.zero.world
        if ring > MAX_RANKS or ring * setting.ulysses_size > setting.tokens:
            break
        say(f"{world} devices")
        larger = replace(
            setting, ring_size=ring, zero=replace(setting.zero, world=world), may_add_options=True
        )
        plans.append(plan_whole(larger) or estimate(larger))
    return plans
