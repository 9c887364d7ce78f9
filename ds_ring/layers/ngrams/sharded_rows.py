"""Look up rows of a table whose rows are sharded over the ranks of a sequence: `sharded_rows`.

A rank asks the owner for each row once, however many tokens need it. The gradient of a row is added up on the
asking rank, sent back, and added up at the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.ops.checks import check_floats, check_operand
from ds_ring.ops.eager import run_compared
from ds_ring.ops.layer_gradients import allow_first_derivative, compare_gradient
from ds_ring.ops.passes import get_forward_call
from ds_ring.ops.tracing import forbid_tracing

_averaged = WeakTensorKeyDictionary()  # parameters whose values and gradients ranks have in common


@forbid_tracing
def sharded_rows(table: Tensor, rows: Tensor, *, mesh: RingMesh) -> Tensor:
    """Return rows of a table that the ranks of the sequence hold together. Differentiable in the table.

    Args:
        table: this rank's shard [N, D]; rank r of the sequence has rows r N to (r + 1) N - 1.
        rows: numbers of rows of the whole table, int64, of any shape; it may differ by rank.
        mesh: this process's place; every rank of the sequence must call, also in the backward pass.

    Returns:
        [*rows.shape, D]. The gradient of the table is complete: the sum over all ranks of the sequence.

    Raises:
        RingShapeError: a row outside the table, or shapes and dtypes other than above.
        RingConfigError: the table is a parameter of an engine, which would average it over the ranks.
        RingMismatchError: shards of other shapes; nothing was sent.
        RingPeerError: another rank failed or was too late.
    """
    check_mesh(mesh)
    rows_found: Tensor = run_compared(mesh, "sharded_rows", _Rows.apply, table, rows, mesh)
    return rows_found


def refuse_as_tables(parameters: Iterable[Tensor]) -> None:
    """Note parameters that no rank may use as its shard: what trains them gives all ranks the same values."""
    for parameter in parameters:
        _averaged[parameter] = True


def _get_parameters(table: Tensor) -> Iterator[Tensor]:
    """Yield the parameters of the table's own shape that it is computed from, as by a cast."""
    nodes, seen = [table.grad_fn], set[Any]()
    if table.grad_fn is None:
        yield table
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        parameter = getattr(node, "variable", None)
        if parameter is not None and parameter.shape == table.shape:
            yield parameter


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, mesh: RingMesh) -> Tensor:
        with collective(mesh, "sharded_rows") as call:
            _check(table, rows, mesh)
            ctx.mesh, ctx.shape, ctx.dtype = mesh, table.shape, table.dtype
            wanted, place = rows.flatten().unique(return_inverse=True)
            call.agree({"table": tuple(table.shape), "dtype": table.dtype})
            counts = torch.bincount(wanted // len(table), minlength=mesh.sequence_size)
            ctx.wanted = counts.tolist()
            to_each = [1] * mesh.sequence_size
            ctx.asked = torch.cat(_swapped(call, counts, to_each, to_each)).tolist()
            requests = torch.cat(_swapped(call, wanted, ctx.wanted, ctx.asked)) - mesh.sequence_rank * len(
                table
            )
            looked_up = torch.cat(_swapped(call, table[requests], ctx.asked, ctx.wanted))
            ctx.save_for_backward(requests, place)
            ctx.call = get_forward_call(call.exchange)
            return looked_up[place].unflatten(0, rows.shape)

    @staticmethod
    @allow_first_derivative("sharded_rows")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        requests, place = ctx.saved_tensors
        compared = compare_gradient(ctx.mesh, ctx.call)
        with collective(ctx.mesh, "sharded_rows backward") as call, compared:
            call.agree({"table": tuple(ctx.shape), "dtype": grad.dtype})
            dtype = torch.promote_types(ctx.dtype, torch.float32)
            of_rows = grad.new_zeros(sum(ctx.wanted), ctx.shape[1], dtype=dtype)
            of_rows.index_add_(0, place, grad.reshape(-1, ctx.shape[1]).to(dtype))
            arrived = torch.cat(_swapped(call, of_rows, ctx.wanted, ctx.asked))
            total = grad.new_zeros(ctx.shape, dtype=dtype).index_add_(0, requests, arrived)
            return total.to(ctx.dtype), None, None


def _check(table: Tensor, rows: Tensor, mesh: RingMesh) -> None:
    check_floats("sharded_rows", table=table)
    check_operand("sharded_rows: rows", rows)
    if table.dim() != 2 or not len(table):
        raise RingShapeError.wrong("sharded_rows: table", "[N, D]", table, "pass this rank's shard")
    if any(parameter in _averaged for parameter in _get_parameters(table)):
        raise RingConfigError.wrong(
            "sharded_rows: table", "a shard that this rank trains by itself", "a parameter of an engine",
            "DeepSpeed gives it the values of rank 0 and the mean of all shards' gradients: make it outside"
            " the model, with an optimizer of its own",
        )  # fmt: skip
    if rows.dtype != torch.int64 or rows.device != table.device:
        raise RingShapeError.wrong(
            "sharded_rows: rows", f"int64 on {table.device}", f"{rows.dtype} on {rows.device}", "convert them"
        )
    all_rows = len(table) * mesh.sequence_size
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < all_rows:
        raise RingShapeError.wrong(
            "sharded_rows: rows", f"0 to {all_rows - 1}", f"{int(rows.min())} to {int(rows.max())}",
            "pad the table to the ranks, and hash into it",
        )  # fmt: skip


def _swapped(call: collective, x: Tensor, sends: list[int], receives: list[int]) -> list[Tensor]:
    """Send parts of x, of these lengths, to the ranks of the sequence; return theirs in rank order."""
    mine, mesh = list(x.split(sends)), call.mesh
    arrived = [x.new_empty((count, *x.shape[1:])) for count in receives]
    arrived[mesh.sequence_rank] = mine[mesh.sequence_rank]
    peers = [peer for peer in range(mesh.sequence_size) if peer != mesh.sequence_rank]
    sent = [(peer, mine[peer].contiguous()) for peer in peers if sends[peer]]
    received = [(peer, arrived[peer]) for peer in peers if receives[peer]]
    if sent or received:
        call.exchange.post_in_sequence(sent, received).wait()
    return arrived
