"""A mesh is used by the process that made it, until it is closed, by one thread at a time; or every rank raises."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ds_ring import (
    Causal,
    RingAttention,
    RingMesh,
    RingMeshError,
    gather_sequence,
    make_layout,
    ring_attention,
    shard_sequence,
)
from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import destroy_dropped_groups
from ds_ring.data.dynamic_ring.intervals import SubRings
from ds_ring.ring.pool import Buffers
from tests.dist.harness import Failure, Pool, catch_failure, run_ranks
from tests.dist.test_wrong_inputs import attend, error_of_a_correct_pass, right_arguments


def after_close(rank: int, world_size: int) -> dict[str, tuple[str, str, float]]:
    mesh = RingMesh.from_world(world_size)
    arguments = right_arguments(mesh)
    q, layout = arguments["q"].requires_grad_(), arguments["layout"]
    out, whole = attend(arguments), gather_sequence(q, layout, mesh=mesh, dim=2)
    module = RingAttention(Causal(), mesh=mesh, layout=layout)
    rest, buffers = (arguments["k"], arguments["v"]), mesh.owners[Buffers]
    mesh.close()
    assert not mesh.owners and not buffers.held_bytes
    mesh.close()  # is nothing new
    acts: dict[str, Callable[[], object]] = {
        "attention": lambda: attend(arguments),
        "backward": lambda: out.sum().backward(),
        "gather": lambda: gather_sequence(q, layout, mesh=mesh, dim=2),
        "gather's gradient": lambda: whole.sum().backward(),
        "shard": lambda: shard_sequence(whole, layout, mesh=mesh, dim=2),
        "module": lambda: module(q, *rest),
        "a new module": lambda: RingAttention(Causal(), mesh=mesh),
        "replicated queries": lambda: attend(arguments | {"queries": "replicated"}),
    }
    return {name: catch_failure(act) for name, act in acts.items()}


@pytest.mark.situation("mesh", "a closed mesh is used")
@pytest.mark.parametrize("ring_size", [1, 2])
def test_a_closed_mesh_raises_at_every_later_use(rank_pool: Pool, ring_size: int) -> None:
    for result in rank_pool(ring_size).run(after_close):
        for name, (error, _, text, seconds) in result.items():
            assert error == "RingMeshError" and "mesh.close()" in text and "from_world" in text, (name, text)
            assert seconds < 1, (name, seconds)


def _in_child(act: Callable[[], object], pipe: Any) -> None:
    pipe.send(catch_failure(act))
    os._exit(0)


def after_fork(rank: int, world_size: int) -> tuple[list[Failure], float]:
    """Children of a fork attend and gather; then this process goes on."""
    mesh, result = RingMesh.from_world(world_size), []
    arguments = right_arguments(mesh)
    attend(arguments)
    acts = (
        lambda: attend(arguments),
        lambda: gather_sequence(arguments["q"], arguments["layout"], mesh=mesh, dim=2),
    )
    for act in acts:
        ours, theirs = multiprocessing.Pipe()
        child = os.fork()
        if not child:
            _in_child(act, theirs)
        result.append(ours.recv() if ours.poll(20) else Failure("hung", (), "", 20.0))
        os.waitpid(child, 0)
    return result, error_of_a_correct_pass(mesh)


@pytest.mark.situation("mesh", "a forked child uses its parent's mesh")
@pytest.mark.parametrize("ring_size", [1, 2])
def test_a_forked_child_cannot_use_the_mesh_of_its_parent(rank_pool: Pool, ring_size: int) -> None:
    for result, afterwards in rank_pool(ring_size).run(after_fork):
        for error, _, text, seconds in result:
            assert error == "RingMeshError" and "before it forked" in text and seconds < 1, (text, seconds)
        assert afterwards < 1e-5


def two_threads(rank: int, world_size: int) -> tuple[list[Failure], float]:
    """Two threads attend in a loop on one mesh until each has raised, at most ten seconds."""
    mesh = RingMesh.from_world(world_size)
    arguments = right_arguments(mesh)
    started, result = time.perf_counter(), []

    def loop() -> None:
        def act() -> None:
            while time.perf_counter() < started + 10:
                attend(arguments)

        result.append(catch_failure(act))

    threads = [threading.Thread(target=loop, name=f"loop {number}") for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result, time.perf_counter() - started


@pytest.mark.situation("mesh", "two threads use one mesh")
def test_one_mesh_in_two_threads_raises_on_every_rank(rank_pool: Pool) -> None:
    """Both threads of both ranks end with a typed error that says why; nobody waits."""
    for result, seconds in rank_pool(2).run(two_threads):
        assert {failure.error for failure in result} <= {
            "RingMeshError",
            "RingPeerError",
            "RingMismatchError",
        }
        assert len(result) == 2 and seconds < 9, (result, seconds)
        assert any("one thread at a time" in failure.text for failure in result), result


def allowed(rank: int, world_size: int) -> float:
    """Gradient checkpointing of both kinds, a backward pass in another thread, and two meshes in two threads."""
    meshes = [RingMesh.from_world(world_size) for _ in range(2)]
    errors: list[float] = []
    for reentrant in (True, False):
        arguments = right_arguments(meshes[0])
        q = arguments["q"].requires_grad_()
        attend_on = lambda x, inputs=arguments: attend(inputs | {"q": x})  # noqa: E731
        out = checkpoint(attend_on, q, use_reentrant=reentrant)
        out.sum().backward()
        wanted = q.grad
        q.grad = None
        backward = threading.Thread(target=attend(arguments).sum().backward)
        backward.start()
        backward.join()
        errors.append(float((q.grad - wanted).abs().max()))
    threads = [
        threading.Thread(target=lambda mesh=mesh: errors.append(error_of_a_correct_pass(mesh)))
        for mesh in meshes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    return max(errors)


def test_what_is_one_thread_after_another_goes_on(rank_pool: Pool) -> None:
    assert max(rank_pool(2).run(allowed)) < 1e-5


def test_two_threads_on_a_mesh_of_one_rank() -> None:
    """The second one raises at once, whatever the first one does; the first goes on."""
    mesh, layout = RingMesh.single(), make_layout("contiguous", tokens=8, ring_size=1)
    q = torch.randn(1, 2, 8, 4)
    result = []
    with collective(mesh, "a call"):
        second = threading.Thread(
            target=lambda: result.append(
                catch_failure(lambda: ring_attention(q, q, q, pattern=Causal(), layout=layout, mesh=mesh))
            )
        )
        second.start()
        second.join()
        ring_attention(q, q, q, pattern=Causal(), layout=layout, mesh=mesh)
    assert [failure.error for failure in result] == ["RingMeshError"]
    assert "one thread at a time" in result[0].text
    mesh.close()
    with pytest.raises(RingMeshError, match=r"mesh\.close"):
        ring_attention(q, q, q, pattern=Causal(), layout=layout, mesh=mesh)


def resources_of(rank: int, world_size: int, how: str, meshes: int) -> list[tuple[int, int, int]]:
    """Descriptors, threads and process groups before, after 3 meshes and after all; a pass at the end is right."""
    process, result = psutil.Process(), []

    def count() -> None:
        gc.collect()
        result.append((process.num_fds(), process.num_threads(), len(dist.distributed_c10d._world.pg_map)))

    count()
    for number in range(meshes):
        mesh: RingMesh | None = RingMesh.from_world(2, ulysses_size=2)
        attend(right_arguments(mesh))
        if how == "closed" and (number % 3 or rank):  # rank 0 leaves some to the garbage collection
            mesh.close()
        elif how == "closed at other times" and rank:
            time.sleep(0.02 * rank)
            mesh.close()
        mesh = None
        if number == 2:
            count()
    gc.collect()
    destroy_dropped_groups()
    deadline = time.monotonic() + 10  # threads of watches and of gloo end in their own time
    while process.num_threads() > result[0][1] + 8 and time.monotonic() < deadline:
        time.sleep(0.1)
    count()
    mesh = RingMesh.from_world(2, ulysses_size=2)
    attend(right_arguments(mesh))
    mesh.close()
    return result


@pytest.mark.day("dropped")
@pytest.mark.situation("mesh", "many meshes are made and dropped")
@pytest.mark.parametrize("how", ["closed", "dropped", "closed at other times"])
def test_meshes_that_are_closed_or_dropped_leave_nothing_behind(how: str) -> None:
    """25 of them took descriptors from 10 to 265, threads from 4 to 156, groups from 1 to 51."""
    for start, early, end in run_ranks(resources_of, 4, how, 8):
        assert end[2] == start[2], "process groups"
        assert end[1] <= start[1] + 8 and end[0] <= start[0] + 8, (start, early, end)
        assert early[0] < start[0] + 100, "the groups of a dropped mesh go when the next one is made"


def with_smaller_rings(rank: int, world_size: int) -> tuple[int, int]:
    before = len(dist.distributed_c10d._world.pg_map)
    mesh = RingMesh.from_world(world_size)
    built = len(dist.distributed_c10d._world.pg_map)
    rings = SubRings(mesh)
    for first in range(world_size):
        for ranks in range(1, world_size - first + 1):
            item = rings.get_ring([(first, ranks)])
            assert item.ring_size == (ranks if first <= rank < first + ranks else world_size)
    assert len(dist.distributed_c10d._world.pg_map) == built > before, "no group is made for a smaller ring"
    dist.barrier()  # another rank may still connect its groups: a rank that closes then has left
    mesh.close()
    with pytest.raises(RingMeshError, match=r"mesh\.close"):
        attend(right_arguments(rings.get_ring([(0, world_size)])))
    return before, len(dist.distributed_c10d._world.pg_map)


def test_closing_a_mesh_destroys_the_groups_and_closes_its_smaller_rings(rank_pool: Pool) -> None:
    for before, after in rank_pool(4).run(with_smaller_rings):
        assert before == after


def after_another_world(rank: int, world_size: int, folder: str) -> bool:
    """A mesh is dropped, and its world ends before the next one is made."""
    group = RingMesh.from_world(world_size).ring_group
    gc.collect()
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    mesh = RingMesh.from_world(world_size)
    stored = RingMesh.from_world(world_size)
    dist.destroy_process_group()
    mesh.close()
    stored.close()
    return group is not None


def test_a_mesh_whose_world_has_ended_is_closed_all_the_same(tmp_path: Path) -> None:
    assert all(run_ranks(after_another_world, 2, str(tmp_path)))
