"""Describe what `ds-ring plan` plans: a model, a sequence and a pattern on some devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import torch

from ds_ring.errors import RingError
from ds_ring.kernels.interface import KernelNeeds
from ds_ring.masks.pattern import Pattern
from ds_ring.plugin import KERNELS, load
from ds_ring.schedule.grid import Grid
from ds_ring.schedule.layout import Mix
from ds_ring.schedule.lowering import chunk_bytes_on

from .hardware import Hardware
from .model_file import ModelShape
from .model_memory import Zero
from .other_layers import Kind, Selection

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
USABLE = {"cuda": 0.92, "cpu": 1.0}  # the rest: context, communication buffers, fragmentation (assumed)
MEMORY_ERROR = 0.04  # of a planned peak (tools/check_plan.py): every choice and search leaves it free
USABLE_HOST = 0.95  # the rest: the system and the scripts (assumed)
FEW_RANKS = 8


@dataclass(frozen=True)
class TrainingSetting:
    """Describe a training setting."""

    tokens: int  # T of one sequence
    # ring_size, ulysses_size: ranks that share one; their product divides the devices
    ring_size: int
    ulysses_size: int
    # model, pattern: of the training; where layers differ, each pattern with its number of layers, without
    # those of `other_layers`
    model: ModelShape
    pattern: Pattern | Mix
    layout: str  # a name of `make_layout`
    zero: Zero  # how states are kept; its world is the number of devices
    dtype: str  # "float32", "bfloat16" or "float16"
    hardware: Hardware  # of all devices
    batch: int = 1  # sequences of one ring
    checkpointing: bool = False  # layers are computed again in the backward pass
    recompute_attention: float = 0.0  # as in the JSON: this part of attention as well
    # loss_tokens, mlp_tokens: that are there at once, of logits and inside an MLP; None for all
    loss_tokens: int | None = None
    mlp_tokens: int | None = None
    offload_checkpoints: bool = False  # the layers' checkpoints are on the host
    offload_attention: bool | Literal["auto"] = False  # q, k, v, out and lse of a layer are on the host
    may_add_options: bool = False  # searches turn on the options of `options.py` that make a run fit
    may_split_heads: bool = False  # these searches try Ulysses ranks inside a node as well
    # transport, overlap, prune, chunk_bytes, stage_bytes, gradient_payload: as in the JSON
    transport: str = "ring"
    overlap: bool = True
    prune: bool = True
    chunk_bytes: int | None = None
    stage_bytes: int | Literal["auto"] = "auto"
    gradient_payload: str = "float32"
    # kernel, block_size: as in the JSON
    kernel: str = "auto"
    block_size: int = 128
    # neighbours on a ring that share a host; None: as the runtime finds it with the hardware's hosts, 0: not
    # known, which makes one ring of all ranks
    ring_ranks_per_node: int | None = None
    # the other layers (`other_layers.py`): their kind, their pattern, how many there are
    other_layers: tuple[tuple[Kind, Pattern, int], ...] = ()

    @property
    def mix(self) -> Mix:
        """Return the patterns with their numbers of layers."""
        if isinstance(self.pattern, Pattern):
            return ((self.pattern, self.model.layers),)
        return self.pattern

    @property
    def layout_mix(self) -> Mix:
        """Return the patterns for which a layout is chosen: all attention's, also that over chosen keys."""
        counts = Counter(dict(self.mix))
        for kind, pattern, layers in self.other_layers:
            counts[pattern] += layers * isinstance(kind, Selection)
        return tuple((layer_pattern, layers) for layer_pattern, layers in counts.items() if layers)

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.zero.world

    @property
    def replicas(self) -> int:
        """Return how many rings there are, each with its own sequences."""
        return self.devices // (self.ring_size * self.ulysses_size)

    @property
    def split(self) -> str:
        """Return how devices share the sequences of a step."""
        return f"ring {self.ring_size} x Ulysses {self.ulysses_size} x data {self.replicas}"

    @property
    def kernel_that_runs(self) -> str:
        """Return the kernel of a name on this hardware.

        Raises:
            RingConfigError: it has no rates.
            RingShapeError: the kernel does not take the dtype or the head dimension.
        """
        if (error := self.refused_kernels.get(self.kernel)) is not None:
            raise error
        return self.hardware.runs(self.kernel, self.kinds, self.refused_kernels)

    @property
    def refused_kernels(self) -> Mapping[str, RingError]:
        """Return the errors of the kernels that cannot compute this attention, as a run raises them."""
        patterns = tuple(pattern for pattern, _ in self.mix)
        return _find_refused(self.hardware.kind, self.dtype, self.model.head_dim, patterns)

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of tiles of the patterns, as measured rates name them."""
        return {pattern.tile_kind for pattern, _ in self.mix}

    @property
    def usable_bytes(self) -> float:
        """Return the memory of a device that a plan may take: with its error tensors still fit."""
        return self.hardware.memory_bytes * USABLE[self.hardware.kind] / (1 + MEMORY_ERROR)

    @property
    def repeated_attention(self) -> float:
        """Return the part of attention's forward pass that checkpointing computes, and sends, once more."""
        return self.recompute_attention if self.checkpointing else 0.0

    @property
    def host_is_device(self) -> bool:
        """Return whether offloading moves nothing: ranks on the CPU."""
        return self.hardware.kind == "cpu"

    @property
    def node_devices(self) -> int:
        """Return how many devices of the setting share a host."""
        return min(self.devices, self.hardware.host_devices)

    @property
    def host_name(self) -> str:
        """Return what reports call the host: that of a node, or of the devices in a part of it."""
        hardware = self.hardware
        is_node = hardware.host_devices == hardware.devices_per_node
        return "node's host" if is_node else f"host of {hardware.host_devices} devices"

    @property
    def usable_host_bytes(self) -> float | None:
        """Return the host's memory for one device; None if the hardware's file does not say."""
        whole = self.hardware.host_memory_bytes
        return None if whole is None else whole * USABLE_HOST / self.node_devices

    @property
    def bytes_per_s(self) -> float:
        """Return the rate of the slowest link of a ring: hops keep step with each other."""
        return self.hardware.link_bytes_per_s(self.ring_size * self.ulysses_size)

    @cached_property
    def node_ranks(self) -> int:
        """Return how many neighbours on a ring share a node; 0 where nodes make no difference to the plan."""
        neighbours = self._node_neighbours
        return neighbours if 1 < neighbours < self.ring_size else 0

    @property
    def ring_is_in_node(self) -> bool:
        """Return whether all ranks of a ring share a node."""
        return self._node_neighbours == self.ring_size

    @property
    def _node_neighbours(self) -> int:
        neighbours = self.ring_ranks_per_node
        if neighbours is None:
            grid = Grid(self.devices, self.ring_size, self.ulysses_size)
            # The runtime counts the processes of a host (torchrun's LOCAL_WORLD_SIZE), not links.
            neighbours = grid.ring_ranks_per_node(0, self.hardware.host_devices) or 0
        return neighbours


@lru_cache(maxsize=64)
def _find_refused(
    device: str, dtype: str, head_dim: int, patterns: tuple[Pattern, ...]
) -> Mapping[str, RingError]:
    errors: dict[str, RingError] = {}
    for name, row in KERNELS.items():
        for pattern in patterns if row.refuses is not None else ():
            error = load(row.refuses)(KernelNeeds(device, getattr(torch, dtype), head_dim, pattern))
            if error is not None:
                errors[name] = error
    return errors


def like_in_memory(setting: TrainingSetting, local_tokens: int) -> TrainingSetting:
    """Return a setting of at most four ring ranks with as many tokens each, which needs the same memory.

    (Rank 0 of 8 and rank 0 of 1024 need the same buffers: `tools/measure_memory.py --fake`.) On two levels
    four nodes of two: their rank 0 has 2 % more bytes of messages than any of eight nodes of eight. Rings
    inside a node, which may have stages, are as in the node up to eight ranks.
    """
    nodes = setting.node_ranks and min(setting.ring_size // setting.node_ranks, 4)
    return _smaller_ring(setting, local_tokens, FEW_RANKS if setting.ring_is_in_node else 4, nodes, 2)


def like_in_hops(setting: TrainingSetting, local_tokens: int) -> TrainingSetting:
    """Return a setting of at most eight ring ranks, or two nodes, with as many tokens each: the same hops."""
    return _smaller_ring(setting, local_tokens, FEW_RANKS, 2, setting.node_ranks)


def _smaller_ring(
    setting: TrainingSetting, local_tokens: int, most: int, nodes: int, node: int
) -> TrainingSetting:
    """Return a setting of so many nodes of so many ranks if it has nodes, else of at most `most` ranks."""
    node = min(setting.node_ranks, node)
    ring = nodes * node or min(setting.ring_size, most)
    chunk_bytes = setting.chunk_bytes or chunk_bytes_on(setting.hardware.kind, setting.ring_size)
    neighbours = ring if setting.ring_is_in_node else node
    return replace(
        setting, ring_size=ring, tokens=local_tokens * ring, chunk_bytes=chunk_bytes,
        ring_ranks_per_node=neighbours,
    )  # fmt: skip
