"""Which heads go around the ring together. Index arithmetic, no tensors.

Owns the size of a head chunk on each kind of device (see [Note: head chunks] in `lowering.py`) and the shard
length from which heads are kept in host memory until the backward pass.

[Note: sizes of head chunks]
A backward pass without chunks needs up to ten shard-sized buffers beside the eight tensors that any attention
has (q, k, v, out and their gradients). Chunks make the buffers smaller as long as a message keeps at least a
MiB on the CPU (2 MiB / P in larger rings, so that buffers shrink as shards do), or 64 MiB on a GPU.
"""

from __future__ import annotations

from typing import Any, Literal

MANY_CHUNKS = 16  # from this number on, one chunk is small compared with the shard
CHUNK_BYTES_CPU = 1 << 20  # in rings of at most two ranks
LEAST_BYTES_CPU = 128 << 10
CHUNK_BYTES_GPU = 64 << 20  # fewer heads would not fill the device
LONG_SHARD = 131_072  # tokens; from here on copies to the host and back take less time than the pass


def chunk_bytes_on(device_type: str, ring_size: int) -> int:
    """Return the smallest K or V message for which a chunk of its own pays, in bytes.

    On the CPU this is 1 MiB for two ranks. For more ranks it shrinks in proportion to the ring size, down to
    128 KiB, so that for one sequence the message buffers shrink with the ring as the shards do.

    Args:
        device_type: "cpu", or anything else.
        ring_size: P.
    """
    if device_type != "cpu":
        return CHUNK_BYTES_GPU
    return max(2 * CHUNK_BYTES_CPU // max(ring_size, 2), LEAST_BYTES_CPU)


def heads_on_host(asked: bool | Literal["auto"], device_type: str, local_tokens: int) -> bool:
    """Return whether the tensors of attention are kept in host memory between forward and backward pass.

    Args:
        asked: True, False, or "auto" for shards of at least `LONG_SHARD` tokens, except on the CPU.
        device_type: "cpu", whose memory is host memory already, or anything else.
        local_tokens: number of slots of a shard.
    """
    return device_type != "cpu" and local_tokens >= LONG_SHARD if asked == "auto" else asked


def head_bytes(k: Any, v: Any) -> int:
    """Return the bytes of one head of local K or V, [B, G, S, ...] tensors, whichever is smaller."""
    return min(k.nbytes, v.nbytes) // int(k.shape[1])


def head_chunks(kv_heads: slice, head_bytes: int, chunk_bytes: int) -> list[slice]:
    """Split K/V heads into equal chunks of at least `chunk_bytes`.

    Args:
        kv_heads: K/V heads with equal patterns.
        head_bytes: bytes of local K (or V) of one head; 0 if nothing travels.
        chunk_bytes: minimum bytes of a message.
    """
    step = kv_heads.step or 1
    heads = range(kv_heads.start, kv_heads.stop, step)
    # Only divisors, so that all chunks have one size.
    sizes = [n for n in range(1, len(heads) + 1) if len(heads) % n == 0]
    size = next((n for n in sizes if n * head_bytes >= chunk_bytes), len(heads))  # all: nothing to send
    chunks = (heads[first : first + size] for first in range(0, len(heads), size))
    return [slice(chunk[0], chunk[-1] + 1, step) for chunk in chunks]


def query_heads_of(kv_heads: slice, group: int) -> slice:
    """Return the query heads that share the K/V heads of a slice, `group` query heads for each."""
    # only here may a slice have a step: see `_slices` in `plan.py`
    if group == 1:
        return kv_heads
    return slice(kv_heads.start * group, kv_heads.stop * group)


def count_heads(heads: slice) -> int:
    """Return the number of heads of a slice."""
    return len(range(*heads.indices(heads.stop)))
