"""Carry out a `FlashCall`, forward and backward, by one of torch's operators. Each executor is one pair.

- `Flash`: aten's FlashAttention operators for CUDA, FlashAttention 2 unless another implementation was
  activated behind them (`torch.nn.attention.activate_flash_attention_impl`). Any call.
- `Cudnn`: cuDNN's attention: FULL and CAUSAL rectangles, whose diagonal is at the top left.
- `OnCpu` (flash_on_cpu.py): aten's operator for the CPU.

Read from torch 2.13's source (flash_api.cpp, attention.cu, MHA.cpp): [B, S, H, D] or, with variable lengths,
[total, H, D]; only the last stride must be 1, so a call is a view. The lse is read as if it were contiguous,
natural, float32. A query without keys has out 0 and the lse +inf (FlashAttention 2) or -inf (3 and 4); here
it is -inf, and +inf on the way back. Philox arguments are not read without dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ds_ring.runtime.kernels.flash_calls import FlashCall
from ds_ring.runtime.kernels.flash_pieces import OPEN
from ds_ring.runtime.kernels.interface import Rows

INFINITY = float("inf")
WIDEST = 256  # head dimension of FlashAttention 2, which takes multiples of 8


class Executor(Protocol):
    """Carry out calls.

    q [B, heads, S, D], k and v [B, G, n, D] are whole shards and payloads; results have the shape of
    `call.q_rows.of(q)`, `call.k_rows.of(k)`, an lse that of its queries; a query without keys has out 0 and
    the lse -inf.

    Attributes:
        multiple, widest: of what the head dimension must be a multiple, and its greatest value; None: any.
        tokens_first: whether it copies a gradient or an output whose heads stand before its tokens.
    """

    name: str
    multiple: int
    widest: int | None
    tokens_first: bool

    def of_pass(self) -> Executor:
        """Return an executor for one pass; see `CallsOperators`."""
        ...

    def kept(self, make: Callable[..., Tensor], x: Tensor, *how: Any) -> Tensor:
        """Return `make(x, *how)`; see `CallsOperators`."""
        ...

    def takes(self, call: FlashCall) -> bool:
        """Return whether it can carry out this call."""
        ...

    def forward(
        self, call: FlashCall, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse over the keys of the call."""
        ...

    def backward(
        self, call: FlashCall, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dq, dk, dv of the call; `out` and `lse` are the global ones, the lse +inf without keys."""
        ...


class Operators(NamedTuple):
    """Hold the operators that executors call; tests put others in their place."""

    flash_forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward.default
    flash_backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward.default
    cudnn_forward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    cudnn_backward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    cpu_forward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    cpu_backward: Callable[..., Any] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    )


ATEN = Operators()


class CallsOperators:
    """Hold the operators that an executor calls, and the views of queries that all hops of a pass share."""

    def __init__(self, operators: Operators = ATEN) -> None:
        self._operators = operators
        self._kept: dict[tuple[Any, ...], tuple[Tensor, Tensor]] | None = None

    def of_pass(self) -> Self:
        """Return an executor for one pass, which keeps what `kept` returns."""
        found = type(self)(self._operators)
        found._kept = {}
        return found

    def kept(self, make: Callable[..., Tensor], x: Tensor, *how: Any) -> Tensor:
        """Return `make(x, *how)`, made once a pass for a tensor that stays the same from hop to hop.

        Never for keys and values: their buffers must not live longer than their hop.
        """
        if self._kept is None:
            return make(x, *how)
        key = (make, id(x), how)
        found = self._kept.get(key)
        if found is None:
            # x is kept as well, so that no other tensor gets its id
            found = self._kept[key] = (x, make(x, *how))
        return found[1]


class Flash(CallsOperators):
    """Call aten's FlashAttention operators."""

    name, multiple, tokens_first = "flash", 8, True
    widest: int | None = WIDEST

    def takes(self, call: FlashCall) -> bool:
        return True

    def forward(
        self, call: FlashCall, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        view = _packed if call.q_ends else _tokens_first
        out, lse, *_ = self._operators.flash_forward(
            self.kept(view, q, call.q_rows), view(k, call.k_rows), view(v, call.k_rows),
            *_lengths(call, q.device, q), 0.0, call.is_causal, False, scale=scale, **_window(call),
        )  # fmt: skip
        if call.has_empty_rows:
            lse = lse.masked_fill(lse == INFINITY, -INFINITY)
        return _back(out, call.q_rows, len(q), call), _lse_back(lse, call, len(q))

    def backward(
        self, call: FlashCall, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        view, rows, keys = _packed if call.q_ends else _tokens_first, call.q_rows, call.k_rows
        lse = self.kept(_lse_of, lse, call.q_rows, bool(call.q_ends))
        grad_out, q_view, out = (self.kept(view, x, rows) for x in (grad_out, q, out))
        found = self._operators.flash_backward(
            grad_out, q_view, view(k, keys), view(v, keys), out, lse,
            *_lengths(call, q.device, q), 0.0, call.is_causal,
            lse, lse,  # in the place of Philox, which nobody reads
            scale=scale, **_window(call),
        )  # fmt: skip
        return tuple(_back(x, r, len(q), call) for x, r in zip(found, (rows, keys, keys), strict=True))  # type: ignore[return-value]


class Cudnn(CallsOperators):
    """Call cuDNN's attention, whose causal diagonal begins at the top left."""

    name, multiple, tokens_first = "cudnn", 8, False
    widest: int | None = WIDEST

    def takes(self, call: FlashCall) -> bool:
        full = call.left == OPEN and call.right == OPEN
        return not call.q_ends and (full or (call.is_causal and call.q_rows.length == call.k_rows.length))

    def forward(
        self, call: FlashCall, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._operators.cudnn_forward(
            self.kept(_heads_first, q, call.q_rows), *(_heads_first(x, call.k_rows) for x in (k, v)),
            None, True, 0.0, call.is_causal, False, scale=scale,
        )  # fmt: skip
        # [B, H, S, 1] in torch 2.13
        lse = lse.reshape(out.shape[:3])
        return _back(out.transpose(1, 2), call.q_rows, len(q), call), _lse_back(lse, call, len(q))

    def backward(
        self, call: FlashCall, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rows, keys = call.q_rows, call.k_rows
        grad_out, q_view, out = (self.kept(_heads_first, x, rows) for x in (grad_out, q, out))
        views = (grad_out, q_view, *(_heads_first(x, keys) for x in (k, v)), out)
        lse = self.kept(_lse_of, lse, rows, False)
        found = self._operators.cudnn_backward(
            *views, lse.unsqueeze(-1), lse, lse, None, None, None,
            views[1].shape[2], views[2].shape[2], 0.0, call.is_causal, scale=scale,
        )  # fmt: skip
        sides = zip(found, (rows, keys, keys), strict=True)
        return tuple(_back(x.transpose(1, 2), r, len(q), call) for x, r in sides)  # type: ignore[return-value]


def _window(call: FlashCall) -> dict[str, int]:
    # is_causal says it already; None is no number to FlashAttention 3
    left, right = (OPEN, OPEN) if call.is_causal else (call.left, call.right)
    return {"window_size_left": left, "window_size_right": right}


def _lengths(call: FlashCall, device: torch.device, like: Tensor) -> tuple[Any, ...]:
    """Return cum_seq_q, cum_seq_k, max_q, max_k."""
    if not call.q_ends:
        return None, None, call.q_rows.length, call.k_rows.length
    mode = like.fake_mode if isinstance(like, FakeTensor) else None
    queries, keys = (max(lengths) for lengths in zip(*call.lengths, strict=True))
    # with a max_q of 1 FlashAttention 2 takes it that every sequence has one query
    return *_ends(call.q_ends, call.k_ends, device, mode), max(queries, 2), keys


@lru_cache(maxsize=512)  # one copy to the device for all layers and steps
def _ends(
    q_ends: tuple[int, ...], k_ends: tuple[int, ...], device: torch.device, mode: FakeTensorMode | None
) -> tuple[Tensor, Tensor]:
    both = torch.tensor([q_ends, k_ends], dtype=torch.int32, device=device)
    return both[0], both[1]


def _tokens_first(x: Tensor, rows: Rows) -> Tensor:
    """View rows of x [B, H, S, D] as [B, n, H, D]; repetitions are the batch, samples then heads."""
    part = rows.of(x)
    return part.transpose(1, 2) if rows.repeats == 1 else part.permute(1, 3, 0, 2, 4).flatten(2, 3)


def _heads_first(x: Tensor, rows: Rows) -> Tensor:
    return _tokens_first(x, rows).transpose(1, 2)


def _packed(x: Tensor, rows: Rows) -> Tensor:
    """View rows of x [B, H, S, D] as [n, B * H, D]."""
    return rows.of(x).permute(2, 0, 1, 3).flatten(1, 2)


def _back(x: Tensor, rows: Rows, samples: int, call: FlashCall) -> Tensor:
    """Return the shape of `rows.of`."""
    if call.q_ends:
        return x.unflatten(1, (samples, -1)).permute(1, 2, 0, 3)
    if rows.repeats == 1:
        return x.transpose(1, 2)
    return x.unflatten(2, (samples, -1)).permute(2, 0, 3, 1, 4)


def _lse_back(lse: Tensor, call: FlashCall, samples: int) -> Tensor:
    """Return an lse [H, total] or [B, H, n] in the shape of `rows.of`."""
    if call.q_ends:
        return lse.unflatten(0, (samples, -1))
    return lse if call.q_rows.repeats == 1 else lse.unflatten(1, (samples, -1)).transpose(0, 1)


def _lse_of(lse: Tensor, rows: Rows, packed: bool) -> Tensor:
    """Return the lse [B, H, S] as the operators read it: contiguous, heads before tokens."""
    part = rows.of(lse)
    if packed:
        part = part.flatten(0, 1)
    elif rows.repeats > 1:
        part = part.transpose(0, 1).flatten(1, 2)
    return part.contiguous()
