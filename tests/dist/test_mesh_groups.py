"""Rings of ranks that are no neighbours in the world: from lists of ranks, and from a DeviceMesh."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from ds_ring import Causal, RingMesh, RingMeshError, make_layout, ring_attention
from ds_ring.cuda.warm_up import connect
from tests.cases import Shape, tensors
from tests.dist.harness import Pool, catch_refusal
from tests.parity import errors, gathered_pass
from tests.reference import dense_attention

SHAPE = Shape(batch=1, query_heads=4, kv_heads=2, tokens=61)


def made(how: str) -> RingMesh:
    if how == "sorted":
        return RingMesh.from_groups([[0, 2], [1, 3]])
    if how == "unsorted":
        return RingMesh.from_groups([[3, 1], [2, 0]])
    if how == "one ring, unsorted":
        return RingMesh.from_groups([[2, 0, 3, 1]])
    if how == "Ulysses":
        return RingMesh.from_groups([[1, 3, 0, 2]], ulysses_size=2)
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    return RingMesh.from_device_mesh(
        devices, "cp" if how == "device mesh" else "dp", "cp" if "and" in how else None
    )


# The sequences of each, ranks in order of ring_rank * ulysses_size + ulysses_rank.
SEQUENCES = {
    "sorted": [[0, 2], [1, 3]],
    "unsorted": [[3, 1], [2, 0]],
    "one ring, unsorted": [[2, 0, 3, 1]],
    "Ulysses": [[1, 3, 0, 2]],
    "device mesh": [[0, 2], [1, 3]],
    "device mesh and Ulysses": [[0, 2, 1, 3]],  # dp is the ring, cp the Ulysses ranks
}


def on_a_mesh(rank: int, world_size: int, how: str) -> tuple[list[int], float]:
    """The ranks of this rank's sequence as the mesh numbers them, and the error of output and gradients."""
    mesh = made(how)
    members = [mesh.global_rank_in_sequence(place) for place in range(mesh.sequence_size)]
    assert members[mesh.sequence_rank] == rank
    pattern = Causal()
    layout = make_layout(
        "zigzag", tokens=SHAPE.tokens, ring_size=mesh.ring_size, multiple_of=mesh.ulysses_size
    )
    whole = tensors(SHAPE, seed=mesh.data_rank)  # every sequence is another one
    call = partial(ring_attention, pattern=pattern, layout=layout, mesh=mesh)
    result = gathered_pass(call, whole, layout, mesh)
    return members, max(errors(result, dense_attention(*whole, pattern)).values())


@pytest.mark.parametrize("how", SEQUENCES)
@pytest.mark.day("sorted", "unsorted", "Ulysses", "device mesh and Ulysses")
def test_attention_is_exact_on_groups_of_any_order(rank_pool: Pool, how: str) -> None:
    for rank, (members, error) in enumerate(rank_pool(4).run(on_a_mesh, how)):
        assert rank in members and members in SEQUENCES[how]
        assert error < 1e-5


WRONG: dict[str, tuple[Callable[[int], Any], str]] = {
    "a rank twice": (lambda rank: RingMesh.from_groups([[0, 1], [1, 3]]), "every rank of a world of 4 once"),
    "a rank is missing": (lambda rank: RingMesh.from_groups([[0, 1]]),
        "does not divide|every rank of a world"),
    "other lengths": (lambda rank: RingMesh.from_groups([[0, 1, 2], [3]]), "groups of one length"),
    "Ulysses does not divide": (lambda rank: RingMesh.from_groups([[0, 1], [2, 3]], 3),
        "multiple of ulysses_size 3"),
    "no ranks": (lambda rank: RingMesh.from_groups([["a", "b"], ["c", "d"]]), "lists of ranks"),
    "not lists": (lambda rank: RingMesh.from_groups(4), "lists of ranks"),
    "no dimension": (
        lambda rank: RingMesh.from_device_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), "cp"),
        "with the dimensions",
    ),
    "no DeviceMesh": (lambda rank: RingMesh.from_device_mesh([0, 1, 2, 3], "cp"), "expected a DeviceMesh"),
    "ranks differ": (lambda rank: RingMesh.from_groups([[0, 1], [2, 3]] if rank else [[0, 2], [1, 3]]),
        "expected the same groups on all ranks, got ring_size 2"),
    "sizes differ": (lambda rank: RingMesh.from_world(4 if rank == 3 else 2),
        "got ring_size 2, ulysses_size 1 on rank 0 and ring_size 4, ulysses_size 1 on rank 3"),
}  # fmt: skip


def refused(rank: int, world_size: int, what: str) -> str:
    return catch_refusal(WRONG[what][0], rank)


@pytest.mark.parametrize("what", WRONG)
def test_what_makes_no_mesh_is_refused_on_every_rank(rank_pool: Pool, what: str) -> None:
    for text in rank_pool(4).run(refused, what):
        assert text.startswith("RingMismatchError" if "differ" in what else "RingMeshError"), text
        assert re.search(WRONG[what][1], text), text


def test_without_a_process_group_the_caller_is_named() -> None:
    assert not torch.distributed.is_initialized()
    with pytest.raises(RingMeshError, match=r"RingMesh.from_groups: expected a process group"):
        RingMesh.from_groups([[0, 1]])


def on_the_first_calls(rank: int, world_size: int) -> int:
    mesh = RingMesh.from_world(world_size)
    for group in (mesh.ring_group, mesh.sequence_group):
        assert group is not None
        connect(group, torch.device("cpu"))
    return rank


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_first_calls_of_a_communicator_meet_on_all_ranks(rank_pool: Pool, world_size: int) -> None:
    """What NCCL's groups do before the first deadline, in gloo's: a collective, and both neighbours."""
    assert rank_pool(world_size).run(on_the_first_calls) == list(range(world_size))
