"""Propose changes that make a run fit, cheapest first, each one estimated.

Owns the changes and their order: first what costs no time (a smaller bucket, a loss in chunks, ranks from
data-parallel replicas, states divided further), then what costs some (smaller micro-batches, activations
computed again), then more devices, and last a shorter sequence. Two changes are tried together where neither
is enough alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from ds_ring.estimator.capacity_search import fewest_devices, longest_sequence, peak_bytes
from ds_ring.estimator.estimate import estimate
from ds_ring.estimator.training_setting import Setting

MOST_LINES, MOST_OF_THESE_DEVICES = 5, 3  # proposals in all; of them on the devices at hand
LOSS_TOKENS = 8192
ROUGHLY = 1.05  # of what a device has: more by a search's estimate needs no plan of the whole ring
MOST_RANKS = 256  # of a ring that is proposed: the estimate grows as its square, 4096 ranks take minutes


class Remedy(NamedTuple):
    """Describe a change after which the run fits."""

    change: str  # options of `ds-ring plan`, or a key of DeepSpeed's JSON
    peak_bytes: int  # of a device then
    step_s: float  # seconds of a step then
    setting: Setting  # with the change in it


class _Change(NamedTuple):
    text: str
    apply: Callable[[Setting], Setting]


def remedies(setting: Setting) -> tuple[Remedy, ...]:
    """Return at most five changes that each make the setting fit, cheapest first."""
    changes = list(_changes(setting))
    here = list(_on_these_devices(setting, changes))
    more = _more_devices(setting, changes if not here else [])
    found = [*here, *more, *_shorter(setting)]
    return tuple(found[:MOST_LINES])


def _changes(setting: Setting) -> Iterator[_Change]:
    """Yield every change on the same devices for the same sequence, cheapest first."""
    zero, model = setting.zero, setting.model
    if zero.stage and zero.bucket_elements > model.largest_parameter:
        largest = model.largest_parameter
        yield _Change(
            f'"reduce_bucket_size": {largest} in zero_optimization',
            lambda s: replace(s, zero=replace(s.zero, bucket_elements=largest)),
        )
    if setting.loss_tokens is None or setting.loss_tokens > LOSS_TOKENS:
        yield _Change(f"--loss-chunk {LOSS_TOKENS}", lambda s: replace(s, loss_tokens=LOSS_TOKENS))
    ring = setting.devices // setting.ulysses_size
    if ring > setting.ring_size:
        yield _Change(f"--ring-size {ring}", lambda s: replace(s, ring_size=ring))
    for stage in range(zero.stage + 1, 4):
        yield _Change(f"--zero-stage {stage}", _with_stage(stage))
    if setting.batch > 1:
        half = setting.batch // 2
        yield _Change(f"--batch {half}", lambda s: replace(s, batch=half))
    if setting.batch > 3:
        yield _Change("--batch 1", lambda s: replace(s, batch=1))
    if not setting.checkpointing:
        yield _Change("--activation-checkpointing", lambda s: replace(s, checkpointing=True))


def _with_stage(stage: int) -> Callable[[Setting], Setting]:
    return lambda setting: replace(setting, zero=replace(setting.zero, stage=stage))


def _on_these_devices(setting: Setting, changes: list[_Change]) -> Iterator[Remedy]:
    """Yield single changes that are enough, then pairs of those that are not."""
    left: list[_Change] = []
    count = 0
    for change in changes:
        remedy = _checked(change.text, change.apply(setting))
        if remedy is None:
            left.append(change)
        elif count < MOST_OF_THESE_DEVICES:
            count += 1
            yield remedy
    for first, second in combinations(left, 2):
        if count >= MOST_OF_THESE_DEVICES or first.text.split()[0] == second.text.split()[0]:
            continue
        remedy = _checked(f"{first.text} {second.text}", second.apply(first.apply(setting)))
        if remedy is not None:
            count += 1
            yield remedy


def _more_devices(setting: Setting, changes: list[_Change]) -> Iterator[Remedy]:
    """Propose more devices in one ring, alone, and with the change that saves most of them."""
    alone = _few_devices(setting)
    if alone is not None and alone.devices > setting.devices:
        yield from _found(_devices_text(alone), alone)
    options = [(change, _few_devices(change.apply(setting))) for change in changes]
    fewer = [(c, s) for c, s in options if s is not None and s.devices > setting.devices]
    if not fewer:
        return
    change, found = min(fewer, key=lambda pair: pair[1].devices)
    if alone is None or found.devices < alone.devices:
        yield from _found(f"{change.text} {_devices_text(found)}", found)


def _few_devices(setting: Setting) -> Setting | None:
    """Return the fewest devices; None beyond the ring whose whole estimate takes about a second."""
    found = fewest_devices(setting)
    return found if found is not None and found.ring_size <= MOST_RANKS else None


def _devices_text(setting: Setting) -> str:
    return f"--devices {setting.devices} --ring-size {setting.ring_size}"


def _shorter(setting: Setting) -> Iterator[Remedy]:
    tokens = longest_sequence(setting)
    if 0 < tokens < setting.tokens:
        yield from _found(f"--tokens {tokens}", replace(setting, tokens=tokens))


def _found(text: str, setting: Setting) -> Iterator[Remedy]:
    remedy = _checked(text, setting)
    if remedy is not None:
        yield remedy


def _checked(text: str, setting: Setting) -> Remedy | None:
    """Estimate a changed setting; None if it does not fit."""
    local = -(-setting.tokens // setting.ring_size)
    # The rough estimate rules most out before the slow one.
    if peak_bytes(setting, local) > ROUGHLY * setting.usable_bytes:
        return None
    found = estimate(setting)
    return Remedy(text, found.peak.total, found.step_s, setting) if found.fits else None
