"""Delta rules on Ulysses ranks: all tokens of some heads, where `engine.ring.states_by_heads()` asks for it.

`ds-ring plan` says when this is faster than a scan over all ranks of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ds_ring.contrib.families.recurrent.scan import Recurrences, split_rows
from ds_ring.contrib.whole_heads.scan import get_head_context, run_whole_heads
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError
from ds_ring.layers.scan.recurrence import PieceKernel, run_recurrence
from ds_ring.models.rows import in_order
from ds_ring.ops.tracing import forbid_tracing


def states_by_heads(session: RingSession, on: bool = True) -> None:
    """Compute delta rules by Ulysses: an all-to-all of q, k, v and gates, and one of the outputs.

    Without this call their states are scanned over all ranks of the sequence. Results are the same but for
    rounding. Generation scans in any case.

    Raises:
        RingConfigError: no Ulysses ranks, or a model without delta rules.
    """
    mesh = session.mesh
    recurrences = mesh.owners[Recurrences]
    if mesh.ulysses_size == 1:
        raise RingConfigError.wrong("states_by_heads", "Ulysses ranks", "none", 'set "ulysses_size"')
    if session.attached and not recurrences.has_delta_rules:
        raise RingConfigError.wrong(
            "states_by_heads", "a model with delta rules", "one without", "leave the call out"
        )
    recurrences.select_heads = run_recurrence_by_heads if on else None


@forbid_tracing
def run_recurrence_by_heads(
    sharding: BatchSharding, tensors: Sequence[Tensor], call: PieceKernel, matrix: bool
) -> Tensor:
    """Return the outputs of a recurrence of [B, S, H, ...]; arguments as those of `scan.recurrence`.

    Raises:
        RingShapeError: the Ulysses size does not divide the heads.
    """

    def run(tensors: Sequence[Tensor]) -> Tensor:
        sets = split_rows(sharding, get_head_context)
        outs = [
            run_recurrence(context, [x[rows] if rows else x for x in tensors], call, matrix, 1)[0]
            for context, rows in sets
        ]
        return in_order(outs, [rows for _, rows in sets])

    return run_whole_heads(run, tensors, sharding.layout, sharding.mesh, sharding.config)
