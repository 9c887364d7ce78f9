"""One way of attending: pattern, layout, mesh and options together, with the plans made from them.

Owns the table from the integer that a compiled graph can carry to the Python objects behind it. A context
is kept alive by its mesh's table and by whoever holds it; the global table holds it weakly.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ds_ring.errors import RingConfigError, RingError
from ds_ring.runtime.agreement import check_agreement, check_local
from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.kernels import Kernel, get_kernel
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.trace import is_fake
from ds_ring.schedule.heads import HeadsOfPart
from ds_ring.schedule.layout import Layout, make_layout
from ds_ring.schedule.pattern import Pattern
from ds_ring.schedule.plan import Plan, build_plan
from ds_ring.schedule.queries import HeadTiles, query_positions, replicated_tiles

KEPT_CONTEXTS = 128  # per mesh; whoever holds an older one keeps it alive
TRANSPORTS = ("ring", "all_gather")


@dataclass(frozen=True)
class Options:
    """How a pass is carried out; none of them changes its result.

    Attributes:
        scale: of the scores; None is 1 / sqrt(head_dim).
        kernel: "auto", "cpu" or "reference".
        transport: "ring", or the yardstick "all_gather".
        overlap: compute a hop while the next one travels.
        prune: send only what the receiver or a rank after it reads.
        hop_timeout_s: seconds that a hop may take.
        kernel_options: for the kernel, as sorted pairs.
        chunk_bytes: see [Note: heads in groups]; None takes 1 MiB on the CPU and 64 MiB elsewhere, where few
            heads would not fill the device.
    """

    scale: float | None = None
    kernel: str = "auto"
    transport: str = "ring"
    overlap: bool = True
    prune: bool = True
    hop_timeout_s: float = 60.0
    kernel_options: tuple[tuple[str, Any], ...] = ()
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise RingConfigError(
                f"transport: expected one of {', '.join(TRANSPORTS)}, got {self.transport!r}"
            )
        if not self.hop_timeout_s > 0:
            raise RingConfigError(f"hop_timeout_s: expected seconds > 0, got {self.hop_timeout_s!r}")

    def chunk_bytes_on(self, device_type: str) -> int:
        """The smallest K or V message worth a walk of its own, bytes."""
        if self.chunk_bytes is not None:
            return self.chunk_bytes
        return 1 << 20 if device_type == "cpu" else 64 << 20


@dataclass(eq=False)
class RingContext:
    """Everything that a call needs besides its tensors.

    Attributes:
        pattern: what attends to what.
        layout: where tokens lie; a name builds the layout for ring_size x local tokens at each call.
        mesh: who is who.
        options: how.
        handle: the integer by which the operator finds this context.
    """

    pattern: Pattern
    layout: Layout | str
    mesh: RingMesh
    options: Options
    handle: int = field(default_factory=itertools.count().__next__)
    calls: int = 0
    exchange: Exchange | None = None

    def __post_init__(self) -> None:
        if self.mesh.ring_size > 1:
            self.exchange = Exchange(self.mesh, self.options.hop_timeout_s)
        _contexts[self.handle] = self

    def layout_for(self, local_tokens: int) -> Layout:
        """The layout of a call whose shards have so many slots."""
        if isinstance(self.layout, Layout):
            return self.layout
        ring = self.mesh.ring_size
        return make_layout(
            self.layout,
            tokens=max(local_tokens, 1) * ring,
            ring_size=ring,
            pattern=self.pattern,
            multiple_of=self.mesh.ulysses_size,
        )

    @property
    def _pattern_here(self) -> Pattern:
        """The pattern of the heads that this rank has in a pass: a dilated one goes by the head's number."""
        mesh = self.mesh
        return (
            self.pattern
            if mesh.ulysses_size == 1
            else HeadsOfPart(self.pattern, mesh.ulysses_rank, mesh.ulysses_size)
        )

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, direction: str = "forward"
    ) -> tuple[Plan, Kernel, float]:
        """Check the tensors, agree with the other ranks, and say what to walk: plan, kernel and scale.

        Raises:
            RingShapeError: this rank's tensors do not fit.
            RingMismatchError: another rank's do not, or differ from this rank's.
        """
        refused: RingError | None = None
        options = self.options
        layout = self.layout_for(q.shape[2] if q.dim() == 4 else 1)
        try:
            check_local(q, k, v, layout.local_tokens)
            kernel = get_kernel(options.kernel, q.device.type, options.kernel_options)
        except RingError as error:
            refused = error
        self.calls += 1
        if self.exchange is not None and not is_fake(q):
            settings = f"{self.pattern} {layout} {options}"
            check_agreement(self.exchange, refused, direction, self.calls, settings, (q, k))
        elif refused is not None:
            raise refused
        plan = build_plan(
            self._pattern_here, layout, query_heads=q.shape[1], kv_heads=k.shape[1], prune=options.prune
        )
        return plan, kernel, self._scale(q)

    def prepare_replicated(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, direction: str = "forward"
    ) -> tuple[tuple[HeadTiles, ...], Kernel, float]:
        """`prepare` for queries that are on every rank: tiles with this rank's keys, kernel and scale.

        Raises:
            RingShapeError, RingMismatchError: as in `prepare`.
        """
        refused: RingError | None = None
        options, where = self.options, b""
        layout = self.layout_for(k.shape[2] if k.dim() == 4 else 1)
        try:
            check_local(q, k, v, layout.local_tokens, replicated=True)
            kernel = get_kernel(options.kernel, q.device.type, options.kernel_options)
            where = query_positions(self.pattern, layout, q.shape[2], _as_array(positions)).tobytes()
        except RingError as error:
            refused = error
        self.calls += 1
        if self.exchange is not None and not is_fake(q):
            settings = f"replicated queries: {self.pattern} {layout} {options}"
            check_agreement(self.exchange, refused, direction, self.calls, settings, (q, k), where)
        elif refused is not None:
            raise refused
        tiles = replicated_tiles(self.pattern, layout, self.mesh.ring_rank, where, q.shape[1], k.shape[1])
        return tiles, kernel, self._scale(q)

    def _scale(self, q: Tensor) -> float:
        return self.options.scale if self.options.scale is not None else 1.0 / math.sqrt(q.shape[-1])


def _as_array(positions: Tensor | None) -> np.ndarray | None:
    if positions is None:
        return None
    host = positions.detach().cpu()
    return (host.double() if host.is_floating_point() else host).numpy()  # numpy has no bfloat16


_contexts: weakref.WeakValueDictionary[int, RingContext] = weakref.WeakValueDictionary()


def context_of(handle: int) -> RingContext:
    """The context behind a handle."""
    context = _contexts.get(handle)
    assert context is not None, (
        f"ring attention context {handle} is gone: its mesh was dropped before this call"
    )
    return context


def context_for(pattern: Pattern, layout: Layout | str, mesh: RingMesh, options: Options) -> RingContext:
    """The one context for these arguments; made when first asked for, dropped with its mesh."""
    if isinstance(layout, Layout) and layout.ring_size != mesh.ring_size:
        raise RingConfigError(
            f"the layout is for {layout.ring_size} ranks, the mesh's ring has {mesh.ring_size};"
            f" build it with make_layout(..., ring_size={mesh.ring_size})"
        )
    table: OrderedDict[Any, RingContext] = mesh.contexts
    key = (pattern, layout, options)
    if key not in table:
        table[key] = RingContext(pattern, layout, mesh, options)
        if len(table) > KEPT_CONTEXTS:  # documents make a new one for every batch
            table.popitem(last=False)
    table.move_to_end(key)
    return table[key]
