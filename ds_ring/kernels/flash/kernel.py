"""The kernel "flash": FlashAttention's operators, forward and backward, on a few calls with windows.

`calls.py` makes the calls and `executors.py` carries them out. A call is a view: nothing is
copied, permuted or compiled. Mask functions and changed scores are not windows and are refused; the kernel
"flex" takes them. On the CPU aten's CPU operator carries out the same calls, so that tests execute the list;
as a kernel for the CPU "cpu" is faster. On CUDA dQ is added with atomics: its last bits differ between runs
unless torch.use_deterministic_algorithms is on. cuDNN has no other way, so it is not chosen then.

[Note: the order of additions]
A causal zigzag hop is one call. What the ring itself adds up has one order, so only FlashAttention's own dQ
can differ from run to run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.comm.streams import is_fake
from ds_ring.compat.torch_kernels import current_flash_implementation
from ds_ring.errors import RingConfigError, RingError, RingKernelError, RingShapeError, shown
from ds_ring.kernels.flash.calls import FlashCall, make_flash_calls, split_call
from ds_ring.kernels.flash.executors import (
    INFINITY,
    WIDEST,
    BackwardInputs,
    CallSizes,
    Executor,
    OnCpu,
    Platform,
    Views,
    needs_equal_bits,
)
from ds_ring.kernels.flash.packages import (
    BY_GENERATION,
    IMPLEMENTATIONS,
    SM_MARGIN,
)
from ds_ring.kernels.interface import (
    ALL_HEADS,
    KernelNeeds,
    Operands,
    PartialGrads,
    PartialOut,
    PassHeads,
    make_kernel_error,
)
from ds_ring.kernels.trials import try_kernel
from ds_ring.masks.pattern import cache_by_pattern
from ds_ring.masks.tiles import Tiles

_MASKED = (
    'kernel "flash": expected a pattern whose tiles are windows, got a mask function (MaskMod), which is'
    ' evaluated pair by pair; set "kernel": "flex", or "auto", which takes it on CUDA ("cpu" on the CPU)'
)
_log = logging.getLogger(__name__)


class FlashKernel:
    """Call FlashAttention over windows.

    Args:
        implementation: on CUDA; "FA2" is torch's own; "cuDNN" takes full and causal rectangles by cuDNN, the
            rest by FlashAttention 2; "cuDNN-flex" also windows and packed sequences by its flex attention;
            "FA3" and "FA4" are called in their packages. None takes the first that
            works: "FA3" on sm_90 or "FA4" on sm_100, there "cuDNN", "FA2"; [Note: a default is a try].
        sm_margin: multiprocessors that FlashAttention 3 leaves to messages; 0 for a ring of one rank.

    Raises:
        RingConfigError: an implementation or a number that is not one of these.
    """

    name = "flash"
    few_parts = True

    def __init__(self, implementation: str | None = None, sm_margin: int = SM_MARGIN) -> None:
        if implementation not in (None, *IMPLEMENTATIONS):
            raise RingConfigError(
                'kernel_options of kernel "flash": implementation: expected one of'
                f" {', '.join(IMPLEMENTATIONS)}, got {implementation!r}; leave it out"
            )
        if type(sm_margin) is not int or not 0 <= sm_margin < 128:
            name, advice = 'kernel_options of kernel "flash": sm_margin', f"use {SM_MARGIN}, or leave it out"
            raise RingConfigError.wrong(
                name, "a number of multiprocessors from 0 to 127", shown(sm_margin), advice
            )
        self._implementation, self._sm_margin = implementation, sm_margin
        self.executors: tuple[Executor, ...] | None = None  # instead of those of the implementation
        self.views: Views | None = None  # of a pass
        self.running = ""  # the implementation of the last call
        self._kinds: set[tuple[object, ...]] = set()  # of calls that passes have made so far

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        of_values = v.shape[-1]
        views = self.views or Views()
        executors = views.once(self._get_executors, (q,), of_values)  # looked up once a pass, not at each hop
        wide, wide_v = _get_padded_dims(executors, q.shape[-1], of_values)
        q, k, v = (
            views.once(_make_queries_usable, (q,), wide, scale),
            _make_usable(k, wide),
            _make_usable(v, wide_v),
        )
        group = q.shape[1] // k.shape[1]
        sizes = CallSizes(q.shape[0], q.shape[1], k.shape[1], max(wide, wide_v), False)
        for call, executor, heads in _assign_calls(tiles, executors, sizes):
            q_here = q if heads is ALL_HEADS else views.once(_select_heads, (q,), call.head_in_group, group)
            self.running = executor.name
            try:
                out, lse = executor.forward(views, call, q_here, k, v, positive(scale))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise self._make_failure(error, q=q_here, k=k, v=v) from error
            # the same number added to every score of a call moves its lse and leaves its out as it is
            lse = lse + call.bias if call.bias else lse
            out = out if wide_v == of_values else out[..., :of_values]
            yield PartialOut(heads, call.q_rows, out, lse)
            del out, lse  # or they would live on while the next ones are computed

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        width, of_values = q.shape[-1], v.shape[-1]
        extra_dims = 0 if grad_lse is None else 1
        views = self.views or Views()
        executors = views.once(self._get_executors, (q,), of_values + extra_dims)
        wide, wide_v = _get_padded_dims(executors, width, of_values + extra_dims, bool(extra_dims))
        if extra_dims:
            v = pad(v, (0, 1), value=1.0)
        k, v = _make_usable(k, wide), _make_usable(v, wide_v)
        group = q.shape[1] // k.shape[1]
        # What every hop reads of the queries, as the operators want it.
        queries = views.once(_prepare_inputs, (grad_out, q, out, lse, grad_lse), wide, wide_v, scale)
        sizes = CallSizes(q.shape[0], q.shape[1], k.shape[1], max(wide, wide_v), True)
        for call, executor, heads in _assign_calls(tiles, executors, sizes):
            here = views.once(_put_tokens_first, queries) if executor.tokens_first else queries
            if heads is not ALL_HEADS:
                here = views.once(_select_inputs, here, call.head_in_group, group)
            self.running = executor.name
            try:
                dq, dk, dv = executor.backward(views, call, here, k, v, positive(scale))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise self._make_failure(error, grad_out=here.grad_out, q=here.q, k=k, v=v) from error
            dq = dq if scale > 0 else dq * sign(scale)
            dq, dk = (dq, dk) if wide == width else (dq[..., :width], dk[..., :width])
            dv = dv if wide_v == of_values else dv[..., :of_values]
            tokens_first = executor.tokens_first and call.is_plain
            yield PartialGrads(heads, call.q_rows, call.k_rows, dq, dk, dv, tokens_first)
            del dq, dk, dv

    def select_heads(self, heads: slice) -> FlashKernel:
        """Return a kernel for one pass of these heads, which keeps what all hops of it read."""
        kernel = FlashKernel(self._implementation, self._sm_margin)
        kernel.executors, kernel.views, kernel._kinds = self.executors, Views(), self._kinds
        return kernel

    def _make_failure(self, error: RuntimeError, **tensors: Tensor) -> RingKernelError:
        others = (
            '"kernel": "flex"' if self.running == "FA2" else '"kernel_options": {"implementation": "FA2"}'
        )
        return make_kernel_error(f'"flash" ({self.running})', error, f"set {others}", **tensors)

    def compiles(self, operands: Operands, part: PassHeads, scale: float) -> bool:
        """Return whether a pass on CUDA has calls of a new kind: FlashAttention 4 compiles for each.

        The first pass for some head dimensions also tries the implementation.
        """
        q, _, v, grad_out, has_grad_lse = operands
        if not q.is_cuda:
            return False
        needs = (q.device, q.dtype, q.shape[-1], v.shape[-1] + has_grad_lse, grad_out is None)
        calls = (call for tiles in part.hops if len(tiles) for call in _get_calls(tiles))
        kinds = {(*needs, part.query_heads // part.kv_heads, *call.kind) for call in calls}
        new = kinds - self._kinds
        self._kinds |= new
        return bool(new)

    def count_executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        return sum(call.pairs for call in _get_calls(tiles))

    def _get_executors(self, q: Tensor, value_dim: int) -> tuple[Executor, ...]:
        if self.executors is not None:
            return self.executors
        if q.is_cpu:
            return _ON_CPU
        name = self._implementation
        if not q.is_cuda or is_fake(q):  # only shapes: those of torch's operators
            return _load_torch_executors("cuDNN" if name == "cuDNN" else "FA2")
        equal_bits = needs_equal_bits()
        executors = _choose_executors(
            name, self._sm_margin, q.device, q.dtype, q.shape[-1], value_dim, equal_bits
        )
        active = current_flash_implementation()
        if active is not None and any(executor.calls_aten for executor in executors):
            raise RingConfigError(
                f'kernel "flash" with {name or "FA2"}: expected torch\'s own operators, got {active}, which'
                " replaces them in this process; do not activate it: ds_ring calls its package"
            )
        if torch.is_deterministic_algorithms_warn_only_enabled() and executors[0].name == "cuDNN":
            _warn_of_bits()
        return executors


_ON_CPU = (OnCpu(),)


@lru_cache(maxsize=1)
def _warn_of_bits() -> None:
    _log.warning(
        'ds_ring: kernel "flash" is cuDNN, whose dQ has other bits in each run; without warn_only'
        " torch.use_deterministic_algorithms takes one that has not"
    )


@lru_cache(maxsize=2)
def _load_torch_executors(name: str) -> tuple[Executor, ...]:
    return IMPLEMENTATIONS[name].make(0, Platform())


@lru_cache(maxsize=64)  # a model has few head dimensions
def _choose_executors(
    name: str | None,
    sm_margin: int,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    equal_bits: bool,
) -> tuple[Executor, ...]:
    """Return the executors of an implementation that passes its try; [Note: a default is a try].

    With `equal_bits` it has to have the same bits in each run.

    Raises:
        RingConfigError: the implementation with this name is not installed, does not pass, or is not
            deterministic.
    """
    needs = (sm_margin, device, dtype, head_dim, value_dim)
    if name is not None and equal_bits and not IMPLEMENTATIONS[name].deterministic:
        expected = "one that is deterministic, as torch.use_deterministic_algorithms is on"
        advice = 'set "FA2", or leave "implementation" out'
        raise RingConfigError.wrong('kernel "flash": implementation', expected, shown(name), advice)
    if name is None:
        for default in _get_defaults(device):
            if equal_bits and not IMPLEMENTATIONS[default].deterministic:
                continue
            try:
                executor = _try_executors(default, *needs)
            except ModuleNotFoundError as error:
                _log.info('ds_ring: kernel "flash": %s is not installed (%s)', default, error)
            except Exception as error:  # a package may raise anything: the next one is tried
                failed = 'ds_ring: kernel "flash": %s is not used for head dimensions (%d, %d): %s: %s'
                _log.warning(failed, default, head_dim, value_dim, type(error).__name__, error)
            else:
                _log.info(
                    'ds_ring: kernel "flash" is %s for head dimensions (%d, %d)', default, head_dim, value_dim
                )
                return executor
        name = "FA2"
    try:
        return _try_executors(name, *needs)
    except RingShapeError:
        raise
    except Exception as error:
        raise RingConfigError(
            f'kernel "flash": implementation {name}: expected {IMPLEMENTATIONS[name].package} that works with'
            f" torch {torch.__version__} here, got {type(error).__name__}: {error}; install one that does, or"
            ' leave "implementation" out'
        ) from error


def _get_defaults(device: torch.device) -> tuple[str, ...]:
    """Return what is tried before FlashAttention 2."""
    if torch.version.hip is not None:
        return ()
    return BY_GENERATION.get(torch.cuda.get_device_capability(device)[0], ())


def _read_platform(device: torch.device) -> Platform:
    """Return the device and the version of cuDNN by which executors know faults."""
    if device.type != "cuda" or torch.version.hip is not None:
        return Platform()
    return Platform(torch.cuda.get_device_capability(device)[0], torch.backends.cudnn.version() or 0)


def _try_executors(
    name: str, sm_margin: int, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
) -> tuple[Executor, ...]:
    """Return the executors of an implementation whose results are right; raise what is wrong with it."""
    kernel = FlashKernel()
    kernel.executors = IMPLEMENTATIONS[name].make(sm_margin, _read_platform(device))
    try_kernel(kernel, device, dtype, head_dim, value_dim)
    return kernel.executors


def _get_calls(tiles: Tiles) -> tuple[FlashCall, ...]:
    """Return the calls of a table; refuse one that is no window."""
    if tiles.is_masked.any():
        raise RingConfigError(_MASKED)
    return make_flash_calls(tiles)


def refused(needs: KernelNeeds) -> RingError | None:
    """Return the error for what this kernel cannot do; None where it can."""
    if needs.pattern.masks:
        return RingConfigError(_MASKED)
    if needs.device_type == "cpu":
        return None
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return RingShapeError(
            f'kernel "flash": expected bfloat16 or float16 on {needs.device_type}, got {needs.dtype}; cast,'
            ' or set "kernel": "flex"'
        )
    if needs.head_dim > WIDEST:
        return _make_width_error(str(needs.head_dim))
    return None


def _make_width_error(got: str) -> RingShapeError:
    return RingShapeError(
        f'kernel "flash": expected a head_dim of at most {WIDEST}, got {got}; set "kernel": "flex"'
    )


@lru_cache(maxsize=512)
def _get_padded_dims(
    executors: tuple[Executor, ...], head_dim: int, value_dim: int, of_lse: bool = False
) -> tuple[int, int]:
    """Return the head dimensions of queries and of values that the operators compute with.

    Raises:
        RingShapeError: there is no operator for them.
    """
    widths = [executor.padded(head_dim, value_dim) for executor in executors]
    if None in widths:
        widest = str(max(head_dim, value_dim))
        raise _make_width_error(f"{widest} with the gradient of the log-sum-exp" if of_lse else widest)
    return max(width for width in widths if width is not None)


def _make_usable(x: Tensor, width: int) -> Tensor:
    """Return x with a dense last dimension padded to `width`, and on the CPU in float32 or float64."""
    if x.dtype not in (torch.float32, torch.float64) and x.device.type == "cpu":
        x = x.float()
    if x.shape[-1] != width:  # of what one hop computes, never of what travels or is kept
        return pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _prepare_inputs(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None,
    wide: int, wide_v: int, scale: float,
) -> BackwardInputs:  # fmt: skip
    if grad_lse is not None:  # a value of 1 whose gradient is that of the lse; `out` gets a 0 there
        grad_out = torch.cat([grad_out, grad_lse.to(grad_out.dtype).unsqueeze(-1)], dim=-1)
    grad_out, out = _make_usable(grad_out, wide_v), _make_usable(out, wide_v)
    lse = lse.masked_fill(lse == -INFINITY, INFINITY)
    return BackwardInputs(grad_out, _make_queries_usable(q, wide, scale), out, lse)


# FlashAttention's operators would copy a gradient and an output that are not in [B, S, H, D] memory order in
# every call. The copy is made once, for the first call that one of them carries out.
def _put_tokens_first(grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> BackwardInputs:
    grad_out, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad_out, out))
    return BackwardInputs(grad_out, q, out, lse)


def _select_inputs(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, head_in_group: int, group: int
) -> BackwardInputs:
    return BackwardInputs(*(_select_heads(x, head_in_group, group) for x in (grad_out, q, out, lse)))


def _make_queries_usable(q: Tensor, width: int, scale: float) -> Tensor:
    """Return queries with the same scores at `positive(scale)`."""
    q = _make_usable(q, width)
    return q if scale > 0 else q * sign(scale)


# The operators take the maximum of the products before they scale it, so they need a scale above 0.
def positive(scale: float) -> float:
    """Return the scale that operators are given: of queries times `sign(scale)` the scores are the same."""
    return abs(scale) or 1.0


def sign(scale: float) -> int:
    """Return the sign of a scale; 0 of 0."""
    return (scale > 0) - (scale < 0)


def _select_heads(x: Tensor, head_in_group: int, group: int) -> Tensor:
    """Return one query head of each K/V head's group."""
    return x[:, head_in_group::group]


@partial(cache_by_pattern, 512)
def _assign_calls(
    tiles: Tiles, executors: tuple[Executor, ...], sizes: CallSizes
) -> tuple[tuple[FlashCall, Executor, slice], ...]:
    """Return the calls of a table, each with the first executor that takes it and its query heads."""
    group = sizes.heads // sizes.kv_heads
    assigned = []
    for call in _get_calls(tiles):
        here = sizes if call.head_in_group < 0 else sizes._replace(heads=sizes.kv_heads)
        executor = next(executor for executor in executors if executor.takes(call, here))
        parts = split_call(call, partial(executor.fits, sizes=here))
        assigned += [(part, executor, part.heads(group)) for part in parts]
    return tuple(assigned)
