"""Scale queries by their place in the whole sequence, where a model does so by their place in its tensor.

Owns Llama 4's temperature tuning: layers without rotary embedding multiply each query by
1 + attn_scale * log(1 + floor((p + 1) / floor_scale)), and count p from the first token that they are given.

Shapes: B samples, S local tokens, H query heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.transformers.model_needs import SHARDING
from ds_ring.integrations.transformers.ring_cache import CachedSharding


def tune_by_position(model: nn.Module) -> list[RemovableHandle]:
    """Make layers with temperature tuning count in the whole sequence; return the hooks' handles."""
    handles: list[RemovableHandle] = []
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            handles += _Tuning(module).hook()
    return handles


class _Tuning:
    """Scale the queries of one layer, in place of the layer."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._sharding: BatchSharding | None = None

    def hook(self) -> list[RemovableHandle]:
        module = self._module
        return [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.q_proj.register_forward_hook(self._scaled),
            # also after an error: without a ring the layer scales by itself
            module.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sharding = kwargs.get(SHARDING)
        if not isinstance(sharding, BatchSharding) or torch.compiler.is_compiling():
            raise RingConfigError(
                f"{type(self._module).__name__}: config.attn_temperature_tuning scales queries by their place"
                " in the sequence, which a compiled model is not told; do not compile it, or set it to False,"
                " if that is your model"
            )
        if not isinstance(
            sharding, CachedSharding
        ):  # whose new tokens every rank has: the layer counts right
            self._sharding, self._module.attn_temperature_tuning = sharding, False

    def _scaled(self, _: nn.Module, args: tuple[Any, ...], queries_BSE: Tensor) -> Tensor:
        """Return the projected queries [B, S, H * D], scaled as the layer would do it."""
        if self._sharding is None:
            return queries_BSE
        positions_S = self._sharding.with_slots(queries_BSE.device).slots
        assert positions_S is not None
        steps_S = torch.floor((positions_S.float() + 1.0) / self._module.floor_scale)
        scale_S = torch.log1p(steps_S) * self._module.attn_scale + 1.0
        return (queries_BSE * scale_S[:, None]).to(queries_BSE.dtype)

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._sharding is not None:
            self._sharding, self._module.attn_temperature_tuning = None, True
