"""Attend to near keys with a bias of content and distance, over a sharded sequence.

Only pairs at distances below R have a term. They are a pass of their own, by the kernel of kernel.py, and the
ring sends no key that is farther away. All other pairs are a pass of the usual kernel (`Beyond`). The two
merge by their log-sum-exps. A layer whose window is at most R wide has the first one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_ring.attention_module import RingAttention
from ds_ring.errors import RingConfigError
from ds_ring.layers.distance_bias.kernel import Profiles
from ds_ring.masks.branches import Branch
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.ops.context import RingContext
from ds_ring.ops.eager import check_eager, run_compared
from ds_ring.ops.extra_operand import ExtraOperand
from ds_ring.ops.layer_gradients import allow_first_derivative
from ds_ring.ops.passes import Operands, run_gradient
from ds_ring.ops.prepare import check
from ds_ring.ops.ring_op import run_backward, run_forward, save
from ds_ring.ops.ulysses import HEADS, SWAPS, TOKENS, UlyssesAllToAll, with_ulysses


@dataclass(frozen=True)
class Beyond(Pattern):
    """Attend to keys that are at least `least` tokens before the query."""

    least: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(least=self.least),)


class DistanceBiasAttention(RingAttention):
    """Compute `RingAttention` with the score term r W[:, d - first] at distance d of query r.

    Arguments are as there. `scale` must be given, since queries are wider than keys.
    """

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, *, profiles: Tensor, first: int = 0,
        sinks: Tensor | None = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Attend over local shards.

        Args:
            query: [B, H, S, D + N], of which the last N are the relative states r.
            key, value: [B, G, S, D] and [B, G, S, E].
            profiles: W, [N, R], or [H, N, R] of all query heads; no term at other distances. On each rank its
                gradient is that of the rank's queries: sum it over the sequence's ranks.
            first: the distance of the first profile; below 0 for keys after the query.
            sinks: None.
            return_lse: see `ring_attention`.
        """
        context = self._get_context()
        if torch.compiler.is_compiling() or sinks is not None or context.options.scale is None:
            got = "a compiled call, sinks or no scale"
            advice = "call it eagerly, and merge sinks by return_lse"
            raise RingConfigError.wrong("profiles", "an eager call with a scale and no sinks", got, advice)
        check_eager(context, return_lse, _NAMES, query, key, value, profiles)

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = run_compared(
                context.mesh, "attention with profiles", _Biased.apply, q, k, v, profiles, first, context
            )
            return result

        size = context.mesh.ulysses_size
        return with_ulysses(run, query, key, value, context.handle, size, return_lse, _ALL_TO_ALL)


_NAMES = ("q", "k", "v", "profiles")


class _Biased(torch.autograd.Function):
    """The pass and its gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, profiles: Tensor, first: int, context: RingContext
    ) -> tuple[Tensor, Tensor]:
        ctx.first = first
        results = run_forward(context, q, k, v, None, [Profiles(profiles, first)])
        save(ctx, context, (q, k, v, context, None), results, eager=True, further=(profiles,))
        return results

    @staticmethod
    @allow_first_derivative("attention with profiles")
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, _, profiles = ctx.saved_tensors
        if grad_out is None:  # another rank may need this rank's part of a gradient
            grad_out = torch.zeros_like(out, device=profiles.device)
        bias = Profiles(profiles, ctx.first)
        operands = (ctx.context, grad_out, q, k, v, out, lse, grad_lse, [bias])
        grads = run_gradient(ctx.context.mesh, ctx.call, run_backward, *operands)
        return *grads, bias.gradient(), None, None


class _WideQueries(ExtraOperand):
    """What Ulysses takes apart: queries that are wider than keys."""

    name: ClassVar[str] = "profiles"
    allows_other_key_dim: ClassVar[bool] = True

    def __init__(self) -> None: ...


def _check(context: RingContext, tensors: Sequence[Tensor], parts: int) -> None:
    q, k, v = tensors
    check(context, Operands(q, k, v), parts, [_WideQueries()])


_ALL_TO_ALL = "Ulysses of q with relative states"
SWAPS[_ALL_TO_ALL] = UlyssesAllToAll(HEADS, TOKENS, "Ulysses of dq, dk, dv", _check)
