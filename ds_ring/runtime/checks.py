"""Local checks: what one rank can say about its own tensors, with no other rank in mind.

Owns the limits on q, k and v and the messages about them. Telling the other ranks is agreement.py's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ring.errors import RingShapeError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def why_not_an_operand(name: str, x: object) -> str | None:
    """Why the dispatcher would not run a real operator on `x`; None if it would.

    Such a tensor never reaches the operator's body, where all other checks are made: a meta tensor is
    answered by the fake implementation, without a word to the ranks that hold real ones.
    """
    if not isinstance(x, Tensor):
        return f"{name}: expected a tensor, got {type(x).__name__}"
    if x.is_meta:
        return (
            f"{name}: expected a tensor with values, got one on the meta device, shape {tuple(x.shape)};"
            " materialise the model first (to_empty, or load its weights)"
        )
    if x.layout != torch.strided:
        return f"{name}: expected a dense tensor, got layout {x.layout}; call .to_dense() or pad it"
    return None


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what is no q, k and v of one attention call, whatever the layout.

    Raises:
        RingShapeError: with the shapes, dtypes or devices expected and got.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise RingShapeError(
                f"{name}: expected 4 dimensions [batch, heads, tokens, head_dim], got shape {tuple(x.shape)};"
                " add the missing ones with unsqueeze"
            )
        if x.dtype not in DTYPES:
            raise RingShapeError(
                f"{name}: expected a floating dtype (float64 to float16), got {x.dtype}; cast it"
            )
        if 0 in x.shape:
            raise RingShapeError(
                f"{name}: empty tensor of shape {tuple(x.shape)}; every rank needs at least a slot"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise RingShapeError(
                f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; cast or move them to agree"
            )
    if k.shape != v.shape:
        raise RingShapeError(
            f"k and v must have one shape: got {tuple(k.shape)} and {tuple(v.shape)}; pad the shorter one"
        )
    if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        raise RingShapeError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch (dim 0) and head_dim (dim 3)"
        )


def check_heads(query_heads: int, kv_heads: int, ulysses_size: int) -> None:
    """Refuse numbers of heads that cannot be grouped, or split over the Ulysses ranks.

    Raises:
        RingShapeError: with the numbers of heads and what divides them.
    """
    if query_heads % kv_heads:
        raise RingShapeError(
            f"query heads must be a multiple of K/V heads: got {query_heads} and {kv_heads}; for"
            " grouped-query attention pass k and v with their own, smaller number of heads"
        )
    if kv_heads % ulysses_size:
        raise RingShapeError(
            f"Ulysses splits heads: {kv_heads} K/V heads (of {query_heads} query heads) are not divisible by"
            f" ulysses_size {ulysses_size}; use a divisor of {kv_heads}, and a larger ring"
        )


def check_tokens(q_tokens: int, k_tokens: int, local_tokens: int, parts: int) -> None:
    """Refuse tensors whose length is not that of a shard (of one of its `parts`, before Ulysses joins them).

    Raises:
        RingShapeError: with the slots expected and the tokens got.
    """
    slots = local_tokens // parts
    if local_tokens % parts:
        raise RingShapeError(
            f"shards of {local_tokens} slots cannot be split over {parts} Ulysses ranks;"
            f" build the layout with multiple_of={parts}"
        )
    if q_tokens != slots or k_tokens != slots:
        raise RingShapeError(
            f"the layout has {slots} slots per rank, got q with {q_tokens} and k with {k_tokens} local"
            " tokens; shard with ds_ring.shard_sequence and the layout that is passed here (queries"
            ' that every rank has whole take queries="replicated")'
        )


def check_keys(k_tokens: int, local_tokens: int) -> None:
    """Refuse keys that are no shard of the layout; the queries are whole on every rank.

    Raises:
        RingShapeError: with the slots expected and the tokens got.
    """
    if k_tokens != local_tokens:
        raise RingShapeError(
            f"the layout has {local_tokens} slots per rank, got k with {k_tokens} local tokens; with"
            ' queries="replicated" k and v are still shards: shard them with ds_ring.shard_sequence and the'
            " layout that is passed here"
        )
