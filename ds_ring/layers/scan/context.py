"""The state of the calls of one layout: which runs this rank has, and the exchange between neighbours.

Owns `ScanContext`, which a mesh caches, and the integer by which the operators of this folder find it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.device_tables import DeviceTables, leave_inference_mode, on_device, to_device
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.compat.torch import assume_constant
from ds_ring.errors import RingPatternError
from ds_ring.layers.scan.sequence_runs import (
    Piece,
    SequenceRuns,
    pieces,
    sequence_runs,
)
from ds_ring.ops.checks import check_layout
from ds_ring.ops.context import cache_context, new_handle
from ds_ring.ops.tracing import read_number
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout

ByRank = dict[int, Tensor]  # by rank of the sequence


@dataclass(eq=False)
class ScanContext:
    """The runs of a layout, and which of them this rank has.

    Attributes:
        layout, documents, mesh: of a call; without documents a state passes through the whole sequence, and
            with a tree along its paths.
        hop_timeout_s: seconds that the messages of one round may take.
        in_a_graph: True if a compiled graph carries the handle.
        exchange: sends and receives; None if the sequence has one rank.
        pieces: this rank's pieces in slot order.
        own_runs: number of this rank's runs.
    """

    captured_bytes: ClassVar[int] = 0
    layout: Layout
    documents: Documents | Tree | None
    mesh: RingMesh
    hop_timeout_s: float = 60.0
    in_a_graph: bool = False
    exchange: Exchange | None = None
    pieces: tuple[Piece, ...] = field(init=False, default=(), repr=False)
    own_runs: int = field(init=False, default=0)
    tables: DeviceTables = field(default_factory=DeviceTables, repr=False)  # indices of tokens
    _masks: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict, repr=False)
    _exists: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mesh.sequence_size > 1:
            self.exchange = Exchange(self.mesh, self.hop_timeout_s)
        rank = self.mesh.sequence_rank
        # Attributes, which torch.compile reads and need not trace.
        self.pieces = pieces(self.layout, self.mesh.ulysses_size, rank, self.documents)
        self.own_runs = len(self.runs.list_rank_runs(rank))

    @cached_property
    def handle(self) -> int:
        """Return the integer by which the operators find this object."""
        return new_handle(self, self.mesh.place, self.layout, self.documents)

    @property
    def runs(self) -> SequenceRuns:
        """Return the runs of all ranks of the sequence."""
        return sequence_runs(self.layout, self.mesh.ulysses_size, self.tree)

    @property
    def tree(self) -> Tree | None:
        """Return the tree, if there is one."""
        return self.documents if isinstance(self.documents, Tree) else None

    def masks(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 for runs in which no document begins, and 1 for runs whose first token begins none.

        Both are [R, 1, ...] with the dimensions of `like`, and 0 for the other runs.
        """
        key = like.dtype, like.device
        if key not in self._masks:  # they are the same for all layers of a batch
            self._masks[key] = self._new_masks(*key)
        through, continues = self._masks[key].view(2, -1, *[1] * (like.dim() - 1))
        return through, continues

    @leave_inference_mode
    def _new_masks(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        rows = torch.ones(2, self.own_runs, dtype=torch.int64, device="cpu")
        if self.documents is not None:
            rows.zero_()
            for piece in self.pieces:
                rows[0, piece.run] += piece.continues and piece.is_last
                rows[1, piece.run] += piece.continues
        return to_device(rows.to(dtype), device)

    @leave_inference_mode
    def exists(self, offset: int, device: torch.device) -> Tensor:
        """Return for each slot whether its document, or path, has a token at position + offset, [S]."""
        if (offset, device) in self._exists:
            return self._exists[offset, device]
        parts, rank = self.mesh.ulysses_size, self.mesh.sequence_rank
        slots = self.layout.part_slots(parts)
        first = rank % parts * slots
        mine = self.layout.positions(rank // parts)[first : first + slots]
        target = mine + offset
        exists = (mine >= 0) & (target >= 0) & (target < self.layout.tokens)
        if self.tree is not None:
            # Only tokens in front: `halo` refuses others.
            exists = (mine >= 0) & (mine < self.tree.starts[-1]) & (self.tree.depths[mine] + offset >= 0)
        elif isinstance(self.documents, Documents):
            starts, ids = self.documents.starts, np.array([-1, *self.documents.ids])
            a, b = (np.searchsorted(starts, where, side="right") for where in (mine, target))
            exists &= (a == b) & (ids[a] >= 0)  # padding has no tokens
        return self._exists.setdefault((offset, device), on_device(exists, device))

    def agree(self, call: collective, **fields: object) -> None:
        """Compare the layout, the documents and these fields on all ranks."""
        call.agree({"layout": self.layout, "documents": self.documents, **fields})

    def swap(self, sends: ByRank, receives: ByRank) -> None:
        """Send and receive contiguous tensors, and wait for them."""
        if self.exchange is not None and (sends or receives):
            self.exchange.post_in_sequence([*sends.items()], [*receives.items()]).wait()


def scan_context(
    layout: Layout, mesh: RingMesh, documents: Documents | Tree | None = None, hop_timeout_s: float = 60.0
) -> ScanContext:
    """Return the context of a call; made on first use, and dropped with its mesh.

    Raises:
        RingLayoutError, RingPatternError: a layout whose runs have gaps or that is for another ring, or
            documents of another length; raised on every rank.
    """
    check_mesh(mesh)

    def make() -> ScanContext:
        check_layout(layout, mesh.ring_size)
        if documents is not None and documents.tokens != layout.tokens:
            raise RingPatternError.wrong(
                "documents", f"{layout.tokens} ids", documents.tokens, "use one length"
            )
        return ScanContext(layout, documents, mesh, hop_timeout_s)

    with collective(mesh, "scan"):
        if documents is not None and not isinstance(documents, (Documents, Tree)):
            raise RingPatternError.wrong(
                "documents", "ds_ring.Documents or ds_ring.Tree", type(documents).__name__,
                "pass ds_ring.Documents(document_ids)",
            )  # fmt: skip
        check_layout(layout)
        context: ScanContext = cache_context(mesh, (ScanContext, layout, documents, hop_timeout_s), make)
    return context


@assume_constant
def get_scan_handle(
    layout: Layout, mesh: RingMesh, documents: Documents | Tree | None, hop_timeout_s: Any
) -> int:
    """Return the integer by which the operators find the context of a call."""
    context = scan_context(layout, mesh, documents, read_number(hop_timeout_s))
    context.in_a_graph = True
    return context.handle
