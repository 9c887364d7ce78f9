"""Choose the ring for the ranks that are left: the next allowed size, with the same samples in a step.

Arithmetic on the DeepSpeed JSON. A smaller ring needs more memory in each rank, so a ring is kept whole as
long as fewer data replicas do; `relaunch.smallest_ring_size` is the bound.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_ring.config.json_text import read_object
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError

from ..cluster.cluster import Host

_SIZE, _MICRO, _STEPS = (
    "sequence_parallel_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
)  # fmt: skip


@dataclass(frozen=True)
class Ring:
    """Say how many ranks go on, how many of them share a sequence, and the JSON that says so."""

    world_size: int
    sequence_size: int
    config: dict[str, Any]


def ring_for(config: dict[str, Any], planned_ranks: int, ranks: int, smallest: int) -> Ring | None:
    """Return the ring for at most `ranks` ranks; None where no allowed size fits.

    Args:
        config: the DeepSpeed JSON for `planned_ranks`.
        ranks: slots of the hosts that are there.
        smallest: ranks that share a sequence, at least.
    """
    planned = int(config.get(_SIZE, 1))
    for sequence in (size for size in range(planned, smallest - 1, -1) if planned % size == 0):
        for world in range(ranks - ranks % sequence, 0, -sequence):
            made = _config_for(config, planned_ranks // planned, sequence, world // sequence)
            if made is not None and _fits(made, world):
                return Ring(world, sequence, made)
    return None


def hosts_for(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """Return the hosts with as many slots as there are ranks: the last ones lose theirs."""
    chosen = []
    for host in hosts:
        if ranks > 0:
            chosen.append(host.model_copy(update={"slots": min(host.slots, ranks)}))
            ranks -= host.slots
    return tuple(chosen)


def _config_for(
    config: dict[str, Any], replicas_before: int, sequence: int, replicas: int
) -> dict[str, Any] | None:
    """Return the JSON of another ring; None where the samples of a step cannot be divided among replicas."""
    made = copy.deepcopy(config)
    if sequence != int(config.get(_SIZE, 1)):
        made[_SIZE] = sequence
        section = made.setdefault("ring_attention", {})
        if isinstance(section.get("ring_size", "auto"), int):
            section["ring_size"] = max(sequence // int(section.get("ulysses_size", 1)), 1)
    if replicas == replicas_before:
        return made
    micro, steps = config.get(_MICRO), config.get(_STEPS, 1)
    if not isinstance(micro, int) or not isinstance(steps, int) or micro * steps * replicas_before % replicas:
        return None
    samples = micro * steps * replicas_before // replicas
    made[_MICRO] = micro if samples % micro == 0 else next(n for n in range(micro, 0, -1) if samples % n == 0)
    made[_STEPS] = samples // made[_MICRO]
    return made


def _fits(config: dict[str, Any], world: int) -> bool:
    try:
        RingConfig.from_deepspeed(config).validate_world(world)
    except RingConfigError:
        return False
    return True


def read_config(path: Path) -> dict[str, Any]:
    """Return the DeepSpeed JSON at `path`, or raise RingConfigError."""
    return read_object(path)


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Write the JSON of an attempt."""
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
