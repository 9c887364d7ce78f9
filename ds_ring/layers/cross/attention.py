"""Attend from the queries of one sharded sequence to the keys of another: one ring pass of both as one.

Owns the calls. `PairLayout` puts the two layouts together; its pattern has no other pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.attention_module import RingAttention
from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.config.pass_options import PassOptions
from ds_ring.errors import RingLayoutError, RingPatternError
from ds_ring.layers.cross.layout import PairLayout
from ds_ring.masks.pair_masks import ScoreFunction
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.checks import DTYPES
from ds_ring.ops.compiled import GraphRefusal
from ds_ring.ops.context import AskedContext, RingContext, get_call_context
from ds_ring.ops.eager import attend
from ds_ring.ops.tracing import forbid_tracing
from ds_ring.plugin import PASSES
from ds_ring.schedule.layout import Layout

if TYPE_CHECKING:
    from ds_ring.config.section import RingConfig


@forbid_tracing
def cross_attention(
    q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern, layout: Layout, key_layout: Layout,
    mesh: RingMesh, scale: float | None = None, sinks: Tensor | None = None,
    score_mod: ScoreFunction | None = None, return_lse: bool = False, options: PassOptions | None = None,
) -> Any:  # fmt: skip
    """Compute attention from a sharded sequence to another one, which is sharded, too. Differentiable.

    Args:
        q: local queries [B, H, S, D], S slots of `layout`.
        k, v: local keys [B, G, S', D] and values [B, G, S', E], S' slots of `key_layout`.
        pattern: `Full`, or `Documents` with the ids of all queries, then those of all keys.
        layout: of the queries.
        key_layout: of the keys.
        mesh: this process's place in the grid of ranks; all ranks of the sequence (ring x Ulysses) must call.
        scale, sinks, score_mod, return_lse, options: see `ring_attention`. A score_mod gets the position of a
            query among the queries, and of a key among the keys.

    Returns:
        out [B, H, S, E]; with `return_lse` (out, lse).

    Raises:
        RingLayoutError, RingPatternError: not two layouts, or an undefined pattern.
        RingError: as in `ring_attention`.
    """
    pair, between = _make_pair(pattern, layout, key_layout, mesh, options)
    pair_score_mod = pair.score_mod_between(score_mod)
    context = get_call_context(AskedContext(between, pair, mesh, scale, "auto", options, pair_score_mod))
    return _attend_between(pair, q, k, v, context, sinks, return_lse)


class CrossAttention(RingAttention):
    """Compute what `cross_attention` does, as a module.

    Args:
        config_or_pattern, mesh, scale, pattern, score_mod: see `RingAttention`.
        layout: of the queries.
        key_layout: of the keys.
    """

    def __init__(
        self, config_or_pattern: RingConfig | Pattern, *, mesh: RingMesh, layout: Layout, key_layout: Layout,
        scale: float | None = None, pattern: Pattern | None = None, score_mod: ScoreFunction | None = None,
    ) -> None:  # fmt: skip
        self._key_layout = key_layout
        self._options = config_or_pattern if isinstance(config_or_pattern, PassOptions) else None
        super().__init__(
            config_or_pattern, mesh=mesh, layout=layout, scale=scale, pattern=pattern, score_mod=score_mod
        )

    def _choose_placement(
        self, pattern: Pattern, layout: Layout | str, mesh: RingMesh, score_mod: ScoreFunction | None
    ) -> tuple[Pattern, Layout, ScoreFunction | None]:
        self._pair, between = _make_pair(pattern, layout, self._key_layout, mesh, self._options)
        return between, self._pair, self._pair.score_mod_between(score_mod)

    @forbid_tracing
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, return_lse: bool,
        refusal: GraphRefusal | None,
    ) -> Any:  # fmt: skip
        return _attend_between(self._pair, q, k, v, self._get_context(), sinks, return_lse)


def _make_pair(
    pattern: Pattern, layout: object, key_layout: object, mesh: RingMesh, options: PassOptions | None
) -> tuple[PairLayout, Pattern]:
    """Return the layout and the pattern of both sequences as one; refuse other layouts on all ranks."""
    check_mesh(mesh)
    with collective(mesh, "cross attention"):
        if not isinstance(layout, Layout) or not isinstance(key_layout, Layout):
            names = [type(layout_).__name__ for layout_ in (layout, key_layout)]
            raise RingLayoutError(
                f"key_layout: expected two layouts, got {' and '.join(names)}; use ds_ring.make_layout"
            )
        if not isinstance(pattern, Pattern):
            raise RingPatternError(f"pattern: expected a pattern, got {type(pattern).__name__}")
        block = options.block_size if options is not None and PASSES[options.transport].whole_blocks else 1
        pair = PairLayout.join(layout, key_layout, mesh.ulysses_size, block)
        return pair, pair.pattern_between(pattern)


def _attend_between(
    pair: PairLayout, q: Tensor, k: Tensor, v: Tensor, context: RingContext, sinks: Tensor | None,
    return_lse: bool,
) -> Any:  # fmt: skip
    """Attend from q to k and v of another sequence, in a pass of both as one."""
    slots = pair.queries.part_slots(pair.parts)
    # Others are refused, on all ranks.
    if all(isinstance(x, Tensor) and x.dim() == 4 and x.dtype in DTYPES for x in (q, k, v)):
        # the slots of the other sequence are not read
        fill, keys = pair.count_slots(pair.queries) - slots, pair.count_slots(pair.keys)
        q, (k, v) = pad(q, (0, 0, 0, fill + keys)), (among_keys(pair, x) for x in (k, v))
    output = attend(q, k, v, context, sinks, return_lse)
    results = [x[:, :, :slots] for x in (output if return_lse else (output,))]
    if sinks is not None:
        # In the pair padding has positions: its gradients, which may be NaN, would reach the sinks.
        first = context.mesh.sequence_rank % pair.parts * slots
        tokens = max(0, pair.queries.valid_tokens(context.mesh.ring_rank) - first)
        results = [torch.cat([x[:, :, :tokens], x[:, :, tokens:].detach()], dim=2) for x in results]
    return tuple(results) if return_lse else results[0]


def among_keys(pair: PairLayout, x: Tensor) -> Tensor:
    """Return local keys or values [B, G, S', D] at their slots of a pair; the others are not read."""
    fill = pair.count_slots(pair.keys) - pair.keys.part_slots(pair.parts)
    return pad(x, (0, 0, pair.count_slots(pair.queries), fill))
