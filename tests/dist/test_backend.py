"""`backend="ds_ring"`: unmodified models on 2 ranks, by torch.compile and by engine.compile, against one process.

What the rewriting reads and refuses is tested on one rank, in tests/unit/contrib/compile/test_backend.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ds_ring
from tests.dist import family_ranks
from tests.dist.deepspeed_ranks import (
    Run,
    Size,
    build_batch,
    build_model,
    full_gradient,
    json_config,
    start_deepspeed,
    start_engine,
    train_alone,
)
from tests.dist.family_ranks import GROUPED, SIZES, check, gradients_of
from tests.dist.harness import Pool, catch_refusal

SAMPLES, TOKENS, VOCABULARY, WINDOW = 2, 45, 61, 10
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", GROUPED),
    "Qwen2": ("Qwen2Config", GROUPED),
    "Qwen3": ("Qwen3Config", GROUPED | {"head_dim": 8}),
    "Mistral": ("MistralConfig", GROUPED | {"sliding_window": WINDOW}),
    "GPT-NeoX": ("GPTNeoXConfig", SIZES),
}
CASES = [
    pytest.param("Llama", "zigzag", "inductor", 1, marks=pytest.mark.needs("compiler")),
    ("Qwen2", "striped", "aot_eager", 1),
    ("Qwen3", "contiguous", "aot_eager", 2),
    ("Mistral", "zigzag", "aot_eager", 1),
    ("GPT-NeoX", "zigzag", "aot_eager", 1),
]


class Result(NamedTuple):
    logits: Tensor
    gradients: dict[str, Tensor]


class OnRanks(NamedTuple):
    """A result, the graphs that Dynamo made, its graph breaks, and the attentions rewritten in each graph."""

    result: Result
    graphs: int
    breaks: int
    attentions: list[int]


def build(family: str, layers: int = 2) -> torch.nn.Module:
    config, values = FAMILIES[family]
    return family_ranks.build(config, values | {"num_hidden_layers": layers}, "sdpa")


def whole_ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))


def whole_gradient() -> Tensor:
    return torch.randn(SAMPLES, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(2))


def on_one_process(family: str) -> Result:
    model = build(family)
    logits = model(input_ids=whole_ids(), use_cache=False).logits
    logits.backward(whole_gradient())
    return Result(logits.detach(), gradients_of(model))


def use_the_name() -> None:
    """ "ds_ring" as a backend of torch, whatever copy of the package is installed; see the entry point's test."""
    from torch._dynamo.backends import registry

    from ds_ring.contrib.compile.backend import backend

    registry.list_backends()
    registry._COMPILER_FNS.pop("ds_ring", None)
    registry.register_backend(backend, name="ds_ring")


def count_attentions() -> list[int]:
    """A list that every rewritten graph adds its number of attentions to."""
    from ds_ring.contrib.compile import backend as compile_backend

    counted: list[int] = []

    class Counting(compile_backend.Rewriting):
        def run(self, module: torch.fx.GraphModule) -> int:
            counted.append(super().run(module))
            return counted[-1]

    compile_backend.Rewriting = Counting  # type: ignore[misc]
    return counted


def start_counting() -> list[int]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    use_the_name()
    return count_attentions()


def on_a_ring(
    rank: int, world_size: int, family: str, layout_name: str, inner: str, ulysses_size: int
) -> OnRanks:
    from torch._dynamo.utils import counters

    counted = start_counting()
    mesh = ds_ring.RingMesh.from_world(world_size // ulysses_size, ulysses_size)
    pattern = ds_ring.SlidingWindow(WINDOW) if family == "Mistral" else ds_ring.Causal()
    layout = ds_ring.make_layout(
        layout_name, tokens=TOKENS, ring_size=mesh.ring_size, multiple_of=ulysses_size
    )
    model = build(family)
    options = {"mesh": mesh, "pattern": pattern, "layout": layout, "inner": inner}
    compiled = torch.compile(model, backend="ds_ring", fullgraph=True, options=options)
    ids, positions, gradient = (
        ds_ring.shard_sequence(x, layout, mesh=mesh, dim=1)
        for x in (whole_ids(), torch.arange(TOKENS)[None], whole_gradient())
    )
    logits = compiled(input_ids=ids, position_ids=positions, use_cache=False).logits
    logits.backward(gradient)
    gradients = gradients_of(model, 1.0)
    whole = ds_ring.gather_sequence(logits.detach(), layout, mesh=mesh, dim=1)
    breaks = sum(counters["graph_break"].values())
    return OnRanks(Result(whole, gradients), counters["stats"]["unique_graphs"], breaks, counted)


@pytest.mark.parametrize(("family", "layout", "inner", "ulysses_size"), CASES)
@pytest.mark.day("Qwen2-striped-aot_eager-1")
def test_an_unmodified_family_equals_one_process(
    rank_pool: Pool, family: str, layout: str, inner: str, ulysses_size: int
) -> None:
    expected = on_one_process(family)
    run = rank_pool(2 * ulysses_size).run
    for got in run(on_a_ring, family, layout, inner, ulysses_size, timeout_s=280):
        assert (got.graphs, got.breaks, got.attentions) == (1, 0, [2])
        assert float((got.result.logits - expected.logits).abs().max()) < 1e-5
        check(Run([], got.result.gradients), Run([], expected.gradients))


def wrong_call(rank: int, world_size: int, case: str) -> None:
    """A Llama or Mistral whose masks the pattern must not stand for; `alone`: on rank 1 only."""
    start_counting()
    mesh = ds_ring.RingMesh.from_world(world_size)
    layout = ds_ring.make_layout("zigzag", tokens=TOKENS, ring_size=world_size)
    options = {"mesh": mesh, "pattern": ds_ring.Causal(), "layout": layout, "inner": "eager"}
    model = build("Mistral" if case == "window" else "Llama", layers=1)
    if case == "window":
        options["pattern"] = ds_ring.SlidingWindow(WINDOW - 1)
    compiled = torch.compile(model, backend="ds_ring", options=options)
    ids, positions = (
        ds_ring.shard_sequence(x, layout, mesh=mesh, dim=1) for x in (whole_ids(), torch.arange(TOKENS)[None])
    )
    extra: dict[str, Any] = {"position_ids": positions}
    if case == "no positions" or (case == "alone" and rank == 1):
        del extra["position_ids"]
    with torch.no_grad():
        compiled(input_ids=ids, use_cache=False, **extra)


WRONG_CALLS = {
    "no positions": (["RingPatternError"] * 2, "expected this rank's positions of"),
    "window": (["RingPatternError"] * 2, r'SlidingWindow\(window=10, .*write "window": 10'),
    "alone": (["RingMismatchError", "RingPatternError"], "position"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
@pytest.mark.day("alone")  # padding, packed documents, no options: on one rank, in tests/unit
def test_a_mask_that_cannot_be_honoured_raises_on_every_rank(rank_pool: Pool, case: str) -> None:
    import re

    errors, words = WRONG_CALLS[case]
    outcomes = rank_pool(2).collect(wrong_call, case, timeout_s=120)
    assert [item.error_type for item in outcomes] == errors, [item.report for item in outcomes]
    assert all(re.search(words, item.message) for item in outcomes), [item.message for item in outcomes]


SIZE = Size(hidden=32, layers=2, tokens=TOKENS, samples=2)
ONE_LAYER = SIZE._replace(layers=1)  # what is compiled once for several batches, or never


def engine_of(
    world_size: int, stage: int, implementation: str = "sdpa", size: Size = SIZE, **changes: Any
) -> tuple[Any, Any]:
    deepspeed = start_deepspeed()
    model = build_model(size, implementation)
    engine = start_engine(model, json_config(world_size, 2, stage, **changes))
    return deepspeed, engine


def train_compiled(
    rank: int, world_size: int, stage: int, masks: str, implementation: str, section: dict[str, Any]
) -> tuple[Run, list[int]]:
    counted = start_counting()
    deepspeed, engine = engine_of(world_size, stage, implementation, ring_attention=section)
    options = {"inner": "aot_eager", "masks": masks}
    engine.compile(backend="ds_ring", compile_kwargs={"fullgraph": stage < 3, "options": options})
    losses, gradients = [], {}
    for _ in range(2):
        loss = engine(**engine.ring.shard_batch(build_batch(SIZE))).loss
        engine.backward(loss)
        losses.append(float(engine.ring.mean_loss(loss)))
        if not gradients:
            gradients = {name: full_gradient(deepspeed, p) for name, p in engine.module.named_parameters()}
        engine.step()
    return Run(losses, gradients), counted


@pytest.mark.parametrize(
    ("stage", "masks", "implementation", "section"),
    [
        (0, "check", "eager", {}),
        (1, "check", "sdpa", {"attention": "as_is"}),
        (2, "check", "ds_ring", {"ulysses_size": 2}),
        (3, "replace", "sdpa", {}),
    ],
)
@pytest.mark.night  # by day gradients without an engine, above, and losses with one, below
def test_a_compiled_engine_trains_like_one_process(
    rank_pool: Pool, stage: int, masks: str, implementation: str, section: dict[str, Any]
) -> None:
    expected = train_alone(SIZE, 2)
    arguments = (stage, masks, implementation, section)
    for run, attentions in rank_pool(2).run(train_compiled, *arguments, timeout_s=280):
        assert sum(attentions) >= 1  # ZeRO 3 breaks the graph around layers, which share one
        assert stage == 3 or [n for n in attentions if n] == [SIZE.layers]  # one graph for the model
        check(run, expected)


def batches_of_one_graph(rank: int, world_size: int) -> tuple[list[float], list[int], str]:
    """Batches with one number of local tokens, other lengths and other documents: losses, graphs; a refusal."""
    counted = start_counting()
    pattern = {"layout": "zigzag", "pattern": {"documents": True}}
    _, engine = engine_of(world_size, 0, size=ONE_LAYER, ring_attention=pattern)
    engine.compile(backend="ds_ring", compile_kwargs={"options": {"inner": "aot_eager"}})
    losses = []
    with torch.no_grad():
        for batch in batches():
            loss = engine(**engine.ring.shard_batch(batch)).loss
            losses.append(float(engine.ring.mean_loss(loss)))
    return losses, counted, catch_refusal(engine.compile, backend="ds_ring")


def batches() -> list[dict[str, Tensor]]:
    ids = torch.randint(1, VOCABULARY, (2, 48), generator=torch.Generator().manual_seed(3))
    rows = torch.arange(48)
    packed = [torch.stack([rows // 20, rows // 9]), torch.stack([rows // 31, rows // 31]), rows[None] // 100]
    outcome = [{"input_ids": ids, "labels": ids, "document_ids": item.expand(2, -1)} for item in packed]
    return [*outcome, {key: value[:, :47] for key, value in outcome[0].items()}]


def loss_alone(batch: dict[str, Tensor]) -> float:
    """By the documents' own attention: each is a call of its own, its tokens' losses summed."""
    model, total, count = build_model(ONE_LAYER, "sdpa"), 0.0, 0
    for ids, documents in zip(batch["input_ids"], batch["document_ids"], strict=True):
        for document in documents.unique():
            local = ids[documents == document]
            if len(local) > 1:
                logits = model(input_ids=local[None], use_cache=False).logits[0, :-1]
                total += float(torch.nn.functional.cross_entropy(logits, local[1:], reduction="sum"))
                count += len(local) - 1
    return total / count


@pytest.mark.night  # by day test_compile.py has a layout of another length
def test_other_lengths_and_documents_run_in_the_same_graph(rank_pool: Pool) -> None:
    with torch.no_grad():
        expected = [loss_alone(batch) for batch in batches()]
    for losses, attentions, again in rank_pool(2).run(batches_of_one_graph, timeout_s=280):
        assert "expected an engine that is not compiled" in again
        assert losses == pytest.approx(expected, rel=1e-5)
        assert [n for n in attentions if n] == [ONE_LAYER.layers]


def not_through_the_backend(rank: int, world_size: int, backend: str | None) -> None:
    start_counting()
    _, engine = engine_of(world_size, 0, size=ONE_LAYER, ring_attention={"attention": "as_is"})
    if backend is not None:
        engine.compile(backend=backend)
    engine(**engine.ring.shard_batch(build_batch(SIZE)))


@pytest.mark.day("None")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_model_as_it_is_runs_through_the_backend_only(rank_pool: Pool, backend: str | None) -> None:
    for item in rank_pool(2).collect(not_through_the_backend, backend, timeout_s=120):
        assert item.error_type == "RingConfigError", item.report
        assert 'engine.compile(backend="ds_ring")' in item.message
