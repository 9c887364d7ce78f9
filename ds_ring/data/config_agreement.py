"""Check in two small collectives that all ranks start with the same configuration.

Owns the comparison of the whole DeepSpeed JSON, our section and theirs: ranks of different ZeRO stages or
ring sizes would wait for each other in different collectives. A hash is compared first; only where hashes
differ are the configurations themselves exchanged, to name the rank, the key and both values.

[Note: one start]
The comparison comes before any group of the ring is made. If a process group exists already, a rank that
cannot read its configuration reports it to the others. Without one it raises alone, and the launcher ends the
others.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import operator
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ds_ring.comm.groups import gather_objects
from ds_ring.config.json_text import SP_KEY
from ds_ring.config.section import RingConfig, by_json_key
from ds_ring.errors import RingConfigError, RingError, RingMismatchError
from ds_ring.health.client import DetectorClient
from ds_ring.health.joining import leave_on_error
from ds_ring.health.rendezvous import Rendezvous
from ds_ring.health.stuck_waits import call_guarded
from ds_ring.limits import Limit, Timeouts
from ds_ring.schedule.grid import Grid

_NAMED_KEYS = 5
# What a host may have for itself: where it logs and where it swaps to.
_OF_THE_HOST = ("path", "dir", "folder", "job_name")
_LOGGING = ("tensorboard", "wandb", "csv_monitor", "comet")

Flat = dict[str, str]


def agree_on_config(
    config: RingConfig | None,
    deepspeed_config: Mapping[str, Any],
    fault: RingError | None,
    detector: DetectorClient | None,
    ranks_per_node: int | None,
) -> int | None:
    """Compare the configurations of all ranks; raise the same error on every rank. Collective.

    Returns how many ranks share a node; None where nodes have different numbers of them.

    Raises:
        RingPeerError: another rank failed during the call; names it.
        RingError: `fault`, on the rank that has one.
        RingMismatchError: another rank has a fault, or ranks differ in a key; the rank and the key are named.
    """
    mine = {} if config is None else by_json_key(config) | dict(_leaves(deepspeed_config))
    # Of a value that no JSON has, its type: the repr could hold an address.
    flat = {key: json.dumps(value, default=lambda x: f"<{type(x).__name__}>") for key, value in mine.items()}
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()
    # Nobody waits for a rank that is dead: `detector` guards the two collectives.
    with leave_on_error(detector):
        limit = (Timeouts() if config is None else config.timeouts).limit("hop")
        reports = _gather((None if fault is None else str(fault), digest, ranks_per_node), detector, 0, limit)
        if fault is not None:
            raise fault
        refusing = [rank for rank, (refused, *_) in enumerate(reports) if refused is not None]
        if refusing:
            raise RingMismatchError(f"rank {refusing[0]} refused to start: {reports[refusing[0]][0]}")
        if len({digest for _, digest, _ in reports}) > 1:
            raise RingMismatchError(_describe(_gather(flat, detector, 1, limit)))
    return ranks_per_node if len({per_node for *_, per_node in reports}) == 1 else None


def _describe(configs: list[Flat]) -> str:
    """Describe the first rank that has another configuration than rank 0."""
    rank = next(rank for rank, config in enumerate(configs) if config != configs[0])
    different = []
    for key in sorted(configs[0].keys() | configs[rank].keys()):
        first, other_value = (config.get(key, "no such key") for config in (configs[0], configs[rank]))
        if first != other_value:
            different.append(f"{key}: {first} on rank 0, {other_value} on rank {rank}")
    rest = f" and {len(different) - _NAMED_KEYS} keys more" if len(different) > _NAMED_KEYS else ""
    return (
        f"expected the same configuration on all ranks, got {'; '.join(different[:_NAMED_KEYS])}{rest}."
        " Start every host with the same DeepSpeed JSON"
    )


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of DeepSpeed's part, without those that a host may have for itself."""
    for key, value in section.items():
        name = f"{prefix}{key}"
        if name in (SP_KEY, *_LOGGING) or str(key).endswith(_OF_THE_HOST):
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _gather(mine: Any, detector: DetectorClient | None, step: int, limit: Limit) -> list[Any]:
    size = dist.get_world_size()

    gather = functools.partial(gather_objects, mine)
    return call_guarded(gather, detector, Grid(size, size), "the comparison of configurations", step, limit)


# Replace `"auto"` in the DeepSpeed JSON as Hugging Face's integration does. A value that cannot be derived is
# an error: DeepSpeed would take the word itself for a number.

AUTO = "auto"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# What DeepSpeed does where the key is missing, and Hugging Face's Trainer where it is "auto".
_SAME_AS_LEFT_OUT = {
    "gradient_clipping",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "scheduler.params.warmup_min_lr",
}
_OF_DEEPSPEED = ("zenflow", "autotuning", "expert_parallel")  # sections with an "auto" of their own
_WHAT_TO_WRITE = {
    "optimizer.params.lr": "write the learning rate, 1e-4, say",
    "optimizer.params.weight_decay": "write 0.0 for none, or 0.01",
    "scheduler.params.warmup_max_lr": "write the highest learning rate",
    "scheduler.params.warmup_num_steps": "write a number of optimizer steps",
    "scheduler.params.total_num_steps": "write the number of optimizer steps of the run",
    "train_micro_batch_size_per_gpu": "write the number of samples that a data replica takes at once, 1, say",
}


def resolve_auto(
    config: dict[str, Any], model: torch.nn.Module, brings_optimizer: bool, brings_scheduler: bool
) -> dict[str, Any]:
    """Return the DeepSpeed JSON without any "auto"; the model's dtype and hidden size decide some values.

    Where an optimizer or a scheduler is passed, DeepSpeed does not read that section.
    """
    if next(_autos(config), None) is None:
        return config
    config = copy.deepcopy(config)
    for section, brought in (("optimizer", brings_optimizer), ("scheduler", brings_scheduler)):
        if brought:
            # DeepSpeed does not read a section whose object is passed: its "auto" means nothing.
            config.pop(section, None)
    _resolve_batch(config)
    open_ = []
    for key in list(_autos(config)):
        value = _value(key, config, model)
        *sections, name = key.split(".")
        parent = functools.reduce(operator.getitem, sections, config)
        if value is None:
            advice = _WHAT_TO_WRITE.get(key, "write the value, or remove the key")
            open_.append(f'{key}: got "auto"; {advice}')
        elif value is _LEFT_OUT:
            del parent[name]
        else:
            parent[name] = value
    if open_:
        raise RingConfigError(
            'the DeepSpeed configuration: "auto" is filled in by Hugging Face\'s Trainer, and'
            " ds_ring.initialize can find no answer for\n  - " + "\n  - ".join(open_)
        )
    return config


_LEFT_OUT = object()


def _autos(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys whose value is "auto"."""
    for key, value in section.items():
        if isinstance(value, dict) and key not in _OF_DEEPSPEED:
            yield from _autos(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value == AUTO:
            yield prefix + key


def _resolve_batch(config: dict[str, Any]) -> None:
    """Remove the sizes that DeepSpeed works out from the others, if there is one to start from."""
    asks = all(config.get(key, AUTO) == AUTO for key in _BATCH[:2])
    for key in _BATCH:
        if config.get(key) == AUTO:
            del config[key]
    if asks:
        config[_BATCH[1]] = AUTO  # the micro batch is the one to ask for


def _value(key: str, config: dict[str, Any], model: torch.nn.Module) -> object:
    """Return the value of a key, `_LEFT_OUT` where leaving it out is the same, None if nothing decides it."""
    if key in ("bf16.enabled", "fp16.enabled"):
        wanted = torch.bfloat16 if key.startswith("bf16") else torch.float16
        return next((p.dtype for p in model.parameters() if p.is_floating_point()), None) is wanted
    if key == "scheduler.params.warmup_max_lr":
        rate = config.get("optimizer", {}).get("params", {}).get("lr")
        return rate if isinstance(rate, (int, float)) else None
    if key.startswith("zero_optimization."):
        hidden = _hidden_size(model)
        # Hugging Face's values of sizes that depend on the model; DeepSpeed's default for any other.
        sizes = {} if hidden is None else {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        }  # fmt: skip
        return sizes.get(key.partition(".")[2], _LEFT_OUT)
    return _LEFT_OUT if key in _SAME_AS_LEFT_OUT else None


def _hidden_size(model: torch.nn.Module) -> int | None:
    for part in model.modules():
        config = getattr(part, "config", None)
        for level in (config, getattr(config, "text_config", None)):
            size = getattr(level, "hidden_size", None)
            if isinstance(size, int):
                return size
    return None


# The secret of a job comes by the environment: a script is started by an engine (deepspeed, torchrun, mpirun)
# that passes on nothing else without showing it to other users of the host.

SECRET_VARIABLE = "DS_RING_SECRET"


def rendezvous_settings() -> Rendezvous | None:
    """Return how torch's default process group will be made by "env://"; None where the environment is not
    complete (DeepSpeed asks MPI then).
    """
    numbers = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    host = os.environ.get("MASTER_ADDR")
    if not host or not all(text.isdecimal() for text in numbers):
        return None
    rank, world_size, port = map(int, numbers)
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent
    return Rendezvous(rank, world_size, host, port, hosts, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job_secret() -> str | None:
    """Return the job's secret; None where no launcher has set one."""
    return os.environ.get(SECRET_VARIABLE) or None
