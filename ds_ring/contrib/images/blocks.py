"""Number tokens of an image, or of a prompt, that see each other in addition to what a layer's mask says.

Owns which tokens of a batch these are, by the model's own tensor of token types, and their rows' pattern.

[Note: tokens of a block]
Gemma 3 and PaliGemma let the tokens of a block see the later ones of their block. A rank has some of a
block's tokens only, so blocks are numbered where whole batches are seen, as a tensor of the prepared batch
(`ROW_KINDS`), and become patterns of rows as documents do. What a layer hides of the past stays hidden:
Gemma 3 intersects its window with this mask. Gemma 4 does not, which differs where an image is longer.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_ring.data.batch import Batch
from ds_ring.data.packing import RowKind
from ds_ring.errors import RingConfigError
from ds_ring.masks.branches import Branch
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.slots import IntArray
from ds_ring.patterns.documents.pattern import Documents

BLOCK_IDS = "image_block_ids"  # of prepared batches: [B, T], equal within a block, -1 for other tokens
_NO_BLOCK = -1


@dataclass(frozen=True)
class After(Pattern):
    """Attend to keys after the query."""

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(most=-1),)


@dataclass(frozen=True)
class JoinedBlocks:
    """The pattern of a row whose blocks see their later tokens, too."""

    blocks: Documents
    joins_blocks: ClassVar[bool] = True

    @property
    def pairs(self) -> int:
        """Return the pairs of a query and a key, about: those of blocks are few."""
        return self.blocks.tokens * (self.blocks.tokens + 1) // 2

    def __str__(self) -> str:
        return "blocks of images"

    def narrowed(self, pattern: Pattern) -> Pattern:
        """Return the pattern of the row where a layer asks for one."""
        return pattern | (self.blocks & After())


class BlockRows(RowKind):
    """Rows with blocks, by `image_block_ids`; see [Note: tokens of a block]."""

    key = BLOCK_IDS

    def check(self, tensors: Batch, pattern: Pattern, has_more: bool) -> None:
        """Refuse the tensor from users: it is made of token types."""
        raise RingConfigError.wrong("batch", "token types of images", BLOCK_IDS, "leave it out")

    def make_row_pattern(self, row_T: IntArray) -> JoinedBlocks:
        """Return the blocks of a row."""
        return JoinedBlocks(Documents(row_T))


def numbers_blocks(model: Any) -> Callable[[Batch], Tensor | None]:
    """Return what numbers the blocks of a model's batches, [B, T]; None for a batch without."""
    kind, config = model.config.model_type, model.config
    name = "token_type_ids" if kind in ("gemma3", "paligemma") else "mm_token_type_ids"
    text = getattr(config, "text_config", config)
    joins = kind in ("gemma3", "paligemma", "molmo2")
    joins = joins or getattr(text, "use_bidirectional_attention", None) == "vision"

    def number(batch: Batch) -> Tensor | None:
        types_BT = batch.get(name)
        if not joins or types_BT is None:
            return None
        if kind == "paligemma":  # the prompt, images included
            ids_BT = torch.where(types_BT == 0, 0, _NO_BLOCK)
        elif kind == "molmo2":  # all images of a sample are one block
            ids_BT = torch.where(types_BT == 1, 0, _NO_BLOCK)
        else:  # each image, and in Gemma 4 each frame of a video
            are_images_BT = (types_BT == 1) | ((types_BT == 2) & kind.startswith("gemma4"))
            begins_BT = are_images_BT & ~torch.nn.functional.pad(are_images_BT, (1, 0))[:, :-1]
            ids_BT = torch.where(are_images_BT, begins_BT.long().cumsum(1) - 1, _NO_BLOCK)
        mask_BT = batch.get("attention_mask")
        if mask_BT is not None:
            ids_BT = ids_BT.masked_fill(mask_BT == 0, _NO_BLOCK)
        if kind.startswith("gemma4"):
            _check_window(kind, ids_BT, getattr(text, "sliding_window", None))
        return ids_BT if bool((ids_BT >= 0).any()) else None

    return number


def _check_window(kind: str, ids_BT: Tensor, window: int | None) -> None:
    longest = max(int(row[row >= 0].bincount().max()) for row in ids_BT if bool((row >= 0).any()))
    if window is not None and longest > window:
        raise RingConfigError.wrong(
            kind, f"images of at most {window} tokens, as its window", longest, "make images smaller"
        )
