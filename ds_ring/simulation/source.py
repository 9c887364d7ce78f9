"""Read tokens of global tensors for virtual ranks, from memory or from mapped files.

Owns the two directions between a global tensor and packed tokens at some positions. Legend: B batch, H query
heads, G K/V heads, T global tokens, D head dim (E of values and outputs), n tokens at some positions.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds_ring.schedule.layout import IntArray, Layout, expand_runs

FEW_RUNS = 16  # up to here slices are copied, beyond an index is used


class Geometry(NamedTuple):
    """Hold global sizes of q [B, H, T, D], k [B, G, T, D] and v [B, G, T, E]."""

    batch: int
    query_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    v_head_dim: int | None = None  # E; None is D

    def width(self, name: str) -> int:
        """Return the head dim of "q", "k" (D), "v", "out" or "grad_out" (E)."""
        of_values = None if name in ("q", "k") else self.v_head_dim
        return self.head_dim if of_values is None else of_values

    def heads(self, name: str) -> int:
        """Return the heads of "q", "grad_out" (H), "k" or "v" (G)."""
        return self.kv_heads if name in ("k", "v") else self.query_heads


class Source(Protocol):
    """Read global q, k, v and grad_out at any positions; all in one dtype, on the CPU."""

    @property
    def geometry(self) -> Geometry:
        """Return the sizes."""
        ...

    def fill(self, name: str, heads: slice, runs: IntArray, out: Tensor) -> None:
        """Write tokens of "q", "k", "v" or "grad_out" into `out`.

        Args:
            name: which tensor.
            heads: of all that it has.
            runs: positions, int64 [m, 3] of (start, step, length).
            out: [B, heads, n, D or E] for the n positions one after the other; any strides.
        """
        ...


class TensorSource:
    """Read from global tensors, which may be mapped from files (`torch.from_file`, `numpy.memmap`).

    Args:
        q: [B, H, T, D].
        k, v: [B, G, T, D] and [B, G, T, E].
        grad_out: [B, H, T, E]; None where no backward pass is wanted.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None = None) -> None:
        self._tensors = {"q": q.detach(), "k": k.detach(), "v": v.detach()}
        if grad_out is not None:
            self._tensors["grad_out"] = grad_out.detach()
        batch, heads, tokens, head_dim = q.shape
        self.geometry = Geometry(batch, heads, k.shape[1], tokens, head_dim, q.dtype, v.shape[3])

    def fill(self, name: str, heads: slice, runs: IntArray, out: Tensor) -> None:
        take_rows(self._tensors[name][:, heads], runs, out)


def shard_of(source: Source, layout: Layout, name: str, ring_rank: int) -> Tensor:
    """Return a rank's tokens, zeros in padding slots, as `shard_sequence` cuts them.

    Returns:
        [B, H, S, D or E], for "k" and "v" [B, G, S, D or E].
    """
    sizes = source.geometry
    shape = (sizes.batch, sizes.heads(name), layout.local_tokens, sizes.width(name))
    x = torch.zeros(shape, dtype=sizes.dtype)
    valid = layout.valid_tokens(ring_rank)
    if valid:
        source.fill(name, slice(None), layout.runs(ring_rank), x[:, :, :valid])
    return x


def take_rows(x: Tensor, runs: IntArray, out: Tensor) -> None:
    """Copy tokens of x [B, h, T, ...] at `runs` into out [B, h, n, ...], without a temporary."""
    if len(runs) > FEW_RUNS:
        torch.index_select(x, 2, torch.from_numpy(expand_runs(runs)), out=out)
        return
    offset = 0
    for start, step, length in runs.tolist():
        there = x[:, :, start : start + (length - 1) * step + 1 : step]
        out[:, :, offset : offset + length].copy_(there)
        offset += length


def put_rows(x: Tensor, runs: IntArray, part: Tensor, *, add: bool = False) -> None:
    """Copy (or add) packed tokens part [B, h, n, ...] to their positions in x [B, h, T, ...]."""
    if len(runs) > FEW_RUNS:
        index = torch.from_numpy(expand_runs(runs))
        (x.index_add_ if add else x.index_copy_)(2, index, part)
        return
    offset = 0
    for start, step, length in runs.tolist():
        there, piece = x[:, :, start : start + (length - 1) * step + 1 : step], part[:, :, offset:]
        (there.add_ if add else there.copy_)(piece[:, :, :length])
        offset += length
