"""Attend from few queries, which every rank has, to the sharded keys of another sequence.

For a step of a generation with a transport in whole blocks: the bits are those of the same queries among all
others in `CrossAttention`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ds_ring.decode.replicated_op import replicated_attention_op
from ds_ring.layers.cross.attention import CrossAttention, among_keys
from ds_ring.ops.eager import run_compared
from ds_ring.schedule.pieces import PieceLayout


class FewCrossQueries(CrossAttention):
    """Compute `CrossAttention` of queries that are equal on all ranks.

    Args:
        args, given: see `CrossAttention`; the layout is that of `make_query_blocks`.
        q_positions: of the queries in that layout, int64 [Q], on the CPU.
    """

    def __init__(self, *args: Any, q_positions: Tensor, **options: Any) -> None:
        super().__init__(*args, **options)
        self._q_positions = q_positions

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, sinks: Tensor | None = None,
        return_lse: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Return out [B, H, Q, E] of query [B, H, Q, D] and local keys; with `return_lse` (out, lse)."""
        assert not args and not kwargs
        key, value = (among_keys(self._pair, x) for x in (key, value))
        where = self._q_positions + self._pair.first_query
        result = run_compared(
            self.context.mesh, "cross attention", replicated_attention_op, query, key, value, where,
            self.context.handle, sinks,
        )  # fmt: skip
        return result if return_lse else result[0]


def make_query_blocks(positions: Tensor, ring_size: int, block: int) -> tuple[PieceLayout, Tensor]:
    """Return a layout of the blocks of some consecutive positions [Q], and their places in it."""
    where = positions - positions[0] // block * block
    tokens = (int(where[-1]) // block + 1) * block
    return PieceLayout(tokens, ring_size, 1, (0, tokens), (0,)), where
