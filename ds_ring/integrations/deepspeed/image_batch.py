"""Prepare what a batch has of images: which feature stands for which token, before tokens are cut apart.

Owns the tensors of a batch that are not by token and go whole to every rank, and the numbers of image tokens.
Which model reads images, and how, is integrations/transformers/images.py's. Pure: no collective, no model.

Shapes: B samples, T global tokens, S local tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.integrations.deepspeed.batch import Batch
from ds_ring.integrations.deepspeed.batch_sharding import ImageTokens
from ds_ring.integrations.deepspeed.packing import DOCUMENT_IDS
from ds_ring.integrations.transformers.model_needs import ImageNeeds

_PLACES = "ds_ring_image_places"  # of prepared batches: [B, T]
_AXES = "ds_ring_image_axes"  # [B, T, axes]


def whole_tensors(batch: Mapping[str, Tensor], needs: ImageNeeds | None) -> tuple[Batch, Batch]:
    """Return a batch's tensors by token, and those that go whole to every rank."""
    names = frozenset[str]() if needs is None else needs.tensors & set(batch)
    return {key: x for key, x in batch.items() if key not in names}, {key: batch[key] for key in names}


def add_places(prepared: Batch, batch: Mapping[str, Tensor], needs: ImageNeeds) -> None:
    """Number the image tokens of a prepared batch, from 1 on; others, and padding of the layout, are 0.

    Raises:
        RingShapeError: images, and no input_ids to say which tokens stand for them.
        RingConfigError: packed documents, and positions on several axes.
    """
    if "input_ids" not in prepared:
        raise RingShapeError(
            f"batch: expected input_ids beside images, got the keys {sorted(prepared)}; image tokens are"
            " known by their id"
        )
    are_images_BT = prepared["input_ids"] == needs.token
    prepared[_PLACES] = are_images_BT.flatten().cumsum(0).view(are_images_BT.shape) * are_images_BT
    if needs.number_axes is None:
        return
    if DOCUMENT_IDS in prepared:
        raise RingConfigError(
            "batch: expected no packed documents beside images, got some: the model numbers the tokens of a"
            ' sample on several axes, and not within each document; set "documents": false'
        )
    prepared[_AXES] = needs.number_axes(dict(batch))


def taken_places(local: Batch, count: int) -> ImageTokens | None:
    """Take the numbers of local image tokens out of a batch that was cut; None where it has no images."""
    places_BS, axes_BSA = local.pop(_PLACES, None), local.pop(_AXES, None)
    return None if places_BS is None else ImageTokens(places_BS, count, axes_BSA)


def count_of(prepared: Mapping[str, Tensor]) -> int:
    """Return the image tokens of a prepared batch."""
    places = prepared.get(_PLACES)
    return 0 if places is None else int(places.max())


def places_of(ids_BT: Tensor, needs: ImageNeeds) -> Tensor:
    """Number the image tokens among ids, [B, T]: see `add_places`."""
    found: Batch = {"input_ids": ids_BT}
    add_places(found, found, needs._replace(number_axes=None))
    return found[_PLACES]
