"""Carry out windows and packed sequences by cuDNN's own flex attention, of the package nvidia-cudnn-frontend.

Read from version 1.32 of the package (`cudnn/flex_attention`), which calls it experimental; no GPU has run it
here. A mask is an interval of keys for each query, which is planned once for a call and its shapes. The
backward pass takes out and lse as arguments, so the global ones can be given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.device_tables import to_device
from ds_ring.kernels.flash.calls import OPEN, FlashCall
from ds_ring.kernels.flash.executors import (
    INFINITY,
    BackwardInputs,
    CallSizes,
    Executor,
    Platform,
    Views,
    needs_equal_bits,
    restore_lse,
    restore_shape,
    select_inputs,
    view_tokens_first,
)

# Up to 128 each by itself, (192, 128) and (256, 256); multiples of 8.
MOST_PLANS = 64  # tables on the device: documents bring new ones in each batch
CUDNN_FLEX_WIDTHS = ((128, None), (192, 128), (256, 256))


class IntervalOperators(NamedTuple):
    """Hold the package's functions: they plan a mask, and compute with a plan."""

    plan: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def load_interval_operators() -> IntervalOperators:
    """Return the functions of `cudnn.flex_attention`; ImportError without it."""
    package = import_module("cudnn.flex_attention")
    execution = import_module("cudnn.flex_attention.execution")
    return IntervalOperators(
        package.create_mask_plan, execution._flex_attention_forward, execution._flex_attention_backward
    )


class CudnnFlex(Executor):
    """Call cuDNN's flex attention, on sm_90 and sm_100, for windows and variable lengths."""

    name, tokens_first = "cuDNN-flex", True

    def __init__(self, operators: IntervalOperators, platform: Platform | None = None) -> None:
        super().__init__(widths=CUDNN_FLEX_WIDTHS)
        self._intervals, self._platform = operators, platform or Platform()
        self.calls_aten = False
        self._plans: dict[tuple[object, ...], tuple[FlashCall, Any]] = {}

    def takes(self, call: FlashCall, sizes: CallSizes) -> bool:
        # Whole rectangles and triangles are the dense kernels' own.
        is_sparse = bool(call.q_ends) or call.left != OPEN
        return is_sparse and self._platform.generation in (9, 10)

    def forward(
        self, views: Views, call: FlashCall, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        operands = (
            views.once(view_tokens_first, (q,), call.q_rows), view_tokens_first(k, call.k_rows),
            view_tokens_first(v, call.k_rows),
        )  # fmt: skip
        plan = self._get_plan(call, *operands)
        out, lse, *_ = self._intervals.forward(
            *operands, mask_plan=plan, softmax_scale=scale, return_lse=True
        )
        if call.is_plain:
            return out.transpose(1, 2), lse
        if call.has_empty_rows:
            lse = lse.masked_fill(lse == INFINITY, -INFINITY)
        whole = replace(call, q_ends=(), k_ends=())  # rows keep their place; the plan has the sequences
        return restore_shape(out, call.q_rows, len(q), whole), restore_lse(lse, whole, len(q))

    def backward(
        self, views: Views, call: FlashCall, queries: BackwardInputs, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, keys = call.q_rows, call.k_rows
        grad_out, q, out, lse = views.once(select_inputs, queries, view_tokens_first, rows, call.bias, False)
        operands = q, view_tokens_first(k, keys), view_tokens_first(v, keys)
        plan = self._get_plan(call, *operands)
        dq, dk, dv, *_ = self._intervals.backward(
            *operands, out, grad_out, lse,
            mask_plan=plan, softmax_scale=scale, deterministic=needs_equal_bits(),
        )  # fmt: skip
        if call.is_plain:
            return dq, dk, dv
        samples, whole = len(queries.q), replace(call, q_ends=(), k_ends=())
        return (
            restore_shape(dq, rows, samples, whole),
            restore_shape(dk, keys, samples, whole),
            restore_shape(dv, keys, samples, whole),
        )

    def _get_plan(self, call: FlashCall, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Return the plan of a call for such tensors; both passes and all layers share it."""
        key = (id(call), q.device, q.dtype, q.shape, k.shape, v.shape)
        if key not in self._plans:
            intervals = np.tile(find_key_intervals(call), (1, len(q)))
            # [0, 0) and [first, end): the package's endpoints begin with the end of an interval from 0 on
            mask = np.concatenate([np.zeros_like(intervals[:1]), intervals])[None].astype(np.int32)
            mask_func = to_device(torch.from_numpy(mask), q.device)
            if len(self._plans) >= MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
            # With its call, so that no other call gets its id.
            self._plans[key] = call, self._intervals.plan(mask_func, q, k, v, build_backward=True)
        return self._plans[key][1]


def find_key_intervals(call: FlashCall) -> np.ndarray:
    """Return the first key and the end of the keys of each query of one repetition, int64 [2, queries]."""
    first, end = np.zeros((2, call.q_rows.length), dtype=np.int64)
    q_at = k_at = 0
    for queries, keys in call.lengths:
        shift, index = keys - queries, np.arange(queries)
        begin = index * 0 if call.left == OPEN else np.maximum(index + shift - call.left, 0)
        stop = index * 0 + keys if call.right == OPEN else np.minimum(index + shift + call.right + 1, keys)
        is_empty = begin >= stop
        first[q_at : q_at + queries] = np.where(is_empty, 0, begin + k_at)
        end[q_at : q_at + queries] = np.where(is_empty, 0, stop + k_at)
        q_at, k_at = q_at + queries, k_at + keys
    return np.stack([first, end])
