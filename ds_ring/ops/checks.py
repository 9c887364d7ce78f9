"""Check what one rank can say about its own tensors, with no other rank in mind.

Owns the limits on q, k and v and the messages about them. `collective.py` tells the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, is_legacy_batchedtensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from ds_ring.comm.streams import is_fake
from ds_ring.errors import RingConfigError, RingFiniteError, RingLayoutError, RingShapeError, shown
from ds_ring.schedule.layout import Layout

# What `shard_sequence` cut, by id: its Shard, for as long as a tensor lives; [Note: shards that are known].
shards: dict[int, Any] = {}
NAMES = ("q", "k", "v", "sinks")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_floats(operator: str, **tensors: object) -> None:
    """Raise RingShapeError for operands, by name, that are no plain tensors of a floating dtype."""
    for name, x in tensors.items():
        check_operand(f"{operator}: {name}", x)
        assert isinstance(x, Tensor)
        if x.dtype not in DTYPES:
            expected, advice = "a floating dtype (float64 to float16)", "cast it"
            raise RingShapeError.wrong(f"{operator}: {name}", expected, f"{x.dtype}", advice)


def check_operand(name: str, x: object) -> None:
    """Refuse what the dispatcher would not run a real operator on.

    The operator's body has all other checks, and never sees such a tensor: a meta tensor is answered by the
    fake implementation, and the ranks that hold real tensors would wait.

    Raises:
        RingShapeError: with what it is.
    """
    if not isinstance(x, Tensor):
        why = "a tensor", type(x).__name__, "convert it with torch.as_tensor"
    # A DTensor, by its attributes: nothing has to be imported for it.
    elif hasattr(x, "to_local") and hasattr(x, "placements"):
        advice = (
            "call .to_local() if it is placed as the layout, else .full_tensor() and ds_ring.shard_sequence"
        )
        why = "this rank's plain tensor", f"a {type(x).__name__}", advice
    elif x.is_nested:
        advice = "pack its sequences and pass ds_ring.Documents, or use torch.nested.to_padded_tensor"
        why = "a dense tensor", "a nested one", advice
    elif x.is_quantized:
        why = "a floating dtype", f"quantized {x.dtype}", "call .dequantize()"
    elif x.is_meta:
        got, advice = f"one on the meta device, shape {tuple(x.shape)}", "load the model's weights (to_empty)"
        why = "a tensor with values", got, advice
    elif x.layout != torch.strided:
        why = "a dense tensor", f"layout {x.layout}", "call .to_dense() or pad it"
    else:
        return
    raise RingShapeError.wrong(name, *why)


def check_operands(return_lse: object, names: tuple[str, ...], *operands: object) -> None:
    """Refuse arguments that the operator's schema would reject before its body runs; only sinks may be None.

    Raises:
        RingShapeError: names it.
    """
    for name, x in zip(names, operands, strict=True):
        if x is not None or name != "sinks":
            check_operand(name, x)
    if not isinstance(return_lse, bool):
        raise RingShapeError(f"return_lse: expected True or False, got {shown(return_lse)}; use a bool")


def check_derivative(name: str = "ring attention") -> None:
    """Refuse the torch.func transforms and dual levels under which an operator would lose a derivative.

    A custom operator drops tangents and has no rule for torch.func.grad; torch.func.vmap is right (one sample
    after the other), and backward() is what it has a gradient for.

    Raises:
        RingConfigError: names the one that is active.
    """
    supported = "backward() or torch.autograd.grad"
    active = {level.key() for level in retrieve_all_functorch_interpreters()}
    if forward_ad._current_level >= 0 or TransformType.Jvp in active:
        got = "forward mode (torch.func.jvp, jacfwd, hessian or torch.autograd.forward_ad)"
        raise RingConfigError.wrong(name, "reverse-mode differentiation", got, f"use {supported}")
    if TransformType.Grad in active:
        got = "a torch.func transform (grad, vjp, jacrev)"
        raise RingConfigError.wrong(name, supported, got, "use those, or torch.func.vmap alone")


def check_not_transformed(name: str) -> None:
    """Raise RingConfigError under torch.func, for a function that sends tensors by itself."""
    if peek_interpreter_stack() is not None:
        got = "one inside a transform (vmap, grad), whose tensors cannot be sent"
        raise RingConfigError.wrong(name, "a call outside of torch.func", got, "give it the whole batch")


def check_layout(layout: object, ring_size: int | None = None) -> None:
    """Raise RingLayoutError for what is no layout, or one for another ring than the mesh's."""
    if not isinstance(layout, Layout):
        advice = "use make_layout(name, tokens=T, ring_size=P)"
        raise RingLayoutError.wrong("layout", "a layout", shown(layout), advice)
    if ring_size not in (None, layout.ring_size):
        expected, got = f"one for {ring_size} ranks (the mesh's ring)", f"one for {layout.ring_size} ranks"
        advice = f"build it with make_layout(..., ring_size={ring_size})"
        raise RingLayoutError.wrong("layout", expected, got, advice)


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
            expected = "4 dimensions [batch, heads, tokens, head_dim]"
            raise RingShapeError.wrong(name, expected, f"shape {tuple(x.shape)}", "use unsqueeze or squeeze")
        if x.dtype not in DTYPES:
            raise RingShapeError.wrong(name, "a floating dtype (float64 to float16)", str(x.dtype), "cast it")
        if 0 in x.shape:
            got = f"an empty tensor of shape {tuple(x.shape)}"
            raise RingShapeError.wrong(name, "at least a slot on every rank", got, "use fewer ranks")
        if x.dtype != q.dtype or x.device != q.device:
            got = f"others: {name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}"
            raise RingShapeError.wrong(name, "q's dtype and device", got, "cast or move them to agree")
    if k.shape[:3] != v.shape[:3]:
        expected, got = (
            "equal batch, heads and tokens (dims 0 to 2)",
            f"{tuple(k.shape)} and {tuple(v.shape)}",
        )
        raise RingShapeError.wrong("k and v", expected, got, "pad the shorter one")
    if k.shape[0] != q.shape[0] or (k.shape[3] != q.shape[3] and same_head_dim):
        expected, got = "equal batch (dim 0) and head_dim (dim 3)", f"{tuple(q.shape)} and {tuple(k.shape)}"
        raise RingShapeError.wrong("q and k", expected, got, "slice or expand one of them")


def check_not_captured(q: Tensor) -> None:
    """Raise RingConfigError if a CUDA graph is captured on the present stream of q's device."""
    if q.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        # A replayed graph would compare no headers, and have no deadlines.
        got, advice = "a CUDA graph", "leave attention out of the graph (torch.compile does so by itself)"
        raise RingConfigError.wrong("ring attention", "a stream that is not captured", got, advice)


def check_finite(ring_rank: int, hop: int | None, kernel: str = "", /, **tensors: Tensor | None) -> None:
    """Raise RingFiniteError for values that are not finite: one read of memory, on a GPU one wait for it.

    Args:
        ring_rank: this rank.
        hop: after which hop; None for what goes into a pass.
        kernel: which computed them.
        tensors: by the name for the message. An `lse` may be -inf: that row saw no key. So may a sink: it is
            none.
    """
    if any(x is not None and is_fake(x) for x in tensors.values()):
        return
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor)
        if name in ("lse", "sinks"):
            bad &= tensor != float("-inf")
        count = int(bad.sum())
        if count:
            where = "before the first hop" if hop is None else f"after hop {hop}"
            first = tuple(torch.nonzero(bad)[0].tolist())
            expected = f"finite values in {name} of ring rank {ring_rank} {where}"
            got = f"{count} of {tensor.numel()} that are not, the first at {first}"
            source = f'kernel "{kernel}"' if kernel else f"what computes {name} there"
            advice = f"look at {source} (loss scale, a mask of -inf), or turn check_finite off"
            raise RingFiniteError.wrong("check_finite", expected, got, advice)


def check_heads(query_heads: int, kv_heads: int, ulysses_size: int) -> None:
    """Raise RingShapeError for numbers of heads that cannot be grouped, or split over the Ulysses ranks."""
    if query_heads % kv_heads:
        got, advice = f"{query_heads} and {kv_heads}", "for grouped-query attention pass k and v unexpanded"
        raise RingShapeError.wrong("query heads", "a multiple of K/V heads", got, advice)
    # Query heads are a multiple of K/V heads, so they split as well.
    if kv_heads % ulysses_size:
        expected = f"a divisor of {kv_heads} K/V heads (of {query_heads} query heads)"
        advice = f"use a divisor of {kv_heads}, and a larger ring"
        raise RingShapeError.wrong("ulysses_size", expected, str(ulysses_size), advice)


def check_tokens(k_tokens: int, slots: int, q_tokens: int | None = None) -> None:
    """Raise RingShapeError for lengths that are not a rank's (of its part, before Ulysses joins them).

    Without `q_tokens` the queries may be other tokens.
    """
    if k_tokens != slots or q_tokens not in (None, slots):
        got = f"{f'q with {q_tokens} and ' if q_tokens is not None else ''}k with {k_tokens} local tokens"
        advice = "use shard_sequence (decode_attention takes queries that every rank has whole)"
        raise RingShapeError.wrong("shards", f"{slots} slots per rank, those of the layout", got, advice)


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def sees_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether only autograd handles these tensors: no transform, no mode, no tensor subclass."""
    if peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack():
        return False
    is_plain = set(map(type, tensors)) <= _PLAIN
    # is_grads_batched=True makes legacy batched tensors; only an operator has a rule for them.
    for x in tensors if is_plain else ():
        if x is not None and is_legacy_batchedtensor(x):
            return False
    return is_plain
