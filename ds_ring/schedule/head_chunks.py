"""Which heads go round the ring together. Index arithmetic, no tensors.

Owns the size of a head chunk on each kind of device (why there are any: `lowering.py`, [Note: head chunks])
and from which length on heads wait on the host for the backward pass.

[Note: sizes of head chunks]
A backward pass without chunks needs up to ten shard-sized buffers beside the eight tensors that any attention
has (q, k, v, out and their gradients). Chunks make the buffers smaller as long as a message keeps at least a
MiB on the CPU (2 MiB / P in larger rings, so that buffers shrink as shards do), or 64 MiB on a GPU.
"""

from __future__ import annotations

from typing import Any, Literal

MANY_CHUNKS = 16  # from so many on, one of them is small beside the shard
CHUNK_BYTES_CPU = 1 << 20  # in rings of up to two
LEAST_BYTES_CPU = 128 << 10
CHUNK_BYTES_GPU = 64 << 20  # few heads would not fill the device
LONG_SHARD = 131_072  # tokens, from which on copies to the host and back take less than the pass


def chunk_bytes_on(device_type: str, ring_size: int) -> int:
    """Return the smallest K or V message worth a chunk of its own, bytes.

    On the CPU a MiB for two ranks, and as many ranks as share a sequence so many times less, down to
    128 KiB: of one sequence the buffers of messages then shrink with the ring as shards do.

    Args:
        device_type: "cpu", or anything else.
        ring_size: P.
    """
    if device_type != "cpu":
        return CHUNK_BYTES_GPU
    return max(2 * CHUNK_BYTES_CPU // max(ring_size, 2), LEAST_BYTES_CPU)


def heads_on_host(asked: bool | Literal["auto"], device_type: str, local_tokens: int) -> bool:
    """Return whether attention's tensors are kept on the host between both passes.

    Args:
        asked: "auto" for shards of `LONG_SHARD` tokens and more, except on the CPU.
        device_type: "cpu", whose memory is the host's, or anything else.
        local_tokens: slots of a shard.
    """
    return device_type != "cpu" and local_tokens >= LONG_SHARD if asked == "auto" else asked


def head_bytes(k: Any, v: Any) -> int:
    """Return the bytes of one head in the smaller one of local K and V, [B, G, S, ...] tensors."""
    return min(k.nbytes, v.nbytes) // int(k.shape[1])


def head_chunks(kv_heads: slice, head_bytes: int, chunk_bytes: int) -> list[slice]:
    """Return K/V heads of a slice in equal chunks of at least `chunk_bytes`.

    Args:
        kv_heads: heads that are read alike.
        head_bytes: local K (or V) of one head; 0 where nothing travels.
        chunk_bytes: what a message should have at the least.
    """
    step = kv_heads.step or 1
    heads = range(kv_heads.start, kv_heads.stop, step)
    # divisors only, so that all chunks are of one size
    sizes = [n for n in range(1, len(heads) + 1) if len(heads) % n == 0]
    size = next((n for n in sizes if n * head_bytes >= chunk_bytes), len(heads))  # all: nothing to send
    chunks = (heads[first : first + size] for first in range(0, len(heads), size))
    return [slice(chunk[0], chunk[-1] + 1, step) for chunk in chunks]


def query_heads_of(kv_heads: slice, group: int) -> slice:
    """Return the query heads that share the K/V heads of a slice, `group` of them each."""
    # only here may a slice have a step: see `_slices` in `plan.py`
    if group == 1:
        return kv_heads
    return slice(kv_heads.start * group, kv_heads.stop * group)


def count_heads(heads: slice) -> int:
    """Return how many heads a slice has."""
    return len(range(*heads.indices(heads.stop)))
