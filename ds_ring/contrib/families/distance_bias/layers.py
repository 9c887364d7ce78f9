"""Attention with a bias of content and distance, in transformers models: Inkling.

A layer makes relative states of each token, which mix a bank of profiles into a bias for each distance back.
Its module computes the bias of all pairs, [B, H, S, T]. On a ring that module returns the states, and
`DistanceBiasAttention` computes the terms of near pairs block by block. The second generation has a sink for
each query, which is added to its log-sum-exp, and learned mixtures of layers, which read one token.

Shapes: B samples, H query heads, S local tokens, D head dim, N width of the states, R distances.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.data.packing import refuse_trees
from ds_ring.errors import RingPatternError
from ds_ring.layers.distance_bias.attention import Beyond, DistanceBiasAttention
from ds_ring.layers.parts import merged
from ds_ring.masks.catalog import SlidingWindow
from ds_ring.models.attention_name import NAME
from ds_ring.models.checks import cannot_run, not_compiled
from ds_ring.models.model import TABLE
from ds_ring.models.variant import AttachRequest, Variant
from ds_ring.patches import AppliedPatch, apply, patch, undo

if TYPE_CHECKING:
    from ds_ring.models.attention_call import AttentionCall
    from ds_ring.models.model_adapter import ModelAdapter

_patch = partial(
    patch, feature="distance bias", when="attention adds a bias of content and distance (Inkling)"
)
_MODULE = "torch.nn.Module"
_BIASED = TABLE.given("biased_by_distance", _MODULE)
_not_scaled = _patch(TABLE.given("biased_by_distance"), "is_sliding", stage="around_forward", kind="set",
    reason="the layer would scale by local positions")  # fmt: skip
_own_config = _patch(
    TABLE.given("over_layers"), "config", stage="around_init", kind="set",
    reason="a mixture of layers reads one token: its own attention computes it",
)  # fmt: skip
_TEXT_MODEL = TABLE.given("text_model", _MODULE)
_DISTANCES = "get_relative_distance"

_on_ring = ContextVar("a text model is being computed on a ring", default=False)
_files: WeakSet[ModuleType] = WeakSet()  # whose function of distances is wrapped


def find_bias_module(module: nn.Module) -> Any:
    """Return the module that computes the bias of an attention layer; None if it has none."""
    bias = getattr(module, "rel_logits_proj", getattr(module, "relative_position_bias", None))
    return bias if hasattr(bias, "proj") and hasattr(bias, "rel_extent") else None


@dataclass(frozen=True, eq=False)
class RelativeTerms:
    """What is returned in place of the bias: relative states [B, S, H, N] and profiles [N, R]."""

    states_BSHN: Tensor
    profiles: Tensor


class DistanceBias(Variant):
    """Layers whose scores have a learned bias by content and distance, and may have a sink by query."""

    def matches(self, module: nn.Module) -> bool:
        return find_bias_module(module) is not None

    def refuse(self, model: PreTrainedModel, request: AttachRequest) -> None:
        if request.as_is and any(map(self.matches, model.modules())):
            advice = 'set "attention": "ring" in the section, and build it without attn_implementation'
            raise cannot_run(model, f"its layers add a bias of content and distance; {advice}")

    def install(self, adapter: ModelAdapter) -> None:
        super().install(adapter)
        for module in adapter.model.modules():
            if type(module).__name__.endswith("AttentionResidual") and hasattr(module, "config"):
                layer_config: Any = module.config
                config = type(layer_config).from_dict(layer_config.to_dict(), attn_implementation="eager")
                adapter.apply(_own_config.to(config), over_layers=module)
            file = sys.modules[type(module).__module__]
            if isinstance(module, PreTrainedModel) and hasattr(file, _DISTANCES):
                adapter.apply(enter, leave, text_model=module)
                if file not in _files:
                    apply(skip_distances, modeling=file)
                    _files.add(file)

    def install_on(self, module: nn.Module, adapter: ModelAdapter) -> None:
        bias = find_bias_module(module)
        adapter.apply(StatesOfBias(module, bias), biased_by_distance=module, bias_by_distance=bias)
        adapter.gather_once(module)  # profiles are read in attention, after their module has returned

    def read(self, call: AttentionCall) -> None:
        terms = call.arguments.get("position_bias")
        if isinstance(terms, RelativeTerms):  # another one is refused
            del call.arguments["position_bias"]
            call.taken["distance bias"] = terms, call.arguments.pop("sinks", None)

    def attend(self, call: AttentionCall) -> Tensor | None:
        if "distance bias" not in call.taken:
            return None
        terms, sinks = call.taken["distance bias"]
        return _attend(call, terms, sinks)

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        if not any(map(self.matches, model.modules())):
            return None
        return "expected plain softmax, got a bias of content and distance, which no pass over a cache adds"


def _attend(call: AttentionCall, terms: RelativeTerms, sinks: Tensor | None) -> Tensor:
    """Return attention [B, H, S, D] with its terms; sinks are [B, H, S, 1]."""
    if call.pattern is None or call.scale is None:
        raise not_compiled(call.name, "adds a bias of content and distance")
    sharding, pattern, q, states = call.sharding, call.pattern, call.q_BHSD, terms.states_BSHN.transpose(1, 2)
    refuse_trees(sharding.groups)
    nearest, farthest = pattern.distance
    if nearest < 0:
        raise RingPatternError.wrong(call.name, "a causal pattern", str(pattern), "set pattern.causal")
    tau = _scaling(call)
    if tau is not None:
        q, states = ((x.float() * tau).to(x.dtype) for x in (q, states))
    reach = terms.profiles.shape[1]
    near = sharding.attention(call.scale, pattern & SlidingWindow(reach), make=DistanceBiasAttention)
    wide = torch.cat([q, states.to(q.dtype)], dim=-1)
    kv = call.k_BGSD, call.v_BGSE
    result = near(wide, *kv, return_lse=True, profiles=terms.profiles.to(q.dtype))
    if farthest >= reach and sharding.layout.tokens > reach:
        far = sharding.attention(call.scale, pattern & Beyond(reach))
        result = merged(result, far(q, *kv, return_lse=True))
    out, lse = result
    if sinks is None:
        return out
    weights = torch.exp(lse - torch.logaddexp(lse, sinks.squeeze(-1).to(lse.dtype)))
    return (out * weights.unsqueeze(-1)).to(out.dtype)


def _scaling(call: AttentionCall) -> Tensor | None:
    """Return the factor [B or 1, 1, S, 1] of queries and bias that grows with the position; None for none.

    Inkling's first generation counts positions itself; the second one takes position_ids.
    """
    config: Any = call.module.config
    if not scales(call.module):
        return None
    numbers_BS = call.sharding.numbers_in_paths(call.q_BHSD.device)
    ratio = (numbers_BS + 1).float() / config.log_scaling_n_floor
    tau: Tensor = 1.0 + config.log_scaling_alpha * torch.log(ratio.clamp(min=1.0))
    return tau[:, None, :, None]


def scales(module: Any) -> bool:
    """Return whether a layer of Inkling's first generation scales queries by position."""
    is_full = getattr(module, "sliding_window", None) is None
    return is_full and hasattr(module, "rel_logits_proj") and module.config.log_scaling_n_floor is not None


class StatesOfBias:
    """Run around an attention layer and its module of the bias, which then returns its states.

    Args:
        layer: the attention layer.
        bias: its module.
    """

    def __init__(self, layer: Any, bias: Any) -> None:
        self._layer, self._bias = layer, bias
        self._off: list[AppliedPatch] = []

    @_patch(_BIASED, stage="before_forward", reason="switches the layer's own scaling by position off")
    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Switch the layer's own scaling off, which reads `is_sliding`."""
        if self._layer.config._attn_implementation == NAME and scales(module):
            self._off = self._off or apply(_not_scaled.to(True), biased_by_distance=module)

    @_patch(
        _BIASED, stage="after_forward", options=("always_call",),
        reason="switches the layer's own scaling on, also after an error",
    )  # fmt: skip
    def after_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Switch the layer's own scaling on again."""
        undo(self._off)

    @_patch(
        TABLE.given("bias_by_distance", _MODULE), "forward", stage="around_forward",
        reason="returns the states in place of the bias of all pairs; calls the original without a ring",
    )  # fmt: skip
    def states(
        self, forward: Callable[..., Tensor], states: Tensor, distances: Any, positions: Tensor
    ) -> Tensor | RelativeTerms:
        """Return `RelativeTerms`; arguments as of the module."""
        if self._layer.config._attn_implementation != NAME:
            return forward(states, distances, positions)
        bias = self._bias
        if hasattr(bias, "linear"):  # the second generation gives it hidden states, and position_ids
            states = bias.linear(states).unflatten(-1, (bias.num_heads, -1))
            states = bias.norm(states, positions)
        return RelativeTerms(states, bias.proj)


@_patch(_TEXT_MODEL, stage="before_forward", reason="notes that the model runs on a ring")
def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note it before the model runs."""
    _on_ring.set(module.config._attn_implementation == NAME)


@_patch(_TEXT_MODEL, stage="after_forward", options=("always_call",), reason="ends that")
def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """End it, also after an error."""
    _on_ring.set(False)


@_patch(
    TABLE.given("modeling"), _DISTANCES, stage="around_call",
    reason="no distances of all local pairs on a ring; calls the original for other models",
)  # fmt: skip
def skip_distances(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor | None:
    """Return None on a ring, where the bias takes no distances."""
    return None if _on_ring.get() else original(*args, **kwargs)
