"""Compute the hops of a head chunk under way: what its steps mean for results and accumulators.

Owns the sums that results are rounded from. Which step comes when is the ring pass's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds_ring.runtime.first_parts import FirstParts
from ds_ring.runtime.kernels.interface import Kernel, PartialGrads, PartialOut, heads_of
from ds_ring.runtime.merge import assign_, merge_
from ds_ring.runtime.ring_buffers import RingBuffers
from ds_ring.runtime.trace import Trace
from ds_ring.schedule.steps import Compute


class PassSettings(Protocol):
    """Describe what chunks need of a pass; see the attributes of `RingPass`."""

    @property
    def kernel(self) -> Kernel: ...
    @property
    def scale(self) -> float: ...
    @property
    def check(self) -> Callable[..., None] | None: ...
    @property
    def on_gradients_final(self) -> Callable[[slice, Tensor, Tensor], None] | None: ...
    @property
    def trace(self) -> Trace | None: ...


class Chunk(Protocol):
    """Describe a head chunk under way."""

    buffers: RingBuffers

    def compute(self, step: Compute) -> None:
        """Attend to the keys of a step."""
        ...

    def finish(self) -> None:
        """Round what was accumulated into the results."""
        ...


class Totals:
    """Hold uninitialised accumulators for results: these themselves where the dtype is the same."""

    def __init__(self, dtype: torch.dtype, results: tuple[Tensor, ...], trace: Trace | None) -> None:
        self.results, self._trace = results, trace
        self.accumulators = tuple(
            x if x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x in results
        )
        self._count(1)

    def round(self) -> None:
        """Write the results, where they are not written yet."""
        self._count(-1)
        for result, accumulator in self._own():
            result.copy_(accumulator)

    def _own(self) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self.results, self.accumulators, strict=True)
        return [(result, accumulator) for result, accumulator in pairs if result is not accumulator]

    def _count(self, sign: int) -> None:
        if self._trace is not None:
            self._trace.accumulators_bytes += sign * sum(x.nbytes for _, x in self._own())


class Views:
    """Keep the views of accumulators that the hops of a pass write to: the same from hop to hop."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Tensor, ...]] = {}

    def of(self, totals: tuple[Tensor, ...], part: PartialOut | PartialGrads) -> tuple[Tensor, ...]:
        """Return the heads and rows of a part; `totals` are the same at every call."""
        heads = part.heads
        key = (heads.start, heads.step, part.q_rows)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = tuple(part.q_rows.of(heads_of(x, heads)) for x in totals)
        return found


class ForwardChunk:
    """Compute heads of a forward pass: each hop's part is merged into out and lse, the first one assigned.

    Args:
        ring, buffers, q: what is computed.
        out, lse: the results, [B, H, S, E] and [B, H, S]; uninitialised.
        sinks: [H] of these heads: a part over no key, with out 0, that comes first; None for none.
    """

    def __init__(
        self, ring: PassSettings, buffers: RingBuffers, q: Tensor, out: Tensor, lse: Tensor,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.ring, self.buffers, self.q, self.lse = ring, buffers, q, lse
        self.kernel = ring.kernel.of_heads(buffers.chunk.query_heads)
        self.totals = Totals(lse.dtype, (out,), ring.trace)
        self._views = Views()
        # Of these tensors alone: a circle of references would hold their memory until it is found.
        self.parts = FirstParts(lse.shape[2], partial(_see_no_key, self.totals.accumulators[0], lse))
        if sinks is not None:
            self.parts.finish()
            lse.copy_(sinks.unsqueeze(-1).expand_as(lse))

    def compute(self, step: Compute) -> None:
        """Attend to the keys of a step; merge."""
        (total,), lse = self.totals.accumulators, self.lse
        keys_values = self.buffers.pair(step.buffer)
        for part in self.kernel.forward(self.q, *keys_values, step.tiles, self.ring.scale):
            # Views, so that the accumulators are changed in place.
            out_here, lse_here = self._views.of((total, lse), part)
            put = assign_ if self.parts.is_first(part.q_rows, part.heads) else merge_
            put(out_here, lse_here, part.out_BHSD, part.lse_BHS)
            del part  # or it would live on while the kernel computes the next one
        if self.ring.check is not None:
            self.parts.finish()
            self.ring.check(step.hop, out=total, lse=lse)

    def finish(self) -> None:
        """Round `out`."""
        self.parts.finish()
        self.totals.round()


class Queries(NamedTuple):
    """Hold what stays at home in the backward pass, with the shapes of `RingPass.backward`."""

    grad_out: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None


class BackwardChunk:
    """Compute heads of a backward pass: gradients go to dQ, and to the accumulators of each hop's keys."""

    def __init__(self, ring: PassSettings, buffers: RingBuffers, queries: Queries, totals: Totals) -> None:
        self.ring, self.buffers, self.queries, self.totals = ring, buffers, queries, totals
        self._views = Views()
        self.kernel = ring.kernel.of_heads(buffers.chunk.query_heads)
        dq = totals.accumulators[0]
        self.parts = FirstParts(dq.shape[2], partial(_zero, (dq,)))

    def compute(self, step: Compute) -> None:
        """Find the gradients of a step's tiles; add them up."""
        grad_out, q, out, lse, grad_lse = self.queries
        assert step.gradients is not None, "steps of a forward pass"
        # At hop 0 those are the own shard's accumulators. Each is computed into by one step, and nothing is
        # added to it before that.
        keys_values, grads = self.buffers.pair(step.buffer), self.buffers.gradients(step.gradients)
        of_keys = FirstParts(grads.first.shape[2], partial(_zero, grads))
        dq, scale = self.totals.accumulators[0], self.ring.scale
        inputs = (grad_out, q, *keys_values, out, lse, step.tiles, scale, grad_lse)
        for part in self.kernel.backward(*inputs):
            first = self.parts.is_first(part.q_rows, part.heads)
            _put(first, self._views.of((dq,), part)[0], part.dq_BHSD)
            # Of all K/V heads: the kernel has summed over the query heads that share one.
            first = of_keys.is_first(part.k_rows)
            _put(first, part.k_rows.of(grads.first), part.dk_BGSD)
            _put(first, part.k_rows.of(grads.second), part.dv_BGSD)
            del part
        of_keys.finish()
        if self.ring.check is not None:
            self.parts.finish()
            self.ring.check(step.hop, dq=dq, dk=grads.first, dv=grads.second)

    def finish(self) -> None:
        """Hand over the own shard's gradients, then round all of them."""
        self.parts.finish()
        if self.ring.on_gradients_final is not None:
            self.ring.on_gradients_final(self.buffers.chunk.kv_heads, *self.totals.accumulators[1:])
        self.totals.round()


def _put(first: bool, into: Tensor, part: Tensor) -> None:
    """Assign the first part of some rows, add a later one."""
    (into.copy_ if first else into.add_)(part)


def _see_no_key(out: Tensor, lse: Tensor, start: int, end: int) -> None:
    out[:, :, start:end].zero_()
    lse[:, :, start:end].fill_(float("-inf"))


def _zero(tensors: Iterable[Tensor], start: int, end: int) -> None:
    for tensor in tensors:
        tensor[:, :, start:end].zero_()
