"""Check what one rank can say about its own tensors, with no other rank in mind.

Owns the limits on q, k and v and the messages about them. `collective.py` tells the other ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from ds_ring.comm.streams import is_fake
from ds_ring.errors import RingConfigError, RingFiniteError, RingShapeError, shown

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_operand(name: str, x: object) -> None:
    """Refuse what the dispatcher would not run a real operator on.

    The operator's body has all other checks, and never sees such a tensor: a meta tensor is answered by the
    fake implementation, and the ranks that hold real tensors would wait.

    Raises:
        RingShapeError: with what it is.
    """
    if not isinstance(x, Tensor):
        why = f"expected a tensor, got {type(x).__name__}; convert it with torch.as_tensor"
    # A DTensor, by its attributes: nothing has to be imported for it.
    elif hasattr(x, "to_local") and hasattr(x, "placements"):
        why = (
            f"expected this rank's plain tensor, got a {type(x).__name__}; call .to_local() if its placement"
            " is that of the layout, else .full_tensor() and ds_ring.shard_sequence"
        )
    elif x.is_nested:
        why = (
            "expected a dense tensor, got a nested one; pack its sequences into one and pass"
            " ds_ring.Documents, or use torch.nested.to_padded_tensor"
        )
    elif x.is_quantized:
        why = f"expected a floating dtype, got quantized {x.dtype}; call .dequantize()"
    elif x.is_meta:
        why = (
            f"expected a tensor with values, got one on the meta device, shape {tuple(x.shape)};"
            " materialise the model first (to_empty, or load its weights)"
        )
    elif x.layout != torch.strided:
        why = f"expected a dense tensor, got layout {x.layout}; call .to_dense() or pad it"
    else:
        return
    raise RingShapeError(f"{name}: {why}")


def check_derivative() -> None:
    """Refuse the torch.func transforms and dual levels under which attention would lose a derivative.

    A custom operator drops tangents and has no rule for torch.func.grad; torch.func.vmap is right (one sample
    after the other), and backward() is what it has a gradient for.

    Raises:
        RingConfigError: names the one that is active.
    """
    active = {level.key() for level in retrieve_all_functorch_interpreters()}
    if forward_ad._current_level >= 0 or TransformType.Jvp in active:
        raise RingConfigError(
            "ring attention: expected reverse-mode differentiation, got forward mode (torch.func.jvp, jacfwd,"
            " hessian or torch.autograd.forward_ad); use backward() or torch.autograd.grad"
        )
    if TransformType.Grad in active:
        raise RingConfigError(
            "ring attention: expected backward() or torch.autograd.grad, got a torch.func transform (grad,"
            " vjp, jacrev); use those, or torch.func.vmap alone"
        )


def check_not_transformed(name: str) -> None:
    """Raise RingConfigError under torch.func, for a function that sends tensors by itself."""
    if peek_interpreter_stack() is not None:
        raise RingConfigError(
            f"{name}: expected a call outside of torch.func, got one inside a transform (vmap, grad), whose"
            " tensors cannot be sent; give it the whole batch, or call it for one sample after the other"
        )


def check_arguments(batch_dim_idx: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RingConfigError for arguments of a call that say something new (None and dropout 0 do not)."""
    # type(), since True is an int as well.
    if batch_dim_idx is not None and (type(batch_dim_idx) is not int or batch_dim_idx not in (0, 1)):
        raise RingConfigError(
            f"batch_dim_idx: expected None for [B, H, S, D], 0 for [B, S, H, D] or 1 for [S, B, H, D],"
            f" got {shown(batch_dim_idx)}"
        )
    for name in ("dropout", "dropout_p"):
        value = kwargs.pop(name, None)
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise RingConfigError(
                f"{name}: expected 0, got {shown(value)}: there is none here; set it to 0 in the"
                " model's config"
            )
    given = [repr(type(a).__name__) for a in args if a is not None]
    given += [name for name, value in kwargs.items() if value is not None]
    if given:
        raise RingConfigError(
            "RingAttention: expected q, k and v alone, got what it cannot honour, the argument(s)"
            f" {', '.join(given)}; express masks as a pattern"
            ' (ds_ring.Causal(), or "pattern" in the JSON), apply rotary embeddings before the call'
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor, same_head_dim: bool = True) -> None:
    """Refuse what is no q, k and v of one attention call, whatever the layout.

    Args:
        q, k, v: [B, H, S, D], [B, G, S, D] and [B, G, S, E].
        same_head_dim: k has the head_dim of q; False: k is expanded before it is used.

    Raises:
        RingShapeError: with the shapes, dtypes or devices expected and got.
        RingConfigError: a CUDA graph is captured on the present stream.
    """
    check_not_captured(q)
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
                f"{name}: expected at least a slot on every rank, got an empty tensor of shape"
                f" {tuple(x.shape)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise RingShapeError(
                f"{name}: expected q's dtype and device, got others: {name} is {x.dtype} on {x.device}, q is"
                f" {q.dtype} on {q.device}; cast or move them to agree"
            )
    if k.shape[:3] != v.shape[:3]:
        raise RingShapeError(
            f"k and v: expected equal batch, heads and tokens (dims 0 to 2), got {tuple(k.shape)} and"
            f" {tuple(v.shape)}; pad the shorter one"
        )
    if k.shape[0] != q.shape[0] or (k.shape[3] != q.shape[3] and same_head_dim):
        raise RingShapeError(
            f"q and k: expected equal batch (dim 0) and head_dim (dim 3), got {tuple(q.shape)} and"
            f" {tuple(k.shape)}; slice or expand one of them"
        )


def check_not_captured(q: Tensor) -> None:
    """Raise RingConfigError if a CUDA graph is captured on the present stream of q's device."""
    if q.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RingConfigError(
            "ring attention: expected a stream that is not captured, got a call while a CUDA graph is"
            " captured; a replayed graph would compare no headers and have no deadlines: leave attention out"
            " of the graph (torch.compile does so by itself)"
        )


def check_finite(ring_rank: int, hop: int | None, **tensors: Tensor | None) -> None:
    """Raise RingFiniteError for values that are not finite: one read of memory, on a GPU one wait for it.

    Args:
        ring_rank: this rank.
        hop: after which hop; None for what goes into a pass.
        tensors: by the name for the message. An `lse` may be -inf: that row saw no key.
    """
    if any(x is not None and is_fake(x) for x in tensors.values()):
        return
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor)
        if name == "lse":
            bad &= tensor != float("-inf")
        count = int(bad.sum())
        if count:
            where = "before the first hop" if hop is None else f"after hop {hop}"
            first = tuple(torch.nonzero(bad)[0].tolist())
            raise RingFiniteError(
                f"check_finite: expected finite values in {name} of ring rank {ring_rank} {where}, got"
                f" {count} of {tensor.numel()} that are not, the first at {first}; look at what computes"
                f" {name} there (learning rate, loss scale, a mask of -inf), or turn check_finite off to let"
                " them pass"
            )


def check_heads(query_heads: int, kv_heads: int, ulysses_size: int) -> None:
    """Raise RingShapeError for numbers of heads that cannot be grouped, or split over the Ulysses ranks."""
    if query_heads % kv_heads:
        raise RingShapeError(
            f"query heads: expected a multiple of K/V heads: got {query_heads} and {kv_heads}; for"
            " grouped-query attention pass k and v with their own, smaller number of heads"
        )
    # Query heads are a multiple of K/V heads, so they split as well.
    if kv_heads % ulysses_size:
        raise RingShapeError(
            f"Ulysses splits heads: {kv_heads} K/V heads (of {query_heads} query heads) are not divisible by"
            f" ulysses_size {ulysses_size}; use a divisor of {kv_heads}, and a larger ring"
        )


def check_tokens(q_tokens: int, k_tokens: int, slots: int) -> None:
    """Raise RingShapeError for lengths that are not a rank's (of its part, before Ulysses joins them)."""
    if q_tokens != slots or k_tokens != slots:
        raise RingShapeError(
            f"expected shards: the layout has {slots} slots per rank, got q with {q_tokens} and k with"
            f" {k_tokens} local tokens; shard with ds_ring.shard_sequence and the layout that is passed here"
            " (ds_ring.decode_attention takes queries that every rank has whole)"
        )


def check_keys(k_tokens: int, local_tokens: int) -> None:
    """Raise RingShapeError for keys that are no shard of the layout; the queries may be other tokens."""
    if k_tokens != local_tokens:
        raise RingShapeError(
            f"expected shards: the layout has {local_tokens} slots per rank, got k with {k_tokens} local"
            " tokens; k and v are shards, whatever the queries are: shard them with"
            " ds_ring.shard_sequence and the layout that is passed here"
        )
