"""Call PyTorch's FlexAttention operators for one hop, forward and backward.

Owns what torch.compile compiles for the kernel `flex`, and the two functions as the kernel calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import (
    flex_attention as forward_operator,
)
from torch._higher_order_ops.flex_attention import (
    flex_attention_backward as backward_operator,
)

from ds_ring.runtime.block_mask import HopTensors
from ds_ring.runtime.kernels.flex_masks import ScoreTensors, block_mask_of, score_mod_of

Call = Callable[..., tuple[Tensor, ...]]


class Calls(NamedTuple):
    """Hold compiled functions; see `_forward` and `_backward` for what they take."""

    forward: Call
    backward: Call


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: HopTensors,
    scores: ScoreTensors | None,
    block: str,
    scale: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one hop; the lse as the operator has it."""
    blocks = block_mask_of(mask, int(block)).as_tuple()
    out, lse, *_ = forward_operator(q, k, v, score_mod_of(mask, scores), blocks, scale, options)
    return out, lse


# [Note: the backward operator]
# The gradient of a hop needs the global out and lse, which autograd would not pass: PyTorch's operator
# `flex_attention_backward` takes them. Its lse is base 2, but natural for BACKEND="FLASH" (torch 2.13's
# `_finalize_outputs` says so of the forward operator). In torch 2.11 Dynamo cannot derive the operator's
# joint graph; there a hop is recomputed and differentiated, 29 % more FLOPs, and the log says so. With w =
# exp(lse of the hop - lse), d out / d out_hop = w and d out / d lse_hop = w (out_hop - out) are exact.
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    mask: HopTensors,
    scores: ScoreTensors | None,
    block: str,
    scale: float,
    options: dict[str, Any],
    joint: Callable[..., Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of one hop from the global out and lse; the lse as the operator takes it."""
    blocks, score_mod = block_mask_of(mask, int(block)).as_tuple(), score_mod_of(mask, scores)
    graph: Any = None if joint is None else partial(joint, score_mod)
    # A joint graph of None is derived from the score_mod by the compiler; [Note: the backward operator]
    dq, dk, dv, _ = backward_operator(
        q, k, v, out, lse, grad_out, grad_lse, score_mod, graph, blocks, scale, options, (), ()
    )
    return dq, dk, dv


def _gradient_of_score(
    score_mod: Callable[..., Tensor],
    score: Tensor,
    batch: Tensor,
    head: Tensor,
    query: Tensor,
    key: Tensor,
    grad: Tensor,
) -> list[Tensor | None]:
    """Return the joint graph of a score_mod.

    Nothing derives it where nothing is compiled: below autograd, where the ring's operator runs, torch would
    find no gradient.
    """
    pull: Any = torch.func.vjp(lambda x: score_mod(x, batch, head, query, key), score)[1]
    return [pull(grad)[0], None, None, None, None]


# [Note: one compilation]
# torch.compile makes constants of Python integers and of sizes that it was not told about. So everything that
# differs from hop to hop enters as a tensor whose token dimensions are marked dynamic, the BlockMask is put
# together inside the compiled function, and inputs are contiguous (strides are constants too). What remains
# is compiled anew: another number of heads, head_dim, dtype, scale, number of branches, mask function, side
# of a block (a text: an integer that changes would become a symbol).
@lru_cache(maxsize=8)
def compiled_calls(backend: str | None) -> Calls:
    """Return the two functions, compiled by a backend of torch.compile; None leaves them as they are."""
    if backend is None:
        return Calls(_forward, partial(_backward, joint=_gradient_of_score))
    return Calls(*(torch.compile(call, backend=backend, fullgraph=True) for call in (_forward, _backward)))
