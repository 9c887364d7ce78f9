"""Model ds_ring's pass of attention beside the published ones, and what limits it where documents are packed.

Owns the sum of the planner's ring pass (`plan/pass_time.py`) at the published rates of kernel and links, and
of the merges, which the planner leaves out: beside hops of 8 Ki tokens they take a tenth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.choose import bound_to_one_head, work_of_ranks
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import count_heads

from ..plan.documents import pattern_of
from ..plan.hardware import AttentionEfficiency, read_hardware
from ..plan.layer_passes import layout_of, looked_at, parts_of, pass_shape, plans_of
from ..plan.model_file import ModelShape
from ..plan.model_memory import Zero
from ..plan.pass_memory import PassShape
from ..plan.pass_time import BACKWARD_FLOPS, FORWARD_FLOPS, CostPart, pass_cost
from ..plan.training_setting import TrainingSetting
from .methods import ADD_BYTES, Pass
from .table import Kernel, Machine


class Reads(NamedTuple):
    """Count tokens of other ranks whose K/V a rank's queries attend to."""

    mean: float  # over the ranks
    near: int  # the most that come from the rank's own node
    far: (
        float  # the most that come from other nodes, where each crosses once and its node shares the adapters
    )


class OwnPass(NamedTuple):
    """Hold what a pass of ds_ring takes on the slowest of the ranks that were looked at."""

    layout: str
    imbalance: float  # work, maximum over mean
    sent: float  # the most K/V that a rank looked at sends forward, over those of an all-gather
    reads: Reads  # of other ranks' tokens
    exposed: float  # part of both directions in which the rank waits for messages
    fixed: float  # part of both that posts messages and starts kernels
    merging: float  # part of both that merges
    kernel_s: tuple[float, float]  # forward and backward, without anything else
    forward_s: float
    backward_s: float


def own_setting(one: Pass, stage_shards: int = 0) -> TrainingSetting:
    """Return one layer of a published setting, with links and kernel at their published rates.

    `stage_shards` is what a stage has room for ([Note: stages] in `schedule/rank_plan.py`); 0: "auto".
    """
    hardware = read_hardware("h100_flash3")
    rates = _efficiency(one, one.machine, one.kernel, hardware.flops("bfloat16"))
    hardware = hardware.model_copy(update=rates)
    width = one.heads * one.head_dim
    model = ModelShape(1, width, one.heads, one.kv_heads, one.head_dim, width, width)
    return TrainingSetting(
        tokens=one.ranks * one.tokens, ring_size=one.ranks, ulysses_size=1, model=model,
        pattern=pattern_of(one.lengths), layout="auto", zero=Zero(3, one.ranks, one.element_bytes),
        dtype="bfloat16", hardware=hardware, stage_bytes=stage_shards * one.kv_bytes or "auto",
    )  # fmt: skip


def _efficiency(one: Pass, machine: Machine, kernel: Kernel, peak: float) -> dict[str, object]:
    """Return the fields of a hardware description: of documents the kernel has the rate of their lengths."""
    parts = {}
    for way in ("forward", "backward"):
        curve, both = kernel.curve(way), [(n, n * (n + 1) / 2) for n in one.lengths]
        if len(one.lengths) == 1:
            parts[way] = max(curve.full.values()) * 1e12 / peak
        else:
            at = Pass(machine, kernel, 1, one.tokens, 1, 1, way, one.lengths)
            parts[way] = at.pair_flops * sum(pairs for _, pairs in both) / at.causal_s(one.lengths, 1) / peak
    return {
        "attention_efficiency": AttentionEfficiency(**parts),
        "intra_node_bytes_per_s": machine.link,
        "inter_node_bytes_per_s": machine.network,
        "devices_per_node": machine.node,
    }


def own_pass(one: Pass, stage_shards: int = 0) -> OwnPass:
    """Return the pass of one layer; arguments as of `own_setting`."""
    setting = own_setting(one, stage_shards)
    layout = layout_of(setting)
    ((plan, _),), shape = plans_of(setting, layout), pass_shape(setting, layout)
    rates = (setting.hardware, setting.dtype, setting.bytes_per_s)
    found = []
    works = work_of_ranks(bound_to_one_head(setting.mix[0][0]), layout)
    for rank in looked_at([plan], layout):
        parts = parts_of(plan, rank)
        cost = pass_cost(parts, shape, *rates)
        merges = [one.copies_s(moved) for moved in merged_bytes(parts, shape)]
        found.append((cost.seconds + sum(merges), cost, merges))
    _, cost, merges = max(found, key=lambda each: each[0])
    whole = one.kv_bytes * (one.ranks - 1)
    imbalance = float(works.max() / works.mean())
    efficiency, peak = setting.hardware.attention_efficiency, setting.hardware.flops(setting.dtype)
    rates_of = {"forward": efficiency.forward * peak, "backward": efficiency.backward * peak}
    forward, backward = (
        imbalance * flops * one.flops / one.pair_flops * one.head_dim / rates_of[way]
        for way, flops in (("forward", FORWARD_FLOPS), ("backward", BACKWARD_FLOPS))
    )
    total = cost.seconds + sum(merges)
    return OwnPass(
        layout.name,
        imbalance,
        max(each[1].forward_bytes for each in found) / whole,
        reads_of(layout, one.lengths, one.machine.node),
        cost.exposed_s / total,
        max(cost.compute_s - forward - backward, 0.0) / total,
        sum(merges) / total,
        (forward, backward),
        cost.forward_s + merges[0],
        cost.backward_s + merges[1],
    )


def merged_bytes(parts: list[CostPart], shape: PassShape) -> tuple[float, float]:
    """Return the bytes that merges of a rank read and write, forward and backward.

    A hop's out is bfloat16 and is merged into float32; likewise dq, dk and dv are added.
    """
    classes = [part.head_class for part in parts for _ in range(part.times)]
    totals = []
    for backward in (False, True):
        schedule = shape.schedule(classes, backward)
        total = 0.0
        for chunk in schedule.chunks:
            heads = count_heads(chunk.kv_heads)
            for steps in chunk.steps.rounds:
                for step in steps.computed:
                    if len(step.tiles):
                        rows = shape.group * _covered(step.tiles, "q") + 2 * backward * _covered(
                            step.tiles, "k"
                        )
                        total += ADD_BYTES * shape.batch * heads * shape.head_dim * rows
        totals.append(total)
    return totals[0], totals[1]


def _covered(tiles: Tiles, side: str) -> int:
    """Return how many slots of a side the tiles touch."""
    axis = getattr(tiles, side)
    order = np.argsort(axis.slot, kind="stable")
    starts = axis.slot[order]
    ends = np.maximum.accumulate(starts + axis.length[order])
    before = np.concatenate([[0], ends[:-1]])
    return int(np.maximum(ends - np.maximum(starts, before), 0).sum())


def reads_of(layout: Layout, lengths: tuple[int, ...], node: int) -> Reads:
    """Return what the ranks of a layout read of others, documents being causal."""
    starts, ranks = np.concatenate([[0], np.cumsum(lengths)[:-1]]), layout.ring_size
    owner = layout.slots_by_position() // layout.local_tokens // node
    total, near, far = 0, 0, 0.0
    for first in range(0, ranks, node):
        group = range(first, min(first + node, ranks))
        # how many of the first n tokens are in the node
        inside = np.concatenate([[0], np.cumsum(owner == first // node)])
        furthest = starts - 1  # the last token that the node reads of each document
        for rank in group:
            positions = layout.positions(rank)
            positions = np.sort(positions[positions >= 0])
            document = np.searchsorted(starts, positions, side="right") - 1
            ends = np.flatnonzero(np.diff(document, append=len(starts)))
            read, last = document[ends], positions[ends]
            begins = starts[read]
            total += int((last - begins + 1).sum()) - len(positions)
            near = max(near, int((inside[last + 1] - inside[begins]).sum()) - len(positions))
            furthest[read] = np.maximum(furthest[read], last)
        crossing = (furthest + 1 - starts) - (inside[furthest + 1] - inside[starts])
        far = max(far, int(crossing.sum()) / len(group))
    return Reads(total / ranks, near, far)


def direct_s(one: Pass, found: OwnPass, backward: bool) -> float:
    """Return the seconds if the tokens that are read came straight from their owners, in two halves.

    Not built: a bound on what another schedule than the ring gains on the same layout. The first half has
    nothing to hide behind, nor backward has the last half of the gradients.
    """
    token = one.kv_bytes / one.tokens
    message = max(found.reads.near * token / one.machine.link, found.reads.far * token / one.machine.network)
    kernel = found.kernel_s[backward]
    merge = one.copies_s(2 * ADD_BYTES * one.out_elements)
    if backward:
        return message / 2 + max(kernel / 2, message) + kernel / 2 + message / 2 + merge
    return message / 2 + max(kernel / 2, message / 2) + kernel / 2 + merge
