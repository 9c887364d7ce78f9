"""Turn the options of `ds-ring plan` into a `TrainingSetting`: read files, fill in defaults, search.

Options come before the DeepSpeed JSON, which comes before defaults.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ds_ring.config.json_text import SECTION, SP_KEY, parse_object, resolve
from ds_ring.config.messages import sentence, shown
from ds_ring.config.problems import listed
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError
from ds_ring.limits import divisors
from ds_ring.masks.pattern import Pattern
from ds_ring.plugin import PASSES

from ..commands.parsers import require_sizes
from .deepspeed_json import read_deepspeed
from .hardware import read_hardware
from .model_file import (
    layer_patterns,
    patterns_by,
    read_complete_config,
    read_model,
)
from .options import (
    MAX_TOKENS,
    OPTIONS,
    fewest_devices,
    longest_planned,
    plan_whole,
    tiled_loss,
    tiled_mlp,
)
from .other_layers import Kind, Selection
from .training_setting import TrainingSetting

_Raw = dict[str, Any]
_MAX_DEVICES = 2**16
DEFAULT_TILE = MAX_TOKENS  # of --tiled-loss and --tiled-mlp without a number
_MAX_SIZES = {
    "tokens": MAX_TOKENS,
    "devices": _MAX_DEVICES,
    "ring_size": _MAX_DEVICES,
    "ulysses_size": _MAX_DEVICES,
    "batch": 2**20,
    "tiled_loss": MAX_TOKENS,
    "tiled_mlp": MAX_TOKENS,
}


@dataclass(frozen=True)
class PlanRequest:
    """Hold what the options of `ds-ring plan` ask for."""

    setting: TrainingSetting  # the planned one
    before_fit: TrainingSetting  # without the options that --fit has turned on
    config: _Raw  # the DeepSpeed JSON of --config
    section: RingConfig  # its "ring_attention", with the options in it
    names_ring: bool  # whether --ring-size or the JSON does


def make_request(options: argparse.Namespace, say: Callable[[str], None]) -> PlanRequest:
    """Return what the options ask for; with --tokens or --devices left out, what a search found."""
    require_sizes(options, _MAX_SIZES)
    config, whole, names_ring = _ring_config(options)
    ulysses = config.ulysses_size
    ring_size = options.ring_size or (config.ring_size if options.config else None)
    devices, ring = _sizes(options.devices, ring_size, ulysses)
    # Checked before any search, which may take seconds.
    names_shape = names_ring or "ulysses_size" in whole[SECTION]
    setting = fitted = _setting(options, config, whole, devices, ring, names_shape)
    if options.tokens is None and devices is None:
        raise RingConfigError("expected --tokens, --devices or both, got neither; give one of them")
    if devices is None:
        say("the fewest devices that fit")
        smallest = fewest_devices(setting)
        if smallest is None:
            raise RingConfigError.wrong(
                "--devices", f"room for {setting.tokens:,} tokens", "none up to 16384", "try --fit"
            )
        setting = fitted = smallest
    elif options.tokens is None:
        say("the longest sequence that fits")
        longest, _ = longest_planned(setting)
        if longest is None:
            raise RingConfigError.wrong(
                "--tokens", f"a length that fits {setting.devices} devices", "none", "take more devices"
            )
        fitted, setting = longest, replace(setting, tokens=longest.tokens)
    if options.fit:
        say("the cheapest options that fit")
        planned = plan_whole(setting)
        fitted = setting if planned is None else planned.setting
    return PlanRequest(fitted, setting, whole, config, names_ring)


def _ring_config(options: argparse.Namespace) -> tuple[RingConfig, _Raw, bool]:
    """Return the section with the options in it, checked as any section is, the whole JSON, `names_ring`."""
    whole: _Raw = resolve(options.config, RingConfig)[1] if options.config else {SECTION: {}}
    section: _Raw = dict(whole[SECTION])
    sizes = {"ring_size": options.ring_size, "ulysses_size": options.ulysses_size, "layout": options.layout}
    section |= {key: value for key, value in sizes.items() if value is not None}
    if options.pattern is not None:
        section["pattern"] = parse_object(options.pattern, "--pattern")
    if options.ring_size:  # refuses what the JSON would
        whole = {key: value for key, value in whole.items() if key != SP_KEY}
    names_ring = SP_KEY in whole or isinstance(section.get("ring_size"), int)
    if not names_ring:
        section["ring_size"] = max((options.devices or 1) // (options.ulysses_size or 1), 1)
    return *resolve(whole | {SECTION: section}, RingConfig), names_ring


def _sizes(devices: int | None, ring: int | None, ulysses: int) -> tuple[int | None, int]:
    """Return devices (None: to be searched) and the ring size."""
    if devices is None:
        return (None, 1) if ring is None else (ring * ulysses, ring)
    if ring is None:
        ring = max(devices // ulysses, 1)
    if devices % (ring * ulysses):
        raise RingConfigError(
            f"--devices: expected a multiple of {ring * ulysses} (ring x Ulysses), got {devices}"
        )
    return devices, ring


def _setting(
    options: argparse.Namespace, config: RingConfig, whole: _Raw, devices: int | None, ring: int,
    names_shape: bool,
) -> TrainingSetting:  # fmt: skip
    if PASSES[config.transport].no_hops is not None:
        advice = "plan computes ring passes: leave the key out for it"
        what = sentence('"ring"', shown(config.transport), advice)
        raise RingConfigError(f"--config: {SECTION}.transport: {what}")
    model, ulysses = read_model(options), config.ulysses_size
    if ring * ulysses > _MAX_DEVICES:
        expected = f"at most {_MAX_DEVICES:,} ranks"
        raise RingConfigError(f"ring size: {sentence(expected, shown(ring * ulysses), 'take fewer')}")
    if model.kv_heads % ulysses:
        advice = f"use {listed(divisors(model.kv_heads))}, and a ring for the other ranks"
        raise RingConfigError.wrong(
            "ulysses_size", f"a divisor of {model.kv_heads} K/V heads", ulysses, advice
        )
    hardware = read_hardware(options.hardware)
    dtype, batch, zero = read_deepspeed(options, whole, model, devices, ring * ulysses, hardware.kind)
    hardware.flops(dtype)  # or an error with its dtypes
    model_patterns = (
        (None,) * model.layers
        if options.hf_config is None
        else patterns_by(read_complete_config(options.hf_config))
    )
    patterns = layer_patterns(config, model_patterns, options.tokens or MAX_TOKENS)
    kinds = model.kinds or (None,) * model.layers
    attention = Counter(
        layer_pattern for layer_pattern, kind in zip(patterns, kinds, strict=True) if kind is None
    )
    others = (
        (kind, layer_pattern) for layer_pattern, kind in zip(patterns, kinds, strict=True) if kind is not None
    )
    other_layers: Counter[tuple[Kind, Pattern]] = Counter(others)
    if ulysses > 1 and any(isinstance(kind, Selection) for kind in model.other_layers):
        expected = "1 for attention over chosen keys"
        raise RingConfigError(f"Ulysses size: {sentence(expected, str(ulysses), 'use a larger ring')}")
    if model.attention_layers == 0:
        raise RingConfigError("--hf-config: layer_types: expected a layer of attention, got none; add one")
    setting = TrainingSetting(
        tokens=options.tokens or 1,
        ring_size=ring,
        ulysses_size=ulysses,
        model=model,
        pattern=tuple(attention.items()),
        other_layers=tuple((*which, layers) for which, layers in other_layers.items()),
        layout=config.layout,
        zero=zero,
        dtype=dtype,
        hardware=hardware,
        batch=batch,
        recompute_attention=float(config.recompute_attention),
        may_add_options=options.fit,
        may_split_heads=not (names_shape or config.dynamic_ring or model.other_layers),
        transport=config.transport,
        overlap=config.overlap,
        prune=config.prune,
        chunk_bytes=config.chunk_bytes,
        stage_bytes=config.stage_bytes,
        gradient_payload=config.gradient_payload,
        kernel=config.kernel,
        block_size=config.block_size,
    )
    _ = setting.kernel_that_runs  # or an error: no rates, or another dtype
    return _with_options(setting, options, config)


def _with_options(
    setting: TrainingSetting, options: argparse.Namespace, config: RingConfig
) -> TrainingSetting:
    """Turn on what the command line or the JSON asks for of `launcher/plan/options.py`."""
    long, gpu = config.long_sequence, not setting.host_is_device
    for key, turn_on in (("tiled_loss", tiled_loss), ("tiled_mlp", tiled_mlp)):
        tile_option = getattr(options, key)
        tile = (
            getattr(long, key)
            if tile_option is None
            else (True if tile_option == DEFAULT_TILE else tile_option)
        )
        if tile is not False:
            setting = turn_on(setting, None if tile in (True, "auto") else tile)
    offloads = long.offload_checkpoints is True or (long.offload_checkpoints == "auto" and gpu)
    setting = replace(setting, offload_attention=long.offload_attention)
    for option in OPTIONS:
        name = option.flag.removeprefix("--").replace("-", "_")
        wanted = (offloads and name == "offload_checkpoints") or (
            name not in _MAX_SIZES and getattr(options, name)
        )
        if not wanted or option.is_on(setting):
            continue
        if not option.is_possible(setting):
            raise RingConfigError(f"{option.flag}: {sentence(option.needs, 'another one', 'leave it out')}")
        setting = option.apply(setting)
    return setting
