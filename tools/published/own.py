"""Model ds_ring's pass of attention beside the published ones, and what limits it where documents are packed.

Owns the sum of the planner's ring pass (`plan/pass_time.py`) at the published rates of kernel and links, and
of the merges, which the planner leaves out: beside hops of 8 Ki tokens they take a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from benchmarks.document_lengths import make_document_pattern

from ds_ring.masks.slots import count_slots, merge_progressions
from ds_ring.masks.tiles import Axis
from ds_ring.schedule.choose import bind_one_head, count_rank_work
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import count_heads
from ds_ring_launcher.plan.hardware import AttentionEfficiency, Hardware, read_hardware
from ds_ring_launcher.plan.layer_passes import build_plans, choose_parts, looked_at, pass_shape, plan_layout
from ds_ring_launcher.plan.model_file import ModelShape
from ds_ring_launcher.plan.model_memory import Zero
from ds_ring_launcher.plan.pass_memory import PassShape
from ds_ring_launcher.plan.pass_time import BACKWARD_FLOPS, FORWARD_FLOPS, CostPart, pass_cost
from ds_ring_launcher.plan.training_setting import TrainingSetting
from published.table import Kernel, Machine, rate_at

ADD_BYTES = 10  # of `a += b`: a float32, b bfloat16


@dataclass(frozen=True)
class Pass:
    """Describe an attention pass: where, of what, over which documents."""

    machine: Machine
    kernel: Kernel
    ranks: int
    lengths: tuple[int, ...]  # of the documents; one for a causal sequence
    tokens: int = 8192  # of a rank
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    element_bytes: int = 2

    @property
    def flops(self) -> float:
        """Return the FLOPs of a rank forward that count in a published TFLOPS figure."""
        pairs = sum(n * (n + 1) / 2 for n in self.lengths)
        return 4 * self.head_dim * pairs * self.heads / self.ranks

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of a rank's keys and values together."""
        return 2 * self.tokens * self.kv_heads * self.head_dim * self.element_bytes

    def kernel_rate(self, way: Literal["forward", "backward"]) -> float:
        """Return FLOP/s of the kernel: the best of long calls; on documents that of their lengths."""
        curve = self.kernel.curve(way)
        if len(self.lengths) == 1:
            return max(curve.full.values()) * 1e12
        pairs = [(n, n * (n + 1) / 2) for n in self.lengths]
        seconds = sum(count / rate_at(curve.causal, n) for n, count in pairs)
        return sum(count for _, count in pairs) / seconds


class OwnPass(NamedTuple):
    """Hold what a pass of ds_ring takes on the slowest of the ranks that were looked at."""

    layout: str
    imbalance: float  # work, maximum over mean
    sent: float  # the most K/V that a rank looked at sends forward, over those of an all-gather
    reads: float  # tokens of other ranks whose K/V a rank's queries attend to, the mean over the ranks
    # exposed, fixed, merging: parts of both directions: waiting for messages, posting and starting, merging
    exposed: float
    fixed: float
    merging: float
    # kernel_s, seconds: forward and backward; the kernel without anything else, and the whole pass
    kernel_s: tuple[float, float]
    seconds: tuple[float, float]


def make_own_setting(attention: Pass, stage_shards: int = 0, transport: str = "ring") -> TrainingSetting:
    """Return one layer of a published setting, with links and kernel at their published rates.

    `stage_shards` is what a stage has room for ([Note: stages] in `schedule/rank_plan.py`); 0: "auto".
    """
    width = attention.heads * attention.head_dim
    model = ModelShape(
        1, width, attention.heads, attention.kv_heads, attention.head_dim, width, width
    )  # fmt: skip
    return TrainingSetting(
        tokens=attention.ranks * attention.tokens, ring_size=attention.ranks, ulysses_size=1, model=model,
        pattern=make_document_pattern(attention.lengths), layout="auto",
        zero=Zero(3, attention.ranks, attention.element_bytes), dtype="bfloat16",
        hardware=_with_published_rates(attention), stage_bytes=stage_shards * attention.kv_bytes or "auto",
        transport=transport,
    )  # fmt: skip


def _with_published_rates(attention: Pass) -> Hardware:
    """Return H100 with the pass's links and kernel; on documents the kernel has the rate of their lengths."""
    hardware, machine = read_hardware("h100_flash3"), attention.machine
    peak = hardware.flops("bfloat16")
    parts = {way: attention.kernel_rate(way) / peak for way in ("forward", "backward")}
    rates = {
        "attention_efficiency": AttentionEfficiency(**parts),
        "intra_node_bytes_per_s": machine.link,
        "inter_node_bytes_per_s": machine.network,
        "devices_per_node": machine.node,
    }
    return hardware.model_copy(update=rates)


def compute_own_pass(attention: Pass, stage_shards: int = 0, transport: str = "ring") -> OwnPass:
    """Return the pass of one layer; arguments as of `make_own_setting`."""
    setting = make_own_setting(attention, stage_shards, transport)
    layout = plan_layout(setting)
    ((plan, _),), shape = build_plans(setting, layout), pass_shape(setting, layout)
    passes = []
    for rank in looked_at([plan], layout):
        parts = choose_parts(plan, rank)
        cost = pass_cost(parts, shape, setting.hardware, setting.dtype, setting.bytes_per_s)
        merges = [moved / attention.machine.memory for moved in count_merged_bytes(parts, shape)]
        passes.append((cost.seconds + sum(merges), cost, merges))
    total, cost, merges = max(passes, key=lambda of_rank: of_rank[0])
    works = count_rank_work(bind_one_head(plan.pattern), layout)
    imbalance = float(works.max() / works.mean())
    efficiency, peak = setting.hardware.attention_efficiency, setting.hardware.flops(setting.dtype)
    forward, backward = (
        imbalance * flops * attention.flops / 4 / (part * peak)
        for flops, part in ((FORWARD_FLOPS, efficiency.forward), (BACKWARD_FLOPS, efficiency.backward))
    )
    return OwnPass(
        layout.name,
        imbalance,
        max(rank_cost.forward_bytes for _, rank_cost, _ in passes)
        / (attention.kv_bytes * (attention.ranks - 1)),
        count_reads(layout, attention.lengths),
        cost.exposed_s / total,
        max(cost.compute_s - forward - backward, 0.0) / total,
        sum(merges) / total,
        (forward, backward),
        (cost.forward_s + merges[0], cost.backward_s + merges[1]),
    )


def count_merged_bytes(parts: list[CostPart], shape: PassShape) -> list[float]:
    """Return the bytes that merges of a rank read and write, forward and backward.

    A hop's out is bfloat16 and is merged into float32; likewise dq, dk and dv are added.
    """
    classes = [part.head_class for part in parts for _ in range(part.times)]
    totals = [0.0, 0.0]
    for backward in (False, True):
        for chunk in shape.schedule(classes, backward).chunks:
            element_bytes = ADD_BYTES * shape.batch * count_heads(chunk.kv_heads) * shape.head_dim
            computed = [step.tiles for steps in chunk.steps.rounds for step in steps.computed]
            for tiles in filter(len, computed):
                rows = shape.group * _count_covered(tiles.q) + 2 * backward * _count_covered(tiles.k)
                totals[backward] += element_bytes * rows
    return totals


def _count_covered(axis: Axis) -> int:
    """Return how many slots the ranges of one side of tiles touch."""
    rows = np.stack([axis.slot, np.ones_like(axis.slot), axis.length], axis=1)
    return count_slots(merge_progressions(rows))


def count_reads(layout: Layout, lengths: tuple[int, ...]) -> float:
    """Return how many tokens of others a rank reads, the mean over the ranks; documents are causal."""
    starts, ranks = np.cumsum((0, *lengths[:-1])), layout.ring_size
    owner = layout.slots_by_position() // layout.local_tokens
    last = np.tile(starts - 1, (ranks, 1))  # the last token that a rank reads of each document
    np.maximum.at(last, (owner, np.repeat(np.arange(len(lengths)), lengths)), np.arange(layout.tokens))
    read = (last + 1 - starts).sum(axis=1) - np.bincount(owner, minlength=ranks)
    return float(read.mean())
