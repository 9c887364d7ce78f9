"""Plan more devices: one sequence in a larger ring, or more sequences a step by data replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .estimate import Estimate, estimate
from .options import MAX_RANKS, plan_whole, sets_that_fit
from .training_setting import TrainingSetting

TIMES = (1, 2, 4, 8)


def plan_more_devices(
    setting: TrainingSetting, say: Callable[[str], None] = lambda what: None, keeps_ring: bool = False,
    train_batch: int = 0,
) -> list[Estimate]:  # fmt: skip
    """Return plans on as many devices and on 2, 4 and 8 times as many: in a larger ring, and by replicas.

    Each has what --fit chooses there, beside the options that were asked for; these alone where nothing fits.

    Args:
        setting: of the first plan.
        say: called with each number of devices.
        keeps_ring: the ring's size was asked for: it grows only where replicas do not divide the batch.
        train_batch: sequences of a step, which replicas divide; 0 for any number.
    """
    plans: list[Estimate] = []
    for times in TIMES:
        world = times * setting.devices
        say(f"{world} devices")
        larger = replace(setting, zero=replace(setting.zero, world=world), may_add_options=True)
        divides = train_batch % (setting.batch * larger.replicas) == 0
        ring = times * setting.ring_size
        fits_ring = ring <= MAX_RANKS and ring * setting.ulysses_size <= setting.tokens
        if times == 1 or (fits_ring and not (keeps_ring and divides)):
            whole = replace(larger, ring_size=ring)
            plans.append(plan_whole(whole) or estimate(whole))
        if times > 1 and divides:  # attention is that of the first plan
            attention = plans[0].attention_passes
            fitting = sets_that_fit(larger, attention)
            plans.append(fitting[0] if fitting else estimate(larger, attention=attention))
    return plans
