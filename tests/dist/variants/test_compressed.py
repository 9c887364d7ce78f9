"""Compressed entries beside a window (DeepSeek V4) on a ring, against one process: attention, entries, choices.

Attention in float64, with outputs and every gradient. Compressors are transformers' own; they compute a
softmax in float32.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring import (
    Causal,
    RingConfig,
    RingError,
    RingMesh,
    SlidingWindow,
    gather_sequence,
    make_layout,
    shard_sequence,
)
from ds_ring.integrations.adapter import apply
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.layer_patterns import LayerPatterns
from ds_ring.integrations.transformers.attention_name import NAME
from ds_ring.integrations.transformers.variants import compressed
from ds_ring.layers.scan.sequence_runs import of_blocks
from ds_ring.layers.selection.total_order import TotalOrder
from tests.dist.deepspeed_ranks import json_config, start_deepspeed
from tests.reference import relative_error, worst

SAMPLES, TOKENS, HEADS, HEAD_DIM, RATE, WINDOW, CHOSEN = 2, 83, 3, 8, 4, 9, 3
ENTRIES = TOKENS // RATE
SEEN = (torch.arange(TOKENS) + 1) // RATE  # complete entries of each query


def make(name: str, *shape: int) -> Tensor:
    """A global tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sharding_of(mesh: RingMesh, name: str, tokens: int = TOKENS, rate: int = RATE) -> BatchSharding:
    blocks = make_layout(name, tokens=-(-tokens // rate), ring_size=mesh.ring_size, pattern=Causal())
    config = RingConfig(ring_size=mesh.ring_size)
    return BatchSharding(config, of_blocks(blocks, rate, tokens), mesh, LayerPatterns(Causal(), {}))


def choices() -> Tensor:
    """Some entries that each query sees, none twice, the others -1: int64 [B, T, k]."""
    scores = make("choices", SAMPLES, TOKENS, ENTRIES)
    scores = scores.masked_fill(torch.arange(ENTRIES) >= SEEN[:, None], float("-inf"))
    best = scores.topk(CHOSEN, dim=-1)
    return best.indices.masked_fill(best.values == float("-inf"), -1)


def dense(x: dict[str, Tensor], chosen: Tensor | None) -> dict[str, Tensor]:
    """Output and gradients of one softmax over the window, the entries and the sinks."""
    given = {name: one.clone().requires_grad_() for name, one in x.items() if name != "grad"}
    place = torch.arange(TOKENS)
    gap = place[:, None] - place
    window = ((gap >= 0) & (gap < WINDOW)).expand(SAMPLES, -1, -1)
    entries = (torch.arange(ENTRIES) < SEEN[:, None]).expand(SAMPLES, -1, -1)
    if chosen is not None:
        picked = torch.zeros(SAMPLES, TOKENS, ENTRIES + 1, dtype=torch.bool)
        picked.scatter_(-1, torch.where(chosen < 0, ENTRIES, chosen), True)
        entries = picked[..., :ENTRIES]
    keys = torch.cat([given["kv"], given["entries"]], dim=2)
    scores = given["q"] @ keys.mT * HEAD_DIM**-0.5
    scores = scores.masked_fill(~torch.cat([window, entries], dim=-1).unsqueeze(1), float("-inf"))
    sinks = given["sinks"][None, :, None, None].expand(SAMPLES, -1, TOKENS, 1)
    out = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ keys
    out.backward(x["grad"])
    return {"out": out.detach()} | {name: one.grad for name, one in given.items() if one.grad is not None}


def attention_errors(rank: int, world_size: int) -> dict[str, float]:
    """The largest error of the output and of each gradient, by layout and kind of layer."""
    mesh, errors = RingMesh.from_world(world_size), {}
    x = {
        "q": make("q", SAMPLES, HEADS, TOKENS, HEAD_DIM),
        "kv": make("kv", SAMPLES, 1, TOKENS, HEAD_DIM),
        "entries": make("entries", SAMPLES, 1, ENTRIES, HEAD_DIM),
        "sinks": make("sinks", HEADS),
        "grad": make("grad", SAMPLES, HEADS, TOKENS, HEAD_DIM),
    }
    try:
        for name in ("zigzag", "contiguous"):
            sharding = sharding_of(mesh, name)
            blocks = compressed.sharding_in_blocks(sharding, RATE).layout
            for chosen in (None, choices()):
                want = dense(x, chosen)
                # the window that the end of the sequence cuts has an entry that nobody may see
                whole = torch.nn.functional.pad(x["entries"], (0, 0, 0, blocks.tokens - ENTRIES), value=1e3)
                layouts = {"q": sharding.layout, "kv": sharding.layout, "grad": sharding.layout}
                local = {key: shard_sequence(x[key], one, mesh=mesh, dim=2) for key, one in layouts.items()}
                local["entries"] = shard_sequence(whole, blocks, mesh=mesh, dim=2)
                local["sinks"] = x["sinks"].clone()
                picked = chosen
                if picked is not None:
                    picked = shard_sequence(picked, sharding.layout, mesh=mesh, dim=1, pad_value=-1)
                for key in ("q", "kv", "entries", "sinks"):
                    local[key].requires_grad_()
                both = torch.cat([local["kv"], local["entries"]], dim=2)
                out = compressed.attend(
                    local["q"], both, sharding, RATE, picked, SlidingWindow(WINDOW), None, local["sinks"]
                )
                out.backward(local["grad"])
                grads = {key: local[key].grad for key in ("q", "kv", "entries", "sinks")}
                assert all(one is not None for one in grads.values())
                if world_size > 1:
                    torch.distributed.all_reduce(grads["sinks"], group=mesh.sequence_group)
                got = {"sinks": grads["sinks"], "out": out.detach(), "q": grads["q"], "kv": grads["kv"]}
                for key in ("out", "q", "kv"):
                    got[key] = gather_sequence(got[key], sharding.layout, mesh=mesh, dim=2)
                got["entries"] = gather_sequence(grads["entries"], blocks, mesh=mesh, dim=2)[:, :, :ENTRIES]
                kind = "all" if chosen is None else "chosen"
                errors |= {f"{name} {kind} {key}": relative_error(got[key], one) for key, one in want.items()}
        return errors
    finally:
        mesh.close()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.day("1", "4")
def test_attention_to_a_window_and_entries_is_that_of_one_process(rank_pool, size):
    for errors in rank_pool(size).run(attention_errors):
        assert worst(errors.values()) < 1e-12, {key: one for key, one in errors.items() if not one < 1e-12}


def with_unfinished_entries(rank: int, world_size: int) -> dict[str, float]:
    """Let queries see the entry of a window that goes on behind them."""
    before, compressed.Before = compressed.Before, Causal
    try:
        return attention_errors(rank, world_size)
    finally:
        compressed.Before = before


def test_an_entry_that_is_seen_too_early_is_found(rank_pool):
    errors = rank_pool(2).run(with_unfinished_entries)[0]
    assert errors["zigzag all out"] > 1e-3 and errors["zigzag all entries"] > 1e-3
    assert errors["zigzag chosen out"] < 1e-12


LENGTHS = (83, 12, 3)  # many windows; fewer windows than chunks; no complete one


def compressor(kind: str) -> Any:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as file
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    config = DeepseekV4Config(
        hidden_size=16, head_dim=8, q_lora_rank=6, index_n_heads=3, index_head_dim=8, index_topk=CHOSEN,
        num_hidden_layers=2, partial_rotary_factor=0.5, compress_rates=rates,
    )  # fmt: skip
    made = getattr(file, f"DeepseekV4{kind}Compressor")(config).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(make(name, *parameter.shape) * 0.5)
    return made


def compressor_errors(rank: int, world_size: int, kind: str) -> dict[str, float]:
    """Errors of entries and of the gradient of hidden states; 1 for choices that differ."""
    mesh, errors = RingMesh.from_world(world_size), {}
    try:
        for tokens in LENGTHS:
            for name in ("zigzag", "contiguous"):
                hidden, queries = make("hidden", SAMPLES, tokens, 16), make("queries", SAMPLES, tokens, 6)
                positions = torch.arange(tokens)[None]
                alone, own = compressor(kind), hidden.clone().requires_grad_()
                with TotalOrder():
                    want, bias = alone(own, queries, positions, None, 0)
                count, rate = want.shape[2], alone.compress_rate
                grad = make("grad", *want.shape)
                if count:
                    want.backward(grad)

                sharding = sharding_of(mesh, name, tokens, 8)
                blocks, layout = compressed.sharding_in_blocks(sharding, rate).layout, sharding.layout
                made, places = compressor(kind), {"layout": layout, "mesh": mesh, "dim": 1}
                layer = SimpleNamespace(compressor=made, config=SimpleNamespace(_attn_implementation=NAME))
                entries: Any = compressed.CompressedEntries(layer)
                if kind == "CSA":
                    apply(entries, scorer=made.indexer.scorer)
                entries.note(made, (), {compressed.SHARDING: sharding})
                given = [shard_sequence(x, **places) for x in (hidden, queries, positions)]
                given[0].requires_grad_()
                got, mask = entries.compress(*given, None, 0)
                assert mask is None and got.shape[2] == blocks.local_tokens
                whole = torch.nn.functional.pad(grad, (0, 0, 0, blocks.tokens - count))
                got.backward(shard_sequence(whole, blocks, mesh=mesh, dim=2))
                case = f"{tokens} {name}"
                of_hidden = gather_sequence(given[0].grad, **places)
                if count:
                    found = gather_sequence(got.detach(), blocks, mesh=mesh, dim=2)[:, :, :count]
                    errors[f"{case} entries"] = relative_error(found, want)
                    errors[f"{case} hidden"] = relative_error(of_hidden, own.grad)
                else:
                    assert not of_hidden.any()
                if kind == "CSA":
                    chosen = gather_sequence(entries._chosen, **places)
                    picked = torch.zeros(SAMPLES, tokens, blocks.tokens + 1, dtype=torch.bool)
                    picked.scatter_(-1, torch.where(chosen < 0, blocks.tokens, chosen), True)
                    differs = (picked[..., :count] != (bias[:, 0] == 0)).any() | picked[..., count:-1].any()
                    errors[f"{case} choices"] = float(differs)
        return errors
    finally:
        mesh.close()


@pytest.mark.parametrize("kind", ["HCA", "CSA"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.day("1-HCA", "1-CSA", "4-HCA", "4-CSA")
def test_entries_and_choices_are_those_of_one_process(rank_pool, size, kind):
    for errors in rank_pool(size).run(compressor_errors, kind):
        assert worst(errors.values()) < 1e-6, {key: one for key, one in errors.items() if not one < 1e-6}


def without_windows_before(rank: int, world_size: int) -> dict[str, float]:
    """Take the window before each run for the beginning of the sequence."""
    halo = compressed.halo_op
    compressed.halo_op = lambda *given: halo(*given) * 0
    try:
        return compressor_errors(rank, world_size, "CSA")
    finally:
        compressed.halo_op = halo


def test_a_window_that_is_lost_between_ranks_is_found(rank_pool):
    errors = rank_pool(2).run(without_windows_before)[0]
    assert errors["83 zigzag entries"] > 1e-3 and errors["83 zigzag hidden"] > 1e-3


def small_model() -> Any:
    from ds_ring_launcher.check.small_model import build, read_config, shrink

    config = shrink(read_config("deepseek_v4"), tokens=61)
    return build(config, "causal-lm", seed=0)


def off_and_on(rank: int, world_size: int) -> dict[str, Any]:
    """Losses on one process, on the ring before and after `off`, and inside; and two generations."""
    start_deepspeed()
    import ds_ring
    from ds_ring.errors import RingConfigError

    ids = torch.randint(0, 80, (2, 61), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    alone = small_model()
    alone.set_attn_implementation("eager")
    model = small_model()
    engine = ds_ring.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config=json_config(world_size, world_size, stage=0),
    )[0]
    alone.eval()
    engine.eval()
    found: dict[str, Any] = {}
    with torch.no_grad():
        found["alone"] = float(alone(**batch).loss)
        found["expected"] = alone.generate(ids[:, :9], max_new_tokens=9, do_sample=False).tolist()
        found["ring"] = float(engine.ring.mean_loss(engine(**engine.ring.shard_batch(batch)).loss))
        with engine.ring.off():
            found["off"] = float(engine(**batch).loss)
            found["ids"] = engine.module.generate(ids[:, :9], max_new_tokens=9, do_sample=False).tolist()
        found["on again"] = float(engine.ring.mean_loss(engine(**engine.ring.shard_batch(batch)).loss))
        try:
            engine.module.generate(ids[:, :9], max_new_tokens=9)
        except RingConfigError as error:
            found["refused"] = str(error)
    return found


def test_off_is_the_model_alone_and_generation_on_the_ring_is_refused(rank_pool):
    for found in rank_pool(2).run(off_and_on):
        for where in ("ring", "off", "on again"):
            assert found[where] == pytest.approx(found["alone"], rel=1e-5), where
        assert found["ids"] == found["expected"]
        assert "layers that attend to compressed entries, which a ring's cache lacks" in found["refused"]


def checkpointed(rank: int, world_size: int) -> list[Any]:
    """Compute the layers on the ring again in the backward pass, at ZeRO 3."""
    start_deepspeed()
    from ds_ring_launcher.check import model_check

    on_the_ring = model_check._on_the_ring

    def again(model: Any, *others: Any) -> Any:
        model.gradient_checkpointing_enable()
        return on_the_ring(model, *others)

    model_check._on_the_ring = again
    try:
        return model_check.check_forms(model_check.CheckRequest("deepseek_v4", stage=3))
    finally:
        model_check._on_the_ring = on_the_ring


def test_checkpointed_layers_at_zero_3_are_exact(rank_pool):
    (report,) = rank_pool(2).run(checkpointed)[0]
    assert report.result == "exact", report.reason


@pytest.mark.parametrize(
    ("section", "kind", "words"),
    [
        ({"layout": "striped"}, "RingConfigError", "expected shards of consecutive tokens"),
        ({"pattern": {"window": 8}}, "RingPatternError", "expected the plain causal pattern,.* got Sliding"),
        ({"pattern": {"documents": True}}, "RingPatternError", "expected no packed documents"),
        ({"ring_size": 1, "ulysses_size": 2}, "RingConfigError", "ulysses_size: expected 1,.* got 2"),
    ],
)
def test_a_section_that_does_not_go_with_entries_is_refused(section, kind, words):
    with pytest.raises(RingError, match=words) as caught:
        compressed.check_section(small_model(), RingConfig(**{"ring_size": 2} | section))
    assert type(caught.value).__name__ == kind
