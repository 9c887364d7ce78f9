"""Hooks and terms of others that read a length: NEFTune's noise is that of one process, the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.neftune import activate_neftune

from tests.dist.deepspeed_ranks import Size, build_batch, build_model, json_config, start_engine

SIZE = Size(hidden=16, layers=1, tokens=29, samples=2)
ALPHA = 5.0


def of_model(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Losses of two training steps, with another seed each, and of an evaluation."""
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        losses.append(model(**batch).loss)
    return losses


def alone() -> list[float]:
    model = build_model(SIZE, "sdpa")
    activate_neftune(model, ALPHA)
    losses = [float(loss.detach()) for loss in of_model(model.train(), build_batch(SIZE))]
    return [*losses, float(model.eval()(**build_batch(SIZE)).loss.detach())]


def on_a_ring(rank: int, world_size: int, when: str, section: dict[str, Any]) -> Any:
    model: Any = build_model(SIZE, "sdpa")
    handle = activate_neftune(model, ALPHA) if when == "before" else None
    engine = start_engine(model, json_config(world_size, SIZE.samples, 1, ring_attention=section))
    if handle is None:
        handle = activate_neftune(model, ALPHA)
    batch = engine.ring.shard_batch(build_batch(SIZE))
    losses = [float(engine.ring.mean_loss(loss)) for loss in of_model(engine, batch)]
    handle.remove()
    plain = float(engine.ring.mean_loss(engine(**batch).loss))
    return losses, plain, [line for line in engine.ring.describe().splitlines() if "neftune" in line]


@pytest.mark.situation("trainers", "NEFTune's noise")
@pytest.mark.day("zigzag-after-3")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_noise_is_that_of_one_process_and_goes_with_its_hook(
    rank_pool: Any, when: str, layout: str, ranks: int
) -> None:
    *noisy, plain = alone()
    assert min(abs(loss - plain) for loss in noisy) > 1e-3
    for losses, without, lines in rank_pool(ranks).run(on_a_ring, when, {"layout": layout}):
        assert losses == pytest.approx(noisy, rel=1e-5) and without == pytest.approx(plain, rel=1e-5)
        assert len(lines) == 1


def with_term(rank: int, world_size: int, kind: str) -> None:
    import peft
    import transformers

    model: Any = build_model(SIZE, "sdpa")
    if kind == "activated LoRA":
        lora = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3, 4]
        )
        model = peft.get_peft_model(model, lora)
    elif kind == "z-loss":
        config = transformers.BambaConfig(
            vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, attn_layer_indices=[1], z_loss_coefficient=0.1, mamba_n_heads=4,
            mamba_d_head=8, mamba_d_state=8,
        )  # fmt: skip
        model = transformers.BambaForCausalLM(config)
    engine = start_engine(model, json_config(world_size, 2, 0))
    engine(**engine.ring.shard_batch(build_batch(SIZE)))


@pytest.mark.day("activated LoRA-alora_invocation_tokens")
@pytest.mark.situation("trainers", "a hook whose term depends on the number of tokens")
@pytest.mark.parametrize(
    ("kind", "words"), [("activated LoRA", "alora_invocation_tokens"), ("z-loss", "added a term to it")]
)
def test_terms_of_this_ranks_tokens_are_refused(rank_pool: Any, kind: str, words: str) -> None:
    for outcome in rank_pool(2).collect(with_term, kind, grace_s=30):
        assert outcome.error_type == "RingConfigError" and words in outcome.message, outcome.report
