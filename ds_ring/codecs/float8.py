"""The codec "float8": round K and V to float8 with one power of two for each row ([Note: float8 rows]).

`KV_PAYLOADS` in `plugin.py` has its row, `Codec` in `ring/pair.py` is its interface.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ds_ring.comm.streams import is_fake

_log = logging.getLogger(__name__)

# [Note: float8 rows] A row of K (or V) of one token and head is rounded to float8 (e4m3fn; Micikevicius et
# al. 2022, FP8 formats) after a division by a power of two: the smallest one that brings its largest
# magnitude to at most 448. The power's exponent is kept as a byte, as in the OCP Microscaling formats (there
# for 32 elements, here for a row). The division of float32 and narrower ones is exact, so each element is
# rounded once: by at most 1/16 of its magnitude, or 2^-10 times the power. (float64 is float32 before that.)
FLOAT8, MAX_FLOAT8 = torch.float8_e4m3fn, 448.0
BIAS = 127  # of the exponents of float32
NOT_FINITE = -128  # exponent whose power is infinite
ROWS_AT_ONCE = 2048  # slots whose rows are rounded at once, in memory that is small against a message


def _make_powers(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^n exactly, n from -126 to 127; -inf for NOT_FINITE."""
    return ((exponents.int() + BIAS) << 23).view(torch.float32).to(dtype)


def _kernels_for(x: Tensor) -> Any:
    """Return the module of the Triton kernels for a tensor; None if torch's operators have to do."""
    return _kernels() if x.is_cuda and not is_fake(x) else None


@cache
def _kernels() -> Any:
    """Return the module of the Triton kernels; None, with a warning, if triton cannot be loaded."""
    try:
        return import_module("ds_ring.codecs.float8_cuda")
    except ImportError as error:
        _log.warning(
            'ds_ring: "kv_payload": "float8" rounds by torch\'s operators, about 60 launches a message, since'
            " its kernels cannot be loaded (%r); install triton beside torch's CUDA build", error,
        )  # fmt: skip
        return None


class Float8Rows:
    """Write each row of K and of V as float8 elements and one exponent; see `Codec`."""

    @staticmethod
    def encode(k: Tensor, v: Tensor, rows: Tensor) -> None:
        """Round K and V to float8; see [Note: float8 rows].

        Args:
            k, v: [B, G, slots, D] and [B, G, slots, E].
            rows: [slots, B, G, D + E + 2] of bytes: the elements, then the exponents of both powers.
                Rows with an infinity or a NaN become infinities and NaN, of any sign.
        """
        kernels = _kernels_for(k)
        if kernels is not None:
            return kernels.encode(k, v, rows)
        sides = (k, 2), (v, 2), (rows, 0)
        for *tensors, into in zip(*(x.split(ROWS_AT_ONCE, dim) for x, dim in sides), strict=True):
            start = 0
            for number, x in enumerate(tensors):
                end, x = start + x.shape[3], x.permute(2, 0, 1, 3)
                x = x if x.dtype == torch.bfloat16 else x.float()
                largest = torch.linalg.vector_norm(x, math.inf, dim=3, keepdim=True)
                m, e = torch.frexp(largest.float())  # m * 2^e with 0.5 <= m < 1
                exponents = torch.where(m <= MAX_FLOAT8 / 2**9, e - 9, e - 8).clamp_(1 - BIAS, BIAS - 1)
                exponents.masked_fill_(~largest.isfinite(), NOT_FINITE)
                into[..., start:end].view(FLOAT8).copy_(x * _make_powers(-exponents, x.dtype))
                into[..., number - 2 : number - 1 or None].copy_(exponents.to(torch.int8).view(torch.uint8))
                start = end

    @staticmethod
    def decode(rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the K and V that `encode` rounded, in its shapes."""
        kernels = _kernels_for(k)
        if kernels is not None:
            return kernels.decode(rows, k, v)
        pieces = zip(*(x.split(ROWS_AT_ONCE, dim) for x, dim in ((rows, 0), (k, 2), (v, 2))), strict=True)
        for row_bytes, *tensors in pieces:
            start = 0
            for number, target in enumerate(tensors):
                end, target = start + target.shape[3], target.permute(2, 0, 1, 3)
                exponents = row_bytes[..., number - 2 : number - 1 or None].view(torch.int8)
                elements, start = row_bytes[..., start:end].view(FLOAT8), end
                if (
                    target.dtype == torch.float16
                ):  # has not all of these powers; 65504 would round up to infinity
                    wide, most = _make_powers(exponents, torch.float32), torch.finfo(torch.float16).max
                    values = elements.float().mul_(wide)
                    target.copy_(torch.where(wide.isfinite(), values.clamp(-most, most), values))
                else:
                    target.copy_(elements).mul_(_make_powers(exponents, target.dtype))
