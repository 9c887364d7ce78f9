"""Plan more devices: one sequence in a larger ring, or more sequences a step by data replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .estimate import Estimate, estimate
from .layer_passes import LayerPasses, layer_passes
from .options import MAX_RANKS, limit_ring, plan_whole
from .training_setting import TrainingSetting

TIMES = (1, 2, 3, 4, 8)


def plan_more_devices(
    setting: TrainingSetting, say: Callable[[str], None] = lambda what: None, keeps_ring: bool = False,
    train_batch: object = None, warn: Callable[[str], None] = lambda what: None,
) -> list[Estimate]:  # fmt: skip
    """Return plans on as many devices and on 2, 3, 4 and 8 times as many: in a larger ring, and by replicas.

    Three times as many only where these are whole hosts. Each has what --fit chooses there, beside the
    options that were asked for; these alone where nothing fits.

    Args:
        setting: of the first plan.
        say: called with each number of devices.
        keeps_ring: the ring's size was asked for: it grows only where replicas do not divide the batch.
        train_batch: sequences of a step, which replicas divide; None or "auto" for any number.
        warn: called with what rows are left out.
    """
    plans: list[Estimate] = []
    left_out: list[str] = []
    for times in TIMES:
        if times == 3 and times * setting.devices % setting.hardware.host_devices:
            continue
        say(f"{times * setting.devices} devices")
        larger = replace(
            setting, zero=replace(setting.zero, world=times * setting.devices), may_add_options=True
        )
        divides = not isinstance(train_batch, int) or train_batch % (setting.batch * larger.replicas) == 0
        if times == 1 or not (keeps_ring and divides):
            ring = replace(larger, ring_size=times * setting.ring_size)
            has_tokens = ring.ring_size * ring.ulysses_size <= ring.tokens
            whole = ring if times == 1 else limit_ring(ring) if has_tokens else None
            plan = None if whole is None else _plan(whole, layer_passes(whole))
            # Where Ulysses ranks alone leave a ring that may be planned, one of all ranks may fit instead.
            if plan is None or not (plan.fits or whole is ring):
                left_out.append(f"{ring.devices:,}")
            else:
                plans.append(plan)
        if times > 1 and divides:
            first = plans[0].setting  # the same ring
            larger = replace(larger, ring_size=first.ring_size, ulysses_size=first.ulysses_size)
            plans.append(_plan(replace(larger, may_split_heads=False), plans[0].attention_passes))
    if left_out:
        warn(
            f"--more-devices: a larger ring on {', '.join(left_out)} devices is left out: it would need more"
            f" than {MAX_RANKS} ranks beside those of Ulysses, or more ranks than tokens"
        )
    return plans


def _plan(setting: TrainingSetting, attention: LayerPasses) -> Estimate:
    return plan_whole(setting, attention) or estimate(setting, attention=attention)
