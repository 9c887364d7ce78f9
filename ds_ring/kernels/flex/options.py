"""The options of a FlexAttention call: what a user may set; blocks and warps by device and head dimension.

Owns names and defaults; `kernel.py` makes the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ds_ring.compat.torch_kernels import list_flex_options
from ds_ring.errors import RingConfigError

INTERNAL = {"OUTPUT_LOGSUMEXP", "OUTPUT_MAX"}  # options that the kernel sets itself
DEFAULTS = {  # of the public call, which we bypass
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
FlexOptions = tuple[tuple[str, Any], ...]

# [Note: blocks that do not spill]
# Inductor chooses blocks and warps by device and head dimension, for masks that read nothing. Ours read
# positions and labels, and with its choice ptxas keeps kilobytes of each thread in local memory. The rows
# below are for 16-bit inputs: the first one, in an order from large blocks to small ones, with which no
# kernel of any pattern spills more than 64 bytes (`python -m tools.verify_cuda_kernels --compile`; its tables
# are in `tools/results`; for 100 LongNet's kernels alone were compiled). Those of 90 up to head dimension 128
# are the fastest of up to eight that an H200 timed on a causal mask (`tools/results/gpu_h200.md`): they
# spill, but blocks of 64 rows take Hopper's matrix units. No GPU has timed the others.
# By compute capability and the head dimension rounded up to a row: (block of queries, of keys, stages,
# warps) forward; in the backward pass the first block is the one that is iterated over, and the second one
# stays.
Blocks = tuple[int, int, int, int]
BLOCKS: dict[int, dict[int, dict[str, Blocks]]] = {
    80: {
        64: {"fwd": (128, 64, 3, 8), "bwd": (32, 64, 2, 4)},
        128: {"fwd": (128, 64, 3, 8), "bwd": (32, 32, 2, 4)},
        256: {"fwd": (32, 64, 3, 4), "bwd": (32, 32, 2, 8)},
    },
    90: {
        64: {"fwd": (64, 128, 3, 4), "bwd": (64, 64, 3, 4)},
        128: {"fwd": (128, 64, 3, 8), "bwd": (64, 128, 3, 8)},
        256: {"fwd": (64, 32, 3, 4), "bwd": (32, 32, 2, 8)},
    },
    100: {
        64: {"fwd": (128, 64, 3, 8), "bwd": (32, 128, 3, 8)},
        128: {"fwd": (128, 64, 3, 8), "bwd": (32, 64, 3, 8)},
        256: {"fwd": (128, 32, 2, 8), "bwd": (32, 32, 2, 8)},
    },
}
_NAMES = {
    "fwd": (("BLOCK_M",), ("BLOCK_N",), ("num_stages",), ("num_warps",)),
    "bwd": (("BLOCK_M1", "BLOCK_N2"), ("BLOCK_N1", "BLOCK_M2"), ("num_stages",), ("num_warps",)),
}


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return all options; by default the kernel for many queries.

    Raises:
        RingConfigError: an option that this torch does not have.
    """
    known = list_flex_options() - INTERNAL
    for option in options:
        if option.removeprefix("fwd_").removeprefix("bwd_") not in known:
            raise RingConfigError(
                f'kernel_options of kernel "flex": unknown option {option!r} for torch {torch.__version__};'
                f" expected some of {', '.join(sorted(known))}, or one with fwd_ or bwd_ before it"
            )
    if "BACKEND" not in options and "FORCE_USE_FLEX_ATTENTION" not in options:
        # "AUTO" would choose by the number of queries, and compile again
        options = options | (
            {"BACKEND": "TRITON"} if "BACKEND" in known else {"FORCE_USE_FLEX_ATTENTION": True}
        )
    return DEFAULTS | options


@lru_cache(maxsize=256)
def choose_options(
    flex_options: FlexOptions, device: torch.device, head_dim: int, dtype: torch.dtype, block: int
) -> FlexOptions:
    """Return a call's options: those given, with blocks and warps of the device for a pass that has none.

    Args:
        flex_options: of `check_options`, as pairs.
        device: of the tensors.
        head_dim: the larger one of queries' and values'.
        dtype: of queries.
        block: side of a block of the mask, slots.
    """
    options = dict(flex_options)
    triton = options.get("BACKEND", "TRITON") == "TRITON"
    if device.type != "cuda" or not triton or dtype.itemsize != 2 or not torch.cuda.is_available():
        return flex_options
    major, minor = torch.cuda.get_device_capability(device)
    ways = [way for way in _NAMES if not any(_sets_way(way, option) for option in options)]
    blocks = choose_blocks(10 * major + minor, head_dim, block).items()
    return (*flex_options, *((option, value) for option, value in blocks if option[:3] in ways))


def _sets_way(way: str, option: str) -> bool:
    """Return whether an option sets blocks, stages or warps of the pass "fwd" or "bwd"."""
    opposite = {"fwd": "bwd_", "bwd": "fwd_"}[way]
    names = [name for several in _NAMES[way] for name in several]
    return not option.startswith(opposite) and option.removeprefix(f"{way}_") in names


def choose_blocks(capability: int, head_dim: int, block: int) -> dict[str, int]:
    """Return blocks and warps as options, none larger than a block of the mask; {} for an unknown device.

    Args:
        capability: compute capability, 90 for 9.0.
        head_dim: any.
        block: side of a block of the mask, slots.
    """
    rows = BLOCKS.get(capability, {})
    ways = next((rows[size] for size in sorted(rows) if size >= head_dim), {})
    return make_block_options(ways, block)


def make_block_options(ways: Mapping[str, Blocks], block: int = 128) -> dict[str, int]:
    """Return blocks and warps of "fwd" and "bwd" as options, none larger than a block of the mask."""
    options: dict[str, int] = {}
    for way, (*sides, stages, warps) in ways.items():
        values = (*(min(side, block) for side in sides), stages, warps)
        for names, value in zip(_NAMES[way], values, strict=True):
            options |= {f"{way}_{name}": value for name in names}
    return options
