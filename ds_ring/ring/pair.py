"""Pair K with V, or dK with dV, as they travel, and describe the buffers that hold them.

K and V of a token, of all heads, are adjacent in memory, and tokens follow each other ([slots, B, G, D + E]).
So any range of tokens is one message without a copy, and messages from several ranks can fill parts of one
buffer. Kernels get views [B, G, slots, D] and [B, G, slots, E].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.comm.streams import is_fake
from ds_ring.schedule.steps import Payload

ALIGNMENT = 64  # bytes; a tensor begins at a multiple of it


class Pair(NamedTuple):
    """K and V, or dK and dV, [B, G, slots, D] and [B, G, slots, E], which travel together.

    `memory` has the tensors that are sent, token by token. k and v are views of them. In most buffers it is
    one tensor [slots, B, G, D + E]. It is two, [slots, B, G, D] and [slots, B, G, E], for gradients as the
    kernel returns them, and for keys that travel apart (`check_keys_apart`). The caller's tensors have none.
    """

    k: Tensor
    v: Tensor
    memory: tuple[Tensor, ...] = ()


def tokens_first(first: Tensor, second: Tensor) -> Pair | None:
    """Return tensors [B, G, slots, ...] as a buffer of two messages; None if tokens are not dense."""
    memory = first.permute(2, 0, 1, 3), second.permute(2, 0, 1, 3)
    return Pair(first, second, memory) if all(x.is_contiguous() for x in memory) else None


class BufferKind(NamedTuple):
    """Describe a buffer of two tensors that travel together.

    Attributes:
        shape: [slots, B, G, D + E].
        head_dim: D.
        dtype, device: of both.
        nbytes: a multiple of ALIGNMENT.
        fake: of a FakeTensorMode.
        apart: the second one is after the first one, not interleaved with it token by token.
    """

    shape: tuple[int, ...]
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    fake: bool
    apart: bool = False

    def pair(self, elements: Tensor) -> Pair:
        """Return the tensors in so many contiguous elements."""
        if not self.apart:
            both = elements.view(self.shape)
            first, second = both.permute(1, 2, 0, 3).tensor_split((self.head_dim,), dim=-1)
            return Pair(first, second, (both,))
        rows, width = math.prod(self.shape[:-1]), self.shape[-1]
        parts = elements.split((rows * self.head_dim, rows * (width - self.head_dim)))
        widths = self.head_dim, width - self.head_dim
        sides = (part.view(*self.shape[:-1], width) for part, width in zip(parts, widths, strict=True))
        tensors = tokens_first(*(x.permute(1, 2, 0, 3) for x in sides))
        assert tensors is not None, "dense as it was made"
        return tensors


@lru_cache(maxsize=64)
def get_payload_dtypes(
    keys: torch.dtype, sums: torch.dtype | None, parts: torch.dtype | None
) -> Mapping[Payload, torch.dtype]:
    """Return the dtype of each payload: of K and V, of sums of dK and dV, and as the kernel returns those.

    A forward pass has no `sums` and no `parts`.
    """
    dtypes = {Payload.KEYS: keys, Payload.ROUNDED: torch.bfloat16}
    backward = {Payload.GRADIENTS: sums, Payload.PARTS: parts}
    return dtypes | {payload: dtype for payload, dtype in backward.items() if dtype is not None}


def check_keys_apart(like: Pair) -> bool:
    """Return whether K and V of a single K/V head travel as two messages: on the CPU, of one sample.

    The tokens of such a head are dense in the caller's tensors, so the own shard is sent without a copy.
    A copy would be held together with the last keys of the head before: the peak of a forward pass.
    """
    return like.k.shape[0] == 1 and like.k.device.type == "cpu"


def make_buffer_kind(like: Pair, slots: int, dtype: torch.dtype, apart: bool) -> BufferKind:
    """Return the kind of buffers with B, G, the two head dimensions and the device of others.

    `apart` is whether its two tensors are messages of their own.
    """
    batch, heads, _, head_dim = like.k.shape
    shape = (slots, batch, heads, head_dim + like.v.shape[3])
    nbytes = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return BufferKind(shape, head_dim, dtype, like.k.device, nbytes, is_fake(like.k), apart)


BufferKinds = dict[int, BufferKind]  # by buffer number
