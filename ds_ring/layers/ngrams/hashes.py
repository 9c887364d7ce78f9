"""Hash the n-gram that ends at each token of a sharded sequence into rows of tables: `ngram_rows`.

Shapes: B samples, S local slots, N orders times heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.comm.streams import is_fake
from ds_ring.errors import RingConfigError, RingShapeError, check_whole_number
from ds_ring.layers.scan.halo import shift_sequence
from ds_ring.ops.checks import check_operand
from ds_ring.ops.tracing import forbid_tracing
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout


@forbid_tracing
def ngram_rows(
    ids: Tensor, multipliers: Sequence[int], sizes: Sequence[Sequence[int]], *, layout: Layout,
    mesh: RingMesh, pad_id: int = 0, documents: Documents | Tree | None = None, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return for each token the rows of its n-grams in one table that holds all heads' tables.

    The hash of Engram (Cheng et al. 2026, "Conditional Memory via Scalable Lookup", arXiv 2601.07372): the
    tokens of the n-gram times their multipliers, joined by xor, modulo the size of a head's table.

    Args:
        ids: local token ids [B, S], int64.
        multipliers: a factor for the token itself, the one before it, and so on: the longest n-gram.
        sizes: rows of the heads' tables, for n-grams of 2, 3, ... tokens; one sequence of heads for each.
        layout: the rank and slot of each token; its runs have no gaps (zigzag, contiguous, balanced).
        mesh: this process's place; every rank of the sequence must call.
        pad_id: stands for tokens before the document.
        documents: n-grams end at the borders of documents, or follow the paths of a tree.
        hop_timeout_s: seconds after which a message that has not arrived raises.

    Returns:
        Rows [B, S, N], int64: by order, then by head. The tables of heads follow each other in this order.

    Raises:
        RingShapeError: ids that are not [B, S] int64.
        RingConfigError: no sizes for each order.
        RingLayoutError, RingPatternError, RingMismatchError, RingPeerError: as `halo`.
    """
    check_mesh(mesh)
    with collective(mesh, "ngram_rows", alone=is_fake(ids)) as call:
        check_operand("ngram_rows: ids", ids)
        if ids.dtype != torch.int64 or ids.dim() != 2:
            raise RingShapeError.wrong(
                "ngram_rows: ids", "[B, S] int64", f"{list(ids.shape)} {ids.dtype}", "pass token ids"
            )
        if len(sizes) != len(multipliers) - 1 or not sizes:
            raise RingConfigError.wrong(
                "ngram_rows: sizes", f"a sequence for each of {len(multipliers) - 1} orders, 2 and above",
                f"{len(sizes)}", "give one multiplier more than orders",
            )  # fmt: skip
        for size in (size for heads in sizes for size in heads):
            check_whole_number(size, "ngram_rows: size", RingConfigError)
        numbers = {"multipliers": [*map(int, multipliers)], "sizes": [[*map(int, heads)] for heads in sizes]}
        call.agree({**numbers, "pad_id": pad_id})
    mixed, hashes = ids * multipliers[0], []
    begins = iter(accumulate((size for heads in sizes for size in heads), initial=0))
    for back, (multiplier, heads) in enumerate(zip(multipliers[1:], sizes, strict=True), 1):
        before = shift_sequence(
            ids, -back, dim=1, layout=layout, mesh=mesh, documents=documents, fill=pad_id,
            hop_timeout_s=hop_timeout_s,
        )  # fmt: skip
        mixed = mixed ^ (before * multiplier)
        hashes += [mixed % size + begin for size, begin in zip(heads, begins)]  # noqa: B905 - goes on
    return torch.stack(hashes, dim=-1)
