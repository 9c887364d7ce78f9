"""Read from a DeepSpeed JSON what a plan counts: dtype, batch, micro-batches, how ZeRO keeps states.

Owns the table of DeepSpeed's keys: those that a plan counts, those that change neither memory nor traffic (or
take less than the plan says), and the values of others that it refuses, by name, as it does not count them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from ds_ring.config.json_text import Json
from ds_ring.config.messages import sentence, shown
from ds_ring.config.problems import Problem, config_error, did_you_mean
from ds_ring.errors import RingConfigError

from .model_file import ModelShape
from .model_memory import Zero
from .training_setting import ELEMENT_BYTES

ZERO = "zero_optimization"
PRECISION_KEYS = {"bf16": "bfloat16", "fp16": "float16"}  # with their dtypes
MICRO, SAMPLES = "train_micro_batch_size_per_gpu", "train_batch_size"
STEPS = "gradient_accumulation_steps"
MAX_BATCH, MAX_ELEMENTS = 2**20, 2**53
_AUTO = "auto"
_LABEL = "--config"


class PlannedValues(NamedTuple):
    """Hold the values of a key that a plan counts, and what to do with others."""

    allowed: tuple[Any, ...] | int  # these values, or numbers up to this one
    advice: str = "a plan does not count what it changes: leave the key out"
    least_stage: int = 0  # of ZeRO; below, the key has no effect


_OFF = PlannedValues((False,))
_OFF_AT_3 = PlannedValues((False,), least_stage=3)
_HOST = PlannedValues(("cpu", "none"), "a plan counts no disks: plan with the host's memory")

# Keys of "zero_optimization", DeepSpeed 0.19.8: what a plan reads; what changes neither memory nor traffic of
# a step, or takes less than the plan says; the values that a plan allows, of any key of the JSON.
COUNTED = {
    "stage", "reduce_bucket_size", "stage3_max_live_parameters", "sub_group_size", "overlap_comm",
    "offload_optimizer", "offload_param",
}  # fmt: skip
IGNORED = {
    "contiguous_gradients",  # without it flat copies take the bucket's place
    "use_multi_rank_bucket_allreduce", "allgather_partitions", "allgather_bucket_size",
    "compute_grad_norm", "ignore_unused_parameters", "round_robin_gradients", "parameter_alignment",
    # inside what stage3_max_live_parameters allows
    "stage3_prefetch_bucket_size", "stage3_model_persistence_threshold", "stage3_max_reuse_distance",
    "stage3_allgather_sequential", "leaf_module",
    # of checkpoints, logs and checks
    "load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    "log_trace_cache_warnings", "enable_sanity_checks", "override_module_apply",
    # without effect, and of another optimizer
    "cpu_offload_use_pin_memory", "save_muon_momentum_buffer_in_memory",
}  # fmt: skip
REFUSED = {
    "zero_optimization.reduce_scatter": PlannedValues((True,), least_stage=3),
    "zero_optimization.cpu_offload": PlannedValues(
        (False,), 'write "offload_optimizer": {"device": "cpu"} in its place'
    ),
    "zero_optimization.cpu_offload_param": PlannedValues(
        (False,), 'write "offload_param": {"device": "cpu"} in its place'
    ),
    # norms and routers have fewer, matrices would stay whole on each device
    "zero_optimization.stage3_param_persistence_threshold": PlannedValues(
        1_000_000, "a plan divides all matrices: take less", least_stage=3
    ),
    "zero_optimization.stage3_module_granularity_threshold": PlannedValues(0, least_stage=3),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _OFF_AT_3,
    "zero_optimization.zero_hpz_partition_size": PlannedValues(1, least_stage=3),
    "zero_optimization.zero_quantized_weights": _OFF_AT_3,
    "zero_optimization.zero_quantized_nontrainable_weights": _OFF_AT_3,
    "zero_optimization.zero_quantized_gradients": _OFF_AT_3,
    "zero_optimization.memory_efficient_linear": PlannedValues((True,), least_stage=3),
    "zero_optimization.zenflow": PlannedValues(()),
    "zero_optimization.legacy_stage1": _OFF,
    "zero_optimization.offload_optimizer.device": _HOST,
    "zero_optimization.offload_optimizer.ratio": PlannedValues((1,), "a plan has all states on the host"),
    "zero_optimization.offload_optimizer.super_offload": _OFF,
    "zero_optimization.offload_param.device": _HOST,
    "bf16.bf16_master_weights_and_grads": _OFF,
    "bf16.bf16_optimizer_states": _OFF,
    "fp16.fp16_master_weights_and_grads": _OFF,
    "torch_autocast.enabled": _OFF,
}
_TWO_MOMENTS = ("adam", "adamw", "muadam", "muadamw", "lamb")  # optimizers with Adam's states
# A dtype that a plan takes to be the parameters'.
DTYPES = ("data_types.grad_accum_dtype", "communication_data_type")
_DTYPE_NAMES = {
    "float32": ("fp32", "float32", "float", "torch.float32"),
    "float16": ("fp16", "float16", "half", "torch.float16"),
    "bfloat16": ("bf16", "bfloat16", "torch.bfloat16"),
}
_FULL_NAMES = {
    key.removeprefix("stage3_"): key
    for key in (*COUNTED, *IGNORED, *(name.removeprefix(f"{ZERO}.") for name in REFUSED))
    if key.startswith("stage3_")
}


class DeepSpeedKeys(NamedTuple):
    """Hold what a plan takes from a DeepSpeed JSON, or from the options that come before it."""

    dtype: str
    batch: int  # sequences of a ring at a time
    zero: Zero


def read_deepspeed(
    options: argparse.Namespace, whole: Json, model: ModelShape, devices: int | None, ranks: int, kind: str
) -> DeepSpeedKeys:
    """Return what a plan counts; RingConfigError with everything that it does not, and every open "auto".

    Args:
        options: of `ds-ring plan`.
        whole: the JSON; without --config only the ring's section.
        model: that is trained.
        devices: of the run, None where they are searched.
        ranks: that share a sequence.
        kind: of the devices, "cuda" or "cpu".
    """
    section = _read_object(whole, ZERO)
    section = {_FULL_NAMES.get(key, key): value for key, value in section.items()}
    whole = whole | {ZERO: section}
    problems: list[Problem] = []
    dtype, stage = _read_dtype(options, whole, problems), _read_stage(options, section, problems)
    batch, steps = _read_batch(options, whole, devices, ranks, stage, problems)
    problems += _refuse(whole, dtype, stage)
    if problems:
        raise config_error(_LABEL, *problems)
    numbers = {
        "bucket_elements": _read_number(section, f"{ZERO}.", "reduce_bucket_size", 1, MAX_ELEMENTS),
        "live_elements": _read_number(section, f"{ZERO}.", "stage3_max_live_parameters", 0, MAX_ELEMENTS),
        "sub_group_elements": _read_number(section, f"{ZERO}.", "sub_group_size", 1, MAX_ELEMENTS),
    }
    if section.get("reduce_bucket_size") == _AUTO:  # as ds_ring.initialize and Hugging Face fill it in
        numbers["bucket_elements"] = model.hidden**2
    sizes: dict[str, Any] = {name: int(value) for name, value in numbers.items() if value is not None}
    overlap = _read_flag(section, f"{ZERO}.", "overlap_comm")
    optimizer, parameters = (
        _read_object(section, key, f"{ZERO}.") for key in ("offload_optimizer", "offload_param")
    )
    zero = Zero(
        stage,
        devices or ranks,
        ELEMENT_BYTES[dtype],
        overlap_comm=stage == 3 if overlap is None else overlap,
        fused_adam=kind == "cuda" and _find(whole, "optimizer.params.torch_adam") is not True,
        # to the host's memory
        offload_optimizer=optimizer.get("device") == "cpu",
        offload_parameters=parameters.get("device") == "cpu",
        pins_optimizer=_read_flag(optimizer, f"{ZERO}.offload_optimizer.", "pin_memory") is not False,
        pins_parameters=_read_flag(parameters, f"{ZERO}.offload_param.", "pin_memory") is not False,
        accumulates=steps > 1,
        **sizes,
    )
    return DeepSpeedKeys(dtype, batch, zero)


def _read_dtype(options: argparse.Namespace, whole: Json, problems: list[Problem]) -> str:
    """Return the dtype; DeepSpeed's default is float32, ours without a JSON bfloat16."""
    if options.dtype is not None:
        return str(options.dtype)
    flags = {key: _read_flag(_read_object(whole, key), f"{key}.", "enabled") for key in PRECISION_KEYS}
    for key, is_on in flags.items():
        if is_on:
            return PRECISION_KEYS[key]
    problems += [
        Problem(f"{key}.enabled", sentence("true or false", '"auto"', f"give --dtype, {dtype}, say"))
        for key, dtype in PRECISION_KEYS.items()
        if _read_object(whole, key).get("enabled") == _AUTO
    ]
    return "float32" if options.config else "bfloat16"


def _read_stage(options: argparse.Namespace, section: Json, problems: list[Problem]) -> int:
    """Return the ZeRO stage; without a JSON it is 3, which long sequences need."""
    if options.zero_stage is not None:
        return int(options.zero_stage)
    stage = _read_number(section, f"{ZERO}.", "stage", 0, 3)
    if section.get("stage") == _AUTO:
        problems.append(Problem(f"{ZERO}.stage", sentence("0 to 3", '"auto"', "give --zero-stage")))
    return int(stage or 0) if options.config else 3


def _read_batch(
    options: argparse.Namespace, whole: Json, devices: int | None, ranks: int, stage: int,
    problems: list[Problem],
) -> tuple[int, int]:  # fmt: skip
    """Return the sequences of a ring at a time, and the micro-batches of a step, as DeepSpeed finds them.

    Both are 1 where the JSON says nothing. (While devices are searched, the replicas are not known.)
    """
    replicas = (devices or ranks) // ranks
    numbers = (_read_number(whole, "", key, 1, MAX_BATCH) for key in (MICRO, SAMPLES, STEPS))
    micro, samples, steps = (None if value is None else int(value) for value in numbers)
    batch = options.batch or micro
    if batch is None and samples is not None:
        batch = samples // (steps or 1) // replicas
    if batch is None and whole.get(MICRO) == _AUTO:
        problems.append(Problem(MICRO, sentence("a number", '"auto"', "give --batch")))
    if samples is not None and batch and (steps is None or options.batch):
        steps = samples // batch // replicas
    if steps is None and whole.get(STEPS) == _AUTO and stage < 3:  # which keeps gradients between them
        advice = "write 1, or the micro-batches of a step"
        problems.append(Problem(STEPS, sentence(f"a number at ZeRO {stage}", '"auto"', advice)))
    counted = (1 if batch is None else batch) * (1 if steps is None else steps) * replicas
    if samples not in (None, counted) and devices is not None and not options.batch:
        sizes = f"{batch} a replica x {steps or 1} steps x {replicas} replicas"
        advice = "correct one of the three keys: DeepSpeed refuses this, too"
        problems.append(Problem(SAMPLES, sentence(f"{counted:,} ({sizes})", shown(samples), advice)))
    return batch or 1, steps or 1


def _refuse(whole: Json, dtype: str, stage: int) -> Iterator[Problem]:
    """Yield what DeepSpeed would do and a plan does not count."""
    known = {*COUNTED, *IGNORED, *(name.split(".")[1] for name in REFUSED if name.startswith(ZERO))}
    for key in whole[ZERO]:
        if key not in known:
            near = did_you_mean(key, known)
            advice = f"did you mean {near!r}?" if near else "leave it out"
            yield Problem(f"{ZERO}.{key}", sentence("a key of DeepSpeed 0.19.8", "an unknown one", advice))
    for name, (allowed, advice, least_stage) in REFUSED.items():
        value = _find(whole, name)
        if value in (None, _AUTO) or stage < least_stage:
            continue
        if isinstance(allowed, int):
            if isinstance(value, (int, float)) and value <= allowed:
                continue
            expected = f"at most {allowed:,}"
        elif value in allowed:
            continue
        else:
            expected = " or ".join(map(shown, allowed)) or "no such section"
        yield Problem(name, sentence(expected, shown(value), advice))
    if not stage and _find(whole, f"{ZERO}.offload_optimizer.device") == "cpu":
        what = sentence("ZeRO 1, 2 or 3", "ZeRO 0", "leave it out: DeepSpeed's step fails")
        yield Problem(f"{ZERO}.offload_optimizer", what)
    optimizer = _find(whole, "optimizer.type")
    if optimizer is not None and str(optimizer).lower() not in _TWO_MOMENTS:
        advice = "a plan counts Adam's two moments: leave the section out"
        yield Problem("optimizer.type", sentence("Adam or AdamW", shown(optimizer), advice))
    for name in DTYPES:
        value = _find(whole, name)
        if value is not None and str(value).lower() not in _DTYPE_NAMES[dtype]:
            advice = "a plan counts gradients in the parameters' dtype: leave the key out"
            yield Problem(name, sentence(dtype, shown(value), advice))


def _find(whole: Json, name: str) -> Any:
    """Return the value of a dotted key, None where it is left out."""
    *sections, key = name.split(".")
    for depth, section in enumerate(sections):
        whole = _read_object(whole, section, "".join(f"{outer}." for outer in sections[:depth]))
    return whole.get(key)


def _read_object(whole: Json, key: str, prefix: str = "") -> Json:
    """Return a sub-section; nothing where it is left out."""
    value = whole.get(key)
    if value is not None and not isinstance(value, dict):
        raise RingConfigError.wrong(f"{_LABEL}: {prefix}{key}", "an object {...}", value, "correct it")
    return value or {}


def _read_number(section: Json, prefix: str, key: str, least: int, most: int) -> float | None:
    """Return a number, None where it is left out or "auto"."""
    value = section.get(key)
    if value is None or value == _AUTO:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        what = sentence(f"a number from {least} to {most:,}", shown(value), "correct it")
        raise RingConfigError(f"{_LABEL}: {prefix}{key}: {what}")
    return value


def _read_flag(section: Json, prefix: str, key: str) -> bool | None:
    """Return a switch, None where it is left out or "auto"."""
    value = section.get(key)
    if value is None or value == _AUTO:
        return None
    if not isinstance(value, bool):
        what = sentence("true or false", shown(value), "write it without quotes")
        raise RingConfigError(f"{_LABEL}: {prefix}{key}: {what}")
    return value
