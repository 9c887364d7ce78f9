"""Make a model that reads images small, and images for a batch of it.

Owns the sizes of image encoders, the shapes in which a model type takes its images (from the names that
`get_image_features` takes; no processor is run), and positions of image tokens: across the borders of shards,
two images in the first sample and one in the second.

Shapes: B samples, T tokens, I images, C channels, H rows and W columns of pixels.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch import IGNORE, Batch

ConfigValues = dict[str, Any]

IMAGES = (2, 1)  # of each sample
PATCH, SIDE = 4, 4  # pixels of a patch's side, patches of an image's side
GRIDS = ((1, 4, 4), (1, 2, 4), (1, 4, 2))  # in patches, of models that take images of any size
_WIDTH, _LAYERS = 32, 2

# By the names that image encoders have for them.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "encoder_embed_dim", "resampler_hidden_size"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "mlp_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "attention_heads", "num_key_value_heads"), 2),
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
}  # fmt: skip
# Layers that are named: the first and the last of the small encoder.
_LAYERS_NAMED = ("fullatt_block_indexes", "deepstack_visual_indexes", "intermediate_layers_indices")
_RESAMPLER = {
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 4,
    "resampler_head_dim": 16,
    "num_key_value_heads": 2,
}
# By model type: its own values, and of its image encoder, that must fit the small sizes.
_OF_TYPES: dict[str, tuple[ConfigValues, ConfigValues]] = {
    "gemma3": ({"mm_tokens_per_image": 4}, {}),
    "kimi_k25": ({"projection_hidden_size": _WIDTH}, {}),
    **dict.fromkeys(
        ("idefics2", "llava", "ovis2", "paligemma", "deepseek_vl"), ({}, {"image_size": 2 * PATCH})
    ),
    "llava_next": ({"image_grid_pinpoints": [[8, 8]]}, {"image_size": 2 * PATCH}),
    "llava_onevision": ({"image_grid_pinpoints": [[8, 8]]}, {"image_size": 2 * PATCH}),
    "vipllava": ({"vision_feature_layer": [-2, -1]}, {"image_size": 2 * PATCH}),
    "llama4": (
        {},
        {"intermediate_size": 4 * _WIDTH, "projector_input_dim": 24, "projector_output_dim": 24}
        | {"vision_output_dim": 24},
    ),
    "minimax_m3_vl": ({"projector_hidden_size": 48, "merged_hidden_size": 48}, {}),
    "cohere2_vision": ({"alignment_intermediate_size": 48}, {}),
    "lfm2_vl": ({"projector_hidden_size": 48}, {}),
}


def shrink_images(config: PreTrainedConfig, text: ConfigValues) -> ConfigValues:
    """Return the values of a model's configuration with a small text part, `text`, and image encoder."""
    model_type, width = config.model_type, text.get("hidden_size")
    if not isinstance(width, int) or "vision_config" not in config.sub_configs:
        raise RingConfigError(
            f"{model_type}: expected vision_config and a text part with hidden_size, got"
            f" {', '.join(config.sub_configs) or 'no parts'}; give a small config.json"
        )
    values = copy.deepcopy(config.to_dict()) | {"text_config": text}
    if values.get("vision_config") is None:  # Gemma 4 is of text alone by default
        values["vision_config"] = config.sub_configs["vision_config"]().to_dict()
    if values.get("perceiver_config"):  # Idefics 2's
        values["perceiver_config"] |= _RESAMPLER | {"hidden_size": text["hidden_size"]}
    own, of_vision = _OF_TYPES.get(model_type, ({}, {}))
    vision = values["vision_config"]
    outer_width = vision.get("hidden_size") if "embed_dim" in vision else None  # Qwen2-VL's: of its output
    for name, size in _SIZES.items():
        given = vision.get(name)
        if isinstance(given, int) and not isinstance(given, bool):
            vision[name] = min(given, size)
        elif isinstance(given, (list, tuple)) and name in ("image_size", "patch_size"):
            vision[name] = [size] * len(given)
    if outer_width is not None:
        vision["hidden_size"] = width
    for name in ("out_hidden_size", "projection_dim"):
        if isinstance(vision.get(name), int):
            vision[name] = width
    for name in _LAYERS_NAMED:
        if vision.get(name):
            vision[name] = [0, _LAYERS - 1][-len(vision[name]) :]
    for name in ("hidden_size", "projection_dim"):  # PaliGemma's
        if isinstance(values.get(name), int):
            values[name] = width
    if isinstance(values.get("vocab_size"), int):
        values["vocab_size"] = text["vocab_size"]
    values["vision_config"] = vision | of_vision
    _name_tokens(values, text["vocab_size"])
    return values | own


def _name_tokens(values: ConfigValues, vocabulary: int) -> None:
    """Give every token that is no text an id of its own, from the last one down."""
    names = sorted(
        (
            name
            for name in values
            if name.endswith(("_token_id", "_token_index")) and values[name] is not None
        ),
        key=lambda name: not name.startswith("image_token"),
    )
    for number, name in enumerate(names):
        if isinstance(values[name], int):
            values[name] = vocabulary - 1 - number


def add_images(batch: Batch, model: PreTrainedModel, seed: int) -> Batch:
    """Return a batch of text [B, T] with image tokens in place of some, and their images.

    Raises:
        RingConfigError: the model takes its images in a shape that is not known here, or too large for the
            tokens.
    """
    base: Any = model.base_model
    if not hasattr(base, "get_image_features"):
        raise RingConfigError.wrong(
            model.config.model_type, "get_image_features for images", "none", "leave images out"
        )
    try:
        images = _images(model, seed)
        takes = inspect.signature(base.get_image_features).parameters
        with torch.no_grad():
            given = {key: x for key, x in images.items() if key in takes}
            counts = _counts(base.get_image_features(**given, return_dict=True))
    except Exception as error:  # of a model type that takes images otherwise
        raise RingConfigError(
            f"{model.config.model_type}: no images can be made: {type(error).__name__}: {error}"
        ) from error
    ids_BT = batch["input_ids"].clone()
    tokens = ids_BT.shape[1]
    are_images_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    places = iter(counts)
    for row, number in enumerate(IMAGES):
        for which in range(number):
            count = next(places)
            # the middles of the first sample's images are where shards of two ranks end
            middle = 3 * tokens // 7 if row else (2 * which + 1) * tokens // 4 + 1 + which
            start = max(1, middle - count // 2)
            if start + count >= tokens or bool(are_images_BT[row, start - 1 : start + count].any()):
                raise RingConfigError(
                    f"{model.config.model_type}: expected images of {tokens} tokens, got {counts}; give more"
                )
            are_images_BT[row, start : start + count] = True
    ids_BT[are_images_BT] = model.config.image_token_id
    made = batch | {"input_ids": ids_BT} | images
    for key in ("labels", "shift_labels"):
        if key in batch:
            made[key] = batch[key].masked_fill(are_images_BT, IGNORE)
    whole = inspect.signature(base.forward).parameters
    for key in ("mm_token_type_ids", "token_type_ids"):
        if key in whole or key in inspect.signature(model.forward).parameters:
            made[key] = are_images_BT.long()
    return made


def _counts(found: Any) -> list[int]:
    """Return how many features each image has."""
    features, number = found.pooler_output, sum(IMAGES)
    if features is None:  # Llama 4's
        features = found.last_hidden_state
    if len(features) == number and not (isinstance(features, Tensor) and features.ndim == 2):
        return [part.reshape(-1, part.shape[-1]).shape[0] for part in features]
    rows = sum(part.reshape(-1, part.shape[-1]).shape[0] for part in features)
    return [rows // number] * number  # of all images of a sample, one after the other


def _images(model: PreTrainedModel, seed: int) -> Batch:
    """Return pixels, and their other inputs, of all images of a batch."""
    base: Any = model.base_model
    takes = inspect.signature(base.get_image_features).parameters
    vision = model.config.vision_config
    generator = torch.Generator().manual_seed(seed + 2)
    channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
    patch = getattr(vision, "patch_size", PATCH)
    patch = patch[0] if isinstance(patch, (list, tuple)) else patch
    number = sum(IMAGES)

    def pixels(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if "image_grid_thw" in takes:
        grids = torch.tensor(GRIDS)
        of_patch = (channels, getattr(vision, "temporal_patch_size", 1), patch, patch)
        rows = int(grids.prod(dim=1).sum())
        if model.config.model_type in ("paddleocr_vl", "kimi_k25"):
            return {"pixel_values": pixels(rows, channels, patch, patch), "image_grid_thw": grids}
        flat = torch.Size(of_patch).numel()
        return {"pixel_values": pixels(rows, flat), "image_grid_thw": grids}
    side = getattr(vision, "image_size", PATCH * SIDE)
    side = side[0] if isinstance(side, (list, tuple)) else side
    sizes = torch.full((number, 2), side)
    if "image_position_ids" in takes:  # Gemma 4
        at = torch.arange(SIDE)
        positions = torch.stack(torch.meshgrid(at, at, indexing="xy"), dim=-1).view(1, -1, 2)
        return {
            "pixel_values": pixels(number, SIDE * SIDE, channels * patch * patch).sigmoid(),
            "image_position_ids": positions.expand(number, -1, -1).contiguous(),
        }
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
        return {"pixel_values": whole}
    images: Batch = {"pixel_values": pixels(number, channels, side, side)}
    takes_sizes = "image_sizes" in takes and takes["image_sizes"].default is inspect.Parameter.empty
    return images | ({"image_sizes": sizes} if takes_sizes else {})
