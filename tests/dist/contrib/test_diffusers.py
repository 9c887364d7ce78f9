"""diffusers' transformers on the attention backend "ds_ring", split by diffusers' own context parallelism, on gloo ranks.

The other side is the same model on one process with diffusers' "native" backend. Weights are small and random. Without
diffusers these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.harness import Pool, catch_refusal
from tests.reference import relative_error

pytestmark = pytest.mark.needs("diffusers")  # which the ranks import; both workers would, here

B, TEXT, IMAGE = 2, 8, 24  # samples, tokens


def flux() -> tuple[Any, dict[str, Any]]:
    """Joint attention of text and image."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=12, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(B, IMAGE, 4), "encoder_hidden_states": torch.randn(B, TEXT, 12),
        "pooled_projections": torch.randn(B, 8), "timestep": torch.rand(B),
        "img_ids": torch.randint(9, (IMAGE, 3)).double(), "txt_ids": torch.zeros(TEXT, 3),
    }  # fmt: skip
    return model, inputs


def qwen() -> tuple[Any, dict[str, Any]]:
    """Joint attention, and a bool mask of the text's padding: all text of the last ranks, in one sample."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=12, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(B, IMAGE, 4), "encoder_hidden_states": torch.randn(B, TEXT, 12),
        "encoder_hidden_states_mask": torch.arange(TEXT) < torch.tensor([[3], [TEXT]]),
        "timestep": torch.rand(B), "img_shapes": [[(1, 4, 6)]] * B,
    }  # fmt: skip
    return model, inputs


def ltx() -> tuple[Any, dict[str, Any]]:
    """Self attention, and cross attention to text that is split, too, with a mask that adds -10000."""
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16, cross_attention_dim=64,
        num_layers=2, caption_channels=12,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(B, IMAGE, 4), "encoder_hidden_states": torch.randn(B, TEXT, 12),
        "timestep": torch.rand(B), "encoder_attention_mask": torch.arange(TEXT) < torch.tensor([[3], [TEXT]]),
        "num_frames": 2, "height": 3, "width": 4,
    }  # fmt: skip
    return model, inputs


def wan() -> tuple[Any, dict[str, Any]]:
    """Self attention on the ring, cross attention to text that every rank has whole."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4,
        text_dim=12, freq_dim=16, ffn_dim=32, num_layers=2,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(B, 4, 2, 6, 8), "encoder_hidden_states": torch.randn(B, 7, 12),
        "timestep": torch.randint(1000, (B,)),
    }  # fmt: skip
    return model, inputs


def cosmos() -> tuple[Any, dict[str, Any]]:
    """Causal attention of text, and that of an image to text and image; two query heads a key head."""
    from diffusers import Cosmos3OmniTransformer

    model = Cosmos3OmniTransformer(
        head_dim=16, hidden_size=32, intermediate_size=48, latent_channel=4, latent_patch_size=2,
        patch_latent_dim=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=32,
        rope_axes_dim=(4, 2, 2),
    )  # fmt: skip
    tokens = torch.arange(TEXT + IMAGE)
    inputs = {
        "input_ids": torch.randint(32, (TEXT,)), "text_indexes": tokens[:TEXT],
        "position_ids": tokens.expand(3, -1), "und_len": TEXT, "sequence_length": TEXT + IMAGE,
        "vision_tokens": [torch.randn(1, 4, 2, 6, 8)], "vision_token_shapes": [(2, 3, 4)],
        "vision_sequence_indexes": tokens[TEXT:], "vision_mse_loss_indexes": tokens[TEXT:],
        "vision_timesteps": torch.full((IMAGE,), 500.0), "vision_noisy_frame_indexes": [torch.arange(2)],
    }  # fmt: skip
    return model, inputs


def split_cosmos(model: Any, config: Any) -> None:
    """Split and gather the two sequences where the model offers it, as diffusers' hooks do it in other models."""
    from diffusers.hooks.context_parallel import EquipartitionSharder

    mesh = config._flattened_mesh

    def split(x: Any) -> Any:
        return tuple(map(split, x)) if isinstance(x, tuple) else EquipartitionSharder.shard(x, 0, mesh)

    model._cp_shard_fn = lambda *sequences: split(sequences)
    model._cp_gather_fn = lambda *sequences: [EquipartitionSharder.unshard(x, 0, mesh) for x in sequences]


def run(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output and the gradients of a loss of it."""
    model.zero_grad()
    out = model(**inputs, return_dict=False)[0]
    out = out[0] if isinstance(out, list) else out
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def install() -> None:
    from ds_ring.contrib import diffusers, ring_flash_attn

    ring_flash_attn._meshes.clear()  # their groups ended with the last call on this pool
    diffusers.install()


def trained(
    rank: int, world_size: int, make: Callable[[], Any], ring_size: int, backend: str = "ds_ring"
) -> dict[str, float]:
    """Errors of the output and of all gradients, in float64."""
    import torch.distributed as dist
    from diffusers import ContextParallelConfig

    install()
    install()  # the second one changes nothing
    # On a machine without accelerator diffusers numbers the devices of none.
    torch.accelerator.device_count = lambda: 1  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        model, inputs = make()
        model.train()
        with torch.no_grad():  # so large that attention decides
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.set_attention_backend("native")
        wanted, of_one = run(model, inputs)
        model.set_attention_backend(backend)
        assert torch.equal(run(model, inputs)[0], wanted)  # not split yet: each rank by itself
        config = ContextParallelConfig(ring_degree=ring_size, ulysses_degree=world_size // ring_size)
        model.enable_parallelism(config=config, cp_plan={} if make is cosmos else None)
        if make is cosmos:
            split_cosmos(model, config)
        out, result = run(model, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
        if "model" in locals():
            model.reset_attention_backend()
    assert result.keys() == of_one.keys() and len(result) > 20
    for name, gradient in result.items():
        dist.all_reduce(gradient)
        if make is cosmos and name.startswith("proj_out"):  # behind the gathering: every rank has all of it
            gradient /= world_size
    errors = {n: relative_error(x, of_one[n]) for n, x in result.items() if of_one[n].abs().max() > 1e-9}
    assert len(errors) > 20
    return errors | {"": relative_error(out, wanted)}


MODELS = [flux, qwen, ltx, wan, cosmos]


@pytest.mark.day("qwen-2-2")
@pytest.mark.parametrize(("world_size", "ring_size"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("make", MODELS)
def test_a_model_trains_as_on_one_process(
    rank_pool: Pool, make: Callable[[], Any], world_size: int, ring_size: int
) -> None:
    most = 1e-6 if make is wan else 1e-12  # Wan computes its norms in float32
    for errors in rank_pool(world_size).run(trained, make, ring_size):
        assert max(errors.values()) < most, {n: e for n, e in errors.items() if e > most}


def test_diffusers_itself_refuses_causal_attention(rank_pool: Pool) -> None:
    """Should this fail one day, MIGRATING's sentence about diffusers is to be changed."""
    for item in rank_pool(2).collect(trained, cosmos, 2, "native"):
        assert "Causal attention is not yet supported" in item.message


def parallel(ring_size: int, ulysses_size: int, **options: Any) -> Any:
    """Install the backend and return the `ParallelConfig` of a model that is split so."""
    from diffusers import ContextParallelConfig, ParallelConfig

    install()
    config = ParallelConfig(
        context_parallel_config=ContextParallelConfig(
            ring_degree=ring_size, ulysses_degree=ulysses_size, **options
        )
    )
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (ring_size, ulysses_size), mesh_dim_names=("ring", "ulysses")
    )
    config.setup(torch.distributed.get_rank(), ring_size * ulysses_size, torch.device("cpu"), mesh=mesh)
    return config


def called(rank: int, world_size: int, causal: bool, grouped: bool, mask: str, ring_size: int) -> list[float]:
    """Errors of out, dq, dk, dv and the mask's gradient against torch's attention, in float64; bfloat16 is finite."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    config = parallel(ring_size, world_size // ring_size)
    generator = torch.Generator().manual_seed(0)
    tokens, kv_heads = 6 * world_size, 4 if not grouped else 2
    sizes = (4, kv_heads, kv_heads, 4)
    q, k, v, grad = (
        torch.randn(B, tokens, size, 8, generator=generator, dtype=torch.float64) for size in sizes
    )
    terms, seen = None, torch.ones(1, 1, 1, tokens)
    if mask == "bool":
        seen = (torch.arange(tokens) < torch.tensor([[5], [tokens]]))[:, None, None]
    elif mask == "terms":
        heads = 1 if grouped else 4
        terms = torch.randn(B, heads, 1, tokens, generator=generator, dtype=torch.float64)
        terms[0, :, :, -7:] = -torch.inf
    seen = seen.bool() & (torch.ones(tokens, tokens).tril().bool() if causal else torch.tensor(True))
    added = torch.zeros(B, 1, tokens, tokens, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *([terms] if mask == "terms" else []))]
    bias = added + leaves[3] if mask == "terms" else added
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves[:3]), bias, enable_gqa=grouped
    ).transpose(1, 2)
    want.backward(grad)
    local = [
        x.detach().chunk(world_size, dim=3 if x is leaves[-1] and mask == "terms" else 1)[rank].clone()
        for x in leaves
    ]
    mine = [x.requires_grad_() for x in local]
    arguments = mine[3] if mask == "terms" else None
    if mask == "bool":
        arguments = seen[:, 0, -1].chunk(world_size, dim=1)[rank]  # [B, S]
    options = {"is_causal": causal, "enable_gqa": grouped, "backend": "ds_ring", "parallel_config": config}
    out = dispatch_attention_fn(*mine[:3], arguments, **options)
    out.backward(grad.chunk(world_size, dim=1)[rank])
    half = dispatch_attention_fn(*(x.detach().bfloat16() for x in mine[:3]), arguments, **options)
    assert half.dtype == torch.bfloat16 and relative_error(half.double(), out.detach()) < 0.03
    pairs = [(out.detach(), want.detach()), *((x.grad, y.grad) for x, y in zip(mine, leaves, strict=True))]
    return [
        relative_error(got, whole.chunk(world_size, dim=3 if got.shape[2] == 1 else 1)[rank])
        for got, whole in pairs
    ]


@pytest.mark.day("False-False-bool-4", "False-True-none-1", "True-False-bool-1", "True-True-terms-4")
@pytest.mark.parametrize("ring_size", [4, 2, 1])
@pytest.mark.parametrize("mask", ["none", "bool", "terms"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_is_exact(rank_pool: Pool, causal: bool, grouped: bool, mask: str, ring_size: int) -> None:
    ring_size = (
        max(ring_size, 2) if grouped else ring_size
    )  # two K/V heads do not split over four Ulysses ranks
    for errors in rank_pool(4).run(called, causal, grouped, mask, ring_size):
        assert max(errors) < 1e-12 and len(errors) == 4 + (mask == "terms"), errors


REFUSED = {
    "dropout": "dropout_p: expected 0, got 0.1",
    "uneven shards": "expected ring_anything=False, got True",
    "causal": "is_causal: expected 8 keys, as queries, got 4",
    "one rank masks": "head_dim",
    "whole mask": "expected bool or floating [2, 8] or [1 or 2, 1 or 4, 1, 8], this rank's keys, got (2, 32),"
    " torch.float32",
    "pairs": "got (2, 1, 8, 8), torch.bool",
    "numbers": "got (2, 8), torch.int32",
}


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What each of these raises on this rank, also where only rank 0 is wrong."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    wrong, result = rank == 0, {}
    config = parallel(world_size, 1)
    x, right = torch.zeros(B, 8, 4, 8), torch.ones(B, 8).bool()
    masks = {
        "whole mask": torch.ones(B, 8 * world_size),
        "pairs": torch.ones(B, 1, 8, 8).bool(),
        "numbers": right.int(),
    }
    for what in REFUSED:
        kv = x[:, :4] if what == "causal" and wrong else x
        mask = masks[what] if what in masks and wrong else right if what in masks else None
        config.context_parallel_config.ring_anything = what == "uneven shards"
        result[what] = catch_refusal(
            dispatch_attention_fn,
            x,
            kv,
            kv,
            right if what == "one rank masks" and wrong else mask,
            dropout_p=0.1 * (what == "dropout" and wrong),
            is_causal=what == "causal",
            backend="ds_ring",
            parallel_config=config,
        )
    return result


def test_what_the_ring_does_not_compute_is_refused_on_every_rank(rank_pool: Pool) -> None:
    ranks = rank_pool(4).run(refused)
    assert all(result.keys() == REFUSED.keys() for result in ranks)
    assert all(says in ranks[0][what] for what, says in REFUSED.items()), ranks[0]


def test_without_a_parallel_config_a_rank_attends_by_itself() -> None:
    from ds_ring.contrib.diffusers import attention

    q, k, v = (torch.randn(2, 5, 4, 8) for _ in range(3))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=0.3
    )
    out = attention(q, k, v, is_causal=True, scale=0.3)
    assert torch.allclose(out, wanted.transpose(1, 2), atol=1e-6)


def test_every_change_to_diffusers_is_a_row_of_the_table() -> None:
    from ds_ring.contrib.diffusers import DIFFUSERS

    DIFFUSERS.check()
    assert [row.kind for row in DIFFUSERS.rows] == ["added", "added", "registered"]
