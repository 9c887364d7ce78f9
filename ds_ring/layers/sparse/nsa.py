"""Native sparse attention over a sharded sequence: `nsa_attention`.

Made of `ring_select`, `selected_attention` and ring passes over compressed keys and over a window. Shapes: B
samples, H query heads, G key/value heads, r = H / G, S local tokens, N local blocks, L tokens of a window, D
and E head dims of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.api import ring_attention
from ds_ring.comm.collective import collective
from ds_ring.comm.device_tables import on_device
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.comm.streams import is_fake
from ds_ring.config.pass_options import PassOptions
from ds_ring.errors import RingConfigError, RingShapeError, check_whole_number
from ds_ring.layers.scan.context import scan_context
from ds_ring.layers.scan.recurrence import padded
from ds_ring.layers.scan.sequence_runs import in_blocks
from ds_ring.layers.selection.block_layout import BlockLayout
from ds_ring.layers.selection.select import ring_select
from ds_ring.layers.sparse.blocks import attend_to_blocks, check_shards, windows, without_padding
from ds_ring.masks.catalog import Before, SlidingWindow
from ds_ring.ops.checks import check_floats
from ds_ring.ops.handles import forbid_tracing
from ds_ring.schedule.layout import Layout

SCORED = 2048  # keys whose scores exist at a time, of all heads and a tile's queries
Compress = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class NsaSizes:
    """How many tokens and blocks the branches of NSA see. The defaults are the paper's.

    Attributes:
        compressed_size, stride: tokens of a window, and between the beginnings of two; the first one is a
            multiple of the second one, and no larger than `block_size`, which is one, too.
        block_size, top_k: tokens of a block, and blocks that a query attends to at most.
        first_blocks, local_blocks: of the top_k blocks, how many at the start, and up to the query's own, are
            always chosen.
        window: tokens that the last branch sees, the query's own included.
    """

    compressed_size: int = 32
    stride: int = 16
    block_size: int = 64
    top_k: int = 16
    first_blocks: int = 1
    local_blocks: int = 2
    window: int = 512

    def check(self) -> None:
        """Raise RingConfigError for sizes that are no numbers, or do not fit each other."""
        for name, value in vars(self).items():
            if value != 0 or not name.endswith("_blocks"):
                check_whole_number(value, f"nsa_attention: {name}", RingConfigError)
        size, stride, block = self.compressed_size, self.stride, self.block_size
        if size % stride or block % stride or size > block:
            raise RingConfigError(
                f"nsa_attention: expected compressed_size <= block_size, multiples of stride, got {size},"
                f" {block} and {stride}; the paper has 32, 64 and 16"
            )
        if self.first_blocks + self.local_blocks > self.top_k:
            raise RingConfigError.wrong(
                "nsa_attention", "top_k >= first_blocks + local_blocks", self.top_k, "raise top_k"
            )


@forbid_tracing
def nsa_attention(
    q: Tensor, k: Tensor | Sequence[Tensor], v: Tensor | Sequence[Tensor], gates: Tensor, *,
    layout: Layout, mesh: RingMesh, compress: Compress, sizes: NsaSizes | None = None,
    scale: float | None = None, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Compute native sparse attention (NSA) over a sharded sequence. Differentiable.

    Yuan et al. 2025, "Native Sparse Attention" (arXiv 2502.11089, section 3.3). The output is the sum of
    three attentions, each times its gate: to compressed keys, one for every `stride` tokens, made of
    `compressed_size` tokens (equation 7); to the tokens of the top_k blocks that the probabilities of the
    compressed keys add up to most (equations 9 and 10), the same for the query heads of a group; and to a
    window. All of them see keys up to the query. Equal sums are ordered by block, the first one first.

    Args:
        q: local queries [B, H, S, D].
        k, v: local keys [B, G, S, D] and values [B, G, S, E] of all branches, or three of each: those that
            are compressed, those of chosen blocks, and those of the window.
        gates: [B, H, S, 3], of the branches in this order.
        layout: runs of whole blocks of `block_size` tokens.
        mesh: this process's place; every rank of the ring must call. Its Ulysses size is 1.
        compress: takes keys [B, G, n, compressed_size, D] and values [.., E] of n windows, and returns
            [B, G, n, D] and [B, G, n, E]. It is called once on each rank, and may have parameters; on each
            rank their gradient is that of the rank's windows: sum it over the ring.
        sizes: of windows and blocks; None for those of the paper.
        scale, hop_timeout_s: see `moba_attention`.

    Returns:
        out [B, H, S, E] in q's dtype. Rows of padding are 0, and so is a branch that sees no key.

    Raises:
        RingLayoutError: runs that are no whole blocks: see the message for a length that fits.
        RingConfigError, RingShapeError, RingMismatchError, RingPeerError: as `moba_attention`.
    """
    three_k, three_v = (3 * [x] if isinstance(x, Tensor) else [*x] for x in (k, v))
    check_mesh(mesh)
    with collective(mesh, "nsa_attention", alone=is_fake(q)) as call:
        branch_sizes = NsaSizes() if sizes is None else sizes
        if not isinstance(branch_sizes, NsaSizes):
            advice = "use ds_ring.NsaSizes(...)"
            raise RingConfigError.wrong("nsa_attention: sizes", "NsaSizes or None", sizes, advice)
        compressed_size, stride, block_size = (
            branch_sizes.compressed_size,
            branch_sizes.stride,
            branch_sizes.block_size,
        )
        branch_sizes.check()
        if not callable(compress):
            advice = "pass one of the windows' k and v"
            raise RingConfigError.wrong("nsa_attention: compress", "a function", compress, advice)
        if len(three_k) != 3 or len(three_v) != 3:
            raise RingConfigError.wrong(
                "nsa_attention", "one or three k and v", f"{len(three_k)}, {len(three_v)}", "pass three"
            )
        for keys, values in zip(three_k, three_v, strict=True):
            check_shards("nsa_attention", layout, mesh, ("q", q), ("k", keys), ("v", values))
        shape = (*q.shape[:3], 3)
        check_floats("nsa_attention", gates=gates)
        if gates.shape != shape:
            got = list(gates.shape)
            expected = f"floating {shape}"
            raise RingShapeError.wrong("nsa_attention: gates", expected, got, "pass three numbers a query")
        in_blocks(layout, block_size)  # or what does not fit
        blocks, entries = BlockLayout.from_tokens(layout, block_size, whole=False), in_blocks(layout, stride)
        call.agree({"sizes": branch_sizes})
    q, gates = (without_padding(x, layout, mesh) for x in (q, gates))
    three_k, three_v = ([without_padding(x, layout, mesh) for x in three] for three in (three_k, three_v))
    options = PassOptions(hop_timeout_seconds=hop_timeout_s)
    place: dict[str, Any] = {"mesh": mesh, "scale": scale, "options": options}
    context = scan_context(entries, mesh, None, hop_timeout_s)

    # Windows of compressed_size tokens: those of their own stride, and the next ones.
    both = torch.cat([three_k[0], three_v[0]], dim=3).transpose(1, 2)  # [B, S, G, D + E]
    by_stride = padded(both, entries.local_tokens * stride).unflatten(1, (-1, stride))
    of_windows = windows(by_stride, context, 0, compressed_size // stride - 1).flatten(2, 3)
    of_windows = padded(of_windows, entries.local_tokens).permute(0, 3, 1, 2, 4)
    keys, values = _compressed(compress, of_windows, three_k[0].shape[3], mesh)
    compressed, lse = _attend_to_entries(q, keys, values, entries, stride, compressed_size // stride, place)

    with torch.no_grad():
        of_blocks = windows(
            keys.transpose(1, 2), context, compressed_size // stride - 1, 0, block_size // stride
        )  # [B, N, w, G, D]
        scores = _Importance(
            q, lse, layout.positions(mesh.ring_rank), compressed_size, stride, block_size, scale,
            (branch_sizes.first_blocks, branch_sizes.local_blocks),
        )  # fmt: skip
        chosen = ring_select(
            scores, branch_sizes.top_k, padded(of_blocks, blocks.local_tokens), layout=layout, mesh=mesh,
            blocks=blocks, with_positions=True, hop_timeout_s=hop_timeout_s,
        )  # fmt: skip
    selected = attend_to_blocks(q, three_k[1], three_v[1], chosen, blocks, mesh, scale, hop_timeout_s)[0]
    near_ones = ring_attention(
        q, three_k[2], three_v[2], pattern=SlidingWindow(branch_sizes.window), layout=layout, **place
    )
    branches = zip((compressed, selected, near_ones), gates.unbind(-1), strict=True)
    parts = [gate.unsqueeze(-1) * out for out, gate in branches]
    # its gradient of padding, which may be NaN, goes nowhere
    return without_padding((parts[0] + parts[1] + parts[2]).to(q.dtype), layout, mesh)


class _Importance:
    """Score blocks by the probabilities of compressed keys (equations 9 and 10 of the paper).

    A compressed key adds its probability to a block once for every `stride` tokens that its window and the
    block share: the double sum of equation 9, whose indices begin at 1. The probability is exact, since the
    lse of attention to all compressed keys is known.

    Args:
        q: [B, H, S, D].
        lse: [B, H, S] of attention to compressed keys.
        positions: of the slots, -1 for padding.
        size, stride, block: tokens of a window, between windows, and of a block.
        scale: factor of the scores; None is 1 / sqrt(D).
        always: numbers of first and local blocks that are chosen with any score.
    """

    def __init__(
        self, q: Tensor, lse: Tensor, positions: np.ndarray, size: int, stride: int, block: int,
        scale: float | None, always: tuple[int, int],
    ) -> None:  # fmt: skip
        self.q, self.lse, self.block, self.always = q, lse, block, always
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.positions = on_device(positions, q.device)
        # Of a block's compressed keys: where their windows begin and end, from the block's first token, and
        # how many strides they share with it.
        first = torch.arange(stride - size, block, stride, device=q.device)
        self.first, self.last = first, first + size - 1
        self.shared = (self.last.clamp_max(block - 1) - first.clamp_min(0) + 1) // stride

    def __call__(self, rows: slice, keys: Tensor, numbers: Tensor) -> Tensor:
        """Return scores [B, G, queries, n] of keys [B, n, w, G, D]."""
        step = max(1, SCORED // keys.shape[2])
        parts = zip(keys.split(step, dim=1), numbers.split(step), strict=True)
        importance = torch.cat([self._sums(rows, part, number) for part, number in parts], dim=-1)
        query_block = self.positions[rows, None] // self.block
        first, local = self.always
        chosen = (numbers < first) | ((numbers <= query_block) & (numbers > query_block - local))
        return importance.masked_fill_(chosen, float("inf"))

    def _sums(self, rows: slice, keys: Tensor, numbers: Tensor) -> Tensor:
        lse, groups = self.lse[:, :, rows], keys.shape[3]
        q, of_lse = (
            x.to(lse.dtype).unflatten(1, (groups, -1)) for x in (self.q[:, :, rows] * self.scale, lse)
        )
        logits = torch.einsum("bgrqd,bnwgd->bgrqnw", q, keys.to(lse.dtype))
        begins = numbers[:, None] * self.block
        positions = self.positions[rows, None, None]
        visible = (begins + self.first >= 0) & (begins + self.last <= positions)  # [queries, n, w]
        # A query that sees no compressed key has an lse of -inf, and no probability.
        logits = (logits - of_lse[..., None, None]).masked_fill_(~visible, float("-inf"))
        return (logits.exp_() * self.shared).sum(-1).sum(2)


def _attend_to_entries(
    q: Tensor, keys: Tensor, values: Tensor, entries: Layout, stride: int, strides: int, place: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attend to the compressed keys whose windows end at the query or before it.

    A query is at place r of stride b. It sees compressed key i if i + strides <= b, and at the last place if
    i + strides <= b + 1. So the queries of all other places are heads of one ring pass over the layout of
    strides, and those of the last place of another one.

    Args:
        q: [B, H, S, D].
        keys, values: [B, G, n, D] and [B, G, n, E].
        entries: their layout.
        stride: tokens between two windows.
        strides: of a window.
        place: arguments of `ring_attention`.
    """
    heads, slots = q.shape[1:3]
    by_place = padded(q, entries.local_tokens * stride, dim=2).unflatten(2, (-1, stride)).transpose(2, 3)
    outs, lses = [], []
    for places, apart in ((by_place[:, :, :-1], strides), (by_place[:, :, -1:], strides - 1)):
        if places.shape[2]:
            out, lse = ring_attention(
                places.flatten(1, 2), keys, values, pattern=Before(apart), layout=entries, return_lse=True,
                **place,
            )  # fmt: skip
            outs.append(out.unflatten(1, (heads, -1)))
            lses.append(lse.unflatten(1, (heads, -1)))
    out, lse = torch.cat(outs, dim=2), torch.cat(lses, dim=2)  # [B, H, stride, n, ..]
    out, lse = (padded(x.transpose(2, 3).flatten(2, 3), slots, dim=2) for x in (out, lse))
    return out, lse


def _compressed(compress: Compress, of_windows: Tensor, width: int, mesh: RingMesh) -> tuple[Tensor, Tensor]:
    """Return compressed keys [B, G, n, D] and values of windows [B, G, n, L, D + E], contiguous."""
    keys, values = of_windows.split([width, of_windows.shape[4] - width], dim=4)
    compressed = compress(keys, values)
    want = [(*x.shape[:3], x.shape[4]) for x in (keys, values)]
    fits = isinstance(compressed, tuple) and all(isinstance(x, Tensor) for x in compressed)
    if (
        not fits
        or [tuple(x.shape) for x in compressed] != want
        or any(x.dtype != keys.dtype for x in compressed)
    ):
        got = [tuple(x.shape) for x in compressed] if fits else type(compressed).__name__
        with collective(mesh, "nsa_attention"):
            raise RingShapeError(f"compress: expected keys and values {want} in {keys.dtype}, got {got}")
    return compressed[0].contiguous(), compressed[1].contiguous()
