"""Say about an estimate whether it fits, whether transfers hide, and what its limits are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ds_ring.limits import Timeouts

from .estimate import Estimate, get_optimizer_seconds
from .hiding import Hiding, hiding_shard, waiting
from .options import (
    estimate_sets,
    fewest_planned,
    find_roomier,
    list_flags,
    longest_planned,
    name_limit,
    plan_whole,
)
from .other_layers import Recurrence, Selection
from .pass_time import EXPOSED
from .training_setting import ELEMENT_BYTES, TrainingSetting

GIB = 2**30
TIMEOUTS = Timeouts()
PATIENCE = 2  # times the planned work, which a limit has to leave: no GPU has timed the plan


class LatentAdvice(NamedTuple):
    """Say what latents on the wire change in the passes of the costliest layer, both of them together."""

    expanded_bytes: int  # that a rank sends as keys, values and their gradients
    latent_bytes: int  # that it sends as latents
    expansion_s: float  # of arithmetic more, which nothing hides
    pays_below_bytes_per_s: float  # over slower links latents are faster
    # over these links latents are faster with fewer tokens on a ring rank: arithmetic of attention grows as
    # their square, transfers and the expansion as their number; 0 if they never are
    pays_below_tokens_per_rank: int


def latents_on_the_wire(planned: Estimate) -> LatentAdvice | None:
    """Return what latents change; None for a model without them, and where nothing is sent."""
    setting, sizes, hardware = planned.setting, planned.setting.model.latents, planned.setting.hardware
    if sizes is None or not planned.passes:
        return None
    cost = max((layer_pass.cost for layer_pass in planned.passes), key=lambda cost: cost.seconds)
    sent = cost.forward_bytes + cost.backward_bytes
    if not sent:
        return None
    heads = setting.model.heads // setting.ulysses_size
    expanded, latent = heads * (sizes.nope + sizes.rope + sizes.value), sizes.latent + sizes.rope
    received = cost.forward_bytes / (expanded * ELEMENT_BYTES[setting.dtype])
    # Each token that arrives is expanded in both passes, and its gradient is projected back and multiplied
    # by the latent; the own tokens are expanded once more.
    products = 4 * received + setting.batch * planned.layout.local_tokens
    flops = 2 * sizes.latent * heads * (sizes.nope + sizes.value) * products
    expansion_s = flops / (hardware.flops(setting.dtype) * hardware.matmul_efficiency)
    # With x times the tokens: x sent / rate > x^2 compute + x more.
    most = max(0.0, (sent / setting.bytes_per_s - expansion_s) / cost.compute_s) * planned.layout.local_tokens
    below = sent / (cost.compute_s + expansion_s)
    return LatentAdvice(sent, round(sent * latent / expanded), expansion_s, below, int(most))


def _latents(planned: Estimate) -> list[str]:
    latents = latents_on_the_wire(planned)
    if latents is None:
        return []
    rate, least = planned.setting.bytes_per_s / 1e9, latents.pays_below_bytes_per_s / 1e9
    return [
        f'latents: the figures are those of expanded keys ("latents": false). With latents a rank sends'
        f" {latents.latent_bytes / 1e6:,.1f} MB in a layer's passes, not"
        f" {latents.expanded_bytes / 1e6:,.1f} MB, and computes {latents.expansion_s * 1e3:.3g} ms more:"
        f" faster over links of less than {least:.3g} GB/s; these have {rate:.3g} GB/s, over which latents"
        f" are faster below {latents.pays_below_tokens_per_rank // planned.setting.ulysses_size:,} tokens a"
        " device"
    ]


_ONE_DOCUMENT = (
    "documents: a sequence is planned as one document, because lengths come with the batches: shorter ones"
    " have fewer pairs, and send less"
)


class Reach(NamedTuple):
    """Hold the limits of a run, and with which options of `ds-ring plan` they are reached."""

    longest_tokens: int  # the most that fit these devices, to 1 / 1024; 0 if none
    longest_split: str  # how the devices share it
    longest_options: tuple[str, ...]
    longest_step_s: float | None  # of a step with it; None where a ring is too large to be estimated
    longest_ends_at: str  # whose memory is full; empty if none fits
    fewest_devices: int | None  # that fit these tokens, of those looked at; None if none do
    fewest_split: str | None  # how these share the sequence; None for one ring
    fewest_options: tuple[str, ...]
    fewest_step_s: float | None  # of a step on these; None where a ring is too large to be estimated


class Advice(NamedTuple):
    """Hold the limits around a setting, and sentences about it."""

    reach: Reach  # with the setting's own options
    fit_reach: Reach | None  # with those that --fit would add; None without --fit
    hiding: Hiding  # the shard from which on transfers hide, or why there is none
    roomier: Estimate | None  # a set of options with clearly less memory, in hardly more time; None if none
    warnings: tuple[str, ...]  # sentences


def advise(
    planned: Estimate,
    say: Callable[[str], None] = lambda what: None,
    before_fit: TrainingSetting | None = None,
    timeouts: Timeouts = TIMEOUTS,
    documents: bool = False,
) -> Advice:
    """Search around a setting and warn of its faults.

    Args:
        planned: the setting's plan.
        say: called with each search.
        before_fit: the setting without the options that --fit has turned on; None without --fit.
        timeouts: of the section.
        documents: whether sequences are packed documents.
    """
    setting = planned.setting
    reach, fit_reach = _reach(replace(setting, may_add_options=False), planned, say), None
    if setting.may_add_options:
        fit_reach = _reach(setting, planned, say)
        how = (reach.longest_split, reach.longest_options)
        if (fit_reach.longest_split, fit_reach.longest_options) == how:
            # The search without more options looked at a small ring.
            longest = {key: value for key, value in fit_reach._asdict().items() if key.startswith("longest")}
            reach = reach._replace(**longest)
    say("the shard whose transfers hide")
    hiding = hiding_shard(setting)
    warnings = [
        *_memory(planned, fit_reach or reach),
        *_exposed(planned, hiding),
        *_latents(planned),
        *_warn_about_timeouts(planned, timeouts),
        *_warn_about_limits(planned),
        *([_ONE_DOCUMENT] if documents else []),
    ]
    roomier = find_roomier(planned, before_fit or setting) if planned.fits else None
    return Advice(reach, fit_reach, hiding, roomier, tuple(warnings))


def _reach(setting: TrainingSetting, planned: Estimate, say: Callable[[str], None]) -> Reach:
    options = " with more options" if setting.may_add_options else ""
    say(f"the longest sequence that fits{options}")
    longest, longest_plan = longest_planned(setting)
    if planned.fits and (longest is None or longest.tokens < setting.tokens):
        longest, longest_plan = planned.setting, planned  # the search is not exact
    say(f"the fewest devices that fit{options}")
    fewest, plan = fewest_planned(setting)
    is_one_ring = setting.devices == setting.ring_size * setting.ulysses_size
    if planned.fits and is_one_ring and (fewest is None or setting.devices <= fewest.devices):
        fewest, plan = planned.setting, planned  # which may be no power of two
    return Reach(
        0 if longest is None else longest.tokens,
        (longest or setting).split,
        list_flags(longest or setting),
        None if longest_plan is None else longest_plan.step_s,
        "" if longest is None else name_limit(longest),
        None if fewest is None else fewest.devices,
        None if fewest is None or fewest.ulysses_size == 1 else fewest.split,
        list_flags(fewest or setting),
        None if plan is None else plan.step_s,
    )


def _memory(planned: Estimate, reach: Reach) -> list[str]:
    if planned.fits:
        return []
    setting, peak = planned.setting, planned.peak
    longest, devices = reach.longest_tokens, reach.fewest_devices
    most = max(peak.components, key=lambda name: peak.components[name])
    text = (
        f"does not fit: {peak.total / GIB:.1f} GiB at the {peak.name}, of"
        f" {setting.usable_bytes / GIB:.1f} GiB that a plan may take; {most} take"
        f" {peak.components[most] / GIB:.1f} GiB"
    )
    if peak.total <= setting.usable_bytes:
        host = planned.host_peak.host
        most, of_node = max(host, key=lambda name: host[name]), setting.node_devices / GIB
        usable = (setting.usable_host_bytes or 0) * of_node
        text = (
            f"does not fit: {planned.node_host_bytes / GIB:,.1f} GiB of a {setting.host_name} at the"
            f" {planned.host_peak.name}, of {usable:,.1f} GiB that a plan may take; {most} take"
            f" {host[most] * of_node:,.1f} GiB"
        )
    ways = [f"at most {longest:,} tokens fit {setting.devices} devices"] if longest else []
    ways += [f"{devices} devices fit {setting.tokens:,} tokens"] if devices else []
    if setting.may_add_options:
        ways += ["both with the options of --fit"] if ways else []
        least = min(estimate_sets(setting, planned.attention_passes), key=lambda plan: plan.peak.total)
        whole = sum(least.peak.components.get(name, 0) for name in ("parameters", "gradients"))
        ways += [f"with {describe_plan(least)}, of which parameters and gradients take {whole / GIB:.1f}"]
        ways += ["--zero-stage 3 divides them"] if setting.zero.stage < 3 else []
        return ["; ".join([text, *ways])]
    fitting = plan_whole(replace(setting, may_add_options=True), planned.attention_passes)
    with_fit = f"no options of --fit make {setting.tokens:,} tokens fit {setting.devices} devices"
    if fitting is not None:
        with_fit = f"it fits with --fit, which would choose {describe_plan(fitting)}"
    return ["; ".join([text, *ways]), with_fit]


def describe_plan(planned: Estimate) -> str:
    """Return the options of a plan, its memory and its time; its shape where a search may choose that."""
    flags = " ".join(list_flags(planned.setting))
    shape = f" on {planned.setting.split}" if planned.setting.may_split_heads else ""
    memory = f"{planned.peak.total / GIB:.1f} GiB a device"
    if planned.node_host_bytes and not planned.setting.host_is_device:
        memory += f", {planned.node_host_bytes / GIB:,.0f} of a {planned.setting.host_name}"
    return f"{flags}{shape}: {memory}, {planned.step_s:.3g} s a step"


# A rank is late by no more than the work between two of its messages: in the passes of a layer a hop, and
# what the fastest rank is ahead of the slowest; between passes the matrices of a layer and of the output, or
# the optimizer on the host. On a GPU `step_timeout_seconds` bounds that work itself (`cuda/watchdog.py`).
def get_longest_work(planned: Estimate) -> float:
    """Return the most seconds that a rank is busy without a message: no other waits longer for it."""
    model = planned.setting.model
    hop_s = max((part.cost.longest_hop_s + part.lead_s for part in planned.passes), default=0.0)
    layer = model.active_mlp_parameters + model.mixing_parameters / model.layers
    share = (layer + model.head_parameters) / (model.layers * layer + model.head_parameters)
    others_s = max((cost.forward_s + cost.backward_s for cost in planned.other_layers), default=0.0)
    between_s = share * planned.dense_s + others_s
    return max(hop_s, between_s, get_optimizer_seconds(planned.setting))


def _warn_about_timeouts(planned: Estimate, timeouts: Timeouts) -> list[str]:
    setting, work_s = planned.setting, get_longest_work(planned)
    if work_s <= timeouts.hop / PATIENCE or setting.ring_size * setting.ulysses_size == 1:
        return []
    seconds = 10 * ceil(PATIENCE * work_s / 10)
    keys = f'"hop_timeout_seconds": {seconds}'
    if seconds > timeouts.step and not setting.host_is_device:
        keys += f' and "step_timeout_seconds": {seconds}'
    return [
        f"a rank works up to {work_s:.0f} s without a message, near hop_timeout_seconds ({timeouts.hop:g}),"
        f" after which a late one counts as failed: set {keys}"
    ]


def _exposed(planned: Estimate, hiding: Hiding) -> list[str]:
    cost, setting = planned.attention, planned.setting
    share = waiting(cost)
    if setting.ring_size == 1 or share <= EXPOSED:
        return []
    here, least = (
        count and count // setting.ulysses_size for count in (planned.layout.local_tokens, hiding.tokens)
    )
    advice = f"never: {hiding.never}" if least is None else f"from {least:,} tokens a device on they hide"
    return [
        f"transfers do not hide behind compute: {share:.0%} of each pass waits ({cost.exposed_hops} of"
        f" {cost.hops} hops) at {here:,} tokens a device; {advice}, or take a smaller ring and more Ulysses"
        " ranks"
    ]


def _warn_about_limits(planned: Estimate) -> list[str]:
    setting, warnings = planned.setting, []
    if setting.ring_size > 1 and planned.fixed_share > 0.5:  # most of it
        warnings.append(
            f"fixed costs of kernel calls and hops are {planned.fixed_share:.0%} of attention's passes at"
            f" {planned.layout.local_tokens // setting.ulysses_size:,} tokens a device: share a"
            " sequence among fewer devices, or take more Ulysses ranks"
        )
    if (positions := setting.model.positions) is not None and positions < setting.tokens:
        warnings.append(
            f"positions: the model's file reaches {positions:,} (max_position_embeddings and rope scaling),"
            f" fewer than {setting.tokens:,} tokens: scale them by {setting.tokens / positions:.3g} at least"
            " (rope_parameters in its config.json: YaRN, say; by more if the model's card has a shorter"
            " original length), or pack shorter documents"
        )
    if (experts := setting.model.experts) is not None:
        warnings.append(
            f"experts: layers of experts have {experts.number}, of which a token runs {experts.active},"
            " evenly spread; expert parallelism is not planned"
        )
    if any(isinstance(layer.kind, Selection) for layer in planned.other_layers):
        warnings.append(
            "chosen keys: which rows cross is known at run time; counted are all that a rank's queries see,"
            " at most k for each. Latents do not travel here"
        )
    if any(isinstance(layer.kind, Recurrence) for layer in planned.other_layers):
        warnings.append(
            "layers other than attention keep what goes into their kernels and comes out; what a kernel keeps"
            " inside is not counted, and their arithmetic is rough"
        )
    zero = setting.zero
    whole = replace(zero, partitioned_init=False).start(setting.model)
    if zero.stage == 3 and whole > planned.peak.total:
        warnings.append(
            f"made whole, the model takes {whole / GIB:.1f} GiB of every device at the start, more than the"
            " peak: make it under deepspeed.zero.Init, as Trainer's from_pretrained does at stage 3; the plan"
            " assumes that"
        )
    if setting.zero.stage in (1, 2, 3) and setting.zero.bucket_elements > setting.model.parameters:
        size = setting.zero.bucket_elements * setting.zero.element_bytes / GIB
        warnings.append(
            f"reduce_bucket_size {setting.zero.bucket_elements:,} is more than the model has parameters: each"
            f" bucket takes {size:.2f} GiB; {setting.model.largest_parameter:,} is enough"
        )
    return warnings
