"""Shared parts of the tools: a command line, works that take turns, a small model and its engine, rows."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "deepspeed", "numpy", "transformers")
ONLY = ([""], "those whose name contains one of these")  # an option: words, see `choose`
Name = TypeVar("Name")
Found = TypeVar("Found")


def make_parser(about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring, with an option for each default.

    A default is a value; a value and its help; or a value, its help and its choices. A list takes several
    values, False is a switch. Numbers of tokens may be written as 128k.
    """
    from ds_ring_launcher.commands.parsers import read_tokens

    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        value, text, choices, *_ = (*(default if isinstance(default, tuple) else (default,)), None, None)
        option: dict[str, Any] = {"default": value, "help": text}
        first = value[0] if isinstance(value, list) and value else value
        kind = read_tokens if name.endswith("tokens") and isinstance(first, int) else type(first)
        if value is False:
            option["action"] = "store_true"
        elif isinstance(value, list):
            option |= {
                "type": kind if value else str,
                "nargs": "+" if value else "*",
                "choices": choices,
            }
        else:
            option |= {"type": kind, "choices": choices}
        parser.add_argument(f"--{name.replace('_', '-')}", **option)
    return parser


def choose(words: Sequence[str], names: Iterable[str], option: str = "--only") -> list[str]:
    """Return the names that contain one of the words; the command ends if none does."""
    every = list(names)
    chosen = [name for name in every if any(word in name for word in words)]
    if not chosen:
        argparse.ArgumentParser().error(f"{option}: expected parts of {every}, got {words}")
    return chosen


@cache
def provenance(device: str = "cpu") -> dict[str, Any]:
    """Return what figures depend on: date, commit, hardware and versions."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = ""
    with suppress(FileNotFoundError):  # a borrowed machine may have no git
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    hardware: dict[str, Any] = {"device": _processor(), "cores": len(os.sched_getaffinity(0))}
    versions = {"python": platform.python_version()} | {name: read_version(name) for name in PACKAGES}
    if device == "cuda":
        import torch

        card = torch.cuda.get_device_properties(0)
        hardware |= {"device": card.name, "memory_gib": round(card.total_memory / 2**30, 1)}
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return {"date": today, "commit": commit or "unknown", "hardware": hardware, "versions": versions}


def read_version(package: str) -> str:
    """Return the version of a package, "none" where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def print_row(row: Mapping[str, Any], as_json: bool = True) -> None:
    """Print one result."""
    print(json.dumps(row) if as_json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)


def in_turns(
    works: Mapping[Name, Callable[[], Found]], rounds: int, warm_up: int = 1
) -> dict[Name, list[Found]]:
    """Return the result of each work in each round; results of the first `warm_up` rounds are dropped.

    Works take turns, so that a busy moment of the machine affects all of them, and none is always the first.
    """
    names, results = list(works), {name: list[Found]() for name in works}
    for turn in range(warm_up + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            result = works[name]()
            if turn >= warm_up:
                results[name].append(result)
    return results


def llama(
    tokens: int, vocab: int, hidden: int, intermediate: int, layers: int, heads: int,
    kv_heads: int | None = None, attention: str = "sdpa", **config_options: Any,
) -> Any:  # fmt: skip
    """Return a Llama with random weights, the same in every process."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads or heads, max_position_embeddings=tokens,
        **config_options,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@contextmanager
def fake_mesh(rank: int, ring_size: int) -> Iterator[Any]:
    """Return the mesh of one rank of a ring whose other ranks are missing: nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ds_ring import RingMesh

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ring_size)
    try:
        yield RingMesh.from_world(ring_size)
    finally:
        dist.destroy_process_group()


def make_zero_section(stage: int | None, bucket: int) -> dict[str, Any]:
    """Return DeepSpeed's section of a ZeRO stage: buckets of `bucket` elements, all parameters sharded."""
    return {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_param_persistence_threshold": 0,
    }


def make_engine(
    model: Any, ranks: int, section: Mapping[str, Any], zero: Mapping[str, Any], *, batch: int = 1,
    sgd: float | None = None, **keys: Any,
) -> Any:  # fmt: skip
    """Return a model's DeepSpeed engine on a ring of `ranks`, with torch's AdamW, or SGD of rate `sgd`."""
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
    } | keys
    if sgd is None:  # DeepSpeed's own Adam of the CPU is compiled for two minutes
        adam = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
        config = {"optimizer": adam} | config
        return ds_ring.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    config["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.SGD(model.parameters(), lr=sgd)
    return ds_ring.initialize(model=model, optimizer=optimizer, config=config)[0]
