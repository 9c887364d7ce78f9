"""Count what Ulysses' all-to-alls of a layer send, and their time. Arithmetic.

A pass forward turns q, k and v into all tokens of some heads and out back (runtime/autograd.py); a pass back
does the same to the gradient of out and to dq, dk, dv. Of what it has a rank sends (U - 1) / U (Jacobs et al.
2023, DeepSpeed Ulysses, arXiv 2309.14509, section 3.2). Nothing is computed meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from .training_setting import ELEMENT_BYTES, Setting

SWAPS = 2  # all-to-alls of a pass in either direction: all tensors of a place go in one


class HeadSwaps(NamedTuple):
    """Hold the all-to-alls of one layer's pass in one direction; the other direction's are as large.

    Attributes:
        sent_bytes: by a rank.
        seconds: both, of which nothing is hidden.
    """

    sent_bytes: int
    seconds: float


def swapped_heads(heads: int, kv_heads: int) -> int:
    """Return the heads that a pass in one direction swaps: of q, k, v and out, or their gradients."""
    return 2 * (heads + kv_heads)


def head_swaps(setting: Setting, local_tokens: int) -> HeadSwaps:
    """Return the all-to-alls of a layer whose ring shards have so many slots, which Ulysses ranks share."""
    size, model, hardware = setting.ulysses_size, setting.model, setting.hardware
    if size == 1:
        return HeadSwaps(0, 0.0)
    row_bytes = model.head_dim * ELEMENT_BYTES[setting.dtype]
    own = setting.batch * local_tokens // size * row_bytes * swapped_heads(model.heads, model.kv_heads)
    # Ulysses ranks are neighbours in the world: of a rank's peers so many share its node.
    inside = min(size, hardware.devices_per_node) - 1
    rates = (hardware.intra_node_bytes_per_s, hardware.inter_node_bytes_per_s)
    peers = (inside, size - 1 - inside)
    # both kinds of link are at work at once
    seconds = max(own * count / size / rate for count, rate in zip(peers, rates, strict=True))
    return HeadSwaps(own * (size - 1) // size, seconds + SWAPS * hardware.link_latency_s)
