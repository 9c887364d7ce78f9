"""Attention sinks (gpt-oss): one logit for each head in the softmax's denominator, like a key of value 0.

No pass and no kernel knows of sinks. They are added to the results of a pass: with the log-sum-exp lse of the
keys and the sink s of the head, total = log(exp(lse) + exp(s)) and out is multiplied by exp(lse - total). The
backward pass of the attention is then the same with `total` in place of lse, because its probabilities are
exp(score - total). So a sink needs no gradient of an lse, and both stand in one autograd node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.errors import RingShapeError
from ds_ring.ops.checks import DTYPES
from ds_ring.ops.extra_operand import ExtraOperand
from ds_ring.ops.passes import Operands, Results

if TYPE_CHECKING:
    from ds_ring.ops.context import RingContext


class SinkLogits(ExtraOperand):
    """The sinks of all query heads, [H], as an operand of a pass."""

    name: ClassVar[str] = "sinks"

    def check(self, context: RingContext, operands: Operands, parts: int) -> None:
        q = operands.q
        check_sinks(self.tensor, q, q.shape[1] * context.mesh.ulysses_size // parts)

    def finish(self, context: RingContext, results: Results) -> Results:
        return add_sinks(*results, self.tensor[context.heads_here(results[0])])


def check_sinks(sinks: Tensor | None, q: Tensor, query_heads: int) -> None:
    """Raise RingShapeError for sinks that are not a floating number for each of all query heads, beside q."""
    if sinks is None:
        return
    if tuple(sinks.shape) != (query_heads,):
        expected = f"one logit for each query head, shape ({query_heads},)"
        advice = "pass the whole parameter: of all Ulysses ranks' heads, and gathered under ZeRO-3"
        raise RingShapeError.wrong("sinks", expected, f"shape {tuple(sinks.shape)}", advice)
    if sinks.dtype not in DTYPES or sinks.device != q.device:
        expected = f"a floating dtype (float64 to float16) on {q.device} like q"
        raise RingShapeError.wrong("sinks", expected, f"{sinks.dtype} on {sinks.device}", "cast or move them")


def add_sinks(out: Tensor, lse: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the results of a pass with the sinks of its heads; `out` is changed in place.

    Args:
        out, lse: [B, H, S, E] and [B, H, S].
        sinks_H: [H]; None for no sinks.
    """
    if sinks_H is None:
        return out, lse
    total = torch.logaddexp(lse, sinks_H.to(lse.dtype).unsqueeze(-1).expand_as(lse))
    # A row without keys has lse -inf and, with a sink of -inf, a total of -inf: the clamp prevents a NaN.
    weights = torch.exp(lse - total.clamp_min(torch.finfo(lse.dtype).min))
    return out.mul_(weights.unsqueeze(-1)), total


def compute_sinks_gradient(
    sinks_H: Tensor | None, heads: slice, grad_out: Tensor, out: Tensor, lse: Tensor,
    grad_lse: Tensor | None, tokens: int | None = None,
) -> Tensor | None:  # fmt: skip
    """Return the gradient of the sinks from this rank's queries, whose heads are `heads`; 0 for other heads.

    The first `tokens` slots are tokens (None: all): gradients of padding may be NaN.

    A sink is a key whose value is 0, so this is -sum over the rows of
    exp(sink - lse) (sum(out grad_out) - grad_lse), with the results of `add_sinks`.
    """
    if sinks_H is None:
        return None
    count = lse.shape[2] if tokens is None else tokens
    # narrow: a slice of all entries is an alias, which a batched gradient (is_grads_batched) has no rule for
    out, grad_out, lse = (x.narrow(2, 0, count) for x in (out, grad_out, lse))
    if out.device == grad_out.device:
        delta = (out.to(lse.dtype) * grad_out).sum(-1)
    else:  # head by head, if out is on the host
        by_head = zip(out.unbind(1), grad_out.unbind(1), strict=True)
        delta = torch.stack([(o.to(g.device, lse.dtype) * g).sum(-1) for o, g in by_head], dim=1)
    lse = lse.to(delta.device)
    if grad_lse is not None:
        delta = delta - grad_lse.narrow(2, 0, count)
    # A row without keys and sinks has lse -inf; the clamp prevents a NaN.
    weights = torch.exp(sinks_H[heads].unsqueeze(-1) - lse.clamp_min(torch.finfo(lse.dtype).min))
    gradient = -(weights * delta).sum((0, 2)).to(sinks_H.dtype)
    first, end, _ = heads.indices(len(sinks_H))
    return pad(gradient, (first, len(sinks_H) - end))
