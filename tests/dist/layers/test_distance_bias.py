"""A bias of content and distance against dense attention in float64: outputs, and each gradient by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from ds_ring import (
    Causal,
    Documents,
    Full,
    RingAttention,
    RingConfigError,
    RingMesh,
    RingShapeError,
    SlidingWindow,
    gather_sequence,
    make_layout,
    shard_sequence,
)
from ds_ring.layers.distance_bias.attention import Beyond, DistanceBiasAttention
from ds_ring.layers.parts import merged
from ds_ring.masks.pattern import Pattern
from tests.dist.harness import RankPool
from tests.reference import relative_error

Pool = Callable[[int], RankPool]
B, T, H, G, D, N, R, SCALE = 2, 61, 4, 2, 8, 3, 11, 0.3
IDS = [0] * 9 + [1] * 20 + [2] * 2 + [3] * 30
PATTERNS: dict[str, Pattern] = {
    "causal": Causal(),
    "documents": Causal() & Documents(IDS),
    "window": SlidingWindow(R),
    "wider window": SlidingWindow(R + 9),
    "both ways": Full(),
    "both ways, documents": Documents(IDS),
}
FIRST = -4  # of profiles for both ways, which each head has of its own


def is_by_head(pattern: str) -> bool:
    return pattern.startswith("both ways")


def inputs(pattern: str = "causal") -> list[Tensor]:
    torch.manual_seed(0)
    profiles = (H, N, R) if is_by_head(pattern) else (N, R)
    shapes = (B, H, T, D + N), (B, G, T, D), (B, G, T, D), profiles, (B, H, T, D), (B, H, T)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def seen(pattern: str) -> Tensor:
    distances = torch.arange(T)[:, None] - torch.arange(T)
    most = {"window": R, "wider window": R + 9}.get(pattern, T)
    visible = (distances >= (-T if is_by_head(pattern) else 0)) & (distances < most)
    same = torch.tensor(IDS)[:, None] == torch.tensor(IDS)
    return visible & same if pattern.endswith("documents") else visible


def dense(pattern: str) -> list[Tensor]:
    """Out, and the gradients of q, k, v and profiles, with the bias of all pairs."""
    *leaves, grad, grad_lse = inputs(pattern)
    q, k, v, profiles = (x.requires_grad_() for x in leaves)
    distances = torch.arange(T)[:, None] - torch.arange(T) - (FIRST if is_by_head(pattern) else 0)
    near = (distances >= 0) & (distances < R)
    bias = (q[..., D:] @ profiles)[..., torch.arange(T)[:, None], distances.clamp(0, R - 1)] * near
    k_all, v_all = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    scores = q[..., :D] @ k_all.mT * SCALE + bias
    scores = scores.masked_fill(~seen(pattern), -torch.inf)
    out, lse = scores.softmax(-1) @ v_all, scores.logsumexp(-1)
    loss = (out * grad).sum() + (lse * grad_lse).sum()
    return [out.detach(), *torch.autograd.grad(loss, (q, k, v, profiles))]


def errors(rank: int, world_size: int, pattern: str, layout_name: str, ulysses_size: int = 1) -> list[float]:
    """Relative errors on a ring, in the order of `dense`."""
    mesh = RingMesh.from_world(ring_size=world_size // ulysses_size, ulysses_size=ulysses_size)
    mask, ring_size = PATTERNS[pattern], world_size // ulysses_size
    sizes = {"tokens": T, "ring_size": ring_size, "multiple_of": ulysses_size}
    layout = make_layout(layout_name, pattern=mask, **sizes)
    shard = partial(shard_sequence, layout=layout, mesh=mesh, dim=2)
    q, k, v, profiles, grad, grad_lse = inputs(pattern)
    leaves = [x.requires_grad_() for x in (*map(shard, (q, k, v)), profiles)]
    first = FIRST if is_by_head(pattern) else 0
    some = mask if first else mask & SlidingWindow(R)
    near = DistanceBiasAttention(some, mesh=mesh, layout=layout, scale=SCALE)
    far = RingAttention(mask & Beyond(R), mesh=mesh, layout=layout, scale=SCALE)
    out, lse = near(*leaves[:3], profiles=leaves[3], first=first, return_lse=True)
    if pattern != "window" and not first:
        out, lse = merged((out, lse), far(leaves[0][..., :D].contiguous(), *leaves[1:3], return_lse=True))
    real = lse > -torch.inf  # padding has no lse
    loss = (out * shard(grad)).sum() + (lse.where(real, 0.0) * shard(grad_lse)).sum()
    grads = torch.autograd.grad(loss, leaves)
    torch.distributed.all_reduce(grads[3])
    whole = [gather_sequence(x, layout, mesh=mesh, dim=2) for x in (out.detach(), *grads[:3])]
    return [relative_error(x, y) for x, y in zip([*whole, grads[3]], dense(pattern), strict=True)]


CASES = [("causal", "zigzag"), ("documents", "contiguous"), ("window", "striped"), ("wider window", "zigzag")]
CASES += [("both ways", "striped"), ("both ways, documents", "zigzag")]


@pytest.mark.parametrize(("pattern", "layout"), CASES)
def test_equals_dense_attention(rank_pool: Pool, pattern: str, layout: str) -> None:
    for found in rank_pool(2).run(errors, pattern, layout):
        assert max(found) < 1e-12, found


@pytest.mark.night
@pytest.mark.parametrize(("pattern", "layout"), CASES)
def test_equals_dense_attention_on_more_ranks(rank_pool: Pool, pattern: str, layout: str) -> None:
    for found in rank_pool(3).run(errors, pattern, layout):
        assert max(found) < 1e-12, found


@pytest.mark.night
@pytest.mark.parametrize("pattern", ["causal", "both ways, documents"])
def test_ulysses_ranks_take_the_profiles_of_their_heads(rank_pool: Pool, pattern: str) -> None:
    for found in rank_pool(4).run(errors, pattern, "zigzag", 2):
        assert max(found) < 1e-12, found


def refused(rank: int, world_size: int) -> None:
    mesh, layout = RingMesh.from_world(ring_size=world_size), make_layout("zigzag", tokens=T, ring_size=2)
    q, k, v, profiles = (
        shard_sequence(x, layout, mesh=mesh, dim=2) if x.dim() == 4 else x for x in inputs()[:4]
    )
    attend = DistanceBiasAttention(SlidingWindow(R), mesh=mesh, layout=layout, scale=SCALE)
    with pytest.raises(RingShapeError, match=r"profiles: expected \[3, distances\]"):
        attend(q, k, v, profiles=profiles[:2])
    with pytest.raises(RingShapeError, match=r"profiles: expected torch\.float64"):
        attend(q, k, v, profiles=profiles.float())
    with pytest.raises(RingConfigError, match="eager call with a scale and no sinks"):
        DistanceBiasAttention(SlidingWindow(R), mesh=mesh, layout=layout)(q, k, v, profiles=profiles)


def test_what_does_not_fit_is_refused(rank_pool: Pool) -> None:
    rank_pool(2).run(refused)
