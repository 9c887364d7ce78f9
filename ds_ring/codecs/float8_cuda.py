"""Round rows of K and V to float8 and back in one launch each: Triton kernels for CUDA tensors.

Owns the kernels and their launches; `float8.py` owns the format, and its operators make the same bytes. Needs
triton, which torch's CUDA wheels install. The conversions are integer arithmetic, because GPUs before sm_89
have no instruction for float8. (Interpreted on the CPU by `tests/unit/codecs/test_float8.py`, and compiled
for sm_80, sm_90 and sm_100 by `tools/verify_cuda_kernels.py`; the bits of an H200 are the CPU's.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # of K or V that one program converts at once


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


# `tl.reduce` and not `tl.max`, which Triton's interpreter runs only where triton was imported for it.
@triton.jit
def _encoded(x, inside):  # type: ignore[no-untyped-def]
    """Return the bytes of rows x [ROWS, WIDTH] of float32, and their exponents [ROWS]."""
    magnitude = tl.abs(x)
    is_finite = tl.reduce((inside & ~(magnitude < float("inf"))).to(tl.int32), 1, _larger) == 0
    largest = tl.reduce(tl.where(magnitude < float("inf"), magnitude, 0.0), 1, _larger)
    bits = largest.to(tl.int32, bitcast=True)
    # m * 2^e with 0.5 <= m < 1; the division makes the largest magnitude at most 448 = 0.875 * 2^9
    e = tl.where(largest == 0.0, 0, tl.maximum(bits >> 23, 0) - 126)
    exponent = e - tl.where((bits & 0x7FFFFF) <= 0x600000, 9, 8)
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    power = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(is_finite[:, None], x * power[:, None], 0.0)
    bits = scaled.to(tl.int32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    normal = ((rest + 0x7FFFF + ((rest >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9: adding 1.5 * 2^23 rounds to them.
    small = (tl.abs(scaled) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.where(rest >= 0x3C800000, normal, small) | ((bits >> 24) & 0x80)
    code = tl.where(is_finite[:, None], code, 0x7F)
    return code.to(tl.uint8), tl.where(is_finite, exponent, -128).to(tl.int8).to(tl.uint8, bitcast=True)


@triton.jit
def _decoded(code, exponent, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return rows [ROWS, WIDTH] of float32; HALF: clamped to what float16 has, as far as they are finite."""
    code = code.to(tl.int32)
    rest = code & 0x7F
    normal = ((rest << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(rest < 8, rest.to(tl.float32) * 0.001953125, normal)
    value = tl.where(code >= 0x80, -value, value)
    exponent = exponent.to(tl.int8, bitcast=True).to(tl.int32)
    value = value * ((exponent + 127) << 23).to(tl.float32, bitcast=True)[:, None]
    if HALF:
        clamped = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
        value = tl.where((exponent != -128)[:, None], clamped, value)
    return value


@triton.jit
def _located(rows, groups, samples, r0, r1, r2, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return which ROWS rows this program has: whether each exists, its place, and where its bytes begin."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group, rest = row % groups, row // groups
    sample, slot = rest % samples, rest // samples
    return row < rows, sample, group, slot, slot * r0 + sample * r1 + group * r2


@triton.jit
def _elements(  # type: ignore[no-untyped-def]
    x, sample, group, slot, there, x0, x1, x2, x3, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Return the column, the addresses and the mask of the elements [ROWS, WIDTH] of K or of V."""
    at = tl.arange(0, WIDTH)
    where = x + (sample * x0 + group * x1 + slot * x2)[:, None] + (at * x3)[None, :]
    return at, where, there[:, None] & (at < DIM)[None, :]


@triton.jit
def _encode_part(at, where, inside, to, to_exponent, there):  # type: ignore[no-untyped-def]
    code, exponent = _encoded(tl.load(where, mask=inside, other=0.0).to(tl.float32), inside)
    tl.store(to[:, None] + at[None, :], code, mask=inside)
    tl.store(to_exponent, exponent, mask=there)


@triton.jit
def _decode_part(at, where, inside, of, of_exponent, there, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    code = tl.load(of[:, None] + at[None, :], mask=inside, other=0)
    x = _decoded(code, tl.load(of_exponent, mask=there, other=0), HALF)
    tl.store(where, x.to(where.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "groups", "samples"])
def encode_rows(  # type: ignore[no-untyped-def]
    k, v, into, rows, groups, samples, k0, k1, k2, k3, v0, v1, v2, v3, r0, r1, r2,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Encode ROWS rows of K and of V; k, v and r are the strides of the operands, in elements."""
    there, sample, group, slot, offset = _located(rows, groups, samples, r0, r1, r2, ROWS)
    to, ends = into + offset, into + offset + K_DIM + V_DIM
    at, where, inside = _elements(k, sample, group, slot, there, k0, k1, k2, k3, K_DIM, K_WIDTH)
    _encode_part(at, where, inside, to, ends, there)
    at, where, inside = _elements(v, sample, group, slot, there, v0, v1, v2, v3, V_DIM, V_WIDTH)
    _encode_part(at, where, inside, to + K_DIM, ends + 1, there)


@triton.jit(do_not_specialize=["rows", "groups", "samples"])
def decode_rows(  # type: ignore[no-untyped-def]
    source, k, v, rows, groups, samples, r0, r1, r2, k0, k1, k2, k3, v0, v1, v2, v3,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Decode ROWS rows of K and of V; the strides are those of `encode_rows`."""
    there, sample, group, slot, offset = _located(rows, groups, samples, r0, r1, r2, ROWS)
    of, ends = source + offset, source + offset + K_DIM + V_DIM
    at, where, inside = _elements(k, sample, group, slot, there, k0, k1, k2, k3, K_DIM, K_WIDTH)
    _decode_part(at, where, inside, of, ends, there, HALF)
    at, where, inside = _elements(v, sample, group, slot, there, v0, v1, v2, v3, V_DIM, V_WIDTH)
    _decode_part(at, where, inside, of + K_DIM, ends + 1, there, HALF)


def make_constants(k_dim: int, v_dim: int) -> dict[str, int]:
    """Return the constants of a launch for these head dimensions."""
    k_width, v_width = (1 << max(dim - 1, 0).bit_length() for dim in (k_dim, v_dim))
    at_once = max(1, ELEMENTS // max(k_width, v_width))
    return {"K_DIM": k_dim, "V_DIM": v_dim, "K_WIDTH": k_width, "V_WIDTH": v_width, "ROWS": at_once}


def encode(k: Tensor, v: Tensor, rows: Tensor) -> None:
    """Write rows as `Float8Rows.encode` does; returns before the device is done."""
    strides, sizes = (*k.stride(), *v.stride(), *rows.stride()[:3]), make_constants(k.shape[3], v.shape[3])
    samples, groups, slots, _ = k.shape
    if count := samples * groups * slots:
        grid = (triton.cdiv(count, sizes["ROWS"]),)
        encode_rows[grid](k, v, rows, count, groups, samples, *strides, **sizes)


def decode(rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Write K and V as `Float8Rows.decode` does; returns before the device is done."""
    strides, sizes = (*rows.stride()[:3], *k.stride(), *v.stride()), make_constants(k.shape[3], v.shape[3])
    samples, groups, slots, _ = k.shape
    if count := samples * groups * slots:
        grid, half = (triton.cdiv(count, sizes["ROWS"]),), k.dtype == torch.float16
        decode_rows[grid](rows, k, v, count, groups, samples, *strides, **sizes, HALF=half)
