"""Pulls between ranks on one GPU: refused, unless every rank has the variable of symmetric memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_ring import RingConfigError, RingMesh
from ds_ring.comm.exchange import Exchange
from ds_ring.data.dynamic_ring.intervals import SubRings
from ds_ring.schedule.grid import Grid
from ds_ring.transports.devices import OF_NCCL, OF_SYMMETRIC_MEMORY
from ds_ring.transports.pull import shared_memory
from ds_ring.transports.pull.shared_memory import card_of, share_memory, why_not_together
from tests.fake_cuda import fake_gpu


@pytest.mark.parametrize(
    ("first", "second", "together"), [("0", "0", False), ("1", "0", False), ("1", "1", True)]
)
def test_pulls_between_ranks_on_one_gpu(
    first: str, second: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's symmetric memory refuses them unless each rank has its variable; NCCL's does not count."""
    cards, mesh = [], mock.Mock(spec=RingMesh, ulysses_size=1, describe=lambda rank: f"ring rank {rank}")
    monkeypatch.setenv(OF_NCCL, "1")
    refusals = "ds_ring.transports.pull.shared_memory._why_not"
    with fake_gpu(device_count=1), mock.patch(refusals, return_value=None):
        for value in (first, second):
            monkeypatch.setenv(OF_SYMMETRIC_MEMORY, value)
            cards.append(card_of(torch.device("cuda", 0)))
    why = why_not_together(mesh, cards)
    assert (why is None) == together
    if why is not None:
        assert "ranks on GPUs of different indices" in why and f"or set {OF_SYMMETRIC_MEMORY}=1" in why


def test_smaller_rings_share_no_memory_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs open each other's memory by a process group, which these rings lack; the CPU needs none."""
    monkeypatch.setattr(shared_memory, "card_of", lambda device: {"node": ["a", "a"], "refused": None})
    monkeypatch.setattr(shared_memory, "gather_texts", lambda exchange, text: [text, text])
    monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: rank)
    whole = RingMesh(Grid(3, 3), 0, ring_group="ring")  # type: ignore[arg-type]
    exchange = Exchange(SubRings(whole).of([(0, 2), (2, 1)]))
    with pytest.raises(RingConfigError, match="of dynamic rings, has no process group"):
        share_memory(exchange, 64, torch.device("cuda", 0))
