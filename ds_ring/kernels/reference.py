"""The reference kernel: dense attention of each tile, for any floating dtype and device. Slow and simple.

Tests compare every other kernel with the reference kernel, and the reference kernel with a dense softmax.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_ring.kernels.interface import PartialGrads, PartialOut, Tile, each_tile
from ds_ring.kernels.pairs import Scores
from ds_ring.masks.tiles import Tiles


def compute_weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse); 0 in rows without keys."""
    # In a row without keys, scores and lse are -inf: clamp lse, so that exp returns 0 and not NaN.
    return torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1))


def compute_score_gradients(
    tile: Tile, heads: slice, scores: Tensor, v_t: Tensor,
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return queries and grad_out of a tile, its weights, and the gradient of its scores."""
    q_t, grad_t, out_t = (tile.q_rows.select(x[:, heads]).to(scores.dtype) for x in (q, grad_out, out))
    # `lse` covers the keys of all ranks, so these weights are the tile's columns of the whole softmax.
    weights = compute_weights(scores, tile.q_rows.select(lse[:, heads]).to(scores.dtype))
    # `out` covers the keys of all ranks: delta is the sum of weights * dweights over the keys of all tiles.
    delta = (grad_t * out_t).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - tile.q_rows.select(grad_lse[:, heads]).to(delta.dtype).unsqueeze(-1)
    return q_t, grad_t, weights, weights * (grad_t @ v_t.mT - delta)


class ReferenceKernel:
    """Compute dense scores per tile, in at least float32."""

    name = "reference"

    def __init__(self, scores: Scores | None = None) -> None:
        self._change_scores = scores

    def select_heads(self, heads: slice) -> ReferenceKernel:
        return self if self._change_scores is None else ReferenceKernel(self._change_scores.select(heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        for tile in each_tile(tiles):
            heads = tile.heads(q.shape[1] // k.shape[1])
            _, scores, _, v_t = self._compute_scores(q[:, heads], k, v, tile, scale, heads)
            lse = torch.logsumexp(scores, dim=-1)
            yield PartialOut(heads, tile.q_rows, compute_weights(scores, lse) @ v_t, lse)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        groups = k.shape[1]
        for tile in each_tile(tiles):
            heads = tile.heads(q.shape[1] // groups)
            products, scores, k_t, v_t = self._compute_scores(q[:, heads], k, v, tile, scale, heads)
            operands = grad_out, q, out, lse, grad_lse
            q_t, grad_t, weights, dscores = compute_score_gradients(tile, heads, scores, v_t, *operands)
            if self._change_scores is not None:
                positions = tile.positions(q.device)
                dscores = self._change_scores.select(heads).gradient(products, *positions, dscores)
                # The derivative of a masked score may be infinite or NaN.
                dscores = dscores.masked_fill(scores == float("-inf"), 0)
            dscores = dscores * scale
            dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dscores.mT @ q_t, weights.mT @ grad_t))
            yield PartialGrads(heads, tile.q_rows, tile.k_rows, dscores @ k_t, dk, dv)

    def count_executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        return int((tiles.q.length * tiles.k.length).sum())

    def _compute_scores(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float, heads: slice
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q k^T * scale [B, heads, queries, keys], the masked scores, and k, v of each query head."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        q_t = tile.q_rows.select(q).to(dtype)
        # Query head h reads K/V head h // (H / G), with H query heads and G K/V heads.
        k_t, v_t = (
            tile.k_rows.select(x).to(dtype).repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v)
        )
        visible = tile.visible(len(q), q.device)
        # If m branches contain a pair, log m is added to the pair's score. `tile.bias` is the term of log m
        # that is constant in a tile. `tile.inside.bias` is the term that differs from pair to pair.
        products = q_t @ k_t.mT * scale
        scores = products
        if self._change_scores is not None:
            scores = self._change_scores.select(heads).changed(products, *tile.positions(q.device))
        scores = scores + tile.bias
        if tile.inside is not None:
            scores = scores + tile.inside.bias(q_t.shape[2], k_t.shape[2], dtype, q.device)
        return products, scores.masked_fill(~visible, float("-inf")), k_t, v_t
