"""What a token gets from tokens before it without attention: `halo`, `shift_sequence` and `ring_scan`.

`halo` copies the few tokens beside each run of a shard, for short convolutions. `shift_sequence` returns for
each token the one a fixed number of positions away. `ring_scan` computes the state with which a run begins,
for layers that are linear in their state (linear attention, state-space models, gated delta rules). All send
messages between the ranks that hold neighbouring runs. The bytes of a scan do not depend on the length of the
sequence.

A recurrence maps a state S to M S + B over a run. Such maps compose associatively, so the states of all runs
are an exclusive scan over the pairs (M, B) (Blelloch 1990, "Prefix sums and their applications"; Martin and
Cundy 2018, "Parallelizing linear recurrent neural nets over sequence length").

Owns both operators, `ds_ring::halo` and `ds_ring::scan`, and their gradients. The gradient of a copy is added
at the token's owner; the gradient of a scan is the scan of the transposed maps in reverse order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.device_tables import outside_inference_mode
from ds_ring.comm.exchange import Exchange, agree
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.errors import RingError, RingPatternError, RingShapeError, shown, whole_number
from ds_ring.layers.scan.sequence_runs import (
    Piece,
    ScanStep,
    SequenceRuns,
    halo_messages,
    other_documents,
    pieces,
    sequence_runs,
)
from ds_ring.masks.catalog import Documents
from ds_ring.masks.tiles import IntArray
from ds_ring.ops.checks import why_not_an_operand
from ds_ring.ops.context import cached_context, check_layout, count_forward_pass, refuse
from ds_ring.ops.handles import (
    constant,
    constant_in_graphs,
    never_traced,
    new_handle,
    number_of,
    object_of,
    operator,
)
from ds_ring.schedule.layout import Layout

ByRank = dict[int, Tensor]  # by rank of the sequence
Indices = dict[int, IntArray]  # the same


@dataclass(eq=False)
class Neighbours:
    """The runs of a layout, and this rank's place among them.

    Attributes:
        layout, documents, mesh: of a call; without documents a state passes through the whole sequence.
        hop_timeout_s: seconds that the messages of one round may take.
        in_a_graph: True if a compiled graph carries the handle.
        refused: an error in the arguments, raised by every call after telling the other ranks.
        handle: the integer by which the operators find this object.
        exchange: sends and receives; None if the sequence has one rank.
        pieces: this rank's pieces in slot order.
        own_runs: number of this rank's runs.
    """

    layout: Layout
    documents: Documents | None
    mesh: RingMesh
    hop_timeout_s: float = 60.0
    in_a_graph: bool = False
    refused: RingError | None = None
    handle: int = field(init=False)
    exchange: Exchange | None = None
    pieces: tuple[Piece, ...] = field(init=False, default=(), repr=False)
    own_runs: int = field(init=False, default=0)
    _masks: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict, repr=False)
    _exists: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mesh.sequence_size > 1:
            self.exchange = Exchange(self.mesh, self.hop_timeout_s)
        if self.refused is None:  # attributes, which torch.compile reads and need not trace
            rank, parts = self.mesh.sequence_rank, self.mesh.ulysses_size
            self.pieces = pieces(self.layout, parts, rank, self.documents)
            self.own_runs = len(self.runs.of_rank(rank))
        self.handle = new_handle(self)

    @property
    def runs(self) -> SequenceRuns:
        """Return the runs of all ranks of the sequence."""
        return sequence_runs(self.layout, self.mesh.ulysses_size)

    def masks(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 for runs in which no document begins, and 1 for runs whose first token begins none.

        Both are [R, 1, ...] with the dimensions of `like`, and 0 for the other runs.
        """
        key = like.dtype, like.device
        if key not in self._masks:  # they are the same for all layers of a batch
            self._masks[key] = self._new_masks(*key)
        through, continues = self._masks[key].view(2, -1, *[1] * (like.dim() - 1))
        return through, continues

    @outside_inference_mode
    def _new_masks(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        rows = torch.ones(2, self.own_runs)
        if self.documents is not None:
            rows.zero_()
            for piece in self.pieces:
                rows[0, piece.run] += piece.continues and piece.is_last
                rows[1, piece.run] += piece.continues
        return rows.to(device, dtype)

    @outside_inference_mode
    def exists(self, offset: int, device: torch.device) -> Tensor:
        """Return for each slot whether there is a token `offset` positions behind it in its document, [S]."""
        if (offset, device) in self._exists:
            return self._exists[offset, device]
        parts, rank = self.mesh.ulysses_size, self.mesh.sequence_rank
        slots = self.layout.part_slots(parts)
        first = rank % parts * slots
        mine = self.layout.positions(rank // parts)[first : first + slots]
        other = mine + offset
        found = (mine >= 0) & (other >= 0) & (other < self.layout.tokens)
        if self.documents is not None:
            a, b = (np.searchsorted(self.documents.starts, where, side="right") for where in (mine, other))
            found &= a == b
        return self._exists.setdefault((offset, device), torch.from_numpy(found).to(device))

    @contextmanager
    def call(
        self, operation: str, fields: Mapping[str, object], refused: RingError | None = None
    ) -> Iterator[None]:
        """Agree on a call with the other ranks, and tell them if what follows raises here."""
        with self.mesh.in_call():
            told = {"layout": self.layout, "documents": self.documents, **fields}
            if self.exchange is not None:
                agree(self.exchange, operation, told, refused)
            elif refused is not None:
                raise refused
            with nullcontext() if self.exchange is None else self.exchange.guarded():
                yield

    def swap(self, sends: ByRank, receives: ByRank) -> None:
        """Send and receive contiguous tensors, and wait for them."""
        if self.exchange is not None and (sends or receives):
            self.exchange.post_in_sequence([*sends.items()], [*receives.items()]).wait()


def neighbours_of(
    layout: Layout, mesh: RingMesh, documents: Documents | None = None, hop_timeout_s: float = 60.0
) -> Neighbours:
    """Return the neighbours of a call; made on first use, and dropped with its mesh.

    Raises:
        RingLayoutError, RingPatternError: a layout whose runs have gaps or that is for another ring, or
            documents of another length; raised on every rank.
    """
    check_mesh(mesh)

    def make() -> Neighbours:
        refused: RingError | None = None
        try:
            _check(layout, mesh, documents)
        except RingError as error:
            refused = error
        return Neighbours(layout, documents, mesh, hop_timeout_s, refused=refused)

    found: Neighbours = cached_context(mesh, (Neighbours, layout, documents, hop_timeout_s), make)
    if found.refused is not None:
        refuse(mesh, found.refused)
    return found


def _check(layout: Layout, mesh: RingMesh, documents: object) -> None:
    check_layout(layout, mesh)
    sequence_runs(layout, mesh.ulysses_size)
    if documents is not None and not isinstance(documents, Documents):
        raise RingPatternError(
            f"documents: expected ds_ring.Documents or None, got {shown(documents)}; pass"
            " Documents(document_ids)"
        )
    if documents is not None and documents.tokens != layout.tokens:
        raise RingPatternError(
            f"documents: expected ids for {layout.tokens} tokens (the layout's), got {documents.tokens};"
            " build both for one length"
        )


@constant_in_graphs
def _handle_of(layout: Layout, mesh: RingMesh, documents: Documents | None, hop_timeout_s: Any) -> int:
    found = neighbours_of(layout, mesh, documents, number_of(hop_timeout_s))
    found.in_a_graph = True
    return found.handle


def halo(
    x: Tensor, before: int, after: int = 0, *, dim: int, layout: Layout, mesh: RingMesh,
    documents: Documents | None = None, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return the tokens beside each run of this rank's shard. Differentiable.

    Args:
        x: local shard, any dtype, with S slots in `dim`: layout.local_tokens over the Ulysses size.
        before, after: how many tokens in front of each run, and behind it; their sum at least 1.
        dim: the token dimension.
        layout: where tokens lie; its runs have no gaps (zigzag, contiguous, balanced).
        mesh: this process's place; every rank of the sequence must call.
        documents: tokens of another document are zeros, as are those outside the sequence.
        hop_timeout_s: seconds after which a message that has not arrived raises.

    Returns:
        The shape of x with [R, before + after] in place of S, for the R runs of this rank in slot order
        (`layout.runs`, cut where Ulysses ranks share a shard). The gradient of a copy is added at its owner.
        Use the copies on every rank, even where they are zeros: each rank takes part in the backward pass.

    Raises:
        RingShapeError: a length that is not the layout's, or `before` and `after` are not whole numbers.
        RingLayoutError: a layout whose runs have gaps (striped, residue), or for another ring.
        RingPatternError: documents of another length.
        RingMismatchError: ranks that call with different arguments; nothing was sent.
        RingPeerError: another rank failed or was too late.
    """
    handle = _handle_of(layout, mesh, documents, constant(hop_timeout_s))
    if isinstance(x, Tensor) and isinstance(dim, int) and -x.dim() <= dim < 0:
        dim += x.dim()
    return halo_op(x, dim, before, after, handle)


@never_traced
def shift_sequence(
    x: Tensor, offset: int, *, dim: int, layout: Layout, mesh: RingMesh, documents: Documents | None = None,
    fill: float = 0, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return for each token of this rank's shard the one `offset` positions behind it. Differentiable.

    A sharded sequence cannot be shifted by slicing: what follows a run lies on another rank. For labels, for
    the embeddings and labels of multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2), and with
    a negative offset for token shifts (RWKV).

    Args:
        x: local shard, any dtype, with S slots in `dim`.
        offset: how many positions, not 0; negative for tokens in front.
        dim, layout, mesh, documents, hop_timeout_s: see `halo`.
        fill: value where there is no such token: outside the sequence, in another document, in padding.

    Returns:
        The shape of x.

    Raises:
        RingShapeError: offset is 0 or no whole number; and what `halo` raises.
    """
    if offset:
        whole_number(abs(offset), "shift_sequence: offset", RingShapeError)
    before, after = max(-offset, 0), max(offset, 0)
    named: dict[str, Any] = {"layout": layout, "mesh": mesh, "documents": documents}
    named["hop_timeout_s"] = hop_timeout_s
    copies = halo(x, before, after, dim=dim, **named)
    near, dim = neighbours_of(**named), dim % x.dim()
    # Also a rank without tokens takes part in the backward pass.
    parts, runs = [x.narrow(dim, 0, 0) + copies.flatten()[:0].sum().to(x.dtype)], near.runs
    for number, run in enumerate(runs.of_rank(mesh.sequence_rank).tolist()):
        own, beside = x.narrow(dim, int(runs.slots[run]), int(runs.lengths[run])), copies.select(dim, number)
        both = torch.cat([own, beside] if offset > 0 else [beside, own], dim=dim)
        parts.append(both.narrow(dim, after, own.shape[dim]))
    padding = x.shape[dim] - sum(part.shape[dim] for part in parts)
    shifted = torch.cat([*parts, x.narrow(dim, 0, padding)], dim=dim)
    exists = near.exists(offset, x.device).view(-1, *[1] * (x.dim() - 1 - dim))
    return torch.where(exists, shifted, torch.full_like(shifted, fill))


def _clear_other_documents(near: Neighbours, before: int, after: int, copies: Tensor) -> None:
    """Set the copies [R * (before + after), ...] of tokens of another document to 0."""
    if near.documents is not None:
        parts, rank = near.mesh.ulysses_size, near.mesh.sequence_rank
        index = other_documents(near.layout, parts, rank, before, after, near.documents)
        copies.index_fill_(0, torch.from_numpy(index).to(copies.device), 0)


def _swapped(
    near: Neighbours, rows: Tensor, sends: Indices, receives: Indices
) -> list[tuple[Tensor, Tensor]]:
    """Send rows to other ranks; return what each of them sent, beside the index of its place here."""
    index_of = {peer: torch.from_numpy(index).to(rows.device) for peer, index in receives.items()}
    arrived = {peer: rows.new_empty((len(index), *rows.shape[1:])) for peer, index in index_of.items()}
    near.swap({peer: rows[torch.from_numpy(index).to(rows.device)] for peer, index in sends.items()}, arrived)
    return [(index, arrived[peer]) for peer, index in index_of.items()]


@operator("ds_ring::halo")
def halo_op(x: Tensor, dim: int, before: int, after: int, handle: int) -> Tensor:
    """Return the copies of `halo`: [..., R, before + after, ...]."""
    near = object_of(handle, Neighbours)
    mesh, rank, refused = near.mesh, near.mesh.sequence_rank, None
    fields: dict[str, object] = {}
    try:
        _check_halo(x, dim, before, after, near)
        fields = {"before": before, "after": after, "shape": tuple(x.shape), "dim": dim, "dtype": x.dtype}
    except RingError as error:
        refused = error
    with near.call("halo", fields, refused):
        count_forward_pass()
        messages = halo_messages(near.layout, mesh.ulysses_size, rank, before, after)
        rows = x.movedim(dim, 0)
        count = near.own_runs
        copies = x.new_zeros((count * (before + after), *rows.shape[1:]))
        slots, places = (torch.from_numpy(index).to(x.device) for index in messages.own)
        copies[places] = rows[slots]
        for index, received in _swapped(near, rows, messages.sends, messages.receives):
            copies[index] = received
        _clear_other_documents(near, before, after, copies)
        return copies.unflatten(0, (count, before + after)).movedim((0, 1), (dim, dim + 1)).contiguous()


def _check_halo(x: Tensor, dim: int, before: int, after: int, near: Neighbours) -> None:
    why = why_not_an_operand("halo: x", x)
    if why is not None:
        raise RingShapeError(why)
    for name, value in (("before", before), ("after", after)):
        if value:
            whole_number(value, f"halo: {name}", RingShapeError)
    if not before and not after:
        raise RingShapeError("halo: expected before or after above 0, got 0 for both; leave the call out")
    slots = near.runs.local_tokens
    if not 0 <= dim < x.dim() or x.shape[dim] != slots:
        raise RingShapeError(
            f"halo: expected {slots} slots (this rank's part of the layout) in dim {dim}, got shape"
            f" {tuple(x.shape)}; pass this rank's shard and its layout"
        )


@operator("ds_ring::halo_backward")
def halo_backward_op(grad: Tensor, dim: int, before: int, after: int, slots: int, handle: int) -> Tensor:
    """Return dx [..., S, ...] of the gradient of the copies [..., R, before + after, ...]."""
    near = object_of(handle, Neighbours)
    mesh, rank = near.mesh, near.mesh.sequence_rank
    shape = (*grad.shape[:dim], *grad.shape[dim + 1 :])  # the number of runs may differ by rank
    with near.call("halo backward", {"shape": shape, "dtype": grad.dtype}):
        messages = halo_messages(near.layout, mesh.ulysses_size, rank, before, after)
        rows = grad.movedim((dim, dim + 1), (0, 1)).flatten(0, 1).clone()
        _clear_other_documents(near, before, after, rows)
        dx = grad.new_zeros((slots, *rows.shape[1:]))
        own_slots, places = (torch.from_numpy(index).to(grad.device) for index in messages.own)
        dx.index_add_(0, own_slots, rows[places])
        for index, received in _swapped(near, rows, messages.receives, messages.sends):
            dx.index_add_(0, index, received)
        return dx.movedim(0, dim).contiguous()


halo_op.register_fake(
    lambda x, dim, before, after, handle: x.new_empty(
        (*x.shape[:dim], object_of(handle, Neighbours).own_runs, before + after, *x.shape[dim + 1 :])
    )
)
halo_backward_op.register_fake(
    lambda grad, dim, before, after, slots, handle: grad.new_empty(
        (*grad.shape[:dim], slots, *grad.shape[dim + 2 :])
    )
)


def _setup_halo(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, ctx.before, ctx.after, handle = inputs
    ctx.slots, ctx.near = x.shape[ctx.dim], object_of(handle, Neighbours)  # alive until the backward pass


def _backward_halo(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    dx = halo_backward_op(grad, ctx.dim, ctx.before, ctx.after, ctx.slots, ctx.near.handle)
    return dx, None, None, None, None


halo_op.register_autograd(_backward_halo, setup_context=_setup_halo)


def ring_scan(
    transition: Tensor, increment: Tensor, *, layout: Layout, mesh: RingMesh, matrix: bool = False,
    documents: Documents | None = None, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return the state with which each run of this rank begins. Differentiable.

    A layer that is linear in its state ends a run with the state M S + B, where S is the state with which the
    run begins, B the final state of the run if it begins with zeros, and M the transition over the whole run.

    Args:
        transition: M of this rank's R runs, in slot order. Elementwise: [R, ...], broadcast against
            `increment` (a scalar for each head, or a diagonal). With `matrix`: [R, ..., K, K].
        increment: B of this rank's runs: [R, ...], with `matrix` [R, ..., K, V]. Float32 or float64.
        layout: where tokens lie; its runs have no gaps (zigzag, contiguous, balanced).
        mesh: this process's place; every rank of the sequence must call, also in the backward pass.
        matrix: multiply states by the transition as matrices.
        documents: the state is zero where a document begins. `increment` is then of the run's last document.
        hop_timeout_s: seconds after which a message that has not arrived raises.

    Returns:
        States like `increment`: zeros for the first run of the sequence, and for runs that begin a document.
        Use them on every rank, even where they are zeros: each rank takes part in the backward pass.

    Raises:
        RingShapeError: other shapes or dtypes than above.
        RingLayoutError, RingPatternError, RingMismatchError, RingPeerError: as `halo`.
    """
    handle = _handle_of(layout, mesh, documents, constant(hop_timeout_s))
    return scan_op(transition, increment, matrix, handle)


@operator("ds_ring::scan")
def scan_op(transition: Tensor, increment: Tensor, matrix: bool, handle: int) -> Tensor:
    """Return the states of `ring_scan`."""
    near = object_of(handle, Neighbours)
    refused: RingError | None = None
    try:
        _check_scan(transition, increment, matrix, near)
    except RingError as error:
        refused = error
    fields = {} if refused else _fields(transition, increment, matrix)
    with near.call("scan forward", fields, refused):
        count_forward_pass()
        passes, continues = near.masks(increment)
        states = _exclusive_scan(near, transition * passes, increment, matrix, reverse=False)
        return states if near.documents is None else states * continues


@operator("ds_ring::scan_backward")
def scan_backward_op(
    grad: Tensor, transition: Tensor, states: Tensor, matrix: bool, handle: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of transition and increment; the states are those of the forward pass."""
    near = object_of(handle, Neighbours)
    with near.call("scan backward", _fields(transition, grad, matrix)):
        passes, continues = near.masks(grad)
        transposed = (transition.mT if matrix else transition) * passes
        # The gradient of a run's final state is what all later runs make of it.
        of_increment = _exclusive_scan(near, transposed, grad * continues, matrix, reverse=True)
        if matrix:
            return (of_increment @ states.mT) * passes, of_increment
        return (of_increment * states).sum_to_size(transition.shape) * passes, of_increment


def _fields(transition: Tensor, increment: Tensor, matrix: bool) -> dict[str, object]:
    """Return what ranks compare. The number of runs may differ by rank."""
    shapes = {"transition": tuple(transition.shape[1:]), "increment": tuple(increment.shape[1:])}
    return {"matrix": matrix, **shapes, "dtype": increment.dtype}


def _check_scan(transition: Tensor, increment: Tensor, matrix: bool, near: Neighbours) -> None:
    for name, x in (("transition", transition), ("increment", increment)):
        why = why_not_an_operand(f"ring_scan: {name}", x)
        if why is not None:
            raise RingShapeError(why)
        if x.dtype not in (torch.float32, torch.float64) or x.dtype != increment.dtype:
            raise RingShapeError(
                f"ring_scan: {name}: expected float32 or float64, the same for both, got {x.dtype}; call"
                " .float()"
            )
    runs, shape = near.own_runs, tuple(increment.shape)
    fits = transition.dim() == increment.dim() and len(transition) == len(increment) == runs
    if fits and matrix:
        fits = transition.shape == (*shape[:-1], shape[-2])
    elif fits:
        fits = all(m in (1, b) for m, b in zip(transition.shape[1:], shape[1:], strict=True))
    if not fits:
        form = "[R, ..., K, K] and [R, ..., K, V]" if matrix else "[R, ...] and [R, ...], broadcast"
        raise RingShapeError(
            f"ring_scan: expected transition and increment {form} for this rank's R = {runs} runs, got"
            f" {tuple(transition.shape)} and {shape}; one entry for each run of the layout, in slot order"
        )


def compose(
    later: tuple[Tensor, Tensor], earlier: tuple[Tensor | None, Tensor], matrix: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the map (M, B) of two runs, one after the other; no M if the earlier one needs none."""
    transition, increment = later
    before, state = earlier
    if matrix:
        return None if before is None else transition @ before, transition @ state + increment
    return None if before is None else transition * before, transition * state + increment


def scan_messages(
    runs: SequenceRuns, rank: int, transition: Tensor, increment: Tensor, matrix: bool, reverse: bool
) -> Generator[tuple[ByRank, ByRank], None, Tensor]:
    """Compute the state before each run of a rank: `SequenceRuns.rounds`, then one shift by a run.

    Yields what the rank sends and receives in each round, by the other rank; goes on once the tensors to
    receive are filled. Real ranks exchange them (`scan_op`), virtual ranks copy them
    (simulation/simulate.py).

    Returns:
        The states, like `increment`.
    """
    count, ranks = len(runs.starts), runs.ranks.tolist()
    if reverse:
        ranks.reverse()
    numbers = [count - 1 - run if reverse else run for run in runs.of_rank(rank).tolist()]
    found: dict[int, tuple[Tensor | None, Tensor]] = {
        number: (transition[place], increment[place]) for place, number in enumerate(numbers)
    }
    shapes = transition.shape[1:], increment.shape[1:]
    sizes = shapes[0].numel(), shapes[1].numel()
    states = torch.zeros_like(increment)
    shift = [ScanStep(number - 1, number, True) for number in range(1, count)]
    for steps in [*runs.rounds(), shift]:
        arrived: dict[int, tuple[Tensor | None, Tensor]] = {}
        sends: dict[int, list[Tensor]] = {}
        due: dict[int, list[ScanStep]] = {}
        for step in steps:
            of, to = ranks[step.of], ranks[step.to]
            if of == rank:
                before, state = found[step.of]
                if to == rank:
                    arrived[step.to] = None if step.is_complete else before, state
                else:
                    parts = [state] if step.is_complete or before is None else [before, state]
                    sends.setdefault(to, []).extend(part.reshape(-1) for part in parts)
            elif to == rank:
                due.setdefault(of, []).append(step)
        receives = {
            peer: increment.new_empty(sum(sizes[1] + (not step.is_complete) * sizes[0] for step in due_steps))
            for peer, due_steps in due.items()
        }
        yield {peer: torch.cat(parts) for peer, parts in sends.items()}, receives
        for peer, due_steps in due.items():
            rest = receives[peer]
            for step in due_steps:
                before = None
                if not step.is_complete:
                    before, rest = rest[: sizes[0]].view(shapes[0]), rest[sizes[0] :]
                arrived[step.to] = before, rest[: sizes[1]].view(shapes[1])
                rest = rest[sizes[1] :]
        for number, (before, state) in arrived.items():
            if steps is shift:
                states[numbers.index(number)] = state
                continue
            own, increment_ = found[number]
            assert own is not None  # a run that has the whole state gets nothing more
            found[number] = compose((own, increment_), (before, state), matrix)
    return states


def _exclusive_scan(
    near: Neighbours, transition: Tensor, increment: Tensor, matrix: bool, reverse: bool
) -> Tensor:
    """Run `scan_messages` over the exchange."""
    rounds = scan_messages(near.runs, near.mesh.sequence_rank, transition, increment, matrix, reverse)
    while True:
        try:
            sends, receives = next(rounds)
        except StopIteration as end:
            states: Tensor = end.value
            return states
        near.swap(sends, receives)


scan_op.register_fake(lambda transition, increment, *_: increment.new_empty(increment.shape))
scan_backward_op.register_fake(
    lambda grad, transition, *_: (transition.new_empty(transition.shape), grad.new_empty(grad.shape))
)


def _setup_scan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    transition, _, ctx.matrix, handle = inputs
    ctx.save_for_backward(transition, output)
    ctx.near = object_of(handle, Neighbours)  # alive until the backward pass


def _backward_scan(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    transition, states = ctx.saved_tensors
    return *scan_backward_op(grad, transition, states, ctx.matrix, ctx.near.handle), None, None


scan_op.register_autograd(_backward_scan, setup_context=_setup_scan)
