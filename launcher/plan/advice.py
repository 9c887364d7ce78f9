"""Find what to do about an estimate: whether it fits, whether transfers hide, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from .estimate import Estimate, estimate
from .hiding import Hiding, hiding_shard, waiting
from .options import (
    can_hold,
    fewest_devices,
    flags_of,
    longest_sequence,
    longest_with_options,
    peak_bytes,
    sets_that_fit,
)
from .other_layers import Lookup, Recurrence, Selection
from .pass_time import EXPOSED
from .training_setting import ELEMENT_BYTES, TrainingSetting

# Remedies make a run fit, the cheapest first: changes that cost no time (a smaller bucket, ranks from
# data-parallel replicas, states divided further, smaller micro-batches), then the cheapest sets of options of
# options.py, then both together, then more devices, and last a shorter sequence.

MAX_LINES, MAX_OF_THESE_DEVICES = 5, 3  # proposals in all; of them on the devices at hand
ROUGHLY = 1.05  # of what a device has: more by a search's estimate needs no plan of the whole ring
MAX_RANKS = 256  # of a ring that is proposed: the estimate grows as its square, 4096 ranks take minutes


class Remedy(NamedTuple):
    """Describe a change after which the run fits."""

    change: str  # options of `ds-ring plan`, or a key of DeepSpeed's JSON
    peak_bytes: int  # of a device then
    host_bytes: int  # of a node's host then
    step_s: float  # seconds of a step then
    setting: TrainingSetting  # with the change in it


class _Change(NamedTuple):
    text: str
    apply: Callable[[TrainingSetting], TrainingSetting]


def remedies(setting: TrainingSetting) -> tuple[Remedy, ...]:
    """Return at most five changes that each make the setting fit, cheapest first.

    They name the options that they need, also where searches may add some.
    """
    searches_add, setting = setting.may_add_options, replace(setting, may_add_options=False)
    changes = list(_changes(setting))
    found = chain(_on_these_devices(setting, changes), _more_devices(setting))
    lines = list(islice(found, MAX_LINES))
    if (
        not searches_add
        and len(lines) < MAX_LINES
        and 0 < (tokens := longest_sequence(setting)) < setting.tokens
    ):
        lines += _found(f"--tokens {tokens}", replace(setting, tokens=tokens))
    return tuple(lines)


def _changes(setting: TrainingSetting) -> Iterator[_Change]:
    """Yield every change on the same devices for the same sequence, cheapest first."""
    zero, model = setting.zero, setting.model
    if zero.stage and zero.bucket_elements > model.largest_parameter:
        largest = model.largest_parameter
        yield _Change(
            f'"reduce_bucket_size": {largest} in zero_optimization',
            lambda s: replace(s, zero=replace(s.zero, bucket_elements=largest)),
        )
    ring = setting.devices // setting.ulysses_size
    if ring > setting.ring_size:
        yield _Change(f"--ring-size {ring}", lambda s: replace(s, ring_size=ring))
    for stage in range(zero.stage + 1, 4):
        yield _Change(f"--zero-stage {stage}", partial(_at_stage, stage))
    if setting.batch > 1:
        half = setting.batch // 2
        yield _Change(f"--batch {half}", lambda s: replace(s, batch=half))
    if setting.batch > 3:
        yield _Change("--batch 1", lambda s: replace(s, batch=1))


def _at_stage(stage: int, setting: TrainingSetting) -> TrainingSetting:
    return replace(setting, zero=replace(setting.zero, stage=stage))


def _on_these_devices(setting: TrainingSetting, changes: list[_Change]) -> Iterator[Remedy]:
    """Yield changes that are enough and options that are; where none is, a change with options."""
    enough = (one for change in changes for one in _found(change.text, change.apply(setting)))
    found = list(islice(chain(enough, _with_options("", setting)), MAX_OF_THESE_DEVICES))
    both = (one for change in changes for one in _with_options(change.text, change.apply(setting)))
    yield from found or islice(both, MAX_OF_THESE_DEVICES)


def _with_options(text: str, setting: TrainingSetting) -> Iterator[Remedy]:
    """Yield the cheapest sets of options that make a setting fit."""
    local = -(-setting.tokens // setting.ring_size)
    # The rough estimate rules most out before the slow one.
    if not can_hold(replace(setting, may_add_options=True), local):
        return
    for options, found in sets_that_fit(setting):
        if options:
            changes = " ".join(filter(None, (text, *(option.flag for option in options))))
            yield Remedy(changes, found.peak.total, found.node_host_bytes, found.step_s, found.setting)


def _more_devices(setting: TrainingSetting) -> Iterator[Remedy]:
    """Propose more devices in one ring, alone, and fewer of them with options."""
    alone, most = fewest_devices(setting), MAX_RANKS * setting.ulysses_size
    if alone is not None and setting.devices < alone.devices <= most:
        yield from _found(f"--devices {alone.devices} --ring-size {alone.ring_size}", alone)
        most = alone.devices - 1
    elif alone is not None and alone.devices <= setting.devices:
        return
    fewer = fewest_devices(replace(setting, may_add_options=True))
    if fewer is not None and setting.devices < fewer.devices <= most:
        text = f"--devices {fewer.devices} --ring-size {fewer.ring_size}"
        yield from islice(_with_options(text, replace(fewer, may_add_options=False)), 1)


def _found(text: str, setting: TrainingSetting) -> Iterator[Remedy]:
    """Yield a change if it is enough."""
    local = -(-setting.tokens // setting.ring_size)
    # The rough estimate rules most out before the slow one.
    if peak_bytes(setting, local) <= ROUGHLY * setting.usable_bytes:
        found = estimate(setting)
        if found.fits:
            yield Remedy(text, found.peak.total, found.node_host_bytes, found.step_s, setting)


GIB = 2**30


class LatentAdvice(NamedTuple):
    """Say what latents on the wire change in the passes of the costliest layer, both of them together."""

    expanded_bytes: int  # that a rank sends as keys, values and their gradients
    latent_bytes: int  # that it sends as latents
    expansion_s: float  # of arithmetic more, which nothing hides
    pays_below_bytes_per_s: float  # over slower links latents are faster
    # over these links latents are faster with fewer tokens on a ring rank: arithmetic of attention grows as
    # their square, transfers and the expansion as their number; 0 if they never are
    pays_below_tokens_per_rank: int


def latents_on_the_wire(found: Estimate) -> LatentAdvice | None:
    """Return what latents change; None for a model without them, and where nothing is sent."""
    setting, sizes, hardware = found.setting, found.setting.model.latents, found.setting.hardware
    if sizes is None or not found.passes:
        return None
    cost = max((one.cost for one in found.passes), key=lambda cost: cost.seconds)
    sent = cost.forward_bytes + cost.backward_bytes
    if not sent:
        return None
    heads = setting.model.heads // setting.ulysses_size
    expanded, latent = heads * (sizes.nope + sizes.rope + sizes.value), sizes.latent + sizes.rope
    received = cost.forward_bytes / (expanded * ELEMENT_BYTES[setting.dtype])
    # Each token that arrives is expanded in both passes, and its gradient is projected back and multiplied
    # by the latent; the own tokens are expanded once more.
    products = 4 * received + setting.batch * found.layout.local_tokens
    flops = 2 * sizes.latent * heads * (sizes.nope + sizes.value) * products
    more = flops / (hardware.flops(setting.dtype) * hardware.matmul_efficiency)
    # With x times the tokens: x sent / rate > x^2 compute + x more.
    most = max(0.0, (sent / setting.bytes_per_s - more) / cost.compute_s) * found.layout.local_tokens
    below = sent / (cost.compute_s + more)
    return LatentAdvice(sent, round(sent * latent / expanded), more, below, int(most))


def _latents(found: Estimate) -> list[str]:
    one = latents_on_the_wire(found)
    if one is None:
        return []
    rate, least = found.setting.bytes_per_s / 1e9, one.pays_below_bytes_per_s / 1e9
    return [
        f'latents: the figures are those of expanded keys ("latents": false). With latents a rank sends'
        f" {one.latent_bytes / 1e6:,.1f} MB in a layer's passes, not {one.expanded_bytes / 1e6:,.1f} MB, and"
        f" computes {one.expansion_s * 1e3:.3g} ms more: faster over links of less than {least:.3g} GB/s;"
        f" these have {rate:.3g} GB/s, over which latents are faster below T/P ="
        f" {one.pays_below_tokens_per_rank:,}"
    ]


class Reach(NamedTuple):
    """Hold the limits of a run, and with which options of `ds-ring plan` they are reached."""

    longest_tokens: int  # the most that fit these devices, to 1 / 64; 0 if none
    longest_options: tuple[str, ...]
    fewest_devices: int | None  # that fit these tokens, a power of two; None if none do
    fewest_options: tuple[str, ...]


class Advice(NamedTuple):
    """Hold the limits around a setting, and sentences about it."""

    reach: Reach  # with the setting's own options
    fit_reach: Reach | None  # with those that --fit would add; None without --fit
    hiding: Hiding  # the shard from which on transfers hide, or why there is none
    warnings: tuple[str, ...]  # sentences
    remedies: tuple[Remedy, ...]  # what would make it fit, cheapest first; none where it fits


def advise(found: Estimate, say: Callable[[str], None] = lambda what: None) -> Advice:
    """Search around a setting and warn of its faults; `say` is called with each search."""
    own, more = _reach(found, say), None
    if found.setting.may_add_options:
        more = _fit_reach(found.setting, say)
        if more.longest_options == own.longest_options:
            # The search of `own` looked at a small ring.
            own = own._replace(longest_tokens=more.longest_tokens)
    say("the shard whose transfers hide")
    hiding = hiding_shard(found.setting)
    warnings = [
        *_memory(found, more or own),
        *_exposed(found, hiding),
        *_latents(found),
        *_state_of_things(found),
    ]
    if found.fits:
        return Advice(own, more, hiding, tuple(warnings), ())
    say("what would make it fit")
    return Advice(own, more, hiding, tuple(warnings), remedies(found.setting))


def _reach(found: Estimate, say: Callable[[str], None]) -> Reach:
    setting = replace(found.setting, may_add_options=False)
    flags = flags_of(setting)
    say("the longest sequence that fits")
    longest = longest_sequence(setting)
    say("the fewest devices that fit")
    fewest = fewest_devices(setting)
    return Reach(longest, flags, None if fewest is None else fewest.devices, flags)


def _fit_reach(setting: TrainingSetting, say: Callable[[str], None]) -> Reach:
    say("the longest sequence that fits with more options")
    longest = longest_with_options(setting)
    tokens, options = (0, ()) if longest is None else (longest.tokens, flags_of(longest))
    say("the fewest devices that fit with more options")
    fewest = fewest_devices(setting)
    # The search looks at a small ring: the whole one may need a little more.
    while fewest is not None and fewest.ring_size <= MAX_RANKS:
        if sets := sets_that_fit(fewest):
            return Reach(tokens, options, fewest.devices, flags_of(sets[0].estimate.setting))
        fewest = fewest_devices(setting, 2 * fewest.ring_size)
    return Reach(tokens, options, None, ())


def _memory(found: Estimate, reach: Reach) -> list[str]:
    if found.fits:
        return []
    setting, peak = found.setting, found.peak
    longest, devices = reach.longest_tokens, reach.fewest_devices
    most = max(peak.components, key=lambda name: peak.components[name])
    text = (
        f"does not fit: {peak.total / GIB:.1f} GiB at the {peak.name}, of"
        f" {setting.usable_bytes / GIB:.1f} GiB that tensors can have; {most} take"
        f" {peak.components[most] / GIB:.1f} GiB"
    )
    ways = [f"at most {longest:,} tokens fit {setting.devices} devices"] if longest else []
    ways += [f"{devices} devices fit {setting.tokens:,} tokens"] if devices else []
    ways += ["both with the options of --fit"] if setting.may_add_options and ways else []
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
    if setting.model.experts > 1:
        warnings.append(
            f"experts: the model names {setting.model.experts}, and no matrix of them is counted: every MLP"
            " is planned with intermediate_size, in parameters, memory and time"
        )
    if any(isinstance(one.kind, Selection) for one in found.other_layers):
        warnings.append(
            "chosen keys: which rows cross is known at run time; counted are all that a rank's queries see,"
            " at most k for each. Latents do not travel here"
        )
    if any(isinstance(one.kind, Recurrence) for one in found.other_layers):
        warnings.append(
            "layers other than attention keep what goes into their kernels and comes out; what a kernel keeps"
            " inside is not counted, and their arithmetic is rough"
        )
    if any(isinstance(one.kind, Lookup) for one in found.other_layers):
        warnings.append(
            "n-gram tables: their rows are outside the engine, and no memory of them is counted; rows that"
            " occur again on a rank are counted as often as they are looked up"
        )
    if setting.hardware.kind == "cuda":
        warnings.append("the figures for GPUs are computed, not measured: ds_ring has not been timed on one")
    if setting.zero.stage in (1, 2, 3) and setting.zero.bucket_elements > setting.model.parameters:
        size = setting.zero.bucket_elements * setting.zero.element_bytes / GIB
        warnings.append(
            f"reduce_bucket_size {setting.zero.bucket_elements:,} is more than the model has parameters: each"
            f" bucket takes {size:.2f} GiB; {setting.model.largest_parameter:,} is enough"
        )
    return warnings
