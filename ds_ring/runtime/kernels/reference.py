"""The oracle: plain dense mathematics, any floating dtype, any device. Slow and obvious.

Every other kernel is tested against this one, and this one against a dense softmax in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_ring.runtime.kernels.interface import PartialGrads, PartialOut, Tile, each_tile
from ds_ring.schedule.tiles import Kind, Tiles


def _visible(kind: Kind, queries: int, keys: int, device: torch.device) -> Tensor:
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if kind == Kind.CAUSAL:
        return ones.tril()
    if kind == Kind.ANTICAUSAL:
        return ones.triu()
    assert kind == Kind.FULL, f"reference kernel: a tile of kind {kind!r}"
    return ones


def _expand(x_BGSD: Tensor, heads: int) -> Tensor:
    """Repeat K/V heads so that query head h meets K/V head h // (H / G)."""
    return x_BGSD.repeat_interleave(heads // x_BGSD.shape[1], dim=1)


class ReferenceKernel:
    """Dense scores per tile, in at least float32."""

    name = "reference"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        for tile in each_tile(tiles):
            heads = tile.heads(q.shape[1] // k.shape[1])
            scores, _, v_t = self._scores(q[:, heads], k, v, tile, scale)
            lse = torch.logsumexp(scores, dim=-1)
            yield PartialOut(heads, tile.q_slots, torch.exp(scores - lse.unsqueeze(-1)) @ v_t, lse)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Tiles,
        scale: float,
    ) -> Iterator[PartialGrads]:
        groups = k.shape[1]
        for tile in each_tile(tiles):
            heads = tile.heads(q.shape[1] // groups)
            scores, k_t, v_t = self._scores(q[:, heads], k, v, tile, scale)
            q_t, grad_t, out_t = (x[:, heads, tile.q_slots].to(scores.dtype) for x in (q, grad_out, out))
            weights = torch.exp(scores - lse[:, heads, tile.q_slots].to(scores.dtype).unsqueeze(-1))
            delta = (grad_t * out_t).sum(-1, keepdim=True)
            dscores = weights * (grad_t @ v_t.mT - delta) * scale
            dk, dv = (_fold(x, groups) for x in (dscores.mT @ q_t, weights.mT @ grad_t))
            yield PartialGrads(heads, tile.q_slots, tile.k_slots, dscores @ k_t, dk, dv)

    def executed_pairs(self, tiles: Tiles) -> int:
        return int((tiles.q.length * tiles.k.length).sum())

    @staticmethod
    def _scores(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Masked scores [B, heads, queries, keys] and the expanded keys and values of a tile."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        q_t = q[:, :, tile.q_slots].to(dtype)
        k_t, v_t = (_expand(x[:, :, tile.k_slots].to(dtype), q.shape[1]) for x in (k, v))
        visible = _visible(tile.kind, q_t.shape[2], k_t.shape[2], q.device)
        scores = q_t @ k_t.mT * scale + tile.bias
        return scores.masked_fill(~visible, float("-inf")), k_t, v_t


def _fold(x_BHSD: Tensor, groups: int) -> Tensor:
    """Sum the gradients of the query heads that share a K/V head."""
    return x_BHSD.unflatten(1, (groups, -1)).sum(2)
