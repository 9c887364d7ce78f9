"""Give the language part of a vision-language model the image features of its own tokens.

[Note: features of images]
Every rank runs the image encoders on all images of its batch and takes the features of its own image tokens
(batch.py counts them before the batch is cut). No feature is sent, and the gradient of an encoder is a sum
over the ranks, like any other gradient. Image encoders keep their own attention.

Shapes: B samples, T tokens, S local tokens, N image tokens of the batch, E width of the language part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.integrations.deepspeed.batch import Batch, ImageNeeds, ImageTokens, places_of
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.shard import shard_sequence
from ds_ring.schedule.layout import Layout

# By model_type, those that tests compare with one process. The others join features to hidden states of
# several layers, or see all of an image at once.
EXACT = ("llava", "mistral3", "internvl", "qwen2_vl", "qwen2_5_vl")
OF_IMAGES = ("pixel_values", "image_sizes", "image_grid_thw")
_ENCODED = "mm_encoder_outputs"  # by modality, what `generate` has of images before its first forward pass
_REFUSED = ("pixel_values_videos", "video_grid_thw", "input_features", "audio_values")


def image_encoders(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models inside `model` that read whole images, and those inside them."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in EXACT:
        return []
    kind = type(config.vision_config)
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    roots = [part for part in parts if type(part.config) is kind]
    found = {id(part): part for root in roots for part in root.modules() if isinstance(part, PreTrainedModel)}
    return list(found.values())


def attention_of_parts(model: Any, name: str) -> str | dict[str, str]:
    """Return what to set as a model's attention so that all of it but its image encoders gets `name`."""
    if not image_encoders(model):
        return name
    others = (key for key in model.config.sub_configs if key != "vision_config")
    return {"": name, "vision_config": model.config.vision_config._attn_implementation} | dict.fromkeys(
        others, name
    )


def images_feature(model: PreTrainedModel, session: RingSession) -> SimpleNamespace | None:
    """Return the hook that makes `model` take images, or refuse them; None if its class takes none.

    Raises:
        RingConfigError: (from a forward pass) images for a model that is not in `EXACT`, videos or sound.
        RingShapeError: (from a forward pass) other numbers of image tokens than of features.
    """
    base = model.base_model
    if not hasattr(base, "get_image_features"):
        return None
    if image_encoders(model):
        number = _axes_of(base) if hasattr(base, "get_rope_index") else None
        session.needs.images = ImageNeeds(int(model.config.image_token_id), frozenset(OF_IMAGES), number)
    signature = inspect.signature(base.forward)

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = dict(signature.bind_partial(*args).arguments) | kwargs
        _check_given(model, given)
        if not _has_images(given):
            return None
        images = session.batches.current.images
        if images is None:
            raise RingShapeError(
                f"{type(model).__name__}: expected images that were in the batch of"
                " engine.ring.shard_batch(batch), got some beside it: which of them a rank's tokens stand"
                " for is counted before the batch is cut"
            )
        given[_ENCODED] = {"image": _local_features(base, given, images)}
        if images.axes_BSA is not None:
            given["position_ids"] = images.axes_BSA.permute(2, 0, 1)
        return (), given

    return SimpleNamespace(before_forward=before)


def _has_images(given: dict[str, Any]) -> bool:
    return given.get("pixel_values") is not None or "image" in (given.get(_ENCODED) or {})


def _check_given(model: PreTrainedModel, given: dict[str, Any]) -> None:
    name = type(model).__name__
    refused = [key for key in _REFUSED if given.get(key) is not None]
    refused += [key for key in given.get(_ENCODED) or {} if key != "image"]
    if _has_images(given) and not image_encoders(model):
        refused.append("images")
    if refused:
        raise RingConfigError(
            f"{name}: expected texts, got {', '.join(refused)}; images are exact with the model types"
            f" {', '.join(EXACT)}, videos and sound with none: leave them out, or embed them yourself and"
            " pass inputs_embeds through engine.ring.shard_batch"
        )
    if _has_images(given) and torch.compiler.is_compiling():
        raise RingConfigError(
            f"{name}: expected a model that is not compiled beside images, got a graph, which is not told"
            " which features are whose; do not compile it"
        )


def _local_features(base: Any, given: dict[str, Any], images: ImageTokens) -> Any:
    """Return what `get_image_features` found, with the features of this rank's image tokens in their order.

    Takes the images out of `given`.
    """
    found = (given.get(_ENCODED) or {}).get("image")
    if found is None:
        takes = inspect.signature(base.get_image_features).parameters
        names = [key for key in (*OF_IMAGES, "vision_feature_layer") if given.get(key) is not None]
        found = base.get_image_features(**{k: given[k] for k in names if k in takes}, return_dict=True)
    given.pop("pixel_values", None)
    several = isinstance(found.pooler_output, (tuple, list))
    parts = found.pooler_output if several else [found.pooler_output]
    rows_NE = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
    if len(rows_NE) != images.tokens:
        raise RingShapeError(
            f"{type(base).__name__}: expected an image token in the batch for each of {len(rows_NE)} features"
            f" of its images, got {images.tokens}; take ids and images from one processor"
        )
    mine = rows_NE[images.places_BS[images.places_BS > 0] - 1]
    return type(found)(pooler_output=(mine,) if several else mine)


def _axes_of(base: Any) -> Callable[[Batch], Tensor]:
    """Return what numbers the tokens of a batch on the axes of time, height and width: [B, T, 3]."""
    takes = inspect.signature(base.get_rope_index).parameters

    def number(batch: Batch) -> Tensor:
        if batch.get("mm_token_type_ids") is None:
            raise RingShapeError(
                f"batch: expected mm_token_type_ids beside images, got none; {type(base).__name__} numbers"
                " tokens by them: its processor returns them"
            )
        positions_3BT = base.get_rope_index(**{key: batch[key] for key in takes if key in batch})[0]
        return positions_3BT.permute(1, 2, 0).contiguous()

    return number


def images_of_prompt(
    given: dict[str, Any], needs: ImageNeeds | None, layout: Layout, mesh: RingMesh
) -> ImageTokens | None:
    """Return which features the local tokens of a prompt that is generated from stand for."""
    if needs is None or not _has_images(given) or given.get("input_ids") is None:
        return None
    places_BT = places_of(given["input_ids"], needs)
    return ImageTokens(shard_sequence(places_BT, layout, mesh=mesh, dim=1), int(places_BT.max()), None)
