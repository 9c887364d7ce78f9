"""What a model needs of whole batches, and what only its kind knows; its adapter fills it in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig
from ds_ring.data.batch import Batch
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.masks.pattern import Pattern
from ds_ring.patches import AppliedPatch
from ds_ring.schedule.layout import Layout

if TYPE_CHECKING:
    from ds_ring.data.batch_sharder import BatchSharder


class WholeTensors:
    """Tensors of a batch that are not by token and go whole to every rank; a capability sets an object of it.

    Attributes:
        names: of the tensors.
    """

    names: frozenset[str] = frozenset()

    def add_columns(self, prepared: Batch, batch: Mapping[str, Tensor]) -> None:
        """Add tensors [B, T, ...] to a prepared batch that has such tensors: they are cut with the others."""

    def take_columns(
        self, local: Batch, prepared: Mapping[str, Tensor], layout: Layout | None, mesh: RingMesh
    ) -> Any:
        """Take these tensors out of `local`, and return what `BatchSharding.whole` holds; None without any.

        `local` was cut of the whole `prepared` batch; without a layout samples are whole.
        """

    def make_prompt_features(self, batch: Mapping[str, Any], layout: Layout, mesh: RingMesh) -> Any:
        """Return what `BatchSharding.whole` holds for a prompt of a generation; None without such tensors."""


class BatchKind(ABC):
    """Prepare and cut the batches of a model of several sequences; a capability sets an object of it.

    Attributes:
        name: of such a model, for errors.
    """

    name = ""

    @abstractmethod
    def prepare(self, batch: Mapping[str, Tensor], number: Callable[[Batch], Tensor] | None) -> Batch:
        """Return the batch with everything that looks across token borders done.

        `number` makes the position ids of a sequence; None: they count from 0 on.
        """

    @abstractmethod
    def cut(self, prepared: Batch, sharder: BatchSharder) -> tuple[Batch, BatchSharding]:
        """Return this rank's part of a prepared batch, and its sharding."""


class ModelCopies:
    """How a copy of the model runs on one process, for the check of the first batch."""

    def refuse_pattern(self, model: nn.Module, config: RingConfig, changes: Sequence[AppliedPatch]) -> None:
        """Refuse a pattern of the JSON that the copy's own code would not compute.

        Raises:
            RingConfigError: with the layer's name.
        """

    def set_attention(self, copy: nn.Module, model: nn.Module, config: RingConfig) -> None:
        """Give the copy of a model the attention that the model is to be compared with."""

    def arguments(self, copy: nn.Module, kwargs: dict[str, Any], sharding: BatchSharding) -> dict[str, Any]:
        """Return the arguments of a call with all tokens of a batch at once."""
        return kwargs


@dataclass
class ModelNeeds:
    """List what a model needs; empty if attention is its only use of other tokens."""

    slots: bool = False  # the sharding has the position of every local slot in the sequence
    real_tokens: bool = False  # the sharding has a mask of the local tokens that are not padding
    # patterns of the model's layers, in their order, for the choice of a layout; empty if unknown
    layers: tuple[Pattern, ...] = ()
    # makes the position ids [B, T] of a prepared batch that came without any
    number_tokens: Callable[[Batch], Tensor] | None = None
    # position ids of a batch that came without any leave out the padding of its attention_mask
    skips_padding: bool = False
    # raises a RingError for a prepared batch [B, T] with `REAL_TOKENS` that the model cannot be given
    check: Callable[[Batch], None] | None = None
    whole: WholeTensors | None = None  # of a model that reads images, for example
    batches: BatchKind | None = None  # of a model of several sequences
    # makes a context in which the model on one process breaks ties as the ring does
    one_process: Callable[[], AbstractContextManager[object]] = nullcontext
    copies: ModelCopies = field(default_factory=ModelCopies)
    # identities of the modules inside a model whose outputs are no shards of the sequence
    encoder_modules: Callable[[nn.Module], set[int]] = lambda _: set()
    # modules whose weights ZeRO 3 gathers as a whole: ranks call modules inside them unequally often
    gathered_once: list[nn.Module] = field(default_factory=list)

    @property
    def whole_names(self) -> frozenset[str]:
        """Return the names of the tensors that go whole to every rank."""
        return frozenset() if self.whole is None else self.whole.names

    @property
    def whole_batches(self) -> bool:
        """Return whether the model's own functions see whole batches, or it has several sequences."""
        return bool(self.number_tokens or self.whole or self.batches)
