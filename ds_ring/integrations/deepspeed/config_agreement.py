"""Check in two small collectives that all ranks start with the same configuration.

Owns the comparison of the whole DeepSpeed JSON, our section and theirs: ranks of different ZeRO stages or
ring sizes would wait for each other in different collectives. A hash is compared first; only where hashes
differ are the configurations themselves exchanged, to name the rank, the key and both values.

[Note: one start]
The comparison comes before any group of the ring is made. A rank that cannot read its configuration tells the
others where a process group exists already. Where there is none it raises alone, and the launcher ends the
others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from ds_ring.config.deepspeed_file import SP_KEY
from ds_ring.config.flat_keys import by_json_key
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingError, RingMismatchError
from ds_ring.health.guarded_call import call_guarded
from ds_ring.health.joining import leave_on_error
from ds_ring.health.watch import Watch
from ds_ring.schedule.grid import Grid

_NAMED_KEYS = 5
_TIMEOUT_S = 1800.0  # of one comparison
# What a host may have for itself: where it logs and where it swaps to.
_OF_THE_HOST = ("path", "dir", "folder", "job_name")
_LOGGING = ("tensorboard", "wandb", "csv_monitor", "comet")

Flat = dict[str, str]


def agree_on_config(
    config: RingConfig | None,
    deepspeed_config: Mapping[str, Any],
    fault: RingError | None,
    watch: Watch | None,
) -> None:
    """Compare the configurations of all ranks; raise the same error on every rank. Collective.

    Raises:
        RingPeerError: another rank failed meanwhile; names it.
        RingError: `fault`, on the rank that has one.
        RingMismatchError: another rank has a fault, or ranks differ in a key; the rank and the key are named.
    """
    # Nobody waits for a rank that is dead: `watch` guards the two collectives.
    with leave_on_error(watch):
        _agree(config, deepspeed_config, fault, watch)


def _agree(
    config: RingConfig | None,
    deepspeed_config: Mapping[str, Any],
    fault: RingError | None,
    watch: Watch | None,
) -> None:
    mine = {} if config is None else by_json_key(config) | dict(_leaves(deepspeed_config))
    flat = {key: json.dumps(value, default=_without_address) for key, value in mine.items()}
    reports = _gather((None if fault is None else str(fault), _digest(flat)), watch, 0)
    if fault is not None:
        raise fault
    refusing = [rank for rank, (refused, _) in enumerate(reports) if refused is not None]
    if refusing:
        raise RingMismatchError(f"rank {refusing[0]} refused to start: {reports[refusing[0]][0]}")
    if len({digest for _, digest in reports}) > 1:
        raise RingMismatchError(_describe(_gather(flat, watch, 1)))


def agree_on_ranks_per_node(mine: int | None, watch: Watch | None) -> int | None:
    """Return how many ranks share a node; None where nodes have different numbers of them. Collective.

    Raises:
        RingPeerError: another rank failed meanwhile; names it.
    """
    with leave_on_error(watch):
        found = _gather(mine, watch, 2)
    return mine if found.count(mine) == len(found) else None


def _describe(configs: list[Flat]) -> str:
    """Describe the first rank that has another configuration than rank 0."""
    rank = next(rank for rank, config in enumerate(configs) if config != configs[0])
    keys = sorted(configs[0].keys() | configs[rank].keys())
    missing = "no such key"
    pairs = [(key, configs[0].get(key, missing), configs[rank].get(key, missing)) for key in keys]
    different = [
        f"{key}: {first} on rank 0, {other} on rank {rank}" for key, first, other in pairs if first != other
    ]
    more = f" and {len(different) - _NAMED_KEYS} keys more" if len(different) > _NAMED_KEYS else ""
    return (
        "expected the same configuration on all ranks, got "
        + "; ".join(different[:_NAMED_KEYS])
        + f"{more}. Start every host with the same DeepSpeed JSON"
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


def _without_address(value: object) -> str:
    """Return the type of a value that no JSON has: its repr could hold an address."""
    return f"<{type(value).__name__}>"


def _digest(flat: Flat) -> str:
    return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()


def _gather(mine: Any, watch: Watch | None, step: int) -> list[Any]:
    size = dist.get_world_size()

    def gather() -> list[Any]:
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, mine)
        return everyones

    what = "the comparison of configurations"
    return call_guarded(gather, watch, Grid(size, size), what, step, _TIMEOUT_S)
