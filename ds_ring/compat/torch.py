"""What differs between versions of torch: each difference is found by looking for the feature.

Owns nothing else: a module that needs one of these imports it from here, and works with all versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

F = TypeVar("F", bound=Callable[..., Any])

# Each operator of ds_ring: opaque to torch.compile, and never captured in a CUDA graph.
# torch 2.11 takes a sequence of tags only.
operator = partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))


# [Note: constants from objects]
# Dynamo calls a function that is marked as constant with real values in place of its variables. Up to torch
# 2.11 it has none for objects that are not constants. `_Held` is a variable that has: `_hold` puts it in the
# place of the argument, and guards the argument's identity as later versions do.
def _mark(function: F) -> F:
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_mark
def _takes_objects() -> bool:
    from ds_ring.compat.dynamo import takes_objects

    return takes_objects()


def assume_constant(function: F) -> F:
    """Do what `torch.compiler.assume_constant_result` does, without importing Dynamo (1.3 s).

    The function may be given objects, which are guarded by identity: [Note: constants from objects].
    """
    function = _mark(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and not _takes_objects():
            from ds_ring.compat.dynamo import hold

            return function(*[hold(argument) for argument in args])
        return function(*args)

    vars(call).clear()  # `wraps` has copied the mark
    return call  # type: ignore[return-value]


_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@functools.cache
def takes_grouped_heads() -> bool:
    """Return whether flash attention for CPU takes fewer K/V heads than query heads: from torch 2.9 on."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        q = torch.zeros(1, 2, 1, 16, dtype=torch.float32, device="cpu")
        # Without the feature, the second query head reads what is behind the only K/V head: here it is ours.
        behind = torch.stack([torch.zeros_like(q[:, 0]), torch.ones_like(q[:, 0])], dim=1)
        return not bool(_cpu_flash(q, behind[:, :1], behind[:, :1])[0].any())


def cpu_flash(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return out and lse of aten's flash attention for CPU, with grouped heads in all versions."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and not takes_grouped_heads():
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    out, lse = _cpu_flash(q, k, v, *args, **options)
    return out, lse


def cpu_flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of aten's flash attention for CPU, with grouped heads in all versions."""
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    repeats = groups > 1 and not takes_grouped_heads()
    if repeats:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    dq, dk, dv = _cpu_flash_backward(grad_out, q, k, v, *args, **options)
    if repeats:
        dk, dv = (x.unflatten(1, (heads, groups)).sum(2) for x in (dk, dv))
    return dq, dk, dv


@functools.cache
def choose_cpu_flash() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return aten's flash attention for CPU and its gradient: by themselves if they take grouped heads."""
    return (_cpu_flash, _cpu_flash_backward) if takes_grouped_heads() else (cpu_flash, cpu_flash_backward)


def start_all_to_all(
    sends: list[Tensor], group: dist.ProcessGroup
) -> tuple[dist.Work, list[Tensor], list[Tensor]]:
    """Begin to send part i to rank i of a group; return the work, what arrives, and what is in flight."""
    received = [torch.empty_like(part) for part in sends]
    try:
        return _require_work(dist.all_to_all(received, sends, group=group, async_op=True)), received, sends
    except RuntimeError as error:
        # gloo of torch 2.11 and older says so before it sends anything
        if "does not support alltoall" not in str(error):
            raise
    whole = torch.stack(sends)
    arrived = torch.empty_like(whole)
    work = _require_work(dist.all_to_all_single(arrived, whole, group=group, async_op=True))
    return work, list(arrived), [whole]


def _require_work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


# What torch raises if a device has failed; up to torch 2.8 it is a plain RuntimeError.
DEVICE_ERROR: tuple[type[BaseException], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)
