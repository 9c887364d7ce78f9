"""`model.generate` on a ring against one process: tokens, logits of every step, and who holds the cache."""

from __future__ import annotations

import logging
from io import StringIO
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ds_ring import Causal, ring_attention
from ds_ring.errors import RingConfigError, RingMismatchError
from tests.dist.deepspeed_ranks import Size, build_batch, build_model, json_config, start_engine, take_step
from tests.dist.harness import Pool, RankPool, catch_refusal

VOCABULARY, PROMPT, NEW = 61, 37, 6
# Weights so large that attention decides on the next token; no word ends a text unless a call says so.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": None,
}  # fmt: skip
LOCAL_AND_GLOBAL = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", SIZES),
    "dynamic rotary embedding": ("LlamaConfig",
        SIZES | {"rope_parameters": DYNAMIC, "max_position_embeddings": 20}),
    "gpt-oss": ("GptOssConfig",
        SIZES | LOCAL_AND_GLOBAL | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "GPT-2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        | dict.fromkeys(("bos_token_id", "eos_token_id")),
    ),
    "Mixtral": ("MixtralConfig",
        SIZES | {"num_local_experts": 4, "sliding_window": None, "output_router_logits": True}),
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_new_tokens": NEW}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": GREEDY | {"do_sample": True, "top_k": 20},
    "padded on the left": GREEDY | {"padding": (0, 11, 4)},
    "beams": GREEDY | {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": GREEDY | {"num_beams": 3, "num_return_sequences": 2, "do_sample": True},
    "several samples": GREEDY | {"num_return_sequences": 2, "do_sample": True},
    "ended": {"max_new_tokens": 24, "eos_token_id": list(range(0, VOCABULARY, 3)), "pad_token_id": 0},
    "in chunks": GREEDY | {"prefill_chunk_size": 16, "padding": (0, 18, 4)},
    "in chunks, not padded": GREEDY | {"prefill_chunk_size": 16},
    "one token": GREEDY | {"tokens": 1},
    "one sample": GREEDY | {"samples": 1},
    "one token of one sample": GREEDY | {"tokens": 1, "samples": 1},
}


class Case(NamedTuple):
    """A model and where it runs."""

    ring_size: int
    ways: tuple[str, ...] = ("greedy",)
    model: str = "Llama"
    stage: int = 0
    section: dict[str, Any] = {}  # noqa: RUF012
    tokens: int = PROMPT
    reserved: int = 64  # slots at once


class Generated(NamedTuple):
    tokens: Tensor
    logits: Tensor | None  # [steps, B, V]
    cache_bytes: int


def build(name: str) -> Any:
    import transformers

    if name not in MODELS:  # a family, made small
        from ds_ring_launcher.check.small_model import build as build_small
        from ds_ring_launcher.check.small_model import read_config, shrink

        config = shrink(read_config(name), PROMPT + NEW, 2, {})
        model = build_small(config, "causal-lm", 0).eval()
        model.set_attn_implementation("eager")
        model.generation_config.eos_token_id, model.generation_config.use_cache = None, True
        return model
    kind, values = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**values)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def generate(model: Any, way: str, tokens: int, replica: int = 0) -> Generated:
    requested = dict(WAYS[way])
    tokens, padding = requested.pop("tokens", tokens), requested.pop("padding", None)
    generator = torch.Generator().manual_seed(1 + replica)
    ids = torch.randint(1, VOCABULARY, (requested.pop("samples", 3), tokens), generator=generator)
    if padding is not None:
        requested["attention_mask"] = (torch.arange(tokens) >= torch.tensor(padding)[:, None]).long()
    torch.manual_seed(7)
    output = model.generate(
        ids, **requested, return_dict_in_generate=True, output_logits="num_beams" not in requested
    )
    cache = output.past_key_values
    layers = getattr(cache, "layers", ())  # none in a cache of the model's own
    held = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    size = sum(x.nbytes for x in held if x is not None)
    return Generated(output.sequences, torch.stack(output.logits) if output.logits else None, size)


class Ways(NamedTuple):
    """What every way gives on a rank, and, on the first one of each replica, without a ring."""

    replica: int
    on_a_ring: dict[str, Generated]
    alone: dict[str, Generated]


def on_a_ring(rank: int, world_size: int, case: Case) -> Ways:
    from ds_ring.decode import ring_cache

    ring_cache._RESERVED = case.reserved
    model, plain = build(case.model), build(case.model)
    config = json_config(case.ring_size, 1, case.stage, ring_attention=case.section)
    config["sequence_parallel_size"] *= case.section.get("ulysses_size", 1)
    engine = start_engine(model, config)
    engine.eval()
    replica = engine.ring.run_mesh.data_rank
    result = {way: generate(model, way, case.tokens, replica) for way in case.ways}
    ways = () if engine.ring.run_mesh.sequence_rank else case.ways
    return Ways(replica, result, {way: generate(plain, way, case.tokens, replica) for way in ways})


RECURRENT = ("greedy", "padded on the left", "beams", "in chunks", "one token", "sampled beams")
KEPT = {  # whose states are in caches of their own, in modules, or beside keys
    # Not padded: one process numbers tokens by the cache of a layer that has none, so padding changes them.
    # Its cache does not reorder them, nor do those of xLSTM and RWKV, which are caches of their own.
    "minimax": ("greedy", "sampled", "several samples"),
    "recurrent_gemma": ("greedy", "sampled", "beams", "sampled beams", "several samples"),
    "zaya": ("greedy", "sampled", "padded on the left", "beams", "sampled beams", "several samples"),
    "xlstm": ("greedy", "sampled", "padded on the left", "one token"),
    # Steps of one token mix the samples of a batch in transformers 5.24, so one token is a prompt of its own.
    "rwkv": ("greedy", "sampled", "padded on the left", "one sample", "one token of one sample"),
}
STATES = (
    "qwen3_next", "kimi_linear", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2", "jamba", "lfm2",
    "olmo_hybrid", "bailing_hybrid", "mamba", "mamba2",
)  # fmt: skip
EVERY = tuple(WAYS)
CASES = {
    "ring 4, every way": Case(4, EVERY),
    "ring 4": Case(4, ("greedy", "padded on the left")),
    "ring 2, every way, more tokens than a rank reserves at once": Case(
        2, EVERY, stage=2, section={"layout": "striped"}, reserved=2
    ),
    "ring 2 x data 2, ZeRO 3, replicas that end at other steps": Case(2, ("ended", "sampled"), stage=3),
    "ring 2 x Ulysses 2": Case(2, ("greedy", "padded on the left"), section={"ulysses_size": 2}),
    "windows in some layers, and sinks": Case(2, ("greedy", "beams"), "gpt-oss"),
    "dynamic rotary embedding": Case(4, ("greedy", "padded on the left"), "dynamic rotary embedding"),
    "learned positions": Case(4, ("greedy",), "GPT-2"),
    "positions that the model numbers by itself": Case(2, ("greedy",), "bart"),
    "experts": Case(2, ("greedy",), "Mixtral"),
    "windows in some layers, sinks": Case(2, ("greedy", "padded on the left"), "gpt_oss"),
    "values of another width": Case(2, ("greedy",), "deepseek_v3"),
    "states: qwen3_5_text on 4": Case(4, RECURRENT, "qwen3_5_text"),
    "states: bamba on 2": Case(2, RECURRENT, "bamba"),
    "beams of layers with both kinds of states": Case(2, ("beams",), "falcon_h1"),
    **{f"states: {name} on 4": Case(4, RECURRENT, name) for name in STATES},
    **{f"states: {name} on {size}": Case(size, ways, name) for name, ways in KEPT.items() for size in (2, 4)},
    # transformers has no chunks for these
    "states: mamba on 4": Case(4, tuple({*RECURRENT} - {"in chunks"}), "mamba"),
    "states: mamba2 on 4": Case(4, tuple({*RECURRENT} - {"in chunks"}), "mamba2"),
}


@pytest.mark.day(
    "ring 2 x Ulysses 2", "windows in some layers, and sinks", "beams of layers with both kinds of states"
)
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits_are_those_of_one_process(rank_pool: Pool, name: str) -> None:
    compare(rank_pool(4 if "x" in name else CASES[name].ring_size), CASES[name], name.startswith("states"))


def compare(ranks: RankPool, case: Case, is_close: bool) -> None:
    """Compare tokens and logits of every rank with those of one process."""
    result = ranks.run(on_a_ring, case)
    by_replica = {item.replica: item.alone for item in result if item.alone}
    for item in result:
        for way, ring in item.on_a_ring.items():
            alone = by_replica[item.replica][way]
            assert torch.equal(ring.tokens, alone.tokens), way
            if alone.logits is not None:
                real = alone.logits.isfinite()
                atol = 2e-5 if is_close else 2e-4
                assert torch.allclose(ring.logits[real], alone.logits[real], atol=atol, rtol=1e-5), way


@pytest.mark.parametrize("ring_size", [2, 4])
@pytest.mark.day("4")
def test_a_rank_holds_its_part_of_the_cache(rank_pool: Pool, ring_size: int) -> None:
    result = rank_pool(ring_size).run(on_a_ring, Case(ring_size, tokens=1000))
    alone = result[0].alone["greedy"]
    slot = alone.cache_bytes // (1000 + NEW - 1)
    for item in result:
        ring = item.on_a_ring["greedy"]
        assert torch.equal(ring.tokens, alone.tokens)
        assert ring.cache_bytes * ring_size <= alone.cache_bytes + (64 + 1) * ring_size * slot


def while_training(rank: int, world_size: int, generates: bool) -> list[float]:
    """Losses of two steps, with a generation before, between and after them."""
    size = Size(32, 2, 40, 2)
    model = build_model(size, "sdpa")
    engine = start_engine(model, json_config(world_size, 2, 3, ring_attention={"verify_first_batch": True}))
    losses: list[float] = []
    for _ in range(2):
        if generates:
            engine.eval()
            engine.generate(build_batch(size)["input_ids"], max_new_tokens=3)
            engine.train()
        losses.append(take_step(engine, build_batch(size)))
    return losses


@pytest.mark.night
def test_training_goes_on_as_if_nothing_had_been_generated(rank_pool: Pool) -> None:
    assert rank_pool(2).run(while_training, True) == rank_pool(2).run(while_training, False)


def refused(rank: int, world_size: int) -> list[str]:
    """What each wrong call raises here; the last one is right."""
    model = build("Llama")
    _engine = start_engine(model, json_config(world_size, 1, 0))
    ids, result = torch.arange(1, 20)[None], []
    calls: list[tuple[type[Exception], dict[str, Any]]] = [
        (RingConfigError, {"training": True}),
        (RingConfigError, {"use_cache": False}),
        (RingConfigError, {"prompt_lookup_num_tokens": 3}),
        (RingConfigError, {"cache_implementation": "static"}),
        (RingConfigError, {"output_hidden_states": True, "return_dict_in_generate": True}),
        (RingConfigError, {"output_attentions": True, "return_dict_in_generate": True}),
        (RingMismatchError, {"inputs": ids + rank}),
        (RingMismatchError, {"max_new_tokens": 2 + rank}),
        (RingMismatchError, {"do_sample": True, "seed": rank}),
        (RingConfigError, {"attention_mask": (ids < 19).long()}),
        (RingConfigError, {"pad_token_id": 19}),
        (RingConfigError if rank == 1 else RingMismatchError, {"use_cache": rank != 1}),
    ]
    for error, call in calls:
        model.train(training := call.pop("training", False))
        model.gradient_checkpointing_enable() if training else model.gradient_checkpointing_disable()
        torch.manual_seed(call.pop("seed", 0))
        result.append(catch_refusal(model.generate, **{"inputs": ids, "max_new_tokens": 2} | call))
        assert result[-1].startswith(error.__name__), result
    model.eval()
    model.generate(ids, max_new_tokens=2)
    return result


def test_what_cannot_be_honoured_is_refused_on_every_rank(rank_pool: Pool) -> None:
    for number, result in enumerate(rank_pool(2).run(refused)):
        words = (
            "got training with checkpointing", "use_cache=True", "beams, got assisted_generation",
            "no cache_implementation", "no hidden states", "no hidden states", "inputs: ring rank 0 has",
            "'max_new_tokens': 3", "random numbers (call torch", *["prompts that end with a token"] * 2,
            "use_cache=True",
        )  # fmt: skip
        for word, text in zip(words, result, strict=True):
            assert word in text, (number, text)


def with_another_attention(rank: int, world_size: int) -> dict[str, list[str]]:
    """What a forward pass and generate raise under attention that was set after initialize."""
    from transformers import AttentionInterface

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        where: Any = {"layout": engine.ring.layout, "mesh": engine.ring.mesh}
        return ring_attention(q, k, v, pattern=Causal(), **where).transpose(1, 2).contiguous(), None

    AttentionInterface.register("mine", attend)
    model, result = build("Llama"), {}
    engine = start_engine(model, json_config(world_size, 1, 0))
    engine.eval()
    ids = torch.arange(1, 20)[None]
    alone = build("Llama").generate(ids, max_new_tokens=3)
    log, warnings = logging.getLogger("ds_ring.models.model_call"), StringIO()
    log.addHandler(handler := logging.StreamHandler(warnings))
    for name in ("mine", "sdpa", "eager", "ds_ring"):
        model.set_attn_implementation(name)
        batch = engine.ring.shard_batch({"input_ids": ids, "labels": ids, "speakers": ids})
        forward = catch_refusal(engine, **batch)
        # (Without set_attn_implementation a mask of one's own was silently the JSON's.)
        assert ("does not read the batch's own speakers:" in warnings.getvalue()) == (name == "ds_ring")
        result[name] = [forward, catch_refusal(model.generate, ids, max_new_tokens=3)]
        with engine.ring.off():
            assert torch.equal(model.generate(ids, max_new_tokens=3), alone)
    assert torch.equal(model.generate(ids, max_new_tokens=3), alone)
    engine(**batch)
    log.removeHandler(handler)
    assert warnings.getvalue().count("own speakers") == 1, "once for an engine"
    return result


@pytest.mark.situation("generation", "generate, and a pass, under attention that was set after initialize")
def test_attention_that_was_set_after_initialize_is_refused_where_it_would_be_local(rank_pool: Pool) -> None:
    for result in rank_pool(2).run(with_another_attention):
        assert result.pop("ds_ring") == ["", ""]
        for name, (forward, generated) in result.items():
            says = f"expected attention 'ds_ring', got {name!r}"
            assert says in generated and "with engine.ring.off()" in generated, generated
            says = f"expected attention 'ds_ring' on a ring, got {name!r}"
            assert forward == "" if name == "mine" else says in forward, forward


def beams_of_states(rank: int, world_size: int, name: str) -> list[str]:
    """What each way that reorders rows raises."""
    model = build(name)
    _engine = start_engine(model, json_config(world_size, 1, 0))
    model.eval()
    result = []
    for requested in ({"num_beams": 2}, {"num_beams": 2, "do_sample": True}):
        torch.manual_seed(0)
        result.append(catch_refusal(model.generate, torch.arange(1, 20)[None], max_new_tokens=2, **requested))
        assert result[-1].startswith("RingConfigError: "), result[-1]
    return result


@pytest.mark.day("minimax")
@pytest.mark.situation(
    "generation", "Beam search of a model whose states transformers' cache does not reorder."
)
@pytest.mark.parametrize("name", ["minimax", "xlstm", "rwkv"])
def test_beams_of_states_that_are_not_reordered_are_refused(rank_pool: Pool, name: str) -> None:
    for result in rank_pool(2).run(beams_of_states, name):
        for mode, text in zip(("beam_search", "beam_sample"), result, strict=True):
            assert f"got {mode}: transformers' cache does not reorder the model's states" in text
