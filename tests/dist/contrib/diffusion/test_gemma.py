"""DiffusionGemma, unmodified, on a ring: 50 steps have the losses of transformers' own block by block."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache

from ds_ring import RingConfigError, RingMesh, RingShapeError
from ds_ring.contrib.diffusion.gemma import NAME, DiffusionRing

VOCABULARY, TOKENS, BLOCK = 61, 29, 4  # the last block is short
LEARNING_RATE = 0.005  # at ten times it, rounding to float32 changes which experts a token gets


def build(attention: str) -> Any:
    """A DiffusionGemma of two layers, one of them with a window of 7; the same on every rank."""
    pytest.importorskip("transformers.models.diffusion_gemma")  # the lowest version has none
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DiffusionGemmaTextConfig
    from transformers.models.gemma4 import Gemma4VisionConfig

    text = DiffusionGemmaTextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=8, sliding_window=7,
        layer_types=["sliding_attention", "full_attention"], num_experts=4, top_k_experts=2,
        moe_intermediate_size=16,
    )  # fmt: skip
    vision = Gemma4VisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(text_config=text, vision_config=vision))
    model.set_attn_implementation(attention)
    return model.train()


def texts(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    clean = torch.randint(1, VOCABULARY, (2, TOKENS), generator=drawn)
    other = torch.randint(1, VOCABULARY, (2, TOKENS), generator=drawn)
    return clean, torch.where(torch.rand(clean.shape, generator=drawn) < 0.5, other, clean)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.mT, labels, reduction="sum")


def alone(steps: int) -> list[float]:
    """Each block by itself, with the text before it: no mask of ours. The first block has no text, no loss."""
    model, losses = build("sdpa"), []
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        clean, corrupted = texts(step)
        parts = []
        for start in range(BLOCK, TOKENS, BLOCK):
            end = min(start + BLOCK, TOKENS)
            logits = model(clean[:, :start], decoder_input_ids=corrupted[:, start:end]).logits
            parts.append(summed(logits, clean[:, start:end]))
        loss = torch.stack(parts).sum() / clean[:, BLOCK:].numel()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(float(loss.detach()))
    return losses


def on_ring(rank: int, world_size: int, steps: int) -> list[float]:
    model, losses = build(NAME), []
    ring = DiffusionRing(BLOCK, TOKENS, RingMesh.from_world(world_size))
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    positions = torch.arange(TOKENS)[None]
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for step in range(steps):
        clean, corrupted = texts(step)
        labels = clean.clone()
        labels[:, :BLOCK] = -100
        logits = model(
            ring.local(clean), position_ids=ring.local(positions), diffusion_ring=ring,
            decoder_input_ids=ring.local(corrupted, True), decoder_position_ids=ring.local(positions, True),
            **{cache: DynamicCache()},
        ).logits  # fmt: skip
        loss = summed(logits, ring.local(labels, True)) / clean[:, BLOCK:].numel()
        sgd.zero_grad()
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
        sgd.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(("world", "steps"), [(2, 50), (4, 50), (2, 2)])
@pytest.mark.day("2-2")
def test_steps_have_the_losses_of_one_process(rank_pool: Any, world: int, steps: int) -> None:
    want = alone(steps)
    for losses in rank_pool(world).run(on_ring, steps):
        assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 1e-5


def test_a_call_without_the_ring_is_refused() -> None:
    model, (clean, corrupted) = build(NAME), texts(0)
    with pytest.raises(RingConfigError, match="diffusion_ring=DiffusionRing"):
        model(clean, decoder_input_ids=corrupted)
    ring = DiffusionRing(BLOCK, TOKENS, RingMesh.single())
    with pytest.raises(RingShapeError, match=f"expected {TOKENS} local keys, got {TOKENS - 1}"):
        model(clean[:, 1:], decoder_input_ids=corrupted, diffusion_ring=ring)
