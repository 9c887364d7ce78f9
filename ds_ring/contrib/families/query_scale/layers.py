"""Llama 4's temperature tuning on a ring: queries are scaled by their position in a sequence or path.

Shapes: B samples, S local tokens, E width of all query heads.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.data.batch import SHARDING
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.models.checks import not_compiled
from ds_ring.models.model import TABLE
from ds_ring.models.variant import Variant
from ds_ring.patches import AppliedPatch, apply, patch, undo

if TYPE_CHECKING:
    from ds_ring.models.model_adapter import ModelAdapter

_SCALING = TABLE.given("scaling", "transformers.models.llama4.modeling_llama4.Llama4TextAttention")
_patch = partial(patch, feature="query scale", when="attn_temperature_tuning (Llama 4)")
_switch = _patch(
    _SCALING, "attn_temperature_tuning", stage="around_forward", kind="set",
    reason="the layer would scale by local positions",
)  # fmt: skip


class TemperatureTuning(Variant):
    """Layers without rotary embedding that scale their queries by position."""

    def matches(self, module: nn.Module) -> bool:
        return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(
            module, "use_rope", True
        )

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        return {"attn_temperature_tuning"}

    def install_on(self, module: nn.Module, adapter: ModelAdapter) -> None:
        adapter.apply(QueryScale(module), scaling=module, q_proj=module.q_proj)


class QueryScale:
    """Scale the queries of one layer of Llama 4 with temperature tuning, in place of the layer.

    A layer without rotary embedding multiplies each query by 1 + attn_scale * log(1 + floor((p + 1) /
    floor_scale)), and counts p from the first token that it is given.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._sharding: BatchSharding | None = None
        self._off: list[AppliedPatch] = []

    @_patch(_SCALING, stage="before_forward", reason="switches the layer's own scaling off")
    def before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Switch the layer's own scaling off."""
        sharding = kwargs.get(SHARDING)
        if not isinstance(sharding, BatchSharding) or torch.compiler.is_compiling():
            raise not_compiled(type(self._module).__name__, "scales queries (attn_temperature_tuning)")
        # New tokens of a generation are on every rank: the layer scales them right.
        if not sharding.is_replicated:
            self._sharding = sharding
            self._off = self._off or apply(_switch.to(False), scaling=self._module)

    @_patch(
        TABLE.given("q_proj", "torch.nn.Linear"), stage="after_forward",
        reason="scales queries by positions in the sequence",
    )  # fmt: skip
    def scaled(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], queries_BSE: Tensor
    ) -> Tensor:
        """Return the projected queries [B, S, H * D], scaled as the layer would do it."""
        if self._sharding is None:
            return queries_BSE
        numbers_BS = self._sharding.numbers_in_paths(queries_BSE.device)
        steps_BS = torch.floor((numbers_BS.float() + 1.0) / self._module.floor_scale)
        scale_BS = torch.log1p(steps_BS) * self._module.attn_scale + 1.0
        return (queries_BSE * scale_BS[..., None]).to(queries_BSE.dtype)

    @_patch(
        _SCALING, stage="after_forward", options=("always_call",),
        reason="switches the layer's own scaling on, also after an error",
    )  # fmt: skip
    def after_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Switch the layer's own scaling on again: without a ring the layer scales by itself."""
        self._sharding = None
        undo(self._off)
