"""The keys "tiled_loss" and "tiled_mlp" of the JSON's "long_sequence", and the tokens of a chunk."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ds_ring.config.messages import Accepted, AtLeastOne, PartKeys

ChunkChoice = Literal["auto"] | bool | int
ChunkTokens = Annotated[
    Literal["auto"] | bool | AtLeastOne,
    Accepted('"auto", true, false, or a whole number of at least 1 (tokens)', "write true, say"),
]

_MIB = 1 << 20
_LEAST_TOKENS = 64


class TileKeys(PartKeys):
    """Say which parts of a model are computed in chunks of tokens."""

    description: ClassVar[str] = "what is computed in chunks or kept on the host"

    tiled_loss: ChunkTokens = Field(
        default=False, description="compute logits, loss and their gradients by tiles of tokens"
    )
    tiled_mlp: ChunkTokens = Field(
        default=False, description="compute MLPs by tiles of tokens, again in the backward pass"
    )

    @property
    def changes_models(self) -> bool:
        """Return whether a part of a transformers model is on, or may be."""
        return self.tiled_loss is not False or self.tiled_mlp is not False or super().changes_models


def get_chunk_tokens(tile: ChunkChoice, width: int, device: str = "cpu") -> int:
    """Return the tokens of a chunk of at most so many: 64 MiB of float32 on the CPU, 512 MiB elsewhere.

    Args:
        tile: the value of `tiled_loss` or `tiled_mlp`; a number is taken as it is.
        width: elements of a token's widest row: the vocabulary for the loss, or an MLP's intermediate size.
        device: the kind of device, "cpu" or "cuda".
    """
    if type(tile) is int:
        return tile
    return max((64 if device == "cpu" else 512) * _MIB // (4 * width), _LEAST_TOKENS)
