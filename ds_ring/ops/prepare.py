"""Make the pass of a call: check its operands, plan it, and agree on it with the other ranks.

Owns what operands of one description (shapes, dtypes, devices) have in common (`Prepared`); it is computed
once and cached by the context.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ds_ring.comm.collective import Agreement, collective
from ds_ring.kernels.interface import Kernel, Operands
from ds_ring.masks.catalog import HeadShard
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.checks import check_finite, check_heads, check_not_captured, check_tensors, check_tokens
from ds_ring.ops.context import PATIENCE, RingContext
from ds_ring.ops.passes import Pass, count_forward_pass
from ds_ring.plugin import load
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import stage_shards
from ds_ring.schedule.plan import Plan, build_plan, check_length
from ds_ring.schedule.rank_plan import RankPlan

if TYPE_CHECKING:
    from ds_ring.ops.extra_operand import ExtraOperand

MakePlan = Callable[[Pattern, Layout], Plan]

KEPT_DESCRIPTIONS = 8  # of operands, per context; and reasons of plans, per mesh
_log = logging.getLogger(__name__)


class PlanReasons:
    """Hold the reasons why the latest plans of a mesh were chosen; `engine.ring.describe` returns them."""

    def __init__(self) -> None:
        self.texts: dict[str, None] = {}

    def add(self, text: str) -> None:
        """Add a text. If there are more than `KEPT_DESCRIPTIONS` texts, drop the oldest one."""
        self.texts[text] = self.texts.pop(text, None)
        if len(self.texts) > KEPT_DESCRIPTIONS:
            del self.texts[next(iter(self.texts))]


class Prepared(NamedTuple):
    """What a pass over tensors of one description needs besides the tensors."""

    plan: Plan
    rank_plan: RankPlan
    kernel: Kernel
    scale: float
    chunk_bytes: int
    offload: bool
    agreement: Agreement
    make_plan: MakePlan  # the function that made `plan`


def prepare_pass(
    context: RingContext, call: collective, operands: Operands, extras: Sequence[ExtraOperand] = ()
) -> Pass:
    """Return the pass of the context (a `RingPass`, or that of another transport), checked and planned.

    Before the function returns, ranks compare headers; on a GPU with overlap this may still run afterwards.
    """
    prepared, finish_header_check = prepare(context, call, operands, extras)
    kernel = prepared.kernel
    for operand in extras:
        kernel = operand.bind_operand(kernel, context, operands)
    if kernel is not prepared.kernel:
        prepared = prepared._replace(kernel=kernel)
    return context.make_pass(context, prepared, finish_header_check)


def prepare(
    context: RingContext, call: collective, operands: Operands, extras: Sequence[ExtraOperand] = ()
) -> tuple[Prepared, Callable[[], None] | None]:
    """Check the operands, and compare headers with the other ranks.

    A description of operands (`key`) has their shapes, dtypes and devices, and whether the pass is backward.
    For a new description, `_prepare` checks the operands and makes the plan. Each call makes further checks.

    Returns:
        What the pass needs; and a function that finishes the comparison of headers, or None.

    Raises:
        RingShapeError: this rank's tensors do not fit.
        RingMismatchError: the tensors of another rank do not fit, or differ from this rank's tensors.
    """
    q, k, v, grad_out, _ = operands
    options = context.options
    key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.is_inference(), grad_out is None,
        tuple(operand.description for operand in extras) if extras else None,
    )  # fmt: skip
    prepared: Prepared | None = context.prepared.get(key)
    if context.keeps_functions and grad_out is None:
        context.check_functions()
    if prepared is None:
        prepared = _prepare(context, call.name, operands, extras)
        if len(context.prepared) >= KEPT_DESCRIPTIONS:
            context.prepared.clear()
        context.prepared[key] = prepared
    # The following checks are made in every call.
    if q.is_cuda:
        check_not_captured(q)
    if options.check_finite:
        tensors = {operand.name: operand.tensor for operand in extras}
        check_finite(context.mesh.ring_rank, None, q=q, k=k, v=v, grad_out=grad_out, **tensors)
    finish_header_check = None
    if not call.alone:
        ask = PATIENCE[q.device.type]
        patience = 0.0
        if ask is not None:
            patience = ask(context, call.name, q, k, prepared=prepared, operands=operands)
        # On a GPU with hops and overlap, hop 0 computes while ranks compare headers.
        if not (q.is_cuda and options.overlap and options.has_hops):
            call.compare_headers(prepared.agreement, patience)
        else:
            finish_header_check = call.compare_headers_meanwhile(prepared.agreement, patience)
    if grad_out is None:
        count_forward_pass()
    return prepared, finish_header_check


def check(
    context: RingContext, operands: Operands, parts: int = 1, extras: Sequence[ExtraOperand] = ()
) -> tuple[Layout, Kernel]:
    """Check this rank's operands and return their layout and kernel.

    Args:
        context, operands, extras: of the call.
        parts: number of Ulysses ranks that hold one part each of a ring shard; 1 after the all-to-all.

    Raises:
        RingError: the first fault found on this rank, in most cases a RingShapeError.
    """
    q, k, v, *_ = operands
    check_tensors(q, k, v, not any(operand.allows_other_key_dim for operand in extras))
    for operand in extras:
        operand.check(context, operands, parts)
    check_heads(q.shape[1], k.shape[1], parts)
    layout = context.layout_for(q.shape[2] * parts, q.device.type)
    check_tokens(k.shape[2], layout.part_slots(parts), q.shape[2])
    check_length(context.pattern, layout)
    options = context.options
    if options.transport_spec.checks_layout is not None:
        load(options.transport_spec.checks_layout)(layout, options.block_size)
    # Patterns count the heads of all Ulysses ranks: q has them all before the all-to-all, H / U after it.
    all_heads = q.shape[1] * context.mesh.ulysses_size // parts
    context.check_pairs(layout, q, all_heads)
    return layout, context.choose_kernel(q)


def _prepare(context: RingContext, name: str, operands: Operands, extras: Sequence[ExtraOperand]) -> Prepared:
    """Check the operands; return what passes over operands of this description need."""
    options, mesh, (q, k, v, *_) = context.options, context.mesh, operands
    layout, kernel = check(context, operands, extras=extras)
    make_plan = make_planner(context, operands)
    plan = make_plan(context.pattern, layout)
    fields = {**context.fields(q, k), "head_dim of v": v.shape[-1]}
    for operand in extras:
        kernel = operand.wrap_kernel(kernel, context, plan, operands)
        fields |= operand.fields(k)
    if not isinstance(context.layout, Layout):  # what "auto" chose, so that ranks compare it
        fields |= {"kernel that runs": type(kernel).__name__, "layout that was made": str(layout)}
    chunk_bytes = options.chunk_bytes_on(q.device.type, mesh.ring_size)
    offload = options.offload_on(q.device.type, q.shape[2])
    rank_plan, agreement = plan.rank(mesh.ring_rank), Agreement.on(name, fields)
    return Prepared(plan, rank_plan, kernel, context.get_scale(q), chunk_bytes, offload, agreement, make_plan)


def make_planner(context: RingContext, operands: Operands) -> MakePlan:
    """Return a function (pattern, layout) -> Plan for operands of these sizes, on this Ulysses rank."""
    options, mesh, (q, k, v, *_) = context.options, context.mesh, operands
    node = mesh.grid.ring_ranks_per_node(mesh.global_rank, mesh.ranks_per_node)
    device_type, query_heads, kv_heads = q.device.type, q.shape[1], k.shape[1]
    token_bytes = (k.nbytes + v.nbytes) // max(k.shape[2], 1)

    def planned(pattern: Pattern, layout: Layout) -> Plan:
        stage, shard_bytes = None, token_bytes * layout.local_tokens
        make_own = options.transport_spec.plans
        if options.has_hops and make_own is None:
            stage = stage_shards(options.stage_bytes, device_type, mesh.ring_size, node, shard_bytes)
            if stage is None and options.stage_bytes not in ("auto", 0) and mesh.ring_size > 1:
                _log.warning(
                    "ds_ring: stage_bytes: expected room for two shards, %d bytes each, got %d: keys travel"
                    " hop by hop; give at least twice as many bytes, or 0", shard_bytes, options.stage_bytes,
                )  # fmt: skip
        if mesh.ulysses_size > 1:  # [Note: numbers of heads]
            pattern = HeadShard(pattern, mesh.ulysses_rank, mesh.ulysses_size)
        plan = build_plan(
            pattern, layout, query_heads=query_heads, kv_heads=kv_heads,
            prune=options.prune, gradient_payload=options.gradient_payload,
            ranks_per_node=node, stage_shards=stage,
        )  # fmt: skip
        plan = mesh.fitted(plan)
        if make_own is not None:
            plan = load(make_own)(plan, node, options.stage_bytes, token_bytes)
            if plan.reason:
                mesh.owners[PlanReasons].add(plan.reason)
        return plan

    return planned
