"""Rings inside nodes and between them, on real gloo ranks: two nodes of two, against dense float64 attention."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from ds_ring import Causal, Full, PassOptions, RingMesh, build_plan, ring_attention
from ds_ring.comm.messages import BatchEvent, MessageSize, Observers
from tests.cases import PATTERNS, Shape, layout_for, tensors
from tests.dist.deepspeed_ranks import json_config, start_engine
from tests.dist.harness import Pool, catch_refusal
from tests.dist.test_ring_attention import run_ring
from tests.parity import errors
from tests.reference import dense_attention

SHAPE = Shape(batch=1, query_heads=4, kv_heads=2, tokens=130)
LAYOUTS = ("contiguous", "zigzag", "auto")
BY_HOPS = PassOptions(stage_bytes=0)


def two_nodes(rank: int, world_size: int, dtype: torch.dtype, payload: str) -> dict[tuple[str, ...], float]:
    """Relative errors of every pattern, on rank 0."""
    mesh = RingMesh.from_world(world_size, ranks_per_node=2)
    result, levels = {}, 0
    for number, (name, pattern_of) in enumerate(PATTERNS.items()):
        pattern, layout_name = pattern_of(SHAPE.tokens), LAYOUTS[number % len(LAYOUTS)]
        layout = layout_for(layout_name, pattern, tokens=SHAPE.tokens, ring_size=world_size)
        plan = build_plan(pattern, layout, query_heads=4, kv_heads=2, ranks_per_node=2)
        levels += plan.classes[0].directions[0].ranks_per_node == 2
        got = run_ring(mesh, layout_name, name, SHAPE, dtype, gradient_payload=payload)
        if rank == 0:
            want = dense_attention(*tensors(SHAPE, dtype), pattern)
            result |= {(name, x): error for x, error in errors(got, want).items()}
    assert levels > len(PATTERNS) // 3, levels
    return result


@pytest.mark.parametrize(
    ("dtype", "payload", "most"),
    [
        (torch.float32, "float32", 1e-5),
        # at night: test_precision.py has this payload by day, and the schedules of both are compared without ranks
        pytest.param(torch.float64, "bfloat16", 1e-2, marks=pytest.mark.night),
    ],
)
def test_two_nodes_of_two_are_exact(rank_pool: Pool, dtype: torch.dtype, payload: str, most: float) -> None:
    errors = rank_pool(4).run(two_nodes, dtype, payload, timeout_s=120)[0]
    assert max(errors.values()) < most, errors
    if payload != "float32":  # out and dQ do not travel, and keep float64
        stored = [error for (_, name), error in errors.items() if name in ("out", "dq")]
        assert max(stored) < 1e-12, errors


class Sends(list[MessageSize]):
    """Observe what a rank sends in forward passes."""

    def on_batch(self, event: BatchEvent) -> None:
        if event.phase == "forward" and event.stage == "compute":
            self.extend(event.posted.sends)


def bytes_to_the_other_node(rank: int, world_size: int, ranks_per_node: int) -> float:
    """In shards of K and V, of a pass of two nodes of two that attends to all keys."""
    mesh, sends = RingMesh.from_world(world_size, ranks_per_node=ranks_per_node), Sends()
    mesh.owners[Observers].append(sends)
    q = torch.zeros(1, 2, 16, 8)
    ring_attention(q, q, q, pattern=Full(), layout="contiguous", mesh=mesh, options=BY_HOPS)
    return sum(item.payload_bytes for item in sends if item.peer // 2 != rank // 2) / (2 * q.nbytes)


def test_a_shard_crosses_between_nodes_once(rank_pool: Pool) -> None:
    """Where nodes are known, each rank sends its own; else the last rank of a node sends all that pass it."""
    assert rank_pool(4).run(bytes_to_the_other_node, 2) == [1, 1, 1, 1]
    assert rank_pool(4).run(bytes_to_the_other_node, 4) == [0, 3, 0, 3]


def other_nodes(rank: int, world_size: int) -> str:
    mesh = RingMesh.from_world(world_size)
    # as if a launcher had started other numbers of ranks on the nodes
    mesh = replace(mesh, ranks_per_node=2 if rank else 1)
    q = torch.zeros(1, 1, 4, 8)
    return catch_refusal(ring_attention, q, q, q, pattern=Causal(), layout="zigzag", mesh=mesh)


def test_nodes_of_other_sizes_are_refused_on_all_ranks(rank_pool: Pool) -> None:
    for text in rank_pool(2).run(other_nodes):
        assert "ranks per node" in text, text


def node_size_of_an_engine(rank: int, world_size: int, local_sizes: list[str]) -> int | None:
    """What `ds_ring.initialize` takes from the launcher's variable."""
    import transformers

    os.environ["LOCAL_WORLD_SIZE"] = local_sizes[rank]
    try:
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
        engine = start_engine(model, json_config(world_size, 1, 0))
        ids = torch.arange(32)[None]
        engine(**engine.ring.shard_batch({"input_ids": ids, "labels": ids}))
        node_size: int | None = engine.ring.run_mesh.ranks_per_node
        return node_size
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_the_launcher_says_which_ranks_share_a_node(rank_pool: Pool) -> None:
    pool = rank_pool(4)
    assert pool.run(node_size_of_an_engine, ["2"] * 4) == [2] * 4
    # hosts with unequal slots: one ring of all ranks, and no error
    assert pool.run(node_size_of_an_engine, ["3", "3", "3", "1"]) == [None] * 4
