"""Plain torch: FSDP2 around a model of `ring_attention`, on a device mesh of replicas x context parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_ring
from tests.dist.harness import Pool
from tests.reference import relative_error

TOKENS, SAMPLES, HIDDEN, HEADS = 37, 2, 32, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BSC: Tensor, attend: Any) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x_BSC).chunk(3, -1))
        result: Tensor = x_BSC + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x_BSC: Tensor, attend: Any) -> Tensor:
        for layer in self.layers:
            x_BSC = layer(x_BSC, attend)
        return x_BSC


def trained(rank: int, world_size: int) -> float:
    """The largest error of any gradient, sharded over replicas and context parallel ranks together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device_mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "cp"))
    mesh = ds_ring.RingMesh.from_device_mesh(device_mesh, "cp")
    layout = ds_ring.make_layout("zigzag", tokens=TOKENS, ring_size=mesh.ring_size)
    samples = torch.randn(2, SAMPLES, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    model, alone = Model(), Model()
    whole = device_mesh["dp", "cp"]._flatten("dp_cp")
    for layer in model.layers:
        fully_shard(layer, mesh=whole)
    fully_shard(model, mesh=whole)
    x = ds_ring.shard_sequence(samples[mesh.data_rank], layout, mesh=mesh, dim=1)
    real = torch.from_numpy(layout.positions(mesh.ring_rank) >= 0)[None, :, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert not hasattr(q, "placements"), "FSDP2 gathers parameters: activations are plain tensors"
        out: Tensor = ds_ring.ring_attention(q, k, v, pattern=ds_ring.Causal(), layout=layout, mesh=mesh)
        return out

    # FSDP averages over the ranks that it shards over: see MIGRATING.md.
    ((model(x, attend) * real).square().sum() * world_size).backward()
    plain = torch.nn.functional.scaled_dot_product_attention
    for item in samples:
        alone(item, lambda q, k, v: plain(q, k, v, is_causal=True)).square().sum().backward()
    errors = []
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        errors.append(relative_error(got.grad.full_tensor(), want.grad))
    refused_dtensors(mesh, layout, device_mesh["cp"])
    return max(errors)


def refused_dtensors(mesh: ds_ring.RingMesh, layout: Any, ring: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    local = torch.randn(1, HEADS, layout.local_tokens, 8)
    q = DTensor.from_local(local, ring, [Shard(2)])
    with pytest.raises(ds_ring.RingShapeError, match=r"call .to_local\(\) if it is placed"):
        ds_ring.ring_attention(q, q, q, pattern=ds_ring.Causal(), layout=layout, mesh=mesh)
    plain = (q.to_local() for _ in range(3))
    ds_ring.ring_attention(*plain, pattern=ds_ring.Causal(), layout=layout, mesh=mesh)


def test_fully_sharded_parameters_get_the_gradients_of_one_process(rank_pool: Pool) -> None:
    assert max(rank_pool(4).run(trained)) < 1e-5
