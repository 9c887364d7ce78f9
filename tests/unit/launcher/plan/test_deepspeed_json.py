"""What a plan takes from a DeepSpeed JSON, and what it refuses because it would count something else."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from ds_ring.errors import RingConfigError
from ds_ring_launcher.plan import deepspeed_json
from ds_ring_launcher.plan.deepspeed_json import DeepSpeedKeys, read_deepspeed
from ds_ring_launcher.plan.model_file import ModelShape

MODEL = ModelShape(2, 64, 4, 2, 16, 128, 256)


def read(
    config: dict[str, Any], devices: int | None = 8, kind: str = "cuda", **options: Any
) -> DeepSpeedKeys:
    """Return what a JSON with rings of four ranks says, `zero` short for "zero_optimization"."""
    if "zero" in config:
        config = config | {"zero_optimization": config["zero"]}
        del config["zero"]
    namespace = argparse.Namespace(
        **{"config": "ds.json", "dtype": None, "zero_stage": None, "batch": None} | options
    )
    return read_deepspeed(namespace, config, MODEL, devices, 4, kind)


def refused(config: dict[str, Any], **options: Any) -> str:
    with pytest.raises(RingConfigError) as error:
        read(config, **options)
    return str(error.value)


def test_every_key_of_deepspeed_has_a_row() -> None:
    """(Most were ignored without a decision.)"""
    names = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    refused_names = {name.split(".")[1] for name in deepspeed_json.REFUSED if name.startswith("zero_")}
    rows = [deepspeed_json.COUNTED, deepspeed_json.IGNORED, refused_names - deepspeed_json.COUNTED]
    assert set().union(*rows) == names
    assert sum(map(len, rows)) == len(names)  # one row each


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zero": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            'zero_optimization.offload_optimizer.device: expected "cpu" or "none", got "nvme"'),
        ({"zero": {"stage": 3, "offload_param": {"device": "nvme"}}}, 'offload_param.device: expected "cpu"'),
        ({"zero": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            "zero_optimization.offload_optimizer.ratio: expected 1, got 0.3"),
        ({"zero": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "super_offload: expected false, got true"),
        ({"zero": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer: expected ZeRO 1, 2 or 3, got ZeRO 0"),
        ({"zero": {"stage": 2, "cpu_offload": True}}, 'write "offload_optimizer": {"device": "cpu"}'),
        ({"zero": {"stage": 3, "cpu_offload_param": True}}, 'write "offload_param": {"device": "cpu"}'),
        ({"zero": {"stage": 3, "zero_hpz_partition_size": 8}}, "partition_size: expected at most 1, got 8"),
        ({"zero": {"stage": 3, "zero_quantized_weights": True}}, "weights: expected false, got true"),
        ({"zero": {"stage": 3, "zero_quantized_gradients": True}}, "quantized_gradients: expected false"),
        ({"zero": {"stage": 3, "reduce_scatter": False}}, "reduce_scatter: expected true, got false"),
        ({"zero": {"stage": 3, "param_persistence_threshold": 1e9}},
            "zero_optimization.stage3_param_persistence_threshold: expected at most 1,000,000"),
        ({"zero": {"stage": 2, "zenflow": {}}}, "zero_optimization.zenflow: expected no such section"),
        ({"zero": {"stage": 2, "reduce_bucket": 5}}, "did you mean 'reduce_bucket_size'?"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            'data_types.grad_accum_dtype: expected bfloat16, got "fp32"'),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "data_type: expected bf"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads"),
        ({"optimizer": {"type": "SGD"}}, 'optimizer.type: expected Adam or AdamW, got "SGD"'),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled: expected false, got true"),
    ],
)  # fmt: skip
def test_what_a_plan_does_not_count_is_refused_by_name(config: dict[str, Any], says: str) -> None:
    """(It planned a setting that the JSON does not have.)"""
    assert says in refused(config)


@pytest.mark.parametrize(
    "config",
    [
        {"zero": {"stage": 2, "reduce_scatter": False, "zero_hpz_partition_size": 8}},  # of stage 3
        {"zero": {"stage": 3, "zero_hpz_partition_size": 1, "reduce_scatter": True, "offload_param": {}}},
        {"zero": {"stage": 3, "cpu_offload": False, "offload_optimizer": {"device": "none", "ratio": 1.0}}},
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
        {"fp16": {"enabled": True}, "communication_data_type": "fp16"},
        {"zero": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "round_robin_gradients": True}},
    ],
)
def test_values_that_a_plan_counts_pass(config: dict[str, Any]) -> None:
    read(config)


def test_all_faults_are_in_one_error() -> None:
    zero = {"stage": "auto", "zero_quantized_weights": True, "offload_param": {"device": "nvme"}}
    text = refused({"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "zero": zero})
    for words in (
        "bf16.enabled",
        "give --dtype",
        "give --zero-stage",
        "give --batch",
        "offload_param.device",
    ):
        assert words in text


def test_auto_is_filled_in_where_it_follows() -> None:
    """(As float32 a model of bfloat16 took 14 times the seconds.)"""
    auto = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    text = refused(auto)
    assert 'bf16.enabled: expected true or false, got "auto"; give --dtype, bfloat16, say' in text
    assert "fp16.enabled" in text
    assert read(auto, dtype="bfloat16").zero.element_bytes == 2
    assert read(auto | {"fp16": {"enabled": True}}).dtype == "float16"
    assert read({"bf16": {"enabled": False}}).dtype == "float32"
    zero = read({"zero": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 10}}).zero
    assert (zero.bucket_elements, zero.sub_group_elements) == (64 * 64, 10)  # as ds_ring.initialize does
    micro = {"train_micro_batch_size_per_gpu": "auto"}
    assert read(micro, batch=3).batch == 3
    assert read(micro | {"train_batch_size": 12, "gradient_accumulation_steps": 2}).batch == 3


@pytest.mark.parametrize(
    ("sizes", "devices", "batch", "accumulates"),
    [
        # micro-batch, samples, steps; DeepSpeed has two replicas here
        ((2, None, None), 8, 2, False),
        ((2, None, 8), 8, 2, True),
        ((2, 4, None), 8, 2, False),
        ((2, 32, None), 8, 2, True),
        ((None, 32, None), 8, 16, False),
        ((None, 32, 4), 8, 4, True),
        ((2, 32, 8), 8, 2, True),
        (("auto", "auto", 2), 8, None, True),
        ((None, None, 4), 8, 1, True),
        ((None, None, None), 8, 1, False),
        ((2, 32, 4), None, 2, True),  # devices are searched: four of four ranks are right
    ],
)
def test_micro_batches_are_those_of_deepspeed(
    sizes: tuple[Any, Any, Any], devices: int | None, batch: int | None, accumulates: bool
) -> None:
    """(A plan of eight micro-batches was that of one.)"""
    names = (deepspeed_json.MICRO, deepspeed_json.SAMPLES, deepspeed_json.STEPS)
    config = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    if batch is None:
        assert "give --batch" in refused(config)
        return
    keys = read(config, devices)
    assert (keys.batch, keys.zero.accumulates) == (batch, accumulates)
    if devices is not None and config.keys() & {*names[:2]}:
        theirs = DeepSpeedConfig.__new__(DeepSpeedConfig)
        theirs.world_size = 2
        theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu = (
            config.get(names[1]),
            config.get(names[0]),
        )
        theirs.gradient_accumulation_steps = config.get(names[2])
        theirs._configure_train_batch_size()
        assert theirs.train_micro_batch_size_per_gpu == batch
        assert (theirs.gradient_accumulation_steps > 1) == accumulates


def test_sizes_that_contradict_each_other_are_refused_with_their_numbers() -> None:
    """(The printed JSON had other steps.)"""
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    text = refused(sizes)
    assert "train_batch_size: expected 8 (1 a replica x 4 steps x 2 replicas), got 32" in text
    assert "expected 6 (3 a replica x 1 steps x 2 replicas), got 7" in refused({"train_batch_size": 7})
    keys = read(sizes, batch=4)  # an option comes before the JSON: 4 x 4 x 2
    assert keys.batch == 4 and keys.zero.accumulates


def test_steps_that_nobody_knows_are_asked_for_where_they_take_memory() -> None:
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "auto"}
    assert 'expected a number at ZeRO 2, got "auto"; write 1' in refused(sizes | {"zero": {"stage": 2}})
    assert not read(sizes | {"zero": {"stage": 3}}).zero.accumulates
    assert read(sizes | {"train_batch_size": 8}).zero.accumulates


def test_temporaries_are_those_of_the_optimizer() -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    assert read({"optimizer": adam | {"params": {}}}).zero.fused_adam
    assert not read({"optimizer": adam}).zero.fused_adam
    assert not read({"optimizer": {"type": "adam"}}, kind="cpu").zero.fused_adam


def test_pinned_memory_is_that_of_the_json() -> None:
    off = {"device": "cpu", "pin_memory": False}
    zero = read({"zero": {"stage": 3, "offload_optimizer": off, "offload_param": {"device": "cpu"}}}).zero
    assert (zero.offload_optimizer, zero.pins_optimizer) == (True, False)
    assert (zero.offload_parameters, zero.pins_parameters) == (True, True)
