"""Heads in groups: which K/V heads go round the ring together. Index arithmetic, no tensors.

Shared by the ring pass, which walks the groups ([Note: heads in groups] there), and by the cost model, which
counts what they need. Owns the sizes on each kind of device.
"""

from __future__ import annotations

MANY = 16  # groups of heads, from which on one of them is small beside the shard
CHUNK_BYTES_CPU = 1 << 20
SMALL_SHARD_GROUPS = 8  # of a shard of less than so many MiB, on the CPU
LEAST_BYTES_CPU = 128 << 10  # below, a message's fixed cost is more than its bytes'
CHUNK_BYTES_GPU = 64 << 20  # few heads would not fill the device


def chunk_bytes_on(device_type: str, shard_bytes: int) -> int:
    """The smallest K or V message worth a walk of its own, bytes.

    On the CPU a MiB, or an eighth of a shard that is smaller than 8 MiB, so that its buffers stay small
    beside it and memory falls as 1/P for long.

    Args:
        device_type: "cpu", or anything else.
        shard_bytes: K of all heads of this rank.
    """
    if device_type != "cpu":
        return CHUNK_BYTES_GPU
    return min(CHUNK_BYTES_CPU, max(shard_bytes // SMALL_SHARD_GROUPS, LEAST_BYTES_CPU))


def head_chunks(kv_heads: slice, head_bytes: int, chunk_bytes: int) -> list[slice]:
    """K/V heads of a slice in equal groups of at least `chunk_bytes`.

    Args:
        kv_heads: the heads of one walk.
        head_bytes: local K (or V) of one head; 0 where nothing travels.
        chunk_bytes: what a message should have at the least.
    """
    step = kv_heads.step or 1
    heads = range(kv_heads.start, kv_heads.stop, step)
    sizes = [n for n in range(1, len(heads) + 1) if len(heads) % n == 0]
    size = next((n for n in sizes if n * head_bytes >= chunk_bytes), len(heads))  # all: nothing to send
    groups = (heads[first : first + size] for first in range(0, len(heads), size))
    return [slice(group[0], group[-1] + 1, step) for group in groups]
