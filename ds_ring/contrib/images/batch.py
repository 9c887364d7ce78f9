"""Batches with images and videos: tensors that go whole to every rank, and the numbers of their tokens.

Shapes: B samples, T tokens, S local tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.contrib.images.blocks import BLOCK_IDS
from ds_ring.data.batch import Batch
from ds_ring.data.model_needs import WholeTensors
from ds_ring.data.packing import DOCUMENT_IDS
from ds_ring.errors import RingConfigError, RingShapeError
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
OF_VIDEOS = (
    "pixel_values_videos",
    "image_sizes_videos",
    "num_frames_per_video",
    "second_per_grid_ts",
    "target_sizes_videos",
    "video_compression_mask",
    "video_grid_thw",
    "video_grids",
    "video_merge_sizes",
    "video_position_ids",
    "video_second_per_grid",
    "video_token_pooling",
)
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}  # by modality
ENCODED = "mm_encoder_outputs"  # by modality, what `generate` has of images before its first forward pass
_PLACES = "ds_ring_places_of_"  # and the modality: of prepared batches, [B, T]
_AXES = "ds_ring_image_axes"  # [B, T, axes]


class FeatureTokens(NamedTuple):
    """The features of one modality that replace embeddings of a batch's local tokens."""

    places_BS: Tensor  # the feature's number, from 1 on; 0 for other tokens
    tokens: int  # of the whole batch that take such features
    # by rank of the sequence, the features of its tokens, from 0 on, in the order of its tokens; empty where
    # samples are whole
    wanted: tuple[Tensor, ...] = ()


class BatchFeatures(NamedTuple):
    """The features of a batch's local tokens."""

    by_modality: dict[str, FeatureTokens]
    axes_BSA: Tensor | None = None  # positions on several axes, where the model has such


def find_modalities(batch: Mapping[str, Any]) -> list[str]:
    """Return the modalities in the arguments of a call: "image", "video"."""
    encoded = batch.get(ENCODED) or {}
    return [name for name, pixels in PIXELS.items() if batch.get(pixels) is not None or name in encoded]


class Images(WholeTensors):
    """The images and videos of a model's batches.

    Args:
        tokens: by modality, the id of the tokens that are replaced by one feature each, or what marks these
            tokens [B, T] in whole samples.
        number_axes: numbers the tokens of a whole batch on several axes, [B, T, axes]; None: they have one
            position each.
        number_blocks: numbers the blocks of tokens of a whole batch that see each other.
    """

    names = frozenset(OF_IMAGES + OF_VIDEOS)

    def __init__(
        self,
        tokens: Mapping[str, int | Callable[[Tensor], Tensor]],
        number_axes: Callable[[Batch], Tensor] | None = None,
        number_blocks: Callable[[Batch], Tensor | None] = lambda _: None,
    ) -> None:
        self._tokens, self._number_axes, self._number_blocks = tokens, number_axes, number_blocks

    def add_columns(self, prepared: Batch, batch: Mapping[str, Tensor]) -> None:
        """Number the tokens of each modality in a prepared batch, from 1 on; others, and padding of the
        layout, are 0.

        Raises:
            RingShapeError: images without input_ids, which mark their tokens.
            RingConfigError: packed documents, and positions on several axes; images and videos whose tokens
                are the same.
        """
        if "input_ids" not in prepared:
            raise RingShapeError.wrong("batch", "input_ids with images", f"{sorted(prepared)}", "give them")
        for modality in self._modalities(batch):
            prepared[_PLACES + modality] = self._numbers(prepared["input_ids"], modality)
        blocks_BT = self._number_blocks(dict(batch))
        if blocks_BT is None and self._number_axes is None:
            return
        if DOCUMENT_IDS in prepared:
            raise RingConfigError.wrong("batch", "images without documents", "both", 'set "documents": false')
        if blocks_BT is not None:
            prepared[BLOCK_IDS] = blocks_BT
        if self._number_axes is not None:
            prepared[_AXES] = self._number_axes(dict(batch))

    def take_columns(
        self, local: Batch, prepared: Mapping[str, Tensor], layout: Layout | None, mesh: RingMesh
    ) -> BatchFeatures | None:
        """Return which features the local tokens take; None for a batch without any."""
        features, axes_BSA = {}, local.pop(_AXES, None)
        for modality in self._tokens:
            places_BS = local.pop(_PLACES + modality, None)
            if places_BS is None:
                continue
            places_BT, wanted = prepared[_PLACES + modality], []
            for ring_rank in range(mesh.ring_size) if layout is not None else ():
                assert layout is not None
                shard_BS = shard_sequence(places_BT, layout, dim=1, ring_rank=ring_rank)
                parts = shard_BS.to(places_BS.device).chunk(mesh.ulysses_size, dim=1)
                wanted += [part[part > 0] - 1 for part in parts]
            features[modality] = FeatureTokens(places_BS, int(places_BT.max()), tuple(wanted))
        return BatchFeatures(features, axes_BSA) if features else None

    def make_prompt_features(
        self, batch: Mapping[str, Any], layout: Layout, mesh: RingMesh
    ) -> BatchFeatures | None:
        """Return which features the local tokens of a prompt take; None without any."""
        modalities, ids_BT = self._modalities(batch), batch.get("input_ids")
        if not modalities or ids_BT is None:
            return None
        return BatchFeatures(
            {modality: self.find_prompt_tokens(ids_BT, modality, layout, mesh) for modality in modalities}
        )

    def find_prompt_tokens(
        self, ids_BT: Tensor, modality: str, layout: Layout, mesh: RingMesh
    ) -> FeatureTokens:
        """Number the tokens of a prompt that take features, and return this rank's."""
        places_BT = self._numbers(ids_BT, modality)
        return FeatureTokens(shard_sequence(places_BT, layout, mesh=mesh, dim=1), int(places_BT.max()))

    def _modalities(self, batch: Mapping[str, Any]) -> list[str]:
        """Return the modalities in a batch that tokens of the model take."""
        modalities = [name for name in find_modalities(batch) if name in self._tokens]
        if len({self._tokens[name] for name in modalities}) < len(modalities):
            raise RingConfigError.wrong(
                "batch", "images or videos, whose tokens are the same", "both", "give two batches"
            )
        return modalities

    def _numbers(self, ids_BT: Tensor, modality: str) -> Tensor:
        token = self._tokens[modality]
        are_features_BT = token(ids_BT) if callable(token) else ids_BT == token
        return are_features_BT.flatten().cumsum(0).view(are_features_BT.shape) * are_features_BT
