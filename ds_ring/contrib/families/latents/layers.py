"""Send the latents of multi-head latent attention around the ring, not the keys and values made of them.

transformers' layers (DeepSeek V2 and V3, Kimi Linear, GLM-4 MoE Lite, LongCat and others) make keys and
values by their method `expand_kv`, directly before they call the attention function. On a ring the method is
replaced by a `Latents`, which hands both on as they are. Attention asks it for the layer's own up-projection,
and `ds_ring.latent_attention` expands what arrives. So a layer's projections, norms and rotary embedding run
unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_ring.comm.mesh import RingMesh
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.layers.latents.attention import LatentAttention
from ds_ring.layers.latents.kernel import check_same_for_heads
from ds_ring.models.attention_name import NAME
from ds_ring.models.model import TABLE
from ds_ring.models.variant import Variant
from ds_ring.patches import patch

if TYPE_CHECKING:
    from ds_ring.models.attention_call import AttentionCall
    from ds_ring.models.model_adapter import ModelAdapter

_SIZES = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@patch(
    TABLE.given("latent"), "expand_kv", stage="around_forward", kind="replaced", feature="latents",
    reason="returns the latent and the rotary key, which the ring sends and expands on arrival",
    when='"latents" in the section, and the layer has an up-projection',
)  # fmt: skip
class Latents:
    """Return the latent [B, 1, S, L] and the rotary key [B, 1, S, R] as they are, in place of `expand_kv`.

    With another attention function than the ring's, it is the layer's own `expand_kv`.

    Args:
        layer: the attention layer.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.expanded: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = layer.expand_kv  # the layer's own

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        # The layer reads the same attribute to choose its attention function: engine.ring.off() changes it.
        if self._layer.config._attn_implementation != NAME:
            return self.expanded(kv_nope, k_rot)
        return kv_nope, k_rot

    def kv_up_proj(self, like: Tensor) -> Tensor:
        """Return the layer's [H * (N + E), L], differentiable, in the dtype that its projection returns."""
        # By a call of the module, so that its hooks run (ZeRO-3 gathers weights there) and adapters count.
        units = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
        of_units: Tensor = self._layer.kv_b_proj(units)
        return of_units.t()


class LatentLayers(Variant):
    """Layers that project latents to keys and values, where latents are sent."""

    def matches(self, module: nn.Module) -> bool:
        return hasattr(module, "kv_b_proj")

    def install(self, adapter: ModelAdapter) -> None:
        layers = {} if adapter.rewritten else make_latent_layers(adapter.model, adapter.session)
        for layer, unexpanded in layers.items():
            adapter.apply(unexpanded, latent=layer)

    def attend(self, call: AttentionCall) -> Tensor | None:
        latents = getattr(call.module, "expand_kv", None)
        if not isinstance(latents, Latents):
            return None
        # The keys are the latent, and the values the rotary key.
        if call.sharding.mesh.ring_size == 1 or call.sharding.is_replicated:
            call.k_BGSD, call.v_BGSE = latents.expanded(call.k_BGSD, call.v_BGSE)
            return call.softmax()
        weight = latents.kv_up_proj(call.k_BGSD)
        latent, rotary_key = call.k_BGSD.to(weight.dtype), call.v_BGSE.to(weight.dtype)
        attention = call.attention(LatentAttention)
        out: Tensor = attention(call.q_BHSD, latent, rotary_key, call.sinks, up_projection=weight)
        return out


def make_latent_layers(model: nn.Module, session: RingSession) -> dict[nn.Module, Latents]:
    """Return the layers whose latents travel, by the section's `"latents"`, and what replaces `expand_kv`.

    Raises:
        RingConfigError: `"latents": true`, and a layer or the model does not allow it.
    """
    setting = session.config.latents
    layers: dict[nn.Module, Latents] = {}
    if setting is False or (setting == "auto" and not pays(session.run_mesh, session.device)):
        return layers
    refused = None
    for layer in filter(LatentLayers().matches, model.modules()):
        why = why_not(layer, session)
        if why is None:
            layers[layer] = Latents(layer)
        else:
            refused = f"{type(layer).__name__}, which {why}"
    if setting is True and (refused is not None or not layers):
        expected = '"latents": expected layers that expand a latent by expand_kv, got'
        raise RingConfigError(f'{expected} {refused or type(model).__name__}; write "latents": "auto"')
    return layers


def pays(mesh: RingMesh, device: torch.device) -> bool:
    """Return whether `"auto"` sends latents: on the CPU, and where a ring has ranks of several nodes."""
    # Inside a node, links of GPUs hide the transfer of expanded keys, and nothing hides the expansion.
    if mesh.ring_size == 1 or device.type == "cpu":
        return mesh.ring_size > 1
    if mesh.ranks_per_node is None:
        return False
    data, _, ulysses = mesh.grid.coordinates(mesh.global_rank)
    ranks = (mesh.grid.global_rank(data, rank, ulysses) for rank in range(mesh.ring_size))
    return len({rank // mesh.ranks_per_node for rank in ranks}) > 1


def why_not(layer: Any, session: RingSession) -> str | None:
    """Return why the latents of a layer that has an up-projection do not travel; None if they do."""
    expand: Any = getattr(layer, "expand_kv", None)
    if expand is None or list(inspect.signature(expand).parameters) != ["kv_nope", "k_rot"]:
        return "has no method expand_kv(kv_nope, k_rot)"
    missing = [name for name in _SIZES if not isinstance(getattr(layer, name, None), int)]
    if missing:
        return f"does not say {', '.join(missing)}"
    if hasattr(layer, "indexer"):
        return "selects keys by an indexer"
    if layer.qk_rope_head_dim == 0:
        return "has no rotary key"
    projection = layer.kv_b_proj
    if any(name.rpartition(".")[2] == "bias" for name, _ in projection.named_parameters()):
        return "adds a bias to the expanded keys"
    if any(isinstance(part, nn.Dropout) and part.p > 0 for part in projection.modules()):
        return "has dropout in its up-projection"
    patterns = session.patterns
    for pattern in {patterns.pattern, *patterns.named.values()}:
        try:
            check_same_for_heads(pattern.bind(tuple(range(layer.num_heads)), layer.num_heads, 1), pattern)
        except RingPatternError:
            return f"attends by {pattern}, which differs between heads"
    return None
