"""Merge two partial results in one pass over memory: the Triton kernel behind `merge_` on CUDA tensors.

Owns the kernel and its launch; the formula and its conventions are `merge.py`'s. Needs triton, which torch's
CUDA wheels install; nothing imports this module where there are no CUDA tensors. Each element of the
accumulator is loaded and stored once and each of the part loaded once: 10 bytes an element for a part in 16
bits (torch's operators move 26). (`tools/verify_merge.py` compiles it for sm_90 and interprets it on the CPU;
it has not run on a GPU.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # of the output that one program merges
ROW_DIMS = 4  # of the output but the last: [batch, repeats, heads, tokens]


# Triton compiles a variant for a number that is 1, a multiple of 16 or another one, except for those named
# here: sizes and strides of lse differ from hop to hop. Those of the outputs make accesses wide.
@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3", "l0", "l1", "l2", "s0", "s1", "s2"])
def merge_rows(  # type: ignore[no-untyped-def]
    out, lse, part_out, part_lse, rows, n1, n2, n3,
    o0, o1, o2, o3, o4, l0, l1, l2, l3, p0, p1, p2, p3, p4, s0, s1, s2, s3,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of HEAD_DIM elements; o, l, p and s are the strides of the four tensors in elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    i3, rest = row % n3, row // n3
    i2, rest = rest % n2, rest // n2
    i1, i0 = rest % n1, rest // n1
    at_lse = lse + i0 * l0 + i1 * l1 + i2 * l2 + i3 * l3
    old = tl.load(at_lse, mask=there, other=float("-inf"))
    at_part = part_lse + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3
    new = tl.load(at_part, mask=there, other=float("-inf")).to(old.dtype)
    # The larger one is subtracted first, so any gap is exact; of rows without keys 0 is, so no NaN is formed.
    most = tl.maximum(old, new)
    base = tl.where(most == float("-inf"), 0.0, most)
    old_weight, new_weight = tl.exp(old - base), tl.exp(new - base)
    total = old_weight + new_weight
    tl.store(at_lse, base + tl.log(total), mask=there)
    total = tl.where(total == 0.0, 1.0, total)
    column = tl.arange(0, WIDTH)
    inside = there[:, None] & (column < HEAD_DIM)[None, :]
    at_out = out + (i0 * o0 + i1 * o1 + i2 * o2 + i3 * o3)[:, None] + (column * o4)[None, :]
    at_part_out = part_out + (i0 * p0 + i1 * p1 + i2 * p2 + i3 * p3)[:, None] + (column * p4)[None, :]
    summed = tl.load(at_out, mask=inside, other=0.0) * (old_weight / total)[:, None]
    part = tl.load(at_part_out, mask=inside, other=0.0).to(summed.dtype)
    tl.store(at_out, summed + part * (new_weight / total)[:, None], mask=inside)


def launch(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge as `merge.merge_` does: out [..., tokens, head_dim], lse [..., tokens], at most four such dims.

    No dimension has to be dense, no two rows of `out` may be one; returns before the device is done.
    """
    shapes = (out.shape, lse.shape, part_out.shape, part_lse.shape)
    assert out.dim() <= ROW_DIMS + 1 and shapes[:2] == (shapes[2], shapes[3]), shapes
    assert lse.shape == out.shape[:-1], shapes
    missing, rows, head_dim = ROW_DIMS + 1 - out.dim(), lse.numel(), out.shape[-1]
    if not rows:
        return
    sizes, none = (1,) * missing + tuple(lse.shape), (0,) * missing
    strides = (none + x.stride() for x in (out, lse, part_out, part_lse))
    width = 1 << max(head_dim - 1, 0).bit_length()
    at_once = max(1, ELEMENTS // width)
    merge_rows[(triton.cdiv(rows, at_once),)](
        out, lse, part_out, part_lse, rows, *sizes[1:], *(step for one in strides for step in one),
        HEAD_DIM=head_dim, WIDTH=width, ROWS=at_once,
    )  # fmt: skip
