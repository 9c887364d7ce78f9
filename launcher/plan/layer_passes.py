"""Estimate the attention of all layers on one layout: cost of their passes, and memory of the largest one.

Owns the choice of ranks and head classes that represent all, and how layers with different patterns add up:
costs are summed over the layers, since ranks wait for each other in every layer; of memory the most counts.
pass_time.py has the cost of one pass, pass_memory.py its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ds_ring.kernels.flex.layouts import count_fullest_pairs
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles
from ds_ring.plugin import KERNELS, PASSES, load
from ds_ring.schedule.choose import AS_FAST, bind_one_head, count_rank_work
from ds_ring.schedule.directions import sample_origins
from ds_ring.schedule.layout import Layout, make_layout
from ds_ring.schedule.lowering import chunk_bytes_on, stage_shards
from ds_ring.schedule.plan import Plan, build_plan

from .hardware import Hardware
from .other_layers import LayerCost, LayerSetting, layer_cost
from .pass_memory import PassMemory, PassShape, pass_memory
from .pass_time import CostPart, PassCost, bytes_sent, pass_cost
from .training_setting import ELEMENT_BYTES, FEW_RANKS, TrainingSetting

FEW_CLASSES, MANY_RANKS = 4, 64

OnProgress = Callable[[int, int], None]


class LayerPass(NamedTuple):
    """Hold what the layers of one pattern cost."""

    pattern: Pattern  # theirs
    layers: int  # how many have it
    cost: PassCost  # of the passes of one of them, on the slowest rank looked at; bytes of the busiest
    lead_s: float = 0.0  # how much earlier the fastest rank has done these passes


class LayerPasses(NamedTuple):
    """Hold the attention of all layers."""

    layout: Layout  # of all of them
    passes: tuple[LayerPass, ...]  # by pattern
    other_layers: tuple[LayerCost, ...]  # not attention over all keys; by kind and pattern
    memory: PassMemory  # of the rank and the layer that need most
    ranks: int  # how many ring ranks were looked at

    @property
    def total(self) -> PassCost:
        """Return the cost of all layers' passes together."""
        return total_cost(self.passes)


def total_cost(passes: Sequence[LayerPass]) -> PassCost:
    """Return the sum of the passes of all layers."""
    if not passes:  # all attention is over chosen keys
        return PassCost(0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0.0, 0.0, 0.0)
    weighted = [
        [layer_pass.layers * value for value in vars(layer_pass.cost).values()] for layer_pass in passes
    ]
    total = PassCost(*(sum(values) for values in zip(*weighted, strict=True)))
    return replace(total, longest_hop_s=max(layer_pass.cost.longest_hop_s for layer_pass in passes))


def get_block_side(setting: TrainingSetting) -> int:
    """Return the side of the blocks in which the kernel computes; 1 for one that does not."""
    return setting.block_size if KERNELS[setting.kernel_that_runs].takes_blocks else 1


def plan_layout(setting: TrainingSetting) -> Layout:
    """Return the layout of all layers."""
    return make_layout(
        setting.layout, tokens=setting.tokens, ring_size=setting.ring_size,
        pattern=dict(setting.layout_mix), multiple_of=setting.ulysses_size,
        block_size=get_block_side(setting),
    )  # fmt: skip


def build_plans(setting: TrainingSetting, layout: Layout | None = None) -> list[tuple[Plan, int]]:
    """Build the plans of one rank's heads for each pattern, with their numbers of layers, on one layout."""
    layout = plan_layout(setting) if layout is None else layout
    heads, kv_heads = (n // setting.ulysses_size for n in (setting.model.heads, setting.model.kv_heads))
    shape, node = pass_shape(setting, layout), setting.node_ranks or None
    node = setting.ring_size if setting.ring_is_in_node else node
    shard_bytes = shape.batch * kv_heads * layout.local_tokens * shape.pair_dim * shape.element_bytes
    stage = stage_shards(setting.stage_bytes, setting.hardware.kind, setting.ring_size, node, shard_bytes)
    make_own = PASSES[setting.transport].plans

    def plan(pattern: Pattern) -> Plan:
        ring = build_plan(
            pattern, layout, query_heads=heads, kv_heads=kv_heads, prune=setting.prune,
            gradient_payload=setting.gradient_payload,
            ranks_per_node=node, stage_shards=None if make_own else stage,
        )  # fmt: skip
        if make_own is None:
            return ring
        token_bytes = shard_bytes // layout.local_tokens
        direct: Plan = load(make_own)(ring, node, setting.stage_bytes, token_bytes)
        return direct

    return [(plan(pattern), layers) for pattern, layers in setting.mix]


def get_executed(plan: Plan, block: int) -> Callable[[Tiles], int] | None:
    """Return how a kernel of such blocks counts a table of a dilated pattern; None where edges alone matter.

    Every tile counts as the fullest rank's do on average (`schedule/choose.py`). Searches go without: they
    underestimate arithmetic, so that what they say hides does.
    """
    if block == 1 or plan.pattern.tile_kind != "LongNet":
        return None
    waste = _waste(plan.pattern, plan.layout, block)
    return lambda tiles: round(waste * int(tiles.pairs.sum()))


@lru_cache(maxsize=16)
def _waste(pattern: Pattern, layout: Layout, block: int) -> float:
    """Return the pairs that the fullest rank executes over the most that a rank attends, of head 0."""
    bound = bind_one_head(pattern)
    return count_fullest_pairs(bound, layout, block) / max(int(count_rank_work(bound, layout).max()), 1)


def pass_shape(setting: TrainingSetting, layout: Layout) -> PassShape:
    """Return the tensors of a pass on one rank."""
    model, element = setting.model, ELEMENT_BYTES[setting.dtype]
    return PassShape(
        batch=setting.batch,
        group=model.heads // model.kv_heads,
        local_tokens=layout.local_tokens,
        head_dim=model.head_dim,
        element_bytes=element,
        chunk_bytes=setting.chunk_bytes or chunk_bytes_on(setting.hardware.kind, setting.ring_size),
        kernel=setting.kernel_that_runs,
    )


# [Note: sampled ranks]
# Up to eight ranks all are looked at, and of up to four all classes of heads; of larger rings three ranks
# (the first and the last among them; beyond 64 two) and two classes (beyond 64 one), which represent the
# others; and a rank with more work than these, where documents are packed. Of bytes sent the second rank and
# the last but one are looked at as well: in causal rings one of the four ends sends most.
def sampled_ranks(ring_size: int) -> list[int]:
    """Return the ring ranks that represent all; [Note: sampled ranks]."""
    if ring_size <= FEW_RANKS:
        return list(range(ring_size))
    ranks = sample_origins(ring_size)
    return [ranks[0], ranks[-1]] if ring_size > MANY_RANKS else [ranks[0], ranks[len(ranks) // 2], ranks[-1]]


def looked_at(plans: Sequence[Plan], layout: Layout) -> list[int]:
    """Return the ranks that represent all on a layout, the fullest of each pattern among them."""
    ranks = sampled_ranks(layout.ring_size)
    for plan in plans if layout.ring_size > FEW_RANKS else ():
        works = count_rank_work(bind_one_head(plan.pattern), layout)
        if works.max() > AS_FAST * works[ranks].max():
            ranks.append(int(works.argmax()))
    return ranks


def choose_parts(plan: Plan, ring_rank: int) -> list[CostPart]:
    """Return a rank's head-group schedules, or two that represent all; [Note: sampled ranks]."""
    if plan.ring_size <= FEW_CLASSES or len(plan.classes) <= 2:
        return [CostPart(head_class.rank(ring_rank), 1) for head_class in plan.classes]
    if plan.ring_size > MANY_RANKS:
        return [CostPart(plan.classes[0].rank(ring_rank), len(plan.classes))]
    half = len(plan.classes) // 2
    chosen = ((plan.classes[0], half), (plan.classes[-1], len(plan.classes) - half))
    return [CostPart(head_class.rank(ring_rank), times) for head_class, times in chosen]


def slowest_pass(
    plan: Plan, shape: PassShape, hardware: Hardware, dtype: str, bytes_per_s: float, overlap: bool = True
) -> PassCost:
    """Return the pass of the slowest sampled rank; arguments are those of `cost.pass_cost`."""
    ranks = [choose_parts(plan, rank) for rank in looked_at([plan], plan.layout)]
    rates = hardware, dtype
    costs = (pass_cost(parts, shape, *rates, bytes_per_s, overlap) for parts in ranks)
    return max(costs, key=lambda cost: cost.seconds)


def slowest_passes(setting: TrainingSetting, bytes_per_s: float) -> tuple[LayerPass, ...]:
    """Return the passes of the slowest sampled rank for every pattern, over links of that rate."""
    layout = plan_layout(setting)
    plans, shape = build_plans(setting, layout), pass_shape(setting, layout)
    rates = (setting.hardware, setting.dtype, bytes_per_s, setting.overlap)
    return tuple(LayerPass(plan.pattern, layers, slowest_pass(plan, shape, *rates)) for plan, layers in plans)


def layer_passes(setting: TrainingSetting, progress: OnProgress | None = None) -> LayerPasses:
    """Estimate the attention of all layers.

    Raises:
        RingError: layout and pattern do not go together.
    """
    layout = plan_layout(setting)
    plans, shape, needs, costs = build_plans(setting, layout), pass_shape(setting, layout), [], []
    ranks = looked_at([plan for plan, _ in plans], layout)
    rates = (setting.hardware, setting.dtype, setting.bytes_per_s, setting.overlap)
    executed = [get_executed(plan, get_block_side(setting)) for plan, _ in plans]
    for done, rank in enumerate(ranks):
        if progress is not None:
            progress(done, len(ranks))
        parts = [choose_parts(plan, rank) for plan, _ in plans]
        needs.append(_most([_memory(mine, shape) for mine in parts]))
        of_rank = zip(parts, executed, strict=True)
        costs.append([pass_cost(mine, shape, *rates, count_executed) for mine, count_executed in of_rank])
    passes = []
    for (plan, layers), of_ranks in zip(plans, zip(*costs, strict=True), strict=True):
        slowest = max(of_ranks, key=lambda cost: cost.seconds)
        lead_s = slowest.seconds - min(cost.seconds for cost in of_ranks)
        sent = [(cost.forward_bytes, cost.backward_bytes) for cost in of_ranks]
        ends = {1, layout.ring_size - 2} if layout.ring_size > FEW_RANKS else set()
        sent += [bytes_sent(choose_parts(plan, rank), shape) for rank in ends.difference(ranks)]
        forward, backward = max(sent, key=sum)
        busiest = replace(slowest, forward_bytes=forward, backward_bytes=backward)
        passes.append(LayerPass(plan.pattern, layers, busiest, lead_s))
    return LayerPasses(
        layout,
        tuple(passes),
        _other_layers(setting, layout, ranks),
        max(needs, key=lambda memory: memory.total),
        len(ranks),
    )


def _other_layers(setting: TrainingSetting, layout: Layout, ranks: list[int]) -> tuple[LayerCost, ...]:
    """Estimate the layers other than attention over all keys."""
    parts, element = setting.ulysses_size, ELEMENT_BYTES[setting.dtype]
    looked_at = sorted({rank * parts + part for rank in ranks for part in (0, parts - 1)})
    return tuple(
        layer_cost(
            kind, layers, LayerSetting(layout, parts, setting.batch, element, pattern), looked_at,
            setting.hardware, setting.dtype, setting.bytes_per_s, setting.kernel_that_runs,
        )
        for kind, pattern, layers in setting.other_layers
    )  # fmt: skip


def rough_pass_memory(setting: TrainingSetting) -> tuple[Layout, PassMemory]:
    """Return the layout, and what passes need by two ranks and one class of heads: enough for a search."""
    layout = plan_layout(setting)
    plans, shape, needs = build_plans(setting, layout), pass_shape(setting, layout), []
    for rank in sorted({0, setting.ring_size // 2}):
        parts = [[CostPart(plan.classes[0].rank(rank), len(plan.classes))] for plan, _ in plans]
        needs.append(_most([_memory(mine, shape) for mine in parts]))
    return layout, max(needs, key=lambda memory: memory.total)


def _memory(parts: list[CostPart], shape: PassShape) -> PassMemory:
    return pass_memory(tuple(part.head_class for part in parts for _ in range(part.times)), shape)


def _most(of_layers: list[PassMemory]) -> PassMemory:
    """Return what a rank needs for the layer that needs most; message buffers stay from layer to layer."""
    if not of_layers:
        return PassMemory(0, 0, 0)
    largest = max(of_layers, key=lambda memory: memory.accumulators + memory.workspace)
    return largest._replace(buffers=max(memory.buffers for memory in of_layers))
