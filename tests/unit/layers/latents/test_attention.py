"""`latent_attention` on one rank: operands of a call that was prepared for others, with and without sinks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ds_ring
from ds_ring import Causal, RingMesh
from tests.reference import dense_attention

HEADS, SLOTS, NOPE, ROPE, LATENT = 2, 8, 4, 2, 3
LAYOUT = ds_ring.make_layout("contiguous", tokens=SLOTS, ring_size=1)


def operands(value: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(value)
    shapes = ((1, HEADS, SLOTS, NOPE + ROPE), (1, 1, SLOTS, LATENT), (1, 1, SLOTS, ROPE))
    given = (*shapes, (HEADS * (NOPE + value), LATENT))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in given)


def expanded(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.einsum("bsl,hdl->bhsd", latent[:, 0], up.unflatten(0, (HEADS, -1)))
    return torch.cat([both[..., :NOPE], rope.expand(-1, HEADS, -1, -1)], dim=-1), both[..., NOPE:]


def test_up_projections_of_other_widths_beside_equal_latents() -> None:
    """A mesh prepares a pass once for tensors of a description, to which the up-projection belongs."""
    mesh = RingMesh.single()
    for value in (5, 7, 5):
        given = operands(value)
        out = ds_ring.latent_attention(*given, pattern=Causal(), layout=LAYOUT, mesh=mesh)
        k, v = expanded(*given)
        want = dense_attention(given[0], k, v, torch.zeros_like(out), Causal()).out
        assert out.shape[-1] == value
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_sinks_beside_latents() -> None:
    mesh, given = RingMesh.single(), [x.requires_grad_() for x in operands(5)]
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    place = {"pattern": Causal(), "layout": LAYOUT, "mesh": mesh, "sinks": sinks, "return_lse": True}
    latents = ds_ring.latent_attention(*given, **place)
    plain = ds_ring.ring_attention(given[0], *expanded(*given), **place)
    grads = [torch.randn_like(x) for x in plain]
    for ours, theirs in zip(
        (*latents, *torch.autograd.grad(latents, [*given, sinks], grads)),
        (*plain, *torch.autograd.grad(plain, [*given, sinks], grads)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_a_module_of_latents() -> None:
    given = operands(5)
    module = ds_ring.LatentAttention(Causal(), mesh=RingMesh.single(), layout=LAYOUT)
    want = ds_ring.latent_attention(*given, pattern=Causal(), layout=LAYOUT, mesh=RingMesh.single())
    assert torch.equal(module(*given[:3], up_projection=given[3]), want)
    with pytest.raises(TypeError, match="up_projection"):
        module(*given[:3])
