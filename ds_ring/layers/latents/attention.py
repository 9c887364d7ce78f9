"""Attend over latents that travel around the ring in place of keys and values: `latent_attention`.

Owns the calls. `kernel.py` expands the latents where they arrive, `latent_op.py` has the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_ring.attention_module import RingAttention
from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.pass_options import PassOptions
from ds_ring.layers.latents.kernel import check_one_head, check_transport, latent_value_dim
from ds_ring.layers.latents.latent_op import latent_attention_op
from ds_ring.masks.pair_masks import ScoreFunction
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.compiled import (
    GraphRefusal,
    check_traced,
    differentiable,
    get_handle,
    make_refused_results,
    refusal_from,
)
from ds_ring.ops.context import AskedContext, RingContext, get_call_context
from ds_ring.ops.eager import check_eager, run_compared
from ds_ring.ops.extra_operand import ExtraOperand
from ds_ring.ops.passes import Operands
from ds_ring.ops.prepare import check
from ds_ring.ops.ulysses import HEADS, SWAPS, TOKENS, UlyssesAllToAll, with_ulysses
from ds_ring.schedule.layout import Layout


def latent_attention(
    q: Tensor, latent: Tensor, rope: Tensor, up_projection: Tensor, *, pattern: Pattern,
    layout: Layout | str, mesh: RingMesh, scale: float | None = None, sinks: Tensor | None = None,
    score_mod: ScoreFunction | None = None, return_lse: bool = False, options: PassOptions | None = None,
) -> Any:  # fmt: skip
    """Compute multi-head latent attention over a sharded sequence, as of DeepSeek and Kimi. Differentiable.

    Latents travel, and each rank expands those that arrive (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    Args:
        q: local queries [B, H, S, N + R], without and with rotary embedding.
        latent: [B, 1, S, L], one head.
        rope: the rotary key that all heads share, [B, 1, S, R].
        up_projection: [H * (N + E), L]: for each head N numbers for the key, then E for the value, as
            `kv_b_proj.weight` of DeepSeek's models. On each rank its gradient is that of the rank's queries
            (with Ulysses also of its heads): sum it over the sequence's ranks.
        pattern: the same for all heads.
        layout, mesh, scale, sinks, score_mod, return_lse, options: see `ring_attention`.

    Returns:
        out [B, H, S, E]; with `return_lse` (out, lse).

    Raises:
        RingShapeError: tensors that do not fit each other.
        RingConfigError: a transport that takes no latents.
        RingPatternError: a pattern that differs between heads.
        RingError: as in `ring_attention`.
    """
    request = AskedContext(pattern, layout, mesh, scale, "auto", options, score_mod)
    if torch.compiler.is_compiling():
        handle = get_handle(request)
        return attend_compiled(q, latent, rope, up_projection, handle, mesh, sinks, return_lse)
    return attend(q, latent, rope, up_projection, get_call_context(request), sinks, return_lse)


class LatentAttention(RingAttention):
    """Compute what `latent_attention` does, as a module; arguments as of `RingAttention`."""

    def forward(  # type: ignore[override]
        self, query: Tensor, latent: Tensor, rope: Tensor, *, up_projection: Tensor,
        sinks: Tensor | None = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Attend over local shards; see `latent_attention`."""
        inputs = query, latent, rope, up_projection
        if torch.compiler.is_compiling():
            return attend_compiled(*inputs, self._handle, self._mesh, sinks, return_lse)
        return attend(*inputs, self._get_context(), sinks, return_lse)


class _Latents(ExtraOperand):
    """What travels, before Ulysses takes it apart: the up-projection is checked after that."""

    name = "latents"
    allows_other_key_dim = True

    def __init__(self) -> None: ...

    def check(self, context: RingContext, operands: Operands, parts: int) -> None:
        check_transport(context)


def _check_latents(context: RingContext, tensors: Sequence[Tensor], parts: int) -> None:
    q, latent, rope = tensors
    check(context, Operands(q, latent, rope), parts, [_Latents()])


# Every rank needs the latents of all tokens of its shard: an all-to-all of copies.
_ALL_TO_ALL = "Ulysses of q and latents"
SWAPS[_ALL_TO_ALL] = UlyssesAllToAll(HEADS, TOKENS, "Ulysses of dq, dk, dv", _check_latents)
_NAMES = ("q", "latent", "rope", "up_projection", "sinks")


def attend(
    q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, context: RingContext, sinks: Tensor | None,
    return_lse: bool,
) -> Any:  # fmt: skip
    """Return out [B, H, S, E]; with `return_lse` (out, lse). Eager."""
    check_eager(context, return_lse, _NAMES, q, latent, rope, up, sinks)
    if context.mesh.ulysses_size > 1:
        with collective(context.mesh, "attention"):
            check_one_head(latent, rope)
    return _attend(q, latent, rope, up, context.handle, context.mesh, sinks, return_lse)


def attend_compiled(
    q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, handle: int | GraphRefusal, mesh: RingMesh,
    sinks: Tensor | None, return_lse: bool,
) -> Any:  # fmt: skip
    """Do what `attend` does, in a function that torch.compile traces."""
    check_traced(mesh, return_lse, _NAMES, q, latent, rope, up, sinks)
    handle_or_refusal = refusal_from(check_one_head, latent, rope) or differentiable(handle)
    if isinstance(handle_or_refusal, tuple):
        width = latent_value_dim(q, rope, up, q.shape[1])  # q has all heads here
        return make_refused_results(q, max(width, 1), handle_or_refusal, mesh, return_lse)
    return _attend(q, latent, rope, up, handle_or_refusal, mesh, sinks, return_lse)


def _attend(
    q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, handle: int, mesh: RingMesh, sinks: Tensor | None,
    return_lse: bool,
) -> Any:  # fmt: skip
    def run(q: Tensor, latent: Tensor, rope: Tensor) -> Any:
        inputs = (q, latent, rope, up, handle, sinks)
        return run_compared(mesh, "latent_attention", latent_attention_op, *inputs)

    size = mesh.ulysses_size
    if size > 1:
        latent, rope = (x.expand(-1, size, -1, -1) for x in (latent, rope))
    return with_ulysses(run, q, latent, rope, handle, size, return_lse, _ALL_TO_ALL)
