"""Give models that are made of `torch.nn.MultiheadAttention` the ring's attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ds_ring.attention_module import RingAttention
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig


class RingMultihead(nn.Module):
    """Take the weights of a `MultiheadAttention` (batch first), and attend over local shards [B, S, E]."""

    def __init__(self, inner: nn.MultiheadAttention, attention: RingAttention) -> None:
        super().__init__()
        self.inner, self.attention = inner, attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **ignored: Any) -> tuple[Tensor, None]:
        weights = self.inner.in_proj_weight.chunk(3), self.inner.in_proj_bias.chunk(3)
        projected = map(nn.functional.linear, (query, key, value), *weights)
        q, k, v = (x.unflatten(-1, (self.inner.num_heads, -1)).transpose(1, 2) for x in projected)
        return self.inner.out_proj(self.attention(q, k, v).transpose(1, 2).flatten(2)), None


def equip(model: nn.Module, config: RingConfig, mesh: RingMesh) -> nn.Module:
    """Replace every attention of a model, in place."""
    for name, child in model.named_children():
        if isinstance(child, nn.MultiheadAttention):
            setattr(model, name, RingMultihead(child, RingAttention(config, mesh=mesh)))
        else:
            equip(child, config, mesh)
    return model
