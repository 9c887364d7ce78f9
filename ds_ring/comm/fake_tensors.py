"""Recognise fake tensors (`torch._subclasses.fake_tensor`): they have shapes and no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(x: Tensor) -> bool:
    """Return True for tensors that only pretend: a pass over them sends nothing and must compare nothing."""
    return isinstance(x, FakeTensor)


def active_fake_mode() -> Any:
    """Return the FakeTensorMode that is on, or None: a tensor of one mode cannot be used in another."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
