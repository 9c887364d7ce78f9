"""`transport="direct"` on real ranks: float64 against dense attention, and the bytes of its plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_ring import (
    Causal,
    Documents,
    Full,
    PassOptions,
    RingMesh,
    SlidingWindow,
    make_layout,
    ring_attention,
)
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.prepare import PlanReasons
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring_launcher.plan.pass_memory import PassShape
from ds_ring_launcher.plan.pass_time import CostPart, bytes_sent
from tests.cases import Shape, document_ids, tensors
from tests.dist.deepspeed_ranks import json_config, start_engine
from tests.dist.harness import Pool, catch_refusal
from tests.parity import errors, gathered_pass
from tests.reference import dense_attention

SHAPE = Shape(batch=2, query_heads=4, kv_heads=2, tokens=203, head_dim=8)
TOKEN_BYTES = 2 * SHAPE.batch * SHAPE.kv_heads * SHAPE.head_dim * 8  # K and V in float64
PATTERNS: dict[str, tuple[Pattern, str]] = {
    "packed": (Documents(document_ids(203)) & Causal(), "balanced"),
    "causal": (Causal(), "zigzag"),
    "window": (SlidingWindow(30), "contiguous"),
    "full": (Full(), "striped"),
}
BESIDE: list[dict[str, Any]] = [
    {}, {"stage_bytes": 1}, {"stage_bytes": 60 * TOKEN_BYTES, "chunk_bytes": 1}, {"overlap": False, "check_finite": True},
    {"offload_attention": True, "chunk_bytes": 1}, {"prune": False}, {"kernel": "reference"}, {"kernel": "flash"},
    {"gradient_payload": "bfloat16"}, {"recompute_attention": 0.5},
]  # fmt: skip


def parity(
    rank: int, world_size: int, inner: int | None, name: str, every: bool, transport: str = "direct"
) -> list[tuple[str, float]]:
    """The largest error of every option; checks the bytes of each pass against the planner's."""
    mesh, (pattern, layout_name) = RingMesh.from_world(world_size, ranks_per_node=inner), PATTERNS[name]
    layout = make_layout(layout_name, tokens=SHAPE.tokens, ring_size=world_size, pattern=pattern)
    whole, result = tensors(SHAPE, torch.float64), []
    want = dense_attention(*whole, pattern)
    for options in BESIDE if every else BESIDE[:3]:
        context = make_ring_context(pattern, layout, mesh, Options(transport=transport, **options))
        before = context.exchange.counters.bytes_sent
        got = gathered_pass(lambda *x, c=context: ring_attention_op(*x, c.handle)[0], whole, layout, mesh)
        sent = context.exchange.counters.bytes_sent - before
        prepared = next(iter(context.prepared.values()))
        if (
            options.get("kernel") != "flash"
            and "recompute_attention" not in options
            and "gradient_payload" not in options
        ):
            classes = [CostPart(head_class, 1) for head_class in prepared.rank_plan.classes]
            shape = PassShape(2, 2, layout.local_tokens, 8, 8, prepared.chunk_bytes, "cpu")
            forward, backward = bytes_sent(classes, shape)
            # the planner counts sums of gradients in float32; those of float64 are twice as long
            assert sent == forward + forward + 2 * (backward - forward), (options, sent, forward, backward)
        off = errors(got, want) if rank == 0 else {"": 0.0}
        if options.get("gradient_payload") == "bfloat16":
            assert max(off.values()) < 4e-3
            off = {key: error for key, error in off.items() if key not in ("dk", "dv")}
        result.append((f"{name}, {options}", max(off.values())))
    return result


CASES = [
    (4, 2, "packed", True),
    (2, None, "causal", False),
    (3, None, "packed", False),
    (4, None, "window", False),
]
CASES += [(6, 3, "packed", False), (8, 2, "packed", True), (8, 4, "causal", True), (8, 4, "packed", False)]
CASES += [
    (5, None, "full", False),
    (6, 2, "window", False),
    (7, None, "packed", False),
    (8, None, "full", True),
]


@pytest.mark.parametrize(("ranks", "inner", "name", "every"), CASES)
@pytest.mark.day("4-2-packed-True")
def test_it_is_exact_and_sends_what_is_planned(
    rank_pool: Pool, ranks: int, inner: int | None, name: str, every: bool
) -> None:
    for what, error in rank_pool(ranks).run(parity, inner, name, every, timeout_s=170)[0]:
        assert error < 1e-12, (what, error)


def chosen(rank: int, world_size: int) -> tuple[list[tuple[str, float]], list[str]]:
    """Errors with transport fastest, and why the plans of the mesh were taken."""
    off = parity(rank, world_size, 2, "packed", False, "fastest")
    mesh = RingMesh.from_world(world_size, ranks_per_node=2)
    x = torch.zeros(1, 1, 16, 8)
    options = PassOptions(transport="fastest")
    ring_attention(x, x, x, pattern=Causal(), layout="zigzag", mesh=mesh, options=options)
    return off, list(mesh.owners[PlanReasons].texts)


def test_fastest_is_exact_on_all_ranks_and_says_what_it_took(rank_pool: Pool) -> None:
    results = rank_pool(4).run(chosen, timeout_s=120)
    assert all(error < 1e-12 for _, error in results[0][0]), results[0]
    texts = [text for _, text in results]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert texts[0][0].startswith("transport fastest took ") and "direct" in texts[0][0], texts[0]


def refused(rank: int, world_size: int) -> str:
    x = torch.zeros(1, 1, 16, 8)
    options = PassOptions(transport="direct", stage_bytes=0)
    mesh = RingMesh.from_world(world_size)
    return catch_refusal(
        ring_attention, x, x, x, pattern=Causal(), layout="zigzag", mesh=mesh, options=options
    )


def test_stages_of_no_bytes_are_refused_on_all_ranks(rank_pool: Pool) -> None:
    assert all("stage_bytes" in text for text in rank_pool(2).run(refused))


def described(rank: int, world_size: int) -> tuple[str, str]:
    """What an engine says of its ring before a batch, and after one."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    section = json_config(world_size, 1, 0)
    section["ring_attention"]["transport"] = "fastest"
    engine = start_engine(transformers.LlamaForCausalLM(config), section)
    before, ids = engine.ring.describe(), torch.arange(32)[None]
    engine(**engine.ring.shard_batch({"input_ids": ids, "labels": ids}))
    return before, engine.ring.describe()


def test_an_engine_says_why_a_plan_was_taken(rank_pool: Pool) -> None:
    for before, after in rank_pool(2).run(described, timeout_s=120):
        assert "transport fastest took" not in before
        assert "transport fastest took" in after and "direct" in after, after
