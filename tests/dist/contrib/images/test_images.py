"""Vision-language models whose language part is on a ring: loss and every gradient, the towers' too, as on one process.

Images and videos lie across the borders of shards, and samples have different numbers of them.
"""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from ds_ring.comm.mesh import RingMesh
from ds_ring.contrib.images.batch import OF_IMAGES, OF_VIDEOS, PIXELS
from ds_ring.contrib.images.blocks import BlockRows, JoinedBlocks, numbers_blocks
from ds_ring.contrib.images.model import _ONE_BY_ONE, _ONE_TOKEN, EXACT, ImageModels, _share
from ds_ring.data.packing import RowGroup
from ds_ring.errors import RingConfigError, RingError
from ds_ring.masks.catalog import Causal
from ds_ring.models.layer_masks import LayerMask
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.schedule.grid import Grid
from ds_ring_launcher.check import small_images, small_model
from ds_ring_launcher.check.small_model import Form
from tests.dist.deepspeed_ranks import GENERATION, Run, json_config, start_deepspeed, start_engine, take_step
from tests.dist.family_ranks import attached, start_session, train_alone, train_on_ring
from tests.dist.harness import Pool, catch_refusal
from tests.dist.test_family_needs import GROUPED, check

TOKENS, IMAGE, VIDEO, FEATURES = 45, 60, 59, 4  # of each image
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
VIDEO_GRIDS = torch.tensor([[3, 4, 4], [5, 2, 2]])  # steps, and patches of each: 3 * 4 and 5 features

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
            "video_token_id": VIDEO,
        },
        {
            "pixel_values": torch.randn(48, 12, generator=torch.Generator().manual_seed(5)),
            "image_grid_thw": GRIDS,
            "pixel_values_videos": torch.randn(68, 12, generator=torch.Generator().manual_seed(6)),
            "video_grid_thw": VIDEO_GRIDS,
            "second_per_grid_ts": torch.tensor([1.0, 0.6]),
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
    kind, values, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**values)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def batch_of(name: str) -> dict[str, Tensor]:
    """Two samples, the first with two images; padding on the right of the second. A video in each, if any."""
    ids = torch.randint(2, VIDEO, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    for row, start in ((0, 3), (0, 20), (1, 9)):
        ids[row, start : start + FEATURES] = IMAGE
    if "video_grid_thw" in MODELS[name][2]:
        ids[0, 26 : 26 + 12] = ids[1, 17 : 17 + 5] = VIDEO
    mask = torch.ones_like(ids)
    mask[1, 38:] = 0
    labels = ids.masked_fill((ids >= VIDEO) | (mask == 0), -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask} | MODELS[name][2]
    types = {"qwen2_vl": "mm_token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "gemma3": "token_type_ids"}
    return batch | ({types[name]: (ids == IMAGE).int() + 2 * (ids == VIDEO).int()} if name in types else {})


def on_a_ring(rank: int, world_size: int, name: str, layout: str, ulysses_size: int) -> Run:
    session = start_session(world_size, layout=layout, ulysses_size=ulysses_size)
    return train_on_ring(attached(build(name), session), session, [batch_of(name)])


@pytest.mark.day("llava-zigzag-3-1", "qwen2_5_vl-zigzag-3-1")
@pytest.mark.parametrize(
    ("name", "layout", "world_size", "ulysses_size"),
    [
        ("llava", "zigzag", 3, 1), ("mistral3", "striped", 2, 1), ("internvl", "contiguous", 2, 2),
        ("qwen2_vl", "zigzag", 2, 1), ("qwen2_5_vl", "zigzag", 3, 1), ("gemma3", "zigzag", 2, 1),
        ("qwen2_5_vl", "striped", 4, 2),
    ],
)  # fmt: skip
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


def patches_encoded(rank: int, world_size: int, name: str, modality: str = "image") -> tuple[int, int]:
    """How many patches or images this rank's encoder gets in a forward pass, and how many there are."""
    session = start_session(world_size)
    model = attached(build(name), session)
    seen: list[int] = []
    encode, pixels = getattr(model.base_model, f"get_{modality}_features"), PIXELS[modality]

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(len(kwargs[pixels]))
        return encode(*args, **kwargs)

    noted.__signature__ = inspect.signature(encode)  # type: ignore[attr-defined]
    setattr(model.base_model, f"get_{modality}_features", noted)
    batch = batch_of(name)
    model(**session.shard_batch(batch)).loss.backward()
    first = [p.grad for key, p in model.named_parameters() if "vis" in key and ".0.mlp" in key]
    assert first and all(gradient is not None for gradient in first)
    return sum(seen), len(batch[pixels])


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_each_image_is_encoded_once(rank_pool: Pool, name: str) -> None:
    encoded = rank_pool(3).run(patches_encoded, name)
    assert sum(item for item, _ in encoded) == encoded[0][1]
    assert len({item for item, _ in encoded}) == 1  # three images of one size, on three ranks


def test_each_step_of_a_video_is_encoded_once(rank_pool: Pool) -> None:
    """Three steps of 16 patches and five of 4: the rank whose share has its middle encodes a step."""
    encoded = rank_pool(3).run(patches_encoded, "qwen2_5_vl", "video")
    assert [item for item, _ in encoded] == [16, 32, 20]
    assert encoded[0][1] == 68


def shares_of(kind: str, inputs: dict[str, Tensor], ranks: int) -> list[dict[str, Any]]:
    """What each rank encodes of videos."""
    base = SimpleNamespace(config=SimpleNamespace(model_type=kind))
    return [_share(base, inputs, inputs, RingMesh(Grid(ranks, ranks), r)).pixels for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_rank_encodes_its_share_of_the_frames_of_one_video(ranks: int) -> None:
    """Of F frames about F / P: patches of a grid, frames of a tensor, frames in one row (Gemma 4)."""
    frames, patches = 22, 6
    grid = {
        "pixel_values_videos": torch.arange(frames * patches)[:, None],
        "video_grid_thw": torch.tensor([[frames, 2, 3]]),
    }
    tensor = {"pixel_values_videos": torch.arange(frames * patches).view(1, frames, 1, 2, 3)}
    row = {
        "pixel_values_videos": torch.arange(frames * patches).view(frames, 2, 3),
        "num_frames_per_video": torch.tensor([frames]),
    }
    for kind, inputs in (("qwen2_5_vl", grid), ("llava_onevision", tensor), ("gemma4", row)):
        outcome = shares_of(kind, inputs, ranks)
        pixels = [item["pixel_values_videos"].flatten() for item in outcome]
        assert torch.equal(torch.cat(pixels), torch.arange(frames * patches))
        assert max(map(len, pixels)) <= -(-frames // ranks) * patches
    assert sum(int(item["video_grid_thw"][0, 0]) for item in shares_of("qwen2_5_vl", grid, ranks)) == frames
    whole = [len(item["pixel_values_videos"]) for item in shares_of("kimi_k25", grid, ranks)]
    assert whole == [frames * patches] * ranks  # its attention is over all frames: one rank has the video


def test_a_share_of_several_videos_has_parts_of_their_grids() -> None:
    """The video that begins on one rank and ends on another is there with some steps on each."""
    inputs = {
        "pixel_values_videos": torch.arange(40)[:, None],
        "video_grid_thw": torch.tensor([[1, 2, 2], [7, 2, 2], [2, 2, 2]]),
        "video_merge_sizes": torch.tensor([1, 2, 2]),
    }
    first, second = shares_of("video_llama_3", inputs, 2)
    assert first["video_grid_thw"].tolist() == [[1, 2, 2], [4, 2, 2]]
    assert second["video_grid_thw"].tolist() == [[3, 2, 2], [2, 2, 2]]
    assert [item["video_merge_sizes"].tolist() for item in (first, second)] == [[1, 2], [2, 2]]
    assert inputs["video_grid_thw"].tolist() == [[1, 2, 2], [7, 2, 2], [2, 2, 2]]


def faulty(rank: int, world_size: int, fault: str) -> Run:
    """A ring on which something is wrong with the features of videos."""
    session = start_session(world_size)
    model = attached(build("qwen2_5_vl"), session)
    encode = model.base_model.get_video_features

    def wrong(*args: Any, **kwargs: Any) -> Any:
        outcome = encode(*args, **kwargs)
        if fault == "two steps swapped":
            outcome.pooler_output = [x.roll(len(x) // 2, dims=0) for x in outcome.pooler_output]
        elif rank == 1:  # its gradients are dropped
            outcome.pooler_output = [x.detach() + 0 * x for x in outcome.pooler_output]
        return outcome

    wrong.__signature__ = inspect.signature(encode)  # type: ignore[attr-defined]
    if fault == "no order":
        axes = session.needs.whole._number_axes
        session.needs.whole._number_axes = lambda batch: axes(batch | {"second_per_grid_ts": None})
    else:
        model.base_model.get_video_features = wrong
    return train_on_ring(model, session, [batch_of("qwen2_5_vl")])


@pytest.mark.parametrize("fault", ["two steps swapped", "gradients dropped", "no order"])
@pytest.mark.day("two steps swapped")
def test_a_comparison_finds_what_is_wrong_with_a_video(rank_pool: Pool, fault: str) -> None:
    expected = train_alone(build("qwen2_5_vl"), [batch_of("qwen2_5_vl")])
    got = rank_pool(2).run(faulty, fault)[0]
    with pytest.raises(AssertionError):
        check(got, expected)


# Types that take videos, their images and videos in one batch where one process takes both.
VIDEOS = """
    cohere_compass cosmos3_edge cosmos3_omni dots3_note ernie4_5_vl_moe exaone4_5 gemma4 gemma4_unified glm46v glm4v
    glm4v_moe glm5_next glm_ocr glmga hy_v4_vl hyperclovax_vision_v2 kimi_k25 lfm3_vl llava_next_video llava_onevision
    minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl molmo2 muse_glimmer muse_spark nemotron_h_omni qwen2_5_omni_thinker
    qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp video_llama_3
    video_llava
"""


def test_types_whose_videos_have_image_tokens_are_listed() -> None:
    """By the masks of features that transformers' files make, of all types that share one of their classes."""
    by_class: dict[str, bool] = {}
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text()
        alike = "special_video_mask = input_ids == self.config.image_token_id" in text
        by_class |= dict.fromkeys(re.findall(r"^class (\w+)", text, re.MULTILINE), alike)
    classes = {kind: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind, "") for kind in EXACT}
    expected = {kind for kind, name in classes.items() if by_class.get(name)}
    assert expected >= {"glm4v"} and expected <= set(_ONE_TOKEN) == set(small_images._ONE_TOKEN)


def checked(
    rank: int, world_size: int, kind: str, stage: int, forms: tuple[Form, ...] = ("plain", "padded")
) -> list[Any]:
    start_deepspeed()
    from ds_ring_launcher.check.model_check import CheckRequest, check_forms

    request = CheckRequest(kind, head="image-text", forms=forms, stage=stage)
    return check_forms(request)


def frames_of_one_video(rank: int, world_size: int) -> list[Any]:
    """Nemotron's older form: it joins the five frames in pairs."""
    from ds_ring_launcher.check import model_check

    def frames(*_: Any) -> dict[str, Tensor]:
        return {"pixel_values_videos": torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(7))}

    only_videos = partial(small_images.add_images, only_videos=True)
    with patch.object(small_images, "_video", frames), patch.object(model_check, "add_images", only_videos):
        return checked(rank, world_size, "nemotron_h_omni", 0)


@pytest.mark.night
def test_frames_that_are_joined_are_encoded_by_all(rank_pool: Pool) -> None:
    for report in rank_pool(3).run(frames_of_one_video)[0]:
        assert report.result == "exact", (report.form, report.reason)


@pytest.mark.night
@pytest.mark.parametrize("ring_size", [2, 3, 4])
@pytest.mark.parametrize("kind", [item for item in VIDEOS.split() if item in CONFIG_MAPPING])
def test_videos_are_exact(rank_pool: Pool, kind: str, ring_size: int) -> None:
    """Deepstack features, parted steps, positions: whatever the type has."""
    for report in rank_pool(ring_size).run(checked, kind, 3 if ring_size == 3 else 0)[0]:
        assert report.result == "exact", (report.form, report.reason)


def small_images_model(kind: str, tokens: int) -> tuple[Any, dict[str, Tensor]]:
    """A small model of a type, and a batch of text."""
    config = small_model.shrink(small_model.read_config(kind), tokens, images=True)
    model = small_model.build(config, "image-text", 0)
    return model, small_model.make_batch(model.config, "image-text", tokens, 0, True)


def calls_of(kind: str, modality: str, ranks: int) -> list[list[str]]:
    """The modules with parameters that each rank calls for its share of a batch, in their order."""
    model, text = small_images_model(kind, small_images.LEAST_TOKENS.get(kind, 61))
    batch = small_images.add_images(text, model, 0, only_videos=modality == "video" and kind in _ONE_TOKEN)
    base: Any = model.base_model
    encode = getattr(base, f"get_{modality}_features")
    takes = inspect.signature(encode).parameters
    calls: list[list[str]] = [[] for _ in range(ranks)]
    names = OF_IMAGES if modality == "image" else OF_VIDEOS
    pixels = {key: batch[key] for key in names if key in batch and key in takes}
    for rank, called in enumerate(calls):
        share = _share(base, pixels, takes, RingMesh(Grid(ranks, ranks), rank))
        hooks = [
            module.register_forward_hook(lambda *_, name=name, called=called: called.append(name))
            for name, module in base.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        with torch.no_grad():
            encode(**share.pixels, return_dict=True)
        for hook in hooks:
            hook.remove()
    return calls


@pytest.mark.parametrize("kind", [item for item in _ONE_BY_ONE if item in CONFIG_MAPPING])
@pytest.mark.night
def test_encoders_that_take_images_one_by_one_are_exact_at_zero_3(rank_pool: Pool, kind: str) -> None:
    """Of three images one rank has two."""
    for report in rank_pool(2).run(checked, kind, 3, ("plain",))[0]:
        assert report.result == "exact", (report.form, report.reason)


# Of Molmo 2 and Step 3.7 each rank encodes all images.
CUT = [item for item in EXACT if item in CONFIG_MAPPING and item not in ("molmo2", "step3p7")]


@pytest.mark.parametrize(
    ("kind", "modality"),
    [
        (item, kind)
        for kind in ("image", "video")
        for item in CUT
        if kind == "image" or item in VIDEOS.split()
    ],
)
@pytest.mark.day("minicpmv4_6-video")
def test_all_ranks_call_the_same_modules(kind: str, modality: str) -> None:
    """ZeRO 3 gathers the parameters of each call on all ranks, also where an encoder takes images one by one."""
    if kind == "inkling_mm_model":
        pytest.importorskip("scipy")
    for ranks in (2, 3, 4):
        first, *others = calls_of(kind, modality, ranks)
        assert first and all(item == first for item in others), ranks


def test_images_that_fill_up_a_sample_are_encoded_by_nobody() -> None:
    """Idefics: a sample with fewer images than another one has zeros."""
    values, mask = torch.randn(2, 2, 3, 4, 4), torch.ones(2, 2, 4, 4)
    values[0, 1] = 0
    inputs = {"pixel_values": values, "pixel_attention_mask": mask}
    shares = [_share(None, inputs, inputs, RingMesh(Grid(2, 2), r)) for r in (0, 1)]
    assert all(share.is_used for share in shares)
    images = torch.cat([share.pixels["pixel_values"] for share in shares], dim=1)
    assert torch.equal(images, values[[0, 1, 1], [0, 0, 1]][None])


def test_patches_of_a_strip_are_divided_by_image() -> None:
    """MiniCPM: the patches of all images side by side, as squares of one strip."""
    values = torch.randn(1, 3, 4, 4 * (4 + 8 + 4))
    inputs = {"pixel_values": values, "target_sizes": torch.tensor([[2, 2], [2, 4], [2, 2]])}
    shares = [_share(None, inputs, inputs, RingMesh(Grid(2, 2), r)).pixels for r in (0, 1)]
    assert torch.equal(torch.cat([item["pixel_values"] for item in shares], dim=3), values)
    assert [item["target_sizes"].tolist() for item in shares] == [[[2, 2]], [[2, 4], [2, 2]]]


def test_blocks_are_numbered_by_the_token_types_of_whole_batches() -> None:
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


@pytest.mark.night
def test_a_rank_without_an_image_encodes_one_for_its_gradients(rank_pool: Pool) -> None:
    encoded = [item for item, _ in rank_pool(4).run(patches_encoded, "llava")]
    assert encoded == [1, 1, 1, 1]  # of three images


def _attended(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


def as_many_as_patches(rank: int, world_size: int) -> list[str]:
    """An encoder of five patches beside five tokens of each rank; then plain attention in the language part."""
    ids = torch.tensor([[3, *[IMAGE] * FEATURES, 4, 5, 6, 7, 8]])
    batch = {"input_ids": ids, "labels": ids, "pixel_values": batch_of("llava")["pixel_values"][:1]}
    outcome = []
    for plain in (False, True):
        model = build("llava")
        if plain:
            layer = model.model.language_model.layers[0].mlp
            layer.register_forward_hook(lambda _, args, out: out + _attended(out[:, None])[:, 0])
        engine = start_engine(model, json_config(world_size, 1, 0), 0.0)
        outcome.append(catch_refusal(engine, **engine.ring.shard_batch(batch)))
    return outcome


@pytest.mark.night
def test_an_encoder_may_attend_over_as_many_patches_as_a_rank_has_tokens(rank_pool: Pool) -> None:
    for exact, refused in rank_pool(2).run(as_many_as_patches):
        assert not exact
        assert "the 5 tokens of this rank, of 10" in refused


def trained(rank: int, world_size: int) -> tuple[list[float], bool, list[str]]:
    """Two steps at ZeRO 3, the first compared with one process; a generation; then what is refused."""
    model, plain, batch = build("llava"), build("llava").eval(), batch_of("llava")
    config = json_config(world_size, 2, 3, ring_attention={"verify_first_batch": True})
    engine = start_engine(model, config, 0.0)
    losses = []
    for inputs in (batch, {key: x for key, x in batch.items() if key != "pixel_values"}):
        if inputs is not batch:
            inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, 5)
        losses += [take_step(engine, inputs), float(plain(**inputs).loss)]
    engine.eval()
    prompt = {key: batch[key][:1] for key in ("input_ids", "attention_mask")}
    prompt["pixel_values"] = batch["pixel_values"][:2]
    texts = [item.generate(**prompt, **GENERATION) for item in (engine.module, plain)]
    with engine.ring.off():
        texts.append(engine.module.generate(**prompt, **GENERATION))
    same = all(torch.equal(text, texts[0]) for text in texts)
    faults = (
        {"pixel_values": batch["pixel_values"][:2]}, {"pixel_values_videos": batch["pixel_values"][None]},
    )  # fmt: skip
    heard = [catch_refusal(engine, **engine.ring.shard_batch(batch | changes)) for changes in faults]
    return losses, same, heard


def test_training_generation_and_refusals(rank_pool: Pool) -> None:
    for losses, same, heard in rank_pool(2).run(trained):
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert losses[2] == pytest.approx(losses[3], rel=1e-5)
        assert same
        assert heard[0].startswith("RingShapeError") and "expected 8 image tokens, got 12" in heard[0]
        assert heard[1].startswith("RingConfigError") and "texts, images, got pixel_values_videos" in heard[1]


def verified(rank: int, world_size: int) -> tuple[float, float]:
    """The loss of a step at ZeRO 3 that is compared with one process, and that of one process."""
    model, plain, batch = build("qwen2_5_vl"), build("qwen2_5_vl"), batch_of("qwen2_5_vl")
    config = json_config(world_size, 2, 3, ring_attention={"verify_first_batch": True})
    engine = start_engine(model, config, 0.0)
    return take_step(engine, batch), float(plain(**batch).loss)


@pytest.mark.night
def test_a_first_batch_with_videos_and_padding_is_verified(rank_pool: Pool) -> None:
    for loss, alone in rank_pool(2).run(verified):
        assert loss == pytest.approx(alone, rel=1e-5)


def texts_of_videos(rank: int, world_size: int) -> list[Tensor]:
    """What a prompt with two images and a video goes on with, on a ring and on one process."""
    (model, _), (plain, text) = (small_images_model("llava_onevision", 61) for _ in range(2))
    batch = small_images.add_images(text, plain.eval(), 0)
    engine = start_engine(model, json_config(world_size, 2, 0), 0.0)
    engine.eval()
    prompt = {key: batch[key][:1] for key in ("input_ids", "pixel_values_videos")}
    prompt |= {key: batch[key][:2] for key in ("pixel_values", "image_sizes")}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    return [item.generate(**prompt, **GENERATION) for item in (engine.module, plain)]


@pytest.mark.night
def test_a_text_goes_on_after_a_video(rank_pool: Pool) -> None:
    for on_a_ring, alone in rank_pool(2).run(texts_of_videos):
        assert torch.equal(on_a_ring, alone)


def test_a_window_over_generated_tokens_alone_is_refused_in_a_generation() -> None:
    text = SimpleNamespace(layer_types=["reference_sliding_attention"])
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    assert "window over generated tokens" in (ImageModels().refuse_generation(model) or "")
    text.layer_types = ["full_attention"]
    assert ImageModels().refuse_generation(model) is None
