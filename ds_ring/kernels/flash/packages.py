"""Load FlashAttention 3 and 4 from their own packages, and try an implementation before it is used.

[Note: a default is a try]
A package may be installed and not work: it was built for another torch or another GPU, or its functions have
other arguments than ours. So before an implementation is used for a device, a dtype and head dimensions, it
computes small calls forward and backward (`kernels/trials.py`), also those in which cuDNN is known to make
NaN. One that raises, or whose results differ from the reference kernel's, is not used: the next one is
taken, and the log says which one failed and why. One that the JSON names is never replaced; if it fails, the
call is refused.

The packages are called directly. `torch.nn.attention.activate_flash_attention_impl` would replace torch's
operators for the whole process. Its adapter for FlashAttention 4 computes wrong windows before torch 2.12.1,
and before 2.14.1 it expects two results where flash-attn-4 returns more from version b24 on.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ring.kernels.flash.cudnn_flex import CudnnFlex, load_interval_operators
from ds_ring.kernels.flash.executors import (
    ATEN,
    Cudnn,
    Executor,
    Flash,
    Operators,
    Platform,
    needs_equal_bits,
)

# What "auto" tries, in this order, by the device's major compute capability; then FlashAttention 2.
BY_GENERATION = {9: ("FA3", "cuDNN"), 10: ("FA4", "cuDNN")}


# [Note: multiprocessors for messages]
# On sm_90 FlashAttention 3's forward kernel is persistent: it occupies all multiprocessors until it ends. A
# stream's priority evicts no block, so NCCL's kernel would wait, and messages would not overlap. Therefore
# FlashAttention 3 leaves `sm_margin` of 132 multiprocessors free, and NCCL's blocks need no cluster of
# neighbouring ones (`comm/groups.py`). Source: MagiAttention, which reserves 4 to 8.
SM_MARGIN = 8


def flash_3(sm_margin: int = SM_MARGIN) -> Operators:
    """Return FlashAttention 3's operators with the arguments of aten's; ImportError without its package."""
    import_module("flash_attn_interface")  # registers torch.ops.flash_attn_3
    package = torch.ops.flash_attn_3

    def forward(*operands: Tensor, is_causal: bool, **named: Any) -> Any:
        splits = int(needs_equal_bits())
        return package.fwd(*operands, is_causal=is_causal, num_splits=splits, sm_margin=sm_margin, **named)

    def backward(grad_out: Tensor, *operands: Tensor, is_causal: bool, **named: Any) -> Any:
        grads = tuple(torch.empty_like(x) for x in operands[:3])
        package.bwd(grad_out, *operands, *grads, is_causal=is_causal, sm_margin=sm_margin, **named)
        return grads

    return _wrap_as_aten(forward, backward, open_side=-1)


def flash_4() -> Operators:
    """Return FlashAttention 4's functions with the arguments of aten's; ImportError without its package."""
    package = import_module("flash_attn.cute.interface")

    def forward(*operands: Tensor, is_causal: bool, **named: Any) -> Any:
        return package._flash_attn_fwd(*operands, causal=is_causal, return_lse=True, **named)

    def backward(
        grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        is_causal: bool, max_seqlen_q: int, max_seqlen_k: int, **named: Any,
    ) -> Any:  # fmt: skip
        return package._flash_attn_bwd(q, k, v, out, grad_out, lse, causal=is_causal, **named)

    return _wrap_as_aten(forward, backward, open_side=None)


def _wrap_as_aten(
    forward: Callable[..., Any], backward: Callable[..., Any], open_side: int | None
) -> Operators:
    """Return operators that call a package's functions by the names that both packages have for arguments.

    `open_side` means the open side of a window there. More results than aten's are left out.
    """

    def named(lengths: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        arguments = {"softmax_scale": options["scale"], **dict(zip(names, lengths, strict=True))}
        for side in ("window_size_left", "window_size_right"):
            arguments[side] = open_side if options[side] < 0 else options[side]
        return arguments

    def flash_forward(
        q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor | None, ends_k: Tensor | None, max_q: int, max_k: int,
        dropout: float, is_causal: bool, debug: bool, **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        arguments = named((ends_q, ends_k, max_q, max_k), options)
        out, lse, *_ = forward(q, k, v, is_causal=is_causal, **arguments)
        return out, lse.contiguous()

    def flash_backward(
        grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        ends_q: Tensor | None, ends_k: Tensor | None, max_q: int, max_k: int,
        dropout: float, is_causal: bool, seed: Tensor, offset: Tensor, **options: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        arguments = named((ends_q, ends_k, max_q, max_k), options)
        arguments["deterministic"] = needs_equal_bits()
        dq, dk, dv, *_ = backward(grad_out, q, k, v, out, lse, is_causal=is_causal, **arguments)
        return dq, dk, dv

    return ATEN._replace(flash_forward=flash_forward, flash_backward=flash_backward)


class Implementation(NamedTuple):
    """Describe an implementation of attention on CUDA.

    Attributes:
        make: returns its executors, in the order in which they are asked, for an `sm_margin` and a platform;
            raises if it is not installed.
        package: what has to be installed.
        deterministic: whether it has the same bits in each run under torch.use_deterministic_algorithms.
    """

    make: Callable[[int, Platform], tuple[Executor, ...]]
    package: str
    deterministic: bool = True


# FlashAttention 4 on sm_100 takes equal head dimensions up to 128, (192, 128) and (256, 256).
FLASH_4_WIDTHS = ((128, None), (192, 128), (256, 256))
IMPLEMENTATIONS = {
    "FA2": Implementation(lambda _, platform: (Flash(),), "torch"),
    "cuDNN": Implementation(
        lambda _, platform: (Cudnn(platform=platform), Flash()), "torch", deterministic=False
    ),
    "cuDNN-flex": Implementation(
        lambda _, platform: (
            Cudnn(platform=platform),
            CudnnFlex(load_interval_operators(), platform),
            Flash(),
        ),
        "cudnn.flex_attention",
        deterministic=False,
    ),
    "FA3": Implementation(
        lambda sm_margin, platform: (Flash(flash_3(sm_margin), name="FA3"),), "flash_attn_interface"
    ),
    "FA4": Implementation(lambda _, platform: (Flash(flash_4(), FLASH_4_WIDTHS, "FA4"),), "flash_attn.cute"),
}
