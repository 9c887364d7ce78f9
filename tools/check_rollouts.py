"""Log-probabilities of a rollout and of its update: the same bits, over random models and rings of any size.

Each model generates from prompts on a ring, token by token. The training forward pass then computes the
log-probabilities of the same tokens, on rings of all sizes, also with each sample in a batch of its own. A
row says how many numbers differ from those of the first ring's generation, and by how much.

Example:
    python tools/check_rollouts.py                     # 20 models, rings of 1, 2 and 4
    python tools/check_rollouts.py --models 3 --plain  # without the mode, too
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from typing import Any, NamedTuple

import torch
from common import make_engine, make_parser, print_row

from ds_ring_launcher.check.small_model import build, read_config, shrink
from ds_ring_launcher.run.local_ranks import run_ranks

FAMILIES = (
    "llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "mixtral", "gemma2", "olmo2", "phi3", "cohere2",
    "mistral", "qwen2", "granite", "glm4", "gpt2", "gpt_neox", "phi", "stablelm", "smollm3", "ernie4_5",
)  # fmt: skip


class Rollout(NamedTuple):
    """A random model, its prompts, and how a ring computes it."""

    family: str
    seed: int
    samples: int
    prompt: int
    tokens: int
    block_size: int
    layout: str


def drawn(number: int, family: str) -> Rollout:
    """Return the rollout of a number."""
    draw = random.Random(number)
    block_size = draw.choice((16, 32))
    return Rollout(
        family, number, draw.randint(1, 3), draw.randint(4 * block_size + 1, 150), draw.randint(12, 40),
        block_size, draw.choice(("contiguous", "zigzag")),
    )  # fmt: skip


def make_model(rollout: Rollout) -> Any:
    """Return the model, the same in every process."""
    config = shrink(read_config(rollout.family), rollout.prompt + rollout.tokens, 2, {})
    model = build(config, "causal-lm", rollout.seed).eval()
    model.generation_config.eos_token_id = None
    return model


def on_a_rank(
    ring_size: int, works: list[tuple[Rollout, bool]], sequences: list[Any]
) -> list[tuple[Any, list[Any]]]:
    """Return of each model and mode the sequences, and log-probabilities: of generation, and of training."""
    known = sequences or [None] * len(works)
    return [rolled_out(ring_size, *work, ids) for work, ids in zip(works, known, strict=True)]


def rolled_out(
    ring_size: int, rollout: Rollout, invariant: bool, sequences: Any = None
) -> tuple[Any, list[Any]]:
    """Return the sequences and log-probabilities: generated, trained, trained in other batches."""
    section = {"transport": "reproducible", "block_size": rollout.block_size, "layout": rollout.layout}
    engine = make_engine(make_model(rollout), ring_size, section, {"stage": 0}, sgd=0.0)
    engine.eval()
    words = engine.module.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(rollout.seed)
    ids = torch.randint(3, words, (rollout.samples, rollout.prompt), generator=generator)
    torch.manual_seed(rollout.seed)
    with engine.ring.batch_invariant() if invariant else contextlib.nullcontext():
        output = engine.module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=rollout.tokens, do_sample=True, top_k=20,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        logprobs = [engine.ring.generated_logprobs(output)]
        sequences = output.sequences if sequences is None else sequences
        begun = sequences.shape[1] - rollout.tokens
        for batches in ([sequences], sequences.split(1)):
            each = []
            for rows in batches:
                batch = engine.ring.shard_batch({"input_ids": rows, "labels": rows})
                with torch.no_grad():
                    local = engine.ring.logprobs(engine, batch)
                each.append(engine.ring.gather(local)[:, begun - 1 :][:, : rollout.tokens])
            logprobs.append(torch.cat(each))
    return sequences, logprobs


def main(arguments: list[str] | None = None) -> int:
    """One row a model; exit status 1 if a number differs with the mode on."""
    parser = make_parser(
        __doc__, models=(20, "random models"), first=(0, "number of the first"), ring_sizes=[1, 2, 4],
        plain=(False, "without the mode, too"),
        families=([*FAMILIES], "of transformers, in turn"),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    os.environ["DS_ACCELERATOR"] = "cpu"
    works = [
        (drawn(number, options.families[number % len(options.families)]), invariant)
        for number in range(options.first, options.first + options.models)
        for invariant in ((True, False) if options.plain else (True,))
    ]
    first: list[tuple[Any, list[Any]]] = []
    rows = [
        work[0]._asdict() | {"invariant": work[1], "numbers": 0, "differ": 0, "off": 0.0} for work in works
    ]
    for ring_size in options.ring_sizes:
        arguments_of_ranks = (ring_size, works, [sequences for sequences, _ in first])
        for results in run_ranks(on_a_rank, ring_size, arguments_of_ranks, threads=1, deadline_s=3000.0):
            first = first or results
            for row, (_, (want, *_)), (_, each) in zip(rows, first, results, strict=True):
                for numbers in each:
                    row["numbers"] += numbers.numel()
                    row["differ"] += int((numbers != want).sum())
                    row["off"] = max(row["off"], float((numbers - want).abs().max()))
    for row in rows:
        print_row(row)
    return int(any(row["invariant"] and row["differ"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
