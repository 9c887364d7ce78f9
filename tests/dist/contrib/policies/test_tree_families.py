"""Trees of rollouts through every kind of layer: windows, sinks, convolutions, recurrences.

Log-probabilities and gradients of a policy's loss, of one row that has the common prefixes once on a ring,
against each rollout by itself on one process. Models of transformers by their own configurations, small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ds_ring.errors import RingError
from ds_ring_launcher.check import small_model
from tests.dist.family_ranks import attached, start_session
from tests.dist.harness import RankPool

Pool = Callable[[int], RankPool]
PROMPT, VOCABULARY = 13, 40
# What each family adds: a window, sinks, linear attention with convolutions, two kinds of scans.
FAMILIES = [
    "qwen3_5_text", "gpt_oss", "gemma3_text", "kimi_linear", "nemotron_h", "lfm2", "mamba", "mamba2",
    "recurrent_gemma", "rwkv", "qwen3_next", "falcon_h1", "minimax", "bamba", "mistral", "olmo_hybrid",
]  # fmt: skip


class Step(NamedTuple):
    """Log-probabilities of each rollout, and the gradients of a loss of them; or why there are none."""

    logprobs: list[Tensor]
    gradients: dict[str, Tensor]
    refused: str = ""


def rollouts(seed: int) -> list[Tensor]:
    """Answers to two prompts; some begin alike."""
    drawn, found = torch.Generator().manual_seed(seed), []
    for _ in range(2):
        prompt = torch.randint(3, VOCABULARY, (PROMPT,), generator=drawn)
        for number in range(3):
            tail = torch.randint(3, VOCABULARY, (5 + 3 * number,), generator=drawn)
            tail[: 2 * number] = torch.arange(3, 3 + 2 * number)
            found.append(torch.cat([prompt, tail]))
    return found


def built(family: str, seed: int) -> Any:
    config = small_model.shrink(small_model.read_config(family), 40)
    return small_model.build(config, "causal-lm", seed)


def loss_of(logprobs: list[Tensor]) -> Tensor:
    return torch.stack([(one * torch.linspace(-1, 2, len(one))).mean() for one in logprobs]).sum()


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step_alone(family: str, seed: int) -> Step:
    model, found = built(family, seed), []
    for ids in rollouts(seed):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        found.append(logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    loss_of(found).backward()
    return Step([one.detach() for one in found], gradients_of(model))


def step_on_ring(rank: int, world_size: int, family: str, seed: int) -> Step:
    session = start_session(world_size)
    try:
        model = attached(built(family, seed), session)
        tree = session.tree_batch(rollouts(seed))
        batch = session.shard_batch(tree.batch)
        whole = session.gather(session.logprobs(model, batch))
    except RingError as error:
        return Step([], {}, str(error))
    found = tree.of_rollouts(whole)
    loss_of(found).backward()
    gradients = gradients_of(model)
    for gradient in gradients.values():
        torch.distributed.all_reduce(gradient)
        gradient /= world_size  # each rank has the whole loss
    return Step([one.detach() for one in found], gradients)


def errors_of(got: Step, want: Step) -> tuple[float, float]:
    """The largest error of a log-probability, and of a gradient over the largest norm."""
    of_logprobs = max(float((a - b).abs().max()) for a, b in zip(got.logprobs, want.logprobs, strict=True))
    norm = max(float(one.norm()) for one in want.gradients.values())
    assert got.gradients.keys() == want.gradients.keys()
    each = [float((got.gradients[name] - one).norm()) / norm for name, one in want.gradients.items()]
    return of_logprobs, max(each)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ring_size", [2, 4])
@pytest.mark.day("4-qwen3_5_text", "2-gpt_oss", "2-rwkv")
def test_a_tree_is_its_rollouts(rank_pool: Pool, family: str, ring_size: int) -> None:
    want = step_alone(family, 0)
    for got in rank_pool(ring_size).run(step_on_ring, family, 0, timeout_s=120):
        assert not got.refused, got.refused
        of_logprobs, of_gradients = errors_of(got, want)
        assert of_logprobs < 2e-5 and of_gradients < 2e-5, (of_logprobs, of_gradients)
