"""Make a model that reads images and videos small, and those of a batch of it.

Owns the sizes of image encoders, the shapes in which a model type takes its images and videos (from the names
that `get_image_features` and `get_video_features` take; no processor is run), and positions of their tokens:
across the borders of shards, two images and a video between them in the first sample, an image in the second.

Shapes: B samples, T tokens, I images, C channels, H rows and W columns of pixels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ds_ring.compat.transformers import PreTrainedConfig
from ds_ring.data.batch import IGNORE, Batch
from ds_ring.errors import RingConfigError

ConfigValues = dict[str, Any]

IMAGES = (2, 1)  # of each sample
FRAMES = 4  # of the video, of models that take videos
PATCH, SIDE = 4, 4  # pixels of a patch's side, patches of an image's side
GRIDS = ((1, 4, 4), (1, 2, 4), (1, 4, 2))  # in patches, of models that take images of any size
_WIDTH, _LAYERS = 32, 2

# By the names that image encoders, and what joins them to the text part, have for them.
_SIZES: dict[str, int] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "embed_dim",
            "encoder_embed_dim",
            "resampler_hidden_size",
            "d_model",
            "adapter_in_dim",
        ),
        _WIDTH,
    ),
    **dict.fromkeys(("encoder_hidden_size", "image_token_embed_dim", "adapter_input_size"), _WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "mlp_dim", "moe_intermediate_size", "encoder_ffn_dim", "projection_hidden_dim"),
        48,
    ),
    **dict.fromkeys(("depth", "layers", "encoder_layers"), _LAYERS),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "num_heads",
            "attention_heads",
            "num_key_value_heads",
            "encoder_attention_heads",
        ),
        2,
    ),
    "head_dim": _WIDTH // 2,
    "patch_size": PATCH,
    "image_size": PATCH * SIDE,
    "num_position_embeddings": SIDE * SIDE,
    "position_embedding_size": SIDE * SIDE,
    "num_patches": SIDE * SIDE,
    "window_size": 2 * PATCH,
    "temporal_patch_size": 2,
    "vocab_size": 64,
    "pos_emb_height": SIDE,
    "pos_emb_width": SIDE,
    "num_local_experts": 4,
    "base_channels": _WIDTH,  # groups of norms are of 32 channels
    "latent_channels": _WIDTH,
    "num_res_blocks": 1,
    "posemb_grid_size": SIDE,
    "projection_intermediate_size": 48,
}
# These are the text part's width.
_TEXT_WIDTHS = ("out_hidden_size", "projection_dim", "text_hidden_size", "adapter_out_dim", "output_dim")
# Layers that are named: the first and the last of the small encoder.
_LAYERS_NAMED = (
    "fullatt_block_indexes", "deepstack_visual_indexes", "intermediate_layers_indices", "global_attn_indexes",
)  # fmt: skip
_VQ = {"channel_multiplier": [1, 1, 1], "attn_resolutions": [], "num_res_blocks": 1}
_SAM = {"output_channels": 16, "mlp_dim": 48, "image_size": 8 * PATCH, "global_attn_indexes": [1]}
_SAM_DOWN = _SAM | {"downsample_channels": [24, _WIDTH], "image_size": 8 * PATCH}
# What the tokens of a video are, by its names; of the second list they are image tokens, so that no batch has
# both. Of the third list an image token is a video's between the tokens that begin and end one.
_MEDIA_TOKENS = ("image_token", "video_token")
_VIDEO_TOKENS = ("video_token_id", "video_token_index")
_ONE_TOKEN = ("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "molmo2", "nemotron_h_omni")
_SPANS = ("glm5_next",)
_SECONDS = ("second_per_grid_ts", "video_second_per_grid")  # between the steps of a video
LEAST_TOKENS = {"deepseek_ocr2": 700}  # an image of it has 145 tokens at least
# By model type: what must fit the small sizes, by part.
_OF_TYPES: dict[str, ConfigValues] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "kimi_k25": {"projection_hidden_size": _WIDTH},
    **{
        name: {"vision_config": {"image_size": 2 * PATCH}}
        for name in ("idefics2", "llava", "ovis2", "paligemma", "deepseek_vl")
    },
    **{
        name: {"image_grid_pinpoints": [[8, 8]], "vision_config": {"image_size": 2 * PATCH}}
        for name in ("llava_next", "llava_onevision")
    },
    "vipllava": {"vision_feature_layer": [-2, -1], "vision_config": {"image_size": 2 * PATCH}},
    "llama4": {
        "vision_config": {
            "intermediate_size": 4 * _WIDTH,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        }
        | {"vision_output_dim": 24},
    },
    "minimax_m3_vl": {"vision_config": {"projector_hidden_size": 48, "merged_hidden_size": 48}},
    "cohere2_vision": {"vision_config": {"alignment_intermediate_size": 48}},
    "lfm2_vl": {"vision_config": {"projector_hidden_size": 48}},
    "apertus1p5": {
        "image_token_offset": 40,
        "audio_token_offset": 56,
        "vision_config": _VQ | {"codebook_size": 16},
        "audio_config": {"codebook_size": 8, "codebook_dim": _WIDTH},
    },
    "aria": {"projector_patch_to_query_dict": {SIDE * SIDE: 4}},
    "blip-2": {"num_query_tokens": 4, "image_text_hidden_size": _WIDTH},
    "chameleon": {
        "vq_config": _VQ | {"num_embeddings": 10, "resolution": PATCH * SIDE, "embed_dim": 8},
        "vocabulary_map": {f"IMGIMG{chr(65 + number)}Z": 60 + number for number in range(10)}
        | {"<image>": 88},
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": _SAM},
    "deepseek_ocr2": {"vision_config": {"sam_config": _SAM_DOWN}},
    "unlimited_ocr": {"vision_config": {"sam_config": _SAM_DOWN, "encoder_config": {"image_size": 16}}},
    "emu3": {
        "vq_config": _VQ | {"codebook_size": 10, "embed_dim": 4, "latent_channels": 4, "hidden_size": _WIDTH},
        "vocabulary_map": {f"<|visual token {number:06d}|>": 60 + number for number in range(10)}
        | {"<image>": 88, "<|extra_200|>": 87},
    },
    "fuyu": {"patch_size": PATCH, "image_size": 2 * PATCH},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64}},
    "granite4_vision": {  # a head has 64 channels
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "image_grid_pinpoints": [[16, 16]],
        "vision_config": {"hidden_size": 64},
    },
    "granite_docling": {"vision_config": {"scale_factor": 2}},
    "instructblip": {"num_query_tokens": 4},
    "instructblipvideo": {"num_query_tokens": 4},
    "janus": {"vision_config": {"num_image_tokens": SIDE * SIDE}, "vq_config": _VQ},
    "llava_next_video": {"image_grid_pinpoints": [[8, 8]], "vision_config": {"image_size": 2 * PATCH}},
    **{
        name: {"insert_layer_id": 0, "vision_config": {"insert_layer_id": 0}}
        for name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
    },
    "molmo2": {
        "image_patch_id": 70,
        "adapter_config": {"vision_feature_layer": [-1, -2]},
        "vision_config": {"image_size": [PATCH * SIDE] * 2},
    },
    "muse_glimmer": {"out_hidden_size": 4 * _WIDTH, "projector_hidden_size": 48},
    "muse_spark": {
        "out_hidden_size": 4 * _WIDTH,
        "projector_hidden_size": 48,
        "audio_config": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    },
    "nemotron_h_omni": {
        "projector_hidden_size": 48,
        "vision_hidden_size": _WIDTH,
        "vision_config": {"max_img_size": PATCH * SIDE},
    },
    **{name: {"vision_start_token_id": 80} for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    "video_llava": {"vision_config": {"image_size": 2 * PATCH}},
}
_RESAMPLER = {
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 4,
    "resampler_head_dim": 16,
    "num_key_value_heads": 2,
}


def shrink_images(config: PreTrainedConfig, values: ConfigValues, text: ConfigValues) -> ConfigValues:
    """Return the values of a model's configuration with a small text part, `text`, and image encoder.

    Args:
        config: of the whole model.
        values: of the same, with few layers.
        text: of the small text part, or of the whole model if it has its text part's values itself.
    """
    model_type, width = config.model_type, text.get("hidden_size")
    parts = {key: part for key, part in values.items() if key.endswith("_config") and key != "text_config"}
    if not isinstance(width, int) or not (parts or "patch_size" in values):  # Fuyu has one projection
        raise RingConfigError(
            f"{model_type}: expected vision_config and a text part with hidden_size, got"
            f" {', '.join(config.sub_configs) or 'no parts'}; give a small config.json"
        )
    values = values | ({"text_config": text} if "text_config" in values else text) | parts
    if parts.get("perceiver_config"):  # Idefics 2's
        parts["perceiver_config"] |= _RESAMPLER | {"hidden_size": width}
    for key, part in parts.items():
        if key != "perceiver_config" and isinstance(part, dict):
            shrink_part(part, width)
    for name in ("hidden_size", "projection_dim"):  # PaliGemma's
        if isinstance(values.get(name), int):
            values[name] = width
    if isinstance(values.get("vocab_size"), int):
        values["vocab_size"] = text["vocab_size"]
    name_tokens(values, text["vocab_size"])
    return merged(values, _OF_TYPES.get(model_type, {}))


def shrink_part(part: ConfigValues, width: int) -> None:
    """Make an encoder, and the parts of it, narrow.

    Args:
        part: its values, which change.
        width: of the text part.
    """
    outer_width = part.get("hidden_size") if "embed_dim" in part else None  # Qwen2-VL's: of its output
    for name, size in _SIZES.items():
        value = part.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            part[name] = min(value, size)
        elif isinstance(value, (list, tuple)) and name in ("image_size", "patch_size"):
            part[name] = [size] * len(value)
    if outer_width is not None:
        part["hidden_size"] = width
    for name in _TEXT_WIDTHS:
        if isinstance(part.get(name), int):
            part[name] = width
    for name in _LAYERS_NAMED:
        if part.get(name):
            part[name] = [0, _LAYERS - 1][-len(part[name]) :]
    for inner in part.values():
        if isinstance(inner, dict) and "model_type" in inner:
            shrink_part(inner, width)


def merged(values: ConfigValues, changes: ConfigValues) -> ConfigValues:
    """Return the values with others in their place, those of parts by themselves."""
    return values | {
        key: merged(values.get(key) or {}, value) if key.endswith("_config") else value
        for key, value in changes.items()
    }


def name_tokens(values: ConfigValues, vocabulary: int) -> None:
    """Give every token that is no text an id of its own, from the last one down."""
    names = sorted(
        (
            name
            for name in values
            if name.endswith(("_token_id", "_token_index"))
            and (values[name] is not None or name.startswith(_MEDIA_TOKENS))
        ),
        key=lambda name: not name.startswith("image_token"),
    )
    for number, name in enumerate(names):
        if isinstance(values[name], int) or name.startswith(_MEDIA_TOKENS):
            values[name] = vocabulary - 1 - number


def add_images(batch: Batch, model: PreTrainedModel, seed: int, only_videos: bool = False) -> Batch:
    """Return a batch of text [B, T] with tokens of images and videos in place of some, and these.

    Args:
        batch: of text.
        model: that takes it.
        seed: of the images.
        only_videos: without images.

    Raises:
        RingConfigError: the model takes its images in a shape that is not known here, or too large for the
            tokens.
    """
    base: Any = model.base_model
    if not _reads_images(model):
        return batch
    if not hasattr(base, "get_image_features"):
        raise RingConfigError.wrong(
            model.config.model_type, "get_image_features for images", "none", "leave images out"
        )
    try:
        images = {} if only_videos else _images(model, seed)
        counts = _counts(base.get_image_features, images, sum(IMAGES)) if images else []
        video_token = None if images and model.config.model_type in _ONE_TOKEN else _video_token(model)
        videos = {} if video_token is None else _video(model, seed)
        of_frames = _counts(base.get_video_features, videos, 1)[0] if videos else 0
        if (mask := videos.get("video_compression_mask")) is not None:
            of_frames = int(mask.sum())
    except Exception as error:  # of a model type that takes images otherwise
        raise RingConfigError(
            f"{model.config.model_type}: no images can be made: {type(error).__name__}: {error}"
        ) from error
    rope = getattr(base, "get_rope_index", None)
    # Qwen's Omni models find images by the token before, where there is an attention_mask
    is_marked = rope is not None and "mm_token_type_ids" not in inspect.signature(rope).parameters
    image_token = model.config.image_token_id
    ids_BT = batch["input_ids"].clone()
    tokens = ids_BT.shape[1]
    # drawn by chance: no image is there
    ids_BT = torch.where((ids_BT != image_token) & (ids_BT != video_token), ids_BT, 5)
    types_BT = torch.zeros_like(ids_BT)  # 1 for images, 2 for videos
    places = iter(counts)

    def put(row: int, start: int, count: int, kind: int) -> None:
        if start + count >= tokens or bool(types_BT[row, start - 1 : start + count].any()):
            raise RingConfigError(
                f"{model.config.model_type}: expected images of {tokens} tokens, got {counts} and a video of"
                f" {of_frames}; give more"
            )
        types_BT[row, start : start + count] = kind
        ids_BT[row, start : start + count] = int(image_token if kind == 1 else video_token or 0)
        if is_marked:
            ids_BT[row, start - 1] = model.config.vision_start_token_id
        if kind == 2 and model.config.model_type in _SPANS:
            ids_BT[row, start - 1] = model.config.video_start_token_id
            ids_BT[row, start + count] = model.config.video_end_token_id

    # Where a timestamp parts the steps of a video, each has its own positions, or is a block
    is_parted = "video_position_ids" in videos or (
        rope is not None and "repeat_interleave(video_grid_thw" in inspect.getsource(rope)
    )
    parts = FRAMES if is_parted else 1
    for row, number in enumerate(IMAGES):
        end = tokens // 4
        for which in range(number):
            if which == 1 and videos:  # between the first sample's images
                for _ in range(parts):
                    put(row, end + 2, of_frames // parts, 2)
                    end += 2 + of_frames // parts
            if images:
                count = next(places)
                # the middles of the first sample's images are where shards of two ranks end
                middle = 3 * tokens // 7 if row else (2 * which + 1) * tokens // 4 + 1 + which
                start = max(end + 1 if which else 1, middle - count // 2)
                put(row, start, count, 1)
                end = start + count
    inputs = batch | {"input_ids": ids_BT} | images | videos
    if is_marked:
        inputs["attention_mask"] = torch.ones_like(ids_BT)
    for key in ("labels", "shift_labels"):
        if key in batch:
            inputs[key] = batch[key].masked_fill(types_BT > 0, IGNORE)
    whole = inspect.signature(base.forward).parameters
    for key in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
        if key in whole or key in inspect.signature(model.forward).parameters:
            inputs[key] = (types_BT > 0).long() if model.config.model_type == "molmo2" else types_BT
    return inputs


def _video_token(model: PreTrainedModel) -> int | None:
    """Return the id of the tokens of a video; None for a model that takes none."""
    if not hasattr(model.base_model, "get_video_features"):
        return None
    names = ("image_token_id",) if model.config.model_type in (*_ONE_TOKEN, *_SPANS) else _VIDEO_TOKENS
    return next((token for name in names if (token := getattr(model.config, name, None)) is not None), None)


def _reads_images(model: PreTrainedModel) -> bool:
    """Return whether a class reads more than text: Mistral 4's for images and text does not."""
    return any(name.startswith("pixel") for name in inspect.signature(model.forward).parameters) or bool(
        model.config.sub_configs
    )


def _counts(encode: Callable[..., Any], pixels: Batch, number: int) -> list[int]:
    """Return how many features each image or video has."""
    takes = inspect.signature(encode).parameters
    with torch.no_grad():
        output = encode(**{key: x for key, x in pixels.items() if key in takes}, return_dict=True)
    features = next(
        (output[name] for name in ("pooler_output", "last_hidden_state") if output.get(name) is not None),
        None,
    )
    if features is None:  # Granite 4's: of layers of the text part
        features = output.deepstack_features[0][1]
    if len(features) == number and not (isinstance(features, Tensor) and features.ndim == 2):
        return [part.reshape(-1, part.shape[-1]).shape[0] for part in features]
    rows = sum(part.reshape(-1, part.shape[-1]).shape[0] for part in features)
    return [rows // number] * number  # of all images of a sample, one after the other


def _read_sizes(model: PreTrainedModel, seed: int) -> tuple[Any, int, int, int, Callable[..., Tensor]]:
    """Return the vision part's configuration, channels, patch and side in pixels, and what makes pixels."""
    vision = getattr(model.config, "vision_config", model.config)
    generator = torch.Generator().manual_seed(seed)
    channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
    patch, side = (
        size[0] if isinstance(size, (list, tuple)) else size
        for size in (getattr(vision, "patch_size", PATCH), getattr(vision, "image_size", PATCH * SIDE))
    )
    return vision, channels, patch, side, lambda *shape: torch.randn(*shape, generator=generator)


def _video(model: PreTrainedModel, seed: int) -> Batch:
    """Return pixels, and their other inputs, of a video."""
    base: Any = model.base_model
    takes = inspect.signature(base.get_video_features).parameters
    whole = inspect.signature(base.forward).parameters
    kind = model.config.model_type
    vision, channels, patch, side, pixels = _read_sizes(model, seed + 3)
    if kind == "nemotron_h_omni":  # [I, tubelets, frames of one and channels, H, W]
        channels *= model.config.video_temporal_patch_size
    if kind == "molmo2":
        patches, tokens = (side // patch) ** 2, 4
        return {
            "pixel_values_videos": pixels(FRAMES, patches, 3 * patch**2),
            "video_token_pooling": torch.arange(FRAMES * tokens)[:, None] * 4 + torch.arange(4),
            "video_grids": torch.tensor(((FRAMES, 2, 2),)),
        }
    if "target_sizes_videos" in takes:
        sizes = torch.full((FRAMES, 2), SIDE)
        return {
            "pixel_values_videos": pixels(1, 3, patch, FRAMES * SIDE * SIDE * patch),
            "target_sizes_videos": sizes,
        }
    if "num_frames_per_video" in takes:  # Gemma 4
        frames_batch = _positioned(pixels, vision, patch, FRAMES, SIDE)
        return {
            "pixel_values_videos": frames_batch["pixel_values"],
            "video_position_ids": frames_batch["image_position_ids"],
            "num_frames_per_video": torch.tensor([FRAMES]),
        }
    if "video_grid_thw" not in takes:
        return {"pixel_values_videos": pixels(1, FRAMES, channels, side, side)}
    grids = torch.tensor(((FRAMES, SIDE, SIDE // 2),))
    video, rows = {"video_grid_thw": grids}, int(grids.prod())
    if "video_merge_sizes" in takes:
        video["video_merge_sizes"] = torch.tensor([2])
        video["video_compression_mask"] = torch.arange(rows // 4) % 3 > 0
    video |= {name: torch.tensor([0.6]) for name in _SECONDS if name in whole}
    if kind == "kimi_k25":
        return video | {"pixel_values_videos": pixels(rows, channels, patch, patch)}
    frames = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
    return video | {"pixel_values_videos": pixels(rows, channels * frames * patch * patch)}


def _positioned(
    pixels: Callable[..., Tensor], vision: Any, patch: int, number: int, unified: int = SIDE * SIDE // 2
) -> Batch:
    """Gemma 4: images or frames whose patches have positions; `unified` patches of the unified one."""
    at = torch.arange(SIDE)
    positions = torch.stack(torch.meshgrid(at, at, indexing="xy"), dim=-1).view(1, -1, 2)
    if hasattr(vision, "model_patch_size"):  # the unified one projects patches, fewer than its window
        patch, positions = vision.model_patch_size, positions[:, :unified]
    return {
        "pixel_values": pixels(number, positions.shape[1], 3 * patch * patch).sigmoid(),
        "image_position_ids": positions.expand(number, -1, -1).contiguous(),
    }


def _images(model: PreTrainedModel, seed: int) -> Batch:
    """Return pixels, and their other inputs, of all images of a batch."""
    base: Any = model.base_model
    takes = inspect.signature(base.get_image_features).parameters
    kind, number = model.config.model_type, sum(IMAGES)
    vision, channels, patch, side, pixels = _read_sizes(model, seed + 2)
    if kind in _IMAGES_OF_TYPES:
        return _IMAGES_OF_TYPES[kind](pixels, model.config)
    if "image_grid_hw" in takes:
        grids = torch.tensor(GRIDS)[:, 1:]
        return {
            "pixel_values": pixels(int(grids.prod(dim=1).sum()), 3 * patch * patch),
            "image_grid_hw": grids,
        }
    if "image_grid_thw" in takes:
        grids = torch.tensor(GRIDS)
        frames = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
        of_patch = (channels, frames, patch, patch)
        rows = int(grids.prod(dim=1).sum())
        images = {"image_grid_thw": grids}
        if kind in ("paddleocr_vl", "kimi_k25"):
            return images | {"pixel_values": pixels(rows, channels, patch, patch)}
        if "image_merge_sizes" in takes:
            images["image_merge_sizes"] = torch.full((number,), 2)
        return images | {"pixel_values": pixels(rows, torch.Size(of_patch).numel())}
    sizes = torch.full((number, 2), side)
    if "image_position_ids" in takes:  # Gemma 4
        return _positioned(pixels, vision, patch, number)
    if "spatial_shapes" in takes:
        return {
            "pixel_values": pixels(number, SIDE * SIDE, channels * patch * patch),
            "spatial_shapes": torch.full((number, 2), SIDE),
            "pixel_attention_mask": torch.ones(number, SIDE * SIDE, dtype=torch.int64),
        }
    if "image_grid_pinpoints" in model.config.to_dict():  # the whole image, and its tiles: one each here
        return {"pixel_values": pixels(number, 2, channels, side, side), "image_sizes": sizes}
    if "pixel_attention_mask" in takes:  # Idefics: [B, I, C, H, W], zeros where a sample has fewer images
        whole = pixels(len(IMAGES), max(IMAGES), channels, side, side)
        for row, count in enumerate(IMAGES):
            whole[row, count:] = 0
        needs_mask = takes["pixel_attention_mask"].default is inspect.Parameter.empty
        are_images = (whole != 0).flatten(2).any(dim=2)
        return {"pixel_values": whole} | ({"pixel_attention_mask": are_images} if needs_mask else {})
    images = {"pixel_values": pixels(number, channels, side, side)}
    if "high_res_pixel_values" in takes:
        high = model.config.high_res_vision_config.image_size
        images["high_res_pixel_values"] = pixels(number, channels, high, high)
    if "qformer_input_ids" in takes:  # of the instruction, for each image
        images["qformer_input_ids"] = torch.randint(
            3, 60, (number, 5), generator=torch.Generator().manual_seed(seed)
        )
    if "pixel_mask" in takes:
        images["pixel_mask"] = torch.ones(number, side, side, dtype=torch.int64)
    takes_sizes = "image_sizes" in takes and takes["image_sizes"].default is inspect.Parameter.empty
    return images | ({"image_sizes": sizes} if takes_sizes else {})


Pixels = Callable[..., Tensor]


def _make_token_patches(pixels: Pixels, config: Any) -> Batch:
    """Inkling 2: the patches of each token, in order."""
    vision, grids = config.vision_config, torch.tensor(((1, 2, 2), (1, 1, 2), (1, 2, 1)))
    side = vision.patch_size * vision.spatial_merge_size
    tokens = int(grids.prod(dim=1).sum())
    return {"pixel_values": pixels(tokens, side, side, vision.num_channels), "image_grid_thw": grids}


def _make_image_patches(pixels: Pixels, config: Any) -> Batch:
    """Inkling: patches, one for each token; how many an image has only its tokens say."""
    vision = config.vision_config
    shape = vision.temporal_patch_size, vision.patch_size, vision.patch_size, vision.num_channels
    return {"pixel_values": pixels(4 * sum(IMAGES), *shape)}


def _strips(pixels: Pixels, config: Any) -> Batch:
    """MiniCPM: the patches of all images side by side, in one strip."""
    patch, sizes = config.vision_config.patch_size, torch.tensor(((4, 4), (4, 8), (4, 4)))
    width = int(sizes.prod(dim=1).sum()) * patch
    return {"pixel_values": pixels(1, 3, patch, width), "target_sizes": sizes}


def _whole_and_tiles(pixels: Pixels, config: Any) -> Batch:
    """Step 3.7: images, and the tiles that some of them are cut into."""
    side = config.vision_config.image_size
    return {
        "pixel_values": pixels(sum(IMAGES), 3, side, side),
        "pixel_values_local": pixels(3, 3, side, side),
        "num_local_patches": torch.tensor([2, 0, 1]),
    }


def _crops(pixels: Pixels, config: Any) -> Batch:
    """Molmo 2: crops of all images, and the patches of them that each token pools."""
    vision, number = config.vision_config, sum(IMAGES)
    patches, tokens = (vision.image_size[0] // vision.patch_size) ** 2, 4
    at = torch.arange(number * tokens)
    return {
        "pixel_values": pixels(number, patches, 3 * vision.patch_size**2),
        "image_token_pooling": at[:, None] * 4 + torch.arange(4),
        "image_grids": torch.tensor(((2, 2, 0, 0),) * number),
        "image_num_crops": torch.ones(number, dtype=torch.int64),
    }


def _fuyu_patches(pixels: Pixels, config: Any) -> Batch:
    return {"pixel_values": pixels(sum(IMAGES), 4, 3 * config.patch_size**2)}


_IMAGES_OF_TYPES: dict[str, Callable[[Pixels, Any], Batch]] = {
    **dict.fromkeys(("inkling2", "inkling2_loop"), _make_token_patches),
    "inkling_mm_model": _make_image_patches,
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _strips),
    "fuyu": _fuyu_patches,
    "step3p7": _whole_and_tiles,
    "molmo2": _crops,
}
