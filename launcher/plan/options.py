"""List what makes a step need less memory on the same devices: one row for each option of a long sequence.

Owns the rows, which of them go together, and the choice of the cheapest set that fits. The savings of an
option are computed in `model_memory.py`, its costs in `estimate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial, reduce
from itertools import combinations
from math import gcd, lcm
from typing import NamedTuple

from ds_ring.config.json_text import SECTION, SP_KEY, Json
from ds_ring.limits import divisors
from ds_ring.memory.tiles.keys import get_chunk_tokens
from ds_ring.plugin import KERNELS, unmeasured
from ds_ring.schedule.lowering import LONG_SHARD

from .deepspeed_json import PRECISION_KEYS
from .estimate import Estimate, estimate, fits, settle, training_step
from .layer_passes import LayerPasses, layer_passes, rough_pass_memory
from .pass_memory import PassMemory
from .training_setting import TrainingSetting, like_in_memory

_HOST = "a hardware file with host_memory_bytes and host_link_bytes_per_s"


class MemoryOption(NamedTuple):
    """Describe an option."""

    flag: str  # of `ds-ring plan`
    # its part of the DeepSpeed JSON of a setting that has it; None: it is the model's, or the trainer's
    section: Callable[[TrainingSetting], Json] | None
    is_on: Callable[[TrainingSetting], bool]  # whether a setting has it
    apply: Callable[[TrainingSetting], TrainingSetting]  # turns it on
    needs: str = "any model"  # for the complaint where it is not possible
    is_possible: Callable[[TrainingSetting], bool] = lambda setting: True  # whether it can be turned on


def tiled_loss(setting: TrainingSetting, tokens: int | None = None) -> TrainingSetting:
    """Turn on a loss in tiles of so many tokens; None is the default size."""
    size = get_chunk_tokens(True if tokens is None else tokens, setting.model.vocab, setting.hardware.kind)
    return replace(setting, loss_tokens=size)


def tiled_mlp(setting: TrainingSetting, tokens: int | None = None) -> TrainingSetting:
    """Turn on MLPs in tiles of so many tokens; None is the default size."""
    width = setting.model.active_intermediate
    return replace(
        setting, mlp_tokens=get_chunk_tokens(True if tokens is None else tokens, width, setting.hardware.kind)
    )


def _has_host(setting: TrainingSetting) -> bool:
    hardware = setting.hardware
    known = hardware.host_memory_bytes is not None and hardware.host_link_bytes_per_s is not None
    return known or setting.host_is_device


def _make_long(key: str, value: int | None = True) -> Json:
    return {"ring_attention": {"long_sequence": {key: value}}}


def _make_offload(key: str, pins: bool) -> Json:
    return {"zero_optimization": {key: {"device": "cpu", "pin_memory": pins}}}


OPTIONS = (
    MemoryOption(
        "--tiled-loss",
        lambda s: _make_long("tiled_loss", tiled_loss(s) == s or s.loss_tokens),  # true is the default size
        lambda s: s.loss_tokens is not None,
        tiled_loss,
    ),
    MemoryOption(
        "--tiled-mlp",
        lambda s: _make_long("tiled_mlp", tiled_mlp(s) == s or s.mlp_tokens),
        lambda s: s.mlp_tokens is not None,
        tiled_mlp,
    ),
    MemoryOption(
        "--activation-checkpointing",
        None,
        lambda s: s.checkpointing,
        lambda s: replace(s, checkpointing=True),
    ),
    MemoryOption(
        "--offload-checkpoints",
        lambda s: _make_long("offload_checkpoints"),
        lambda s: s.offload_checkpoints,
        lambda s: replace(s, checkpointing=True, offload_checkpoints=True),
        _HOST,
        _has_host,
    ),
    MemoryOption(
        "--offload-attention",
        lambda s: _make_long("offload_attention"),
        lambda s: s.offload_attention is True,
        lambda s: replace(s, offload_attention=True),
        f"a GPU, and {_HOST}",
        lambda s: not s.host_is_device and _has_host(s),  # on the CPU it saves nothing
    ),
    MemoryOption(
        "--recompute-half-of-attention",
        lambda s: {"ring_attention": {"recompute_attention": 0.5}},
        lambda s: s.recompute_attention == 0.5,
        lambda s: replace(s, recompute_attention=0.5),
        "activation checkpointing, and no --recompute-attention",
        lambda s: s.checkpointing and s.recompute_attention == 0,
    ),
    MemoryOption(
        "--recompute-attention",
        lambda s: {"ring_attention": {"recompute_attention": True}},
        lambda s: s.recompute_attention == 1,
        lambda s: replace(s, recompute_attention=1.0),
        "activation checkpointing, and no --recompute-half-of-attention",
        lambda s: s.checkpointing and s.recompute_attention == 0,
    ),
    MemoryOption(
        "--offload-optimizer",
        lambda s: _make_offload("offload_optimizer", s.zero.pins_optimizer),
        lambda s: s.zero.offload_optimizer,
        lambda s: replace(s, zero=replace(s.zero, offload_optimizer=True)),
        f"ZeRO 1, 2 or 3 and {_HOST}",
        lambda s: s.zero.stage > 0 and _has_host(s),
    ),
    MemoryOption(
        "--offload-param",
        lambda s: _make_offload("offload_param", s.zero.pins_parameters),
        lambda s: s.zero.offload_parameters,
        lambda s: replace(s, zero=replace(s.zero, offload_parameters=True)),
        f"ZeRO 3 and {_HOST}",
        lambda s: s.zero.stage == 3 and _has_host(s),
    ),
)

CLEARLY_MORE, HARDLY_SLOWER = 0.1, 1.01  # of the memory that a plan may take; of its seconds

OptionSet = tuple[MemoryOption, ...]


def option_sets(setting: TrainingSetting) -> Iterator[tuple[OptionSet, TrainingSetting]]:
    """Yield every set of options that can be turned on, the empty one first, with the setting that has it.

    Where half of attention is computed again, all of it may be instead.
    """
    yield from _additions(setting)
    if 0 < setting.recompute_attention < 1:
        instead = _additions(replace(setting, recompute_attention=0.0))
        yield from (item for item in instead if item[1].recompute_attention == 1)


def _additions(setting: TrainingSetting) -> Iterator[tuple[OptionSet, TrainingSetting]]:
    checkpointed = replace(setting, checkpointing=True)  # what some of them need
    off = [
        option
        for option in OPTIONS
        if not option.is_on(setting)
        and (option.is_possible(setting) or option.is_possible(checkpointed))
        and not (setting.host_is_device and option.flag.startswith("--offload"))  # saves nothing there
    ]
    for count in range(len(off) + 1):
        for chosen in combinations(off, count):
            changed = with_options(setting, chosen)
            if changed is not None:
                yield chosen, changed


def with_options(setting: TrainingSetting, options: OptionSet) -> TrainingSetting | None:
    """Turn on options, in the order of the rows; None where one of them is not possible."""
    for option in options:
        if not option.is_possible(setting):
            return None
        setting = option.apply(setting)
    return setting


def fits_somehow(setting: TrainingSetting, slots: int, ring: PassMemory) -> bool:
    """Return whether a setting fits, or may fit with options, if it allows to add some.

    Args:
        setting: of the run.
        slots: of a ring rank.
        ring: what its passes need.
    """
    tried = _get_candidates(setting)
    return any(fits(candidate, training_step(candidate, slots, ring).moments()) for candidate in tried)


def _get_candidates(setting: TrainingSetting) -> Iterator[TrainingSetting]:
    """Yield a setting, with every set of options if it allows to add some."""
    sets = option_sets(setting)
    yield from (changed for _, changed in (sets if setting.may_add_options else [next(sets)]))


def sets_that_fit(setting: TrainingSetting, attention: LayerPasses | None = None) -> list[Estimate]:
    """Return the plans that fit, cheapest first, with the sets of options that a setting may add.

    None has a needless option.
    """
    attention = layer_passes(setting) if attention is None else attention
    fitting: list[Estimate] = []
    for changed in _get_candidates(settle(setting, attention.layout.local_tokens)):  # small sets come first
        flags = {*list_flags(changed)}
        if any(flags.issuperset(list_flags(smaller.setting)) for smaller in fitting):
            continue
        tried = estimate(changed, attention=attention)
        if tried.fits:
            fitting.append(tried)
    return sorted(fitting, key=lambda plan: (plan.step_s, len(list_flags(plan.setting))))


def plan_whole(setting: TrainingSetting, attention: LayerPasses | None = None) -> Estimate | None:
    """Return the plan of a whole ring, with the cheapest options if it may add some; None: it does not fit.

    Where these leave less than a tenth of the memory, options that leave clearly more in hardly more time are
    taken. Searches look at a small ring: the whole one may need a little more.
    """
    fitting = (
        sets_that_fit(shape, attention if shape.ulysses_size == setting.ulysses_size else None)
        for shape in list_shapes(setting)
    )
    cheapest = [plans[0] for plans in fitting if plans]
    if not cheapest:
        return None
    # Of shapes that are as fast the one that sends least: other jobs have the links, too.
    most_s = HARDLY_SLOWER * min(plan.step_s for plan in cheapest)
    best = min(
        (plan for plan in cheapest if plan.step_s < most_s),
        key=lambda plan: plan.sent_bytes + plan.swap_bytes,
    )
    if not setting.may_add_options or best.peak.total < (1 - CLEARLY_MORE) * setting.usable_bytes:
        return best
    return find_roomier(best, setting) or best


def list_shapes(setting: TrainingSetting) -> list[TrainingSetting]:
    """Return a setting; if it may split heads, one ring, and the most Ulysses ranks inside a node."""
    if not (setting.may_add_options and setting.may_split_heads):
        return [setting]
    ranks, node = setting.ring_size * setting.ulysses_size, setting.hardware.devices_per_node
    most = max(size for size in divisors(gcd(setting.model.kv_heads, ranks)) if size <= node)
    return [replace(setting, ring_size=ranks // size, ulysses_size=size) for size in sorted({1, most})]


def limit_ring(setting: TrainingSetting) -> TrainingSetting | None:
    """Return a setting whose shapes all have rings that a search may plan; None if none has.

    Where one ring is too large, the most Ulysses ranks inside a node may leave one that is not.
    """
    shapes = list_shapes(setting)
    small = [shape for shape in shapes if shape.ring_size <= MAX_RANKS]
    if len(small) == len(shapes):
        return setting
    return replace(small[-1], may_split_heads=False) if small else None


def estimate_sets(setting: TrainingSetting, attention: LayerPasses) -> Iterator[Estimate]:
    """Yield the plan with every set of options that can be turned on, the empty one first."""
    settled = settle(setting, attention.layout.local_tokens)
    yield from (estimate(changed, attention=attention) for _, changed in option_sets(settled))


def find_roomier(planned: Estimate, before_fit: TrainingSetting) -> Estimate | None:
    """Return the cheapest plan with clearly more memory left for less than 1 % more time; None if none.

    Args:
        planned: with what --fit chose.
        before_fit: the setting without that.
    """
    most_bytes = planned.peak.total - CLEARLY_MORE * planned.setting.usable_bytes
    ring_size, ulysses_size = planned.setting.ring_size, planned.setting.ulysses_size
    zero = replace(before_fit.zero, world=planned.setting.zero.world)
    before_fit = replace(before_fit, zero=zero, ring_size=ring_size, ulysses_size=ulysses_size)
    roomier = (
        plan
        for plan in estimate_sets(before_fit, planned.attention_passes)
        if plan.fits and plan.peak.total <= most_bytes and plan.step_s < HARDLY_SLOWER * planned.step_s
    )
    return min(roomier, key=lambda plan: (plan.step_s, plan.peak.total), default=None)


def list_flags(setting: TrainingSetting) -> tuple[str, ...]:
    """Return the options of `ds-ring plan` that a setting has."""
    return tuple(option.flag for option in OPTIONS if option.is_on(setting))


def make_json(setting: TrainingSetting) -> Json:
    """Return the part of the DeepSpeed JSON that turns on a setting's options."""
    parts = [option.section(setting) for option in OPTIONS if option.section and option.is_on(setting)]
    kernel = setting.kernel_that_runs
    able = [name for name in KERNELS if name not in setting.refused_kernels]
    if kernel != unmeasured(setting.hardware.kind, setting.kinds, able):  # what "auto" takes without rates
        parts.append({"ring_attention": {"kernel": kernel}})
    if setting.transport != "ring":
        parts.append({"ring_attention": {"transport": setting.transport}})
    return reduce(_merge, parts, {})


def make_deepspeed_json(setting: TrainingSetting, config: Json) -> Json:
    """Return a whole DeepSpeed JSON: that of --config, or one with AdamW, and all that the plan counts."""
    ring, ulysses = setting.ring_size, setting.ulysses_size
    batch: Json = {"train_micro_batch_size_per_gpu": setting.batch}
    samples = config.get("train_batch_size")
    if isinstance(samples, int):
        of_rings = setting.batch * setting.replicas
        steps = max(samples // of_rings, 1)
        batch = {"train_batch_size": steps * of_rings, **batch, "gradient_accumulation_steps": steps}
    if set(config) <= {SECTION, SP_KEY}:
        config = batch | {"optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}} | config
    precision = {
        key: {"enabled": dtype == setting.dtype}
        for key, dtype in PRECISION_KEYS.items()
        if dtype == setting.dtype or config.get(key, {}).get("enabled") in (True, "auto")
    }
    sizes = {"ring_size": ring} | ({"ulysses_size": ulysses} if ulysses > 1 else {})
    chosen: Json = {
        "zero_optimization": {"stage": setting.zero.stage},
        "sequence_parallel_size": ring * ulysses,
        "ring_attention": sizes,
    }
    return reduce(_merge, (config, batch, precision, chosen, make_json(setting)))


def _merge(whole: Json, part: Json) -> Json:
    """Return both: objects key by key, all else from the part."""
    merged = dict(whole)
    for key, value in part.items():
        both = isinstance(value, dict) and isinstance(whole.get(key), dict)
        merged[key] = _merge(whole[key], value) if both else value
    return merged


# Searches for the longest sequence and the fewest devices call `estimate.py` many times, on rings of at most
# four ranks with the same tokens per rank, so that a search over a thousand devices takes a second.

MAX_TOKENS = 1 << 40
MAX_DEVICES = 1 << 14
MAX_RANKS = 256  # of a ring that is planned in a search: it grows as its square, 4096 ranks take minutes
FINE = 1024  # a search ends when it is exact to 1 / FINE
FEW_STEPS = 8
SHARD_PARTS = 2  # of ds_ring's zigzag, and of the balanced order of torch's context parallelism


def can_hold(setting: TrainingSetting, local_tokens: int) -> bool:
    """Return whether devices and hosts hold so many tokens per rank, with options added where they may be."""
    smaller = like_in_memory(setting, local_tokens)
    if not fits_somehow(smaller, local_tokens, PassMemory(0, 0, 0)):  # no plan has to be made for it
        return False
    layout, memory = rough_pass_memory(smaller)
    return fits_somehow(smaller, layout.local_tokens, memory)


def longest_sequence(setting: TrainingSetting) -> int:
    """Return the most tokens T whose step fits the setting's devices, to 1 / 1024; 0 if none does.

    A ring rank's are a multiple of its Ulysses ranks, and of the two parts of a zigzag shard.
    """
    unit = lcm(setting.ulysses_size, SHARD_PARTS)
    most = MAX_TOKENS // setting.ring_size
    falls = {tokens for candidate in _get_candidates(setting) for tokens in memory_falls(candidate)}
    return setting.ring_size * longest_that(partial(can_hold, setting), falls, most, unit, FINE)


def name_limit(longest: TrainingSetting) -> str:
    """Return whose memory a sequence does not fit that is a sixteenth longer than the longest."""
    tokens = longest.tokens + longest.tokens // 16
    smaller = like_in_memory(longest, tokens // longest.ring_size)
    layout, memory = rough_pass_memory(smaller)
    moments = training_step(smaller, layout.local_tokens, memory).moments()
    on_device = max(moment.total for moment in moments) > longest.usable_bytes
    on_host = max(moment.host_total for moment in moments) > (longest.usable_host_bytes or 0.0)
    limits = ["the device's memory"] * on_device + ["the host's memory"] * on_host
    return " and ".join(limits) or "the search's end"


def memory_falls(setting: TrainingSetting) -> Iterator[int]:
    """Yield the tokens per ring rank from which on an option saves memory: below, it changes nothing."""
    if setting.mlp_tokens is not None:  # a tile is shorter than the tokens outside attention
        yield -(-(setting.mlp_tokens + 1) * setting.ulysses_size // setting.batch)
    if setting.offload_attention == "auto":
        yield LONG_SHARD


def longest_that(holds: Callable[[int], bool], falls: Iterable[int], most: int, unit: int, fine: int) -> int:
    """Return the largest multiple of `unit` up to `most` that holds, to 1 / `fine`; 0: none does.

    Between two of `falls`, whatever is longer than a length that does not hold does not hold either. The
    roundest length of the last interval is tried as well: pinned memory grows at powers of two.
    """
    starts = {-(-tokens // unit) * unit for tokens in falls}
    end = most // unit * unit + unit  # does not hold
    for start in sorted({unit, *(tokens for tokens in starts if unit < tokens < end)}, reverse=True):
        if holds(start):
            # How often `start` can be doubled, by halving the doublings that are possible.
            doublings, too_many = 0, (-(-end // start) - 1).bit_length()
            while too_many - doublings > 1:
                tried = (doublings + too_many) // 2
                doublings, too_many = (tried, too_many) if holds(start << tried) else (doublings, tried)
            low, high = start << doublings, min(start << too_many, end)
            while high - low > max(low // fine, unit):
                middle = (low + high) // 2 // unit * unit
                low, high = (middle, high) if holds(middle) else (low, middle)
            units, last = low // unit, high // unit - 1
            zeros = max((units ^ last).bit_length() - 1, 0)
            roundest = (last >> zeros << zeros) * unit
            return roundest if roundest > low and holds(roundest) else low
        end = start
    return 0


def longest_planned(setting: TrainingSetting) -> tuple[TrainingSetting | None, Estimate | None]:
    """Return the longest sequence that fits the whole ring, with options if it may add some, and its plan.

    Without a setting none fits; without a plan the ring is too large to be planned.
    """
    shapes = [_plan_longest(replace(shape, may_split_heads=False)) for shape in list_shapes(setting)]
    return max(shapes, key=lambda longest: longest[0].tokens if longest[0] else 0)


def _plan_longest(setting: TrainingSetting) -> tuple[TrainingSetting | None, Estimate | None]:
    tokens = longest_sequence(setting)
    if tokens and setting.ring_size > MAX_RANKS:
        return replace(setting, tokens=tokens), None
    unit = setting.ring_size * lcm(setting.ulysses_size, SHARD_PARTS)
    for step in range(FEW_STEPS if tokens else 0):
        if (planned := plan_whole(replace(setting, tokens=tokens))) is not None:
            return planned.setting, planned
        tokens -= (tokens << step) // FINE
        tokens -= tokens % unit
    return None, None


def fewest_planned(setting: TrainingSetting) -> tuple[TrainingSetting | None, Estimate | None]:
    """Return the setting on the fewest devices that fit the whole ring, and its plan.

    Without a setting none fits; without a plan the ring is too large to be planned.
    """
    fewest = fewest_devices(setting)
    while fewest is not None and (whole := limit_ring(fewest)) is not None:
        if (planned := plan_whole(whole)) is not None:
            return planned.setting, planned
        if whole is not fewest:  # its larger ring may fit
            break
        fewest = fewest_devices(setting, fewest.devices)
    return fewest, None


def fewest_devices(setting: TrainingSetting, beyond: int = 0) -> TrainingSetting | None:
    """Return the setting on the fewest devices, more than `beyond`, that fit, all in one ring, or None.

    Looked at are 1, 2, 4, ... devices and 1, 2, 3, 4, 6, ... nodes; of both, what Ulysses ranks divide.
    """
    unit = 1 if setting.may_add_options and setting.may_split_heads else setting.ulysses_size
    nodes = lcm(setting.hardware.devices_per_node, unit)
    powers = range(MAX_DEVICES.bit_length())
    sizes = {start << power for start in (unit, nodes, 3 * nodes) for power in powers}
    for size in sorted(sizes):
        if beyond < size < setting.tokens + unit and size <= MAX_DEVICES:
            zero = replace(setting.zero, world=size)
            whole = replace(setting, ring_size=size // unit, ulysses_size=unit, zero=zero)
            for shape in list_shapes(whole):
                if can_hold(shape, -(-setting.tokens // size) * shape.ulysses_size):
                    return shape
    return None
