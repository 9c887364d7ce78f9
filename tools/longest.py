"""Find the longest sequence that a device holds: bisection with real training steps.

Each length is tried on ranks of its own: build the model, make two DeepSpeed steps. A length that runs out of
memory is too long. On the CPU `--memory-gib` limits what each rank may allocate beyond what it has when it
starts (RLIMIT_DATA); on a GPU its memory is the limit.

Example:
    python tools/longest.py --memory-gib 2 --long-sequence off     # two CPU ranks of this machine
    python tools/longest.py --memory-gib 2
    python tools/longest.py --device cuda --ranks 1 --layers 32 --hidden 4096 --heads 32 --kv-heads 8 \\
        --intermediate 14336 --vocab 128256 --start 65536          # Llama-8B on one GPU
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_ring.errors import RingError
from ds_ring_launcher.run.local_ranks import RanksError, run_ranks

GIB = 1 << 30
_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory", "not enough memory")


class TooLongError(RingError, RuntimeError):
    """Report that a rank ran out of memory."""


class Trial(NamedTuple):
    """Describe one run; `sizes` are those of transformers' LlamaConfig."""

    device: str
    ranks: int
    tokens: int
    sizes: dict[str, Any]
    section: dict[str, Any]
    stage: int
    offload: bool
    memory_gib: float


def deepspeed_json(trial: Trial) -> dict[str, Any]:
    """Return the JSON of a trial; parameters and optimizer on the host if `offload`."""
    zero: dict[str, Any] = {"stage": trial.stage}
    if trial.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": trial.device == "cuda"}
        if trial.stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": trial.device == "cuda"}
    params: dict[str, Any] = {"lr": 1e-5}
    if trial.device == "cpu":
        params["torch_adam"] = True  # DeepSpeed's own is compiled for two minutes
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": trial.device == "cuda"},
        "optimizer": {"type": "AdamW", "params": params},
        "steps_per_print": 10**9,
        "sequence_parallel_size": trial.ranks,
        "ring_attention": trial.section | {"hop_timeout_seconds": 600, "heartbeat_timeout_seconds": 60},
    }


def trial_rank(trial: Trial) -> tuple[float, float]:
    """Make two steps on one rank; return the seconds of the second one, and its peak in bytes on a GPU."""
    importlib.import_module("ds_ring.integrations.transformers.attention")  # not counted: modules
    if trial.device == "cpu":
        held = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
        limit = int(held.split()[1]) * 1024 + int(trial.memory_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        return two_steps(trial)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
            raise TooLongError(f"out of memory: {str(error)[:200]}") from error
        raise


def two_steps(trial: Trial) -> tuple[float, float]:
    """Train for two steps, in a process group that is there."""
    import deepspeed
    from transformers import AutoModelForCausalLM, LlamaConfig

    import ds_ring

    deepspeed.utils.logger.setLevel(logging.ERROR)
    dtype = torch.bfloat16 if trial.device == "cuda" else torch.float32
    config = LlamaConfig(**trial.sizes, max_position_embeddings=trial.tokens)
    with torch.device(trial.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.activation_checkpointing_enable({"use_reentrant": False})
    engine, *_ = ds_ring.initialize(
        model=model, model_parameters=model.parameters(), config=deepspeed_json(trial)
    )
    ids = torch.arange(trial.tokens)[None] % trial.sizes["vocab_size"]
    batch = engine.ring.shard_batch({"input_ids": ids, "labels": ids})
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        engine.backward(engine(**batch).loss)
        engine.step()
        torch.distributed.barrier()
        seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if trial.device == "cuda" else 0
    return seconds, float(peak)


def fits(trial: Trial, deadline_s: float, as_json: bool) -> bool:
    """Try one length, and say how it went."""
    row: dict[str, Any] = {"tokens": trial.tokens}
    try:
        found = run_ranks(trial_rank, trial.ranks, (trial,), threads=1, deadline_s=deadline_s)
        row |= {"fits": True, "step_seconds": round(max(seconds for seconds, _ in found), 2)}
        if trial.device == "cuda":
            row["peak_gib"] = round(max(peak for _, peak in found) / GIB, 2)
    except RanksError as error:
        if not any(words in str(error) for words in (*_NO_MEMORY, "bad_alloc", "MemoryError")):
            raise
        row |= {"fits": False}
    print(
        json.dumps(row) if as_json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True
    )
    return bool(row["fits"])


def longest(holds: Callable[[int], bool], start: int, multiple: int, precision: float) -> int:
    """Return the longest length, a multiple of `multiple`, that `holds`; 0 if `start` does not."""
    good, bad = 0, None
    tokens = start
    while bad is None:
        if holds(tokens):
            good, tokens = tokens, 2 * tokens
        else:
            bad = tokens
    while bad - good > max(multiple, precision * good) and good:
        middle = (good + bad) // 2 // multiple * multiple
        if middle in (good, bad):
            break
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each length that is tried, and the longest that fits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    for name, size in {
        "layers": 4, "hidden": 256, "heads": 4, "kv-heads": 2, "intermediate": 768, "vocab": 8192,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of ZeRO")
    parser.add_argument("--no-offload", action="store_true", help="optimizer and parameters on the device")
    parser.add_argument("--long-sequence", default="auto", choices=("auto", "off"))
    parser.add_argument("--pattern", type=json.loads, default={}, metavar="JSON", help="of the section")
    parser.add_argument("--memory-gib", type=float, default=2.0, help="of a CPU rank")
    parser.add_argument("--start", type=int, default=4096, help="the first length, in tokens")
    parser.add_argument("--precision", type=float, default=0.05, help="of the answer")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds for each length")
    parser.add_argument("--json", action="store_true", help="one JSON row per line")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    sizes = {
        "num_hidden_layers": options.layers, "hidden_size": options.hidden, "vocab_size": options.vocab,
        "num_attention_heads": options.heads, "num_key_value_heads": options.kv_heads,
        "intermediate_size": options.intermediate,
    }  # fmt: skip
    section = {"long_sequence": options.long_sequence, "pattern": options.pattern}

    def holds(tokens: int) -> bool:
        trial = Trial(
            options.device, options.ranks, tokens, sizes, section, options.stage,
            not options.no_offload and options.stage > 0, options.memory_gib,
        )  # fmt: skip
        return fits(trial, options.deadline, options.json)

    found = longest(holds, options.start, 128 * options.ranks, options.precision)
    print(json.dumps({"longest": found}) if options.json else f"longest {found}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
