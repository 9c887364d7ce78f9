"""The transport "fastest": hop by hop, in stages, or a direct exchange, whichever takes least by its steps.

[Note: the time of an exchange]
All ranks compute the same figures, from the steps of the same few ranks, forward. A batch takes the longest
of its pairs, of the tokens that arrive from other nodes, and of those from this node: `TOKEN_PAIRS` and
`TOKEN_PAIRS_IN_NODE` of `schedule/choose.py` say how many pairs a token costs. A batch with messages costs
20 microseconds more, at 600 TFLOPS and 64 heads of 128 `HOP_PAIRS`. A merge reads and writes 10 bytes of each
element of the rows that it adds to, over 2.5 TB/s: `ROW_PAIRS`. The slowest rank decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ds_ring.masks.slots import count_slots, merge_progressions
from ds_ring.schedule.choose import TOKEN_PAIRS, TOKEN_PAIRS_IN_NODE, bind_one_head, count_rank_work
from ds_ring.schedule.directions import make_stages, sample_origins
from ds_ring.schedule.lowering import STAGE_BYTES_GPU, lower_class
from ds_ring.schedule.plan import Plan
from ds_ring.schedule.steps import ChunkSteps, Recv
from ds_ring.transports.direct.plan import plan_for_bytes

HOP_PAIRS, ROW_PAIRS = 370_000.0, 600.0
MAX_READS = 1 << 18  # pairs of ranks of which one reads the other: more take seconds to plan
_log = logging.getLogger(__name__)


class ExchangeTime(NamedTuple):
    """Hold what a forward pass takes on the slowest of the ranks that were looked at."""

    pairs: float  # its time; [Note: the time of an exchange]
    batches: int  # with messages
    far: int  # tokens from other nodes that it receives, per K/V head
    near: int  # tokens from its own node

    def __str__(self) -> str:
        return (
            f"{self.pairs / 1e6:,.1f} M pairs ({self.batches} batches of messages, {self.far:,} tokens from"
            f" other nodes, {self.near:,} inside)"
        )


def choose_plan(plan: Plan, ranks_per_node: int | None, stage_bytes: int | str, token_bytes: int) -> Plan:
    """Return the plan that takes least, with its `reason`; arguments as of `plan_for_bytes`.

    With `stage_bytes` 0 keys travel hop by hop.
    """
    size = plan.ring_size
    if size == 1:
        return plan
    key = choose_plan, ranks_per_node, stage_bytes, token_bytes
    if key not in plan.derived:
        makers: dict[str, Callable[[], Plan]] = {"ring": lambda: plan}
        left_out = []
        most = STAGE_BYTES_GPU if isinstance(stage_bytes, str) else stage_bytes
        shards = min(most // max(token_bytes * plan.layout.local_tokens, 1), size - 1)
        if shards >= min(2, size - 1):
            makers["stages"] = lambda: _in_stages(plan, shards)
        else:
            left_out.append("stages, which have no room for two shards")
        if not most:
            left_out.append("direct, as stage_bytes is 0")
        elif _count_reads(plan) > MAX_READS:
            left_out.append("direct, as too many ranks read each shard")
        else:
            makers["direct"] = lambda: plan_for_bytes(plan, ranks_per_node, stage_bytes, token_bytes)
        plan.derived[key] = _take_fastest(makers, left_out, ranks_per_node or size)
    return plan.derived[key]


def _take_fastest(makers: dict[str, Callable[[], Plan]], left_out: list[str], inner: int) -> Plan:
    plans = {name: make() for name, make in makers.items()}
    times = {name: compute_time(candidate, inner) for name, candidate in plans.items()}
    best = min(times, key=lambda name: times[name].pairs)
    others = [f"{name} {time}" for name, time in times.items() if name != best]
    text = f"transport fastest took {best}: {times[best]}; {'; '.join(others) or 'no other was possible'}"
    reason = "; without ".join([text, *left_out])
    _log.info("ds_ring: %s", reason)
    return replace(plans[best], reason=reason)


def _in_stages(plan: Plan, shards: int) -> Plan:
    directions = make_stages(plan.ring_size, shards)
    classes = tuple(replace(head_class, directions=directions) for head_class in plan.classes)
    return replace(plan, classes=classes, derived={}, _ranks={})


def _count_reads(plan: Plan) -> float:
    """Return about how many pairs of ranks there are of which one reads the other."""
    reads, origins = plan.classes[0].reads, sample_origins(plan.ring_size)
    if not plan.classes[0].prune:
        return float(plan.ring_size**2)
    return plan.ring_size * sum(len(reads.readers(origin)) for origin in origins) / len(origins)


def compute_time(plan: Plan, inner: int) -> ExchangeTime:
    """Return the time of a plan's forward pass, with so many ranks of a node."""
    size, layout = plan.ring_size, plan.layout
    busiest = int(np.argmax(count_rank_work(bind_one_head(plan.pattern), layout)))
    head_class = plan.classes[0]
    times = []
    for rank in sorted({0, size // 2, size - 1, busiest}):
        times.append(_time_steps(lower_class(head_class.rank(rank), False), rank, inner))
    return max(times, key=lambda time: time.pairs)


def _time_steps(steps: ChunkSteps, rank: int, inner: int) -> ExchangeTime:
    total, batches, all_far, all_near = 0.0, 0, 0, 0
    for step_round in steps.rounds:
        received = [
            (step.peer // inner == rank // inner, step.count)
            for step in step_round.posted
            if isinstance(step, Recv)
        ]
        near, far = (sum(count for inside, count in received if inside is here) for here in (True, False))
        pairs = merged = 0
        for step in filter(lambda step: len(step.tiles), step_round.computed):
            q = step.tiles.q
            pairs += int(step.tiles.pairs.sum())
            rows = np.stack([q.slot, np.ones_like(q.slot), q.length], axis=1)
            merged += count_slots(merge_progressions(rows))
        total += max(float(pairs), TOKEN_PAIRS * far, TOKEN_PAIRS_IN_NODE * near) + ROW_PAIRS * merged
        total += HOP_PAIRS * bool(step_round.posted)
        batches, all_far, all_near = batches + bool(step_round.posted), all_far + far, all_near + near
    return ExchangeTime(total, batches, all_far, all_near)
