"""Vision-language models whose language part is on a ring: loss and every gradient, the towers' too, as on one process.

Images lie across the borders of shards, and samples have different numbers of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError, RingError, RingShapeError
from ds_ring.schedule.grid import Grid
from tests.dist.deepspeed_ranks import Run, json_config, start_deepspeed
from tests.dist.family_ranks import attached, start_session, train_alone, train_on_ring
from tests.dist.harness import RankPool
from tests.dist.test_family_needs import GROUPED, check

Pool = Callable[[int], RankPool]

TOKENS, IMAGE, FEATURES = 45, 60, 4  # of each image
TEXT: dict[str, Any] = GROUPED | {"pad_token_id": 1, "attention_dropout": 0.0}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 2,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2,
    "temporal_patch_size": 1,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
SQUARES = torch.full((3, 2), 8)  # heights and widths in pixels
GRIDS = torch.tensor([[1, 4, 4]] * 3)  # in patches

# The class's name without "Config", its configuration, and what its images come with.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Tensor]]] = {
    "llava": (
        "Llava",
        {"vision_config": VISION | {"model_type": "clip_vision_model", "image_size": 4},
            "text_config": TEXT | {"model_type": "llama"}, "image_token_index": IMAGE},
        {"pixel_values": torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(5))},
    ),
    "mistral3": (
        "Mistral3",
        {
            "vision_config": VISION | {"model_type": "pixtral", "image_size": 8, "head_dim": 8},
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
            "image_token_index": IMAGE,
        },
        {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(5)),
            "image_sizes": SQUARES},
    ),
    "internvl": (
        "InternVL",
        {"vision_config": VISION | {"image_size": 8}, "text_config": TEXT | {"model_type": "qwen2"},
            "image_token_id": IMAGE},
        {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(5))},
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {"vision_config": QWEN_VISION | {"embed_dim": 16, "hidden_size": 32},
            "text_config": TEXT | {"rope_parameters": MROPE}, "image_token_id": IMAGE},
        {"pixel_values": torch.randn(48, 12, generator=torch.Generator().manual_seed(5)),
            "image_grid_thw": GRIDS},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "vision_config": QWEN_VISION
            | {"out_hidden_size": 32, "window_size": 4, "fullatt_block_indexes": [1]},
            "text_config": TEXT | {"rope_parameters": MROPE},
            "image_token_id": IMAGE,
        },
        {
            "pixel_values": torch.randn(48, 12, generator=torch.Generator().manual_seed(5)),
            "image_grid_thw": GRIDS,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "vision_config": VISION | {"model_type": "siglip_vision_model", "image_size": 8},
            "text_config": TEXT | {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"]},
            "image_token_index": IMAGE,
            "mm_tokens_per_image": FEATURES,
        },
        {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(5))},
    ),
}  # fmt: skip


def build(name: str) -> Any:
    import transformers

    kind, values, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**values)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def batch_of(name: str) -> dict[str, Tensor]:
    """Two samples, the first with two images; padding on the right of the second."""
    ids = torch.randint(2, IMAGE, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    for row, start in ((0, 3), (0, 20), (1, 9)):
        ids[row, start : start + FEATURES] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, 38:] = 0
    labels = ids.masked_fill((ids == IMAGE) | (mask == 0), -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask} | MODELS[name][2]
    types = {"qwen2_vl": "mm_token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "gemma3": "token_type_ids"}
    return batch | ({types[name]: (ids == IMAGE).int()} if name in types else {})


def on_a_ring(rank: int, world_size: int, name: str, layout: str, ulysses_size: int) -> Run:
    session = start_session(world_size, layout=layout, ulysses_size=ulysses_size)
    return train_on_ring(attached(build(name), session), session, [batch_of(name)])


@pytest.mark.parametrize(
    ("name", "layout", "world_size", "ulysses_size"),
    [
        ("llava", "zigzag", 3, 1), ("mistral3", "striped", 2, 1), ("internvl", "contiguous", 2, 2),
        ("qwen2_vl", "zigzag", 2, 1), ("qwen2_5_vl", "zigzag", 3, 1), ("gemma3", "zigzag", 2, 1),
    ],
)  # fmt: skip
@pytest.mark.day("llava-zigzag-3-1", "internvl-contiguous-2-2", "qwen2_5_vl-zigzag-3-1", "gemma3-zigzag-2-1")
def test_images_are_exact(
    rank_pool: Pool, name: str, layout: str, world_size: int, ulysses_size: int
) -> None:
    expected = train_alone(build(name), [batch_of(name)])
    assert any("vis" in parameter for parameter in expected.gradients)
    for got in rank_pool(world_size).run(on_a_ring, name, layout, ulysses_size):
        check(got, expected)


class OverTheBatch(nn.Module):
    """Normalize features [..., E] over all images of a batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = self.norm(x.flatten(0, -2)).view_as(x)
        return normal


def with_a_norm_over_the_batch() -> Any:
    model = build("llava")
    projector = model.model.multi_modal_projector
    projector.act = nn.Sequential(projector.act, OverTheBatch(projector.linear_1.out_features))
    return model.train()


def normal_on_a_ring(rank: int, world_size: int) -> Run:
    session = start_session(world_size)
    return train_on_ring(attached(with_a_norm_over_the_batch(), session), session, [batch_of("llava")])


def test_a_norm_over_the_batch_sees_all_images(rank_pool: Pool) -> None:
    """In training Emu3's encoder has one; each rank encodes all images then."""
    expected = train_alone(with_a_norm_over_the_batch(), [batch_of("llava")])
    for got in rank_pool(2).run(normal_on_a_ring):
        check(got, expected)


def patches_encoded(rank: int, world_size: int, name: str) -> tuple[int, int]:
    """How many patches or images this rank's encoder gets in a forward pass, and how many there are."""
    session = start_session(world_size)
    model = attached(build(name), session)
    seen: list[int] = []
    encode = model.base_model.get_image_features

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(len(kwargs["pixel_values"]))
        return encode(*args, **kwargs)

    noted.__signature__ = inspect.signature(encode)  # type: ignore[attr-defined]
    model.base_model.get_image_features = noted
    batch = batch_of(name)
    model(**session.shard_batch(batch)).loss.backward()
    first = [p.grad for key, p in model.named_parameters() if "vis" in key and ".0.mlp" in key]
    assert first and all(gradient is not None for gradient in first)
    return sum(seen), len(batch["pixel_values"])


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_each_image_is_encoded_once(rank_pool: Pool, name: str) -> None:
    encoded = rank_pool(3).run(patches_encoded, name)
    assert sum(one for one, _ in encoded) == encoded[0][1]
    assert len({one for one, _ in encoded}) == 1  # three images of one size, on three ranks


def test_images_that_fill_up_a_sample_are_encoded_by_nobody() -> None:
    """Idefics: a sample with fewer images than another one has zeros."""
    from ds_ring.contrib.images.model import _share

    values, mask = torch.randn(2, 2, 3, 4, 4), torch.ones(2, 2, 4, 4)
    values[0, 1] = 0
    given = {"pixel_values": values, "pixel_attention_mask": mask}
    shares = [_share(given, given, RingMesh(Grid(2, 2), r)) for r in (0, 1)]
    assert all(is_used for _, is_used in shares)
    images = torch.cat([found["pixel_values"] for found, _ in shares], dim=1)
    assert torch.equal(images, values[[0, 1, 1], [0, 0, 1]][None])


def test_patches_of_a_strip_are_divided_by_image() -> None:
    """MiniCPM: the patches of all images side by side, as squares of one strip."""
    from ds_ring.contrib.images.model import _share

    values = torch.randn(1, 3, 4, 4 * (4 + 8 + 4))
    given = {"pixel_values": values, "target_sizes": torch.tensor([[2, 2], [2, 4], [2, 2]])}
    shares = [_share(given, given, RingMesh(Grid(2, 2), r))[0] for r in (0, 1)]
    assert torch.equal(torch.cat([one["pixel_values"] for one in shares], dim=3), values)
    assert [one["target_sizes"].tolist() for one in shares] == [[[2, 2]], [[2, 4], [2, 2]]]


def test_blocks_are_numbered_by_the_token_types_of_whole_batches() -> None:
    from ds_ring.contrib.images.blocks import JoinedBlocks, numbers_blocks
    from ds_ring.masks.catalog import Causal
    from ds_ring.patterns.documents.pattern import Documents

    types = torch.tensor([[0, 1, 1, 0, 1, 0]])
    number = numbers_blocks(build("gemma3"))
    ids = number({"token_type_ids": types})
    assert ids is not None and ids.tolist() == [[-1, 0, 0, -1, 1, -1]]
    assert number({"token_type_ids": 0 * types}) is None and number({}) is None
    sees = JoinedBlocks(Documents(ids)).narrowed(Causal()).mask(np.arange(6), np.arange(6))
    expected = torch.ones(6, 6).tril().bool()
    expected[1, 2] = True
    assert torch.equal(torch.as_tensor(sees), expected)


def test_blocks_that_a_batch_does_not_have_are_refused() -> None:
    from types import SimpleNamespace

    from ds_ring.contrib.images.blocks import BlockRows, JoinedBlocks, numbers_blocks
    from ds_ring.integrations.deepspeed.packing import RowGroup
    from ds_ring.integrations.transformers.layer_masks import LayerMask
    from ds_ring.masks.catalog import Causal
    from ds_ring.patterns.documents.pattern import Documents

    group = RowGroup(JoinedBlocks(Documents([0, 0, -1])), (0,))
    mask = LayerMask(Causal(), joins_blocks=True)
    mask.check_blocks(SimpleNamespace(groups=(group,)))  # type: ignore[arg-type]
    with pytest.raises(RingError, match="see each other; give images with the batch"):
        mask.check_blocks(SimpleNamespace(groups=()))  # type: ignore[arg-type]
    with pytest.raises(RingError, match="expected softmax attention, got blocks of images"):
        _ = group.documents
    with pytest.raises(RingConfigError, match="leave it out"):
        BlockRows().check({}, Causal(), False)
    text = SimpleNamespace(use_bidirectional_attention="vision", sliding_window=2)
    model = SimpleNamespace(config=SimpleNamespace(model_type="gemma4_unified", text_config=text))
    number = numbers_blocks(model)
    assert number({"mm_token_type_ids": torch.tensor([[1, 1, 0, 1]])}) is not None
    with pytest.raises(RingConfigError, match="at most 2 tokens, as its window, got 3"):
        number({"mm_token_type_ids": torch.tensor([[1, 1, 1, 0]])})


def test_a_rank_without_an_image_encodes_one_for_its_gradients(rank_pool: Pool) -> None:
    encoded = [one for one, _ in rank_pool(4).run(patches_encoded, "llava")]
    assert encoded == [1, 1, 1, 1]  # of three images


def _attended(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


def as_many_as_patches(rank: int, world_size: int) -> list[str]:
    """An encoder of five patches beside five tokens of each rank; then plain attention in the language part."""
    start_deepspeed()
    import ds_ring

    ids = torch.tensor([[3, *[IMAGE] * FEATURES, 4, 5, 6, 7, 8]])
    batch = {"input_ids": ids, "labels": ids, "pixel_values": batch_of("llava")["pixel_values"][:1]}
    found = []
    for plain in (False, True):
        model = build("llava")
        if plain:
            layer = model.model.language_model.layers[0].mlp
            layer.register_forward_hook(lambda _, args, out: out + _attended(out[:, None])[:, 0])
        engine, *_ = ds_ring.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            config=json_config(world_size, 1, 0),
        )  # fmt: skip
        try:
            engine(**engine.ring.shard_batch(batch))
            found.append("")
        except RingConfigError as error:
            found.append(str(error))
    return found


def test_an_encoder_may_attend_over_as_many_patches_as_a_rank_has_tokens(rank_pool: Pool) -> None:
    for exact, refused in rank_pool(2).run(as_many_as_patches):
        assert not exact
        assert "the 5 tokens of this rank, of 10" in refused


def trained(rank: int, world_size: int) -> tuple[list[float], bool, list[str]]:
    """Two steps at ZeRO 3, the first compared with one process; a generation; then what is refused."""
    start_deepspeed()
    import ds_ring

    model, plain, batch = build("llava"), build("llava").eval(), batch_of("llava")
    config = json_config(world_size, 2, 3, ring_attention={"verify_first_batch": True})
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = ds_ring.initialize(model=model, optimizer=sgd, config=config)
    losses = []
    for given in (batch, {key: x for key, x in batch.items() if key != "pixel_values"}):
        if given is not batch:
            given["input_ids"] = given["input_ids"].masked_fill(given["input_ids"] == IMAGE, 5)
        loss = engine(**engine.ring.shard_batch(given)).loss
        engine.backward(loss)
        engine.step()
        losses += [float(engine.ring.mean_loss(loss)), float(plain(**given).loss)]
    engine.eval()
    prompt = {key: batch[key][:1] for key in ("input_ids", "attention_mask")}
    prompt["pixel_values"] = batch["pixel_values"][:2]
    asked: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    texts = [one.generate(**prompt, **asked) for one in (engine.module, plain)]
    with engine.ring.off():
        texts.append(engine.module.generate(**prompt, **asked))
    same = all(torch.equal(text, texts[0]) for text in texts)
    faults: list[tuple[type[RingError], dict[str, Tensor]]] = [
        (RingShapeError, {"pixel_values": batch["pixel_values"][:2]}),
        (RingConfigError, {"pixel_values_videos": batch["pixel_values"][None]}),
    ]
    heard = []
    for error, changes in faults:
        videos = {key: x for key, x in changes.items() if "videos" in key}
        local = engine.ring.shard_batch(batch | {k: x for k, x in changes.items() if k not in videos})
        with pytest.raises(error) as raised:
            engine(**local, **videos)
        heard.append(str(raised.value))
    return losses, same, heard


def test_training_generation_and_refusals(rank_pool: Pool) -> None:
    for losses, same, heard in rank_pool(2).run(trained):
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert losses[2] == pytest.approx(losses[3], rel=1e-5)
        assert same
        assert "expected 8 image tokens, got 12" in heard[0]
        assert "got pixel_values_videos" in heard[1]


def test_a_window_over_generated_tokens_alone_is_refused_in_a_generation() -> None:
    from types import SimpleNamespace

    from ds_ring.contrib.images.model import ImageModels

    text = SimpleNamespace(layer_types=["reference_sliding_attention"])
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    assert "window over generated tokens" in (ImageModels().refuse_generation(model) or "")
    text.layer_types = ["full_attention"]
    assert ImageModels().refuse_generation(model) is None
