"""Batches with images: tensors that go whole to every rank, and the numbers of image tokens.

Shapes: B samples, T tokens, S local tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.contrib.images.blocks import BLOCK_IDS
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.integrations.deepspeed.batch import Batch, WholeTensors
from ds_ring.integrations.deepspeed.packing import DOCUMENT_IDS
from ds_ring.ops.shard import shard_sequence
from ds_ring.schedule.layout import Layout

OF_IMAGES = (
    "pixel_values",
    "image_sizes",
    "image_grid_thw",
    "image_grid_hw",
    "image_merge_sizes",
    "image_position_ids",
    "spatial_shapes",
    "target_sizes",
    "pixel_attention_mask",
    "pixel_mask",
    "high_res_pixel_values",
    "pixel_values_local",
    "num_local_patches",
    "patches_grid",
    "image_token_pooling",
    "image_grids",
    "image_num_crops",
    "qformer_input_ids",
    "qformer_attention_mask",
)
ENCODED = "mm_encoder_outputs"  # by modality, what `generate` has of images before its first forward pass
_PLACES = "ds_ring_image_places"  # of prepared batches: [B, T]
_AXES = "ds_ring_image_axes"  # [B, T, axes]


class ImageTokens(NamedTuple):
    """The image features that replace embeddings of a batch's local tokens."""

    places_BS: Tensor  # the feature's number, from 1 on; 0 for other tokens
    tokens: int  # image tokens of the whole batch
    axes_BSA: Tensor | None  # positions on several axes, where the model has such
    # by rank of the sequence, the features of its tokens, from 0 on, in the order of its tokens; empty where
    # samples are whole
    wanted: tuple[Tensor, ...] = ()


def has_images(given: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a call have images."""
    return given.get("pixel_values") is not None or "image" in (given.get(ENCODED) or {})


class Images(WholeTensors):
    """The images of a model's batches.

    Args:
        token: id of the tokens that are replaced by one image feature each.
        number_axes: numbers the tokens of a whole batch on several axes, [B, T, axes]; None: they have one
            position each.
        number_blocks: numbers the blocks of tokens of a whole batch that see each other.
    """

    names = frozenset(OF_IMAGES)

    def __init__(
        self,
        token: int,
        number_axes: Callable[[Batch], Tensor] | None = None,
        number_blocks: Callable[[Batch], Tensor | None] = lambda _: None,
    ) -> None:
        self._token, self._number_axes, self._number_blocks = token, number_axes, number_blocks

    def add_columns(self, prepared: Batch, given: Mapping[str, Tensor]) -> None:
        """Number the image tokens of a prepared batch, from 1 on; others, and padding of the layout, are 0.

        Raises:
            RingShapeError: images without input_ids, which mark their tokens.
            RingConfigError: packed documents, and positions on several axes.
        """
        if "input_ids" not in prepared:
            raise RingShapeError.wrong("batch", "input_ids with images", f"{sorted(prepared)}", "give them")
        prepared[_PLACES] = self._numbers(prepared["input_ids"])
        blocks_BT = self._number_blocks(dict(given))
        if blocks_BT is None and self._number_axes is None:
            return
        if DOCUMENT_IDS in prepared:
            raise RingConfigError.wrong("batch", "images without documents", "both", 'set "documents": false')
        if blocks_BT is not None:
            prepared[BLOCK_IDS] = blocks_BT
        if self._number_axes is not None:
            prepared[_AXES] = self._number_axes(dict(given))

    def take_columns(
        self, local: Batch, prepared: Mapping[str, Tensor], layout: Layout | None, mesh: RingMesh
    ) -> ImageTokens | None:
        """Return which features the local tokens take; None for a batch without images."""
        places_BS, axes_BSA = local.pop(_PLACES, None), local.pop(_AXES, None)
        if places_BS is None:
            return None
        places_BT, wanted = prepared[_PLACES], []
        for ring_rank in range(mesh.ring_size) if layout is not None else ():
            assert layout is not None
            shard_BS = shard_sequence(places_BT, layout, dim=1, ring_rank=ring_rank)
            parts = shard_BS.to(places_BS.device).chunk(mesh.ulysses_size, dim=1)
            wanted += [part[part > 0] - 1 for part in parts]
        return ImageTokens(places_BS, int(places_BT.max()), axes_BSA, tuple(wanted))

    def of_prompt(self, given: Mapping[str, Any], layout: Layout, mesh: RingMesh) -> ImageTokens | None:
        """Return which features the local tokens of a prompt take; None without images."""
        if not has_images(given) or given.get("input_ids") is None:
            return None
        return self.tokens_of_prompt(given["input_ids"], layout, mesh)

    def tokens_of_prompt(self, ids_BT: Tensor, layout: Layout, mesh: RingMesh) -> ImageTokens:
        """Number the tokens of a prompt that take features, and return this rank's."""
        places_BT = self._numbers(ids_BT)
        return ImageTokens(shard_sequence(places_BT, layout, mesh=mesh, dim=1), int(places_BT.max()), None)

    def _numbers(self, ids_BT: Tensor) -> Tensor:
        are_images_BT = ids_BT == self._token
        return are_images_BT.flatten().cumsum(0).view(are_images_BT.shape) * are_images_BT
