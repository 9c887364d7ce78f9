"""One policy step on rollouts that share a prompt: as a tree, and as rows of their own, on the same ring.

Both compute the log-probabilities of all answers and a policy's gradient (`engine.ring.logprobs`), and take
turns. Printed are tokens of the batch, seconds of a step (medians of the slowest rank), the peak of a rank's
tensor memory above what it had before the step, and the largest relative difference of the loss and of each
parameter's gradient between the two.

Example:
    python tools/bench_trees.py --prompt 4096 --answers 8 --length 512
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from bench import engine_of, in_turns, llama, parser_of, print_row, zero_of
from torch import Tensor

from ds_ring.ring.trace import measure_cpu_memory
from ds_ring_launcher.run.local_ranks import run_ranks


def loss_of(answers: list[Tensor]) -> Tensor:
    """Return a policy's loss of the answers' log-probabilities, with advantages made up."""
    terms = [-(one.exp() * (1 - number)).mean() - one.mean() for number, one in enumerate(answers)]
    return torch.stack(terms).mean()


def steps_on_ranks(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that are printed."""
    from deepspeed.utils import safe_get_full_grad

    prompt, count, length = asked["prompt"], asked["answers"], asked["length"]
    model = llama(
        prompt + length, asked["vocabulary"], asked["hidden"], 2 * asked["hidden"], 2, asked["heads"]
    )
    section = {"long_sequence": {"tiled_loss": True}}
    engine = engine_of(model, asked["ranks"], section, zero_of(1, 1 << 20), sgd=0.1)
    drawn = torch.Generator().manual_seed(0)
    shared = torch.randint(0, asked["vocabulary"], (prompt,), generator=drawn)
    rollouts = [
        torch.cat([shared, torch.randint(0, asked["vocabulary"], (length,), generator=drawn)])
        for _ in range(count)
    ]
    tree, whole = engine.ring.tree_batch(rollouts), torch.stack(rollouts)
    batches = {"tree": tree.batch, "rows": {"input_ids": whole, "labels": whole}}

    def step(name: str) -> dict[str, Any]:
        dist.barrier()
        batch = engine.ring.shard_batch(batches[name])
        begun = time.perf_counter()
        with measure_cpu_memory() as memory:
            values = engine.ring.gather(engine.ring.logprobs(engine, batch))
            each = tree.of_rollouts(values) if name == "tree" else [row[:-1] for row in values]
            loss = loss_of([one[prompt - 1 :] for one in each])
            engine.backward(loss)
        seconds = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        gradients = {key: safe_get_full_grad(x).clone() for key, x in engine.module.named_parameters()}
        engine.optimizer.zero_grad()
        found = {"seconds": float(seconds), "peak": memory.peak_bytes, "loss": float(loss.detach())}
        return found | {"gradients": gradients}

    found = in_turns({name: partial(step, name) for name in batches}, asked["rounds"])
    one, other = (found[name][0] for name in batches)
    errors = [float((one["gradients"][key] - x).norm() / x.norm()) for key, x in other["gradients"].items()]
    difference = max(abs(one["loss"] - other["loss"]) / abs(other["loss"]), *errors)
    return [
        {
            "contestant": name, "tokens": batches[name]["input_ids"].numel(),
            "seconds": round(statistics.median(x["seconds"] for x in rounds), 3),
            "peak_mib": round(max(x["peak"] for x in rounds) / 2**20, 1), "largest_difference": difference,
        }
        for name, rounds in found.items()
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = parser_of(
        __doc__, prompt=4096, answers=8, length=512, ranks=2, hidden=256, heads=4, vocabulary=1024, rounds=3
    )
    asked = vars(parser.parse_args(arguments))
    torch.set_num_threads(1)
    rows = run_ranks(steps_on_ranks, asked["ranks"], (asked,), threads=1, deadline_s=580)[0]
    for row in rows:
        print_row(row)


if __name__ == "__main__":
    main()
