"""Make Accelerate take the ranks of one sequence for one data replica.

After `ds_ring.enable()` an `Accelerator` counts replicas where it loads samples, gathers results and steps a
scheduler. The engine of ds_ring.engines.deepspeed shards the batches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
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
from ds_ring.engines.trainers.transformers import BACKEND, enable_trainer, write_ring_ranks
from ds_ring.errors import RingConfigError
from ds_ring.patches import PatchTable, apply, patch

AUTO = "auto"
_REGISTRY = "accelerate.utils.sequence_parallel"  # of tools/upstream's patch; no release has it

# enable() applies the patches of classes for good, once a process; those of objects are applied where
# accelerate makes the object.
ACCELERATE = PatchTable("accelerate", ">=1.10")
_ACCELERATOR = ACCELERATE.given("accelerator", "accelerate.Accelerator")
_PARALLEL = ACCELERATE.given("parallel", "accelerate.parallelism_config.ParallelismConfig")
_SAMPLER = ACCELERATE.given("sampler", "accelerate.data_loader.SeedableRandomSampler")
_LOADER = ACCELERATE.given("loader", "accelerate.data_loader.DataLoaderShard")
_SCHEDULER = ACCELERATE.given("scheduler", "accelerate.scheduler.AcceleratedScheduler")
_OPERATIONS = ACCELERATE.imported("accelerate.utils.operations")
_parallelism = {
    name: patch(
        _PARALLEL, name, stage="at_enable", kind="set", feature=f"parallelism.{name}",
        reason="no other parallelism is left to accelerate", when=f'{name[:2]}_backend="ds_ring"',
    )
    for name in ("sp_size", "sp_backend", "cp_size", "cp_backend")
}  # fmt: skip
_ring_ranks = patch(
    _PARALLEL, "ring_ranks", stage="at_enable", kind="added", feature="parallelism.ranks",
    reason="the ranks of a sequence", when='sp_backend="ds_ring" or cp_backend="ds_ring"',
)  # fmt: skip
_own_samples = patch(
    ACCELERATE.given("accelerator.dataloader_config", "accelerate.utils.DataLoaderConfiguration"),
    "dispatch_batches", stage="around_init", kind="set", feature="own samples",
    reason="each rank reads its samples",
)  # fmt: skip
_replicas = patch(
    _ACCELERATOR, "__class__", stage="around_init", kind="set", feature="replicas",
    reason="num_processes, process_index, prepare_data_loader, reduce and _prepare_deepspeed count data"
    " replicas",
)  # fmt: skip
_generator = patch(
    _SAMPLER, "generator", stage="in_loader", kind="set", feature="one order",
    reason="one order on all ranks", when="it has none and there is one replica",
)  # fmt: skip
_seed = patch(
    _SAMPLER, "initial_seed", stage="in_loader", kind="set", feature="one order.seed",
    reason="one order on all ranks", when="accelerate seeds the sampler by itself",
)  # fmt: skip
_stream = patch(
    _LOADER, "base_dataloader", stage="in_loader", kind="set", feature="last batch",
    reason="counts the samples of its last batch, as accelerate's dispatcher does",
    when="the data set is iterable",
)  # fmt: skip
_remainder = patch(
    _LOADER, "remainder", stage="in_loader", kind="set", feature="last batch.samples",
    reason="their number: gather_for_metrics leaves out what fills a batch up",
    when="the data set is iterable and was read to its end",
)  # fmt: skip
_counted_samples = patch(
    ACCELERATE.given("shard", "accelerate.data_loader.IterableDatasetShard"), "dataset", stage="in_loader",
    kind="set", feature="last batch.counted", reason="counts its samples",
    when="the data set is iterable and there are several replicas",
)  # fmt: skip
_scheduler_replicas = patch(
    _SCHEDULER, "replicas", stage="at_initialize", kind="added", feature="number of replicas",
    reason="the steps of one call of step",
)  # fmt: skip
_scheduler_class = patch(
    _SCHEDULER, "__class__", stage="at_initialize", kind="set", feature="scheduler",
    reason="steps once for each replica",
)  # fmt: skip


def enable_accelerate() -> None:
    """Put every Accelerator that is made from now on a ring."""
    apply(_start, _with_gloo, _gathered, _gathered_objects, _ReplicaState, _with_ring, _register)


@patch(
    ACCELERATE.imported("accelerate.parallelism_config.ParallelismConfig"), "__post_init__",
    stage="at_enable", feature="parallelism",
    reason='takes out the ranks of the backend "ds_ring", unless accelerate knows it',
)  # fmt: skip
def _with_ring(check: Callable[[Any], None], parallel: Any) -> None:
    """Take the ranks of `sp_backend="ds_ring"` or `cp_backend="ds_ring"` out of what accelerate checks."""
    for size, backend in (("sp_size", "sp_backend"), ("cp_size", "cp_backend")):
        if getattr(parallel, backend) == BACKEND:
            apply(_ring_ranks.to(getattr(parallel, size) or 1), parallel=parallel)
            if size == "cp_size" or not _has_registry():
                apply(_parallelism[size].to(1), _parallelism[backend].to(None), parallel=parallel)
    check(parallel)


@patch(
    ACCELERATE.imported("accelerate.parallelism_config.ParallelismConfig"), "sp_backend",
    stage="at_enable", kind="registered", feature="parallelism.registry",
    reason="makes the backend known", when="accelerate has a registry of backends (tools/upstream)",
)  # fmt: skip
def _register() -> None:
    if _has_registry():
        registry = import_module(_REGISTRY)
        registry.register_sp_backend(BACKEND, registry.SequenceParallelBackend(whole_batches=True))


def _has_registry() -> bool:
    return find_spec(_REGISTRY) is not None


@patch(
    ACCELERATE.imported("accelerate.Accelerator"), "__init__", stage="at_enable", feature="ring",
    reason="puts every Accelerator on a ring; raises without DeepSpeed and our section",
)  # fmt: skip
def _start(start: Callable[..., None], accelerator: Any, *args: Any, **kwargs: Any) -> None:
    start(accelerator, *args, **kwargs)
    plugin, parallel = getattr(accelerator.state, "deepspeed_plugin", None), accelerator.parallelism_config
    if plugin is not None:
        write_ring_ranks(plugin.deepspeed_config, parallel)
    if plugin is None or not isinstance(plugin.deepspeed_config.get(SECTION), dict):
        got = "no DeepSpeed" if plugin is None else "none"
        raise RingConfigError.wrong(
            "Accelerator", f'DeepSpeed with a "{SECTION}" section', got, "pass deepspeed=..."
        )
    config = plugin.deepspeed_config
    ring = RingConfig.from_deepspeed(config)
    ring.validate_world(accelerator.state.num_processes)
    others = [f"{axis}_size" for axis in ("tp", "cp", "sp") if getattr(parallel, f"{axis}_enabled", False)]
    if getattr(parallel, "sp_backend", None) == BACKEND:
        others = [key for key in others if key != "sp_size"]
    if others:
        raise RingConfigError(
            f'parallelism_config: expected no {others[0]}, got one above 1; set its backend to "{BACKEND}"'
        )
    if accelerator.dispatch_batches:
        raise RingConfigError.wrong(
            "dispatch_batches", "None or false", "true", "ranks read their own samples"
        )
    # accelerate refuses an "auto" that it does not know. Ours are the defaults.
    config[SECTION] = {key: value for key, value in config[SECTION].items() if value != AUTO}
    # The copy that from_pretrained reads at ZeRO 3 needs a number, too.
    for settings in (config, getattr(getattr(plugin, "dschf", None), "config", config)):
        settings[SP_KEY] = ring.sequence_parallel_size
    replicas = _replicas.to(_make_ring_class(type(accelerator)))  # type: ignore[arg-type]
    apply(_own_samples.to(False), replicas, accelerator=accelerator)
    if "transformers.trainer" in sys.modules:  # it makes an Accelerator of its own
        enable_trainer()
    if "trl.models.utils" in sys.modules:
        from ds_ring.engines.trainers.trl import enable_distillation

        enable_distillation()


@patch(
    ACCELERATE.imported("accelerate.state.PartialState"), "_prepare_backend", stage="at_enable",
    feature="backend", reason="accelerate 1.15 knows DeepSpeed on accelerators only: gloo on CPUs",
)  # fmt: skip
def _with_gloo(
    choose: Callable[..., tuple[str | None, Any]], state: PartialState, *args: Any, **kwargs: Any
) -> tuple[str | None, Any]:
    # accelerate 1.15 knows DeepSpeed on accelerators only: its ranks on CPUs would each be the only one.
    backend, kind = choose(state, *args, **kwargs)
    on_cpu = get_accelerator().device_name() == "cpu" and get_world_size_from_launcher() > 1
    if backend is None and on_cpu:
        backend = get_accelerator().communication_backend_name()
    return backend, kind


def sequence_ranks() -> int:
    """Return the number of ranks of a sequence; 1 without an Accelerator on a ring."""
    plugin = AcceleratorState().deepspeed_plugin if AcceleratorState._shared_state else None
    return 1 if plugin is None else int(plugin.deepspeed_config.get(SP_KEY, 1))


@patch(
    _OPERATIONS, "_gpu_gather", stage="at_enable", feature="tensors",
    reason="gathers each data replica once, for whoever imported gather",
)  # fmt: skip
def _gathered(gather: Callable[[Any], Any], tensor: Any) -> Any:
    """Gather tensors over the data replicas, each once."""
    ranks = sequence_ranks()

    def take_first_ranks(gathered: Tensor) -> Tensor:  # [ranks * n, ...] -> [replicas * n, ...]
        by_rank = gathered.unflatten(0, (PartialState().num_processes // ranks, ranks, -1))
        return by_rank[:, 0].flatten(0, 1)

    return recursively_apply(take_first_ranks, gather(tensor), error_on_other_type=True)


@patch(
    _OPERATIONS, "_gpu_gather_object", stage="at_enable", feature="objects",
    reason="gathers each data replica once, for whoever imported gather_object",
)  # fmt: skip
def _gathered_objects(gather: Callable[[Any], Any], objects: Any) -> Any:
    """Gather lists over the data replicas, each once."""
    return gather([] if PartialState().process_index % sequence_ranks() else objects)


@patch(
    ACCELERATE.imported("accelerate.utils.random"), "AcceleratorState", stage="at_enable", kind="replaced",
    feature="seeds", reason="set_seed(device_specific=True) gives the ranks of a sequence one seed",
)  # fmt: skip
class _ReplicaState(AcceleratorState):  # type: ignore[misc]
    """Number the data replicas for `set_seed(device_specific=True)`: ranks of a sequence sample alike."""

    @property
    def process_index(self) -> int:
        return int(self._shared_state["process_index"]) // sequence_ranks()


@functools.lru_cache(maxsize=64)
def _make_ring_class(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (_OnARing, kind), {})


class _OnARing(Accelerator):  # type: ignore[misc]
    """Count data replicas where Accelerate counts processes; `state` and `is_main_process` count ranks."""

    @property
    def sequence_ranks(self) -> int:
        """Return the number of ranks of a sequence."""
        return sequence_ranks()

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
            seed = broadcast_object_list(
                [int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())]
            )
            apply(_generator.to(torch.Generator().manual_seed(seed[0])), sampler=sampler)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        sampler = get_sampler(prepared)
        if isinstance(sampler, SeedableRandomSampler):  # its seed is what this rank's generator began with
            apply(_seed.to(broadcast_object_list([sampler.initial_seed])[0]), sampler=sampler)
        if isinstance(prepared, DataLoaderShard) and isinstance(prepared.dataset, IterableDataset):
            _count_last_batch(prepared)
        return prepared

    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        prepared: tuple[Any, ...] = super()._prepare_deepspeed(*args)
        for item in prepared:
            if type(item) is AcceleratedScheduler:
                replicas = _scheduler_replicas.to(self.num_processes)
                apply(replicas, _scheduler_class.to(_Scheduler), scheduler=item)
        return prepared

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over the data replicas, each once."""
        if reduction == "sum" and self.state.process_index % self.sequence_ranks:
            tensor = recursively_apply(torch.zeros_like, tensor, error_on_other_type=True)
        return super().reduce(tensor, reduction, scale)


def _count_last_batch(loader: Any) -> None:
    """Let a loader of a stream say how many samples its last batch has, for `gather_for_metrics`."""
    base = loader.base_dataloader
    patches = [_stream.to(_LastBatch(base, loader))]
    if isinstance(base.dataset, IterableDatasetShard):  # one of several replicas
        if base.num_workers:
            return  # they read the samples; by accelerate's documentation the caller must know their number
        patches.append(_counted_samples.to(_Counted(base.dataset.dataset)))
    apply(*patches, loader=loader, shard=base.dataset)


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
        apply(_remainder.to(samples or 0), loader=self._loader)


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
