"""Define a kernel: the attention of one hop, tile by tile, forward and backward, always with the lse.

A kernel reads local tensors and a `Tiles` table and yields partial results. It does not merge, accumulate or
communicate: the ring pass adds the parts in float32, in one place for all kernels.

[Note: values of another width]
Values may have another head dimension than queries and keys (192 and 128 in DeepSeek V3). Buffers, messages
and results have the head dimension of the values. Where aten's CPU operators require one head dimension for
queries and values, the kernel pads its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ds_ring.errors import RingKernelError
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles

if TYPE_CHECKING:
    from ds_ring.kernels.pairs import TilePredicate

ALL_HEADS = slice(None)


class Rows(NamedTuple):
    """The slots start + i * step for 0 <= i < length, or `repeats` copies of these slots.

    Each copy is `stride` slots after the copy before. So a kernel computes equal tiles at regular distances
    in one call, on a strided view.
    """

    start: int
    step: int
    length: int
    repeats: int = 1
    stride: int = 0

    def select(self, x: Tensor) -> Tensor:
        """Return a view of x [B, heads, S, ...]; see `views`."""
        return self.views(x)[0]

    def views(self, *tensors: Tensor, heads: slice = ALL_HEADS, batched: bool = False) -> list[Tensor]:
        """Return these slots, and some heads, of tensors [B, H, S, ...].

        They are views [B, heads, length, ...], or [B, repeats, heads, length, ...] if `repeats` is above 1.
        With `batched` the repetitions move into the batch: [B * repeats, heads, length, ...], a view if B is
        1. One call takes all tensors, because calls of Python are most of the host time of a hop.
        """
        start, step, length, repeats, stride = self
        views = []
        for x in tensors:
            if heads != ALL_HEADS:
                x = x[:, heads]
            if repeats > 1:
                strides = x.stride()
                slot = strides[2]
                x = x.as_strided(
                    (x.shape[0], repeats, x.shape[1], length, *x.shape[3:]),
                    (strides[0], stride * slot, strides[1], step * slot, *strides[3:]),
                    x.storage_offset() + start * slot,
                )
                if batched:
                    x = x.flatten(0, 1)
            elif step != 1 or length != x.shape[2]:  # else all slots: no view, which costs 3 microseconds
                x = x[:, :, start : start + (length - 1) * step + 1 : step]
            views.append(x)
        return views

    def part(self, first: int, length: int) -> Rows:
        """Return members first .. first + length - 1 of every repetition."""
        return self._replace(start=self.start + first * self.step, length=length)

    def again(self, repeats: int, every: int) -> Rows:
        """Return this progression `repeats` times; a copy begins `every` steps after the one before."""
        return self if repeats == 1 else self._replace(repeats=repeats, stride=every * self.step)


class Tile(NamedTuple):
    """One row of a `Tiles` table, as Python objects.

    Attributes:
        q_rows, k_rows: query and key slots.
        low, high: the i-th query of `q_rows` attends to the j-th key of `k_rows` if low <= i - j <= high.
        head_in_group: index of the query head among the query heads that share a K/V head; -1: all of them.
        bias: the term of log m that is the same for all pairs of the tile; added to every score.
        inside: a mask function, or weights that make m differ from pair to pair; None if there is neither.
        q_at, k_at: (first position, step) of the queries and of the keys. A tile that `part` or `again`
            returns has the values of the whole tile.
    """

    q_rows: Rows
    k_rows: Rows
    low: int
    high: int
    head_in_group: int
    bias: float
    inside: TilePredicate | None = None
    q_at: tuple[int, int] = (0, 1)
    k_at: tuple[int, int] = (0, 1)

    @property
    def is_masked(self) -> bool:
        """Return whether a mask function selects the attended pairs."""
        return self.inside is not None and self.inside.mask is not None

    @property
    def edges(self) -> tuple[bool, bool]:
        """Return whether the lower and the upper bound of i - j cut the rectangle."""
        return self.low > 1 - self.k_rows.length, self.high < self.q_rows.length - 1

    @property
    def is_causal(self) -> bool:
        """Return whether it is a square triangle with j <= i."""
        return self.low == 0 and self.q_rows.length == self.k_rows.length and self.edges == (True, False)

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys, int64; wrong for a tile from `part` or `again`."""
        sides = ((self.q_at, self.q_rows.length), (self.k_at, self.k_rows.length))
        q, k = (first + step * torch.arange(n, device=device) for (first, step), n in sides)
        return q, k

    def visible(self, samples: int, device: torch.device) -> Tensor:
        """Return which pairs are attended: bool [queries, keys] or as `TilePredicate.visible`."""
        queries, keys = self.q_rows.length, self.k_rows.length
        if self.inside is not None and self.inside.mask is not None:
            return self.inside.visible(samples, queries, keys, device)
        # key j of query i: i - high <= j <= i - low
        return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(-self.high).tril(-self.low)

    def heads(self, group: int) -> slice:
        """Return the slice of query heads, if `group` of them share a K/V head."""
        # Query head h uses K/V head h // group, so these are every group-th head.
        return ALL_HEADS if self.head_in_group < 0 else slice(self.head_in_group, None, group)

    def part(self, q_first: int, q_length: int, k_first: int, k_length: int) -> Tile:
        """Return a sub-rectangle, with the same band."""
        shift = q_first - k_first
        return self._replace(
            low=max(self.low - shift, 1 - k_length),
            high=min(self.high - shift, q_length - 1),
            q_rows=self.q_rows.part(q_first, q_length),
            k_rows=self.k_rows.part(k_first, k_length),
            inside=None if self.inside is None else self.inside.part(q_first, k_first),
        )

    def again(self, repeats: int, every: int) -> Tile:
        """Return this tile `repeats` times, each copy `every` queries and keys after the previous one."""
        q_rows, k_rows = self.q_rows.again(repeats, every), self.k_rows.again(repeats, every)
        return self._replace(q_rows=q_rows, k_rows=k_rows)


def each_tile(tiles: Tiles) -> Iterator[Tile]:
    """Yield the rows of a table one by one."""
    columns = (
        tiles.q.slot, tiles.q.slot_step, tiles.q.length, tiles.k.slot, tiles.k.slot_step, tiles.k.length,
        *tiles.band, tiles.head_in_group, tiles.multiplicity, tiles.weight,
        tiles.q.position, tiles.q.position_step, tiles.k.position, tiles.k.position_step,
    )  # fmt: skip
    lists = zip(*(c.tolist() for c in columns), strict=True)
    masked = tiles.is_masked.tolist()
    for row, (q0, q_step, q_n, k0, k_step, k_n, low, high, head, times, weight, *at) in enumerate(lists):
        inside = None
        if masked[row] or weight >= 0:
            from ds_ring.kernels.pairs import make_predicate

            inside = make_predicate(tiles, row)
        q_rows, k_rows = Rows(q0, q_step, q_n), Rows(k0, k_step, k_n)
        places = (at[0], at[1]), (at[2], at[3])
        yield Tile(q_rows, k_rows, low, high, head, math.log(times), inside, *places)


class PartialOut(NamedTuple):
    """A part: the attention of some queries over some keys.

    Attributes:
        heads: the query heads.
        q_rows: the query slots.
        out_BHSD: output, normalised over these keys alone. The shape is that of `q_rows.select(q[:, heads])`,
            with E in place of D; lse has no last dimension.
        lse_BHS: natural logarithm of the sum of exp(score) over these keys, float32 (float64 for float64 q).
    """

    heads: slice
    q_rows: Rows
    out_BHSD: Tensor
    lse_BHS: Tensor


class PartialGrads(NamedTuple):
    """The gradients of some pairs.

    Attributes:
        heads, q_rows, k_rows: the query heads, query slots and key slots of these pairs.
        dq: [..., heads, rows, D], the gradient of the queries in `heads` and `q_rows`.
        dk, dv: [..., K/V heads, rows, D] and [..., K/V heads, rows, E], the gradients of all K/V heads in
            `k_rows`, summed over the query heads in `heads`.
        tokens_first: if True, rows come before heads in dq, dk and dv; `heads_first` transposes the three.
    """

    heads: slice
    q_rows: Rows
    k_rows: Rows
    dq: Tensor
    dk: Tensor
    dv: Tensor
    tokens_first: bool = False

    @property
    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv in the shapes of `q_rows.select` and `k_rows.select`."""
        dq, dk, dv = self.dq, self.dk, self.dv
        if self.tokens_first:
            dq, dk, dv = (x.transpose(-3, -2) for x in (dq, dk, dv))
        return dq, dk, dv

    def add_to(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients to sums over all slots, [B, H, S, D], [B, G, n, D] and [B, G, n, E]."""
        of_q, of_k, of_v = self.heads_first
        self.q_rows.select(dq[:, self.heads]).add_(of_q)
        self.k_rows.select(dk).add_(of_k)
        self.k_rows.select(dv).add_(of_v)


def make_kernel_error(kernel: str, error: Exception, advice: str, **tensors: Tensor) -> RingKernelError:
    """Return the error for a kernel that failed while it ran, with the shapes of its tensors."""
    shapes = ", ".join(f"{name} {tuple(x.shape)} {x.dtype} on {x.device}" for name, x in tensors.items())
    # A kernel is asynchronous on CUDA: the fault may be of one that was launched before.
    return RingKernelError.wrong(
        f"kernel {kernel}", f"a pass over {shapes}", f"{type(error).__name__}: {error}",
        f"{advice}; CUDA_LAUNCH_BLOCKING=1 shows whether an earlier kernel failed",
    )  # fmt: skip


class KernelNeeds(NamedTuple):
    """What a kernel must support in a call, known before any tiles are computed."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    pattern: Pattern


class Kernel(Protocol):
    """Compute the attention of one hop.

    Shapes: q [B, H, S, D]; k [B, G, n, D] and v [B, G, n, E], with the n keys of the hop; out [B, H, S, E].
    H is a multiple of G. A kernel with `few_parts` = True yields few parts for a hop, in new tensors.
    """

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        """Yield parts. Every attended pair of the tiles is in exactly one part."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        """Yield gradients. Every attended pair of the tiles is in exactly one of the yielded objects.

        `out` and `lse` are the results of the whole forward pass, so gradients of different tiles and hops
        are added. `grad_lse` is the gradient of lse, [B, H, S].
        """

    def select_heads(self, heads: slice) -> Kernel:
        """Return a kernel for some query heads; it may be this object."""

    def count_executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        """Return the number of pairs per head that the kernel multiplies, masked pairs included."""


class PassHeads(NamedTuple):
    """The heads of a class (heads whose patterns are equal) in a pass on this rank, and its tiles by hop."""

    query_heads: int
    kv_heads: int
    hops: Sequence[Tiles]


class Operands(NamedTuple):
    """The tensors of a pass on this rank, with all heads; the gradients are set in a backward pass only.

    q [B, H, S, D], k [B, G, S, D], v [B, G, S, E], grad_out [B, H, S, E].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None = None
    has_grad_lse: bool = False

    @property
    def description(self) -> tuple[Hashable, ...]:
        """Return the shapes and other properties that a compiler may specialise on, without the values."""
        tensors = (x for x in self[:4] if x is not None)
        each = ((x.shape, x.dtype, x.device, x.is_inference()) for x in tensors)
        return (*each, self.grad_out is None, self.has_grad_lse)


def drop_cached(kernel: Kernel) -> None:
    """Free the tensors that a kernel caches between calls, if it caches any."""
    drop = getattr(kernel, "drop_cached", None)
    if drop is not None:
        drop()


def value_dim(kernel: Kernel, v: Tensor) -> int:
    """Return E, the head_dim of the output: that of v, unless the kernel computes the values from `v`."""
    return int(getattr(kernel, "value_dim", v.shape[-1]))


def compiles(kernel: Kernel, operands: Operands, parts: Iterable[PassHeads], scale: float) -> bool:
    """Return whether a pass will compile something; False for a kernel without a method `compiles`."""
    kernel_compiles = getattr(kernel, "compiles", None)
    return kernel_compiles is not None and any(kernel_compiles(operands, part, scale) for part in parts)
