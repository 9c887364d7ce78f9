"""Measure what saving costs a training step, at once and in the background.

Trains a Llama with random weights on gloo ranks of this machine, on one batch; every fourth step it saves.
The cost of a save is the time of the call, and the time of all steps above that of as many without a save.

Example:
    python tools/bench_save.py --ranks 2 --hidden-size 256 --tokens 2048
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' ranks

from ds_ring_launcher.run.local_ranks import run_ranks

EVERY = 4


class SaveOptions(argparse.Namespace):
    """Hold the options, as `run_ranks` wants them."""

    device = "cpu"
    ranks: int
    hidden_size: int
    layers: int
    tokens: int
    saves: int


def work(options: SaveOptions, folder: str) -> dict[str, Any]:
    """Return the seconds of each step of a rank, by how it saves."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import ds_ring

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    size = options.hidden_size
    config = LlamaConfig(
        vocab_size=257, hidden_size=size, intermediate_size=3 * size, num_hidden_layers=options.layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    section = {"sequence_parallel_size": options.ranks, "ring_attention": {"layout": "zigzag"}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    stage = {"zero_optimization": {"stage": 1}, "steps_per_print": 10**6, "train_micro_batch_size_per_gpu": 1}
    engine, *_ = ds_ring.initialize(
        model=model, model_parameters=model.parameters(), config={**section, **stage, "optimizer": optimizer}
    )
    ids = torch.randint(0, 257, (1, options.tokens))
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    for how in ("none", "at once", "background"):
        found[how], found[f"{how}: call"] = _steps(engine, ids, how, f"{folder}/{how}", options.saves)
    return found


def _steps(engine: Any, ids: Any, how: str, folder: str, saves: int) -> tuple[list[float], list[float]]:
    seconds, calls = [], []
    for step in range(2 + EVERY * saves):
        started = time.perf_counter()
        loss = engine(**engine.ring.shard_batch({"input_ids": ids, "labels": ids})).loss
        engine.backward(loss)
        engine.step()
        if how != "none" and step % EVERY == 1:
            called = time.perf_counter()
            engine.save_checkpoint(folder, background=how == "background")
            calls.append(time.perf_counter() - called)
        seconds.append(time.perf_counter() - started)
    return seconds[1:], calls


def main(arguments: list[str] | None = None) -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--saves", type=int, default=5)
    options = parser.parse_args(arguments, namespace=SaveOptions())
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(work, options.ranks, (options, folder), threads=1, deadline_s=500.0)
    first = ranks[0]
    step = statistics.median(first["none"])
    row: dict[str, Any] = {"parameters": first["parameters"], "step_seconds": round(step, 4)}
    for how in ("at once", "background"):
        call = statistics.median(first[f"{how}: call"])
        extra = (sum(first[how]) - step * len(first[how])) / len(first[f"{how}: call"])
        row[how] = {
            "call_seconds": round(call, 4),
            "call_share_of_a_step": round(call / step, 4),
            "seconds_a_save_in_all": round(extra, 4),
        }
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
