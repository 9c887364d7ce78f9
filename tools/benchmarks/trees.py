"""Measure one policy step on rollouts that share a prompt: as a tree, and as rows of their own.

Both compute the log-probabilities of all answers and a policy's gradient (`engine.ring.logprobs`) on the same
ring, and take turns. Reported are tokens of the batch, seconds of a step (medians of the slowest rank), the
peak of a rank's tensor memory above that before the step, and the largest difference between the two: of a
parameter's gradient over the largest gradient, of the loss over itself.

The model is a Llama of the given sizes, or that of a config.json: one with recurrences, say, whose states
follow the paths of a tree.

Example:
    python tools/bench.py trees --prompt 4096 --answers 8 --length 512
    python tools/bench.py trees --prompt 2048 --length 256 --model configs/models/qwen3_5_small.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from common import llama, make_engine, make_zero_section
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measuring import ResultRow, Turns, clock, measure_on_ranks
from ds_ring.measure.memory import measure_cpu_memory

OPTIONS = {
    "prompt": 4096, "answers": 8, "length": 512, "ranks": 2, "hidden": 256, "heads": 4, "vocabulary": 1024,
    "rounds": 3, "model": ("", "a config.json instead of a Llama"),
}  # fmt: skip


def compute_loss(answers: list[Tensor]) -> Tensor:
    """Return a policy's loss of the answers' log-probabilities, with made-up advantages."""
    terms = [
        -(logprobs.exp() * (1 - number)).mean() - logprobs.mean() for number, logprobs in enumerate(answers)
    ]
    return torch.stack(terms).mean()


def prepare(options: argparse.Namespace) -> Turns:
    """Return both steps on this rank, and at the end how much their losses and gradients differ."""
    from deepspeed.utils import safe_get_full_grad

    prompt = options.prompt
    if options.model:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model))
    else:
        sizes = (options.vocabulary, options.hidden, 2 * options.hidden, 2, options.heads)
        model = llama(prompt + options.length, *sizes)
    vocabulary = model.config.vocab_size
    section = {"long_sequence": {"tiled_loss": True}}
    engine = make_engine(model, options.ranks, section, make_zero_section(1, 1 << 20), sgd=0.1)
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(0, vocabulary, (prompt,), generator=generator)
    rollouts = [
        torch.cat([shared, torch.randint(0, vocabulary, (options.length,), generator=generator)])
        for _ in range(options.answers)
    ]
    tree, whole = engine.ring.tree_batch(rollouts), torch.stack(rollouts)
    batches = {"tree": tree.batch, "rows": {"input_ids": whole, "labels": whole}}
    first: dict[str, dict[str, Tensor]] = {}

    def step(name: str) -> dict[str, Any]:
        batch = engine.ring.shard_batch(batches[name])
        with clock() as taken, measure_cpu_memory() as memory:
            values = engine.ring.gather(engine.ring.logprobs(engine, batch))
            each = tree.of_rollouts(values) if name == "tree" else [row[:-1] for row in values]
            loss = compute_loss([answer[prompt - 1 :] for answer in each])
            engine.backward(loss)
        if name not in first:
            gradients = {key: safe_get_full_grad(x).clone() for key, x in engine.module.named_parameters()}
            first[name] = gradients | {"the loss": loss.detach()}
        engine.optimizer.zero_grad()
        tokens = batches[name]["input_ids"].numel()
        return taken | {"peak_bytes": memory.peak_bytes, "tokens": tokens}

    def difference() -> float:
        by_tree, by_rows = first["tree"], first["rows"]
        # Over the largest gradient: a decay's own is 1e-5 of it, and what is left of sums that cancel.
        largest = max(x.norm() for key, x in by_rows.items() if key != "the loss")
        sizes = dict.fromkeys(by_rows, largest) | {"the loss": by_rows["the loss"].abs()}
        return max(float((by_tree[key] - x).norm() / sizes[key]) for key, x in by_rows.items())

    return Turns({name: partial(step, name) for name in batches}, difference)


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for the tree and one for the rows."""
    measured = measure_on_ranks(prepare, options, deadline_s=580)
    for name in measured.rounds:
        results = {"tokens": measured.each(name, "tokens")[0], "median_s": measured.median(name, "wall_s", 3)}
        results["peak_mib"] = round(max(measured.each(name, "peak_bytes")) / 2**20, 1)
        yield ResultRow({"contestant": name}, results | {"largest_difference": max(measured.at_end)})
