"""Random draws of models in training on gloo ranks: dropout differs by rank, left out layers are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.dist.deepspeed_ranks import full_gradient, json_config, start_engine
from tests.dist.harness import Pool

TOKENS, LAYERS = 24, 6


class Draws(NamedTuple):
    """What a rank has drawn, and what came of it."""

    masks: list[Tensor]  # which numbers the first dropout of each pass left out
    gradients: list[Tensor]  # of each pass
    after: list[float]  # a draw of the script after each pass


def gpt2() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.3, embd_pdrop=0.3,
        attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def dropped(rank: int, world_size: int) -> Draws:
    """Passes with the seeds 3, 3 and 4, then with seed 3 and both kinds of checkpointing."""
    import deepspeed

    engine = start_engine(gpt2(), json_config(world_size, 1, 1), rate=0.0)
    parameters = list(engine.module.parameters())
    ids = torch.arange(TOKENS)[None]
    batch = engine.ring.shard_batch({"input_ids": ids, "labels": ids})
    draws = Draws([], [], [])

    def note(_: Any, args: Any, output: Tensor) -> None:
        if first[0]:
            draws.masks.append(output == 0)
            first[0] = False

    engine.module.transformer.drop.register_forward_hook(note)
    for seed, reentrant in ((3, None), (3, None), (4, None), (3, True), (3, False)):
        if reentrant is not None:
            engine.module.gradient_checkpointing_enable({"use_reentrant": reentrant})
        first = [True]
        torch.manual_seed(seed)
        engine.backward(engine(**batch).loss)
        draws.after.append(float(torch.rand([])))
        draws.gradients.append(torch.cat([full_gradient(deepspeed, p).flatten() for p in parameters]))
        engine.step()
    return draws


@pytest.mark.night
@pytest.mark.situation("modules", "trained a model with dropout on ranks with one seed")
def test_ranks_draw_other_masks_that_a_seed_repeats(rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(dropped)
    assert 0.2 < float((first.masks[0] & ~second.masks[0]).float().mean()) < 0.3  # 0.3 * 0.7 if independent
    for draws in (first, second):
        assert all(torch.equal(draws.masks[0], draws.masks[number]) for number in (1, 3, 4))
        assert not torch.equal(draws.masks[0], draws.masks[2])
        for number in (1, 3, 4):  # recomputed layers draw what they drew first
            torch.testing.assert_close(draws.gradients[number], draws.gradients[0])
    assert first.after == second.after  # a script's own draws stay equal


def opt(drop: float) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=61, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, dropout=0.0, attention_dropout=0.0, layerdrop=drop, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config).train()


def bart(drop: float) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=61, d_model=32, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64,
        dropout=0.0, encoder_layerdrop=drop, decoder_layerdrop=drop, forced_eos_token_id=2,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).train()


def left_out(rank: int, world_size: int, build: Callable[[float], Any], drop: float) -> list[float]:
    """Errors of the loss and of the gradients of some passes against one process with the same draws."""
    drawn: list[Tensor] = []
    rand = torch.rand

    def record(*args: Any, **kwargs: Any) -> Tensor:
        drawn.append(rand(*args, **kwargs))
        return drawn[-1]

    engine = start_engine(build(drop), json_config(world_size, 1, 1), rate=0.0)
    ids = torch.randint(3, 61, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    whole = {"input_ids": ids, "labels": ids.clone()}
    alone = build(drop)
    torch.manual_seed(100 + rank)  # other ones on each rank
    import deepspeed

    errors = []
    for _ in range(3):
        drawn.clear()
        with mock.patch.object(torch, "rand", record):
            loss = engine(**engine.ring.shard_batch(whole)).loss
        engine.backward(loss)
        alone.zero_grad()
        with mock.patch.object(torch, "rand", mock.Mock(side_effect=drawn.copy())):
            expected = alone(**whole, use_cache=False).loss
        expected.backward()
        errors.append(abs(float(engine.ring.mean_loss(loss)) / float(expected) - 1))
        for (name, p), q in zip(engine.module.named_parameters(), alone.parameters(), strict=True):
            got = deepspeed.utils.safe_get_full_grad(p)
            want = torch.zeros_like(q) if q.grad is None else q.grad
            got = torch.zeros_like(q) if got is None else got
            errors.append(float((got - want).norm() / max(float(want.norm()), 1e-3)))
            assert name
        engine.step()
    return errors


@pytest.mark.day("opt, half")
@pytest.mark.parametrize(
    ("build", "drop"), [(opt, 0.5), (opt, 1.0), (bart, 0.5)], ids=["opt, half", "opt, all", "bart, half"]
)
@pytest.mark.situation("modules", "trained OPT or BART with LayerDrop on ranks with other seeds")
def test_ranks_leave_out_the_same_layers(rank_pool: Pool, build: Callable[[float], Any], drop: float) -> None:
    for errors in rank_pool(2).run(left_out, build, drop):
        assert max(errors) < 1e-4, errors
