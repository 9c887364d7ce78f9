"""The GPU of a rank where one is chosen: its own, a shared one if the user allows it, or an error."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ring import RingConfigError
from ds_ring.engines.deepspeed import initialize
from ds_ring.transports.devices import SHARE, claim_device, select_gpu
from ds_ring_launcher.run.local_ranks import RanksError, run_ranks
from ds_ring_launcher.tune.__main__ import main as tune
from tests.fake_cuda import fake_gpu

REFUSED = (
    r"local rank {}: expected at least {} GPUs, got {}; start fewer ranks, or share: set NCCL_MULTI_RANK"
)


@pytest.fixture(autouse=True)
def _nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARE, raising=False)


def test_a_rank_shares_a_gpu_only_if_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [select_gpu(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    for value in ("", "0", "true"):
        monkeypatch.setenv(SHARE, value)
        with pytest.raises(RingConfigError, match=REFUSED.format(4, 5, 4)):
            select_gpu(4, 4)
    monkeypatch.setenv(SHARE, "1")
    assert [select_gpu(rank, 2) for rank in range(5)] == [0, 1, 0, 1, 0]
    with pytest.raises(RingConfigError, match=REFUSED.format(0, 1, 0)):
        select_gpu(0, 0)


def test_deepspeed_takes_the_gpu_that_a_rank_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed has three places that take LOCAL_RANK for the index of a GPU."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    accelerator = SimpleNamespace(device_name=lambda index=None: "cuda")
    monkeypatch.setattr(initialize, "get_accelerator", lambda: accelerator)
    with fake_gpu(device_count=2):
        with pytest.raises(RingConfigError, match=REFUSED.format(3, 4, 2)):
            initialize.init_distributed()
        monkeypatch.setenv(SHARE, "1")
        initialize._claim_gpu()
        assert os.environ["LOCAL_RANK"] == "1"
        monkeypatch.delenv("LOCAL_RANK")
        claim_device(2)  # MPI's ranks have none yet
        assert "LOCAL_RANK" not in os.environ


def nothing(options: Any) -> None:
    """What ranks do that get no GPU."""


@pytest.mark.night
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_ranks_of_the_launcher_without_a_gpu_are_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksError, match=r"rank \d: " + REFUSED.format(r"\d", r"\d", 0)):
        run_ranks(nothing, 1, (SimpleNamespace(device="cuda"),), threads=1, deadline_s=120)
    assert tune(["--device", "cuda", "--tokens", "64", "--heads", "1", "--head-dim", "8"]) == 2
    assert "tune: error: local rank 0: expected at least 1 GPUs, got 0" in capsys.readouterr().err
