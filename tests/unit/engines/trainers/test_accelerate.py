"""What accelerate and Trainer count by replicas, on one rank: scheduler steps, last batches, batch sizes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard, IterableDatasetShard
from torch.utils.data import IterableDataset
from transformers import Trainer

from ds_ring.engines.trainers import accelerate, transformers


@pytest.mark.parametrize(
    ("changes", "syncs", "steps"),
    [
        ({}, True, 3),
        ({"split_batches": True}, True, 1),
        ({"step_with_optimizer": False}, True, 1),
        ({}, False, 0),
    ],
)
def test_a_scheduler_steps_once_for_each_replica(changes: dict[str, bool], syncs: bool, steps: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    scheduler = accelerate._Scheduler(schedule, SimpleNamespace(step_was_skipped=False), **changes)
    scheduler.replicas = 3
    optimizer.step()
    before = scheduler.gradient_state.sync_gradients
    scheduler.gradient_state._set_sync_gradients(syncs)
    try:
        scheduler.step()
    finally:
        scheduler.gradient_state._set_sync_gradients(before)
    assert schedule.last_epoch == steps and scheduler.split_batches == changes.get("split_batches", False)


class Stream(IterableDataset[int]):
    """Seven samples."""

    source = "a file"

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("replicas", "remainder"), [(1, 1), (2, 3)])
def test_a_stream_says_how_many_samples_its_last_batch_has(
    replicas: int, remainder: int, workers: int
) -> None:
    """Of all replicas; their workers read the samples, and the caller must know the number."""
    samples: Any = Stream()
    if replicas > 1:
        samples = IterableDatasetShard(Stream(), batch_size=2, num_processes=replicas)
    loader: Any = DataLoaderShard(samples, batch_size=2, num_workers=workers)
    before = loader.base_dataloader
    accelerate._count_last_batch(loader)
    if replicas > 1 and workers:
        assert loader.base_dataloader is before
        return
    assert loader.base_dataloader.num_workers == workers and loader.remainder == -1
    if not workers:
        batches = [batch.tolist() for batch in loader.base_dataloader]
        assert batches[0] == [0, 1] and loader.remainder == remainder
        counted = loader.base_dataloader.dataset
        assert (counted if replicas == 1 else counted.dataset).source == "a file"


class Arguments:
    """Arguments of TRL, which work out `generation_batch_size`."""

    world_size, generation_batch_size = 8, None


def test_the_next_read_of_the_world_is_the_number_of_replicas() -> None:
    args = Arguments()
    transformers._count_replicas(args, 4)
    assert [args.world_size, args.world_size] == [2, 8] and type(args) is Arguments


class Evaluated(Trainer):
    """A trainer whose loss comes with outputs, as `prediction_step` asks for it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def compute_loss(self, *_: Any, **__: Any) -> Any:
        return torch.ones(()), {"logits": torch.ones(3)}


def evaluate(trainer: Any, model: Any, inputs: Any, prediction_loss_only: bool) -> None:
    trainer.seen.append(trainer.compute_loss(model, inputs, return_outputs=True)[1])


def test_an_evaluation_that_reads_the_loss_alone_gets_no_outputs() -> None:
    trainer = Evaluated()
    for alone in (True, False):
        transformers._reading_the_loss(evaluate, trainer, None, None, alone)
    assert trainer.seen[0] == {} and list(trainer.seen[1]) == ["logits"]


def test_a_batch_size_of_all_ranks_stays_out_of_trainers_product() -> None:
    """Trainer would multiply by all ranks; the number that the JSON has comes back."""
    config = {"train_batch_size": 6, "sequence_parallel_size": 2, "ring_attention": {}}
    json, seen = SimpleNamespace(config=config), list[Any]()
    transformers._without_product(lambda *_: seen.append(dict(json.config)), json, SimpleNamespace())
    assert seen == [{"sequence_parallel_size": 2, "ring_attention": {}}]
    assert json.config["train_batch_size"] == 6
