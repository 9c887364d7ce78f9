"""Estimate memory, FLOPs, bytes and time of a training step on one device. Pure arithmetic.

Owns the choice of ranks that are looked at, and the sum of it all. What is planned stands in
training_setting.py, searches in capacity_search.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ds_ring.config.hardware import Hardware
from ds_ring.estimator.cost import Part, PassCost, pass_cost
from ds_ring.estimator.model_memory import LocalTokens, Moment, TrainingStep
from ds_ring.estimator.model_shape import ModelShape
from ds_ring.estimator.pass_memory import PassMemory, PassShape, pass_memory
from ds_ring.estimator.training_setting import ELEMENT_BYTES, FEW_RANKS, Setting
from ds_ring.estimator.zero_memory import Zero
from ds_ring.registry import FAST_KERNELS
from ds_ring.schedule.head_chunks import chunk_bytes_on
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.layouts import make_layout
from ds_ring.schedule.plan import Plan, build_plan, sampled_origins

FEW_CLASSES, MANY_RANKS = 4, 64

Progress = Callable[[int, int], None]


class Estimate(NamedTuple):
    """Hold what a step costs on the device that needs most."""

    setting: Setting  # what was planned
    layout: Layout  # which one it is
    moments: list[Moment]  # every moment at which memory can be highest
    attention: PassCost  # of one layer's passes on the slowest rank looked at
    # attention_s, exposed_s: of all layers, with what checkpointing computes again
    attention_s: float
    exposed_s: float
    # dense_flops, dense_s: of the other matrices
    dense_flops: float
    dense_s: float
    # zero_bytes, zero_s: gradients and parameters between devices, as if nothing of it were hidden
    zero_bytes: int
    zero_s: float
    ranks: int  # how many ring ranks were looked at

    @property
    def peak(self) -> Moment:
        """Return the moment of the most memory."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def fits(self) -> bool:
        """Return whether the peak is at most what a device can give to tensors."""
        return self.peak.total <= self.setting.usable_bytes

    @property
    def step_s(self) -> float:
        """Return the seconds of one optimizer step of one micro-batch."""
        return self.attention_s + self.dense_s + self.zero_s


def plan_of(setting: Setting) -> Plan:
    """Build the plan of one rank's heads."""
    layout = make_layout(
        setting.layout, tokens=setting.tokens, ring_size=setting.ring_size, pattern=setting.pattern,
        multiple_of=setting.ulysses_size,
    )  # fmt: skip
    heads, kv_heads = setting.model.heads, setting.model.kv_heads
    return build_plan(
        setting.pattern,
        layout,
        query_heads=heads // setting.ulysses_size,
        kv_heads=kv_heads // setting.ulysses_size,
        prune=setting.prune,
    )


def pass_shape(setting: Setting, layout: Layout) -> PassShape:
    """Return the tensors of a pass on one rank."""
    model, element = setting.model, ELEMENT_BYTES[setting.dtype]
    return PassShape(
        batch=setting.batch,
        group=model.heads // model.kv_heads,
        local_tokens=layout.local_tokens,
        head_dim=model.head_dim,
        element_bytes=element,
        chunk_bytes=setting.chunk_bytes or chunk_bytes_on(setting.hardware.kind, setting.ring_size),
        kernel=FAST_KERNELS[setting.hardware.kind],
        contiguous=setting.ulysses_size > 1,
    )


# [Note: sampled ranks]
# Up to eight ranks all are looked at, and of up to four all classes of heads; of larger rings three ranks
# (the first and the last among them; beyond 64 two) and two classes (beyond 64 one), which stand for the
# others.
def sampled_ranks(ring_size: int) -> list[int]:
    """Return the ring ranks that stand for all; [Note: sampled ranks]."""
    if ring_size <= FEW_RANKS:
        return list(range(ring_size))
    ranks = sampled_origins(ring_size)
    return [ranks[0], ranks[-1]] if ring_size > MANY_RANKS else [ranks[0], ranks[len(ranks) // 2], ranks[-1]]


def parts_of(plan: Plan, ring_rank: int) -> list[Part]:
    """Return a rank's head-group schedules, or two that stand for all; [Note: sampled ranks]."""
    if plan.ring_size <= FEW_CLASSES or len(plan.classes) <= 2:
        return [Part(head_class.rank(ring_rank), 1) for head_class in plan.classes]
    if plan.ring_size > MANY_RANKS:
        return [Part(plan.classes[0].rank(ring_rank), len(plan.classes))]
    half = len(plan.classes) // 2
    chosen = ((plan.classes[0], half), (plan.classes[-1], len(plan.classes) - half))
    return [Part(head_class.rank(ring_rank), times) for head_class, times in chosen]


def slowest_pass(
    plan: Plan, shape: PassShape, hardware: Hardware, dtype: str, bytes_per_s: float, overlap: bool = True
) -> PassCost:
    """Return the pass of the slowest sampled rank; arguments are those of `cost.pass_cost`."""
    ranks = [parts_of(plan, rank) for rank in sampled_ranks(plan.ring_size)]
    costs = (pass_cost(parts, shape, hardware, dtype, bytes_per_s, overlap) for parts in ranks)
    return max(costs, key=lambda cost: cost.seconds)


def rough_memory(setting: Setting) -> int:
    """Return peak bytes by two ranks and one class of heads: enough for a search."""
    plan = plan_of(setting)
    ranks = sorted({0, setting.ring_size // 2})
    parts = [[Part(plan.classes[0].rank(rank), len(plan.classes))] for rank in ranks]
    return max(moment.total for moment in _moments(setting, plan.layout, parts))


def least_memory(setting: Setting) -> int:
    """Return peak bytes without what the ring needs: no plan has to be made for it."""
    slots = -(-setting.tokens // (setting.ring_size * setting.ulysses_size)) * setting.ulysses_size
    return _step(setting, slots, PassMemory(0, 0, 0)).peak().total


def _moments(setting: Setting, layout: Layout, parts: list[list[Part]]) -> list[Moment]:
    shape = pass_shape(setting, layout)
    classes = (tuple(part.head_class for part in mine for _ in range(part.times)) for mine in parts)
    most = max((pass_memory(of_rank, shape) for of_rank in classes), key=lambda memory: memory.total)
    return _step(setting, layout.local_tokens, most).moments()


def _step(setting: Setting, slots: int, ring: PassMemory) -> TrainingStep:
    ulysses, model = setting.ulysses_size, setting.model
    inside = setting.batch * slots
    tokens = LocalTokens(inside // ulysses, inside, model.heads // ulysses, model.kv_heads // ulysses)
    kept = not setting.recompute_attention
    return TrainingStep(model, setting.zero, tokens, ring, setting.checkpointing, kept, setting.loss_tokens)


def estimate(setting: Setting, progress: Progress | None = None) -> Estimate:
    """Estimate everything about a setting.

    Raises:
        RingError: layout and pattern do not go together, or the hardware has no figure for the dtype.
    """
    hardware, model = setting.hardware, setting.model
    rate = hardware.flops(setting.dtype) * hardware.matmul_efficiency
    plan, parts = plan_of(setting), []
    shape, ranks = pass_shape(setting, plan.layout), sampled_ranks(setting.ring_size)
    for done, rank in enumerate(ranks):
        if progress is not None:
            progress(done, len(ranks))
        parts.append(parts_of(plan, rank))
    moments = _moments(setting, plan.layout, parts)
    costs = [
        pass_cost(mine, shape, hardware, setting.dtype, setting.bytes_per_s, setting.overlap)
        for mine in parts
    ]
    slowest = max(costs, key=lambda cost: cost.seconds)
    # Checkpointing runs the forward pass, its transfers included, once more only where it is told to.
    again = slowest.forward_s if setting.checkpointing and setting.recompute_attention else 0.0
    exposed = max(cost.exposed_s for cost in costs)
    tokens = setting.batch * plan.layout.local_tokens // setting.ulysses_size
    # 2 FLOPs per parameter and token forward, 4 backward, and 2 more where the forward is repeated.
    dense = (8 if setting.checkpointing else 6) * float(model.matrix_parameters) * tokens
    zero_bytes = _zero_bytes(setting.zero, model)
    return Estimate(
        setting,
        plan.layout,
        moments,
        slowest,
        model.layers * (slowest.seconds + again),
        model.layers * exposed,
        dense,
        dense / rate,
        zero_bytes,
        zero_bytes / _widest_link(setting),
        len(ranks),
    )


def _zero_bytes(zero: Zero, model: ModelShape) -> int:
    """Return bytes sent by one device: an all-reduce is 2 (W-1)/W of its size, a gather or scatter one."""
    # Stage 3 gathers the parameters twice and scatters gradients once (Rajbhandari et al. 2020, section 7).
    times = 3 if zero.stage == 3 else 2
    return times * zero.element_bytes * model.parameters * (zero.world - 1) // zero.world


def _widest_link(setting: Setting) -> float:
    hardware = setting.hardware
    inside = setting.devices <= hardware.devices_per_node
    return hardware.intra_node_bytes_per_s if inside else hardware.inter_node_bytes_per_s
