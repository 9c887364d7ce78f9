"""Attend by FlashAttention's operators: tiles as few calls with windows, forward and backward.

Owns the kernel. Which calls is flash_calls.py's, what carries one out flash_executors.py's. No table, no
permutation and no compilation: a call is a view. What is no window (a mask function, changed scores) is
refused; kernel "flex" takes it. On the CPU the same calls are carried out by aten's operator for it, so that
tests and CI execute the list; as a kernel for the CPU "cpu" is faster.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.errors import RingConfigError, RingError, RingShapeError
from ds_ring.masks.tiles import Kind, Tiles
from ds_ring.runtime.kernels.flash_calls import FlashCall, flash_calls
from ds_ring.runtime.kernels.flash_executors import INFINITY, WIDEST, Cudnn, Executor, Flash
from ds_ring.runtime.kernels.flash_on_cpu import OnCpu
from ds_ring.runtime.kernels.interface import ALL_HEADS, Asked, PartialGrads, PartialOut

IMPLEMENTATIONS = ("FA2", "cuDNN", "FA3", "FA4")
_MASKED = (
    'kernel "flash": expected a pattern whose tiles are windows, got a mask function (MaskMod), which is'
    ' evaluated pair by pair; set "kernel": "flex", or "auto", which takes it on CUDA ("cpu" on the CPU)'
)
_log = logging.getLogger(__name__)


class FlashKernel:
    """Call FlashAttention over windows.

    Args:
        implementation: on CUDA; "FA2" is torch's own; "cuDNN" takes full and causal rectangles by cuDNN, the
            rest by FlashAttention 2; "FA3" and "FA4" are activated behind torch's operators, for the whole
            process, where their packages are installed.
    """

    name = "flash"

    def __init__(self, implementation: str = "FA2") -> None:
        if implementation not in IMPLEMENTATIONS:
            raise RingConfigError(
                f'kernel_options of kernel "flash": implementation: expected one of'
                f' {", ".join(IMPLEMENTATIONS)}, got {implementation!r}; leave it out for "FA2"'
            )
        self._implementation = implementation
        self._on_cpu: tuple[Executor, ...] = (OnCpu(),)
        self._on_cuda: tuple[Executor, ...] = (Flash(),)
        if implementation == "cuDNN":
            self._on_cuda = (Cudnn(), Flash())
        self._keeps = False
        self._kept: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        executors, calls, width = self._executors(q), _calls(tiles), v.shape[-1]
        most = _checked_width(executors, max(q.shape[-1], width))
        q, k, v = _usable(q, most), _usable(k, most), _usable(v, most)
        q, scale, _ = positive_scale(q, scale)
        group = q.shape[1] // k.shape[1]
        for call in calls:
            heads, executor = call.heads(group), _first(executors, call)
            q_here = q if heads is ALL_HEADS else executor.kept(_heads, q, call.head_in_group, group)
            out, lse = executor.forward(call, q_here, k, v, scale)
            # the same number added to every score of a call moves its lse and leaves its out as it is
            lse = lse + call.bias if call.bias else lse
            yield PartialOut(heads, call.q_rows, _width(out, width), lse)
            del out, lse  # or they would live on while the next ones are computed

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        executors, calls = self._executors(q), _calls(tiles)
        widths = (q.shape[-1], k.shape[-1], v.shape[-1])
        more = 0 if grad_lse is None else 1
        most = _checked_width(executors, max(q.shape[-1], v.shape[-1] + more), bool(more))
        grad_out, out, lse = self._once_a_pass(executors, (grad_out, out, lse), grad_lse, most)
        if more:
            v = pad(v, (0, 1), value=1.0)
        q, k, v = _usable(q, most), _usable(k, most), _usable(v, most)
        q, scale, sign = positive_scale(q, scale)
        group = q.shape[1] // k.shape[1]
        for call in calls:
            heads, executor = call.heads(group), _first(executors, call)
            # exp(score + bias - lse) without a bias tensor
            sums = executor.kept(torch.sub, lse, call.bias) if call.bias else lse
            of_queries = [grad_out, q, out, sums]
            if heads is not ALL_HEADS:
                of_queries = [executor.kept(_heads, x, call.head_in_group, group) for x in of_queries]
            grad_here, q_here, out_here, sums = of_queries
            found = executor.backward(call, grad_here, q_here, k, v, out_here, sums, scale)
            dq, dk, dv = (_width(x, width) for x, width in zip(found, widths, strict=True))
            yield PartialGrads(heads, call.q_rows, call.k_rows, dq if sign == 1 else dq * sign, dk, dv)
            del found, dq, dk, dv

    def of_heads(self, heads: slice) -> FlashKernel:
        """Return a kernel for one pass of these heads, which keeps what all hops of it read."""
        found = FlashKernel(self._implementation)
        found._on_cpu, found._on_cuda = (
            tuple(executor.of_pass() for executor in some) for some in (self._on_cpu, self._on_cuda)
        )
        found._keeps = True
        return found

    def executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        return sum(call.pairs for call in _calls(tiles))

    def _executors(self, q: Tensor) -> tuple[Executor, ...]:
        if q.device.type == "cpu":
            return self._on_cpu
        if self._implementation in ("FA3", "FA4"):
            _activate(self._implementation)
        return self._on_cuda

    def _once_a_pass(
        self, executors: tuple[Executor, ...], of_queries: tuple[Tensor, Tensor, Tensor],
        grad_lse: Tensor | None, width: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return what every hop of a backward pass reads of the queries, as the operators want it.

        They copy a gradient and an output whose tokens do not stand before their heads, so that is done once.
        """
        given = of_queries if grad_lse is None else (*of_queries, grad_lse)
        kept, made_of_it = self._kept or ((), ())
        if len(given) == len(kept) and all(a is b for a, b in zip(given, kept, strict=True)):
            return made_of_it  # type: ignore[return-value]
        grad_out, out, lse = of_queries
        if grad_lse is not None:  # a value of 1 whose gradient is that of the lse; `out` gets a 0 there
            grad_out = torch.cat([grad_out, grad_lse.to(grad_out.dtype).unsqueeze(-1)], dim=-1)
        grad_out, made = _usable(grad_out, width), _usable(out, width)
        if any(executor.tokens_first for executor in executors):
            grad_out, made = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad_out, made))
        sums = lse.masked_fill(lse == -INFINITY, INFINITY)
        if self._keeps:
            self._kept = (given, (grad_out, made, sums))
        return grad_out, made, sums


@lru_cache(maxsize=512)
def _calls(tiles: Tiles) -> tuple[FlashCall, ...]:
    """Return the calls of a table; refuse one that is no window."""
    if (tiles.kind == Kind.PARTIAL).any():
        raise RingConfigError(_MASKED)
    return flash_calls(tiles)


def refused(asked: Asked) -> RingError | None:
    """Return the error for what this kernel cannot do; None where it can."""
    if asked.pattern.masks:
        return RingConfigError(_MASKED)
    if asked.device_type == "cpu":
        return None
    if asked.dtype not in (torch.bfloat16, torch.float16):
        return RingShapeError(
            f'kernel "flash": expected bfloat16 or float16 on {asked.device_type}, got {asked.dtype}; cast,'
            ' or set "kernel": "flex"'
        )
    if asked.head_dim > WIDEST:
        return _too_wide(str(asked.head_dim))
    return None


def _too_wide(got: str) -> RingShapeError:
    return RingShapeError(
        f'kernel "flash": expected a head_dim of at most {WIDEST}, got {got}; set "kernel": "flex"'
    )


@lru_cache(maxsize=512)
def _checked_width(executors: tuple[Executor, ...], width: int, of_lse: bool = False) -> int:
    """Return the head dimension that the operators compute with.

    Raises:
        RingShapeError: there is no operator for it.
    """
    multiple = max(executor.multiple for executor in executors)
    if any(executor.widest is not None and width > executor.widest for executor in executors):
        raise _too_wide(f"{width} with the gradient of the log-sum-exp" if of_lse else str(width))
    return -(-width // multiple) * multiple


def _usable(x: Tensor, width: int) -> Tensor:
    """Return x with a dense last dimension, zeros behind it, and on the CPU no lower dtype than float32."""
    if x.dtype not in (torch.float32, torch.float64) and x.device.type == "cpu":
        x = x.float()
    if x.shape[-1] != width:  # of what one hop computes, never of what travels or is kept
        return pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """Return queries with the same scores at a scale above 0, and the factor of their gradient.

    The operators take the maximum of the products before they scale it.
    """
    if scale > 0:
        return q, scale, 1
    return (-q, -scale, -1) if scale < 0 else (q * 0, 1.0, 0)


def _heads(x: Tensor, head_in_group: int, group: int) -> Tensor:
    """Return one query head of each K/V head's group."""
    return x[:, head_in_group::group]


def _width(x: Tensor, width: int) -> Tensor:
    """Return x without the zeros that were put behind its last dimension."""
    return x if x.shape[-1] == width else x[..., :width]


def _first(executors: tuple[Executor, ...], call: FlashCall) -> Executor:
    for executor in executors:
        if executor.takes(call):
            return executor
    raise AssertionError("no operator takes a call, though the last one should take any")


def _activate(implementation: str) -> None:
    """Put FlashAttention 3 or 4 behind torch's operators, once.

    Raises:
        RingConfigError: its package is not installed, or does not fit this torch.
    """
    from torch.nn import attention

    if attention.current_flash_attention_impl() == implementation:
        return
    try:
        attention.activate_flash_attention_impl(implementation)
    except Exception as error:
        package = {"FA3": "flash_attn_interface", "FA4": "flash-attn-4"}[implementation]
        raise RingConfigError(
            f'kernel "flash": implementation {implementation} expected {package} beside torch'
            f" {torch.__version__}, got {type(error).__name__}: {error}; install it, or leave"
            ' "implementation" out'
        ) from error
    _log.info("ds_ring: %s is behind torch's attention operators in this process", implementation)
