"""A bias of content and distance against dense attention in float64: outputs, and each gradient by itself."""

from __future__ import annotations

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
    make_layout,
    shard_sequence,
)
from ds_ring.layers.distance_bias.attention import Beyond, DistanceBiasAttention
from ds_ring.layers.parts import merged
from ds_ring.masks.pattern import Pattern
from tests.dist.harness import Pool
from tests.dist.one_process import Layer, same_as_one_process

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


def inputs(pattern: str = "causal") -> dict[str, Tensor]:
    torch.manual_seed(0)
    profiles = (H, N, R) if is_by_head(pattern) else (N, R)
    shapes = {"q": (B, H, T, D + N), "k": (B, G, T, D), "v": (B, G, T, D), "profiles": profiles}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def seen(pattern: str) -> Tensor:
    distances = torch.arange(T)[:, None] - torch.arange(T)
    most = {"window": R, "wider window": R + 9}.get(pattern, T)
    visible = (distances >= (-T if is_by_head(pattern) else 0)) & (distances < most)
    same = torch.tensor(IDS)[:, None] == torch.tensor(IDS)
    return visible & same if pattern.endswith("documents") else visible


def dense(q: Tensor, k: Tensor, v: Tensor, profiles: Tensor, pattern: str) -> tuple[Tensor, Tensor]:
    """Out and lse, with the bias of all pairs."""
    distances = torch.arange(T)[:, None] - torch.arange(T) - (FIRST if is_by_head(pattern) else 0)
    near = (distances >= 0) & (distances < R)
    bias = (q[..., D:] @ profiles)[..., torch.arange(T)[:, None], distances.clamp(0, R - 1)] * near
    k_all, v_all = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    scores = q[..., :D] @ k_all.mT * SCALE + bias
    scores = scores.masked_fill(~seen(pattern), -torch.inf)
    return scores.softmax(-1) @ v_all, scores.logsumexp(-1)


def on_a_ring(mesh: RingMesh, pattern: str, layout_name: str) -> Layer:
    """With the far pairs, which have no bias, merged in."""
    mask, first = PATTERNS[pattern], FIRST if is_by_head(pattern) else 0
    sizes = {"ring_size": mesh.ring_size, "multiple_of": mesh.ulysses_size}
    layout = make_layout(layout_name, tokens=T, pattern=mask, **sizes)
    some = mask if first else mask & SlidingWindow(R)
    near = DistanceBiasAttention(some, mesh=mesh, layout=layout, scale=SCALE)
    far = RingAttention(mask & Beyond(R), mesh=mesh, layout=layout, scale=SCALE)

    def attend(q: Tensor, k: Tensor, v: Tensor, profiles: Tensor) -> tuple[Tensor, Tensor]:
        both = near(q, k, v, profiles=profiles, first=first, return_lse=True)
        if pattern == "window" or first:
            return both
        return merged(both, far(q[..., :D].contiguous(), k, v, return_lse=True))

    reference = partial(dense, pattern=pattern)
    return Layer(inputs(pattern), reference, attend, mesh, layout, parameters=["profiles"])


CASES = [("causal", "zigzag"), ("documents", "contiguous"), ("window", "striped"), ("wider window", "zigzag")]
CASES += [("both ways", "striped"), ("both ways, documents", "zigzag")]


@pytest.mark.day("2-1-causal-zigzag", "2-1-window-striped", "2-1-both ways, documents-zigzag")
@pytest.mark.parametrize(("pattern", "layout"), CASES)
@pytest.mark.parametrize(("ranks", "ulysses"), [(2, 1), (3, 1), (4, 2)])
def test_equals_dense_attention(rank_pool: Pool, ranks: int, ulysses: int, pattern: str, layout: str) -> None:
    """Ulysses ranks take the profiles of their heads."""
    same_as_one_process(rank_pool(ranks), on_a_ring, (pattern, layout), ulysses=ulysses, count=6)


def refused(rank: int, world_size: int) -> None:
    mesh, layout = RingMesh.from_world(ring_size=world_size), make_layout("zigzag", tokens=T, ring_size=2)
    q, k, v, profiles = (
        shard_sequence(x, layout, mesh=mesh, dim=2) if x.dim() == 4 else x for x in inputs().values()
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
