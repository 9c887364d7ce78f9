"""A GPU on a machine without one: what torch.cuda answers, a device guard, tensors that say they lie there.

Fake tensors carry shapes, strides, dtypes and the device. What is missing in a CPU build of torch is a device
guard for it: another device's, which does nothing, is entered in c10's table for as long as the block lasts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CPU, CUDA, DEVICES = 0, 1, 20  # in c10's DeviceType


@contextmanager
def fake_gpu(**answers: Any) -> Iterator[None]:
    """Let functions of torch.cuda answer as on a machine with an H100, and as `answers` say."""
    answers = {"is_available": True, "is_initialized": True, "get_device_capability": (9, 0)} | answers
    functions: dict[str, Any] = {
        name: answer if callable(answer) else mock.Mock(return_value=answer)
        for name, answer in answers.items()
    }
    with mock.patch.multiple(torch.cuda, **functions):
        yield


@contextmanager
def cuda_guard() -> Iterator[None]:
    """Let operators switch to CUDA devices that are not there."""
    if torch.cuda.is_available():
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * DEVICES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, table[CUDA] = table[CUDA], table[CPU]
    try:
        yield
    finally:
        table[CUDA] = before


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make tensors fake; two methods go by operators, since by themselves they ask for a CUDA device."""
    methods = {"__getitem__": _index, "contiguous": _contiguous}
    for name, method in methods.items():
        setattr(FakeTensor, name, method)
    try:
        with FakeTensorMode() as mode:
            yield mode
    finally:
        for name in methods:
            delattr(FakeTensor, name)


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else torch.ops.aten.clone.default(x, memory_format=torch.contiguous_format)


def _index(x: Tensor, index: Any) -> Tensor:
    """Index by slices, numbers, None and one Ellipsis."""
    items = index if isinstance(index, tuple) else (index,)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        more = x.dim() - sum(item is not None for item in items) + 1
        items = (*items[:at], *[slice(None)] * more, *items[at + 1 :])
    dim = 0
    for item in items:
        if item is None:
            x = torch.ops.aten.unsqueeze.default(x, dim)
        elif isinstance(item, slice):
            if item != slice(None):
                x = torch.ops.aten.slice.Tensor(x, dim, item.start, item.stop, item.step or 1)
        else:
            x = torch.ops.aten.select.int(x, dim, item)
            dim -= 1
        dim += 1
    return x
