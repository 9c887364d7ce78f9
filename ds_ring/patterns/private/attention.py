"""Attention of private tokens: queries of one private copy, keys of it, of others, of the shared one.

A module computes these keys one sequence after the other, each padded to its own local slots. Owns putting
the tokens of a rank together, in the order of the layout "private", and nothing of attention.

Shapes: B samples, H query heads, G K/V heads, Q slots of the queries, K slots of all keys, D and E head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.attention_module import RingAttention
from ds_ring.comm.device_tables import on_device
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingShapeError
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.layout import Layout

if TYPE_CHECKING:
    from ds_ring.config.section import RingConfig

SequenceParts = Sequence[
    tuple[int, int]
]  # slots and tokens of each sequence of keys; the queries are of the last


class PrivateAttention:
    """Attend from local private tokens over the keys of all ranks that they may see.

    Args:
        config: kernel, transport and the other options.
        pattern, layout: of the shared sequence and all private copies together.
        mesh: this process's place in the grid of ranks.
        scale: factor of the scores; None is 1 / sqrt(D).
    """

    def __init__(
        self, config: RingConfig, pattern: Pattern, layout: Layout, mesh: RingMesh, scale: float | None = None
    ) -> None:
        self._layout, self._tokens = layout, layout.valid_tokens(mesh.ring_rank)
        self._attend = RingAttention(config, mesh=mesh, layout=layout, scale=scale, pattern=pattern)

    def __call__(self, parts: SequenceParts, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> Tensor:
        """Return [B, H, Q, E]; slots of padding get zeros.

        Raises:
            RingShapeError: slots that are not those of `parts`, or tokens that are not the layout's.
        """
        slots, tokens = (sum(sizes) for sizes in zip(*parts, strict=True))
        last_slots, last_tokens = parts[-1]
        if (q_BHQD.shape[2], k_BGKD.shape[2], tokens) != (last_slots, slots, self._tokens):
            raise RingShapeError.wrong(
                "private keys", f"{last_slots} queries, {slots} keys of {self._tokens} tokens",
                f"{q_BHQD.shape[2]}, {k_BGKD.shape[2]} and {tokens}", "pass local tensors of one batch",
            )  # fmt: skip
        rest = self._layout.local_tokens - tokens
        q = pad(q_BHQD[:, :, :last_tokens], (0, 0, tokens - last_tokens, rest))
        k, v = (pad(_take_tokens(x, parts), (0, 0, 0, rest)) for x in (k_BGKD, v_BGKE))
        out = self._attend(q, k, v)[:, :, tokens - last_tokens : tokens]
        return pad(out, (0, 0, 0, last_slots - last_tokens))


class RowsPass(NamedTuple):
    """Attention of some rows of a batch, and the parts of their keys."""

    attend: PrivateAttention
    parts: SequenceParts
    rows: Sequence[int]


def attend_by_rows(passes: Sequence[RowsPass], q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> Tensor:
    """Return [B, H, Q, E], one pass after the other; rows of none get zeros."""
    if len(passes) == 1 and len(passes[0].rows) == len(q_BHQD):
        return passes[0].attend(passes[0].parts, q_BHQD, k_BGKD, v_BGKE)
    out = q_BHQD.new_zeros(*q_BHQD.shape[:3], v_BGKE.shape[3])
    for attend, parts, rows in passes:
        index = on_device(np.array(rows), out.device)
        of_rows = attend(parts, *(x.index_select(0, index) for x in (q_BHQD, k_BGKD, v_BGKE)))
        out = out.index_copy(0, index, of_rows)
    return out


def _take_tokens(x: Tensor, parts: SequenceParts) -> Tensor:
    """Leave the padding at the end of each part of [B, G, K, D] out."""
    if all(slots == tokens for slots, tokens in parts):
        return x
    pieces = x.split([slots for slots, _ in parts], dim=2)
    return torch.cat([piece[:, :, :tokens] for piece, (_, tokens) in zip(pieces, parts, strict=True)], dim=2)
