"""Merge parts: attention of the same queries over disjoint keys.

    lse = logaddexp(lse1, lse2),  out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)

(Liu et al. 2023, Ring Attention, section 3; Dao et al. 2022, FlashAttention, for the online softmax.)
A row without keys has out 0 and lse -inf. If a row has no key in either part, the merged lse is -inf, and
(-inf) - (-inf) is NaN. So the least finite number replaces a merged lse of -inf in the weights. `logaddexp`
subtracts the maximum first, so lse1 and lse2 may differ by any amount. (`log1p(exp(lse2 - lse1))` overflows
in float32 at a difference of 89.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ds_ring.comm.streams import is_fake
from ds_ring.plugin import DEVICES, load

Part = Sequence[Any]  # (out, lse) over some of the keys; or (gradient, None)
MAX_PARTS = 5  # parts of one merge, the accumulator included; the Triton kernel has as many parameters
_log = logging.getLogger(__name__)


def make_empty_results(q_BHSD: Tensor, value_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention over no key, for other parts to be merged into.

    Args:
        q_BHSD: queries.
        value_dim: head dimension of the values.
        dtype: of the output.

    Returns:
        out, filled with 0; lse, filled with -inf, in the accumulators' dtype.
    """
    out = q_BHSD.new_zeros((*q_BHSD.shape[:-1], value_dim), dtype=dtype)
    lse = q_BHSD.new_full(q_BHSD.shape[:-1], float("-inf"), dtype=get_accumulator_dtype(q_BHSD.dtype))
    return out, lse


def assign_(out_BHSD: Tensor, lse_BHS: Tensor, part_out_BHSD: Tensor, part_lse_BHS: Tensor) -> None:
    """Write the first partial result of some rows into uninitialised accumulators; see `merge_`."""
    out_BHSD.copy_(part_out_BHSD)
    lse_BHS.copy_(part_lse_BHS)


def merge_(out_BHSD: Tensor, lse_BHS: Tensor, part_out_BHSD: Tensor, part_lse_BHS: Tensor) -> None:
    """Merge a part into an accumulator, in place; on CUDA in one pass over memory.

    Args:
        out_BHSD: the accumulator's out, [B, H, S, D], any strides, float32 or float64; changed. A dim of
            repeats may follow the first dim (`Rows` in `kernels/interface.py`).
        lse_BHS: the accumulator's lse, [B, H, S], the dtype of out; changed.
        part_out_BHSD, part_lse_BHS: the part, over keys that no earlier part has, in any dtype; not changed.
    """
    if out_BHSD.is_cuda and not is_fake(out_BHSD):
        merge_parts_(out_BHSD, lse_BHS, [(out_BHSD, lse_BHS), (part_out_BHSD, part_lse_BHS)])
    else:
        merge_by_operators_(out_BHSD, lse_BHS, part_out_BHSD, part_lse_BHS)


def merge_by_operators_(
    out_BHSD: Tensor, lse_BHS: Tensor, part_out_BHSD: Tensor, part_lse_BHS: Tensor
) -> None:
    """Merge as `merge_` does, by torch's operators on any device."""
    part_lse_BHS = part_lse_BHS.to(lse_BHS.dtype)
    merged_BHS = torch.logaddexp(lse_BHS, part_lse_BHS)
    # This changes only the lse of rows without keys: the weights of these rows become exp(-inf) = 0.
    finite_BHS = merged_BHS.clamp_min(torch.finfo(merged_BHS.dtype).min)
    old_weight = torch.exp(lse_BHS - finite_BHS).unsqueeze(-1)
    new_weight = torch.exp(part_lse_BHS - finite_BHS).unsqueeze(-1)
    out_BHSD.mul_(old_weight).addcmul_(part_out_BHSD.to(out_BHSD.dtype), new_weight)
    lse_BHS.copy_(merged_BHS)


def merge_parts_(out_BHSD: Tensor, lse_BHS: Tensor | None, parts: Sequence[Part]) -> None:
    """Write the merge of several parts, or their sum; on CUDA in one pass over memory.

    Args:
        out_BHSD, lse_BHS: results, of any dtype and strides; old values are overwritten. They may be one of
            the parts. Without lse the parts are added.
        parts: at most `MAX_PARTS`, over disjoint keys, of the same shapes.
    """
    if out_BHSD.is_cuda and not is_fake(out_BHSD):
        with torch.cuda.device(out_BHSD.device):
            _load_cuda_merge()(out_BHSD, lse_BHS, parts)
    else:
        merge_parts_by_operators_(out_BHSD, lse_BHS, parts)


def merge_parts_by_operators_(out_BHSD: Tensor, lse_BHS: Tensor | None, parts: Sequence[Part]) -> None:
    """Merge the parts (without lse: add them) by torch's operators, on any device."""
    assert 0 < len(parts) <= MAX_PARTS, f"{len(parts)} parts in one merge"  # the kernel asserts it, too
    if lse_BHS is None:
        total = parts[0][0].to(get_accumulator_dtype(parts[0][0].dtype), copy=True)
        for part, _ in parts[1:]:
            total.add_(part)
        out_BHSD.copy_(total)
        return
    # Subtract the largest lse first, so that exp does not overflow and the logarithm is exact.
    lses = torch.stack([lse.to(lse_BHS.dtype) for _, lse in parts])
    base_BHS = lses.amax(dim=0).clamp_min(torch.finfo(lses.dtype).min)  # clamped: no NaN in rows without keys
    weights = torch.exp(lses - base_BHS).unsqueeze(-1)
    sums = weights.sum(dim=0)
    total = parts[0][0].to(lse_BHS.dtype) * weights[0]
    for (part, _), weight in zip(parts[1:], weights[1:], strict=True):
        total.addcmul_(part.to(total.dtype), weight)
    out_BHSD.copy_(total.div_(sums.masked_fill(sums == 0, 1)))
    lse_BHS.copy_(base_BHS + torch.log(sums.squeeze(-1)))


def add_parts_(total: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of at most `MAX_PARTS` parts into `total`, which may be one of them."""
    merge_parts_(total, None, [(part, None) for part in parts])


@cache
def _load_cuda_merge() -> Callable[[Tensor, Tensor | None, Sequence[Part]], None]:
    """Return the Triton kernel that `DEVICES` names; if it cannot be loaded, warn and return the fallback."""
    try:
        launch: Callable[[Tensor, Tensor | None, Sequence[Part]], None] = load(DEVICES["cuda"].merge)
        return launch
    except (KeyError, ImportError) as error:
        _log.warning(
            "ds_ring: partial results are merged by torch's operators, which move 26 bytes an element instead"
            " of 10, since the kernel cannot be loaded (%r); install it beside torch's CUDA build", error,
        )  # fmt: skip
        return merge_parts_by_operators_


def get_accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results are accumulated: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
