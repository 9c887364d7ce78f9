"""Attention with a learned key for each distance, in transformers models: XLNet.

The score of a pair at distance d is ((q + a) k + (q + b) r_d) * scale. The key r_d of a head is made of the
sinusoids of d. The module shifts the second terms of all keys, [B, H, S, 2 T]. On a ring its keys r are made
for the distances of the whole sequence, and `DistanceBiasAttention` adds the terms block by block. Segments,
permutations and memories of earlier calls are refused.

Shapes: B samples, H query heads, S local tokens, T global tokens, D head dim, R distances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_ring.data.batch import SHARDING
from ds_ring.data.packing import refuse_trees
from ds_ring.errors import RingConfigError
from ds_ring.layers.distance_bias.attention import DistanceBiasAttention
from ds_ring.masks.catalog import Causal, Full
from ds_ring.models.attention_name import NAME
from ds_ring.models.checks import cannot_run, not_compiled
from ds_ring.models.layer_masks import LayerMask
from ds_ring.models.model import MODEL, TABLE
from ds_ring.models.variant import (
    INTERFACE,
    POSITIONS,
    AttachRequest,
    Variant,
    find_forward_home,
    get_own_attention_advice,
)
from ds_ring.patches import patch

if TYPE_CHECKING:
    from ds_ring.models.attention_call import AttentionCall
    from ds_ring.models.model_adapter import ModelAdapter
    from ds_ring.models.model_call import ModelCall

_patch = partial(
    patch, stage="around_forward", kind="replaced", feature="relative keys",
    when="attention has a learned key for each distance (XLNet)",
)  # fmt: skip
_core = _patch(
    TABLE.given("relative"), "rel_attn_core",
    reason="attends on the ring; calls the original without a ring",
)  # fmt: skip
_encoding = _patch(
    TABLE.given("encodes_distances"), "relative_positional_encoding",
    reason="encodes the distances of the whole sequence; calls the original without a ring",
)  # fmt: skip
_checks_call = patch(
    MODEL, stage="before_forward", feature="relative keys",
    reason="refuses segments, permutations and memories",
    when="attention has a learned key for each distance (XLNet)",
)  # fmt: skip
_TYPE = "xlnet"
_REFUSED = ("mems", "perm_mask", "target_mapping", "token_type_ids", "input_mask", "output_attentions")


@dataclass(frozen=True, eq=False)
class KeysOfDistances:
    """The states (q + b) * scale [B, H, S, D] and the keys r [H, D, R], from the distance `first` on."""

    states_BHSD: Tensor
    keys_HDR: Tensor
    first: int


class RelativeKeys(Variant):
    """Layers that add the product of a query and a learned key of the pair's distance to its score."""

    def matches(self, module: nn.Module) -> bool:
        return hasattr(module, "rel_attn_core") and hasattr(module, "r_r_bias")

    def refuse(self, model: PreTrainedModel, request: AttachRequest) -> None:
        if model.config.model_type != _TYPE:
            return
        if request.as_is:
            advice = 'set "attention": "ring" in the section, and build it without attn_implementation'
            raise cannot_run(model, f"its layers have learned keys of distances; {advice}")
        for key in ("bi_data", "same_length"):
            if getattr(model.config, key, False):
                what = "another mask, or other distances, for some samples"
                raise cannot_run(model, f"config.{key}: {what}; set it to False, if that is your model")

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        known = (
            find_forward_home(model).startswith("transformers.models.") and model.config.model_type == _TYPE
        )
        return {INTERFACE, POSITIONS} if known and not as_is else set()

    def advice(self, kind: type[PreTrainedModel]) -> str | None:
        return get_own_attention_advice(kind, {_TYPE})

    def apart(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers: their outputs have tokens before samples."""
        return [layer for layer in model.modules() if self.matches(getattr(layer, "rel_attn", layer))]

    def install(self, adapter: ModelAdapter) -> None:
        if not any(map(self.matches, adapter.model.modules())):
            return
        adapter.apply(refuse_others(adapter.call), model=adapter.model)
        for module in adapter.model.modules():
            if self.matches(module):
                adapter.apply(wrap_core(module, adapter.model.config, adapter.call), relative=module)
            elif hasattr(module, "relative_positional_encoding"):
                adapter.apply(wrap_encoding(module, adapter.call), encodes_distances=module)

    def read(self, call: AttentionCall) -> None:
        keys = call.arguments.get("position_bias")
        if isinstance(keys, KeysOfDistances):  # another one is refused
            call.taken["relative keys"] = call.arguments.pop("position_bias")

    def attend(self, call: AttentionCall) -> Tensor | None:
        keys = call.taken.get("relative keys")
        if keys is None:
            return None
        if call.pattern is None:
            raise not_compiled(call.name, "adds products of learned keys to the scores")
        refuse_trees(call.sharding.groups)
        attention = call.attention(DistanceBiasAttention)
        wide_BHSD = torch.cat([call.q_BHSD, keys.states_BHSD], dim=-1)
        out: Tensor = attention(wide_BHSD, call.k_BGSD, call.v_BGSE, profiles=keys.keys_HDR, first=keys.first)
        return out

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        if not any(map(self.matches, model.modules())):
            return None
        return "expected plain softmax, got learned keys of distances, which no pass over a cache adds"


def refuse_others(call: ModelCall) -> Callable[..., None]:
    """Return the hook of a model that refuses what a ring does not compute of its arguments."""

    @_checks_call
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(call.signature.bind_partial(*args, **kwargs).arguments) | kwargs
        for key in _REFUSED:
            if arguments.get(key) is not None and arguments[key] is not False:
                raise RingConfigError.wrong(
                    call.name, "tokens of one segment, in order", key, f"leave {key} out of the batch"
                )

    return before


def wrap_encoding(module: Any, call: ModelCall) -> Callable[..., Tensor]:
    """Return what encodes distances: on a ring those of the whole sequence, [R, 1, width]."""
    original = module.relative_positional_encoding

    @_encoding
    def encode(qlen: int, klen: int, bsz: int | None = None, device: torch.device | None = None) -> Tensor:
        if module.config._attn_implementation != NAME:
            encoding: Tensor = original(qlen, klen, bsz=bsz, device=device)
            return encoding
        tokens = call.get_sharding(module).layout.tokens
        encoding = original(tokens, tokens, device=device)
        return encoding

    return encode


def wrap_core(module: Any, config: Any, call: ModelCall) -> Callable[..., Any]:
    """Return what runs in place of a module's attention of projected queries, keys and values."""
    original, pattern = module.rel_attn_core, Causal() if config.attn_type == "uni" else Full()

    @_core
    def attend(
        q_head: Tensor, k_head_h: Tensor, v_head_h: Tensor, k_head_r: Tensor, seg_mat: Tensor | None = None,
        attn_mask: Tensor | None = None, output_attentions: bool = False,
    ) -> Any:  # fmt: skip
        """Return the values [S, B, H, D] that a module's queries attend to; arguments as of the module's."""
        if config._attn_implementation != NAME:
            return original(q_head, k_head_h, v_head_h, k_head_r, seg_mat, attn_mask, output_attentions)
        sharding = call.get_sharding(module)
        # Distances fall from T on; the last is the first one of the profiles.
        keys_HDR = k_head_r[:, 0].permute(1, 2, 0).flip(-1)
        first = sharding.layout.tokens + 1 - keys_HDR.shape[-1]
        states_BHSD = ((q_head + module.r_r_bias) * module.scale).permute(1, 2, 0, 3)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_head + module.r_w_bias, k_head_h, v_head_h))
        out_BSHD, _ = ALL_ATTENTION_FUNCTIONS[NAME](
            module, q, k, v, LayerMask(pattern), scaling=module.scale,
            position_bias=KeysOfDistances(states_BHSD, keys_HDR, first), **{SHARDING: sharding},
        )  # fmt: skip
        return out_BSHD.transpose(0, 1)

    return attend
