"""Merge or add partial results in one pass over memory: a Triton kernel for CUDA tensors.

Owns the kernel and its launch; `ring/merge.py` owns the formula. Needs triton, which torch's CUDA wheels
install; nothing imports this module where there are no CUDA tensors. Each element of every part
is loaded once and that of the result stored once. So a merge of four parts in 16 bits into float32 moves 12
bytes an element of the output, one after the other into an accumulator they would move 36 (and by torch's
operators 84). One H200 has run it (`tools/results/gpu_h200.md`); tests/unit/cuda/test_merge.py interprets it.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # of the output that one program merges
ROW_DIMS = 4  # of the output but the last: [batch, repeats, heads, tokens]
MAX_PARTS = 5  # of one launch; as in `ring/merge.py`


@triton.jit
def _load_lse(lse, i0, i1, i2, i3, s0, s1, s2, s3, there):  # type: ignore[no-untyped-def]
    return tl.load(lse + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3, mask=there, other=float("-inf"))


@triton.jit
def _load_rows(  # type: ignore[no-untyped-def]
    part, i0, i1, i2, i3, p0, p1, p2, p3, p4, column, inside, dtype: tl.constexpr
):
    at = part + (i0 * p0 + i1 * p1 + i2 * p2 + i3 * p3)[:, None] + (column * p4)[None, :]
    return tl.load(at, mask=inside, other=0.0).to(dtype)


# Triton compiles a variant for a number that is 1, a multiple of 16 or another one, except for those named
# here: sizes and strides of lse differ from hop to hop. Those of the outputs make accesses wide.
@triton.jit(
    do_not_specialize=[
        "rows", "n1", "n2", "n3", "l0", "l1", "l2", "s0", "s1", "s2", "t0", "t1", "t2", "u0", "u1", "u2",
        "v0", "v1", "v2", "w0", "w1", "w2",
    ]
)  # fmt: skip
def merge_rows(  # type: ignore[no-untyped-def]
    out, lse, part_a, part_b, part_c, part_d, part_e, lse_a, lse_b, lse_c, lse_d, lse_e, rows, n1, n2, n3,
    o0, o1, o2, o3, o4, a0, a1, a2, a3, a4, b0, b1, b2, b3, b4, c0, c1, c2, c3, c4, d0, d1, d2, d3, d4,
    e0, e1, e2, e3, e4, l0, l1, l2, l3, s0, s1, s2, s3, t0, t1, t2, t3, u0, u1, u2, u3, v0, v1, v2, v3,
    w0, w1, w2, w3, PARTS: tl.constexpr, ADD: tl.constexpr, DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of HEAD_DIM elements of PARTS parts, or ADD them, in DTYPE.

    o and l are the strides of the results, a to e those of the parts and s to w those of their lse, in
    elements. A result may be one of the parts.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    i3, rest = row % n3, row // n3
    i2, rest = rest % n2, rest // n2
    i1, i0 = rest % n1, rest // n1
    column = tl.arange(0, WIDTH)
    inside = there[:, None] & (column < HEAD_DIM)[None, :]
    weight_a = tl.full((ROWS,), 1.0, DTYPE)
    weight_b, weight_c, weight_d, weight_e = weight_a, weight_a, weight_a, weight_a
    if not ADD:
        weight_a = _load_lse(lse_a, i0, i1, i2, i3, s0, s1, s2, s3, there).to(DTYPE)
        most = weight_a
        if PARTS > 1:
            weight_b = _load_lse(lse_b, i0, i1, i2, i3, t0, t1, t2, t3, there).to(DTYPE)
            most = tl.maximum(most, weight_b)
        if PARTS > 2:
            weight_c = _load_lse(lse_c, i0, i1, i2, i3, u0, u1, u2, u3, there).to(DTYPE)
            most = tl.maximum(most, weight_c)
        if PARTS > 3:
            weight_d = _load_lse(lse_d, i0, i1, i2, i3, v0, v1, v2, v3, there).to(DTYPE)
            most = tl.maximum(most, weight_d)
        if PARTS > 4:
            weight_e = _load_lse(lse_e, i0, i1, i2, i3, w0, w1, w2, w3, there).to(DTYPE)
            most = tl.maximum(most, weight_e)
        # The largest one is subtracted first, so any gap is exact; of rows without keys 0 is, so no NaN.
        base = tl.where(most == float("-inf"), 0.0, most)
        weight_a = tl.exp(weight_a - base)
        total = weight_a
        if PARTS > 1:
            weight_b = tl.exp(weight_b - base)
            total += weight_b
        if PARTS > 2:
            weight_c = tl.exp(weight_c - base)
            total += weight_c
        if PARTS > 3:
            weight_d = tl.exp(weight_d - base)
            total += weight_d
        if PARTS > 4:
            weight_e = tl.exp(weight_e - base)
            total += weight_e
        at_lse = lse + i0 * l0 + i1 * l1 + i2 * l2 + i3 * l3
        tl.store(at_lse, base + tl.log(total), mask=there)
        factor = 1.0 / tl.where(total == 0.0, 1.0, total)
        weight_a, weight_b, weight_c = weight_a * factor, weight_b * factor, weight_c * factor
        weight_d, weight_e = weight_d * factor, weight_e * factor
    summed = _load_rows(part_a, i0, i1, i2, i3, a0, a1, a2, a3, a4, column, inside, DTYPE) * weight_a[:, None]
    if PARTS > 1:
        part = _load_rows(part_b, i0, i1, i2, i3, b0, b1, b2, b3, b4, column, inside, DTYPE)
        summed += part * weight_b[:, None]
    if PARTS > 2:
        part = _load_rows(part_c, i0, i1, i2, i3, c0, c1, c2, c3, c4, column, inside, DTYPE)
        summed += part * weight_c[:, None]
    if PARTS > 3:
        part = _load_rows(part_d, i0, i1, i2, i3, d0, d1, d2, d3, d4, column, inside, DTYPE)
        summed += part * weight_d[:, None]
    if PARTS > 4:
        part = _load_rows(part_e, i0, i1, i2, i3, e0, e1, e2, e3, e4, column, inside, DTYPE)
        summed += part * weight_e[:, None]
    at_out = out + (i0 * o0 + i1 * o1 + i2 * o2 + i3 * o3)[:, None] + (column * o4)[None, :]
    tl.store(at_out, summed.to(out.dtype.element_ty), mask=inside)


def launch(out: Tensor, lse: Tensor | None, parts: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Merge as `ring.merge.merge_parts_` does, or add without `lse`; out [..., tokens, head_dim].

    It has at most five dimensions, and none has to be dense. No two rows of `out` may be one. Returns before
    the device is done.
    """
    shapes = [(out.shape, None if lse is None else lse.shape)]
    shapes += [(part.shape, None if of is None else of.shape) for part, of in parts]
    assert len(set(shapes)) == 1 and shapes[0][1] in (None, out.shape[:-1]), shapes
    assert out.dim() <= ROW_DIMS + 1 and 0 < len(parts) <= MAX_PARTS, (out.shape, len(parts))
    missing, rows, head_dim = ROW_DIMS + 1 - out.dim(), out[..., 0].numel(), out.shape[-1]
    if not rows:
        return
    add = lse is None
    pairs = [*parts, *[parts[0]] * (MAX_PARTS - len(parts))]
    outputs = [part for part, _ in pairs]
    sums = [out] * (1 + MAX_PARTS) if lse is None else [lse, *(of for _, of in pairs if of is not None)]
    sizes, none = (1,) * missing + tuple(out.shape[:-1]), (0,) * missing
    strides = [step for tensor in (out, *outputs) for step in none + tensor.stride()]
    strides += [step for tensor in sums for step in (none + tensor.stride())[:ROW_DIMS]]
    wide = tl.float64 if out.element_size() == 8 else tl.float32
    width = 1 << max(head_dim - 1, 0).bit_length()
    at_once = max(1, ELEMENTS // width)
    merge_rows[(triton.cdiv(rows, at_once),)](
        out, sums[0], *outputs, *sums[1:], rows, *sizes[1:], *strides,
        PARTS=len(parts), ADD=add, DTYPE=wide, HEAD_DIM=head_dim, WIDTH=width, ROWS=at_once,
    )  # fmt: skip
