"""Fake CUDA tensors on torch's CPU wheel: the shapes, strides and dtypes that a GPU would be given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


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
