"""Attend by FlexAttention, forward and backward, compiled once for all hops and layers.

Owns the kernel; the functions that are compiled are flex_calls.py's. What is attended comes as tensors
(`runtime/block_mask.py`): a compiled function sees no number that differs from hop to hop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import FlexKernelOptions

from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.masks.score_mod import Scores
from ds_ring.masks.tiles import Tiles
from ds_ring.runtime.block_mask import HopMask, HopTensors, hop_mask
from ds_ring.runtime.kernels.flex_calls import compiled_calls
from ds_ring.runtime.kernels.flex_masks import ScoreTensors
from ds_ring.runtime.kernels.interface import PartialGrads, PartialOut, Rows
from ds_ring.runtime.to_device import numbers_on

ALL_HEADS = slice(None)
BLOCK = 128  # side of a block, slots: FlexAttention's own
SHORTEST = 128  # queries; Inductor compiles anew for fewer, whatever BACKEND says (torch 2.13)
INTERNAL = {"OUTPUT_LOGSUMEXP", "OUTPUT_MAX"}  # options that this kernel sets itself
DEFAULTS = {  # those of the public call, which this one goes past
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
_log = logging.getLogger(__name__)


class FlexKernel:
    """Call FlexAttention over blocks.

    Args:
        block_size: side of a block in slots.
        backend: of torch.compile; None computes densely without compiling, on any device, for tests.
        recompute: differentiate a recomputed hop; None does so where the operator cannot be compiled.
        scores: how scores are changed; None for not.
        kernel_options: FlexAttention's `kernel_options`.
    """

    name = "flex"

    def __init__(
        self,
        block_size: int = BLOCK,
        backend: str | None = "inductor",
        recompute: bool | None = None,
        scores: Scores | None = None,
        **kernel_options: Any,
    ) -> None:
        self._scores = scores
        self._options = DEFAULTS | _checked_options(kernel_options)
        self._natural = self._options.get("BACKEND") == "FLASH"
        self._block = block_size
        self._calls = compiled_calls(backend)
        # Where Dynamo derives a joint graph, `slopes[head]` of a caller's function would read a number.
        able = operator_compiles() and scores is None
        self._recompute = recompute if recompute is not None else bool(backend) and not able
        if self._recompute:
            _log.warning(
                "ds_ring: kernel 'flex' computes every hop again in the backward pass (29 %% more FLOPs):"
                " torch %s does not compile flex_attention_backward by itself with %s",
                torch.__version__,
                "a score_mod" if scores is not None else "any function; torch 2.13 does",
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        if not len(tiles):
            return
        mask = self._mask(q, tiles)
        k, v = (_part(x, mask.k_rows) for x in (k, v))
        with torch.no_grad(), _no_autocast(q):
            out, lse = self._attend(_part(q, mask.q_rows), k, v, mask, scale)
        yield PartialOut(ALL_HEADS, _rows(mask.q_rows), out, lse)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        if not len(tiles):
            return
        mask = self._mask(q, tiles)
        grad_out, q, out, lse = (_part(x, mask.q_rows) for x in (grad_out, q, out, lse))
        k, v = (_part(x, mask.k_rows) for x in (k, v))
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # of rows that see nothing: no NaN is formed
        if grad_lse is not None:
            grad_lse = _part(grad_lse, mask.q_rows)
        call = self._recomputed if self._recompute else self._operator
        with _no_autocast(q):
            dq, dk, dv = call(grad_out, q, out, lse, k, v, mask, scale, grad_lse)
        yield PartialGrads(ALL_HEADS, _rows(mask.q_rows), _rows(mask.k_rows), dq, dk, dv)

    def of_heads(self, heads: slice) -> FlexKernel:
        if self._scores is None:
            return self
        found = copy(self)
        found._scores = self._scores.of(heads)
        return found

    def executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        if not len(tiles):
            return 0
        mask = hop_mask(tiles, self._block, torch.device("cpu"))
        tensors = mask.tensors
        # int32 [1, heads, rows]: the mean over the heads is the figure of one head.
        counts = tensors.partial_rows.counts + tensors.full_rows.counts
        return int(counts.sum()) * mask.block**2 // counts.shape[1]

    def _mask(self, q: Tensor, tiles: Tiles) -> HopMask:
        if q.shape[-1] < 16 and q.device.type != "cpu":
            raise RingShapeError(
                f'kernel "flex": expected a head_dim of at least 16, got {q.shape[-1]}; use "reference"'
            )
        shortest, scored = min(q.shape[2], SHORTEST), self._scores is not None
        return hop_mask(tiles, self._block, q.device, shortest, q.shape[2], scored)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: HopMask, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one hop, the lse natural."""
        out, lse = self._calls.forward(
            q, k, v, _marked(mask.tensors), self._score_tensors(q), str(mask.block), scale, self._options
        )
        return out, lse if self._natural else lse * math.log(2)

    def _score_tensors(self, q: Tensor) -> ScoreTensors | None:
        if self._scores is None:
            return None
        return ScoreTensors(self._scores.mod.function, numbers_on(tuple(self._scores.heads), q.device))

    @torch.enable_grad()  # or a score_mod's joint graph would have no gradient; no input requires one
    def _operator(
        self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, mask: HopMask,
        scale: float, grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return (dq, dk, dv) by the operator; the lse is finite."""
        if not self._natural:  # of the lse in base 2, and its gradient
            lse = _dynamic(lse / math.log(2), 2)
            grad_lse = None if grad_lse is None else _dynamic(grad_lse * math.log(2), 2)
        tensors, how = _marked(mask.tensors), (self._score_tensors(q), str(mask.block), scale, self._options)
        return self._calls.backward(grad_out, q, k, v, out, lse, grad_lse, tensors, *how)

    @torch.enable_grad()
    def _recomputed(
        self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, mask: HopMask,
        scale: float, grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the same by autograd of a recomputed hop; see [Note: the backward operator]."""
        leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        out_hop, lse_hop = self._attend(*leaves, mask, scale)
        with torch.no_grad():
            weight = torch.exp(lse_hop - lse).unsqueeze(-1)
            grad = grad_out.to(weight.dtype)
            of_lse = (weight * grad * (out_hop.to(weight.dtype) - out)).sum(-1)
            if grad_lse is not None:  # d lse / d lse_hop = w
                of_lse = of_lse + weight.squeeze(-1) * grad_lse
        return torch.autograd.grad((out_hop, lse_hop), leaves, ((weight * grad).to(out_hop.dtype), of_lse))


def operator_compiles() -> bool:
    """Return True if Dynamo derives the operator's joint graph; [Note: the backward operator]."""
    from torch._dynamo.variables.higher_order_ops import FlexAttentionBackwardHighOrderVariable

    return hasattr(FlexAttentionBackwardHighOrderVariable, "_derive_joint_graph")


def _checked_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return FlexAttention's options; the kernel for many queries unless another one is asked for."""
    known = set(FlexKernelOptions.__annotations__) - INTERNAL
    for option in given:
        if option.removeprefix("fwd_").removeprefix("bwd_") not in known:
            raise RingConfigError(
                f'kernel_options of kernel "flex": unknown option {option!r} for torch {torch.__version__};'
                f" expected some of {', '.join(sorted(known))}, or one with fwd_ or bwd_ before it"
            )
    if "BACKEND" in given or "FORCE_USE_FLEX_ATTENTION" in given:
        return given
    # "AUTO" would choose by the number of queries, and compile again
    return given | ({"BACKEND": "TRITON"} if "BACKEND" in known else {"FORCE_USE_FLEX_ATTENTION": True})


def _rows(first_and_length: tuple[int, int]) -> Rows:
    first, length = first_and_length
    return Rows(first, 1, length)


def _part(x: Tensor, rows: tuple[int, int]) -> Tensor:
    """Return slots of x [B, heads, S, ...], contiguous and marked; [Note: one compilation]."""
    first, length = rows
    part = x.detach()[:, :, first : first + length].contiguous()
    strides = [math.prod(part.shape[dim + 1 :]) for dim in range(part.dim())]  # of sizes of 1 as well
    return _dynamic(part.as_strided(part.shape, strides), 2)


def _dynamic(x: Tensor, *dims: int) -> Tensor:
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def _marked(tensors: HopTensors) -> HopTensors:
    """Return the same tensors, their token and block dimensions marked as dynamic (once: marks stay)."""
    for tokens in (tensors.q, tensors.k):
        _dynamic(tokens.position, 0)
        for labels in tokens.labels:
            _dynamic(labels, 1)
    for table in (tensors.partial_rows, tensors.full_rows, tensors.partial_columns, tensors.full_columns):
        _dynamic(table.counts, 2)
        _dynamic(table.blocks, 2, 3)
    return tensors


def _no_autocast(x: Tensor) -> torch.autocast:
    """Turn autocast off: inputs are computed in their own dtype; the operator would cast them."""
    return torch.autocast(x.device.type, enabled=False)
