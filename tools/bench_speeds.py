"""A rank that shares its core: steps with and without its speed known, side by side on two gloo ranks.

Rank 1 is slowed by a process that computes on its core all the time, so it attends at about half the speed.
Both engines train the same Llama, in turns; one has `"rank_speeds": "measured"`.

Example:
    python tools/bench_speeds.py --tokens 8192 --rounds 7
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from bench import parser_of, print_row

from ds_ring_launcher.run.local_ranks import run_ranks

RANKS = 2


def keep_busy(core: int) -> None:
    """Compute on one core for ever."""
    os.sched_setaffinity(0, {core})
    while True:
        sum(range(10_000))


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train both engines in turns; return medians of the steps' seconds, and the speeds that were found."""
    import deepspeed
    from transformers import AutoModelForCausalLM, LlamaConfig

    import ds_ring

    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes two minutes
    rank = dist.get_rank()
    core = sorted(os.sched_getaffinity(0))[rank]
    os.sched_setaffinity(0, {core})
    busy = None
    if rank == 1 and options.slowed:
        busy = multiprocessing.get_context("spawn").Process(target=keep_busy, args=(core,), daemon=True)
        busy.start()
    engines = {}
    for name, speeds in (("equal", None), ("measured", "measured")):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=options.hidden, intermediate_size=2 * options.hidden,
            num_hidden_layers=2, num_attention_heads=options.hidden // 64,
            num_key_value_heads=options.hidden // 64, max_position_embeddings=options.tokens,
        )  # fmt: skip
        section: dict[str, Any] = {"ring_size": RANKS, "rank_speeds": speeds}
        json = {
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
            "sequence_parallel_size": RANKS, "ring_attention": section,
        }  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        engines[name] = ds_ring.initialize(model=model, model_parameters=model.parameters(), config=json)[0]
    ids = torch.randint(256, (1, options.tokens))
    dist.broadcast(ids, 0)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.rounds + 2):
        for name, engine in engines.items():
            batch = engine.ring.shard_batch({"input_ids": ids, "labels": ids})
            dist.barrier()
            began = time.perf_counter()
            engine.backward(engine(**batch).loss)
            engine.step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
    if busy is not None:
        busy.terminate()
        busy.join()
    medians = {f"{name}_s": round(statistics.median(x[2:]), 3) for name, x in seconds.items()}
    return medians | {"speeds": list(engines["measured"].ring.speeds)}


def main(arguments: list[str] | None = None) -> int:
    """Print one row: medians without and with the speeds, their ratio, and the speeds."""
    parser = parser_of(
        __doc__, tokens=(8192, "of the sample"), hidden=(256, "of the model; heads have 64"),
        rounds=(7, "steps measured"), slowed=(1, "0 leaves both ranks as fast"),
        deadline=(500.0, "seconds until the ranks are ended"),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    found = run_ranks(train, RANKS, (options,), threads=1, deadline_s=options.deadline)[0]
    print_row(found | {"ratio": round(found["measured_s"] / found["equal_s"], 2)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
