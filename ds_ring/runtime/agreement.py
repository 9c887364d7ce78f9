"""What a call must agree on before its first payload: local checks, and the header that is compared.

Owns the fields of the header and the messages about them; how headers travel is the exchange's.
A rank whose own input is refused still takes part, so that the others raise too instead of waiting.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from ds_ring.errors import RingError, RingMismatchError, RingShapeError
from ds_ring.runtime.exchange import Exchange

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FIELDS = (
    "input refused", "direction of the pass", "number of the call", "pattern, layout, transport or scale",
    "positions of the queries", "dtype of q", "dtype of k", "batch size", "query heads", "K/V heads",
    "local queries", "local keys", "head_dim",
)  # fmt: skip


def check_local(q: Tensor, k: Tensor, v: Tensor, local_tokens: int, replicated: bool = False) -> None:
    """Refuse tensors that attention over this layout cannot take.

    Args:
        q, k, v: what the call got.
        local_tokens: slots of a shard.
        replicated: q is not sharded: any number of queries.

    Raises:
        RingShapeError: with the shapes, dtypes or devices expected and got.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise RingShapeError(
                f"{name}: expected 4 dimensions [batch, heads, tokens, head_dim], got shape {tuple(x.shape)}"
            )
        if x.dtype not in _DTYPES:
            raise RingShapeError(f"{name}: expected a floating dtype (float64 to float16), got {x.dtype}")
        if 0 in x.shape:
            raise RingShapeError(
                f"{name}: empty tensor of shape {tuple(x.shape)}; every rank needs at least a slot"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise RingShapeError(
                f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; cast or move them to agree"
            )
    _check_shapes(q, k, v)
    _check_tokens(q, k, local_tokens, replicated)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    batch, heads, _, head_dim = q.shape
    if k.shape != v.shape:
        raise RingShapeError(f"k and v must have one shape: got {tuple(k.shape)} and {tuple(v.shape)}")
    if (k.shape[0], k.shape[3]) != (batch, head_dim):
        raise RingShapeError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch (dim 0) and head_dim (dim 3)"
        )
    if heads % k.shape[1]:
        raise RingShapeError(
            f"query heads must be a multiple of K/V heads: got {heads} and {k.shape[1]}; for grouped-query"
            " attention pass k and v with their own, smaller number of heads"
        )


def _check_tokens(q: Tensor, k: Tensor, local_tokens: int, replicated: bool) -> None:
    queries, keys = q.shape[2], k.shape[2]
    if replicated and keys != local_tokens:
        raise RingShapeError(
            f"the layout has {local_tokens} slots per rank, got k with {keys} local tokens; with"
            ' queries="replicated" k and v are still shards: shard them with ds_ring.shard_sequence and the'
            " layout that is passed here"
        )
    if not replicated and (queries != local_tokens or keys != local_tokens):
        raise RingShapeError(
            f"the layout has {local_tokens} slots per rank, got q with {queries} and k with {keys} local"
            " tokens; shard with ds_ring.shard_sequence and the layout that is passed here (queries"
            ' that every rank has whole take queries="replicated")'
        )


def check_agreement(
    exchange: Exchange,
    refused: RingError | None,
    direction: str,
    call: int,
    settings: str,
    tensors: tuple[Tensor, Tensor],
    positions: bytes = b"",
) -> None:
    """Compare this call with the other ranks'; nothing is sent but the header.

    Args:
        refused: what the local checks raised, if they did; re-raised here after the others were told.
        direction: "forward" or "backward".
        call: serial number of the call on this context.
        settings: text that must be equal on all ranks.
        tensors: q and k.
        positions: of replicated queries.

    Raises:
        RingError: `refused`, on this rank.
        RingMismatchError: on every other rank, and on all where fields differ; names ranks and fields.
    """
    q, k = tensors
    checksums = zlib.crc32(settings.encode()), zlib.crc32(positions)
    shape = [0] * 8
    if refused is None:
        shape = [_code(q), _code(k), *q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:]]
    values = [int(refused is not None), direction == "backward", call, *checksums, *shape]
    header = torch.tensor([*values, exchange.mesh.ring_rank], dtype=torch.int64)
    least, greatest = exchange.spread(header).tolist()
    if refused is not None:
        raise refused
    if least[:-1] != greatest[:-1]:
        raise RingMismatchError(_describe(least, greatest))


def _code(x: Tensor) -> int:
    return _DTYPES.index(x.dtype)


def _describe(least: list[int], greatest: list[int]) -> str:
    one, other = f"ring rank {least[-1]}", f"ring rank {greatest[-1]}"
    if greatest[0]:
        return f"{other} refused its own input (see its error); no rank of this ring sent anything"
    different = [
        f"{name}: {one} has {_show(name, a)}, {other} has {_show(name, b)}"
        for name, a, b in zip(_FIELDS, least[:-1], greatest[:-1], strict=True)
        if a != b
    ]
    return (
        "the ranks of this ring call attention with different arguments; nothing was sent. "
        + "; ".join(different)
        + ". Give every rank of a ring the same model, configuration and batch shape"
    )


def _show(name: str, value: int) -> str:
    if name.startswith("dtype"):
        return str(_DTYPES[value])
    if name.startswith("direction"):
        return "backward" if value else "forward"
    return f"checksum {value:08x}" if name.startswith(("pattern", "positions")) else str(value)
