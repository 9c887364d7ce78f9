"""Call PyTorch's FlexAttention operators for one hop, forward and backward.

Owns what torch.compile compiles for the kernel `flex`, and the two functions as the kernel calls them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from functools import partial
from types import FunctionType
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


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: HopTensors,
    scores: ScoreTensors | None,
    block: int,
    scale: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one hop; the lse as the operator has it."""
    blocks = block_mask_of(mask, block).as_tuple()
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
    block: int,
    scale: float,
    options: dict[str, Any],
    joint: Callable[..., Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of one hop from the global out and lse; the lse as the operator takes it."""
    blocks, score_mod = block_mask_of(mask, block).as_tuple(), score_mod_of(mask, scores)
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
# torch.compile makes constants of Python values and of sizes that it was not told about. So everything that
# differs from hop to hop enters as a tensor whose token dimensions are marked dynamic (the batch too, from 2
# samples on), the BlockMask is put together inside the compiled function, and inputs are contiguous (strides
# are constants too). `Constants` names the rest, and each value of it has a code object of its own: Dynamo
# makes a size symbolic at the second value that a code object sees, which Inductor's CUDA lowering of flex
# refuses for heads, and it refuses the ninth compilation of a code object. The same value says which pass
# compiles, and so which deadline it has (first_pass.py): there is no second list.
class Constants(NamedTuple):
    """Hold what a compiled function takes for constants, beside the side of a block.

    Attributes:
        way: "forward", "backward", or "recomputed", the forward function with gradients.
        device: of the tensors.
        dtypes: of queries, of K, of V and of the gradient of the output (None in a forward pass).
        has_grad_lse: there is a gradient of the lse.
        inference: queries and keys are inference tensors.
        one_sample: the batch is 1.
        queries: 0 for many; else their number or a bound, where Inductor has another kernel for few.
        sizes: query heads, K/V heads, head_dim of queries and of values.
        rule: what of the mask stands in the code, `flex_masks.constants_of_rule`.
        scale: of the scores.
        scores: the score_mod, `flex_masks.constants_of_function`; None for none.
        options: of FlexAttention, as pairs.
    """

    way: str
    device: torch.device
    dtypes: tuple[torch.dtype | None, ...]
    has_grad_lse: bool
    inference: tuple[bool, bool]
    one_sample: bool
    queries: int
    sizes: tuple[int, int, int, int]
    rule: Hashable
    scale: float
    scores: Hashable
    options: tuple[tuple[str, Any], ...]


_compiled: dict[tuple[str | None, Constants, int], Call] = {}


def is_compiled(backend: str | None, constants: Constants, block: int) -> bool:
    """Return whether `compiled_call` has been asked for this function before, or need not compile it."""
    return backend is None or (backend, constants, block) in _compiled


def compiled_call(backend: str | None, constants: Constants, block: int) -> Call:
    """Return the function for some constants, compiled by a backend of torch.compile; None: not compiled."""
    key = (backend, constants, block)
    if key not in _compiled:
        _compiled[key] = _made(backend, constants)
    return _compiled[key]


def _made(backend: str | None, constants: Constants) -> Call:
    call: Any = _backward if constants.way == "backward" else _forward
    if backend is None:
        return partial(call, joint=_gradient_of_score) if call is _backward else _forward
    # Dynamo keeps what it has seen of a function's inputs by file, line and name.
    code = call.__code__.replace(co_name=f"{call.__name__}_{next(_numbers)}")
    own = FunctionType(code, call.__globals__, code.co_name, call.__defaults__)
    return torch.compile(own, backend=backend, fullgraph=True)


_numbers = itertools.count()
