"""One row of the table of attention variants: the interface that the adapter's core calls.

A variant is a way in which layers of transformers models read other tokens. The core (`attention.py`,
`checks.py`, `model_adapter.py`) names none. It tries all rows of `plugin.FAMILIES` (`variants.py`), in their
order. A new variant overrides the methods that it needs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ds_ring.config.section import RingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ds_ring.models.attention_call import AttentionCall

# Needs of a model that `checks.py` finds: softmax over keys does not cover them. Words of `layer_types`, too.
INTERFACE = "attention interface"  # its attention bypasses transformers' interface
POSITIONS = "position_ids"  # its forward pass takes none
STATE = "state"  # transformers calls it stateful
CONVOLUTION = "convolution"  # a layer has an nn.Conv1d over tokens
TWO_SEQUENCES = "two sequences"  # it is an encoder-decoder


def find_forward_home(model: nn.Module) -> str:
    """Return the module of the class whose forward a model runs: a subclass without one inherits it."""
    return next(kind.__module__ for kind in type(model).__mro__ if "forward" in vars(kind))


@dataclass(frozen=True)
class AttachRequest:
    """The section with which a model is to run.

    Attributes:
        as_is: its attention is left to the backend "ds_ring", so no layer gets the ring's attention function.
        is_outermost: no other transformers model contains it.
    """

    config: RingConfig
    as_is: bool = False
    is_outermost: bool = True


class Variant:
    """One way in which layers read other tokens; the methods of this class change nothing.

    Attributes:
        encoder_types: types of models whose encoders of other inputs (images) are known to be exact.
    """

    encoder_types: tuple[str, ...] = ()

    def matches(self, module: nn.Module) -> bool:
        """Return whether a module is a layer of this variant."""
        return False

    # Before a model is attached.

    def refuse(self, model: PreTrainedModel, request: AttachRequest) -> None:
        """Refuse a model or a section that this variant knows and a ring does not compute.

        Raises:
            RingConfigError, RingPatternError: with the reason.
        """

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        """Return the needs of a model that this variant computes on a ring."""
        return set()

    def uses_interface(self, kind: type[PreTrainedModel]) -> bool:
        """Return whether all attention of a class uses the interface, though the class does not say so."""
        return False

    def advice(self, kind: type[PreTrainedModel]) -> str | None:
        """Return how to build a model whose class does not take the name "ds_ring"; None if unknown."""
        return None

    def makes_full_masks(self, model_type: str) -> bool:
        """Return whether a model makes an attention_mask of its own that hides nothing."""
        return False

    def own_attention(self, model: nn.Module) -> list[PreTrainedModel]:
        """Return the models inside a model that keep their own attention."""
        return []

    def apart(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules whose outputs are no shards of the sequence: by default those of encoders."""
        return [module for part in self.own_attention(model) for module in part.modules()]

    def attention_names(self, model: PreTrainedModel, name: str) -> dict[str, str] | None:
        """Return what to set as attention of a model's parts, so that all get `name` but those of
        `own_attention`; None where all of them get it.
        """
        return None

    # When a model is attached.

    def model_call(self, model: PreTrainedModel) -> Any:
        """Return the subclass of `ModelCall` for a model's calls; None for `ModelCall` itself."""
        return None

    def install(self, adapter: Any) -> None:
        """Apply this variant's patches to the model of `adapter`, a `ModelAdapter`."""
        for module in adapter.model.modules():
            if self.matches(module):
                self.install_on(module, adapter)

    def install_on(self, module: nn.Module, adapter: Any) -> None:
        """Apply this variant's patches to a layer that it matches."""

    def positioned(self, model: PreTrainedModel) -> Iterator[nn.Module]:
        """Yield the modules whose positions this variant provides: they need not use the model's."""
        yield from ()

    # In each call of attention.

    def read(self, call: AttentionCall) -> None:
        """Take what only this variant understands out of the call, before the core refuses the rest."""

    def attend(self, call: AttentionCall) -> Tensor | None:
        """Return attention [B, H, S, E] of a layer of this variant; None for other layers."""
        return None

    # In a generation.

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        """Return why a model cannot generate on a ring; None if this variant has no reason."""
        return None

    def has_states(self, model: PreTrainedModel) -> bool:
        """Return whether a cache has to hold states of the model's layers."""
        return False

    def has_own_cache(self, model: PreTrainedModel) -> bool:
        """Return whether a model makes a cache of its own kind, of states that every rank has."""
        return False

    def mixes_beams(self, model: PreTrainedModel) -> bool:
        """Return whether transformers' cache leaves a model's states in place when beams change rows."""
        return self.has_own_cache(model)


def get_own_attention_advice(kind: type[PreTrainedModel], types: Container[str]) -> str | None:
    """Return how to start a model whose layers compute attention themselves; None unless of `types`."""
    if getattr(kind.config_class, "model_type", None) not in types:
        return None
    return "build it without attn_implementation, and start with ds_ring.initialize(model=...)"
