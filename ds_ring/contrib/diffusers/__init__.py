"""The ring as an attention backend of diffusers, for models under its context parallelism.

    from ds_ring.contrib import diffusers as on_the_ring
    on_the_ring.install()

    transformer.set_attention_backend("ds_ring")
    transformer.enable_parallelism(config=diffusers.ContextParallelConfig(ring_degree=4, ulysses_degree=2))

diffusers splits inputs and gathers outputs by the model's `_cp_plan`: each rank has a part of consecutive
tokens. Attention then is `ds_ring.ring_attention`, with gradients. diffusers' own rings gather all K/V, and
refuse causal and grouped attention.

- `is_causal` means the order of the ranks' parts. Where a rank joins its text tokens and its image tokens,
  that is not the order of the joined sequence; such models attend in full.
- A mask is of this rank's keys, as the `_cp_plan` splits it.
- Queries and keys may be of two sequences, each of them split (cross attention).
- Where a processor passes no `parallel_config` (cross attention to text that is not split), each rank attends
  by itself, by diffusers' backend "native".
- A compiled model breaks its graph at attention.
- `rotate_method` and `convert_to_fp32` are not read: K/V go around a ring; parts merge in float32 or float64.

Shapes, as in diffusers: B samples, S local tokens, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_ring.api import ring_attention
from ds_ring.comm.collective import collective
from ds_ring.contrib.ring_flash_attn import mesh_of
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.layers.cross.attention import cross_attention
from ds_ring.layers.scores import with_key_terms
from ds_ring.masks.catalog import Causal, Full
from ds_ring.patches import PatchTable, apply, patch
from ds_ring.schedule.layout import make_layout

NAME = "ds_ring"
_DISPATCH = "diffusers.models.attention_dispatch"

DIFFUSERS = PatchTable("diffusers", ">=0.42")
_names = [
    patch(
        DIFFUSERS.imported(f"{_DISPATCH}.AttentionBackendName.{members}"), key, stage="at_enable",
        kind="added", feature="backend.name",
        reason="names of backends are members of an enumeration, which diffusers cannot extend",
    )
    for members, key in (("_member_map_", NAME.upper()), ("_value2member_map_", NAME))
]  # fmt: skip


def install() -> None:
    """Give diffusers the attention backend "ds_ring", for this process.

    The first forward pass of a model under context parallelism makes the ring: it is collective over the
    world.

    Raises:
        RingConfigError: this diffusers has no such registry.
    """
    from diffusers.models import attention_dispatch

    names: Any = attention_dispatch.AttentionBackendName
    if NAME in names._value2member_map_:
        return
    name = str.__new__(names, NAME)
    name._name_, name._value_ = NAME.upper(), NAME
    apply(*(row.to(name) for row in _names), partial(_register, name))


@patch(
    DIFFUSERS.imported(f"{_DISPATCH}._AttentionBackendRegistry"), "register", stage="at_enable",
    kind="registered", feature="backend", reason="attention on the ring, under context parallelism",
)  # fmt: skip
def _register(name: Any) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    registry.register(name, supports_context_parallel=True)(attention)


@torch.compiler.disable
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:  # fmt: skip
    """Attend as diffusers' `dispatch_attention_fn` asks a backend to.

    Args:
        query, key, value: local shards [B, S, H, D], [B, S, G, D] and [B, S, G, D].
        attn_mask: of this rank's keys, True where they are attended to, or a term of their scores: [B, S],
            or [1 or B, 1 or H, 1, S], with H only if H = G. Terms may have a gradient.
        dropout_p: 0.
        is_causal: query and key are of one sequence, and a query sees the keys before it, and its own.
        scale: factor of the scores; None is 1 / sqrt(D).
        enable_gqa: not read: H may always be a multiple of G.
        _parallel_config: diffusers' `ParallelConfig`; without one the rank attends by itself.

    Raises:
        RingConfigError, RingPatternError: what the ring would not do; on every rank, nothing is sent.
    """
    if _parallel_config is None:
        return _alone(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    context = _parallel_config.context_parallel_config
    mesh = mesh_of(context._flattened_mesh.get_group(), context.ulysses_degree)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with collective(mesh, "attention"):
        _check(q, k, dropout_p, is_causal, context)
        if attn_mask is not None:
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            q, k = with_key_terms(q, k, _terms(attn_mask, q, k), scale)
    of_queries, of_keys = (
        make_layout("contiguous", tokens=x.shape[2] * mesh.sequence_size, ring_size=mesh.ring_size)
        for x in (q, k)
    )
    options: dict[str, Any] = {"pattern": Causal() if is_causal else Full(), "mesh": mesh, "scale": scale}
    if of_keys == of_queries:
        out: Tensor = ring_attention(q, k, v, layout=of_queries, **options)
    else:
        out = cross_attention(q, k, v, layout=of_queries, key_layout=of_keys, **options)
    return out.transpose(1, 2)


def _alone(*arguments: Any) -> Tensor:
    from diffusers.models import attention_dispatch as dispatch

    native = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.NATIVE]
    out: Tensor = native(*arguments)
    return out


def _check(q: Tensor, k: Tensor, dropout_p: float, is_causal: bool, context: Any) -> None:
    if dropout_p:
        raise RingConfigError(f"dropout_p: expected 0, got {dropout_p}; the ring drops no scores")
    for name in ("ring_anything", "ulysses_anything"):
        if getattr(context, name):
            raise RingConfigError(
                f"ContextParallelConfig: expected {name}=False, got True; pad to equal shards"
            )
    if is_causal and q.shape[2] != k.shape[2]:
        raise RingPatternError(f"is_causal: expected {q.shape[2]} keys, as queries, got {k.shape[2]}")


def _terms(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return what a mask adds to the scores of this rank's keys, [B, G, S], finite."""
    samples, heads, keys, _ = k.shape
    scores = mask[:, None, None] if mask.ndim == 2 else mask
    allowed = ({1, samples}, {1, heads} if heads == q.shape[1] else {1}, {1}, {keys})
    fits = scores.ndim == 4 and all(size in sizes for size, sizes in zip(scores.shape, allowed, strict=True))
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise RingPatternError(
            f"attn_mask: expected bool or floating [{samples}, {keys}] or [1 or {samples}, 1 or"
            f" {q.shape[1]}, 1, {keys}], this rank's keys, got {tuple(mask.shape)}, {mask.dtype}"
        )
    terms = scores[:, :, 0]
    if mask.dtype == torch.bool:
        terms = torch.zeros_like(terms, dtype=k.dtype).masked_fill(~terms, -torch.inf)
    # An infinity gives NaN in the gradient of queries, and so does the least number times 1 / scale.
    least = max(-1e30, torch.finfo(k.dtype).min / 2)
    return terms.to(k.dtype).clamp(min=least).expand(samples, heads, keys)
