"""Compressed entries beside a window (DeepSeek V4) on a ring, against one process: attention, entries, choices.

Attention in float64, with outputs and every gradient. Compressors are transformers' own; they compute a
softmax in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import ds_ring
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
from ds_ring.contrib.families.compressed import layers as compressed
from ds_ring.contrib.families.compressed.windows import Sources, Windows
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.data.packing import RowGroup, group_rows
from ds_ring.layers.scan.recurrence import padded
from ds_ring.layers.selection.total_order import TotalOrder
from ds_ring.masks.catalog import Before
from ds_ring.masks.pattern import Pattern
from ds_ring.models.attention_name import NAME
from ds_ring.patches import apply
from tests.dist.deepspeed_ranks import json_config, start_deepspeed, take_step
from tests.dist.one_process import from_first_rank, make
from tests.reference import relative_error, worst

TOKENS, HEADS, HEAD_DIM, RATE, WINDOW, CHOSEN = 83, 3, 8, 4, 9, 3
# Documents of three samples: of one token, shorter than a window, of whole windows, and others; in the second
# one padding is between two. In the last one none has an entry.
DOCUMENTS = ((1, 3, 4, 21, 8, 2, 44), (30, -6, 47), (3,) * 27 + (2,))
SAMPLES = len(DOCUMENTS)
Spans = list[tuple[int, int, int]]  # sample, start and end of each document


def spans_of(kind: str, tokens: int = TOKENS) -> Spans:
    if kind == "whole":
        return [(sample, 0, tokens) for sample in range(SAMPLES)]
    outcome = []
    for sample, lengths in enumerate(DOCUMENTS):
        ends = np.cumsum(np.abs(lengths)).tolist()
        assert ends[-1] == tokens
        outcome += [
            (sample, end - length, end) for end, length in zip(ends, lengths, strict=True) if length > 0
        ]
    return outcome


def sharding_of(mesh: RingMesh, name: str, kind: str, tokens: int = TOKENS) -> BatchSharding:
    layout = make_layout(name, tokens=tokens, ring_size=mesh.ring_size, pattern=Causal())
    groups: tuple[RowGroup, ...] = ()
    if kind == "packed":
        ids = torch.full((SAMPLES, tokens), -1)
        for number, (sample, start, end) in enumerate(spans_of(kind, tokens)):
            ids[sample, start:end] = number
        groups = group_rows(ids, SAMPLES)
        assert len(groups) == SAMPLES
    return BatchSharding(
        RingConfig(ring_size=mesh.ring_size), layout, mesh, LayerPatterns(Causal(), {}), groups
    )


def windows_of(sharding: BatchSharding, rate: int) -> list[tuple[list[int], Windows]]:
    """The samples of each set of documents, and their windows."""
    groups = [(list(item.rows), item.documents) for item in sharding.groups] or [([*range(SAMPLES)], None)]
    return [(samples, Windows(sharding.layout, rate, documents)) for samples, documents in groups]


def shard_entries(whole: list[Tensor], sharding: BatchSharding, rate: int, dim: int) -> Tensor:
    """This rank's slots of the entries of each sample; 1e3 where there is none, which nobody may see."""
    outcome: dict[int, Tensor] = {}
    for samples, windows in windows_of(sharding, rate):
        for sample in samples:
            shape = [*whole[sample].shape]
            if windows.layout is None:
                shape[dim] = 1
                outcome[sample] = whole[sample].new_full(shape, 1e3)
                continue
            shape[dim] = windows.layout.tokens
            index = torch.from_numpy(np.flatnonzero(windows.has_entry))
            placed = whole[sample].new_full(shape, 1e3).index_copy(dim, index, whole[sample])
            outcome[sample] = shard_sequence(placed, windows.layout, mesh=sharding.mesh, dim=dim)
    most = max(item.shape[dim] for item in outcome.values())
    return torch.stack([padded(outcome[sample], most, dim) for sample in range(SAMPLES)])


def gather_entries(local: Tensor, sharding: BatchSharding, rate: int, dim: int) -> list[Tensor]:
    """The reverse, of [B, ...]."""
    outcome = [local[sample].narrow(dim, 0, 0) for sample in range(SAMPLES)]
    for samples, windows in windows_of(sharding, rate):
        for sample in samples if windows.layout is not None else ():
            owned = local[sample].narrow(dim, 0, windows.layout.local_tokens).contiguous()
            whole = gather_sequence(owned, windows.layout, mesh=sharding.mesh, dim=dim)
            outcome[sample] = whole.index_select(dim, torch.from_numpy(np.flatnonzero(windows.has_entry)))
    return outcome


class Reference(NamedTuple):
    """The tokens of each sample and its entries, of one process."""

    seen: list[Tensor]  # which entries a token sees, bool [T, N]
    near: list[Tensor]  # which tokens, bool [T, T]


def reference(kind: str) -> Reference:
    seen: list[list[Tensor]] = [[] for _ in range(SAMPLES)]
    near = [torch.zeros(TOKENS, TOKENS, dtype=torch.bool) for _ in range(SAMPLES)]
    for sample, start, end in spans_of(kind):
        owned = torch.arange(TOKENS) - start
        inside = (owned >= 0) & (owned < end - start)
        for number in range((end - start) // RATE):
            seen[sample].append(inside & (owned >= (number + 1) * RATE - 1))
        gap = owned[:, None] - owned
        near[sample] |= inside[:, None] & inside & (gap >= 0) & (gap < WINDOW)
    none = torch.zeros(TOKENS, 0, dtype=torch.bool)
    return Reference([torch.stack(item, dim=1) if item else none for item in seen], near)


def choices(item: Reference) -> list[Tensor]:
    """Some entries that each query sees, none twice, the others -1: int64 [T, k] for each sample."""
    outcome = []
    for sample, seen in enumerate(item.seen):
        scores = make(f"choices {sample}", *seen.shape).masked_fill(~seen, float("-inf"))
        best = torch.nn.functional.pad(scores, (0, CHOSEN), value=float("-inf")).topk(CHOSEN, dim=-1)
        outcome.append(best.indices.masked_fill(best.values == float("-inf"), -1))
    return outcome


def dense(x: dict[str, Tensor], entries: list[Tensor], kind: str, chosen: list[Tensor] | None) -> Any:
    """Output and gradients of one softmax over the window, the entries and the sinks; those of entries."""
    inputs = {name: item.clone().requires_grad_() for name, item in x.items() if name != "grad"}
    entries = [item.clone().requires_grad_() for item in entries]
    outcome, outs = reference(kind), []
    for sample in range(SAMPLES):
        seen = outcome.seen[sample]
        if chosen is not None:
            picked = torch.zeros(TOKENS, seen.shape[1] + 1, dtype=torch.bool)
            owned = chosen[sample]
            seen = picked.scatter_(-1, owned.where(owned >= 0, seen.shape[1]), True)[:, :-1]
        keys = torch.cat([inputs["kv"][sample, 0], entries[sample][0]])
        scores = inputs["q"][sample] @ keys.mT * HEAD_DIM**-0.5
        scores = scores.masked_fill(~torch.cat([outcome.near[sample], seen], dim=-1), float("-inf"))
        sinks = inputs["sinks"][:, None, None].expand(-1, TOKENS, 1)
        outs.append(torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ keys)
    out = torch.stack(outs)
    out.backward(x["grad"])
    results = {"out": out.detach()} | {name: item.grad for name, item in inputs.items()}
    return results, [torch.zeros_like(item) if item.grad is None else item.grad for item in entries]


def attention_errors(rank: int, world_size: int, kind: str) -> dict[str, float]:
    """The largest error of the output and of each gradient, by layout and kind of layer."""
    mesh, errors = RingMesh.from_world(world_size), {}
    counts = [seen.shape[1] for seen in reference(kind).seen]
    x = {
        "q": make("q", SAMPLES, HEADS, TOKENS, HEAD_DIM),
        "kv": make("kv", SAMPLES, 1, TOKENS, HEAD_DIM),
        "sinks": make("sinks", HEADS),
        "grad": make("grad", SAMPLES, HEADS, TOKENS, HEAD_DIM),
    }
    entries = [make(f"entries {sample}", 1, count, HEAD_DIM) for sample, count in enumerate(counts)]
    for name in ("zigzag", "contiguous"):
        sharding = sharding_of(mesh, name, kind)
        rows = compressed.split_rows(sharding, RATE, True, torch.device("cpu"))
        places: dict[str, Any] = {"layout": sharding.layout, "mesh": mesh}
        for chosen in (None, choices(reference(kind))):
            want, want_entries = from_first_rank(partial(dense, x, entries, kind, chosen))
            local = {key: shard_sequence(x[key], dim=2, **places) for key in ("q", "kv", "grad")}
            local |= {"sinks": x["sinks"].clone(), "entries": shard_entries(entries, sharding, RATE, 1)}
            picked = None
            if chosen is not None:
                picked = []
                for samples, windows in windows_of(sharding, RATE):
                    of_entry = torch.from_numpy(np.append(np.flatnonzero(windows.has_entry), -1))
                    whole = of_entry[torch.stack([chosen[sample] for sample in samples])]
                    picked.append(shard_sequence(whole, dim=1, pad_value=-1, **places))
            for key in ("q", "kv", "entries", "sinks"):
                local[key].requires_grad_()
            both = torch.cat([local["kv"], local["entries"]], dim=2)
            out = compressed.attend(
                local["q"], both, sharding, rows, picked, SlidingWindow(WINDOW), None, local["sinks"]
            )
            out.backward(local["grad"])
            grads = {key: local[key].grad for key in ("q", "kv", "entries", "sinks")}
            assert all(item is not None for item in grads.values())
            if world_size > 1:
                torch.distributed.all_reduce(grads["sinks"], group=mesh.sequence_group)
            got = {"out": out.detach(), "q": grads["q"], "kv": grads["kv"]}
            got = {key: gather_sequence(item, dim=2, **places) for key, item in got.items()}
            got["sinks"] = grads["sinks"]
            of_entries = gather_entries(grads["entries"], sharding, RATE, 1)
            case = f"{name} {'all' if chosen is None else 'chosen'}"
            errors |= {f"{case} {key}": relative_error(got[key], item) for key, item in want.items()}
            pairs = zip(of_entries, want_entries, counts, strict=True)
            errors[f"{case} entries"] = max(relative_error(*pair) for *pair, count in pairs if count)
    return errors


@pytest.mark.day("2-packed", "4-whole")
@pytest.mark.parametrize("kind", ["whole", "packed"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_attention_to_a_window_and_entries_is_that_of_one_process(rank_pool, size, kind):
    for errors in rank_pool(size).run(attention_errors, kind):
        assert worst(errors.values()) < 1e-12, {key: item for key, item in errors.items() if not item < 1e-12}


def with_pattern(pattern: Callable[[Windows, int], Pattern], kind: str) -> dict[str, float]:
    """Let queries see other entries."""
    with mock.patch.object(Windows, "pattern", pattern):
        return attention_errors(torch.distributed.get_rank(), torch.distributed.get_world_size(), kind)


def with_unfinished_entries(rank: int, world_size: int) -> dict[str, float]:
    """Let queries see the entry of a window that goes on behind them."""
    pattern = Windows.pattern
    return with_pattern(lambda windows, apart: pattern(windows, apart - 1), "whole")


def across_documents(rank: int, world_size: int) -> dict[str, float]:
    """Let queries see the entries of documents before their own."""
    return with_pattern(lambda windows, apart: Before(apart), "packed")


@pytest.mark.day("across_documents")
@pytest.mark.parametrize("fault", [with_unfinished_entries, across_documents])
def test_an_entry_that_a_query_may_not_see_is_found(rank_pool, fault):
    errors = rank_pool(2).run(fault)[0]
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
    built = getattr(file, f"DeepseekV4{kind}Compressor")(config).double()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.copy_(make(name, *parameter.shape) * 0.5)
    return built


class Compressed(NamedTuple):
    """What a compressor makes of each sample, document by document."""

    entries: list[Tensor]  # [N, D]
    grads: list[Tensor]  # of the entries, [N, D]
    picked: Tensor  # which entries each token may attend to, bool [B, T, N]
    hidden: Tensor  # gradient of the hidden states
    parameters: dict[str, Tensor]


def one_by_one(kind: str, hidden: Tensor, queries: Tensor, spans: Spans) -> Compressed:
    alone, owned = compressor(kind), hidden.clone().requires_grad_()
    entries = [hidden.new_zeros(0, 8)] * SAMPLES
    picked = torch.zeros(SAMPLES, hidden.shape[1], hidden.shape[1] + 1, dtype=torch.bool)
    for sample, start, end in spans:
        inputs = (
            owned[None, sample, start:end],
            queries[None, sample, start:end],
            torch.arange(end - start)[None],
        )
        with TotalOrder():
            outcome, bias = alone(*inputs, None, 0)
        first = len(entries[sample])
        entries[sample] = torch.cat([entries[sample], outcome[0, 0]])
        if bias is not None:
            picked[sample, start:end, first : len(entries[sample])] = bias[0, 0] == 0
    grads = [make(f"grad {sample}", *item.shape) for sample, item in enumerate(entries)]
    total = sum((item * grad).sum() for item, grad in zip(entries, grads, strict=True))
    (total + 0 * owned.sum()).backward()
    parameters = {name: item.grad for name, item in alone.named_parameters() if item.grad is not None}
    return Compressed([item.detach() for item in entries], grads, picked, owned.grad, parameters)


def compressor_errors(rank: int, world_size: int, kind: str, rows: str) -> dict[str, float]:
    """Errors of entries and of gradients; 1 for choices that differ."""
    mesh, errors = RingMesh.from_world(world_size), {}
    for tokens in LENGTHS if rows == "whole" else LENGTHS[:1]:
        hidden, queries = make("hidden", SAMPLES, tokens, 16), make("queries", SAMPLES, tokens, 6)
        spans = spans_of(rows, tokens)
        positions = torch.zeros(SAMPLES, tokens, dtype=torch.int64)
        want = from_first_rank(partial(one_by_one, kind, hidden, queries, spans))
        for sample, start, end in spans:
            positions[sample, start:end] = torch.arange(end - start)
        for name in ("zigzag", "contiguous"):
            sharding, built = sharding_of(mesh, name, rows, tokens), compressor(kind)
            rate, places = built.compress_rate, {"layout": sharding.layout, "mesh": mesh, "dim": 1}
            layer = SimpleNamespace(compressor=built, config=SimpleNamespace(_attn_implementation=NAME))
            entries: Any = compressed.CompressedEntries(layer)
            if kind == "CSA":
                apply(entries, scorer=built.indexer.scorer)
            entries.note(built, (), {compressed.SHARDING: sharding})
            inputs = [shard_sequence(x, **places) for x in (hidden, queries, positions)]
            inputs[0].requires_grad_()
            got, mask = entries.compress(*inputs, None, 0)
            assert mask is None and got.requires_grad
            grads = shard_entries([item[None] for item in want.grads], sharding, rate, 1)
            got.backward(torch.where(grads == 1e3, 0.0, grads))
            case = f"{tokens} {name}"
            of_hidden = gather_sequence(inputs[0].grad, **places)
            outcome = gather_entries(got.detach(), sharding, rate, 1)
            if any(map(len, want.entries)):
                of_entries = torch.cat([item[0] for item in outcome])
                errors[f"{case} entries"] = relative_error(of_entries, torch.cat(want.entries))
                errors[f"{case} hidden"] = relative_error(of_hidden, want.hidden)
                for parameter, grad in want.parameters.items():
                    owned = built.get_parameter(parameter).grad.clone()
                    if world_size > 1:
                        torch.distributed.all_reduce(owned, group=mesh.sequence_group)
                    errors[f"{case} {parameter}"] = relative_error(owned, grad)
            else:
                assert not of_hidden.any()
            if kind == "CSA":
                errors[f"{case} choices"] = float((picks(entries, sharding, rate) != want.picked).any())
    return errors


def picks(entries: Any, sharding: BatchSharding, rate: int) -> Tensor:
    """Which entries the tokens of all ranks chose, bool [B, T, N]."""
    tokens = sharding.layout.tokens
    picked = torch.zeros(SAMPLES, tokens, tokens + 1, dtype=torch.bool)
    for (samples, windows), chosen in zip(windows_of(sharding, rate), entries._chosen, strict=True):
        if chosen is None:
            assert windows.layout is None
            continue
        whole = gather_sequence(chosen, layout=sharding.layout, mesh=sharding.mesh, dim=1)
        assert bool(np.append(windows.has_entry, True)[whole].all())  # -1 is the last one
        number = torch.from_numpy(np.append(np.cumsum(windows.has_entry) - 1, tokens))
        picked[samples] = picked[samples].scatter(-1, number[whole], True)
    picked[..., tokens] = False
    return picked


@pytest.mark.day("4-CSA-packed", "2-HCA-packed")
@pytest.mark.parametrize("rows", ["whole", "packed"])
@pytest.mark.parametrize("kind", ["HCA", "CSA"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_entries_and_choices_are_those_of_one_process(rank_pool, size, kind, rows):
    for errors in rank_pool(size).run(compressor_errors, kind, rows):
        assert worst(errors.values()) < 1e-6, {key: item for key, item in errors.items() if not item < 1e-6}


def without_windows_before(rank: int, world_size: int) -> dict[str, float]:
    """Take zeros for the tokens before each run."""
    halo = compressed.halo_op
    with mock.patch.object(compressed, "halo_op", lambda *inputs: halo(*inputs) * 0):
        return compressor_errors(rank, world_size, "CSA", "whole")


def of_the_document_before(rank: int, world_size: int) -> dict[str, float]:
    """Let the first entry of a document have a part of the document before."""
    sources = Windows.sources

    def careless(windows: Windows, of_rank: int, overlaps: bool) -> Sources:
        outcome = sources(windows, of_rank, overlaps)
        before = np.maximum(outcome.tokens - windows.rate, 0)
        tokens = np.where(outcome.hidden[:, None], before, outcome.tokens)
        return outcome._replace(tokens=tokens, hidden=np.zeros_like(outcome.hidden))

    with mock.patch.object(Windows, "sources", careless):
        return compressor_errors(rank, world_size, "CSA", "packed")


@pytest.mark.night
@pytest.mark.parametrize("fault", [without_windows_before, of_the_document_before])
def test_a_window_of_another_place_is_found(rank_pool, fault):
    errors = rank_pool(2).run(fault)[0]
    assert errors["83 zigzag entries"] > 1e-3 and errors["83 zigzag hidden"] > 1e-3


def small_model() -> Any:
    from ds_ring_launcher.check.small_model import build, read_config, shrink

    config = shrink(read_config("deepseek_v4"), tokens=61)
    return build(config, "causal-lm", seed=0)


# Two samples of 83 tokens: documents of one token, shorter than a window, of whole windows, across borders.
LENGTHS_OF_ROWS = ((1, 3, 8, 21, 2, 48), (30, 47, 6))


def packed_check(rank: int, world_size: int, section: dict[str, Any], dtype: torch.dtype) -> Any:
    """Check the whole model in rows of such documents, each of them against a row of its own."""
    start_deepspeed()
    from ds_ring_launcher.check import model_check, small_model

    ends = [torch.tensor(lengths).cumsum(0) for lengths in LENGTHS_OF_ROWS]
    ids = torch.stack([torch.bucketize(torch.arange(83), item, right=True) for item in ends])
    ids[1, 77:] = -1
    request = model_check.CheckRequest(
        "deepseek_v4", 83, forms=("packed",), section={"pattern": {}} | section, stage=1
    )
    with mock.patch.object(small_model, "_documents", return_value=ids):
        return model_check._gather_reports(model_check._check_here(request, dtype))


SECTIONS = [{}, {"layout": "contiguous"}, {"layout": "balanced"}, {"layout": "document_zigzag"}]


@pytest.mark.night
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.get("layout", "auto"))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_document_of_a_row_is_the_model_alone(rank_pool, size, section):
    (report,) = rank_pool(size).run(packed_check, section, torch.float64)[0]
    assert report.result == "exact", report.reason
    largest = {kind: item.error for kind, item in report.largest.items()}
    # gradients are read in float32
    assert max(largest["logits"], largest["loss"]) < 2e-10 and largest["gradient"] < 2e-7, largest


def with_others_entries(rank: int, world_size: int) -> Any:
    """Let queries see the entries of documents before their own."""
    with mock.patch.object(Windows, "pattern", lambda windows, apart: Before(apart)):
        return packed_check(rank, world_size, {}, torch.float32)


@pytest.mark.night
def test_a_model_whose_entries_cross_documents_is_found(rank_pool):
    (report,) = rank_pool(2).run(with_others_entries)[0]
    assert report.result == "WRONG" and "differ" in report.reason


STEPS = 3


def packed_rows(replica: int, step: int) -> tuple[Tensor, list[Tensor]]:
    """Two rows of 83 tokens of a replica, and their documents; in the second replica none has an entry."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    ids, short = torch.randint(3, 80, (2, 83), generator=generator), DOCUMENTS[2]
    rows = (short, short) if replica else (LENGTHS_OF_ROWS[step % 2], (40, 3, 1, 39))
    return ids, [torch.repeat_interleave(torch.tensor(item)) for item in rows]


def trained(rank: int, world_size: int, ring_size: int, stage: int) -> dict[str, Any]:
    """Losses of some steps with packed rows, and the parameters after them, on rings and on one process."""
    deepspeed = start_deepspeed()
    replicas, alone, model = world_size // ring_size, small_model(), small_model()
    alone.set_attn_implementation("eager")
    section = {"pattern": {"documents": True}}
    engine = ds_ring.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        config=json_config(ring_size, 2, stage, ring_attention=section),
    )[0]
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    outcome: dict[str, Any] = {"ring": [], "alone": []}
    for step in range(STEPS):
        ids, documents = packed_rows(engine.ring.run_mesh.data_rank, step)
        batch = {"input_ids": ids, "labels": ids, "document_ids": torch.stack(documents)}
        outcome["ring"].append(take_step(engine, batch))

        by_length: dict[int, list[Tensor]] = {}
        for replica in range(replicas):
            ids, documents = packed_rows(replica, step)
            for row, of_tokens in zip(ids, documents, strict=True):
                for text in row.split(torch.unique_consecutive(of_tokens, return_counts=True)[1].tolist()):
                    by_length.setdefault(len(text), []).append(text)
        losses = []
        for texts in map(torch.stack, by_length.values()):
            with TotalOrder():
                logits = alone(input_ids=texts).logits[:, :-1]
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), texts[:, 1:].flatten(), reduction="none"
                )
            )
        mean = torch.cat(losses).mean()
        outcome["alone"].append(float(mean.detach()))
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        pairs = zip(engine.module.named_parameters(), alone.parameters(), strict=True)
        outcome["parameters"] = {
            name: relative_error(mine.detach().double(), owned.detach().double())
            for (name, mine), owned in pairs
        }
    return outcome


@pytest.mark.parametrize(
    ("size", "ring_size", "stage"), [(1, 1, 0), (3, 3, 1), (4, 2, 2), (4, 2, 3), (4, 4, 3)]
)
@pytest.mark.night
def test_packed_rows_train_as_their_documents(rank_pool, size, ring_size, stage):
    for outcome in rank_pool(size).run(trained, ring_size, stage):
        assert outcome["ring"] == pytest.approx(outcome["alone"], rel=2e-5)
        assert worst(outcome["parameters"].values()) < 2e-5, max(
            outcome["parameters"].items(), key=lambda x: x[1]
        )


def checkpointed(rank: int, world_size: int) -> list[Any]:
    """Compute the layers on the ring again in the backward pass, at ZeRO 3."""
    start_deepspeed()
    from ds_ring_launcher.check import model_check

    on_the_ring = model_check._on_the_ring

    def again(model: Any, *others: Any) -> Any:
        model.gradient_checkpointing_enable()
        return on_the_ring(model, *others)

    with mock.patch.object(model_check, "_on_the_ring", again):
        return model_check.check_forms(model_check.CheckRequest("deepseek_v4", stage=3))


@pytest.mark.night
def test_checkpointed_layers_at_zero_3_are_exact(rank_pool):
    (report,) = rank_pool(2).run(checkpointed)[0]
    assert report.result == "exact", report.reason


@pytest.mark.parametrize(
    ("section", "kind", "words"),
    [
        ({"layout": "striped"}, "RingConfigError", "expected shards of consecutive tokens"),
        ({"pattern": {"window": 8}}, "RingPatternError", "expected the plain causal pattern,.* got Sliding"),
        ({"pattern": {"documents": True, "window": 8}}, "RingPatternError", "expected the plain causal"),
        ({"ring_size": 1, "ulysses_size": 2}, "RingConfigError", "ulysses_size: expected 1,.* got 2"),
    ],
)
def test_a_section_that_does_not_go_with_entries_is_refused(section, kind, words):
    with pytest.raises(RingError, match=words) as caught:
        compressed.check_section(small_model(), RingConfig(**{"ring_size": 2} | section))
    assert type(caught.value).__name__ == kind
