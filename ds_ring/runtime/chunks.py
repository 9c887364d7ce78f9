"""Compute the hops of one head chunk (heads that go around the ring together) into its results.

Owns the accumulators from which the results are rounded. The ring pass owns the order of the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds_ring.runtime.buffers import RingBuffers
from ds_ring.runtime.kernels.interface import Kernel, Rows, heads_of, tokens_swapped
from ds_ring.runtime.merge import assign_, merge_
from ds_ring.runtime.trace import Trace
from ds_ring.runtime.views import Pair, Two
from ds_ring.schedule.steps import Compute

# Track which partial result is the first one of its rows: it is assigned, so nothing needs to be zeroed.
#
# Owns this bookkeeping, as intervals of slots on the host. The caller writes the partial results.
#
# [Note: the first part of a row]
# The first part of a row is assigned to the accumulator, and later ones are merged into it, so nothing is set
# to zero before. Rows that no part covers are filled at the end.

class FirstParts:
    """The slots of an accumulator that no partial result has been written to yet.

    Args:
        slots: number of slots of the accumulator, whose memory is uninitialised.
        fill: called with `given`, a first slot and an end, to write the neutral element to these slots: 0, or
            the result of attention over no key.
    """

    __slots__ = ("_fill", "_given", "_open")

    def __init__(self, slots: int, fill: Callable[..., None], *given: Tensor) -> None:
        self._open, self._fill, self._given = [(0, slots)] if slots else [], fill, given

    def is_first(self, rows: Rows, heads: slice = slice(None)) -> bool:
        """Return True if the part is the first on all of its rows, so it is assigned; else it is added.

        If the rows are not contiguous, belong to some heads only, or are partly written, the unwritten slots
        are filled with the neutral element here, and the part is added.
        """
        if not self._open:
            return False
        dense = rows.step == 1 and (rows.repeats == 1 or rows.stride == rows.length)
        if not dense or heads != slice(None):
            self.finish()
            return False
        start, end = rows.start, rows.start + rows.repeats * rows.length
        if self._open == [(start, end)]:  # the usual case
            self._open = []
            return True
        cut = [(max(a, start), min(b, end)) for a, b in self._open if a < end and start < b]
        self._open = [
            piece
            for a, b in self._open
            for piece in ((a, min(b, start)), (max(a, end), b))
            if piece[0] < piece[1]
        ]
        if cut == [(start, end)]:
            return True
        for piece in cut:
            self._fill(*self._given, *piece)
        return False

    def finish(self) -> None:
        """Fill the slots that were never written."""
        for piece in self._open:
            self._fill(*self._given, *piece)
        self._open = []


class PassSettings(Protocol):
    """The settings of a pass that chunks need; see the attributes of `RingPass`."""

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
    """A head chunk whose pass has begun and has not ended."""

    buffers: RingBuffers

    def compute(self, step: Compute) -> None:
        """Attend to the keys of a step."""
        ...

    def finish(self) -> None:
        """Round the accumulators into the results."""
        ...


class Totals:
    """The uninitialised accumulators of some results; the results themselves if they have the same dtype."""

    def __init__(self, dtype: torch.dtype, results: tuple[Tensor, ...], trace: Trace | None) -> None:
        self.results, self._trace = results, trace
        self.accumulators = tuple(
            x if x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x in results
        )
        self._count(1)

    def round(self) -> None:
        """Round the accumulators into the results, except where they are the same tensors."""
        self._count(-1)
        for result, accumulator in self._own():
            result.copy_(accumulator)

    def _own(self) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self.results, self.accumulators, strict=True)
        return [(result, accumulator) for result, accumulator in pairs if result is not accumulator]

    def _count(self, sign: int) -> None:
        if self._trace is not None:
            self._trace.accumulators_bytes += sign * sum(x.nbytes for _, x in self._own())


def _rows(first: Tensor, second: Tensor, rows: Rows, *heads: int | None) -> Two:
    """Return views of some rows, and of some heads if a slice is given, of two accumulators."""
    of = slice(*heads)
    return rows.of(heads_of(first, of)), rows.of(heads_of(second, of))


def _swapped(first: Tensor, second: Tensor, tokens_first: bool, rows: Rows, *heads: int | None) -> Two:
    """Return views in the dimension order of a kernel's results (maybe tokens before heads)."""
    first, second = _rows(first, second, rows, *heads)
    return tokens_swapped(first, tokens_first), tokens_swapped(second, tokens_first)


class ForwardChunk:
    """The forward pass of a head chunk: merges the partial result of each hop into out and lse.

    Args:
        ring: settings of the pass.
        kernel, buffers: of these heads.
        q: queries of these heads.
        out, lse: the results, [B, H, S, E] and [B, H, S]; uninitialised.
        sinks: [H], logits of these heads. They enter first, as a partial result over no key with out 0 and
            the logit as its lse; None for none.
    """

    def __init__(
        self, ring: PassSettings, kernel: Kernel, buffers: RingBuffers, q: Tensor, out: Tensor, lse: Tensor,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.ring, self.kernel, self.buffers, self.q = ring, kernel, buffers, q
        self.totals = Totals(lse.dtype, (out,), ring.trace)
        self._results = Pair(self.totals.accumulators[0], lse)
        buffers.views.add(self._results)
        # Pass these two tensors, not self: a reference cycle would keep their memory until garbage
        # collection.
        self.parts = FirstParts(lse.shape[2], _see_no_key, self.totals.accumulators[0], lse)
        if sinks is not None:
            self.parts.finish()
            lse.copy_(sinks.unsqueeze(-1).expand_as(lse))

    def compute(self, step: Compute) -> None:
        """Attend to the keys of a step and merge the partial results."""
        total, lse, keys = self._results.first, self._results.second, self.buffers.pair(step.buffer)
        view = self.buffers.views.of
        for part in self.kernel.forward(self.q, keys.first, keys.second, step.tiles, self.ring.scale):
            heads, rows, out_part, lse_part = part
            # views, so that the accumulators are changed in place
            where = view(_rows, total, lse, rows, heads.start, heads.stop, heads.step)
            (assign_ if self.parts.is_first(rows, heads) else merge_)(*where, out_part, lse_part)
            del part, out_part, lse_part  # else they stay alive while the kernel computes the next part
        if self.ring.check is not None:
            self.parts.finish()
            self.ring.check(step.hop, out=total, lse=lse)

    def finish(self) -> None:
        """Round the accumulator into `out`."""
        self.parts.finish()
        self.totals.round()


class Queries(NamedTuple):
    """The inputs of the backward pass that do not travel, with the shapes of `RingPass.backward`."""

    grad_out: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None


class BackwardChunk:
    """The backward pass of a head chunk: adds to dQ, and to the dK and dV of each hop's keys."""

    def __init__(
        self, ring: PassSettings, kernel: Kernel, buffers: RingBuffers, queries: Queries, totals: Totals
    ) -> None:
        self.ring, self.kernel, self.buffers = ring, kernel, buffers
        self.queries, self.totals = queries, totals
        dq = totals.accumulators[0]
        self._dq = Pair(dq, dq)
        buffers.views.add(self._dq)
        self.parts = FirstParts(dq.shape[2], _zero, dq, dq)

    def compute(self, step: Compute) -> None:
        """Compute the gradients of a step's tiles and add them to the accumulators."""
        grad_out, q, out, lse, grad_lse = self.queries
        assert step.gradients is not None, "steps of a forward pass"
        # At hop 0 these are the accumulators of the own shard. Only one step computes into each accumulator,
        # and nothing is added to it before that step.
        keys, grads = self.buffers.pair(step.buffer), self.buffers.pair(step.gradients)
        dk, dv, dq, view = grads.first, grads.second, self._dq.first, self.buffers.views.of
        of_keys = FirstParts(dk.shape[2], _zero, dk, dv)
        inputs = (keys.first, keys.second, out, lse, step.tiles, self.ring.scale, grad_lse)
        for part in self.kernel.backward(grad_out, q, *inputs):
            heads, rows, key_rows, dq_part, dk_part, dv_part, tokens_first = part
            where, _ = view(_swapped, dq, dq, tokens_first, rows, heads.start, heads.stop, heads.step)
            (where.copy_ if self.parts.is_first(rows, heads) else where.add_)(dq_part)
            # All K/V heads: the kernel has already summed over the query heads that share one.
            first = of_keys.is_first(key_rows)
            dk_there, dv_there = view(_swapped, dk, dv, tokens_first, key_rows, None)
            (dk_there.copy_ if first else dk_there.add_)(dk_part)
            (dv_there.copy_ if first else dv_there.add_)(dv_part)
            del part, dq_part, dk_part, dv_part
        of_keys.finish()
        if self.ring.check is not None:
            self.parts.finish()
            self.ring.check(step.hop, dq=dq, dk=dk, dv=dv)

    def finish(self) -> None:
        """Pass the gradients of the own shard to `on_gradients_final`, then round all gradients."""
        self.parts.finish()
        if self.ring.on_gradients_final is not None:
            self.ring.on_gradients_final(self.buffers.chunk.kv_heads, *self.totals.accumulators[1:])
        self.totals.round()


def _see_no_key(out: Tensor, lse: Tensor, start: int, end: int) -> None:
    out[:, :, start:end].zero_()
    lse[:, :, start:end].fill_(float("-inf"))


def _zero(first: Tensor, second: Tensor, start: int, end: int) -> None:
    first[:, :, start:end].zero_()
    if second is not first:
        second[:, :, start:end].zero_()
