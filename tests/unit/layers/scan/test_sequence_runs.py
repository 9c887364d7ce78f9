"""Layouts of blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ds_ring import Tree, make_layout
from ds_ring.layers.scan.scan import gradient_messages
from ds_ring.layers.scan.sequence_runs import sequence_runs


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_runs_of_parts_hold_each_token_once(name: str, parts: int) -> None:
    """Parts of a shard may cut a run of it, or hold several."""
    layout = make_layout(name, tokens=90, ring_size=3, multiple_of=4)
    runs, slots = sequence_runs(layout, parts), layout.part_slots(parts)
    found = np.full((3 * parts, slots), -1)
    for start, length, rank, slot in zip(runs.starts, runs.lengths, runs.ranks, runs.slots, strict=True):
        assert slot + length <= slots and (found[rank, slot : slot + length] == -1).all()
        found[rank, slot : slot + length] = np.arange(start, start + length)
    np.testing.assert_array_equal(found.reshape(3, -1), [layout.positions(rank) for rank in range(3)])


def test_gradients_of_states_go_back_along_the_paths_of_a_tree() -> None:
    """Of matrices that do not commute: the products of a layer's own soon have one direction."""
    tree = Tree((-1, 0, 1, 0), (3, 2, 4, 3), 12)
    runs = sequence_runs(make_layout("contiguous", tokens=12, ring_size=1), 1, tree)
    torch.manual_seed(0)
    moves, weights, increments = (torch.randn(4, 1, 3, 3, dtype=torch.float64) for _ in range(3))
    increments.requires_grad_()
    states = [torch.zeros_like(increments[0])]
    for before in runs.previous.tolist()[1:]:
        states.append(moves[before] @ states[before] + increments[before])
    (expected,) = torch.autograd.grad((torch.stack(states) * weights).sum(), increments)
    results = list[torch.Tensor]()

    def keep_result() -> Iterator[object]:
        results.append((yield from gradient_messages(runs, 0, moves, weights, True)))

    assert list(keep_result()), "a shift and rounds, without a message to another rank"
    torch.testing.assert_close(results[0], expected)
