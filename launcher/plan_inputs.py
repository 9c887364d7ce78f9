"""From the options of `ds-ring plan` to a `Setting`: files read, defaults filled in, what is open searched.

Options come before the DeepSpeed JSON, which comes before defaults.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ds_ring.config import RingConfig
from ds_ring.config_deepspeed import SECTION, SP_KEY, resolve
from ds_ring.errors import RingConfigError
from ds_ring.schedule.pattern_config import pattern_from_config
from ds_ring.schedule.search import fewest_devices, longest_sequence
from ds_ring.schedule.setting import ELEMENT_BYTES, Setting
from ds_ring.schedule.zero_memory import Zero

from .hardware_file import read_hardware
from .model_file import model_of

_Raw = dict[str, Any]
_POSITIVE = ("tokens", "devices", "ring_size", "ulysses_size", "batch", "loss_chunk")


def settings_of(options: argparse.Namespace, say: Callable[[str], None]) -> Setting:
    """What the options ask for; with --tokens or --devices left out, what a search found.

    Raises:
        RingConfigError: an option or a file is wrong, options contradict each other, or nothing fits.
    """
    for name in _POSITIVE:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise RingConfigError(
                f"--{name.replace('_', '-')}: expected a number of at least 1, got {value}; correct it"
            )
    config, whole = _ring_config(options)
    ulysses = config.ulysses_size
    given = options.ring_size or (config.ring_size if options.config else None)
    devices, ring = _sizes(options.devices, given, ulysses)
    setting = _setting(options, config, whole, devices, ring)
    if options.tokens is None and devices is None:
        raise RingConfigError(
            "expected --tokens, --devices or both, got neither; give one, and the other is searched for"
        )
    if devices is None:
        say("the fewest devices that fit")
        return _fewest(setting)
    if options.tokens is None:
        say("the longest sequence that fits")
        return _longest(setting)
    return setting


def _ring_config(options: argparse.Namespace) -> tuple[RingConfig, _Raw]:
    """The section with the options in it, checked as any section is, and the whole JSON."""
    whole: _Raw = resolve(options.config, RingConfig)[1] if options.config else {SECTION: {}}
    section: _Raw = dict(whole[SECTION])
    given = {"ring_size": options.ring_size, "ulysses_size": options.ulysses_size, "layout": options.layout}
    section |= {key: value for key, value in given.items() if value is not None}
    if options.pattern is not None:
        section["pattern"] = _pattern_text(options.pattern)
    if options.ring_size:  # says what the JSON's whole would
        whole = {key: value for key, value in whole.items() if key != SP_KEY}
    if SP_KEY not in whole and not isinstance(section.get("ring_size"), int):
        section["ring_size"] = max((options.devices or 1) // (options.ulysses_size or 1), 1)
    return resolve(whole | {SECTION: section}, RingConfig)


def _pattern_text(text: str) -> _Raw:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        what = f"expected a JSON object, got {text!r}: {error}; quote it for the shell"
        raise RingConfigError(f"--pattern: {what}") from None
    if not isinstance(value, dict):
        what = f"expected a JSON object, got {text}"
        raise RingConfigError(f"""--pattern: {what}; write '{{"window": 4096}}', say""")
    return value


def _sizes(devices: int | None, ring: int | None, ulysses: int) -> tuple[int | None, int]:
    """Devices (None: to be searched) and the ring size."""
    if devices is None:
        return (None, 1) if ring is None else (ring * ulysses, ring)
    if ring is None:
        ring = max(devices // ulysses, 1)
    if devices % (ring * ulysses):
        raise RingConfigError(
            f"--devices {devices}: expected a multiple of ring size {ring} x Ulysses size {ulysses}, got"
            f" {devices}; change one of them"
        )
    return devices, ring


def _setting(
    options: argparse.Namespace, config: RingConfig, whole: _Raw, devices: int | None, ring: int
) -> Setting:
    model, ulysses = model_of(options), config.ulysses_size
    if model.kv_heads % ulysses:
        raise RingConfigError(
            f"Ulysses size {ulysses}: expected a divisor of the model's {model.kv_heads} K/V heads;"
            " use a larger ring instead"
        )
    dtype = options.dtype or _dtype(whole, bool(options.config))
    hardware = read_hardware(options.hardware)
    hardware.flops(dtype)  # or an error that names what it has
    batch = options.batch or whole.get("train_micro_batch_size_per_gpu")
    return Setting(
        tokens=options.tokens or 1,
        ring_size=ring,
        ulysses_size=ulysses,
        model=model,
        pattern=pattern_from_config(config),
        layout=config.layout,
        zero=_zero(options, whole, dtype, devices or ring * ulysses, hardware.kind),
        dtype=dtype,
        hardware=hardware,
        batch=batch if isinstance(batch, int) else 1,
        checkpointing=options.activation_checkpointing,
        loss_tokens=options.loss_chunk,
        overlap=config.overlap,
        prune=config.prune,
        chunk_bytes=config.chunk_bytes,
    )


def _dtype(whole: _Raw, from_json: bool) -> str:
    """What the JSON enables; DeepSpeed's default is float32, ours without a JSON bfloat16."""
    for key, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        if (whole.get(key) or {}).get("enabled"):
            return name
    return "float32" if from_json else "bfloat16"


def _zero(options: argparse.Namespace, whole: _Raw, dtype: str, devices: int, kind: str) -> Zero:
    section: _Raw = whole.get("zero_optimization") or {}
    stage = options.zero_stage
    if stage is None:
        stage = section.get("stage", 0) if options.config else 3
    numbers = {
        "bucket_elements": section.get("reduce_bucket_size"),
        "live_elements": section.get("stage3_max_live_parameters"),
    }
    more = {name: int(value) for name, value in numbers.items() if isinstance(value, (int, float))}
    overlap = section.get("overlap_comm")
    return Zero(
        stage,
        devices,
        ELEMENT_BYTES[dtype],
        overlap_comm=stage == 3 if overlap is None else bool(overlap),
        fused_adam=kind == "cuda",
        **more,
    )


def _fewest(setting: Setting) -> Setting:
    found = fewest_devices(setting)
    if found is None:
        raise RingConfigError(
            f"--devices: expected some number of {setting.hardware.name} to fit {setting.tokens:,} tokens,"
            " got none up to 16384; try --activation-checkpointing, --loss-chunk 8192 or --ulysses-size"
        )
    return found


def _longest(setting: Setting) -> Setting:
    tokens = longest_sequence(setting)
    if not tokens:
        raise RingConfigError(
            f"--tokens: expected some sequence to fit {setting.devices} x {setting.hardware.name} at ZeRO"
            f" {setting.zero.stage}, got none; take more devices, another stage or a smaller"
            " reduce_bucket_size"
        )
    return replace(setting, tokens=tokens)
