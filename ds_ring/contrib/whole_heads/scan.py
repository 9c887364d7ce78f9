"""Give each Ulysses rank all tokens of a ring shard for its own heads of a recurrence, and take them back.

Where Ulysses ranks share a shard, a recurrence is a scan over the runs of all of them (`layers/scan`). Here
an all-to-all trades tokens for heads around it, as around attention. Then the scan passes from ring rank to
ring rank alone, with the states of a rank's heads; on a ring of one there is none. Owns the all-to-all and
the scan's context.

Shapes: B samples, S local slots, H heads, U Ulysses ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.pass_options import PassOptions
from ds_ring.errors import RingShapeError
from ds_ring.layers.scan.context import ScanContext
from ds_ring.layers.scan.sequence_runs import SequenceRuns, pieces, sequence_runs
from ds_ring.masks.catalog import Causal
from ds_ring.ops.checks import check_operand
from ds_ring.ops.context import RingContext, cache_context, make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ulysses import SWAPS, UlyssesAllToAll, swap
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout

_TOKENS, _HEADS = 1, 2


@dataclass(eq=False)
class HeadContext(ScanContext):
    """The runs of a layout between ring ranks, each of which has all tokens of its shard for its heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pieces = pieces(self.layout, 1, self.mesh.ring_rank, self.documents)

    @property
    def runs(self) -> SequenceRuns:
        """Return the runs of the ring ranks; their states pass between ranks of the same heads."""
        whole, mesh = sequence_runs(self.layout, 1, self.tree), self.mesh
        return replace(whole, ranks=whole.ranks * mesh.ulysses_size + mesh.ulysses_rank)


def get_head_context(
    layout: Layout, mesh: RingMesh, documents: Documents | Tree | None, hop_timeout_s: float
) -> HeadContext:
    """Return the context of a call; made on first use, and dropped with its mesh.

    Raises:
        RingLayoutError: a layout whose runs have gaps; raised on every rank.
    """

    def make() -> HeadContext:
        return HeadContext(layout, documents, mesh, hop_timeout_s)

    with collective(mesh, "scan of whole heads"):
        context: HeadContext = cache_context(mesh, (HeadContext, layout, documents, hop_timeout_s), make)
    return context


def run_whole_heads(
    run: Callable[[list[Tensor]], Tensor], tensors: Sequence[Tensor], layout: Layout, mesh: RingMesh,
    options: PassOptions,
) -> Tensor:  # fmt: skip
    """Return what `run` computes of all tokens of a shard, for the heads that this rank has meanwhile.

    Args:
        run: takes the tensors [B, U * S, H / U, ...], and returns one such tensor.
        tensors: local [B, S, H, ...]; the first has four dimensions.
        layout, mesh: of the sequence; every rank of it must call.
        options: deadlines of messages.

    Returns:
        [B, S, H, ...].

    Raises:
        RingShapeError: heads that the Ulysses size does not divide, or tokens that are not a rank's.
    """
    handle = make_ring_context(Causal(), layout, mesh, Options.make(options)).handle
    return swap([run(swap(list(tensors), "Ulysses of states", handle))], "Ulysses of outputs", handle)[0]


def _check(context: RingContext, tensors: Sequence[Tensor], parts: int) -> None:
    assert isinstance(context.layout, Layout)
    slots = context.layout.part_slots(parts)
    for x in tensors:
        check_operand("recurrence by heads", x)
        if x.shape[_TOKENS] != slots or x.shape[_HEADS] % parts:
            raise RingShapeError.wrong(
                "recurrence by heads", f"{slots} tokens and a multiple of {parts} heads",
                f"{x.shape[_TOKENS]} and {x.shape[_HEADS]}", "leave states_by_heads out",
            )  # fmt: skip


SWAPS |= {
    "Ulysses of states": UlyssesAllToAll(_HEADS, _TOKENS, "Ulysses of gradients of states", _check),
    "Ulysses of gradients of states": UlyssesAllToAll(_TOKENS, _HEADS, "Ulysses of states"),
    "Ulysses of outputs": UlyssesAllToAll(_TOKENS, _HEADS, "Ulysses of gradients of outputs"),
    "Ulysses of gradients of outputs": UlyssesAllToAll(_HEADS, _TOKENS, "Ulysses of outputs"),
}
