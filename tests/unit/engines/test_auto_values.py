""" "auto" in the DeepSpeed JSON: what follows from the rest is filled in, the rest is named in one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_ring.data.config_agreement import resolve_auto
from ds_ring.errors import RingConfigError

HUGGING_FACE: dict[str, Any] = {  # the JSON of transformers' documentation, every "auto" in it
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "sequence_parallel_size": 2,
}


class Model(torch.nn.Linear):
    def __init__(self, hidden_size: int | None, dtype: torch.dtype) -> None:
        super().__init__(4, 4, dtype=dtype)
        self.config = type("Config", (), {"hidden_size": hidden_size})()


def resolve(config: dict[str, Any], dtype: torch.dtype = torch.float32, **given: bool) -> dict[str, Any]:
    brought = {"brings_optimizer": False, "brings_scheduler": False} | given
    return resolve_auto(config, Model(100, dtype), **brought)


def test_everything_that_nothing_decides_is_named_in_one_error() -> None:
    with pytest.raises(RingConfigError) as raised:
        resolve(HUGGING_FACE)
    text = str(raised.value)
    for key in (
        "optimizer.params.lr: ",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "train_micro_batch_size_per_gpu",
    ):
        assert f"\n  - {key}" in text, text
    assert text.count("\n  - ") == 5
    assert 'scheduler.params.warmup_num_steps: got "auto"; write a number of optimizer steps' in text


def test_what_follows_from_the_rest_is_filled_in() -> None:
    given = HUGGING_FACE | {"train_micro_batch_size_per_gpu": 3}
    got = resolve(given, torch.bfloat16, brings_optimizer=True, brings_scheduler=True)
    assert got == {
        "fp16": {"enabled": False, "loss_scale": 0},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1e9,
            "reduce_bucket_size": 10_000,
            "stage3_prefetch_bucket_size": 9_000,
            "stage3_param_persistence_threshold": 1_000,
        },
        "train_micro_batch_size_per_gpu": 3,
        "sequence_parallel_size": 2,
    }
    assert given["bf16"] == {"enabled": "auto"}, "the caller's JSON was changed"


def test_the_highest_rate_of_a_warm_up_is_the_optimizers() -> None:
    params = {"optimizer": {"type": "Adam", "params": {"lr": 0.5}}, "train_batch_size": 8}
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    assert resolve(params | scheduler)["scheduler"]["params"] == {"warmup_max_lr": 0.5}


@pytest.mark.parametrize("hidden_size", [None, 100])
def test_without_auto_nothing_is_touched(hidden_size: int | None) -> None:
    config = {"train_batch_size": 8, "zenflow": {"select_interval": "auto"}}
    assert resolve_auto(config, Model(hidden_size, torch.float32), False, False) is config


@pytest.mark.parametrize("key", ["steps_per_print", "a_key_of_nobody", "fp16.loss_scale"])
def test_no_auto_reaches_deepspeed(key: str) -> None:
    outer, _, inner = key.partition(".")
    with pytest.raises(RingConfigError, match=f'{key}: got "auto"; write the value, or remove the key'):
        resolve({"train_batch_size": 8, outer: {inner: "auto"} if inner else "auto"})


def test_a_model_without_a_hidden_size_takes_deepspeeds_own_sizes() -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    got = resolve_auto(config, Model(None, torch.float32), False, False)
    assert got["zero_optimization"] == {"stage": 3}
