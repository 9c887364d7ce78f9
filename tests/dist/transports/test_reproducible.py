"""`transport="reproducible"`: the same bits on rings of 1 to 8 ranks and on three layouts.

Each case is computed on every ring and layout by all ranks, which form replicas of smaller rings, and hashed. The
day has four ranks and a case, the night eight ranks and a hundred cases.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from ds_ring import (
    Causal,
    Dilated,
    Documents,
    Full,
    RingConfigError,
    RingLayoutError,
    RingMesh,
    SlidingWindow,
    decode_attention,
    gather_sequence,
    make_layout,
    ring_attention,
    shard_sequence,
)
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.eager import attend
from ds_ring.ops.options import Options
from ds_ring.schedule.pieces import round_to_blocks, whole_blocks
from ds_ring.transports.reproducible.trees import TreeSum
from tests import calls
from tests.dist.harness import Pool
from tests.reference import dense_attention, relative_error

RINGS, LAYOUTS, BLOCK = (1, 2, 4, 8), ("contiguous", "zigzag", "balanced"), 16
OPTIONS = Options(transport="reproducible", block_size=BLOCK)


def pattern_of(draw: np.random.Generator, tokens: int) -> Pattern:
    ids = np.sort(draw.integers(0, 5, tokens))
    patterns: list[Pattern] = [
        Causal(), Full(), SlidingWindow(int(draw.integers(2, tokens))), Causal() & Documents(ids),
        SlidingWindow(20, causal=False), Dilated((32, 64), (1, 2), True, "zero"), Documents(ids),
    ]  # fmt: skip
    return patterns[draw.integers(len(patterns))]


def hashes(rank: int, world_size: int, seeds: range, transport: str) -> list[tuple[set[str], float]]:
    """The different bits of each case's out, lse, dq, dk and dv, and the largest error of them."""
    meshes = {size: RingMesh.from_world(size) for size in RINGS if size <= world_size}
    result = []
    for seed in seeds:
        draw = np.random.default_rng(seed)
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        tokens, groups, dim = (
            int(draw.integers(8 * BLOCK, 300)),
            int(draw.integers(1, 3)),
            8 * int(draw.integers(1, 4)),
        )
        heads, pattern = groups * int(draw.integers(1, 3)), pattern_of(draw, tokens)
        generator = torch.Generator().manual_seed(seed)
        q, grad = (torch.randn(1, heads, tokens, dim, generator=generator).to(dtype) for _ in range(2))
        k, v = (torch.randn(1, groups, tokens, dim, generator=generator).to(dtype) for _ in range(2))
        grad_lse = torch.randn(1, heads, tokens, generator=generator)
        bits: set[str] = set()
        for size, mesh in meshes.items():
            for name in LAYOUTS:
                layout = make_layout(name, tokens=tokens, ring_size=size, pattern=pattern)
                layout = round_to_blocks(layout, BLOCK)
                context = make_ring_context(pattern, layout, mesh, OPTIONS.replaced(transport=transport))
                local = [shard_sequence(x, layout, mesh=mesh, dim=2) for x in (q, k, v, grad, grad_lse)]
                leaves = [x.requires_grad_() for x in local[:3]]
                out, lse = attend(*leaves, context, None, True)
                torch.autograd.backward([out, lse], local[3:])
                results = (out.detach(), lse.detach(), *(x.grad for x in leaves))
                whole = [gather_sequence(x, layout, mesh=mesh, dim=2) for x in results]
                digest = hashlib.sha256()
                for x in whole:
                    digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())
                bits.add(digest.hexdigest())
        want = dense_attention(q, k, v, grad, pattern, grad_lse)
        seen = want.lse.isfinite()
        whole[1], finite = whole[1].where(seen, 0), want.lse.where(seen, 0)
        errors = [relative_error(a, b) for a, b in zip(whole, want._replace(lse=finite), strict=True)]
        result.append((bits, max(errors) * (1.0 if dtype is torch.float32 else 1e-3)))
    return result


@pytest.mark.parametrize(("ranks", "seeds"), [(4, range(1)), (8, range(1)), (8, range(1, 100))], ids=str)
@pytest.mark.timeout(1000)  # a hundred cases at night
@pytest.mark.day("4-range(0, 1)")
def test_bits_depend_on_neither_ring_nor_layout(rank_pool: Pool, ranks: int, seeds: range) -> None:
    everyones = rank_pool(ranks).run(hashes, seeds, "reproducible", timeout_s=900)
    for number, cases in enumerate(zip(*everyones, strict=True)):
        assert len(set().union(*(bits for bits, _ in cases))) == 1, f"case {seeds[number]}"
        assert all(error < 1e-5 for _, error in cases), (seeds[number], cases[0][1])


def few_queries(rank: int, world_size: int) -> list[str]:
    """Hash rows of the pass over the whole sequence, and the same rows as few queries, on every ring."""
    tokens, at = 6 * BLOCK + 5, [6 * BLOCK + 4, 40, 41, 17]
    result, generator = [], torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    for pattern in (Causal(), SlidingWindow(30), Causal() & Documents(np.arange(tokens) // 50)):
        for size in (1, 2, 4):
            mesh = RingMesh.from_world(size)
            layout = round_to_blocks(make_layout("zigzag", tokens=tokens, ring_size=size), BLOCK)
            kv = [shard_sequence(x, layout, mesh=mesh, dim=2) for x in (k, v)]
            call = {"pattern": pattern, "layout": layout, "mesh": mesh, "options": OPTIONS}
            out = ring_attention(shard_sequence(q, layout, mesh=mesh, dim=2), *kv, **call)
            rows = gather_sequence(out, layout, mesh=mesh, dim=2)[:, :, at].contiguous()
            few = decode_attention(q[:, :, at].contiguous(), *kv, positions=at, **call)
            result += [f"{pattern} {hashlib.sha256(x.numpy().tobytes()).hexdigest()}" for x in (rows, few)]
    return result


def test_few_queries_have_the_bits_of_the_whole_pass(rank_pool: Pool) -> None:
    assert len(set().union(*rank_pool(4).run(few_queries))) == 3  # a pattern each


def test_the_bits_of_a_ring_pass_do(rank_pool: Pool) -> None:
    """Without the tree the comparison above finds different bits."""
    assert any(len(bits) > 1 for bits, _ in rank_pool(4).run(hashes, range(1), "ring")[0])


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_does_not_depend_on_the_order(seed: int) -> None:
    draw = np.random.default_rng(seed)
    leaves = np.flatnonzero(draw.random(int(draw.integers(1, 40))) < 0.7)
    texts = set()
    for _ in range(5):
        tree: TreeSum[str] = TreeSum(leaves, lambda left, right: f"({left} {right})")
        for leaf in draw.permutation(leaves).tolist():
            tree.insert((0, leaf), str(leaf))
        texts.add(tree.total)
    assert len(texts) == 1


def test_a_leaf_that_is_missing_is_found() -> None:
    tree: TreeSum[int] = TreeSum(np.array([0, 1, 2]), int.__add__)
    tree.insert((0, 0), 1)
    tree.insert((0, 2), 1)
    with pytest.raises(AssertionError, match="leaves are missing"):
        _ = tree.total


def refused(rank: int, world_size: int, what: str) -> None:
    mesh = RingMesh.from_world(world_size)
    x = torch.zeros(1, 2, 100 if what == "layout" else 128, 8)
    layout: Any = "striped" if what == "striped" else "zigzag"
    up = torch.zeros(32, 8) if what == "latents" else None
    k, v = (x[:, :1], x[:, :1]) if what == "latents" else (x, x)
    if what == "layout":
        layout = make_layout("zigzag", tokens=200, ring_size=2)
    calls.attend(
        x, k, v, pattern=Causal(), layout=layout, mesh=mesh, transport="reproducible", up_projection=up,
        gradient_payload="bfloat16" if what == "payload" else "float32",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("layout", RingLayoutError, "expected runs that begin at multiples of 128 tokens"),
        ("striped", RingLayoutError, "expected shards of consecutive positions"),
        ("latents", RingConfigError, "latents: expected transport"),
        ("payload", RingConfigError, "gradient_payload: expected"),
    ],
)
def test_what_cannot_be_honoured_is_refused(rank_pool: Pool, what: str, error: type, says: str) -> None:
    for outcome in rank_pool(2).collect(refused, what):
        assert (outcome.error_type, says in outcome.message) == (error.__name__, True), outcome


def test_borders_move_to_the_nearest_block() -> None:
    layout = make_layout("zigzag", tokens=250, ring_size=3)
    moved = round_to_blocks(layout, 16)
    starts = [int(start) for rank in range(3) for start in moved.runs(rank)[:, 0]]
    assert sorted(starts) == [
        0,
        48,
        80,
        160,
        208,
    ]  # of 0, 41, 83 and 125, 166, 208; two that touch are one run
    assert whole_blocks(moved, 16) is moved and sum(map(moved.valid_tokens, range(3))) == 250
