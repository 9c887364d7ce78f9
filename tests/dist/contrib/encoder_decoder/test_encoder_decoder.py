"""Encoder-decoders trained through `ds_ring.initialize`, against one process; and what is refused of them.

`test_families.py` has the model types. Here: steps of training with ZeRO and checkpointed layers, other layouts,
Ulysses ranks, short batches that are not cut, and batches that are wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ds_ring
from ds_ring import RingConfigError, RingError, RingPatternError
from ds_ring.config.section import RingConfig
from ds_ring.contrib.families.relative_bias.layers import wrap_bias
from ds_ring.data.batch import SHARDING
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.layer_patterns import LayerPatterns
from tests.dist.deepspeed_ranks import (
    LEARNING_RATE,
    Size,
    build_bart,
    build_pairs,
    build_t5,
    json_config,
    start_deepspeed,
    start_engine,
    train_alone,
    train_on_ring,
)
from tests.dist.harness import Pool, catch_refusal
from tests.dist.one_process import Layer, same_as_one_process

BUILD = {"bart": build_bart, "t5": build_t5}
STEPS = 3


class Case(NamedTuple):
    """One training."""

    model: str
    ring_size: int
    tokens: int  # of the encoder
    answers: int  # of the decoder
    padded: bool = True
    stage: int = 2
    checkpointing: bool = False
    layout: str = "auto"
    ulysses_size: int = 1
    shortest: int = 0  # min_sequence_length


CASES = {
    "bart": Case("bart", 2, 47, 30, checkpointing=True),
    "bart, longer answers": Case("bart", 2, 21, 50, padded=False, stage=1, layout="zigzag"),
    "bart, balanced": Case("bart", 2, 47, 30, layout="balanced", stage=0),
    "bart, Ulysses": Case("bart", 4, 45, 31, ulysses_size=2, layout="contiguous"),
    "bart, one rank": Case("bart", 1, 21, 21),
    "bart, not cut": Case("bart", 2, 40, 30, shortest=64),
    "bart, ZeRO 3": Case("bart", 4, 47, 30, stage=3),
    "t5": Case("t5", 2, 47, 30, checkpointing=True),
    "t5, ZeRO 3": Case("t5", 2, 41, 50, padded=False, stage=3, layout="zigzag"),
}


@pytest.mark.day("bart, longer answers")
@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_process(rank_pool: Pool, name: str) -> None:
    case = CASES[name]
    size = Size(hidden=32, layers=2, tokens=case.tokens, samples=4)
    batch = build_pairs(size, case.answers, case.padded)
    build = BUILD[case.model]
    section = {"ulysses_size": case.ulysses_size, "layout": case.layout, "min_sequence_length": case.shortest}
    config = json_config(case.ring_size, size.samples, case.stage, ring_attention=section)
    got = rank_pool(case.ring_size).run(
        train_on_ring, size, config, STEPS, 1.0, case.checkpointing, batch, build, timeout_s=120
    )[0]
    expected = train_alone(size, STEPS, batch=batch, build=build)
    for mine, theirs in zip(got.losses, expected.losses, strict=True):
        assert abs(mine - theirs) < 1e-5 * theirs
    assert got.gradients.keys() >= expected.gradients.keys()
    norms = torch.stack([x.norm() for x in expected.gradients.values()])
    for name, gradient in expected.gradients.items():
        error = (got.gradients[name] - gradient).norm() / max(gradient.norm(), 1e-2 * norms.mean())
        assert error < 2e-5, (name, error)


def small() -> Size:
    return Size(hidden=16, layers=1, tokens=21, samples=2)


def session_for(section: dict[str, Any], **changes: Any) -> Any:
    """The engine of a small BART on this process's ring of two."""
    return start_engine(build_bart(small(), **changes), json_config(2, 2, 0, ring_attention=section))


def used_otherwise(rank: int, world_size: int) -> dict[str, Any]:
    """What a batch is refused for, logprobs, and what works without the ring."""
    engine = session_for({})
    whole, result = build_pairs(small(), 13, padded=True), {}
    wrong: dict[str, dict[str, Tensor]] = {
        "no answers": {"input_ids": whole["input_ids"]},
        "samples": whole | {"labels": whole["labels"][:1]},
        "labels of samples": whole | {"labels": whole["labels"][:, 0]},
        "documents": whole | {"document_ids": torch.zeros(2, 21, dtype=torch.int64)},
        "positions": whole | {"position_ids": torch.arange(21).expand(2, -1)},
        "gaps": whole | {"decoder_attention_mask": torch.arange(13).expand(2, -1) % 2},
    }
    for name, batch in wrong.items():
        result[name] = catch_refusal(engine.ring.shard_batch, batch)
    local = engine.ring.shard_batch(whole)
    calls: dict[str, dict[str, Any]] = {
        "labels alone": {key: x for key, x in local.items() if key != "shift_labels"},
        "mask": local | {"attention_mask": torch.ones_like(local["input_ids"])},
        "encoder_outputs": local | {"encoder_outputs": (local["input_ids"],)},
        "length": local | {"decoder_input_ids": local["decoder_input_ids"][:, :-1]},
    }
    for name, inputs in calls.items():
        result[name] = catch_refusal(engine, **inputs)
    engine.eval()
    result["generate"] = catch_refusal(engine.module.generate, whole["input_ids"], max_new_tokens=3)
    with torch.no_grad():
        mine = engine.ring.gather(engine.ring.logprobs(engine, local))
        states = engine.ring.gather(engine(**local).encoder_last_hidden_state, encoder=True)
        with engine.ring.off():
            output = engine.module(**whole)
            text = engine.module.generate(whole["input_ids"], max_new_tokens=3, do_sample=False)
    alone = build_bart(small()).eval()
    expected = alone.generate(whole["input_ids"], max_new_tokens=3, do_sample=False)  # type: ignore[operator]
    labels = whole["labels"]
    theirs = output.logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    result["logprobs"] = float((mine - theirs.masked_fill(labels < 0, 0.0)).abs().max())
    real = whole["attention_mask"].bool()
    result["states"] = float((states - output.encoder_last_hidden_state)[real].abs().max())
    result["text"] = bool(torch.equal(text, expected))
    result["compiled"] = catch_refusal(engine.compile)
    return result


SAID = {
    "no answers": "RingShapeError: batch: expected labels or decoder_input_ids, got",
    "samples": "RingShapeError: batch: expected as many samples in both sequences, got 2 and 1",
    "labels of samples": "RingShapeError: labels: expected [samples, tokens], got [2]",
    "documents": "expected samples of one text and one answer, got ",
    "positions": "expected samples of one text and one answer, got position_ids",
    "gaps": "RingPatternError: attention_mask: expected padding on the right only",
    "labels alone": "RingShapeError: BartForConditionalGeneration: expected shift_labels and num_items_in_batch",
    "mask": "RingPatternError: BartForConditionalGeneration: expected no attention_mask",
    "encoder_outputs": "expected one sequence of tokens, got encoder_outputs",
    "length": "RingShapeError: BartForConditionalGeneration: input_ids: expected 7 local tokens",
    "compiled": "RingConfigError: engine.compile: expected a model of one sequence, got an encoder-decoder",
    "generate": "RingConfigError: BartForConditionalGeneration.generate: expected a model of one sequence",
}


def test_batches_calls_and_what_is_not_training(rank_pool: Pool) -> None:
    for result in rank_pool(2).run(used_otherwise):
        for name, said in SAID.items():
            assert said in result.get(name, "no error"), (name, result.get(name))
        assert result["logprobs"] < 1e-5 and result["states"] < 1e-5
        assert result["text"]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[RingError], str]] = {
    "window": ({"pattern": {"window": 8}}, {}, RingPatternError, "expected the plain causal pattern"),
    "documents": ({"pattern": {"documents": True}}, {}, RingPatternError,
        "got Causal() and documents; leave"),
    "dynamic": ({"dynamic_ring": True}, {}, RingConfigError, "dynamic_ring"),
    "first batch": ({"verify_first_batch": True}, {}, RingConfigError, '"verify_first_batch": true'),
    "tiles": ({"long_sequence": {"tiled_mlp": True}}, {}, RingConfigError, '"long_sequence"'),
    "reproducible": ({"transport": "reproducible", "ulysses_size": 2}, {}, RingConfigError,
        '"transport": "reproducible" on Ulysses ranks'),
}  # fmt: skip


def refused(rank: int, world_size: int) -> dict[str, str]:
    return {name: catch_refusal(session_for, row[0], **row[1]) for name, row in REFUSED.items()}


def test_sections_and_settings_that_are_refused(rank_pool: Pool) -> None:
    for result in rank_pool(2).run(refused):
        for name, (*_, kind, said) in REFUSED.items():
            assert result[name].startswith(kind.__name__) and said in result[name], (name, result[name])


def enabled(rank: int, world_size: int) -> tuple[list[float], dict[str, float]]:
    """An ordinary script after `ds_ring.enable()`: whole batches in, whole outputs out."""
    deepspeed = start_deepspeed()
    ds_ring.enable()
    size = small()._replace(tokens=26)  # as many on a rank in both sequences, in other layouts
    model, alone = build_bart(size), build_bart(size)
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine = deepspeed.initialize(model=model, optimizer=sgd, config=json_config(2, 2, 1))[0]
    whole, losses, errors = build_pairs(size, 26, padded=True), [], {}
    expected = alone(**whole)
    for _ in range(2):
        output = engine(**whole)
        if not losses:
            real = whole["attention_mask"].bool()
            for name, rows in (("logits", real | True), ("encoder_last_hidden_state", real)):
                errors[name] = float((output[name] - expected[name])[rows].abs().max())
        engine.backward(output.loss)
        engine.step()
        losses.append(float(output.loss))
    return losses, errors


@pytest.mark.night
def test_a_script_without_our_calls(rank_pool: Pool) -> None:
    size = small()._replace(tokens=26)
    batch = build_pairs(size, 26, padded=True)
    expected = train_alone(size, 2, batch=batch, build=build_bart)
    for losses, errors in rank_pool(2).run(enabled):
        assert losses == pytest.approx(expected.losses, rel=1e-5)
        assert max(errors.values()) < 1e-5


# T5's layers in float64, whose norms are float32 in any case: the attention module by itself.
BIASED = {
    "both ways": ("t5", False, False),
    "causal": ("t5", True, False),
    "padded": ("t5", False, True),
    "UMT5": ("umt5", False, False),
}
TOKENS, WIDTH = 150, 24  # beyond the greatest distance of 128, in 32 buckets


def biased_module(family: str, causal: bool) -> Any:
    from transformers.models.t5.modeling_t5 import T5Attention, T5Config
    from transformers.models.umt5.modeling_umt5 import UMT5Attention, UMT5Config

    kind, of = (T5Attention, T5Config) if family == "t5" else (UMT5Attention, UMT5Config)
    config = of(d_model=WIDTH, d_kv=8, num_heads=3, dropout_rate=0.0, is_decoder=causal)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return kind(config, has_relative_attention_bias=True, layer_idx=0, is_causal=causal).double()


def states_of() -> tuple[Tensor, Tensor]:
    """Hidden states, and which tokens are real: all of one sample, most of the other."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.arange(TOKENS) < torch.tensor([[TOKENS], [TOKENS - 40]])


def biased(mesh: ds_ring.RingMesh, name: str, layout: str) -> Layer:
    """Of a module its inputs and its parameters."""
    from ds_ring.data.packing import group_rows

    family, causal, padded = BIASED[name]
    x, real = states_of()
    hidden = torch.zeros(2, 1, TOKENS, TOKENS, dtype=torch.float64)
    if padded:
        hidden = hidden.masked_fill(~real[:, None, None, :], -torch.inf)
    if causal:
        hidden = hidden.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf)
    alone, module = biased_module(family, causal), biased_module(family, causal)
    pattern = ds_ring.Causal() if causal else ds_ring.Full()
    placed = ds_ring.make_layout(layout, tokens=TOKENS, ring_size=mesh.ring_size, pattern=pattern)
    groups = group_rows(torch.where(real, 0, -1), 2) if padded else ()
    config = RingConfig(ring_size=mesh.ring_size, pattern={"causal": causal})
    sharding = BatchSharding(config, placed, mesh, LayerPatterns(pattern, {}), groups)
    module.compute_bias = wrap_bias(module)
    module.config._attn_implementation = "ds_ring"
    masks = {"mask" if family == "t5" else "attention_mask": hidden}
    call = torch.func.functional_call
    return Layer(
        {"x": x, **dict(module.named_parameters())},
        lambda x, **weights: call(alone, weights, (x,), masks)[0],
        lambda x, **weights: call(module, weights, (x,), {SHARDING: sharding})[0],
        mesh, placed, dim=1, parameters=list(dict(module.named_parameters())),
        real=real if padded else None,  # what padding sees is not compared
    )  # fmt: skip


@pytest.mark.night
@pytest.mark.parametrize(("world_size", "layout"), [(2, "zigzag"), (4, "contiguous")])
@pytest.mark.parametrize("name", BIASED)
def test_a_bias_of_distances_is_exact_in_float64(
    rank_pool: Pool, name: str, world_size: int, layout: str
) -> None:
    same_as_one_process(rank_pool(world_size), biased, (name, layout), count=7)


@pytest.mark.night
def test_a_bias_of_distances_is_not_dropped_by_a_compiler() -> None:
    module = biased_module("t5", causal=True)
    module.compute_bias = wrap_bias(module)
    module.config._attn_implementation = "ds_ring"
    layout = ds_ring.make_layout("contiguous", tokens=TOKENS, ring_size=1)
    patterns = LayerPatterns(ds_ring.Causal(), {})
    sharding = BatchSharding(RingConfig(ring_size=1), layout, ds_ring.RingMesh.single(), patterns)
    x, _ = states_of()
    hidden = torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)
    expected = biased_module("t5", causal=True)(x, mask=hidden)[0]
    result = torch.compile(module, backend="eager")(x, **{SHARDING: sharding})[0]
    assert float((result - expected).abs().max() / expected.abs().max()) < 1e-12
