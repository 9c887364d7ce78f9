"""Attend over a sharded sequence in place of a model's attention: the module `RingAttention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError, shown
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import RingContext, make_ring_context
from ds_ring.ops.eager import attend
from ds_ring.ops.options import Options, as_value
from ds_ring.schedule.layout import Layout

if TYPE_CHECKING:
    from ds_ring.config.section import RingConfig
    from ds_ring.masks.pair_masks import ScoreFunction
    from ds_ring.ops.compiled import GraphRefusal


class RingAttention(nn.Module):
    """Compute ring attention in place of a model's `scaled_dot_product_attention`.

    Args:
        config_or_pattern: a `RingConfig` (pattern, layout and options come from the JSON), or a `Pattern`.
        mesh: this process's place in the grid of ranks.
        layout: a layout, or the name of one, which is built as in `ring_attention`. None means the config's
            layout, or "auto" with a `Pattern`.
        scale: factor of the scores; None is 1 / sqrt(D).
        pattern: replaces the config's pattern, for example for packed documents, which differ by batch.
        score_mod: see `ring_attention`.
    """

    def __init__(
        self,
        config_or_pattern: RingConfig | Pattern,
        *,
        mesh: RingMesh,
        layout: Layout | str | None = None,
        scale: float | None = None,
        pattern: Pattern | None = None,
        score_mod: ScoreFunction | None = None,
    ) -> None:
        super().__init__()
        if isinstance(config_or_pattern, Pattern):
            options, name = Options(scale=scale), "auto"
            pattern = config_or_pattern
        else:
            from ds_ring.config.section import RingConfig, pattern_from_config

            if not isinstance(config_or_pattern, RingConfig):
                raise RingConfigError.wrong(
                    "RingAttention", "a RingConfig or a Pattern", shown(config_or_pattern),
                    "use RingConfig.from_deepspeed(...) for a dict or a file",
                )  # fmt: skip
            options, name = Options.make(config_or_pattern, scale=scale), config_or_pattern.layout
            if pattern is None and config_or_pattern.pattern.documents:  # each batch's own
                expected = 'a pattern beside a config with "documents": true'
                advice = "pass pattern=pattern_from_config(config) & Documents(document_ids)"
                raise RingConfigError.wrong("RingAttention", expected, "none", advice)
            pattern = pattern_from_config(config_or_pattern) if pattern is None else pattern
        pattern, where, score_mod = self._choose_placement(
            pattern, layout if layout is not None else name, mesh, score_mod
        )
        if score_mod is not None:
            options = options.replaced(score_mod=as_value(score_mod))
        self.context: RingContext = make_ring_context(pattern, where, mesh, options, keeps_functions=True)
        self._mesh, self._handle = mesh, self.context.handle

    def _choose_placement(
        self, pattern: Pattern, layout: Layout | str, mesh: RingMesh, score_mod: ScoreFunction | None
    ) -> tuple[Pattern, Layout | str, ScoreFunction | None]:
        """Return the pattern, the layout and the score_mod of the pass; for modules of other sequences."""
        return pattern, layout, score_mod

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int | None = None, *args: Any,
        sinks: Tensor | None = None, return_lse: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Attend over local shards.

        Args:
            query, key, value: [B, H, S, D], [B, G, S, D] and [B, G, S, E]; or, with `batch_dim_idx`, the
                layouts of DeepSpeed's `DistributedAttention`: 0 for [B, S, H, D], 1 for [S, B, H, D].
            batch_dim_idx: None, 0 or 1.
            sinks, return_lse: see `ring_attention`.

        Returns:
            out, in the layout of `query`; with `return_lse` (out, lse), the lse [B, H, S] in all layouts.

        Raises:
            RingConfigError: a positional or keyword argument that this module would have to ignore.
        """
        refusal = None
        if batch_dim_idx is not None or args or kwargs:
            if torch.compiler.is_compiling():
                from ds_ring.ops.compiled import refusal_from

                refusal = refusal_from(check_arguments, batch_dim_idx, args, kwargs)
            else:
                with collective(self._mesh, "attention"):
                    check_arguments(batch_dim_idx, args, kwargs)
        # `_attend` refuses an argument that is not a 4-D tensor, which could not be permuted here.
        if (
            refusal is not None
            or batch_dim_idx is None
            or any(not isinstance(x, Tensor) or x.dim() != 4 for x in (query, key, value))
        ):
            return self._attend(query, key, value, sinks, return_lse, refusal)
        order = (0, 2, 1, 3) if batch_dim_idx == 0 else (1, 2, 0, 3)
        back = (0, 2, 1, 3) if batch_dim_idx == 0 else (2, 0, 1, 3)
        q, k, v = (x.permute(order) for x in (query, key, value))
        results = self._attend(q, k, v, sinks, return_lse, None)
        if isinstance(results, tuple):
            return results[0].permute(back), results[1]
        return results.permute(back)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, return_lse: bool,
        refusal: GraphRefusal | None,
    ) -> Any:  # fmt: skip
        if torch.compiler.is_compiling():
            from ds_ring.ops.compiled import attend_compiled

            return attend_compiled(q, k, v, refusal or self._handle, self._mesh, sinks, return_lse)
        return attend(q, k, v, self._get_context(), sinks, return_lse)

    def _get_context(self) -> RingContext:
        """Return the context of an eager call: another one where the score_mod has captured other values."""
        context = self.context
        mod = context.options.score_mod
        if mod is not None and mod.is_changed():
            with collective(self._mesh, "attention"):
                options = context.options.replaced(score_mod=mod.lookup(mod.function))
                self.context = make_ring_context(
                    context.pattern, context.layout, self._mesh, options, keeps_functions=True
                )
            self._handle = self.context.handle
        return self.context

    def extra_repr(self) -> str:
        context = self.context
        return f"{context.pattern}, layout={context.layout}, ring_size={context.mesh.ring_size}"


def check_arguments(batch_dim_idx: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RingConfigError for arguments of a call that say something new (None and dropout 0 do not)."""
    # type(), since True is an int as well.
    if batch_dim_idx is not None and (type(batch_dim_idx) is not int or batch_dim_idx not in (0, 1)):
        expected = "None for [B, H, S, D], 0 for [B, S, H, D] or 1 for [S, B, H, D]"
        raise RingConfigError.wrong("batch_dim_idx", expected, shown(batch_dim_idx), "pass one of the three")
    for name in ("dropout", "dropout_p"):
        value = kwargs.pop(name, None)
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise RingConfigError.wrong(name, "0", shown(value), "set it to 0 in the model's config")
    arguments = [repr(type(a).__name__) for a in args if a is not None]
    arguments += [name for name, value in kwargs.items() if value is not None]
    if arguments:
        advice = "express masks as a pattern, apply rotary embeddings before the call"
        raise RingConfigError.wrong(
            "RingAttention", "q, k and v alone", f"{', '.join(arguments)} as well", advice
        )
