"""Choose kernels by name, device and pattern. The table of kernels is in `ds_ring/plugin.py`.

[Note: which kernel auto is]
With measured rates of the device (`plugin.RATES`), "auto" takes the kernel that is faster for the pattern's
kinds of tiles. Without them it takes "flash" on CUDA for causal, windowed and full patterns, which are few
calls of FlashAttention: by published figures it is faster there (`configs/hardware/h100.yaml` names the
sources). For all else it takes the kernel of the device's row. The log has the choice and the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ds_ring.errors import RingConfigError
from ds_ring.kernels.interface import Kernel, KernelNeeds
from ds_ring.masks.pattern import Pattern
from ds_ring.plugin import FAST_KERNELS, KERNELS, RATES, load, unmeasured

if TYPE_CHECKING:
    from ds_ring.kernels.pairs import Scores

__all__ = ["Kernel", "KernelNeeds", "get_block_side", "get_kernel"]

_log = logging.getLogger(__name__)


def get_kernel(
    name: str, device_type: str, options: tuple[tuple[str, Any], ...] = (), block_size: int | None = None,
    scores: Scores | None = None, needs: KernelNeeds | None = None,
) -> Kernel:  # fmt: skip
    """Return the kernel of a name for a kind of device; "auto" takes one and logs once which.

    Args:
        name: of a row of `KERNELS`, or "auto": the choice of [Note: which kernel auto is]; the reference if
            that one cannot change scores and `scores` is given.
        device_type: of the tensors, "cpu" or "cuda".
        options: `kernel_options` of the JSON as pairs; "cpu" takes block and triangle (tokens), "flex"
            those of FlexAttention, "flash" implementation.
        block_size: of the JSON; side of a block of "flex", in slots.
        scores: how scores are changed; None for not.
        needs: the operands that the kernel will get; None if unknown.

    Raises:
        RingConfigError: unknown name or option, a kernel that does not run on that device, or one that cannot
            take these operands.
        RingShapeError: a dtype or a head dimension that it does not take.
    """
    if name == "auto":
        if device_type not in FAST_KERNELS and device_type != "cpu":
            expected, got = f"one for {device_type} tensors", '"auto", which has none'
            raise RingConfigError.wrong("kernel", expected, got, 'set "reference" (slow)')
        name = _choose_kernel(device_type, scores, needs)
    if name not in KERNELS:
        expected = f"one of auto, {', '.join(sorted(KERNELS))}"
        raise RingConfigError.wrong("kernel", expected, repr(name), 'use "auto"')
    row = KERNELS[name]
    if not row.runs_on(device_type):
        expected = f"tensors on {row.device}"
        raise RingConfigError.wrong(f'kernel "{name}"', expected, device_type, 'use "auto" there')
    refusal = load(row.refuses)(needs) if row.refuses is not None and needs is not None else None
    if refusal is not None:
        raise refusal
    # a key of its own in the JSON
    sizes: dict[str, Any] = {}
    if row.takes_blocks and block_size is not None:
        sizes["block_size"] = block_size
    if scores is not None:
        if not row.takes_scores:
            able = ", ".join(name for name, row in KERNELS.items() if row.takes_scores)
            expected, got = f"a kernel that changes scores ({able})", f'"{name}" for {device_type} tensors'
            raise RingConfigError.wrong("score_mod", expected, got, 'set "kernel": "reference" (slow)')
        sizes["scores"] = scores
    return _make_kernel(name, options, tuple(sizes.items()))


def get_block_side(name: str, device_type: str, patterns: Iterable[Pattern], block_size: int) -> int:
    """Return the side of the blocks in which a kernel computes, for `make_layout`; 1 for one that does not.

    A layout is chosen before there are tensors: "auto" is looked up for bfloat16 and a head dimension that
    all kernels take.

    Args:
        name: of a row of `KERNELS`, or "auto"; an unknown one is refused where it is made.
        device_type: of the tensors.
        patterns: of the layers; blocks count if the kernel of one of them computes in them.
        block_size: of the JSON.
    """
    names = {name}
    if name == "auto" and device_type in FAST_KERNELS:
        needs = (KernelNeeds(device_type, torch.bfloat16, 128, pattern) for pattern in patterns)
        names = {_choose_kernel(device_type, None, need) for need in needs}
    rows = (KERNELS[name] for name in names if name in KERNELS)
    return block_size if any(row.takes_blocks for row in rows) else 1


@lru_cache(maxsize=16)
def _make_kernel(
    name: str, options: tuple[tuple[str, Any], ...], sizes: tuple[tuple[str, Any], ...]
) -> Kernel:
    """Make a kernel: one for all patterns, since it may cache compiled code."""
    try:
        kernel: Kernel = load(KERNELS[name].home)(**dict(options), **dict(sizes))
        return kernel
    # Options are keyword arguments of the kernel: one that it does not have is a TypeError.
    except TypeError as error:
        raise RingConfigError(f"kernel_options {dict(options)} of kernel {name!r}: {error}") from None


def _choose_kernel(device_type: str, scores: Scores | None, needs: KernelNeeds | None) -> str:
    """Return the kernel that "auto" means, and log it."""
    name = FAST_KERNELS.get(device_type)
    if name is None:
        return _choose_slow_kernel(device_type, "no kernel for them is installed")
    if scores is None and needs is not None:
        # "auto" does not take other devices' kernels, so their modules are not imported.
        able = [
            name
            for name, row in KERNELS.items()
            if row.device in (None, device_type) and (row.refuses is None or load(row.refuses)(needs) is None)
        ]
        kind = needs.pattern.tile_kind
        faster = load(RATES[device_type])(kind, able) if device_type in RATES else None
        if faster is not None:
            _say(faster.kernel, device_type, faster.why)
            return str(faster.kernel)
        name = unmeasured(device_type, [kind], able)
    if scores is None or KERNELS[name].takes_scores:
        _say(name, device_type, "no rates of this device were measured" if device_type != "cpu" else "")
        return name
    return _choose_slow_kernel(device_type, f"the kernel {name!r} cannot change scores ({scores.mod})")


@lru_cache(maxsize=64)
def _say(name: str, device_type: str, why: str) -> None:
    """Log a choice, once each."""
    _log.info("ds_ring: kernel %r for %s tensors%s", name, device_type, f" ({why})" if why else "")


@lru_cache(maxsize=16)
def _choose_slow_kernel(device_type: str, why: str) -> str:
    """Return a kernel that runs anywhere and changes scores; warn of it once."""
    able = next(name for name, row in KERNELS.items() if row.takes_scores and row.device is None)
    _log.warning(
        "ds_ring: kernel %r for %s tensors, since %s: it is slow, and holds the scores of one tile at a time,"
        " as large as this rank's tokens squared", able, device_type, why,
    )  # fmt: skip
    return able
