"""The job's secret: the launcher's stays out of the store, and ranks that do not share one are refused."""

from __future__ import annotations

import json

import torch.distributed as dist

from ds_ring import RingError, RingMesh
from tests.dist.harness import run_ranks_collect

SECRETS = {
    "the same": ("s" * 32, "s" * 32),
    "none": (None, None),
    "different": ("s" * 32, "t" * 32),
    "too short": ("s" * 15, "s" * 15),
}


def join(
    rank: int, world_size: int, secrets: tuple[str | None, ...], number: int
) -> tuple[str, str, str | None]:
    """The error of making a mesh, its text, and the secret that stands in the store."""
    try:
        mesh = RingMesh.from_world(world_size, secret=secrets[rank], heartbeat_timeout_s=2.0)
    except RingError as error:
        return type(error).__name__, str(error), None
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    address = json.loads(store.get(f"ds_ring/detector/{number}/monitor"))
    dist.barrier()
    mesh.close()
    return "", "", address[2]


def test_the_launchers_secret_is_not_in_the_store_and_one_of_rank_0_is(rank_pool) -> None:
    assert rank_pool(2).run(join, SECRETS["the same"], 1) == [("", "", None)] * 2
    published = rank_pool(2).run(join, SECRETS["none"], 2)
    assert all(error == "" and secret is not None and len(secret) == 64 for error, _, secret in published)


def test_ranks_that_do_not_share_a_secret_do_not_meet() -> None:
    """One on some ranks alone: tests/unit/health/test_joining.py."""
    outcomes = run_ranks_collect(join, 2, SECRETS["different"], 0, timeout_s=60)
    assert [item.status for item in outcomes] == ["returned"] * 2, outcomes
    zero, item = (outcome.value for outcome in outcomes)
    assert item[0] == "RingMeshError" and "secret" in item[1], item
    assert zero[0] == "RingPeerError" and "did not join" in zero[1], zero


def test_a_secret_that_could_be_guessed_is_refused(rank_pool) -> None:
    for error, text, _ in rank_pool(2).run(join, SECRETS["too short"], 0):
        assert error == "RingConfigError" and "at least 16 characters, got 15" in text
