"""Tensors of any dtype as they are copied and sent: integers with their bits, and packets of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_ring.errors import RingShapeError, shown
from ds_ring.ops.checks import DTYPES

# Dtypes whose values torch indexes, fills and adds up; of others it copies bits.
_COUNTED = (
    *DTYPES, torch.complex128, torch.complex64, torch.complex32, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
ADDED_UP = "a dtype of which torch adds up gradients (float64 to float16, complex)"
_WHOLE = (*_BITS.values(), torch.int8, torch.uint16, torch.uint32, torch.uint64)


def view_as_bits(x: Tensor) -> Tensor:
    """Return x, or integers with its bits if torch lacks operators for its dtype (uint16, float8, ...).

    For what copies values; `view_from_bits` turns a result back.
    """
    return x if x.dtype in _COUNTED else x.view(_BITS[x.element_size()])


def view_from_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `view_as_bits` has turned into integers, in its own dtype."""
    # view(dtype) drops the gradient, also where it changes nothing
    return x if x.dtype == dtype else x.view(dtype)


def fill_bits(name: str, fill: float, x: Tensor) -> float:
    """Return the number with which to fill `view_as_bits(x)`, for a value of x's dtype.

    Raises:
        RingShapeError: the dtype has no such value.
    """
    if fill == 0:  # has the bits 0, also where torch cannot fill with it
        return 0
    try:
        filled = torch.full((1,), fill, dtype=x.dtype, device="cpu")
        fits = x.dtype not in _WHOLE or int(filled) == fill
    except (RuntimeError, TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        advice = "cast the tensor, or take another value"
        raise RingShapeError.wrong(name, f"a value of {x.dtype}", shown(fill), advice)
    return fill if x.dtype in _COUNTED else int(view_as_bits(filled))


def check_copied(name: str, x: Tensor) -> None:
    """Raise RingShapeError for a tensor with a gradient, of a dtype that torch does not add up."""
    if x.requires_grad and torch.is_grad_enabled() and x.dtype not in _COUNTED:
        raise RingShapeError.wrong(name, ADDED_UP, f"{x.dtype}", "cast it, or detach it")


# [Note: packets]
# All tensors of a place go in one message to each rank: an all-to-all costs its latency once and not three
# times. They may differ in dtype, so a packet is bytes, and wider elements stand first: each is aligned.
def _order(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors as one message; a single one as it is."""
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat([parts[index].contiguous().view(-1).view(torch.uint8) for index in _order(parts)])


def unpack(packet: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the tensors in a packet, with the shapes and dtypes of `like`."""
    if len(like) == 1:
        return [packet]
    sizes = [like[index].nbytes for index in _order(like)]
    by_index = dict(zip(_order(like), packet.split(sizes), strict=True))
    return [view_from_bits(by_index[index], x.dtype).view(x.shape) for index, x in enumerate(like)]
