"""Make FlexAttention's mask_mod, score_mod and BlockMask from the tensors of a hop.

Owns the functions that stand inside the compiled kernel. What they read are captured tensors, so that one
compiled function serves all hops ([Note: one compilation] in flex_calls.py).

[Note: labels for FlexAttention]
A table of tiles carries the pattern that it was cut from. For a pair the mask loads two labels for each
branch and two positions. So one compiled function serves all hops, ranks and layers, and all patterns with as
many branches and bands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ds_ring.masks.pattern import BoundPattern
from ds_ring.runtime.block_mask import BandTensors, HopTensors


class Same:
    """Hold an object that is equal to itself alone."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def constants_of_rule(rule: BoundPattern) -> Hashable:
    """Return what `block_mask_of` and `score_mod_of` make constants of, for all hops with this rule."""
    functions = tuple(tuple(map(constants_of_function, band[2])) for band in rule.bands)
    branches = (len(rule.branches_by_head), len(rule.branches_by_head[0]))
    return (*branches, functions, len(rule.mask_heads), rule.counts_twice)


def constants_of_function(function: object) -> Hashable:
    """Return what torch.compile makes constants of in a caller's function, or in what one captured.

    Dynamo knows a function by its code; a captured tensor is an input, of a fixed shape.
    """
    if isinstance(function, FunctionType):
        captured = [cell.cell_contents for cell in function.__closure__ or ()]
        return Same(function.__code__), constants_of_function((*captured, *(function.__defaults__ or ())))
    if isinstance(function, Tensor):
        return function.dtype, function.device, function.shape, function.stride(), function.requires_grad
    if isinstance(function, tuple):
        return tuple(map(constants_of_function, function))
    plain = function is None or isinstance(function, (bool, int, float, str))
    return (type(function), function) if plain else Same(function)


class ScoreTensors(NamedTuple):
    """Hold a caller's score_mod, and the numbers of the query heads, int64 [heads]."""

    function: Callable[..., Tensor]
    heads: Tensor


def _at(table: Tensor, *indices: Tensor) -> Tensor:
    """Return one element, as an operator: a joint graph is derived by a call; `table[i, j]` would read."""
    found: Tensor = torch.ops.aten.index.Tensor(table, indices)
    return found


def _count(mask: HopTensors) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return m of a pair; what all branches have in common, be it the band or the masks, is left out."""
    pairs = list(zip(mask.q.labels, mask.k.labels, strict=True))
    heads = pairs[0][0].shape[0]

    def count(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        total = None
        for number, (q_label, k_label) in enumerate(pairs):
            # One row of labels for all query heads of a K/V head, or one for each.
            head_in_group = head % heads
            own = _at(q_label, head_in_group, query)
            # A token without a label (-1) sees nothing, not even another one without.
            same = (own == _at(k_label, head_in_group, key)) & (own >= 0)
            # A band that all branches share is left to the mask_mod: once a pair, not once a branch.
            if len(mask.bands) > 1:
                same = same & _in_band(mask, mask.bands[number], batch, head, query, key)
            total = same.to(torch.int32) if total is None else total + same.to(torch.int32)
        assert total is not None
        return total

    return count


def _in_band(
    mask: HopTensors, band: BandTensors, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    """Return whether a pair lies within a band of distances and its masks show it."""
    q_position, k_position = _at(mask.q.position, query), _at(mask.k.position, key)
    gap = q_position - k_position
    visible = (gap >= band.least) & (gap <= band.most)
    for function in band.functions:
        number = _at(mask.head_numbers, head % mask.head_numbers.shape[0])
        visible = visible & function(batch, number, q_position.long(), k_position.long())
    return visible


def block_mask_of(mask: HopTensors, block: int) -> BlockMask:
    """Return the BlockMask of a hop, its mask a function of captured tensors."""
    count, q, k = _count(mask), mask.q, mask.k

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = count(batch, head, query, key) > 0
        if len(mask.bands) == 1:
            visible = visible & _in_band(mask, mask.bands[0], batch, head, query, key)
        return visible

    return BlockMask(
        (q.position.shape[0], k.position.shape[0]),
        *mask.partial_rows,
        *mask.full_rows,
        *mask.partial_columns,
        *mask.full_columns,
        BLOCK_SIZE=(block, block),
        mask_mod=mask_mod,
    )


def score_mod_of(mask: HopTensors, scores: ScoreTensors | None) -> Callable[..., Tensor]:
    """Return a score_mod that changes scores as the caller's, and adds log m where it can be other than 0."""
    count = _count(mask)
    if scores is not None:
        own, heads = scores

        def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            q_position, k_position = _at(mask.q.position, query).long(), _at(mask.k.position, key).long()
            score = own(score, batch, _at(heads, head), q_position, k_position)
            return weighted(score, batch, head, query, key) if mask.counts_twice else score

    def weighted(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # m is 0 for pairs that the mask hides: clamped, so that no log of 0 is formed.
        return score + count(batch, head, query, key).clamp(min=1).to(score.dtype).log()

    def plain(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score

    if scores is not None:
        return changed
    return weighted if mask.counts_twice else plain
