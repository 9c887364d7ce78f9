"""Replace `"auto"` in the DeepSpeed JSON as Hugging Face's integration does, without its Trainer.

Owns the values that follow from something that is known here: the other batch sizes, the model's dtype and
hidden size, an optimizer that is passed. Whatever does not follow is named with what to write, in one error:
DeepSpeed would take the word itself for a number. `"auto"` of our own keys is section.py's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from ds_ring.errors import RingConfigError

AUTO = "auto"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# What DeepSpeed does where the key is missing, and Hugging Face's Trainer where it is "auto".
_SAME_AS_LEFT_OUT = {
    "gradient_clipping",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "scheduler.params.warmup_min_lr",
}
_OF_DEEPSPEED = ("zenflow", "autotuning", "expert_parallel")  # sections with an "auto" of their own
_WHAT_TO_WRITE = {
    "optimizer.params.lr": "write the learning rate, 1e-4, say",
    "optimizer.params.weight_decay": "write 0.0 for none, or 0.01",
    "scheduler.params.warmup_max_lr": "write the highest learning rate",
    "scheduler.params.warmup_num_steps": "write a number of optimizer steps",
    "scheduler.params.total_num_steps": "write the number of optimizer steps of the run",
    "train_micro_batch_size_per_gpu": "write the number of samples that a data replica takes at once, 1, say",
}


def resolve_auto(
    config: dict[str, Any], model: torch.nn.Module, brings_optimizer: bool, brings_scheduler: bool
) -> dict[str, Any]:
    """Return the DeepSpeed JSON without any "auto".

    Args:
        config: the JSON without our section.
        model: its dtype and hidden size decide some values.
        brings_optimizer, brings_scheduler: one is passed, so that DeepSpeed does not read that section.
    """
    if not any(True for _ in _autos(config)):
        return config
    config = copy.deepcopy(config)
    for section, brought in (("optimizer", brings_optimizer), ("scheduler", brings_scheduler)):
        if brought:
            # DeepSpeed does not read a section whose object is passed: its "auto" means nothing.
            config.pop(section, None)
    _resolve_batch(config)
    open_ = []
    for key in list(_autos(config)):
        found = _value(key, config, model)
        if found is None:
            advice = _WHAT_TO_WRITE.get(key, "write the value, or remove the key")
            open_.append(f'{key}: got "auto"; {advice}')
        elif found is _LEFT_OUT:
            del _parent(config, key)[key.split(".")[-1]]
        else:
            _parent(config, key)[key.split(".")[-1]] = found
    if open_:
        raise RingConfigError(
            'the DeepSpeed configuration: "auto" is filled in by Hugging Face\'s Trainer, and'
            " ds_ring.initialize can find no answer for\n  - " + "\n  - ".join(open_)
        )
    return config


_LEFT_OUT = object()


def _autos(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys whose value is "auto"."""
    for key, value in section.items():
        if isinstance(value, dict) and key not in _OF_DEEPSPEED:
            yield from _autos(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value == AUTO:
            yield prefix + key


def _parent(config: dict[str, Any], key: str) -> dict[str, Any]:
    for part in key.split(".")[:-1]:
        config = config[part]
    return config


def _resolve_batch(config: dict[str, Any]) -> None:
    """Remove the sizes that DeepSpeed works out from the others, if there is one to start from."""
    if any(config.get(key, AUTO) != AUTO for key in _BATCH[:2]):
        for key in _BATCH:
            if config.get(key) == AUTO:
                del config[key]
    else:
        for key in (_BATCH[0], _BATCH[2]):
            if config.get(key) == AUTO:
                del config[key]  # the micro batch is the one to ask for
        config[_BATCH[1]] = AUTO


def _value(key: str, config: dict[str, Any], model: torch.nn.Module) -> object:
    """Return the value of a key, `_LEFT_OUT` where leaving it out is the same, None if nothing decides it."""
    if key in ("bf16.enabled", "fp16.enabled"):
        wanted = torch.bfloat16 if key.startswith("bf16") else torch.float16
        return next((p.dtype for p in model.parameters() if p.is_floating_point()), None) is wanted
    if key == "scheduler.params.warmup_max_lr":
        rate = config.get("optimizer", {}).get("params", {}).get("lr")
        return rate if isinstance(rate, (int, float)) else None
    if key.startswith("zero_optimization."):
        return _zero_value(key.split(".", 1)[1], _hidden_size(model))
    return _LEFT_OUT if key in _SAME_AS_LEFT_OUT else None


def _zero_value(key: str, hidden: int | None) -> object:
    """Return Hugging Face's value for a size that depends on the model; DeepSpeed's default for any other."""
    if hidden is None:
        return _LEFT_OUT
    return {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }.get(key, _LEFT_OUT)


def _hidden_size(model: torch.nn.Module) -> int | None:
    for part in model.modules():
        config = getattr(part, "config", None)
        for one in (config, getattr(config, "text_config", None)):
            size = getattr(one, "hidden_size", None)
            if isinstance(size, int):
                return size
    return None
