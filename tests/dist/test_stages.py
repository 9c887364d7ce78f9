"""Stages on real gloo ranks, beside what else may be asked for, against dense float64 attention."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from ds_ring import RingMesh
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from tests.cases import PATTERNS, Shape, layout_for, least_kept, tensors
from tests.dist.deepspeed_ranks import listen
from tests.dist.harness import Pool, catch_refusal
from tests.parity import errors, gathered_pass
from tests.reference import Dense, dense_attention

SHAPE = Shape(batch=2, query_heads=4, kv_heads=2, tokens=130, head_dim=8)
SHARD_BYTES = 2 * SHAPE.batch * SHAPE.kv_heads * 33 * SHAPE.head_dim * 8  # K and V of 4 ranks in float64
BESIDE: list[dict[str, Any]] = [
    {}, {"chunk_bytes": 1}, {"overlap": False, "check_finite": True},
    {"offload_attention": True, "chunk_bytes": 1}, {"prune": False}, {"gradient_payload": "bfloat16"},
    {"recompute_attention": 0.5},
]  # fmt: skip

PARTED = [
    ("causal", "zigzag"),
    ("full", "contiguous"),
    ("window", "striped"),
    ("documents, causal", "zigzag"),
]
PARTED += [("dilated", "zigzag")] if "dilated" in PATTERNS else []


@functools.cache
def wanted(name: str) -> Dense:
    return dense_attention(*tensors(SHAPE, torch.float64), PATTERNS[name](SHAPE.tokens))


def attend(mesh: RingMesh, name: str, layout_name: str, **options: Any) -> dict[str, float]:
    """Relative errors, on rank 0, and how many directions are in stages."""
    pattern = PATTERNS[name](SHAPE.tokens)
    layout = layout_for(layout_name, pattern, tokens=SHAPE.tokens, ring_size=mesh.ring_size)
    context = make_ring_context(pattern, layout, mesh, Options(**options))
    whole = tensors(SHAPE, torch.float64)
    result = gathered_pass(lambda *x: ring_attention_op(*x, context.handle)[0], whole, layout, mesh)
    stages = [item.plan.classes[0].directions[0].stages for item in context.prepared.values()]
    off = errors(result, wanted(name)) if mesh.ring_rank == 0 else {}
    return off | {"stages": float(len(stages) and min(map(len, stages)))}


def of_everything(rank: int, world_size: int, every: bool) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Every option with every pattern, or with the next one."""
    mesh, result = RingMesh.from_world(world_size), []
    patterns = (("causal", "zigzag"), ("window", "contiguous"), ("dilated", "zigzag"))
    for number, options in enumerate(BESIDE):
        for name, layout in patterns if every else patterns[number % 3 :][:1]:
            result.append((options, attend(mesh, name, layout, stage_bytes=2 * SHARD_BYTES, **options)))
    return result


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.day("False")
def test_stages_beside_other_options_are_exact(rank_pool: Pool, every: bool) -> None:
    for options, result in rank_pool(4).run(of_everything, every, timeout_s=120)[0]:
        assert result.pop("stages") == 2, options
        rounded = options.get("gradient_payload") == "bfloat16"
        for name, error in result.items():
            assert error < (4e-3 if rounded and name in ("dk", "dv") else 1e-12), (options, name, error)


def with_a_part_for_the_end(rank: int, world_size: int, every: bool) -> list[tuple[str, dict[str, float]]]:
    """Every kernel with every pattern, in stages and hop by hop, or in one of both: then any two meet."""
    mesh, result = RingMesh.from_world(world_size), []
    with least_kept(1):
        for number, kernel in enumerate(("cpu", "flash", "reference")):
            for turn, (name, layout) in enumerate(PARTED):
                for stage_bytes in (
                    (0, 2 * SHARD_BYTES) if every else ((number + turn) % 2 * 2 * SHARD_BYTES,)
                ):
                    options = {"kernel": kernel, "stage_bytes": stage_bytes, "chunk_bytes": 1}
                    result.append((f"{name}, {options}", attend(mesh, name, layout, **options)))
    return result


@pytest.mark.night
@pytest.mark.parametrize("every", [False, True])
def test_a_part_of_the_own_shard_for_the_end_is_exact(rank_pool: Pool, every: bool) -> None:
    """[Note: a part for the end] of lowering.py, which real shards have from 4 Ki tokens on."""
    for what, result in rank_pool(4).run(with_a_part_for_the_end, every, timeout_s=120)[0]:
        result.pop("stages")
        assert max(result.values()) < 1e-12, (what, result)


def differently(rank: int, world_size: int) -> tuple[str, list[str], float]:
    """What ranks that disagree are told; what is logged of too few bytes, and in how many stages it goes."""
    mesh = RingMesh.from_world(world_size)
    with listen() as lines:
        text = catch_refusal(attend, mesh, "causal", "zigzag", stage_bytes=(2 + rank) * SHARD_BYTES)
        stages = attend(mesh, "causal", "zigzag", stage_bytes=SHARD_BYTES)["stages"]
    return text, [line for line in lines if "stage_bytes" in line], stages


def test_other_bytes_on_a_rank_are_refused_and_too_few_are_told(rank_pool: Pool) -> None:
    for text, lines, stages in rank_pool(4).run(differently):
        assert "stage_bytes: ring rank 0" in text, text
        assert len(lines) >= 1 and f"room for two shards, {SHARD_BYTES} bytes each" in lines[0], lines
        assert stages == 0
