"""Every public operator on every dtype of torch: right, or refused by a typed error on each rank, and the mesh lives.

    outcome_of("halo", torch.uint16, mesh)      # on each rank: Outcome("right", "") or Outcome("refused", "RingShapeError")

Right means: equal to the same call in one process, bit for bit where values are copied. A call that one process
computes is not refused on several ranks, and the other way round. After each call an ordinary one is made.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import ds_ring
from ds_ring import RingError, RingMesh
from ds_ring.ops.bits import view_as_bits
from tests.operator_table import OPERATORS, Operator, Place, T, by_run, weight_of

DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
QUANTIZED = (torch.quint8, torch.qint8, torch.qint32)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1,
    torch.complex128: 1e-9, torch.complex64: 1e-4, torch.complex32: 2e-2}  # fmt: skip


class Outcome(NamedTuple):
    """What a rank saw.

    Attributes:
        kind: "right"; "refused", by a RingError; "wrong"; "raw", by another error; "lost", if an ordinary call on the
            same mesh fails afterwards.
        text: the error's class, or what differs.
    """

    kind: str
    text: str


def converted(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Values of a dtype: those of x, or any bits where torch cannot convert; None where it makes no tensor of it."""
    try:
        if dtype in QUANTIZED:
            return torch.quantize_per_tensor(x.float(), 0.1, 0, dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            x = (4 * x).long() % 4
        return x.to(dtype)
    except (RuntimeError, NotImplementedError):
        pass
    try:
        return (torch.arange(x.numel() * dtype.itemsize) % 7).to(torch.uint8).view(dtype).view(x.shape)
    except (RuntimeError, NotImplementedError):
        return None


def inputs_of(row: Operator, dtype: torch.dtype, place: Place, alone: bool) -> dict[str, Tensor] | None:
    """One rank's inputs of this dtype, or all of them; but for numbers of rows. None: torch makes none."""
    result = {}
    for name, x in row.inputs(torch.float64).items():
        dim, rank = row.dims[name], place.mesh.sequence_rank
        is_whole = alone or dim is None
        if name == "rows" or dtype in QUANTIZED:  # which torch does not index
            x = x if is_whole else place.grid.shard(x, dim or 0, rank)
            second = x if name == "rows" else converted(x, dtype)
        else:
            whole = converted(x, dtype)
            second = whole if is_whole or whole is None else shard(place, whole, dim or 0)
        if second is None:
            return None
        result[name] = second
    return result


def shard(place: Place, x: Tensor, dim: int) -> Tensor:
    """One rank's tokens, of any dtype."""
    return place.grid.shard(view_as_bits(x), dim, place.mesh.sequence_rank).view(x.dtype)


def bits(x: Tensor) -> Tensor:
    """The memory of a tensor."""
    return view_as_bits(x.detach()).contiguous().view(-1).view(torch.uint8)


def halo_of_bits(place: Place, x: Tensor) -> Tensor:
    """The row "halo" for dtypes that torch does not put together."""
    copies, result = view_as_bits(ds_ring.halo(x, 2, 1, dim=1, **place.where)), []
    for number, local in enumerate(by_run(place, view_as_bits(x), 1)):
        whole = torch.cat([copies[:, number, :2], local, copies[:, number, 2:]], dim=1)
        result.append(torch.cat([whole[:, i : i + local.shape[1]] for i in (0, 2, 3)], dim=-1))
    return torch.cat(result, dim=1).view(x.dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results of inputs of this dtype are equal: to the last bit for dtypes that are copied."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if want.dtype not in TOLERANCES:
        return torch.equal(bits(got), bits(want))
    tolerance = max(TOLERANCES[want.dtype], TOLERANCES.get(dtype, 0.0))
    scale = max(1.0, float(want.abs().double().max())) if want.numel() else 1.0
    return bool(((got - want).abs().double() <= tolerance * scale).all())


def results(
    row: Operator, place: Place, arguments: dict[str, Tensor], weight: Tensor | None
) -> tuple[dict[str, Tensor], Tensor]:
    """The output of one rank and its own gradients; and the gradient of the whole output."""
    wanted = [
        name for name in row.gradients if arguments[name].is_floating_point() or arguments[name].is_complex()
    ]
    for name in wanted:
        arguments[name].requires_grad_()
    out = row.call(place, **arguments)
    result = {"out": out.detach()}
    if weight is None:
        shape = list(out.shape)
        if row.out_dim is not None:
            shape[row.out_dim] = place.layout.tokens
        weight = weight_of(out.new_empty(shape))
    if wanted and out.requires_grad:
        mine = weight
        if row.out_dim is not None:
            mine = place.grid.shard(weight, row.out_dim, place.mesh.sequence_rank)
        elif row.loss == "sum":  # the loss of all ranks together is that of one
            mine = weight / place.mesh.sequence_size
        out.backward(mine.to(out.dtype))
        for name in wanted:
            gradient = arguments[name].grad
            if gradient is not None and (row.dims[name] is not None or row.loss == "once"):
                result[name] = gradient  # of other inputs it is the sum of all ranks
    return result, weight


def outcome_of(name: str, dtype: torch.dtype, mesh: RingMesh) -> Outcome | None:
    """What this rank sees of one call; None where torch makes no such tensor."""
    row = OPERATORS[name]
    # of float8 the row itself, whose gradient is refused
    if name == "halo" and not str(dtype).startswith("torch.float8") and dtype not in TOLERANCES:
        row = row._replace(call=halo_of_bits)
    place, single = Place(mesh, row.layout), Place(RingMesh.single(), row.layout)
    arguments, whole = inputs_of(row, dtype, place, False), inputs_of(row, dtype, single, True)
    if arguments is None or whole is None:
        return None
    want, weight = None, None
    torch.manual_seed(0)
    try:
        want, weight = results(row, single, whole, None)
        alone = Outcome("right", "")
    except Exception as error:
        alone = _of_error(error)
    torch.manual_seed(0)
    try:
        got, _ = results(row, place, arguments, weight)
        result = Outcome("right", "")
        if want is not None:
            result = _compared(row, place, got, want, dtype)
    except Exception as error:
        result = _of_error(error)
    if result.kind != alone.kind and result.kind in ("right", "refused"):
        result = Outcome("wrong", f"{result.kind} {result.text}, in one process {alone.kind} {alone.text}")
    try:
        lives = ordinary_call(mesh)
    except Exception as error:
        return Outcome("lost", f"{result.kind} {result.text}, then {type(error).__name__}: {error}"[:300])
    return result if lives else Outcome("lost", f"{result.kind} {result.text}, then wrong numbers")


def ordinary_call(mesh: RingMesh) -> bool:
    """Whether a small call that sends to all ranks is right."""
    x, place = torch.arange(float(T)), Place(mesh)
    mine = place.grid.shard(x, 0, mesh.sequence_rank)
    return torch.equal(ds_ring.gather_sequence(mine, place.layout, mesh=mesh, dim=0), x)


def _compared(
    row: Operator, place: Place, got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype
) -> Outcome:
    unequal = []
    for name, x in got.items():
        dim = row.out_dim if name == "out" else row.dims[name]
        wanted = want[name]
        if dim is not None:
            wanted = shard(place, wanted, dim)
        if not close(x, wanted, dtype):
            unequal.append(name)
    return (
        Outcome("wrong", f"{unequal} of {sorted(got)}")
        if unequal or got.keys() != want.keys()
        else Outcome("right", "")
    )


def _of_error(error: Exception) -> Outcome:
    """A refusal; or "raw" where the library raises another error, and "caller" where the call's own code does."""
    if isinstance(error, RingError):
        return Outcome("refused", type(error).__name__)
    frames = [
        item
        for item in traceback.extract_tb(error.__traceback__)
        if {_PACKAGE, _TESTS} & {*Path(item.filename).parents}
    ]
    first = str(error).splitlines()[0][:100] if str(error) else ""
    last, what = frames[-1], f"{type(error).__name__}: {first}"
    if _PACKAGE not in Path(last.filename).parents:
        return Outcome("caller", what)
    return Outcome("raw", f"{what} at {Path(last.filename).name}:{last.lineno}")


_TESTS = Path(__file__).resolve().parents[1]
_PACKAGE = Path(ds_ring.__file__).parent


def rows_for(ulysses_size: int) -> list[str]:
    """The names of the rows that run on such ranks."""
    return [
        name for name, row in OPERATORS.items()
        if row.ulysses == "any" or ulysses_size == 1
    ]  # fmt: skip


def outcomes(
    rank: int, world_size: int, ulysses_size: int, cases: list[tuple[str, str]]
) -> dict[tuple[str, str], Outcome | None]:
    """What this rank sees of each case, the name of a row and that of a dtype; stops at the first lost mesh."""
    mesh, result = RingMesh.from_world(world_size // ulysses_size, ulysses_size), {}
    for name, dtype in cases:
        result[name, dtype] = outcome = outcome_of(name, getattr(torch, dtype), mesh)
        if outcome is not None and outcome.kind == "lost":
            break
    return result
