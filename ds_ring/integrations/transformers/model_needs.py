"""Record what a model needs to know of whole batches, which its forward pass on a shard cannot see.

Owns the record that `attach` fills in (families.py) and that the session reads before it cuts a
batch. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ds_ring.integrations.deepspeed.batch import Batch
from ds_ring.masks.pattern import Pattern

SHARDING = "ds_ring_sharding"  # the keyword by which a model hands its batch's sharding down to attention


class ImageNeeds(NamedTuple):
    """Say how a model's batches have images."""

    token: int  # id of the tokens that stand for a feature of an image each
    tensors: frozenset[str]  # that are not by token, and go whole to every rank
    # numbers the tokens of a whole batch on several axes, [B, T, axes]; None: they have one position each
    number_axes: Callable[[Batch], Tensor] | None


@dataclass
class ModelNeeds:
    """List what a model needs; empty if attention is its only use of other tokens."""

    slots: bool = False  # the position of every local slot in the sequence goes with the sharding
    real_tokens: bool = False  # which local tokens are no padding goes with it, too
    # what the model says of its layers, in their order, for the choice of a layout; empty: nobody knows
    layers: tuple[Pattern, ...] = ()
    # makes the position ids [B, T] of a prepared batch that came without any
    number_tokens: Callable[[Batch], Tensor] | None = None
    images: ImageNeeds | None = None  # of a model that reads images
