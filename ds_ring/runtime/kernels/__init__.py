"""Name kernels: one hop's attention, forward and backward. Their rows stand in `ds_ring/registry.py`."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from ds_ring.errors import RingConfigError
from ds_ring.registry import FAST_KERNELS, KERNELS, load
from ds_ring.runtime.kernels.interface import Kernel

__all__ = ["Kernel", "get_kernel"]

_log = logging.getLogger(__name__)


@lru_cache(maxsize=16)
def get_kernel(
    name: str, device_type: str, options: tuple[tuple[str, Any], ...] = (), block_size: int | None = None
) -> Kernel:
    """Return the kernel of a name for a kind of device; "auto" takes the fast one and logs once which.

    Args:
        name: "auto", or of a row of `KERNELS`.
        device_type: of the tensors, "cpu" or "cuda".
        options: `kernel_options` of the JSON as pairs; "cpu" takes block and triangle (tokens), "flex"
            those of FlexAttention.
        block_size: of the JSON; side of a block of "flex", in slots.

    Raises:
        RingConfigError: unknown name or option, or a kernel that does not run on that device.
    """
    if name == "auto":
        if device_type not in FAST_KERNELS:
            raise RingConfigError(
                f'kernel "auto" has no fast kernel for {device_type} tensors in this version; set'
                ' "kernel": "reference" to run the plain one there, knowing that it is slow'
            )
        name = FAST_KERNELS[device_type]
        _log.info("ds_ring: kernel %r for %s tensors", name, device_type)
    if name not in KERNELS:
        raise RingConfigError(
            f"unknown kernel {name!r}: expected one of auto, {', '.join(sorted(KERNELS))}, got another name"
        )
    row = KERNELS[name]
    if row.device not in (None, device_type):
        raise RingConfigError(
            f'kernel "{name}" got {device_type} tensors, expected others; use "auto" or "reference" there'
        )
    # a key of its own in the JSON
    sizes = {"block_size": block_size} if row.takes_blocks and block_size is not None else {}
    try:
        kernel: Kernel = load(row.home)(**dict(options), **sizes)
        return kernel
    # Options are keyword arguments of the kernel: one that it does not have is a TypeError.
    except TypeError as error:
        raise RingConfigError(
            f"kernel_options {dict(options)} for kernel {name!r}: {error}; remove what it does not take"
        ) from None
