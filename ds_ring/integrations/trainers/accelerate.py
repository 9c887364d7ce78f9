"""Make Accelerate take the ranks of one sequence for one data replica.

After `ds_ring.enable()` an `Accelerator` counts replicas where it loads samples, gathers results and steps a
scheduler. The engine of ds_ring.integrations.deepspeed shards the batches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import (
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    get_sampler,
)
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import broadcast_object_list, find_batch_size, recursively_apply
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.utils import get_world_size_from_launcher
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler

from ds_ring.config.json_text import SECTION, SP_KEY
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError
from ds_ring.integrations.trainers.adapter import ACCELERATE
from ds_ring.integrations.trainers.transformers import BACKEND, enable_trainer, write_ring_ranks

AUTO = "auto"


def enable_accelerate() -> None:
    """Put every Accelerator that is made from now on a ring."""
    parts = {
        "ring": _start, "backend": _with_gloo, "tensors": _gathered, "objects": _gathered_objects,
        "seeds": _ReplicaState, "parallelism": _with_ring,
    }  # fmt: skip
    ACCELERATE.apply({name: SimpleNamespace(at_enable=part) for name, part in parts.items()})


def _with_ring(check: Callable[[Any], None], parallel: Any) -> None:
    """Take the ranks of `sp_backend="ds_ring"` or `cp_backend="ds_ring"` out of what accelerate checks."""
    features = {}
    for axis in ("sp", "cp"):
        if getattr(parallel, f"{axis}_backend") == BACKEND:
            ranks = getattr(parallel, f"{axis}_size") or 1
            values = {f"{axis}_size": 1, f"{axis}_backend": None, "ranks": ranks}
            features = {f"parallelism.{name}": SimpleNamespace(at_enable=x) for name, x in values.items()}
    ACCELERATE.apply(features, parallel=parallel)
    check(parallel)


def _start(start: Callable[..., None], accelerator: Any, *args: Any, **kwargs: Any) -> None:
    start(accelerator, *args, **kwargs)
    plugin, parallel = getattr(accelerator.state, "deepspeed_plugin", None), accelerator.parallelism_config
    if plugin is not None:
        write_ring_ranks(plugin.deepspeed_config, parallel)
    if plugin is None or not isinstance(plugin.deepspeed_config.get(SECTION), dict):
        raise RingConfigError(
            f'Accelerator: expected DeepSpeed with a "{SECTION}" section, got'
            f" {'no DeepSpeed' if plugin is None else 'none'}: every rank would train by itself; pass"
            " TrainingArguments(deepspeed=...), or Accelerator(deepspeed_plugin="
            "DeepSpeedPlugin(hf_ds_config=...)), or leave out ds_ring.enable()"
        )
    config = plugin.deepspeed_config
    ring = RingConfig.from_deepspeed(config)
    ring.validate_world(accelerator.state.num_processes)
    others = [f"{axis}_size" for axis in ("tp", "cp", "sp") if getattr(parallel, f"{axis}_enabled", False)]
    if others:
        raise RingConfigError(
            f"parallelism_config: expected no {others[0]} beside a ring, got one above 1; leave it out, or"
            f' give sp_size or cp_size the backend "{BACKEND}": the sequence is sharded by ds_ring'
        )
    if accelerator.dispatch_batches:
        raise RingConfigError(
            "dispatch_batches: expected None or false, got true: rank 0 would hand other samples to each rank"
            " of a ring; leave it out, every rank then reads its own"
        )
    # accelerate refuses an "auto" that it does not know. Ours are the defaults.
    config[SECTION] = {key: value for key, value in config[SECTION].items() if value != AUTO}
    # The copy that from_pretrained reads at ZeRO 3 needs a number, too.
    for one in (config, getattr(getattr(plugin, "dschf", None), "config", config)):
        one[SP_KEY] = ring.sequence_parallel_size
    features = {
        "own samples": SimpleNamespace(around_init=False),
        "replicas": SimpleNamespace(around_init=_class_of(type(accelerator))),  # type: ignore[arg-type]
    }
    ACCELERATE.apply(features, accelerator=accelerator)
    if "transformers.trainer" in sys.modules:  # it makes an Accelerator of its own
        enable_trainer()
    if "trl.models.utils" in sys.modules:
        from ds_ring.integrations.trainers.trl import enable_distillation

        enable_distillation()


def _with_gloo(
    choose: Callable[..., tuple[str | None, Any]], state: PartialState, *args: Any, **kwargs: Any
) -> tuple[str | None, Any]:
    # accelerate 1.15 knows DeepSpeed on accelerators only: its ranks on CPUs would each be the only one.
    backend, kind = choose(state, *args, **kwargs)
    on_cpu = get_accelerator().device_name() == "cpu" and get_world_size_from_launcher() > 1
    if backend is None and on_cpu:
        backend = get_accelerator().communication_backend_name()
    return backend, kind


def _sequence_ranks() -> int:
    """Return the number of ranks of a sequence; 1 without an Accelerator on a ring."""
    plugin = AcceleratorState().deepspeed_plugin if AcceleratorState._shared_state else None
    return 1 if plugin is None else int(plugin.deepspeed_config.get(SP_KEY, 1))


def _gathered(gather: Callable[[Any], Any], tensor: Any) -> Any:
    """Gather tensors over the data replicas, each once."""
    ranks = _sequence_ranks()

    def first_of_sequence(gathered: Tensor) -> Tensor:  # [ranks * n, ...] -> [replicas * n, ...]
        by_rank = gathered.unflatten(0, (PartialState().num_processes // ranks, ranks, -1))
        return by_rank[:, 0].flatten(0, 1)

    return recursively_apply(first_of_sequence, gather(tensor), error_on_other_type=True)


def _gathered_objects(gather: Callable[[Any], Any], objects: Any) -> Any:
    """Gather lists over the data replicas, each once."""
    return gather([] if PartialState().process_index % _sequence_ranks() else objects)


class _ReplicaState(AcceleratorState):  # type: ignore[misc]
    """Number the data replicas for `set_seed(device_specific=True)`: ranks of a sequence sample alike."""

    @property
    def process_index(self) -> int:
        return int(self._shared_state["process_index"]) // _sequence_ranks()


@functools.cache
def _class_of(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (_OnARing, kind), {})


class _OnARing(Accelerator):  # type: ignore[misc]
    """Count data replicas where Accelerate counts processes; `state` and `is_main_process` count ranks."""

    @property
    def sequence_ranks(self) -> int:
        """Return the number of ranks of a sequence."""
        return _sequence_ranks()

    @property
    def num_processes(self) -> int:
        """Return the number of data replicas."""
        return int(self.state.num_processes) // self.sequence_ranks

    @property
    def process_index(self) -> int:
        """Return which data replica this rank belongs to."""
        return int(self.state.process_index) // self.sequence_ranks

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader that gives all ranks of a sequence the same samples."""
        sampler = get_sampler(data_loader)
        draws = isinstance(sampler, RandomSampler) and not self.use_seedable_sampler
        if self.num_processes == 1 and draws and sampler.generator is None:
            # With more replicas accelerate keeps their orders equal; one replica has several ranks here.
            seed = broadcast_object_list([int(torch.empty((), dtype=torch.int64).random_().item())])
            order = SimpleNamespace(in_loader=torch.Generator().manual_seed(seed[0]))
            ACCELERATE.apply({"one order": order}, sampler=sampler)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        sampler = get_sampler(prepared)
        if isinstance(sampler, SeedableRandomSampler):  # its seed is what this rank's generator began with
            seed = SimpleNamespace(in_loader=broadcast_object_list([sampler.initial_seed])[0])
            ACCELERATE.apply({"one order.seed": seed}, sampler=sampler)
        if isinstance(prepared, DataLoaderShard) and isinstance(prepared.dataset, IterableDataset):
            _count_last_batch(prepared)
        return prepared

    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        prepared: tuple[Any, ...] = super()._prepare_deepspeed(*args)
        for one in prepared:
            if type(one) is AcceleratedScheduler:
                features = {
                    "number of replicas": SimpleNamespace(at_initialize=self.num_processes),
                    "scheduler": SimpleNamespace(at_initialize=_Scheduler),
                }
                ACCELERATE.apply(features, scheduler=one)
        return prepared

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over the data replicas, each once."""
        if reduction == "sum" and self.state.process_index % self.sequence_ranks:
            tensor = recursively_apply(torch.zeros_like, tensor, error_on_other_type=True)
        return super().reduce(tensor, reduction, scale)


def _count_last_batch(loader: Any) -> None:
    """Let a loader of a stream say how many samples its last batch has, for `gather_for_metrics`."""
    base = loader.base_dataloader
    features = {"last batch": SimpleNamespace(in_loader=_LastBatch(base, loader))}
    if isinstance(base.dataset, IterableDatasetShard):  # one of several replicas
        if base.num_workers:
            return  # they read the samples, and accelerate says that the caller has to know their number
        features["last batch.counted"] = SimpleNamespace(in_loader=_Counted(base.dataset.dataset))
    ACCELERATE.apply(features, loader=loader, shard=base.dataset)


class _LastBatch:
    """Read a stream, and say how many samples its last batch has, as accelerate's dispatcher does."""

    def __init__(self, base: Any, loader: Any) -> None:
        self._base, self._loader = base, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_base"), name)

    def __iter__(self) -> Iterator[Any]:
        batch, shard = None, self._base.dataset
        for batch in self._base:
            yield batch
        samples = find_batch_size(batch)
        if isinstance(shard, IterableDatasetShard):  # fills the last batch of all replicas up
            samples = shard.dataset.number % (shard.batch_size * shard.num_processes)
        found = SimpleNamespace(in_loader=samples or 0)
        ACCELERATE.apply({"last batch.samples": found}, loader=self._loader)


class _Counted:
    """Count the samples of a stream while it is read."""

    def __init__(self, samples: Any) -> None:
        self._samples, self.number = samples, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_samples"), name)

    def __iter__(self) -> Iterator[Any]:
        self.number = 0
        for sample in self._samples:
            self.number += 1
            yield sample


class _Scheduler(AcceleratedScheduler):  # type: ignore[misc]
    """Step once for each data replica, as a script's number of steps expects."""

    replicas: int
    split_batches: bool

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step with the optimizer; accelerate's own counts every rank."""
        once, stays = self.split_batches, not self.gradient_state.sync_gradients
        self.split_batches = True  # one step a call
        for _ in range(1 if once or stays or not self.step_with_optimizer else self.replicas):
            super().step(*args, **kwargs)
        self.split_batches = once
