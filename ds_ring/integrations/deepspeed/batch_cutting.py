"""Cut a prepared batch: choose its layout, take this rank's part, and say where that lies.

Owns the two ways to cut (along the sequence, or a short batch along its samples), the layout of each length,
and what goes with a sharding (documents, padding, images). Preparing and comparing batches is session.py's.

Shapes: B samples, T global tokens, S local tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

import torch

from ds_ring.config.section import RingConfig
from ds_ring.integrations.deepspeed.batch import (
    REAL_TOKENS,
    Batch,
    split_samples,
    split_tokens,
    token_shape,
)
from ds_ring.integrations.deepspeed.batch_sharding import REMEMBERED, BatchSharding
from ds_ring.integrations.deepspeed.image_batch import count_of, taken_places, whole_tensors
from ds_ring.integrations.deepspeed.packing import DOCUMENT_IDS, RowGroup, group_rows
from ds_ring.integrations.transformers.model_needs import ModelNeeds
from ds_ring.masks.layer_patterns import LayerPatterns
from ds_ring.runtime.context import block_side
from ds_ring.runtime.mesh import RingMesh
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.layouts import make_layout


@dataclass(frozen=True, eq=False)
class BatchCutter:
    """Cut the batches of one session.

    Attributes:
        config: the "ring_attention" section.
        mesh: the ranks that a sequence is spread over.
        device: where local batches are.
        patterns: what the JSON says of layers.
        needs: what the model must know of whole batches.
    """

    config: RingConfig
    mesh: RingMesh
    device: torch.device
    patterns: LayerPatterns
    needs: ModelNeeds
    # of (tokens, greatest position, ranks), the latest last; batches of others are placed anew
    _by_length: OrderedDict[tuple[int, int, int], BatchSharding] = field(
        default_factory=OrderedDict, repr=False
    )

    def cut(
        self, prepared: Batch, mesh: RingMesh | None = None, longest: int | None = None
    ) -> tuple[Batch, BatchSharding]:
        """Return this rank's part of a prepared batch, and where it lies; `document_ids` become patterns.

        Args:
            prepared: the whole batch.
            mesh: a smaller ring that the batch is for; None: that of the session.
            longest: the greatest position of the whole batch, where this is a part of it.
        """
        _, tokens = token_shape(prepared)
        if longest is None:
            longest = int(prepared["position_ids"].max())  # before the cut: see rotary.py
        image_tokens = count_of(prepared)
        prepared, whole = whole_tensors(prepared, self.needs.images)
        short = mesh is None and self.mesh.sequence_size > 1 and tokens < self.config.min_sequence_length
        mesh = RingMesh.single() if short else mesh or self.mesh
        padded = REAL_TOKENS in prepared and (short or not bool(prepared[REAL_TOKENS].all()))
        if short:
            prepared = split_samples(prepared, self.mesh.sequence_rank, self.mesh.sequence_size)
        sharding = self._sharding(prepared, tokens, longest, mesh)
        rest = {key: tensor for key, tensor in prepared.items() if key != DOCUMENT_IDS}
        local = rest if short else split_tokens(rest, sharding.layout, mesh)
        local = {key: tensor.to(self.device) for key, tensor in (local | whole).items()}
        real_tokens, images = local.pop(REAL_TOKENS, None), taken_places(local, image_tokens)
        if images is not None:
            sharding = replace(sharding, images=images)
        if padded and real_tokens is not None:
            sharding = replace(sharding, real_tokens=real_tokens)
        return local, sharding

    def layout_for(self, tokens: int, mesh: RingMesh, groups: tuple[RowGroup, ...] = ()) -> Layout:
        """Choose one layout for all layers and rows: with documents for the rows that are most work."""
        mix, config = self.patterns.counted(tokens, self.needs.layers), self.config
        return make_layout(
            "contiguous" if mesh.sequence_size == 1 < self.mesh.sequence_size else config.layout,
            tokens=tokens,
            ring_size=mesh.ring_size,
            pattern={one & groups[0].documents: layers for one, layers in mix.items()} if groups else mix,
            multiple_of=mesh.ulysses_size,
            block_size=block_side(config.kernel, self.device.type, mix, config.block_size),
        )

    def _sharding(self, prepared: Batch, tokens: int, longest: int, mesh: RingMesh) -> BatchSharding:
        if DOCUMENT_IDS in prepared:
            batch_rows, _ = token_shape(prepared)
            return self._place(tokens, longest, mesh, group_rows(prepared[DOCUMENT_IDS], batch_rows))
        key, kept = (tokens, longest, mesh.sequence_size), self._by_length
        if key not in kept:
            kept[key] = self._place(tokens, longest, mesh)
            if len(kept) > REMEMBERED:  # texts of any length come by: each has its plans and contexts
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    def _place(
        self, tokens: int, longest: int, mesh: RingMesh, groups: tuple[RowGroup, ...] = ()
    ) -> BatchSharding:
        greatest = torch.tensor(longest, device=self.device)
        layout = self.layout_for(tokens, mesh, groups)
        sharding = BatchSharding(self.config, layout, mesh, self.patterns, groups, greatest)
        return sharding.with_slots(self.device) if self.needs.slots else sharding
