"""Name kernels: one hop's attention, forward and backward. A new kernel is one entry of `_KERNELS`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ds_ring.errors import RingConfigError
from ds_ring.runtime.kernels.cpu import CpuKernel
from ds_ring.runtime.kernels.flex import FlexKernel
from ds_ring.runtime.kernels.interface import Kernel
from ds_ring.runtime.kernels.reference import ReferenceKernel

__all__ = ["Kernel", "get_kernel"]

_KERNELS: dict[str, Callable[..., Kernel]] = {
    "reference": ReferenceKernel,
    "cpu": CpuKernel,
    "flex": FlexKernel,
}
_FAST = {"cpu": "cpu", "cuda": "flex"}  # of a kind of device
_log = logging.getLogger(__name__)


@lru_cache(maxsize=16)
def get_kernel(
    name: str, device_type: str, options: tuple[tuple[str, Any], ...] = (), block_size: int | None = None
) -> Kernel:
    """Return the kernel of a name for a kind of device; "auto" takes the fast one and logs once which.

    Args:
        name: "auto", "cpu", "flex" or "reference".
        device_type: of the tensors, "cpu" or "cuda".
        options: `kernel_options` of the JSON as pairs; "cpu" takes block and triangle (tokens), "flex"
            those of FlexAttention.
        block_size: of the JSON; side of a block of "flex", in slots.

    Raises:
        RingConfigError: unknown name or option, or a kernel that does not run on that device.
    """
    if name == "auto":
        if device_type not in _FAST:
            raise RingConfigError(
                f'kernel "auto" has no fast kernel for {device_type} tensors in this version; set'
                ' "kernel": "reference" to run the plain one there, knowing that it is slow'
            )
        name = _FAST[device_type]
        _log.info("ds_ring: kernel %r for %s tensors", name, device_type)
    if name not in _KERNELS:
        raise RingConfigError(
            f"unknown kernel {name!r}: expected one of auto, {', '.join(sorted(_KERNELS))}, got another name"
        )
    # A fast kernel runs on its own kind of device, the reference kernel on any.
    if name in _FAST.values() and _FAST.get(device_type) != name:
        raise RingConfigError(
            f'kernel "{name}" got {device_type} tensors, expected others; use "auto" or "reference" there'
        )
    # A key of its own in the JSON, and only flex takes it.
    sizes = {"block_size": block_size} if name == "flex" and block_size is not None else {}
    try:
        return _KERNELS[name](**dict(options), **sizes)
    # Options are keyword arguments of the kernel: one that it does not have is a TypeError.
    except TypeError as error:
        raise RingConfigError(
            f"kernel_options {dict(options)} for kernel {name!r}: {error}; remove what it does not take"
        ) from None
