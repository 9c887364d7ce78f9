"""Packages of FlashAttention 3 and 4 that compute on the CPU, with the signatures of the real ones.

FlashAttention 3's operators have the schema of its source (hopper/flash_api.cpp). FlashAttention 4's
functions take None for an open side of a window, and return two results, or more from flash-attn-4 b24 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.flash_operators import INFINITY, _gradients, flash_backward, flash_forward

_SIDES = "bool is_causal=False, int window_size_left=-1, int window_size_right=-1"
_FORWARD_3 = f"""fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None,
Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,
Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None,
int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None,
Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None,
Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, {_SIDES}, int attention_chunk=0,
float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0,
bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"""
_BACKWARD_3 = f"""bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None,
Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None,
int? max_seqlen_k=None, float? softmax_scale=None, {_SIDES}, float softcap=0.0, bool deterministic=False,
int sm_margin=0) -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"""


@contextmanager
def flash_3(wrong_side: int = 0) -> Iterator[list[int]]:
    """Install FlashAttention 3; the left side of its windows is `wrong_side` too long.

    Yields the `sm_margin` of each call.
    """
    margins: list[int] = []

    def forward(*args: Any) -> tuple[Tensor, ...]:
        (q, k, v), ends, lengths, (scale, causal, left, right) = args[:3], args[7:9], args[12:14], args[23:27]
        left += wrong_side if left >= 0 else 0
        margins.append(args[-1])
        out, lse, *_ = flash_forward(
            q, k, v, *ends, *lengths, 0.0, causal, False,
            scale=scale, window_size_left=left, window_size_right=right, empty_lse=-INFINITY,
        )  # fmt: skip
        return out, lse, q.new_empty(0), q.new_empty(0)

    def backward(*args: Any) -> tuple[Tensor, ...]:
        operands, grads, ends, lengths = args[:6], args[6:9], args[9:11], args[13:15]
        scale, causal, left, right = args[15:19]
        margins.append(args[-1])
        found = flash_backward(
            *operands, *ends, *lengths, 0.0, causal, None, None,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        for grad, result in zip(grads, found, strict=True):
            grad.copy_(result)
        return (*grads, *(operands[1].new_empty(0) for _ in range(5)))

    library = torch.library.Library("flash_attn_3", "DEF")
    try:
        for schema, function in ((_FORWARD_3, forward), (_BACKWARD_3, backward)):
            library.define(schema.replace("\n", " "))
            library.impl(schema.partition("(")[0], _filled(schema, function), "CPU")
        with mock.patch.dict("sys.modules", {"flash_attn_interface": ModuleType("flash_attn_interface")}):
            yield margins
    finally:
        library._destroy()


def _filled(schema: str, function: Any) -> Any:
    """A kernel that gets every argument of a schema by its position; torch leaves the last defaults out."""

    def kernel(*args: Any, **named: Any) -> Any:
        found = torch._C.parse_schema("flash_attn_3::" + schema.replace("\n", " "))
        defaults = [one.default_value for one in found.arguments[len(args) :]]
        names = [one.name for one in found.arguments[len(args) :]]
        return function(*args, *(named.get(name, value) for name, value in zip(names, defaults, strict=True)))

    return kernel


def _takes(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert all(x.stride(-1) == 1 for x in (q, k, v)) and q.shape[-1] == k.shape[-1]
    widths = q.shape[-1], v.shape[-1]
    equal = widths[0] == widths[1] <= 128 and widths[0] % 8 == 0
    assert equal or widths in ((192, 128), (256, 256)), f"head dimensions {widths}"


@contextmanager
def flash_4(results: int = 2) -> Iterator[None]:
    """Install FlashAttention 4, whose functions return so many results."""

    def side(given: int | None) -> int:
        assert given is None or given >= 0, "an open side of a window is None"
        return -1 if given is None else given

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, return_lse: bool,
        window_size_left: int | None, window_size_right: int | None, cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert return_lse
        out, lse, *_ = flash_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False,
            scale=softmax_scale, window_size_left=side(window_size_left),
            window_size_right=side(window_size_right), empty_lse=-INFINITY, check=_one_or_three,
        )  # fmt: skip
        return (out, lse, *(q.new_empty(0) for _ in range(results - 2)))

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad_out: Tensor, lse: Tensor, *, softmax_scale: float,
        causal: bool, window_size_left: int | None, window_size_right: int | None,
        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, deterministic: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ends = (cu_seqlens_q, cu_seqlens_k)
        most = [q.shape[-3], k.shape[-3]]
        found = flash_backward(
            grad_out, q, k, v, out, lse, *ends, *most, 0.0, causal, None, None,
            scale=softmax_scale, window_size_left=side(window_size_left),
            window_size_right=side(window_size_right), check=_one_or_three,
        )  # fmt: skip
        return (*found, *(q.new_empty(0) for _ in range(results - 2)))

    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward  # type: ignore[attr-defined]
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    modules = dict(zip(names, (ModuleType(names[0]), ModuleType(names[1]), interface), strict=True))
    with mock.patch.dict("sys.modules", modules):
        yield


@contextmanager
def cudnn_flex(shift: int = 0) -> Iterator[list[Any]]:
    """Install cuDNN's flex attention; its intervals end `shift` keys too late. Yields the masks planned."""
    masks: list[Any] = []

    def plan(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool) -> Tensor:
        assert mask.dtype == torch.int32 and mask.is_contiguous() and mask.dim() == 3 and mask.shape[1] % 2
        assert (
            mask.shape[0] in (1, q.shape[-2]) and mask.shape[2] == q.shape[0] * q.shape[1] and build_backward
        )
        assert (mask[:, 1::2] <= mask[:, 2::2]).all() and mask.min() >= 0 and mask.max() <= k.shape[1]
        masks.append(mask)
        return mask

    def score(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Scores [B, H, S, n] of rows [B, S, H, D], and the keys of each query head."""
        at = torch.arange(k.shape[1])
        ends = mask.unflatten(2, q.shape[:2])[..., None]  # [Hmask, nfunc, B, S, 1]
        seen = at < ends[:, 0]
        for first in range(1, len(mask[0]), 2):
            seen = seen | ((at >= ends[:, first]) & (at < ends[:, first + 1] + shift))
        keys = k.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        scores = q.transpose(1, 2) @ keys.mT * scale
        return scores.masked_fill(~seen.transpose(0, 1), -INFINITY), keys

    def forward(q: Tensor, k: Tensor, v: Tensor, *, mask_plan: Tensor, softmax_scale: float,
                return_lse: bool) -> tuple[Tensor, Tensor, None]:  # fmt: skip
        _takes(q, k, v)
        assert return_lse
        scores, _ = score(q, k, mask_plan, softmax_scale)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -INFINITY, 0)[..., None])
        values = v.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        return (weights @ values).transpose(1, 2).contiguous(), lse, None

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, *, mask_plan: Tensor,
        softmax_scale: float, deterministic: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        _takes(q, k, v)
        assert lse.is_contiguous() and lse.shape == (len(q), q.shape[2], q.shape[1])
        scores, keys = score(q, k, mask_plan, softmax_scale)
        values = v.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        parts = (x.transpose(1, 2) for x in (grad, q, out))
        dq, dk, dv = _gradients(scores, lse, *parts, keys, values, softmax_scale)
        dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(2) for x in (dk, dv))
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    package, execution = ModuleType("cudnn.flex_attention"), ModuleType("cudnn.flex_attention.execution")
    package.create_mask_plan = plan  # type: ignore[attr-defined]
    execution._flex_attention_forward, execution._flex_attention_backward = forward, backward  # type: ignore[attr-defined]
    modules = {"cudnn": ModuleType("cudnn"), package.__name__: package, execution.__name__: execution}
    with mock.patch.dict("sys.modules", modules):
        yield masks


def _one_or_three(*tensors: Tensor) -> None:
    if len(tensors) == 3:
        _takes(*tensors)


@contextmanager
def broken(module: str, error: Exception) -> Iterator[None]:
    """Install a package whose import raises."""

    def importing(name: str) -> ModuleType:
        if name == module:
            raise error
        return import_module(name)

    with mock.patch("ds_ring.kernels.flash.packages.import_module", importing):
        yield
