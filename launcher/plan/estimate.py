"""Estimate memory, FLOPs, bytes and time of a training step on one device. Pure arithmetic.

Owns the sum of it all. The setting is in training_setting.py, attention in layer_passes.py, searches
in options.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import chunk_bytes_on, count_heads, heads_on_host, split_heads

from .hardware import Hardware
from .layer_passes import LayerPass, LayerPasses, OnProgress, layer_passes
from .model_memory import LocalTokens, MemoryMoment, TrainingStep
from .other_layers import LayerCost, layer_memory
from .pass_memory import PassMemory
from .pass_time import PassCost
from .training_setting import ELEMENT_BYTES, TrainingSetting

# Ulysses: a forward pass exchanges q, k and v for all tokens of some heads, and out back
# (ops/ulysses.py); a backward pass does the same with the gradients. A rank sends (U -
# 1) / U of its tensors (Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509, section 3.2). Nothing is
# computed at that time.

SWAPS = 2  # all-to-alls of a pass in either direction: all tensors of a place go in one


class HeadSwaps(NamedTuple):
    """Hold the all-to-alls of one layer's pass in one direction; the other direction's are as large."""

    sent_bytes: int  # by a rank
    seconds: float  # both, of which nothing is hidden


def head_swaps(setting: TrainingSetting, local_tokens: int) -> HeadSwaps:
    """Return the all-to-alls of a layer whose ring shards have so many slots, which Ulysses ranks share."""
    size, model, hardware = setting.ulysses_size, setting.model, setting.hardware
    if size == 1:
        return HeadSwaps(0, 0.0)
    row_bytes = model.head_dim * ELEMENT_BYTES[setting.dtype]
    heads = 2 * (model.heads + model.kv_heads)  # of q, k, v and out, or their gradients
    shard_bytes = setting.batch * local_tokens // size * row_bytes * heads
    return HeadSwaps(
        shard_bytes * (size - 1) // size,
        swap_seconds(shard_bytes, size, hardware) + SWAPS * hardware.link_latency_s,
    )


def swap_seconds(shard_bytes: int, size: int, hardware: Hardware) -> float:
    """Return the seconds in which all-to-alls of `size` ranks move their own bytes, without latency."""
    # Ulysses ranks are neighbours in the world: of a rank's peers so many share its node.
    inside = min(size, hardware.devices_per_node) - 1
    rates = (hardware.peers_bytes_per_s(inside), hardware.inter_node_bytes_per_s)
    peers = (inside, size - 1 - inside)
    # both kinds of link are at work at once
    return max(shard_bytes * count / size / rate for count, rate in zip(peers, rates, strict=True))


# of heads from the host: one computed, one that is not done with, and the next one on its way
CHUNKS_HERE = 3


class Estimate(NamedTuple):
    """Hold what a step costs on the device that needs most."""

    setting: TrainingSetting  # what was planned
    layout: Layout  # which one it is
    moments: list[MemoryMoment]  # every moment at which memory can be highest
    passes: tuple[LayerPass, ...]  # of one layer of each pattern on the slowest rank looked at
    attention: PassCost  # of all layers' passes
    # of all layers, with what checkpointing computes again: attention_s; of it, waiting for keys: exposed_s;
    # K/V and gradients that a device sends: sent_bytes
    attention_s: float
    exposed_s: float
    sent_bytes: int
    other_layers: tuple[LayerCost, ...]  # of one layer of each kind that is not attention over all keys
    other_layers_s: float  # of all of them, with what checkpointing computes again
    # swap_bytes, swap_s: of attention, Ulysses' all-to-alls
    swap_bytes: int
    swap_s: float
    # dense_flops, dense_s: of the other matrices
    dense_flops: float
    dense_s: float
    # zero_bytes, zero_s: gradients and parameters between devices, as if nothing of it were hidden
    zero_bytes: int
    zero_s: float
    # host_bytes, host_s: between one device and its host, the optimizer there included
    host_bytes: int
    host_s: float
    attention_passes: LayerPasses  # of all layers, which plans with other options share

    @property
    def peak(self) -> MemoryMoment:
        """Return the moment of the most memory."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def host_peak(self) -> MemoryMoment:
        """Return the moment of the most memory on the host."""
        return max(self.moments, key=lambda moment: moment.host_total)

    @property
    def node_host_bytes(self) -> int:
        """Return the most memory on a host, of all its devices."""
        return self.host_peak.host_total * self.setting.node_devices

    @property
    def fits(self) -> bool:
        """Return whether device and host can give what the tensors take."""
        return fits(self.setting, self.moments)

    @property
    def step_s(self) -> float:
        """Return the seconds of one optimizer step of one micro-batch."""
        return self.attention_s + self.other_layers_s + self.dense_s + self.zero_s + self.host_s

    @property
    def fixed_share(self) -> float:
        """Return the part of attention's passes that is fixed costs of kernel calls and hops."""
        return self.attention.fixed_s / self.attention.seconds if self.attention.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens of one device that are trained in a second."""
        setting = self.setting
        return setting.batch * setting.tokens / (setting.ring_size * setting.ulysses_size) / self.step_s

    @property
    def mfu(self) -> float | None:
        """Return the part of the device's peak that the model's arithmetic takes, without repeated work.

        Model FLOPs utilization (Chowdhery et al. 2022, PaLM, appendix B): 6 FLOPs a parameter and token, and
        12 D a pair of attention. None for a model whose other layers have no such count.
        """
        setting, model = self.setting, self.setting.model
        if self.other_layers:
            return None
        matrices = model.layers * model.active_mlp_parameters + model.mixing_parameters
        tokens = setting.batch * setting.tokens / (setting.ring_size * setting.ulysses_size)
        flops = 6 * (matrices + model.head_parameters) * tokens
        flops += 12 * model.head_dim * self.attention.pairs
        return flops / (self.step_s * setting.hardware.flops(setting.dtype))


def fits(setting: TrainingSetting, moments: list[MemoryMoment]) -> bool:
    """Return whether device and host have enough memory at every moment."""
    host = setting.usable_host_bytes or 0.0
    return all(moment.total <= setting.usable_bytes and moment.host_total <= host for moment in moments)


def training_step(setting: TrainingSetting, slots: int, ring: PassMemory) -> TrainingStep:
    """Return the memory of a step with so many slots of a ring rank, and what its passes need."""
    ulysses, model = setting.ulysses_size, setting.model
    inside = setting.batch * slots
    tokens = LocalTokens(inside // ulysses, inside, model.heads // ulysses, model.kv_heads // ulysses)
    element = ELEMENT_BYTES[setting.dtype]
    others = {
        kind: layer_memory(
            kind, setting.batch, slots // ulysses, setting.tokens, element, setting.hardware.kind
        )
        for kind in set(model.other_layers)
    }
    return TrainingStep(
        model, setting.zero, tokens, ring, setting.checkpointing, 1 - setting.recompute_attention,
        setting.loss_tokens, setting.mlp_tokens, setting.offload_checkpoints, setting.host_is_device,
        heads_here(setting, slots), sum(others[kind].kept_bytes for kind in model.other_layers),
        max((memory.kept_bytes for memory in others.values()), default=0),
        max((memory.messages for memory in others.values()), default=0) * (setting.ring_size * ulysses > 1),
        pins=not setting.host_is_device,
    )  # fmt: skip


def settle(setting: TrainingSetting, slots: int) -> TrainingSetting:
    """Return a setting with what "auto" of "offload_attention" does where a ring rank has so many slots."""
    on_host = heads_on_host(setting.offload_attention, setting.hardware.kind, slots)
    return replace(setting, offload_attention=on_host)


def heads_here(setting: TrainingSetting, slots: int) -> float | None:
    """Return the part of attention's heads that are on the device while some are computed; None for all."""
    kind, model = setting.hardware.kind, setting.model
    # On the CPU both are one memory: nothing is gained, and a copy replaces its source.
    if setting.host_is_device or not settle(setting, slots).offload_attention:
        return None
    kv_heads = model.kv_heads // setting.ulysses_size
    head_bytes = setting.batch * slots * model.head_dim * ELEMENT_BYTES[setting.dtype]
    least = setting.chunk_bytes or chunk_bytes_on(kind, setting.ring_size)
    chunk = split_heads(slice(0, kv_heads), head_bytes, least)[0]
    return min(1.0, CHUNKS_HERE * count_heads(chunk) / kv_heads)


def estimate(
    setting: TrainingSetting, progress: OnProgress | None = None, attention: LayerPasses | None = None
) -> Estimate:
    """Estimate everything about a setting.

    Args:
        setting: of the run.
        progress: called with the number of ranks looked at, and of all that will be.
        attention: of the same model, sequence, ranks and hardware, if it was estimated already.

    Raises:
        RingError: layout and pattern do not go together, or the hardware has no figure for the dtype.
    """
    hardware, model = setting.hardware, setting.model
    rate = hardware.flops(setting.dtype) * hardware.matmul_efficiency
    if attention is None:
        attention = layer_passes(setting, progress)
    setting = settle(setting, attention.layout.local_tokens)
    step = training_step(setting, attention.layout.local_tokens, attention.memory)
    total = attention.total
    # Checkpointing runs the forward pass, its transfers included, once more only where it is set to. The
    # first part of the rows takes that part of the time, not its square, on the zigzag rank that has the
    # middle of the sequence.
    again = setting.repeated_attention
    tokens = step.tokens.outside
    # 2 FLOPs per parameter and token forward, 4 backward, and 2 more where the forward is repeated. Tiles of
    # an MLP are repeated, but not twice under checkpointing ("checkpointed regions" in
    # memory/tiles/tiled_call.py).
    # A training step costs 6 FLOPs per token for each (Kaplan et al. 2020, Scaling Laws, section 2.1).
    layers = float(model.layers * model.active_mlp_parameters + model.mixing_parameters)
    dense = ((8 if setting.checkpointing else 6) * layers + 6 * model.head_parameters) * tokens
    if setting.mlp_tokens is not None and not setting.checkpointing:
        dense += 2.0 * model.layers * model.active_mlp_parameters * tokens
    # Checkpointing swaps q, k, v and out of a layer once more, whether it computes attention again or not.
    swaps, times = head_swaps(setting, attention.layout.local_tokens), 2 + setting.checkpointing
    swap_s = times * model.attention_layers * swaps.seconds
    other_layers_s = sum(
        layer.layers * ((1 + setting.checkpointing) * layer.forward_s + layer.backward_s)
        for layer in attention.other_layers
    )
    # An all-reduce sends 2 (W-1)/W of its size, a gather or scatter one. Stage 3 gathers the parameters twice
    # and scatters gradients once (Rajbhandari et al. 2020, section 7).
    zero = setting.zero
    zero_bytes = (3 if zero.stage == 3 else 2) * zero.element_bytes * model.parameters
    zero_bytes = zero_bytes * (zero.world - 1) // zero.world
    host_bytes, host_s = host_traffic(setting, step)
    return Estimate(
        setting,
        attention.layout,
        step.moments(),
        attention.passes,
        total,
        total.seconds + again * total.forward_s + swap_s,
        total.exposed_s + again * total.forward_exposed_s,
        round((1 + again) * total.forward_bytes) + total.backward_bytes,
        attention.other_layers,
        other_layers_s,
        times * model.attention_layers * swaps.sent_bytes,
        swap_s,
        dense,
        dense / rate,
        zero_bytes,
        zero_bytes / hardware.collective_bytes_per_s(setting.devices),
        host_bytes,
        host_s,
        attention,
    )


# [Note: traffic with the host]
# Checkpoints go there and come back: a layer's input each, and attention's results where they are kept; so
# do attention's tensors between its passes. An optimizer on the host gets the gradients of the device's
# partition and returns parameters; it reads and writes its float32 states (28 bytes a parameter: the copy,
# two moments, the gradient read; all but the gradient written) at the rate of the host's memory, which all
# devices of a host share. Parameters on the host come as often as stage 3 gathers them. All of it counts as
# if compute hid nothing.
def get_optimizer_seconds(setting: TrainingSetting) -> float:
    """Return the seconds of an optimizer on the host; 0 without one, or without the rate of its memory."""
    rate = setting.hardware.host_memory_bytes_per_s
    if rate is None or not setting.zero.offload_optimizer:
        return 0.0
    return 28 * setting.zero.share(setting.model.parameters) * setting.node_devices / rate


def host_traffic(setting: TrainingSetting, step: TrainingStep) -> tuple[int, float]:
    """Return bytes between one device and its host in a step, and seconds; [Note: traffic with the host]."""
    zero, model, hardware = setting.zero, setting.model, setting.hardware
    moved, adam_s = 0, get_optimizer_seconds(setting)
    if setting.checkpointing and setting.offload_checkpoints:
        moved += 2 * model.layers * step.checkpoint_bytes
    moved += 2 * model.attention_layers * step.offloaded_bytes
    share = zero.share(model.parameters)
    if zero.offload_optimizer:
        moved += 2 * zero.element_bytes * share
    if zero.offload_parameters and zero.stage == 3:
        moved += 3 * zero.element_bytes * share
    link = hardware.host_link_bytes_per_s
    # On the CPU nothing moves; elsewhere a file without the rate is refused where options are read.
    return (0, adam_s) if setting.host_is_device or link is None else (moved, moved / link + adam_s)
