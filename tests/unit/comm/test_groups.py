"""How groups are asked for and first used: options of NCCL by a stand-in, the first calls on gloo's ranks."""

from __future__ import annotations

import datetime
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_ring.comm import groups as process_groups
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingMeshError
from ds_ring.schedule.grid import Grid
from tests.fake_cuda import fake_gpu

TIMEOUT = datetime.timedelta(seconds=100)


class Options:
    """ProcessGroupNCCL.Options as far as it is used."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, None
        self.config = SimpleNamespace(cga_cluster_size=4)


def test_ring_and_ulysses_ask_nccl_for_urgent_streams_and_every_communicator_is_warmed_up_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 ranks, this one is rank 5: two data replicas, rings of 2, two Ulysses ranks."""
    asked: list[tuple[tuple[int, ...], dict[str, Any]]] = []
    calls: list[Any] = []
    nccl = {"backend": "nccl"}

    def new_group(ranks: list[int], **keywords: Any) -> tuple[int, ...]:
        asked.append((tuple(ranks), keywords))
        return (*ranks, len(asked))

    for name, stand_in in {
        "new_group": new_group,
        "get_rank": lambda group=None: 5 if group is None else group[:-1].index(5),
        "get_world_size": lambda group=None: 8 if group is None else len(group) - 1,
        "get_backend": lambda group=None: nccl["backend"],
        "get_backend_config": lambda group=None: f"cpu:gloo,cuda:{nccl['backend']}",
        "all_gather_object": lambda grids, grid, group: grids.__setitem__(slice(None), [grid] * 8),
        "all_reduce": lambda x, group: calls.append(group),
        "all_to_all_single": lambda got, sent, *counts, group: calls.append((group, *counts)),
        "ProcessGroupNCCL": SimpleNamespace(Options=Options),
    }.items():
        monkeypatch.setattr(dist, name, stand_in, raising=False)
    monkeypatch.setattr(torch, "ones", lambda *shape, device, dtype: torch.zeros(*shape))
    with fake_gpu(current_device=3, synchronize=lambda device: calls.append(("host waits", device))):
        made: Any = process_groups.make_groups(Grid(8, 2, 2), TIMEOUT)
    urgent = [keywords.get("pg_options") for _, keywords in asked]
    by_kind = {"sequence": urgent[:2], "ring": urgent[2:6], "ulysses": urgent[6:10], "data": urgent[10:14]}
    for kind, options in by_kind.items():
        for one in options:
            if kind in ("ring", "ulysses"):
                assert one.is_high_priority_stream and one._timeout == TIMEOUT
                assert one.config.cga_cluster_size == 1
            else:
                assert one is None
    used = [one for options in by_kind.values() for one in options if one is not None]
    assert len({id(one) for one in used}) == len(used), "torch writes the group's ranks into its options"
    assert [keywords["backend"] for _, keywords in asked[14:]] == ["gloo"] * 2
    groups = (made.sequence_group, made.ring_group, made.ulysses_group, made.data_group)
    assert [call for call in calls if call in groups] == list(groups)
    assert calls[-1] == ("host waits", torch.device("cuda", 3)), "works under way are not over"
    # The neighbours of rank 1 of 4 are ranks 0 and 2; two ranks are one neighbour to each other.
    assert (made.sequence_group, [1, 0, 1, 0], [1, 0, 1, 0]) in calls
    assert made.ring_group[:-1] == (5, 7) and (made.ring_group, [0, 1], [0, 1]) in calls
    asked.clear()
    calls.clear()
    nccl["backend"] = "gloo"
    process_groups.make_groups(Grid(8, 2, 2), TIMEOUT)
    assert all("pg_options" not in keywords for _, keywords in asked) and not calls


def test_torch_makes_no_barrier_for_a_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """At 1024 ranks one barrier a group would be minutes; ranks meet in their first calls instead."""
    from torch.distributed import distributed_c10d

    barriers: list[Any] = []
    monkeypatch.setattr(distributed_c10d, "_store_based_barrier", lambda *a: barriers.append(a))
    dist.init_process_group("fake", store=_fake_store(), rank=0, world_size=16)
    try:
        before = len(barriers)
        process_groups.make_groups(Grid(16, 4, 2), TIMEOUT)
    finally:
        dist.destroy_process_group()
    assert len(barriers) == before


def test_groups_out_of_order_are_refused_where_torch_would_sort_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of torch before 2.13 have no `sort_ranks`."""
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout=None, backend=None: None)
    monkeypatch.setattr(dist, "get_backend", lambda: "fake")
    with pytest.raises(RingMeshError, match=r"expected groups in the order of the world .*, got \[3, 1\]"):
        process_groups.make_groups(Grid.from_groups(4, [[3, 1], [2, 0]], 1), TIMEOUT)


@pytest.mark.parametrize("seconds", [0, -1.0, True, "10", None, float("nan"), float("inf"), 2e8, 10**400])
def test_what_is_no_number_of_seconds_is_refused(seconds: object) -> None:
    with pytest.raises(RingMeshError, match="timeout_s: expected seconds above 0, at most 1e"):
        process_groups.check_seconds(seconds, "timeout_s")


def _fake_store() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def test_a_mesh_has_few_fields() -> None:
    """What calls and caches need has owners of its own (`Owners`)."""
    assert len(fields(RingMesh)) <= 12


def test_a_mesh_prints_its_sizes_and_its_rank() -> None:
    """(It printed addresses of process groups.)"""
    assert str(RingMesh(Grid(8, 2, 2), 7)) == (
        "ring 2 x Ulysses 2 x data 2; rank 7 of 8: ring rank 1, Ulysses rank 1, data rank 1"
    )
