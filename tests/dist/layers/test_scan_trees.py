"""`ring_scan`, `halo` and `shift_sequence` along the paths of trees, in float64, against token by token.

Each token goes on from the one before it on its path: a delta rule or a decay, behind a short convolution.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_ring import (
    RingMesh,
    Tree,
    gather_sequence,
    halo,
    make_layout,
    ring_scan,
    shard_sequence,
    shift_sequence,
)
from ds_ring.layers.scan import sequence_runs
from ds_ring.layers.scan.context import ScanContext, scan_context
from tests.dist.harness import Pool, catch_refusal
from tests.dist.one_process import Layer, same_as_one_process
from tests.reference import relative_error

B, T, K, V, WIDTH = 2, 61, 3, 4, 4
Inputs = dict[str, Tensor]


def random_tree(seed: int) -> Tree:
    """Nodes in depth-first order, of 1 to 9 tokens; the last few tokens are padding."""
    draw, lengths, parents, path = np.random.default_rng(seed), list[int](), list[int](), [-1]
    while sum(lengths) < T - 9:
        above = int(draw.integers(len(path)))
        parents.append(path[above])
        path = [*path[: above + 1], len(parents) - 1]
        lengths.append(int(draw.integers(1, 10)))
    return Tree(tuple(parents), tuple(lengths), T)


def tokens_before(tree: Tree) -> list[int]:
    """The position of the token before each one on its path; -1 for none, -2 for padding."""
    result = [-2] * T
    for node, parent in enumerate(tree.parents):
        for t in range(tree.starts[node], tree.starts[node + 1]):
            result[t] = t - 1
        result[tree.starts[node]] = int(tree.starts[parent + 1]) - 1 if parent >= 0 else -1
    return result


def inputs(seed: int) -> Inputs:
    torch.manual_seed(seed)
    arguments = {
        "k": torch.nn.functional.normalize(torch.randn(B, T, K, dtype=torch.float64), dim=-1),
        "v": torch.randn(B, T, V, dtype=torch.float64),
        "decay": torch.rand(B, T, K, dtype=torch.float64) * 0.3 + 0.7,
        "weight": torch.randn(WIDTH, dtype=torch.float64),
    }
    return {name: x.requires_grad_() for name, x in arguments.items()}


def step(state: Tensor, x: Inputs, v: Tensor, t: int, matrix: bool) -> Tensor:
    """The state [B, K, .] after a token: a delta rule or a decay."""
    k = x["k"][:, t]
    if not matrix:
        return state * x["decay"][:, t, :, None] + k[..., None] * v[:, None]
    return state + k[..., None] * (v - torch.einsum("bk,bkv->bv", k, state))[:, None]


def alone(x: Inputs, tree: Tree, matrix: bool) -> Tensor:
    """[B, T, V] on one process; zeros for padding."""
    before, states, outs = tokens_before(tree), dict[int, Tensor](), []
    states[-1] = torch.zeros(B, K, V, dtype=torch.float64)
    for t in range(T):
        if before[t] < -1:
            outs.append(torch.zeros(B, V, dtype=torch.float64))
            continue
        u, terms = t, []
        for i in range(WIDTH):
            terms.append(x["weight"][WIDTH - 1 - i] * x["v"][:, u])
            u = before[u]
            if u < 0:
                break
        states[t] = step(states[before[t]], x, sum(terms, torch.zeros(())), t, matrix)
        outs.append(torch.einsum("bk,bkv->bv", x["k"][:, t], states[t]))
    return torch.stack(outs, dim=1)


def layer(x: Inputs, context: ScanContext, matrix: bool) -> Tensor:
    """The local [B, S, V] of `alone`, from shards."""
    named: dict[str, Any] = {"layout": context.layout, "mesh": context.mesh, "documents": context.documents}
    beside = halo(x["v"] * 1, WIDTH - 1, dim=1, **named)  # [B, R, WIDTH - 1, V]
    zero, v = torch.zeros(B, K, V, dtype=torch.float64), list[Tensor]()
    moves, finals = list[Tensor](), list[Tensor]()
    for piece in context.pieces:
        whole = torch.cat([beside[:, piece.run], x["v"][:, piece.slot : piece.slot + piece.length]], dim=1)
        v.append(sum((x["weight"][i] * whole[:, i : i + piece.length] for i in range(WIDTH)), zero[:, :1]))
        tokens = range(piece.slot, piece.slot + piece.length)
        state, move = zero, torch.eye(K, dtype=torch.float64).expand(B, K, K)
        for t in tokens:
            state = step(state, x, v[-1][:, t - piece.slot], t, matrix)
            move = step(move, x, torch.zeros(B, K, dtype=torch.float64), t, True)
        moves.append(move if matrix else x["decay"][:, list(tokens)].prod(dim=1)[..., None])
        finals.append(state)
    if not moves:  # no token is on this rank, which takes part all the same
        none = beside.flatten()[:0].sum()  # of the halo: backward passes are in one order on all ranks
        moves = [zero.new_zeros(0, B, K, K if matrix else 1) + none]
        finals = [zero.new_zeros(0, B, K, V) + none]
    of_runs = (torch.stack(item) if context.pieces else item[0] for item in (moves, finals))
    starts = ring_scan(*of_runs, matrix=matrix, **named)
    out = torch.zeros(B, x["v"].shape[1], V, dtype=torch.float64)
    out = out + starts.flatten()[:0].sum()
    for piece, values in zip(context.pieces, v, strict=True):
        state, parts = starts[piece.run], list[Tensor]()
        for t in range(piece.slot, piece.slot + piece.length):
            state = step(state, x, values[:, t - piece.slot], t, matrix)
            parts.append(torch.einsum("bk,bkv->bv", x["k"][:, t], state))
        after = out[:, piece.slot + piece.length :]
        out = torch.cat([out[:, : piece.slot], torch.stack(parts, dim=1), after], dim=1)
    return out


def on_trees(mesh: RingMesh, seed: int, name: str, matrix: bool) -> Layer:
    tree = random_tree(seed)
    sizes = {"ring_size": mesh.ring_size, "multiple_of": mesh.ulysses_size}
    layout = make_layout(name, tokens=T, pattern=tree, **sizes)
    context = scan_context(layout, mesh, tree)
    return Layer(
        inputs(seed),
        lambda **x: alone(x, tree, matrix),
        lambda **x: layer(x, context, matrix),
        mesh, layout, dim=1, parameters=["weight"],
        real=torch.tensor([float(t > -2) for t in tokens_before(tree)]),
    )  # fmt: skip


@pytest.mark.day("1-zigzag-1-True", "4-zigzag-2-False")
@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize(
    ("world_size", "layout", "ulysses"),
    [(1, "zigzag", 1), (2, "zigzag", 1), (3, "contiguous", 1), (4, "balanced", 1), (4, "zigzag", 2)],
)
def test_exact(rank_pool: Pool, world_size: int, layout: str, ulysses: int, matrix: bool) -> None:
    trees = [(seed, layout, matrix) for seed in range(4)]
    same_as_one_process(rank_pool(world_size), on_trees, *trees, ulysses=ulysses, count=5 - matrix)


def with_a_wrong_parent(rank: int, world_size: int) -> float:
    """The error if the last node goes on from its elder sister instead of from their parent."""
    right, whole = Tree((-1, 0, 0), (20, 20, 21), T), inputs(0)
    wrong, mesh = Tree((-1, 0, 1), (20, 20, 21), T), RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=T, ring_size=world_size)
    shards = {
        name: shard_sequence(x.detach(), layout, mesh=mesh, dim=1) for name, x in whole.items() if x.ndim > 1
    }
    out = layer({**shards, "weight": whole["weight"].detach()}, scan_context(layout, mesh, wrong), True)
    return relative_error(gather_sequence(out, layout, mesh=mesh, dim=1), alone(whole, right, True).detach())


def test_a_wrong_parent_would_be_found(rank_pool: Pool) -> None:
    assert rank_pool(2).run(with_a_wrong_parent)[0] > 1e-2


def shifted(rank: int, world_size: int) -> tuple[bool, str]:
    """Whether a shift by one follows the paths; and what a look-ahead is told."""
    tree, mesh = random_tree(1), RingMesh.from_world(world_size)
    layout = make_layout("contiguous", tokens=T, ring_size=world_size)
    x = torch.arange(T)[None]
    named: dict[str, Any] = {"dim": 1, "layout": layout, "mesh": mesh, "documents": tree}
    mine = shift_sequence(shard_sequence(x, layout, mesh=mesh, dim=1), -1, fill=-1, **named)
    result = gather_sequence(mine, layout, mesh=mesh, dim=1)[0].tolist()
    return result == [max(t, -1) for t in tokens_before(tree)], catch_refusal(halo, mine, 1, 1, **named)


def test_tokens_are_shifted_along_paths_and_nothing_comes_from_after(rank_pool: Pool) -> None:
    for follows, text in rank_pool(3).run(shifted):
        assert follows and "halo: after: expected 0 with a tree, got 1" in text, text


def test_the_rounds_are_the_logarithm_of_the_longest_path() -> None:
    """A chain of 30 nodes with 30 leaves: 61 runs or more on one rank, and 31 on a path."""
    parents = [-1, *range(30), *range(30)]
    tree = Tree(tuple(parents), (1,) * len(parents), len(parents))
    runs = sequence_runs.sequence_runs(make_layout("contiguous", tokens=len(parents), ring_size=1), 1, tree)
    assert len(runs.starts) == len(parents) and len(runs.rounds()) == 5
    assert len(runs.shift()) == len(parents) - 1
