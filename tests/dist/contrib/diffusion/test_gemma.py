"""DiffusionGemma, unmodified, on a ring: 50 steps have the losses of transformers' own block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_ring.config.section import RingConfig
from ds_ring.contrib.diffusion.batch import BLOCKS, make_block_numbers
from ds_ring.errors import RingConfigError
from ds_ring.models.attach import check_model
from ds_ring.patterns.private.pattern import BlockDiffusion
from tests.dist.deepspeed_ranks import json_config, start_engine, take_step, train_by_sgd
from tests.dist.harness import catch_refusal

VOCABULARY, TOKENS, BLOCK = 61, 29, 4  # the last block is short
IDS = np.repeat([0, 1], [18, 11])
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
    second = torch.randint(1, VOCABULARY, (2, TOKENS), generator=drawn)
    return clean, torch.where(torch.rand(clean.shape, generator=drawn) < 0.5, second, clean)


def has_text(packed: bool) -> Tensor:
    """Whether there is text before a token's block: the first block of a document has none, and no loss."""
    ids = IDS if packed else np.zeros(TOKENS, dtype=int)
    return torch.tensor([int((ids[:t] == ids[t]).sum()) >= BLOCK for t in range(TOKENS)])


def alone(steps: int, packed: bool) -> list[float]:
    """Each block by itself, with the text of its document before it: no mask of ours."""
    model, ids = build("sdpa"), IDS if packed else np.zeros(TOKENS, dtype=int)

    def loss_of(step: int) -> Tensor:
        clean, corrupted = texts(step)
        parts, first, labelled = [], 0, 0
        for length in np.bincount(ids):
            mine = slice(first, first + int(length))
            text, second, first = clean[:, mine], corrupted[:, mine], mine.stop
            for start in range(BLOCK, int(length), BLOCK):
                canvas = slice(start, start + BLOCK)
                logits = model(text[:, :start], decoder_input_ids=second[:, canvas]).logits
                labels = text[:, canvas]
                parts.append(torch.nn.functional.cross_entropy(logits.mT, labels, reduction="sum"))
                labelled += labels.numel()
        return torch.stack(parts).sum() / labelled

    return train_by_sgd(model.parameters(), loss_of, steps, LEARNING_RATE)


def on_ring(rank: int, world_size: int, steps: int, stage: int, packed: bool) -> list[float]:
    model, losses = build("sdpa"), []
    config = json_config(world_size, 2, stage, ring_attention={"layout": "private"})
    engine = start_engine(model, config, LEARNING_RATE)
    ids = torch.from_numpy(IDS) if packed else None
    for step in range(steps):
        clean, corrupted = texts(step)
        labelled = has_text(packed).expand_as(clean)
        batch = engine.ring.diffusion_batch(clean, corrupted, BLOCK, document_ids=ids, predicted=labelled)
        losses.append(take_step(engine, batch))
    return losses


@pytest.mark.night
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("world", "steps"), [(2, 50), (4, 50), (2, 2)])
def test_steps_have_the_losses_of_one_process(
    rank_pool: Any, world: int, steps: int, stage: int, packed: bool
) -> None:
    want = alone(steps, packed)
    for losses in rank_pool(world).run(on_ring, steps, stage, packed):
        assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 1e-5


def refused(rank: int, world_size: int) -> list[str]:
    """What the model refuses in a call, and a batch of its engine."""
    engine, (clean, corrupted) = start_engine(build("sdpa"), json_config(world_size, 2, 0)), texts(0)
    batch = engine.ring.diffusion_batch(clean, corrupted, BLOCK)
    local = engine.ring.shard_batch(batch)
    tries: list[Callable[[], Any]] = [
        lambda: engine(**local, attention_mask=local["input_ids"]),
        lambda: engine(**{key: x for key, x in local.items() if key != "decoder_position_ids"}),
        lambda: engine.ring.shard_batch({"input_ids": clean}),
        lambda: engine.ring.shard_batch(batch | {BLOCKS: one_shorter(batch[BLOCKS])}),
        lambda: engine(**local, pixel_values=torch.zeros(1, 4, 8)),
        lambda: engine.ring.shard_batch(batch | {"pixel_values": torch.zeros(2, 4, 8)}),
    ]
    return [catch_refusal(attempt) for attempt in tries]


def one_shorter(numbers: Tensor) -> Tensor:
    """The blocks of two rows, the second one of which is a token shorter, with two tokens of padding."""
    short = make_block_numbers(BlockDiffusion(BLOCK, TOKENS - 1, padding=2))
    return torch.stack([numbers[0], torch.from_numpy(short)])


def test_other_calls_and_batches_are_refused(rank_pool: Any) -> None:
    words = ["got attention_mask", "got no decoder_position_ids", "use engine.ring.diffusion_batch",
        f"rows of one length, got [{TOKENS}, {TOKENS - 1}]", "got pixel_values", "pixel_values"]  # fmt: skip
    for messages in rank_pool(2).run(refused):
        assert all(word in message for word, message in zip(words, messages, strict=True)), messages


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"layout": "zigzag"}, '"layout": "zigzag"'),
        ({"pattern": {"window": 8}}, 'leave "pattern" out'),
        ({"ulysses_size": 2, "ring_size": 2}, '"ulysses_size": 2'),
        ({"min_sequence_length": 8}, '"min_sequence_length"'),
    ],
)
def test_other_sections_are_refused(section: dict[str, Any], words: str) -> None:
    config = RingConfig.from_deepspeed({"sequence_parallel_size": 4, "ring_attention": section})
    with pytest.raises(RingConfigError, match=words):
        check_model(build("sdpa"), config)


def test_a_part_of_the_model_is_refused() -> None:
    config = RingConfig.from_deepspeed({"sequence_parallel_size": 2, "ring_attention": {}})
    with pytest.raises(RingConfigError, match="a part of DiffusionGemmaForBlockDiffusion"):
        check_model(build("sdpa").model, config)
