"""Define the "long_sequence" part of the section: what of a model besides attention is computed in tiles.

Owns the keys, the words "off" and "auto", and how many tokens a tile has by default, which the estimator
asks, too. What a part makes a model do stands in integrations/transformers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from ds_ring.config.messages import Refused, Section, Takes, sentence, shown
from ds_ring.config.pattern_section import MOST

Tile = Literal["auto"] | bool | int
Switch = Literal["auto"] | bool

_TILE = Takes('"auto", true, false, or a whole number of at least 1 (tokens of a tile)', "write true, say")
_SWITCH = Takes('"auto", true or false', "write true or false, without quotes")

MIB = 1 << 20
_TILE_BYTES = {"cpu": 64 * MIB}
_TILE_BYTES_ELSEWHERE = 512 * MIB
_LEAST_TOKENS = 64


def _tile(value: object) -> Tile:
    if isinstance(value, bool) or value == "auto":
        return value
    if type(value) is int and 1 <= value <= MOST:
        return value
    raise Refused(sentence(_TILE.what, shown(value), _TILE.advice))


def _switch(value: object) -> Switch:
    if isinstance(value, bool) or value == "auto":
        return value
    raise Refused(sentence(_SWITCH.what, shown(value), _SWITCH.advice))


class LongSequenceConfig(Section):
    """Say which parts of a model are computed in tiles of tokens, and where its checkpoints are kept.

    A part that is `true` is an error where the model does not allow it; one that is "auto" is left out there,
    with a line in the log.
    """

    tiled_loss: Annotated[Tile, PlainValidator(_tile), _TILE] = Field(
        default=False,
        description="compute logits, loss and their gradients one tile of tokens after the other, so that no"
        " tensor of a shard's tokens x vocabulary exists; true: tiles of 64 MiB of float32 logits on the CPU,"
        " 512 MiB on CUDA",
    )
    tiled_mlp: Annotated[Tile, PlainValidator(_tile), _TILE] = Field(
        default=False,
        description="compute each layer's MLP, and the norms around it, one tile of tokens after the other,"
        " and again in the backward pass; true: tiles of 64 MiB of the widest float32 activation on the CPU"
        " and 512 MiB on CUDA",
    )
    offload_checkpoints: Annotated[Switch, PlainValidator(_switch), _SWITCH] = Field(
        default=False,
        description="checkpoint each layer's activations, and keep the checkpoints in pinned memory of the"
        ' host; "auto": where the device is not the CPU',
    )

    offload_attention: Annotated[Switch, PlainValidator(_switch), _SWITCH] = Field(
        default=False,
        description="keep what attention's gradient needs (q, k, v, out, lse) in pinned memory of the host,"
        " and bring it back in the backward pass a group of heads at a time, the next while one is computed;"
        ' "auto": where the device is not the CPU, for shards of 131,072 tokens and more',
    )

    @property
    def any(self) -> bool:
        """Return whether a part of a model is on, or may be; `offload_attention` is attention's own."""
        return any(
            value is not False for value in (self.tiled_loss, self.tiled_mlp, self.offload_checkpoints)
        )


def _from_word(value: Any) -> Any:
    """Replace "off" by no part, and "auto" by every part that the model allows."""
    if value == "off":
        return {}
    return dict.fromkeys(LongSequenceConfig.model_fields, "auto") if value == "auto" else value


LongSequence = Annotated[
    LongSequenceConfig,
    BeforeValidator(_from_word),
    Takes('"off", "auto", or an object of its keys', 'write "auto" for all that the model allows'),
]


def tile_tokens(tile: Tile, width: int, device: str = "cpu") -> int:
    """Return the tokens of a tile of at most so many: 64 MiB of float32 on the CPU, 512 MiB elsewhere.

    Args:
        tile: the value of `tiled_loss` or `tiled_mlp`; a number is taken as it is.
        width: elements of a token's widest row: the vocabulary for the loss, or an MLP's intermediate size.
        device: the kind of device, "cpu" or "cuda".
    """
    if type(tile) is int:
        return tile
    return max(_TILE_BYTES.get(device, _TILE_BYTES_ELSEWHERE) // (4 * width), _LEAST_TOKENS)
