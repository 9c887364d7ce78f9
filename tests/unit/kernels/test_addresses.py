"""Every element that the 32 Ki rows of the GPU script read or write lies in its storage. No GPU, no memory.

The tensors are of the device "meta": shapes, strides and storage sizes. What an operator addresses is written
from torch's sources: rows by the strides of their tensor; with variable lengths rows up to the last end; the
lse as if it were contiguous; cuDNN's out and gradient by the strides that torch's own attention has; flex's
tables by the strides of each version of its templates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.gpu_rates import tile_kinds  # type: ignore[import-not-found]
from torch import Tensor

from ds_ring.kernels.flash.calls import FlashCall, make_flash_calls
from ds_ring.kernels.flash.executors import Cudnn, Executor, Flash, Operators, Platform
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.kernels.flex.block_mask import HopMasks
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.plan import build_plan
from tests.cases import layout_for
from tests.flex_tables import TEMPLATES, find_outside
from tests.unit.kernels.flex.test_tables import change, trim

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 32_768, 32, 8, 128
KINDS = tile_kinds(TOKENS)


class Addresses:
    """Operators that compute nothing and note what they would address outside a storage."""

    def __init__(self) -> None:
        self.faults, self.calls = list[str](), 0
        self.operators = Operators(self._flash, self._flash_backward, self._cudnn, self._cudnn_backward)

    def _hold(self, name: str, x: Tensor, shape: torch.Size | None = None, strides: Any = None) -> None:
        """Note a tensor whose elements, of a shape and strides, do not lie in its storage."""
        shape, strides = shape or x.shape, strides or x.stride()
        last = x.storage_offset() + sum(
            (size - 1) * stride for size, stride in zip(shape, strides, strict=True)
        )
        if shape != x.shape or last >= x.untyped_storage().nbytes() // x.element_size():
            self.faults.append(f"{name} {tuple(x.shape)}: element {last}, shape {tuple(shape)}")

    def _operands(self, q: Tensor, k: Tensor, v: Tensor, max_q: int, max_k: int, packed: bool) -> None:
        self.calls += 1
        for name, x in (("q", q), ("k", k), ("v", v)):
            self._hold(name, x)
        if not packed and (q.shape[1], k.shape[1], v.shape[1]) != (max_q, max_k, max_k):
            self.faults.append(f"rows {q.shape[1]}, {k.shape[1]}: lengths {max_q}, {max_k}")

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        self._operands(q, k, v, rest[2], rest[3], q.dim() == 3)
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (len(q), q.shape[2], q.shape[1])
        return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(shape, dtype=torch.float32)

    def _flash_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                        *rest: Any, **options: Any) -> tuple[Tensor, ...]:  # fmt: skip
        self._flash(q, k, v, *rest)
        for name, x in (("grad_out", grad), ("out", out)):
            self._hold(name, x, q.shape)
        sizes = (q.shape[1], q.shape[0]) if q.dim() == 3 else (len(q), q.shape[2], q.shape[1])
        self._hold("lse", lse, torch.Size(sizes), torch.empty(sizes, device="meta").stride())
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def _cudnn(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        sides = [x.transpose(1, 2) for x in (q, k, v)]
        self._operands(*sides, q.shape[2], k.shape[2], False)
        return torch.empty_like(q), q.new_empty((*q.shape[:3], 1), dtype=torch.float32)

    def _cudnn_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                        *rest: Any, **options: Any) -> tuple[Tensor, ...]:  # fmt: skip
        self._cudnn(q, k, v)
        for name, x in (("grad_out", grad), ("out", out)):
            self._hold(name, x, q.shape, torch.empty_like(q).stride())
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def find_ends_faults(call: FlashCall) -> list[str]:
    """What the ends of a variable-length call leave its rows for."""
    sides = (("queries", call.q_rows, call.q_ends), ("keys", call.k_rows, call.k_ends))
    return [
        f"{name}: ends to {ends[-1]} of {rows.length} rows" for name, rows, ends in sides
        if ends and (ends[-1] > rows.length or list(ends) != sorted(ends))
    ]  # fmt: skip


def whole(kind: str) -> Tiles:
    """The only hop of a row: contiguous, on one rank."""
    layout = layout_for("contiguous", KINDS[kind], tokens=TOKENS, ring_size=1)
    plan = build_plan(KINDS[kind], layout, query_heads=HEADS, kv_heads=KV_HEADS)
    return plan.rank(0).classes[0].hops[0].tiles


def run(addresses: Addresses, tiles: Tiles, *executors: Executor, rows: int = TOKENS) -> None:
    """Both passes of a hop on tensors that have no memory."""
    kernel = FlashKernel()
    kernel.executors = executors
    q, k, v = (
        torch.empty(1, heads, rows, HEAD_DIM, dtype=torch.bfloat16, device="meta")
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    lse = torch.empty(1, HEADS, rows, device="meta")
    for _ in kernel.forward(q, k, v, tiles, 0.1):
        pass
    for _ in kernel.backward(q, q, k, v, q, lse, tiles, 0.1):
        pass


def executors_of(operators: Operators) -> Iterator[tuple[Executor, ...]]:
    yield (Flash(operators),)
    for version in (91900, 92600):
        yield Cudnn(operators, Platform(9, version)), Flash(operators)


@pytest.mark.parametrize("kind", KINDS)
def test_the_calls_of_32_ki_rows_stay_in_their_storages(kind: str) -> None:
    tiles, addresses = whole(kind), Addresses()
    for executors in executors_of(addresses.operators):
        run(addresses, tiles, *executors)
    faults = [fault for call in make_flash_calls(tiles) for fault in find_ends_faults(call)]
    for own_strides in TEMPLATES.values():
        (_, n), (_, m), tensors, block = HopMasks().get(tiles, 128, torch.device("cpu"), 128, TOKENS)
        faults += find_outside(tensors, -(-n // block), -(-m // block), own_strides)
    assert addresses.calls >= 6 and not addresses.faults + faults


def test_calls_that_leave_their_storages_are_found() -> None:
    """A short shard, a gradient of other strides for cuDNN, wrong ends, tables of two widths."""
    addresses = Addresses()
    run(addresses, whole("full"), Flash(addresses.operators), rows=TOKENS - 1)
    assert "lengths 32768" in addresses.faults[0]

    addresses = Addresses()
    q = torch.empty(1, HEADS, TOKENS, HEAD_DIM, device="meta")
    narrow = q[:, :, : TOKENS // 2]  # a graph of dense strides reads on behind it
    addresses.operators.cudnn_backward(q, q, q, q, narrow, q[..., :1])
    assert len(addresses.faults) == 1 and "out" in addresses.faults[0]

    (call,) = make_flash_calls(whole("documents"))
    packed = replace(call, q_ends=(0, TOKENS + 1), k_ends=(0, TOKENS)) if call.q_ends else None
    several = packed or FlashCall(call.q_rows, call.k_rows, -1, 0, -1, 0.0, (0, TOKENS + 1), (0, TOKENS))
    assert find_ends_faults(several)

    tensors = HopMasks().get(whole("LongNet"), 128, torch.device("cpu"), 128, TOKENS).tensors
    blocks = TOKENS // 128
    wide = tensors._replace(full_rows=trim(tensors.full_rows), full_columns=trim(tensors.full_columns))
    assert find_outside(wide, blocks, blocks, own_strides=False)
    beyond = tensors._replace(partial_rows=change(tensors.partial_rows, block=blocks))
    assert all(find_outside(beyond, blocks, blocks, own) for own in TEMPLATES.values())
