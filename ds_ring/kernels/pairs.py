"""What differs from pair to pair: masks and weights inside a tile, and functions that change scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ds_ring.masks.tiles import Tiles, Weights


class Scores(Protocol):
    """A score_mod, and the numbers of the query heads that a kernel is given, among all of the model."""

    mod: Any
    heads: range

    def select(self, heads: slice) -> Scores:
        """Return the same for some of the heads."""

    def changed(self, scores_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return the scores of all pairs as the function changes them."""

    def gradient(self, scores_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the scores, from the gradient of the result of `changed`."""

    def functions(
        self, dtype: torch.dtype, device: torch.device, derived: bool
    ) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Return it and its derivative, of tensors without dimensions, for scores of a dtype.

        `derived`: the caller differentiates the code of the first one by itself.
        """


class TilePredicate(NamedTuple):
    """What differs from pair to pair inside a tile, and the positions that it depends on.

    Attributes:
        mask: the mask function of a tile; None for none.
        weights: the part of the multiplicity m that varies from pair to pair.
        q_first, q_step, k_first, k_step: first position and step of both sides.
    """

    mask: Callable[[int, Any, Any], Any] | None
    weights: Weights | None
    q_first: int
    q_step: int
    k_first: int
    k_step: int

    def part(self, q_first: int, k_first: int) -> TilePredicate:
        """Return the same for the part from query q_first and key k_first on.

        Parts with equal weights are equal.
        """
        q, k = self.q_first + q_first * self.q_step, self.k_first + k_first * self.k_step
        if self.mask is None and self.weights is not None:
            # Weights are periodic: reduce the positions, so that parts with equal weights share calls.
            q, k = q % self.weights.period, k % self.weights.period
        return self._replace(q_first=q, k_first=k)

    def visible(self, samples: int, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return the mask: bool [queries, keys] or [samples or 1, heads or 1, queries, keys]."""
        assert self.mask is not None, "a tile without a mask"
        q, k = self._find_positions(queries, keys, device)
        visible: Tensor = self.mask(samples, q[:, 0], k[0])
        return visible

    def bias(self, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return log of the weights, [queries, keys]; one period is computed and then copied."""
        if self.weights is None:
            return torch.zeros(queries, keys, dtype=dtype, device=device)
        period = self.weights.period
        counts = self.weights(*self._find_positions(min(queries, period), min(keys, period), device))
        tiled = counts.to(dtype).log_().repeat(-(-queries // len(counts)), -(-keys // counts.shape[1]))
        return tiled[:queries, :keys]

    def _find_positions(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        q = self.q_first + self.q_step * torch.arange(queries, device=device)
        k = self.k_first + self.k_step * torch.arange(keys, device=device)
        return q[:, None], k[None, :]


def make_predicate(tiles: Tiles, row: int) -> TilePredicate:
    """Return what differs from pair to pair inside a row of a table."""
    q, k, weight, mask = tiles.q, tiles.k, int(tiles.weight[row]), int(tiles.mask[row])
    places = (q.position[row], q.position_step[row], k.position[row], k.position_step[row])
    # Part (0, 0) reduces the positions by the period of the weights, as every other part does.
    return TilePredicate(
        tiles.masks[mask] if mask >= 0 else None,
        tiles.weights[weight] if weight >= 0 else None,
        *(int(place) for place in places),
    ).part(0, 0)
