"""Random trees of rollouts through every kind of layer, and through models: a few rounds of
`tools/campaign.py tree`, and faults that a round must find.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ds_ring.data.packing import RowGroup
from ds_ring.layers.scan import context, halo
from ds_ring.layers.scores import AlongPaths
from ds_ring.patterns.documents.pattern import Tree
from tests.dist import tree_rounds
from tests.dist.harness import Pool
from tests.dist.tree_rounds import MODELS, OPERATORS, play, random_rollouts, tokens_of


@pytest.mark.day("3-chunks")
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("ring_size", [1, 2, 3, 4])
def test_layers_on_a_tree(rank_pool: Pool, ring_size: int, name: str) -> None:
    assert not [item.wrong for item in play(name, range(4), rank_pool(ring_size)) if item.wrong]


@pytest.mark.day("2-gpt_oss")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ring_size", [1, 2, 3, 4])
def test_models_on_a_tree(rank_pool: Pool, ring_size: int, name: str) -> None:
    assert not [item.wrong for item in play(name, range(3), rank_pool(ring_size)) if item.wrong]


def _of_the_run_before(runs: Any) -> Callable[..., Any]:
    """Runs of a tree of which each goes on from the one before it, as in one sequence."""

    def wrong(*inputs: Any) -> Any:
        result = runs(*inputs)
        return replace(result, previous=np.arange(len(result.starts)) - 1)

    return wrong


# What is replaced, and by what, on the ranks of the ring.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "windows": (Tree, "narrowed", lambda tree, requested: tree),
    "chunks": (Tree, "_in_chunks", lambda tree, size: replace(tree, window=size)),
    "ALiBi": (AlongPaths, "__call__", lambda self, *inputs: self.score_mod(*inputs)),
    "decay after a convolution": (context, "sequence_runs", _of_the_run_before(context.sequence_runs)),
    "delta rule after a convolution": (halo, "halo_messages", lambda *inputs, of=halo.halo_messages: of(*inputs[:5])),
    "bloom": (RowGroup, "along_paths", lambda group, score_mod: score_mod),
    "mistral": (Tree, "depths", property(lambda tree: np.arange(tree.tokens))),
}  # fmt: skip


def with_a_fault(rank: int, world_size: int, name: str, seeds: Sequence[int]) -> list[tree_rounds.Result]:
    run = tree_rounds.operator_on_ring if name in OPERATORS else tree_rounds.model_on_ring
    with patch.object(*FAULTS[name]):
        return run(rank, world_size, name, seeds)


@pytest.mark.day("chunks")
@pytest.mark.parametrize("name", FAULTS)
def test_a_round_finds_a_fault(rank_pool: Pool, name: str) -> None:
    result = list(play(name, [0, 1], rank_pool(2), with_a_fault))
    assert any("outputs off by" in item.wrong for item in result), result


def fails(rank: int, world_size: int, name: str, seeds: Sequence[int]) -> None:
    raise RuntimeError("seeded")


def test_what_a_rank_raises_is_a_wrong_round(rank_pool: Pool) -> None:
    (result,) = play("attention", [0], rank_pool(2), fails)
    assert "attention, tree 0, 2 ranks: rank 0 raised" in result.wrong and "seeded" in result.wrong


def test_trees_vary_and_cost_less_than_their_rollouts() -> None:
    drawn = [random_rollouts(seed) for seed in range(40)]
    assert {1} < {len(item) for item in drawn} and any(len(x) == 1 for item in drawn for x in item)
    assert any(torch.equal(a, b) for item in drawn for a, b in itertools.pairwise(item))
    trees, rows = tokens_of(1, 3)
    assert all(a < b for a, b in zip(trees, rows, strict=True))


@pytest.mark.night
def test_the_tool_stores_its_rows(tmp_path: Path) -> None:
    tool, file = Path(__file__).parents[4] / "tools/campaign.py", tmp_path / "rows"
    command = [sys.executable, str(tool), "tree", "--rounds", "3", "--rings", "1", "2", "--output", str(file)]
    done = subprocess.run([*command, "--only", "attention", "rwkv"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    results = {row["case"]["of"]: row["results"] for row in rows if row["case"]["part"] == "errors"}
    assert {"attention", "rwkv"} <= results.keys() and len(rows) == len(results) + 4
    assert {(one["rounds"], one["wrong"]) for one in results.values()} == {(3, 0)}
