"""A ring context: pattern, layout, mesh and options of a call together, with the plans made from them.

A context is kept alive by its mesh's table and by other references; `handles.py` refers to it weakly.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ring.comm.collective import Agreement, collective
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.comm.streams import is_fake
from ds_ring.errors import (
    RingFiniteError,
    RingLayoutError,
    RingPatternError,
    shown,
)
from ds_ring.kernels.interface import HeadsOfPass, Operands, compiles
from ds_ring.kernels.select import Kernel, KernelNeeds, get_kernel
from ds_ring.kernels.select import block_side as block_side
from ds_ring.masks.catalog import HeadShard
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.checks import (
    check_heads,
    check_not_captured,
    check_tensors,
    check_tokens,
)
from ds_ring.ops.handles import new_handle, object_of
from ds_ring.ops.options import Options, may_compile, patience_s
from ds_ring.ops.passes import ExtraOperand, MakePass, SavedTensors
from ds_ring.registry import SAVED_TENSORS, load
from ds_ring.ring.prepared import PreparedPasses
from ds_ring.schedule.layout import (
    Layout,
    check_layout_name,
    in_whole_blocks,
    make_layout,
    whole_blocks,
)
from ds_ring.schedule.lowering import (
    count_heads,
    head_bytes,
    head_chunks,
    stage_shards,
)
from ds_ring.schedule.plan import Plan, build_plan, check_length
from ds_ring.schedule.rank_plan import RankPlan

_log = logging.getLogger(__name__)


def check_finite(ring_rank: int, hop: int | None, **tensors: Tensor | None) -> None:
    """Raise RingFiniteError for values that are not finite: one read of memory, on a GPU one wait for it.

    Args:
        ring_rank: this rank.
        hop: after which hop; None for what goes into a pass.
        tensors: by the name for the message. An `lse` may be -inf: that row saw no key.
    """
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor)
        if name == "lse":
            bad &= tensor != float("-inf")
        count = int(bad.sum())
        if count:
            where = "before the first hop" if hop is None else f"after hop {hop}"
            first = tuple(torch.nonzero(bad)[0].tolist())
            raise RingFiniteError(
                f"check_finite: expected finite values in {name} of ring rank {ring_rank} {where}, got"
                f" {count} of {tensor.numel()} that are not, the first at {first}; look at what computes"
                f" {name} there (learning rate, loss scale, a mask of -inf), or turn check_finite off to let"
                " them pass"
            )


class Prepared(NamedTuple):
    """What a pass over tensors of one description needs besides them."""

    plan: Plan
    own: RankPlan
    kernel: Kernel
    scale: float
    chunk_bytes: int
    offload: bool
    agreement: Agreement


@dataclass(eq=False)
class RingContext:
    """Everything that a call needs besides its tensors.

    Attributes:
        pattern: which query attends to which key.
        layout: which token lies where; a name builds the layout for ring_size x local tokens at each call.
        mesh: the ranks and process groups.
        options: kernel, transport and further options.
        handle: the integer by which the operator finds this context.
        in_a_graph: True if a compiled graph carries the handle; then the context lives as long as the mesh.
        keeps_functions: calls do not trace the functions of pattern and score_mod anew. So it is with graphs
            and modules, whose contexts hold the caller's own objects; others hold any that are equal.
        make_pass: of the transport, from the table of passes.
        exchange: sends and receives tensors; None if the sequence has one rank.
        saved: what keeps tensors of a pass for its gradient.
        passes: cache of what passes of a schedule and a shape need again.
    """

    pattern: Pattern
    layout: Layout | str
    mesh: RingMesh
    options: Options
    in_a_graph: bool = False
    keeps_functions: bool = False
    handle: int = field(init=False)
    make_pass: MakePass = field(init=False, repr=False)
    exchange: Exchange | None = None
    saved: SavedTensors = field(init=False, repr=False)
    passes: PreparedPasses = field(default_factory=PreparedPasses, repr=False)
    _prepared: dict[Hashable, Prepared] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mesh.sequence_size > 1:
            own = self.options.row.exchange if self.mesh.ring_size > 1 else None
            make = Exchange if own is None else load(own)
            self.exchange = make(self.mesh, self.options.hop_timeout_seconds)
        self.make_pass = load(self.options.row.home)
        self.saved = SavedTensors()
        if self.options.offload_attention is not False and "offload_attention" in SAVED_TENSORS:
            self.saved = load(SAVED_TENSORS["offload_attention"])(self.saved)
        if self.options.recompute_fraction < 1 and "results" in SAVED_TENSORS:
            self.saved = load(SAVED_TENSORS["results"])(self.saved)
        self.handle = new_handle(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RingContext:
        """Return this context itself: callers cannot change it, and its mesh cannot be copied."""
        return self

    def with_pattern(self, pattern: Pattern, layout: Layout) -> RingContext:
        """Return the context of another pattern and layout, with the same mesh and options."""
        return context_for(pattern, layout, self.mesh, self.options, self.keeps_functions)

    def layout_for(self, local_tokens: int, device_type: str) -> Layout:
        """Return the layout of a call on a kind of device, given the number of slots of its shards."""
        if isinstance(self.layout, Layout):
            return self.layout
        mesh, options = self.mesh, self.options
        block = block_side(options.kernel, device_type, (self.pattern,), options.block_size)
        layout = make_layout(
            self.layout, tokens=max(local_tokens, 1) * mesh.ring_size, ring_size=mesh.ring_size,
            pattern=self.pattern, multiple_of=mesh.ulysses_size, block_size=block,
        )  # fmt: skip
        return in_whole_blocks(layout, options.block_size) if options.row.whole_blocks else layout

    def heads_here(self, q: Tensor) -> slice:
        """Return which of the query heads of all Ulysses ranks q [B, H, S, D] has in a pass."""
        first = self.mesh.ulysses_rank * q.shape[1]
        return slice(first, first + q.shape[1])

    def check(
        self, q: Tensor, k: Tensor, v: Tensor, parts: int = 1, extras: Sequence[ExtraOperand] = ()
    ) -> tuple[Layout, Kernel]:
        """Check this rank's tensors and return their layout and kernel.

        Args:
            q, k, v: [B, H, S, D] and [B, G, S, D].
            parts: number of Ulysses ranks that hold one part each of a ring shard; 1 after the all-to-all.
            extras: further operands.

        Raises:
            RingError: the first fault found on this rank, in most cases a RingShapeError.
        """
        check_tensors(q, k, v, not any(one.expands_keys for one in extras))
        for one in extras:
            one.check(self, q, k, v, parts)
        check_heads(q.shape[1], k.shape[1], parts)
        layout = self.layout_for(q.shape[2] * parts, q.device.type)
        check_tokens(q.shape[2], k.shape[2], layout.part_slots(parts))
        check_length(self.pattern, layout)
        if self.options.row.whole_blocks:
            whole_blocks(layout, self.options.block_size)
        # Patterns count the heads of all Ulysses ranks: q has them all before the all-to-all, H / U after it.
        all_heads = q.shape[1] * self.mesh.ulysses_size // parts
        self.pattern.check(layout.tokens, q.shape[0], all_heads, str(q.device))
        return layout, self.kernel_for(q)

    def check_functions(self) -> None:
        """Refuse functions that captured other values since they were traced, where calls do not trace them.

        In a forward pass: the backward pass computes with the values that the forward pass had.

        Raises:
            RingPatternError, RingConfigError: of the mask; of the score_mod.
        """
        if self.keeps_functions:
            self.pattern.check_unchanged()
            if self.options.score_mod is not None:
                self.options.score_mod.check_unchanged()

    def kernel_for(self, q: Tensor) -> Kernel:
        """Return the kernel that the options, the pattern and q ask for."""
        options, scores = self.options, None
        if options.score_mod is not None:
            from ds_ring.masks.mask_mod import Scores  # loaded with the first function of pairs

            here = self.heads_here(q)
            scores = Scores(options.score_mod, range(here.start, here.stop))
        asked = KernelNeeds(q.device.type, q.dtype, q.shape[-1], self.pattern)
        row = (options.kernel, q.device.type, options.kernel_pairs, options.block_size)
        return get_kernel(*row, scores, asked)

    def call(self, name: str, q: Tensor) -> collective:
        """Return a call on the mesh of this context; with fake tensors it tells nobody."""
        return collective(self.mesh, name, self.exchange, is_fake(q))

    def agree(
        self, call: collective, q: Tensor, k: Tensor, more: Mapping[str, object] | None = None,
        compiles: bool = False,
    ) -> None:  # fmt: skip
        """Agree with the other ranks of the sequence on a call, the shapes of q and k, and `more`.

        Args:
            call, q, k, more: what is compared; from here on the call has this context's exchange.
            compiles: whether this rank is going to compile something.

        Raises:
            RingMismatchError: another rank refused its input, or calls with other arguments.
        """
        if not call.alone:
            call.use(self.exchange)
            patience = patience_s(self.mesh, self.options, call.name, q, k, compiles)
            call.agree({**self._fields(q, k), **(more or {})}, patience)

    @cached_property
    def _settings(self) -> dict[str, str]:
        """Return the settings that are the same in every call, by name. (A deadline may differ by rank.)"""
        options = {name: str(value) for name, value in self.options}
        del options["hop_timeout_seconds"], options["first_pass_timeout_seconds"]
        more = {"ranks per node": str(self.mesh.ranks_per_node)}
        return {"pattern": str(self.pattern), "layout": str(self.layout), **options, **more}

    def _fields(self, q: Tensor, k: Tensor) -> dict[str, object]:
        batch, heads, tokens, head_dim = q.shape
        return {
            **self._settings,
            "dtype of q": q.dtype,
            "dtype of k": k.dtype,
            "batch size": batch,
            "query heads": heads,
            "K/V heads": k.shape[1],
            "local tokens": tokens,
            "head_dim": head_dim,
        }

    def prepare(
        self, call: collective, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None = None,
        has_grad_lse: bool = False, extras: Sequence[ExtraOperand] = (),
    ) -> tuple[Prepared, Callable[[], None] | None]:  # fmt: skip
        """Check the tensors, agree with the other ranks, and return what the pass needs and a function.

        Tensors of a description (shapes, dtypes, devices) that were checked before are not checked again.
        The function finishes the header check. The pass calls it before the first payload: on a device the
        first hop computes meanwhile. It is None if the check is finished.

        Raises:
            RingShapeError: this rank's tensors do not fit.
            RingMismatchError: another rank's tensors do not fit, or differ from this rank's.
        """
        key = (
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            q.is_inference(), grad_out is None, tuple(one.description for one in extras) if extras else None,
        )  # fmt: skip
        found = self._prepared.get(key)
        if self.keeps_functions and grad_out is None:
            self.check_functions()
        if found is None:
            found = self._checked(call.name, q, k, v, grad_out, extras)
            if len(self._prepared) >= KEPT_DESCRIPTIONS:
                self._prepared.clear()
            self._prepared[key] = found
        elif q.is_cuda or self.options.check_finite:  # what may differ between tensors of one description
            check_not_captured(q)
            self._check_finite_operands(q, k, v, grad_out, extras)
        finish_header_check = None
        if not call.alone:
            patience = 0.0
            if may_compile(q.device.type):
                operands = Operands(q, k, v, grad_out, has_grad_lse)
                compiling = self._compiles(found.plan, found.kernel, operands, found.scale)
                patience = patience_s(self.mesh, self.options, call.name, q, k, compiling)
            # On the CPU nothing computes meanwhile, so compare the headers at once.
            if q.is_cuda and self.options.overlap and self.options.has_hops:
                finish_header_check = call.compare_headers_meanwhile(found.agreement, patience)
            else:
                call.compare_headers(found.agreement, patience)
        if grad_out is None:
            count_forward_pass()
        return found, finish_header_check

    def _checked(
        self, operation: str, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None,
        extras: Sequence[ExtraOperand],
    ) -> Prepared:  # fmt: skip
        """Check the tensors; return what a pass over tensors of this description needs."""
        layout, kernel = self.check(q, k, v, extras=extras)
        self._check_finite_operands(q, k, v, grad_out, extras)
        plan, scale = self.plan(layout, q, k, v), self.scale_of(q)
        chunk_bytes = self.options.chunk_bytes_on(q.device.type, self.mesh.ring_size)
        fields = {**self._fields(q, k), "head_dim of v": v.shape[-1]}
        for one in extras:
            kernel = one.around(kernel, self, plan, q, v)
            fields |= one.fields(k)
        if not isinstance(self.layout, Layout):  # what "auto" chose, so that ranks compare it
            fields |= {"kernel that runs": type(kernel).__name__, "layout that was made": str(layout)}
        own, agreement = plan.rank(self.mesh.ring_rank), Agreement.on(operation, fields)
        offload = self.options.offload_on(q.device.type, q.shape[2])
        return Prepared(plan, own, kernel, scale, chunk_bytes, offload, agreement)

    def plan(self, layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> Plan:
        """Return the plan of a pass of tensors with these shapes on this Ulysses rank."""
        options, mesh, pattern = self.options, self.mesh, self.pattern
        query_heads, kv_heads = q.shape[1], k.shape[1]
        node = mesh.grid.ring_ranks_per_node(mesh.global_rank, mesh.ranks_per_node)
        stage = None
        if options.has_hops:
            shard_bytes = k.nbytes + v.nbytes
            stage = stage_shards(options.stage_bytes, q.device.type, mesh.ring_size, node, shard_bytes)
            if stage is None and options.stage_bytes not in ("auto", 0) and mesh.ring_size > 1:
                _log.warning(
                    "ds_ring: stage_bytes: expected room for two shards, %d bytes each, got %d: keys travel"
                    " hop by hop; give at least twice as many bytes, or 0", shard_bytes, options.stage_bytes,
                )  # fmt: skip
        if mesh.ulysses_size > 1:  # a dilated pattern depends on the number of the head
            pattern = HeadShard(pattern, mesh.ulysses_rank, mesh.ulysses_size)
        return build_plan(
            pattern, layout, query_heads=query_heads, kv_heads=kv_heads,
            prune=options.prune, gradient_payload=options.gradient_payload, kv_payload=options.kv_payload,
            ranks_per_node=node, stage_shards=stage,
        )  # fmt: skip

    def _compiles(self, plan: Plan, kernel: Kernel, operands: Operands, scale: float) -> bool:
        """Return whether this rank's pass is going to compile something."""
        own, (_, k, v, *_) = plan.rank(self.mesh.ring_rank), operands
        # These values decide what a pass compiles, and compiled code is kept.
        seen = (kernel, scale, self.options.transport, self.options.chunk_bytes, *operands.description)
        if seen in own.compiled:
            return False
        sizes = (0, 1)  # all heads of a class together
        if self.options.has_hops:
            sizes = head_bytes(k, v), self.options.chunk_bytes_on(k.device.type, self.mesh.ring_size)
        parts = []
        for one in own.classes:
            count = count_heads(head_chunks(one.kv_heads, *sizes)[0])  # all chunks of a class have one size
            parts.append(HeadsOfPass(count * plan.group, count, one.tables))
        found = compiles(kernel, operands, parts, scale)
        if not found:
            own.compiled.add(seen)
        return found

    def _check_finite_operands(
        self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None, extras: Sequence[ExtraOperand]
    ) -> None:
        if self.options.check_finite:
            more = {one.name: one.tensor for one in extras}
            self.check_finite(None, q=q, k=k, v=v, grad_out=grad_out, **more)

    def check_finite(self, hop: int | None, **tensors: Tensor | None) -> None:
        """Check for NaN and Inf (`ops/context.py`), if the options ask for it."""
        if self.options.check_finite and not any(x is not None and is_fake(x) for x in tensors.values()):
            check_finite(self.mesh.ring_rank, hop, **tensors)

    def scale_of(self, q: Tensor) -> float:
        """Return the factor of the scores."""
        return self.options.scale if self.options.scale is not None else 1.0 / math.sqrt(q.shape[-1])


_forward_passes_so_far = 0


def count_forward_pass() -> None:
    """Count a forward pass of ring attention, or a scan or halo that reads tokens of other ranks."""
    global _forward_passes_so_far
    _forward_passes_so_far += 1


def forward_passes() -> int:
    """Return the number of forward passes of the ring in this process so far, on all of its meshes.

    It counts per process, since a model may use a mesh of its own. A compiled graph counts when it runs.
    """
    return _forward_passes_so_far


KEPT_DESCRIPTIONS = 8  # of tensors, per context
KEPT_CONTEXTS = 64  # per mesh; an older context lives as long as something else refers to it


def context_of(handle: int) -> RingContext:
    """Return the context of a handle."""
    return object_of(handle, RingContext)


def check_layout(layout: object, mesh: RingMesh) -> None:
    """Raise RingLayoutError for what is no layout, or one for another ring than the mesh's."""
    if not isinstance(layout, Layout):
        raise RingLayoutError(
            f"layout: expected a layout, got {shown(layout)}; use make_layout(name, tokens=T, ring_size=P)"
        )
    if layout.ring_size != mesh.ring_size:
        raise RingLayoutError(
            f"layout: expected one for {mesh.ring_size} ranks (the mesh's ring), got one for"
            f" {layout.ring_size} ranks; build it with make_layout(..., ring_size={mesh.ring_size})"
        )


def context_for(
    pattern: Pattern, layout: Layout | str, mesh: RingMesh, options: Options, keeps_functions: bool = False
) -> RingContext:
    """Return the context for these arguments; it is created on first use and dropped with its mesh.

    Raises:
        RingPatternError, RingLayoutError: not a pattern or layout, or a layout for another ring size; a mask
            function that has captured other values since it was traced.
    """
    check_mesh(mesh)
    if not isinstance(pattern, Pattern):
        raise RingPatternError(
            f"pattern: expected a pattern, got {shown(pattern)}; use ds_ring.Causal() or ds_ring.Full()"
        )
    if not isinstance(layout, (Layout, str)):
        raise RingLayoutError(
            f'layout: expected a layout or its name, got {shown(layout)}; use make_layout(...), or "zigzag"'
        )
    if isinstance(layout, str):
        check_layout_name(layout)
    else:
        check_layout(layout, mesh)
    pattern.check_unchanged()
    own: Hashable = (pattern.mask_ids, id(options.score_mod)) if keeps_functions else None

    def make() -> RingContext:
        return RingContext(pattern, layout, mesh, options, keeps_functions=keeps_functions)

    found: RingContext = cached_context(mesh, (pattern, layout, options, own), make)
    return found


class ContextCache:
    """Cache the contexts of a mesh, as long as the mesh lives.

    Attributes:
        by_key: by all that a context is made of; at most `KEPT_CONTEXTS`, and those of compiled graphs.
        recent: those of eager calls, by the arguments of the calls.
    """

    per_ring = True

    def __init__(self) -> None:
        self.by_key: OrderedDict[Any, Any] = OrderedDict()
        self.recent: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def cached_context(mesh: RingMesh, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return the context of a key; the oldest are dropped, since documents make a new one for every batch."""
    table: OrderedDict[Any, Any] = mesh.owners[ContextCache].by_key
    if key not in table:
        table[key] = make()
        if len(table) > KEPT_CONTEXTS:
            # A compiled graph may use its handle at any time, so never drop its context.
            passing = [old for old, context in table.items() if not context.in_a_graph]
            if len(passing) > KEPT_CONTEXTS:
                del table[passing[0]]
    table.move_to_end(key)
    return table[key]
