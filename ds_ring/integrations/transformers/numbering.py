"""Give models that number their tokens by themselves the numbers of the whole batch, or refuse them.

Owns the position ids of RoBERTa-like models, which count from `padding_idx + 1` and leave padding out, and
the check that whatever a model calls `position_ids` inside is what it was given.

Shapes: B samples, T global tokens, S local tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_ring.errors import RingPatternError
from ds_ring.integrations.deepspeed.batch import Batch
from ds_ring.integrations.deepspeed.packing import DOCUMENT_IDS
from ds_ring.runtime.contexts import refusing_context
from ds_ring.runtime.mesh import RingMesh

_FROM_IDS = "create_position_ids_from_input_ids"


def numbering_of(model: nn.Module) -> Callable[[Batch], Tensor] | None:
    """Return how the model numbers tokens by their ids (RoBERTa, XLM-R, CamemBERT); None if it does not."""
    for module in model.modules():
        kind = type(module)
        derives = hasattr(kind, _FROM_IDS) or hasattr(sys.modules.get(kind.__module__), _FROM_IDS)
        padding = getattr(module, "padding_idx", None)
        if derives and hasattr(module, "position_embeddings") and isinstance(padding, int):
            return _Numbering(padding)
    return None


class _Numbering:
    """Count as fairseq does: real tokens from padding_idx + 1, padding has padding_idx."""

    def __init__(self, padding_idx: int) -> None:
        self.padding_idx = padding_idx

    def __call__(self, prepared: Batch) -> Tensor:
        """Return position ids [B or 1, T]; with documents, tokens count within each."""
        first = self.padding_idx + 1
        ids_BT = prepared.get("input_ids")
        if ids_BT is None:
            return prepared["position_ids"] + first
        real_BT = ids_BT != self.padding_idx
        if DOCUMENT_IDS in prepared:
            return torch.where(real_BT, prepared["position_ids"] + first, self.padding_idx)
        return real_BT.long().cumsum(dim=1) * real_BT + self.padding_idx


def check_numbers_once(model: nn.Module, mesh: RingMesh) -> list[RemovableHandle]:
    """Compare every `position_ids` inside the model with what it was given, in its first forward pass.

    Returns the handles of the hooks.
    """
    # A rank whose shard begins the sequence sees no difference, so the one that does tells the others (in
    # place of its first message of attention). Compiled graphs are not looked at.
    given: list[Tensor] = []
    handles: list[RemovableHandle] = []
    signature = inspect.signature(model.forward)

    def before_model(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            bound = {**signature.bind_partial(*args, **kwargs).arguments, **kwargs}
            given[:] = [bound["position_ids"]] if isinstance(bound.get("position_ids"), Tensor) else []

    def after_model(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            for handle in handles:
                handle.remove()

    def before_part(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not given:
            return
        bound = inspect.signature(part.forward).bind_partial(*args, **kwargs).arguments
        used = bound.get("position_ids")
        if isinstance(used, Tensor) and not _same(used, given[0]):
            error = RingPatternError(
                f"{type(model).__name__}: its {type(part).__name__} numbers this rank's tokens by itself"
                " and not by"
                " the position_ids that the model was given, so their positions in the sequence would be"
                " lost;"
                " use a model that hands its position_ids down"
            )
            refusing_context(mesh, error).refuse(error)

    handles.append(model.register_forward_pre_hook(before_model, with_kwargs=True))
    handles.append(model.register_forward_hook(after_model))
    for part in model.modules():
        if part is not model and "position_ids" in inspect.signature(part.forward).parameters:
            handles.append(part.register_forward_pre_hook(before_part, with_kwargs=True))
    return handles


def _same(used: Tensor, given: Tensor) -> bool:
    """Return whether the numbers are the same, on whatever further axes."""
    if used.shape[-1] != given.shape[-1]:
        return False
    return bool((used == given).all())
