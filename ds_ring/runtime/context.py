"""A ring context: pattern, layout, mesh and options of a call together, with the plans made from them.

Owns the table from the integer handle that a compiled graph carries to the Python objects. A context is kept
alive by its mesh's table and by other references; the global table has weak references only.
"""

from __future__ import annotations

import itertools
import math
import weakref
import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from ds_ring.errors import RingError
from ds_ring.masks.heads import HeadsOfPart
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.score_mod import Scores
from ds_ring.runtime.agreement import agree, begin_to_agree
from ds_ring.runtime.checks import as_array, check_heads, check_keys, check_sinks, check_tensors, check_tokens
from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.finite import check_finite
from ds_ring.runtime.first_pass import patience_s
from ds_ring.runtime.kernels import Asked, Kernel, get_kernel
from ds_ring.runtime.kernels import block_side as block_side
from ds_ring.runtime.kernels.interface import HeadsOfPass, Operands, compiles
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.options import Options as Options
from ds_ring.runtime.trace import is_fake
from ds_ring.schedule.head_chunks import count_heads, head_bytes, head_chunks
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.layouts import make_layout
from ds_ring.schedule.plan import Plan, build_plan, check_length
from ds_ring.schedule.replicated_queries import HeadTiles, query_positions, replicated_tiles


@dataclass(eq=False)
class RingContext:
    """Everything that a call needs besides its tensors.

    Attributes:
        pattern: which query attends to which key.
        layout: which token lies where; a name builds the layout for ring_size x local tokens at each call.
        mesh: the ranks and process groups.
        options: kernel, transport and further options.
        handle: the integer by which the operator finds this context.
        refused: an error in the arguments. Every call raises it, after telling the other ranks.
        in_a_graph: True if a compiled graph carries the handle; then the context lives as long as the mesh.
        exchange: sends and receives tensors; None if the sequence has one rank.
        first_queries: cache of `contexts.first_queries`, by its arguments.
    """

    pattern: Pattern
    layout: Layout | str
    mesh: RingMesh
    options: Options
    refused: RingError | None = None
    in_a_graph: bool = False
    handle: int = field(default_factory=itertools.count().__next__)
    exchange: Exchange | None = None
    first_queries: dict[Hashable, tuple[RingContext, Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mesh.sequence_size > 1:
            self.exchange = Exchange(self.mesh, self.options.hop_timeout_s)
        CONTEXTS[self.handle] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> RingContext:
        """Return this context itself: callers cannot change it, and its mesh cannot be copied."""
        return self

    def layout_for(self, local_tokens: int, device_type: str) -> Layout:
        """Return the layout of a call on a kind of device, given the number of slots of its shards."""
        if isinstance(self.layout, Layout):
            return self.layout
        mesh, options = self.mesh, self.options
        block = block_side(options.kernel, device_type, (self.pattern,), options.block_size)
        return make_layout(
            self.layout, tokens=max(local_tokens, 1) * mesh.ring_size, ring_size=mesh.ring_size,
            pattern=self.pattern, multiple_of=mesh.ulysses_size, block_size=block,
        )  # fmt: skip

    @property
    def _pattern_here(self) -> Pattern:
        """Return the pattern of this rank's heads: a dilated pattern depends on the number of the head."""
        mesh, own = self.mesh, self.pattern
        return own if mesh.ulysses_size == 1 else HeadsOfPart(own, mesh.ulysses_rank, mesh.ulysses_size)

    def heads_here(self, q: Tensor) -> slice:
        """Return which of the query heads of all Ulysses ranks q [B, H, S, D] has in a pass."""
        first = self.mesh.ulysses_rank * q.shape[1]
        return slice(first, first + q.shape[1])

    def check(self, q: Tensor, k: Tensor, v: Tensor, parts: int = 1) -> tuple[Layout, Kernel]:
        """Check this rank's tensors and return their layout and kernel.

        Args:
            q, k, v: [B, H, S, D] and [B, G, S, D].
            parts: number of Ulysses ranks that hold one part each of a ring shard; 1 after the all-to-all.

        Raises:
            RingError: the first fault found on this rank, in most cases a RingShapeError.
        """
        if self.refused is not None:
            # The same error object is raised by all calls: without this each raise would lengthen its
            # traceback.
            raise self.refused.with_traceback(None)
        check_tensors(q, k, v)
        check_heads(q.shape[1], k.shape[1], parts)
        layout = self.layout_for(q.shape[2] * parts, q.device.type)
        check_tokens(q.shape[2], k.shape[2], layout.local_tokens, parts)
        check_length(self.pattern, layout)
        # Patterns count the heads of all Ulysses ranks: q has them all before the all-to-all, H / U after it.
        all_heads = q.shape[1] * self.mesh.ulysses_size // parts
        self.pattern.check(layout.tokens, q.shape[0], all_heads, str(q.device))
        return layout, self._kernel(q)

    def _kernel(self, q: Tensor) -> Kernel:
        options, scores = self.options, None
        if options.score_mod is not None:
            here = self.heads_here(q)
            scores = Scores(options.score_mod, range(here.start, here.stop))
        asked = Asked(q.device.type, q.dtype, q.shape[-1], self.pattern)
        row = (options.kernel, q.device.type, options.kernel_options, options.block_size)
        return get_kernel(*row, scores, asked)

    def agree(
        self,
        operation: str,
        q: Tensor,
        k: Tensor,
        refused: RingError | None,
        more: Mapping[str, object] | None = None,
        later: bool = False,
        compiles: bool = False,
    ) -> Callable[[], None] | None:
        """Agree with the other ranks of the sequence on an operation, its tensors' shapes, and `more`.

        Args:
            operation: name of the operation.
            q, k: tensors whose shapes and dtypes are compared.
            refused: this rank's error, which is raised after the other ranks know of it; None for no error.
            more: further values to compare, by name.
            later: on a device, only begin to agree, so that it can compute meanwhile.
            compiles: whether this rank is going to compile something.

        Returns:
            a function that ends the agreement, to be called before the first payload; None if it has ended.

        Raises:
            RingError: `refused`, on this rank.
            RingMismatchError: another rank refused its input, or calls with other arguments.
        """
        patience = 0.0
        if self.exchange is not None and refused is None:
            patience = patience_s(self.mesh, self.options, operation, q, k, compiles)
        if self.exchange is None or is_fake(q):
            if refused is not None:
                raise refused
            return None
        # Tensors that were refused may not have the four dimensions that are described here.
        fields = {} if refused is not None else {**self._fields(q, k), **(more or {})}
        # On the CPU nothing computes meanwhile, so end the agreement at once.
        if later and refused is None and q.is_cuda:
            return begin_to_agree(self.exchange, operation, fields, patience).result
        agree(self.exchange, operation, fields, refused, patience)
        return None

    @cached_property
    def _settings(self) -> dict[str, str]:
        """Return the settings that are the same in every call, by name. (A deadline may differ by rank.)"""
        options = {f.name: str(getattr(self.options, f.name)) for f in fields(self.options)}
        del options["hop_timeout_s"], options["first_pass_timeout_s"]
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

    def refuse(self, error: RingError) -> NoReturn:
        """Tell the other ranks, then raise `error` here."""
        if self.exchange is not None:
            agree(self.exchange, "attention", {}, error)
        raise error

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None = None, sinks: Tensor | None = None,
        has_grad_lse: bool = False,
    ) -> tuple[Plan, Kernel, float, Callable[[], None] | None]:  # fmt: skip
        """Check the tensors, agree with the other ranks, and return plan, kernel, scale and a function.

        The function ends the agreement while the first hop computes; see `agree`.

        Raises:
            RingShapeError: this rank's tensors do not fit.
            RingMismatchError: another rank's tensors do not fit, or differ from this rank's.
        """
        refused: RingError | None = None
        options, scale, compiling = self.options, 1.0, False
        try:
            layout, kernel = self.check(q, k, v)
            check_sinks(sinks, q, q.shape[1] * self.mesh.ulysses_size)
            self.check_finite(None, q=q, k=k, v=v, grad_out=grad_out, sinks=sinks)
            plan, scale = self.plan(layout, q.shape[1], k.shape[1]), self._scale(q)
            if self.exchange is not None:
                compiling = self._compiles(plan, kernel, Operands(q, k, v, grad_out, has_grad_lse), scale)
        except RingError as error:
            refused = error  # raised later: the other ranks wait for this header ([Note: refusals])
        operation = "attention forward" if grad_out is None else "attention backward"
        more = {} if refused is not None else {**_more_fields(v, sinks), **self._chosen(layout, kernel)}
        later = options.overlap and options.transport == "ring"
        agreed = self.agree(operation, q, k, refused, more, later, compiling)
        _note_forward_pass(grad_out)
        return plan, kernel, scale, agreed

    def plan(self, layout: Layout, query_heads: int, kv_heads: int) -> Plan:
        """Return the plan of a pass with these numbers of heads on this Ulysses rank."""
        options, mesh = self.options, self.mesh
        return build_plan(
            self._pattern_here, layout, query_heads=query_heads, kv_heads=kv_heads,
            prune=options.prune, gradient_payload=options.gradient_payload,
            ranks_per_node=mesh.grid.ring_ranks_per_node(mesh.global_rank, mesh.ranks_per_node),
        )  # fmt: skip

    def _compiles(self, plan: Plan, kernel: Kernel, operands: Operands, scale: float) -> bool:
        """Return whether this rank's pass is going to compile something."""
        own, (_, k, v, *_) = plan.rank(self.mesh.ring_rank), operands
        # These values decide what a pass compiles, and compiled code is kept.
        seen = (kernel, scale, self.options.transport, self.options.chunk_bytes, *operands.description)
        if seen in own.compiled:
            return False
        sizes = (0, 1)  # all heads of a class together
        if self.options.transport == "ring":
            sizes = head_bytes(k, v), self.options.chunk_bytes_on(k.device.type, self.mesh.ring_size)
        parts = []
        for one in own.classes:
            count = count_heads(head_chunks(one.kv_heads, *sizes)[0])  # all chunks of a class have one size
            parts.append(HeadsOfPass(count * plan.group, count, [hop.tiles for hop in one.hops]))
        found = compiles(kernel, operands, parts, scale)
        if not found:
            own.compiled.add(seen)
        return found

    def _chosen(self, layout: Layout, kernel: Kernel) -> dict[str, object]:
        """Return what "auto" chose for the layout and the kernel, so that ranks can compare it."""
        names = {"kernel that runs": type(kernel).__name__, "layout that was made": str(layout)}
        return {} if isinstance(self.layout, Layout) else {**names}

    def check_finite(self, hop: int | None, **tensors: Tensor | None) -> None:
        """Check for NaN and Inf (`runtime/finite.py`), if the options ask for it."""
        if self.options.check_finite and not any(x is not None and is_fake(x) for x in tensors.values()):
            check_finite(self.mesh.ring_rank, hop, **tensors)

    def prepare_replicated(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, grad_out: Tensor | None = None,
        sinks: Tensor | None = None, has_grad_lse: bool = False,
    ) -> tuple[tuple[HeadTiles, ...], Kernel, float]:  # fmt: skip
        """Prepare a pass with replicated queries: return the tiles with this rank's keys, kernel and scale.

        Raises:
            RingShapeError, RingMismatchError: as in `prepare`.
        """
        refused: RingError | None = None
        fields, compiling = {}, False
        try:
            if self.refused is not None:
                raise self.refused.with_traceback(None)
            check_tensors(q, k, v)
            check_heads(q.shape[1], k.shape[1], 1)
            check_sinks(sinks, q, q.shape[1])
            layout = self.layout_for(k.shape[2], k.device.type)
            check_keys(k.shape[2], layout.local_tokens)
            self.pattern.check(layout.tokens, q.shape[0], q.shape[1], str(q.device))
            self.check_finite(None, q=q, k=k, v=v, grad_out=grad_out, sinks=sinks)
            kernel = self._kernel(q)
            # As bytes, which are hashable: they are the key of the cached tiles.
            where = query_positions(self.pattern, layout, q.shape[2], as_array(positions)).tobytes()
            fields = {
                "positions of the queries": f"checksum {zlib.crc32(where):08x}",
                "local keys": k.shape[2],
                **_more_fields(v, sinks),
                **self._values(q=q, grad_out=grad_out, sinks=sinks),
            }
            tiles = replicated_tiles(self.pattern, layout, self.mesh.ring_rank, where, q.shape[1], k.shape[1])
            scale = self._scale(q)
            if self.exchange is not None:
                parts = [HeadsOfPass(count_heads(h), count_heads(kv), [one]) for h, kv, one in tiles]
                compiling = compiles(kernel, Operands(q, k, v, grad_out, has_grad_lse), parts, scale)
        except RingError as error:
            refused = error
        way = "forward" if grad_out is None else "backward"
        self.agree(f"replicated attention {way}", q, k, refused, fields, compiles=compiling)
        _note_forward_pass(grad_out)
        return tiles, kernel, scale

    def _values(self, **tensors: Tensor | None) -> dict[str, object]:
        """Return checksums of small tensors that must be equal on all ranks; nothing else would detect it."""
        if self.exchange is None or any(x is not None and is_fake(x) for x in tensors.values()):
            return {}
        given = {name: x.detach().cpu().contiguous() for name, x in tensors.items() if x is not None}
        # As uint8: numpy has no bfloat16.
        sums = {name: zlib.crc32(x.view(torch.uint8).numpy().data) for name, x in given.items()}
        return {f"values of {name}": f"checksum {value:08x}" for name, value in sums.items()}

    def _scale(self, q: Tensor) -> float:
        return self.options.scale if self.options.scale is not None else 1.0 / math.sqrt(q.shape[-1])


def _more_fields(v: Tensor, sinks: Tensor | None) -> dict[str, object]:
    return {"head_dim of v": v.shape[-1], "sinks": None if sinks is None else sinks.dtype}


_forward_passes_so_far = 0


def forward_passes() -> int:
    """Return the number of forward passes of ring attention in this process so far, on all of its meshes.

    It counts per process, since a model may use a mesh of its own. A compiled graph counts when it runs.
    """
    return _forward_passes_so_far


def _note_forward_pass(grad_out: Tensor | None) -> None:
    global _forward_passes_so_far
    _forward_passes_so_far += grad_out is None


CONTEXTS: weakref.WeakValueDictionary[int, RingContext] = weakref.WeakValueDictionary()
