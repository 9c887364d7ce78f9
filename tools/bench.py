"""What the tools share: a command line, contestants that take turns, a small model and its engine, rows."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Name = TypeVar("Name")
Found = TypeVar("Found")


def parser_of(about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring, with an option for each default.

    A default is a value, or a value and its help; a list takes several values, False is a switch.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        value, told = default if isinstance(default, tuple) else (default, None)
        option = f"--{name.replace('_', '-')}"
        if value is False:
            parser.add_argument(option, action="store_true", help=told)
        elif isinstance(value, list):
            parser.add_argument(option, type=type(value[0]), nargs="+", default=value, help=told)
        else:
            parser.add_argument(option, type=type(value), default=value, help=told)
    return parser


def print_row(row: Mapping[str, Any], as_json: bool = True) -> None:
    """Print one result."""
    print(json.dumps(row) if as_json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)


def in_turns(works: Mapping[Name, Callable[[], Found]], rounds: int) -> dict[Name, list[Found]]:
    """Return what each work found in each round; one round more, which is not kept, warms up.

    They take turns, so that a busy moment of the machine hits all alike, and none is always the first.
    """
    names, found = list(works), {name: list[Found]() for name in works}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            one = works[name]()
            if turn:
                found[name].append(one)
    return found


def llama(
    tokens: int, vocab: int, hidden: int, intermediate: int, layers: int, heads: int,
    kv_heads: int | None = None, attention: str = "sdpa", **more: Any,
) -> Any:  # fmt: skip
    """Return a Llama with random weights, the same in every process."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads or heads, max_position_embeddings=tokens,
        **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def zero_of(stage: int | None, bucket: int) -> dict[str, Any]:
    """Return DeepSpeed's section of a ZeRO stage: buckets of so many elements, every parameter sharded."""
    return {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_param_persistence_threshold": 0,
    }


def engine_of(
    model: Any, ranks: int, section: Mapping[str, Any], zero: Mapping[str, Any], *, batch: int = 1,
    sgd: float | None = None, **more: Any,
) -> Any:  # fmt: skip
    """Return a model's DeepSpeed engine on a ring of so many ranks, with torch's AdamW, or SGD of a rate."""
    import deepspeed
    import torch

    import ds_ring

    deepspeed.utils.logger.setLevel(logging.ERROR)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": dict(zero),
        "steps_per_print": 10**9,
        "sequence_parallel_size": ranks,
        "ring_attention": dict(section),
    } | more
    if sgd is None:  # DeepSpeed's own Adam of the CPU is compiled for two minutes
        adam = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
        config = {"optimizer": adam} | config
        return ds_ring.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    config["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.SGD(model.parameters(), lr=sgd)
    return ds_ring.initialize(model=model, optimizer=optimizer, config=config)[0]
