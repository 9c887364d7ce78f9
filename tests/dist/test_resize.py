"""One training on 2, then 4 ranks, then 1: the losses of the run that was never interrupted."""

from __future__ import annotations

import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ds_ring.checkpoint.resize import resize_checkpoint
from ds_ring_launcher.cli import main
from tests.dist.checkpoint_ranks import SIZE, load_refused, start_engine
from tests.dist.deepspeed_ranks import VOCABULARY, json_config

STEPS = 6


class Samples(Dataset[dict[str, Tensor]]):
    """Nine samples: an epoch ends in mid run, and its last batch is short."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(1, VOCABULARY, (SIZE.tokens,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def train_on(
    rank: int, world_size: int, config: dict[str, Any], folder: str, steps: int, resumes: bool
) -> list[float]:
    """Go on from the newest checkpoint of whatever size to step `steps`, and save there."""
    engine = start_engine(config)
    loader = engine.ring.loader(Samples(), config["train_micro_batch_size_per_gpu"], shuffle=True)
    if resumes:
        path, state = engine.load_checkpoint(folder)
        assert path is not None
        loader.load_state_dict(state["loader"])
    losses = []
    while engine.global_steps < steps:
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(engine.ring.mean_loss(loss)))
            if engine.global_steps == steps:
                break
    engine.save_checkpoint(folder, client_state={"loader": loader.state_dict()})
    return losses


def config_for(world: int, ring: int, stage: int) -> dict[str, Any]:
    """Two samples a step, whatever the size."""
    return json_config(ring, SIZE.samples * ring // world, stage)


@pytest.mark.night
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_then_four_then_one(rank_pool, tmp_path, capsys, stage):
    whole, part = tmp_path / "whole", tmp_path / "part"
    expected = rank_pool(2).run(train_on, config_for(2, 2, stage), str(whole), STEPS, False)[0]
    losses, before = [], {}
    for number, (world, ring) in enumerate([(2, 2), (4, 2), (1, 1)]):
        if number:
            part = Path(
                shutil.copytree(part, tmp_path / f"for {world}")
            )  # the pool's ranks lock the other one
            tag = (part / "latest").read_text()
            before = {path: path.read_bytes() for path in (part / tag).iterdir() if path.is_file()}
            sizes = ["--world-size", str(world), "--ring-size", str(ring)]
            assert main(["resize-checkpoint", str(part), *sizes, "--json"]) == 0
            told = json.loads(capsys.readouterr().out)
            assert told == {
                "tag": f"{tag}-universal",
                "sequence_parallel_size": ring,
                "samples_per_replica": SIZE.samples * ring // world,
            }
            assert (part / "latest").read_text() == told["tag"]
        config = config_for(world, ring, stage)
        arguments = (config, str(part), 2 * (number + 1), number > 0)
        losses += rank_pool(world).run(train_on, *arguments, timeout_s=120)[0]
        assert all(path.read_bytes() == data for path, data in before.items()), "the source was changed"
    assert losses == pytest.approx(expected, rel=1e-5)


def flip_a_bit(folder: Path) -> None:
    path = next((folder / "global_step2").glob("*optim_states.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def fill_the_disk(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))


# What is done to the folder, the arguments, the exit status, and the sentence.
REFUSED = {
    "damage": (flip_a_bit, ["--world-size", "4"], 1, r"optim_states.pt: expected sha256"),
    "a full disk": (fill_the_disk, ["--world-size", "4"], 1, r"not converted: .*(cannot convert|be written)"),
    "no such tag": (None, ["--world-size", "4", "--tag", "best"], 3, r"global_step2 is there"),
    "ring": (None, ["--world-size", "4", "--ring-size", "3"], 2, r"a divisor of --world-size 4, got 3"),
    "samples": (None, ["--world-size", "3", "--ring-size", "1"], 2, r"divide 2 samples.* got 3"),
}


@pytest.mark.night
def test_what_cannot_be_converted_stays_as_it_is(rank_pool, tmp_path, capsys):
    """And a checkpoint of another number of ranks is refused on every rank, with the command to use."""
    saved, limits = tmp_path / "saved", resource.getrlimit(resource.RLIMIT_FSIZE)
    rank_pool(2).run(train_on, config_for(2, 2, 1), str(saved), 2, False)
    for what, (spoil, arguments, status, sentence) in REFUSED.items():
        folder = Path(shutil.copytree(saved, tmp_path / what))
        try:
            if spoil is not None:
                spoil(folder)
            before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
            assert main(["resize-checkpoint", str(folder), *arguments]) == status, what
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert re.search(sentence, capsys.readouterr().err), what
        assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before, what
        assert (folder / "latest").read_text() == "global_step2"

    for result in rank_pool(4).run(load_refused, config_for(4, 4, 1), str(saved), [None] * 4):
        assert result.error == "RingCheckpointError"
        assert "of 4 ranks, got one of 2; convert it with `ds-ring resize" in result.text
    folder = Path(shutil.copytree(saved, tmp_path / "universal"))
    resize_checkpoint(folder)
    assert main(["resize-checkpoint", str(folder), "--world-size", "4"]) == 1
    assert "got a universal one; any number of ranks loads it" in capsys.readouterr().err
    for result in rank_pool(2).run(load_refused, config_for(2, 2, 3), str(folder), [None] * 2):
        assert result.error == "RingCheckpointError"
        assert "expected a universal checkpoint of ZeRO 3, got one of ZeRO 1" in result.text
