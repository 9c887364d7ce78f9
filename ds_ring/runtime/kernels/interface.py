"""Define a kernel: the attention of one hop, tile by tile, forward and backward, always with the lse.

A kernel sees local tensors and a `Tiles` table, and yields partial results; it neither merges nor
accumulates nor communicates. The ring pass adds the parts up, in float32, in one place for all kernels.

[Note: values of another width]
Values may have another head dimension than queries and keys (192 and 128 in DeepSeek V3). Buffers, messages
and results have the head dimension of the values. Where aten's CPU operators want one for both, the kernel
pads what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ds_ring.masks.key_multiplicity import Weights
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Kind, Tiles
from ds_ring.runtime.views import Views

ALL_HEADS = slice(None)


class Rows(NamedTuple):
    """Describe slots start + i * step (i < length), and the same again `repeats` times, `stride` slots apart.

    Equal tiles that repeat at a regular distance are one call on a strided view, without a copy.
    """

    start: int
    step: int
    length: int
    repeats: int = 1
    stride: int = 0

    def of(self, x: Tensor) -> Tensor:
        """View x [B, heads, S, ...] as [B, heads, length, ...], or [B, repeats, heads, length, ...]."""
        if self.repeats == 1:
            if self.step == 1 and self.length == x.shape[2]:
                return x  # all of them: a view costs three microseconds, and every hop makes some
            return x[:, :, self.start : self.start + (self.length - 1) * self.step + 1 : self.step]
        slot = x.stride(2)
        return x.as_strided(
            (x.shape[0], self.repeats, x.shape[1], self.length, *x.shape[3:]),
            (x.stride(0), self.stride * slot, x.stride(1), self.step * slot, *x.stride()[3:]),
            x.storage_offset() + self.start * slot,
        )

    def part(self, first: int, length: int) -> Rows:
        """Return members first .. first + length - 1 of every repetition."""
        return self._replace(start=self.start + first * self.step, length=length)

    def again(self, repeats: int, every: int) -> Rows:
        """Return this progression `repeats` times, one `every` so many of its members."""
        return self if repeats == 1 else self._replace(repeats=repeats, stride=every * self.step)


class Inside(NamedTuple):
    """Hold what differs from pair to pair inside a tile, and the positions that it is a function of.

    Attributes:
        mask: of a PARTIAL tile, what is attended.
        weights: what of m varies.
        q_first, q_step, k_first, k_step: first position and step of both sides.
    """

    mask: Callable[[int, Any, Any], Any] | None
    weights: Weights | None
    q_first: int
    q_step: int
    k_first: int
    k_step: int

    def part(self, q_first: int, k_first: int) -> Inside:
        """Return the same from query q_first and key k_first on; equal where the weights are."""
        q, k = self.q_first + q_first * self.q_step, self.k_first + k_first * self.k_step
        if self.mask is None and self.weights is not None:
            # Weights repeat with their period: parts with equal weights compare equal, and share calls.
            q, k = q % self.weights.period, k % self.weights.period
        return self._replace(q_first=q, k_first=k)

    def visible(self, samples: int, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return a PARTIAL tile's mask: bool [queries, keys] or [samples or 1, heads or 1, queries, keys]."""
        assert self.mask is not None, "a PARTIAL tile without a mask"
        q, k = self._positions(queries, keys, device)
        visible: Tensor = self.mask(samples, q[:, 0], k[0])
        return visible

    def bias(self, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return log of the weights, [queries, keys]; one period is computed, the rest is copied."""
        if self.weights is None:
            return torch.zeros(queries, keys, dtype=dtype, device=device)
        period = self.weights.period
        counts = self.weights(*self._positions(min(queries, period), min(keys, period), device))
        tiled = counts.to(dtype).log_().repeat(-(-queries // len(counts)), -(-keys // counts.shape[1]))
        return tiled[:queries, :keys]

    def _positions(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        q = self.q_first + self.q_step * torch.arange(queries, device=device)
        k = self.k_first + self.k_step * torch.arange(keys, device=device)
        return q[:, None], k[None, :]


class Tile(NamedTuple):
    """Hold one row of a `Tiles` table as Python objects.

    Attributes:
        q_rows, k_rows: query and key slots.
        kind: what of the rectangle is attended.
        head_in_group: which query head of each K/V head's group; -1 for all.
        bias: log of what of m is constant, added to every score (0 for ordinary patterns).
        inside: what differs from pair to pair; None for ordinary patterns.
        q_at, k_at: first position and step of the queries and of the keys, of whole tiles only.
    """

    q_rows: Rows
    k_rows: Rows
    kind: Kind
    head_in_group: int
    bias: float
    inside: Inside | None = None
    q_at: tuple[int, int] = (0, 1)
    k_at: tuple[int, int] = (0, 1)

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys of a whole tile, int64."""
        sides = ((self.q_at, self.q_rows.length), (self.k_at, self.k_rows.length))
        q, k = (first + step * torch.arange(n, device=device) for (first, step), n in sides)
        return q, k

    def heads(self, group: int) -> slice:
        """Return the query heads concerned, if `group` of them share a K/V head."""
        # Query head h shares K/V head h // group, so these are every group-th head.
        return ALL_HEADS if self.head_in_group < 0 else slice(self.head_in_group, None, group)

    def part(self, q_first: int, q_length: int, k_first: int, k_length: int) -> Tile:
        """Return a sub-rectangle of the same kind."""
        return self._replace(
            q_rows=self.q_rows.part(q_first, q_length),
            k_rows=self.k_rows.part(k_first, k_length),
            inside=None if self.inside is None else self.inside.part(q_first, k_first),
        )

    def again(self, repeats: int, every: int) -> Tile:
        """Return this tile `repeats` times, one `every` so many queries and keys."""
        q_rows, k_rows = self.q_rows.again(repeats, every), self.k_rows.again(repeats, every)
        return self._replace(q_rows=q_rows, k_rows=k_rows)


def each_tile(tiles: Tiles) -> Iterator[Tile]:
    """Yield the rows of a table, one by one."""
    columns = (
        tiles.q.slot, tiles.q.slot_step, tiles.q.length, tiles.k.slot, tiles.k.slot_step, tiles.k.length,
        tiles.kind, tiles.head_in_group, tiles.multiplicity, tiles.weight,
        tiles.q.position, tiles.q.position_step, tiles.k.position, tiles.k.position_step,
    )  # fmt: skip
    lists = zip(*(c.tolist() for c in columns), strict=True)
    for row, (q0, q_step, q_n, k0, k_step, k_n, kind, head_in_group, times, weight, *at) in enumerate(lists):
        inside = _inside(tiles, row) if kind == Kind.PARTIAL or weight >= 0 else None
        q_rows, k_rows = Rows(q0, q_step, q_n), Rows(k0, k_step, k_n)
        yield Tile(
            q_rows, k_rows, Kind(kind), head_in_group, math.log(times), inside, (at[0], at[1]), (at[2], at[3])
        )


def _inside(tiles: Tiles, row: int) -> Inside:
    q, k, weight, mask = tiles.q, tiles.k, int(tiles.weight[row]), int(tiles.mask[row])
    places = (q.position[row], q.position_step[row], k.position[row], k.position_step[row])
    # Part (0, 0) reduces the positions by the period of the weights, as every other part does.
    return Inside(
        tiles.masks[mask] if mask >= 0 else None,
        tiles.weights[weight] if weight >= 0 else None,
        *(int(place) for place in places),
    ).part(0, 0)


def heads_of(x: Tensor, heads: slice) -> Tensor:
    """Return heads of x [B, H, ...]; x itself where these are all of them."""
    return x if heads == ALL_HEADS else x[:, heads]


class PartialOut(NamedTuple):
    """Hold attention of some queries over some keys.

    Attributes:
        heads: the query heads concerned.
        q_rows: the query slots concerned; `q_rows.of(x)` has the shape of the results.
        out_BHSD: normalised over these keys alone.
        lse_BHS: natural-log log-sum-exp over these keys, float32 (float64 for float64 inputs).
    """

    heads: slice
    q_rows: Rows
    out_BHSD: Tensor
    lse_BHS: Tensor


class PartialGrads(NamedTuple):
    """Hold what one tile adds to the gradients; dk, dv of all K/V heads, summed over the query heads.

    Attributes:
        heads, q_rows, k_rows: what it belongs to.
        dq, dk, dv: [..., heads, rows, D] of `q_rows.of` and `k_rows.of`; see `tokens_first`.
        tokens_first: they are [..., rows, heads, D]; what they are added to is transposed, once a pass.
    """

    heads: slice
    q_rows: Rows
    k_rows: Rows
    dq: Tensor
    dk: Tensor
    dv: Tensor
    tokens_first: bool = False

    @property
    def dq_BHSD(self) -> Tensor:  # noqa: N802
        """Return dq in the shape of `q_rows.of`."""
        return tokens_swapped(self.dq, self.tokens_first)

    @property
    def dk_BGSD(self) -> Tensor:  # noqa: N802
        """Return dk in the shape of `k_rows.of`."""
        return tokens_swapped(self.dk, self.tokens_first)

    @property
    def dv_BGSD(self) -> Tensor:  # noqa: N802
        """Return dv in the shape of `k_rows.of`."""
        return tokens_swapped(self.dv, self.tokens_first)


def tokens_swapped(x: Tensor, swapped: bool) -> Tensor:
    """Return x, with tokens and heads swapped if so."""
    return x.transpose(-3, -2) if swapped else x


class Asked(NamedTuple):
    """Hold what is asked of a kernel beside its tiles, before any are computed.

    Attributes:
        device_type: of the tensors, "cpu" or "cuda".
        dtype: of queries, keys and values.
        head_dim: D of queries and keys.
        pattern: what is attended.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    pattern: Pattern


class Kernel(Protocol):
    """Compute one hop's attention.

    q [B, H, S, D]; k [B, G, n, D] and v [B, G, n, E], the payload; out [B, H, S, E]; H a multiple of G.
    """

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        """Yield partial results; together the parts cover every attended pair exactly once."""
        ...

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        """Yield partial gradients, exact and additive: `out` and `lse` are the global ones.

        A gradient of the global lse, [B, H, S], is taken off the row sums of out x grad_out.
        """
        ...

    def of_heads(self, heads: slice) -> Kernel:
        """Return the kernel for some of the query heads: another one where scores go by the head."""
        ...

    def executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        """Return the (query, key) pairs per head that the kernel really multiplies, waste included."""
        ...


class HeadsOfPass(NamedTuple):
    """Hold what one kind of heads is computed with in a pass on this rank.

    Attributes:
        query_heads, kv_heads: numbers of heads of a call.
        hops: tiles by hop, some of them empty; those of the own shard first.
    """

    query_heads: int
    kv_heads: int
    hops: Sequence[Tiles]


class Operands(NamedTuple):
    """Hold the tensors of a pass on this rank, of all heads; gradients are those of a backward pass.

    q [B, H, S, D], k [B, G, S, D], v [B, G, S, E], grad_out [B, H, S, E].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None = None
    has_grad_lse: bool = False

    @property
    def description(self) -> tuple[Hashable, ...]:
        """Return shapes and whatever else a compiler may look at; not the values."""
        tensors = (x for x in self[:4] if x is not None)
        each = ((x.shape, x.dtype, x.device, x.is_inference()) for x in tensors)
        return (*each, self.grad_out is None, self.has_grad_lse)


def compiles(kernel: Kernel, operands: Operands, parts: Iterable[HeadsOfPass], scale: float) -> bool:
    """Return whether a pass is going to compile something; no for a kernel without a method `compiles`."""
    says = getattr(kernel, "compiles", None)
    return says is not None and any(says(operands, part, scale) for part in parts)


def views_of(kernel: Kernel) -> Views:
    """Return the views that a kernel keeps during a pass (`views`); others for one that keeps none."""
    found = getattr(kernel, "views", None)
    return found if isinstance(found, Views) else Views()
