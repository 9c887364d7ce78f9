"""The kernel "flash": FlashAttention's operators, forward and backward, on a few calls with windows.

`calls.py` makes the calls and `executors.py` carries them out. A call is a view: nothing is
copied, permuted or compiled. Mask functions and changed scores are not windows and are refused; the kernel
"flex" takes them. On the CPU aten's CPU operator carries out the same calls, so that tests execute the list;
as a kernel for the CPU "cpu" is faster. On CUDA FlashAttention 2 adds dQ with atomics: its last bits differ
between runs unless torch.use_deterministic_algorithms is on.

[Note: the order of additions]
A causal zigzag hop is one call. What the ring itself adds up has one order, so only FlashAttention's own dQ
can differ from run to run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.errors import RingConfigError, RingError, RingShapeError
from ds_ring.kernels.flash.calls import FlashCall, flash_calls
from ds_ring.kernels.flash.executors import (
    INFINITY,
    WIDEST,
    Cudnn,
    Executor,
    Flash,
    OfQueries,
    OnCpu,
    Views,
)
from ds_ring.kernels.interface import ALL_HEADS, KernelNeeds, PartialGrads, PartialOut
from ds_ring.masks.tiles import Tiles

IMPLEMENTATIONS = ("FA2", "cuDNN", "FA3", "FA4")
MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}  # which torch imports
BY_GENERATION = {9: "FA3", 10: "FA4"}  # by the device's major compute capability
_MASKED = (
    'kernel "flash": expected a pattern whose tiles are windows, got a mask function (MaskMod), which is'
    ' evaluated pair by pair; set "kernel": "flex", or "auto", which takes it on CUDA ("cpu" on the CPU)'
)
_log = logging.getLogger(__name__)


class FlashKernel:
    """Call FlashAttention over windows.

    Args:
        implementation: on CUDA; "FA2" is torch's own; "cuDNN" takes full and causal rectangles by cuDNN, the
            rest by FlashAttention 2; "FA3" and "FA4" replace the implementation of torch's operators in the
            whole process. None takes "FA3" on sm_90 and "FA4" on sm_100 where their packages are installed,
            else the active implementation.
    """

    name = "flash"
    few_parts = True

    def __init__(self, implementation: str | None = None) -> None:
        if implementation not in (None, *IMPLEMENTATIONS):
            raise RingConfigError(
                'kernel_options of kernel "flash": implementation: expected one of'
                f" {', '.join(IMPLEMENTATIONS)}, got {implementation!r}; leave it out"
            )
        self._implementation = implementation
        self._on_cpu: tuple[Executor, ...] = (OnCpu(),)
        self._on_cuda: tuple[Executor, ...] = (Flash(),)
        if implementation == "cuDNN":
            self._on_cuda = (Cudnn(), Flash())
        self.views: Views | None = None  # of a pass

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        width = v.shape[-1]
        executors, views = self._executors(q), self.views or Views()
        most = _checked_width(executors, max(q.shape[-1], width))
        q, k, v = views.once(_usable_queries, (q,), most, scale), _usable(k, most), _usable(v, most)
        group = q.shape[1] // k.shape[1]
        for call, executor, heads in _carried_out(tiles, executors, group):
            q_here = q if heads is ALL_HEADS else views.once(_heads, (q,), call.head_in_group, group)
            out, lse = executor.forward(views, call, q_here, k, v, positive(scale))
            # the same number added to every score of a call moves its lse and leaves its out as it is
            lse = lse + call.bias if call.bias else lse
            yield PartialOut(heads, call.q_rows, out if most == width else out[..., :width], lse)
            del out, lse  # or they would live on while the next ones are computed

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        width, of_values = q.shape[-1], v.shape[-1]
        more = 0 if grad_lse is None else 1
        executors, views = self._executors(q), self.views or Views()
        most = _checked_width(executors, max(width, of_values + more), bool(more))
        if more:
            v = pad(v, (0, 1), value=1.0)
        k, v = _usable(k, most), _usable(v, most)
        group = q.shape[1] // k.shape[1]
        # What every hop reads of the queries, as the operators want it.
        queries = views.once(_of_queries, (grad_out, q, out, lse, grad_lse), most, scale, executors)
        for call, executor, heads in _carried_out(tiles, executors, group):
            here = queries
            if heads is not ALL_HEADS:
                here = views.once(_of_some, queries, call.head_in_group, group)
            dq, dk, dv = executor.backward(views, call, here, k, v, positive(scale))
            dq = dq if scale > 0 else dq * sign(scale)
            dq, dk = (dq, dk) if most == width else (dq[..., :width], dk[..., :width])
            dv = dv if most == of_values else dv[..., :of_values]
            tokens_first = executor.tokens_first and call.is_plain
            yield PartialGrads(heads, call.q_rows, call.k_rows, dq, dk, dv, tokens_first)
            del dq, dk, dv

    def of_heads(self, heads: slice) -> FlashKernel:
        """Return a kernel for one pass of these heads, which keeps what all hops of it read."""
        found = FlashKernel(self._implementation)
        found._on_cpu, found._on_cuda, found.views = self._on_cpu, self._on_cuda, Views()
        return found

    def executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        return sum(call.pairs for call in _calls(tiles))

    def _executors(self, q: Tensor) -> tuple[Executor, ...]:
        if q.is_cpu:
            return self._on_cpu
        implementation = self._implementation or _installed_for(q.device)
        if implementation is not None and implementation != "cuDNN":
            _activate(implementation)
        return self._on_cuda


def _calls(tiles: Tiles) -> tuple[FlashCall, ...]:
    """Return the calls of a table; refuse one that is no window."""
    if tiles.is_masked.any():
        raise RingConfigError(_MASKED)
    return flash_calls(tiles)


def refused(asked: KernelNeeds) -> RingError | None:
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
    """Return x with a dense last dimension padded to `width`, and on the CPU in float32 or float64."""
    if x.dtype not in (torch.float32, torch.float64) and x.device.type == "cpu":
        x = x.float()
    if x.shape[-1] != width:  # of what one hop computes, never of what travels or is kept
        return pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _of_queries(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None,
    width: int, scale: float, executors: tuple[Executor, ...],
) -> OfQueries:  # fmt: skip
    if grad_lse is not None:  # a value of 1 whose gradient is that of the lse; `out` gets a 0 there
        grad_out = torch.cat([grad_out, grad_lse.to(grad_out.dtype).unsqueeze(-1)], dim=-1)
    grad_out, out = _usable(grad_out, width), _usable(out, width)
    # Some operators would copy a gradient and an output that are not in [B, S, H, D] memory order.
    if any(executor.tokens_first for executor in executors):
        grad_out, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad_out, out))
    lse = lse.masked_fill(lse == -INFINITY, INFINITY)
    return OfQueries(grad_out, _usable_queries(q, width, scale), out, lse)


def _of_some(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, head_in_group: int, group: int
) -> OfQueries:
    return OfQueries(*(_heads(x, head_in_group, group) for x in (grad_out, q, out, lse)))


def _usable_queries(q: Tensor, width: int, scale: float) -> Tensor:
    """Return queries with the same scores at `positive(scale)`."""
    q = _usable(q, width)
    return q if scale > 0 else q * sign(scale)


# The operators take the maximum of the products before they scale it, so they need a scale above 0.
def positive(scale: float) -> float:
    """Return the scale that operators are given: of queries times `sign(scale)` the scores are the same."""
    return abs(scale) or 1.0


def sign(scale: float) -> int:
    """Return the sign of a scale; 0 of 0."""
    return (scale > 0) - (scale < 0)


def _heads(x: Tensor, head_in_group: int, group: int) -> Tensor:
    """Return one query head of each K/V head's group."""
    return x[:, head_in_group::group]


@lru_cache(maxsize=512)
def _carried_out(
    tiles: Tiles, executors: tuple[Executor, ...], group: int
) -> tuple[tuple[FlashCall, Executor, slice], ...]:
    """Return the calls of a table, each with the first executor that takes it and its query heads."""
    return tuple(
        (call, next(executor for executor in executors if executor.takes(call)), call.heads(group))
        for call in _calls(tiles)
    )


@lru_cache(maxsize=64)  # more devices than a host has
def _installed_for(device: torch.device) -> str | None:
    """Return the FlashAttention of a device's generation if its package is installed; None if not."""
    if torch.version.hip is not None or not torch.cuda.is_available():  # of fake tensors, say
        return None
    name = BY_GENERATION.get(torch.cuda.get_device_capability(device)[0])
    try:
        return name if name is not None and find_spec(MODULES[name]) is not None else None
    except ModuleNotFoundError:  # of the package around the module
        return None


def _activate(implementation: str) -> None:
    """Activate FlashAttention 3 or 4 as the implementation of torch's operators, once.

    Raises:
        RingConfigError: its package is not installed, or does not fit this torch; FlashAttention 2 is
            requested while another one is active in this process.
    """
    from torch.nn import attention

    active = attention.current_flash_attention_impl()
    if active == implementation or (active is None and implementation == "FA2"):
        return
    if implementation == "FA2":
        raise RingConfigError(
            f'kernel "flash": implementation FA2 expected torch\'s own operators, got {active} in this'
            ' process; leave "implementation" out, or do not activate it'
        )
    try:
        attention.activate_flash_attention_impl(implementation)
    except Exception as error:
        raise RingConfigError(
            f'kernel "flash": implementation {implementation} expected {MODULES[implementation]} for torch'
            f" {torch.__version__}, got {type(error).__name__}: {error}; install it, or use FA2"
        ) from error
    _log.info("ds_ring: %s is behind torch's attention operators in this process", implementation)
