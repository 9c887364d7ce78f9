"""What a model computes from the positions of the whole batch: position ids and rotary length.

RoBERTa-like models number tokens from `padding_idx + 1` and leave padding out; OPT leaves out what an
attention_mask hides. Any other model must use the position ids that it is given.

Shapes: B samples, T global tokens, S local tokens, H query heads, D head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.compat import get_imported
from ds_ring.data.batch import Batch
from ds_ring.data.packing import DOCUMENT_IDS, row_kind
from ds_ring.data.ring_batch import RecentBatches
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.models.model import MODEL, PART
from ds_ring.patches import AppliedPatch, patch, undo

_FROM_IDS = "create_position_ids_from_input_ids"


def find_numbering(model: nn.Module) -> Callable[[Batch], Tensor] | None:
    """Return how the model numbers tokens by their ids (RoBERTa, XLM-R, M2M100); None if it does not."""
    for module in model.modules():
        kind = type(module)
        derives = hasattr(kind, _FROM_IDS) or get_imported(kind.__module__, _FROM_IDS) is not None
        padding = getattr(module, "padding_idx", None)
        has_table = hasattr(kind, _FROM_IDS) and hasattr(
            module, "make_weights"
        )  # M2M100's table of sinusoids
        if derives and (has_table or hasattr(module, "position_embeddings")) and isinstance(padding, int):
            return partial(_numbered_by_ids, padding)
    return None


def counts_real_tokens(model: nn.Module) -> bool:
    """Return whether a model that numbers its tokens leaves out what an attention_mask hides (OPT)."""
    # BioGPT's table of positions could do so, too, but is given position ids.
    kinds = {type(part) for part in model.modules() if not isinstance(part, nn.Embedding)}
    return any("position_ids = torch.cumsum(" in _read_source(kind.forward) for kind in kinds)


@lru_cache(1024)
def _read_source(forward: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return ""


def _numbered_by_ids(padding: int, prepared: Batch) -> Tensor:
    """Number tokens as fairseq does: real tokens from `padding` + 1, padding tokens have `padding`.

    Returns:
        Position ids [B or 1, T]; with documents, tokens count within each, and in a tree along each path.
        A padding token inside a document or a path is not counted, as in a row of its own.
    """
    ids_BT = prepared.get("input_ids")
    if ids_BT is None:
        return prepared["position_ids"] + padding + 1
    real_BT = ids_BT != padding
    if row_kind(prepared) is not None:
        depths_BT = prepared["position_ids"].expand_as(ids_BT)
        counts = [*map(_count_in_paths, real_BT.tolist(), depths_BT.tolist())]
        counts_BT = torch.tensor(counts, device="cpu")
        return counts_BT.to(ids_BT) * real_BT + padding
    counts_BT = real_BT.long().cumsum(dim=1)
    if DOCUMENT_IDS in prepared:
        starts_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device) - prepared["position_ids"]
        before_BT = torch.nn.functional.pad(counts_BT, (1, 0)).gather(1, starts_BT.expand_as(ids_BT))
        counts_BT = counts_BT - before_BT
    return counts_BT * real_BT + padding


def _count_in_paths(are_real: list[bool], depths: list[int]) -> list[int]:
    """Return for each token of a row of trees the real tokens of its path; nodes are in depth-first order."""
    counts = [0] * (max(depths) + 2)  # of the latest token of each depth
    path_counts = []
    for is_real, depth in zip(are_real, depths, strict=True):
        counts[depth + 1] = counts[depth] + is_real
        path_counts.append(counts[depth + 1])
    return path_counts


_notes_positions = patch(
    MODEL, stage="before_forward", feature="numbering",
    reason="notes the position ids of the first forward pass, then removes itself",
)  # fmt: skip
_ends_check = patch(
    MODEL, stage="after_forward", feature="numbering", reason="removes the hooks of the numbering check"
)
_compares_positions = patch(
    PART, stage="before_forward", feature="numbering.part",
    reason="refuses a model that numbers its tokens by itself, in the first forward pass",
)  # fmt: skip
_rotary_patch = partial(
    patch, PART, feature="rotary length", when="the rotary embedding depends on the length"
)
_appends_position = _rotary_patch(stage="before_forward", reason="appends the greatest position of the batch")
_removes_row = _rotary_patch(stage="after_forward", reason="removes the row of that position")


@dataclass
class NumberingCheck:
    """The hooks that compare every `position_ids` inside a model with what the model was given, once.

    Attributes:
        model: the hooks of the model.
        part: the hook of the modules inside it that take position_ids.
        changes: the hooks that were put on, which the first forward pass removes.
    """

    model: list[Any]
    part: Callable[..., None]
    changes: list[AppliedPatch]


def make_numbering_check(model: nn.Module, mesh: RingMesh) -> NumberingCheck:
    """Return the check that a model uses the position ids that it is given; see `NumberingCheck`."""
    # A rank whose shard begins the sequence sees no difference, so the rank that does informs the others (in
    # place of its first message of attention). Compiled graphs are not looked at.
    model_ids: list[Tensor] = []
    changes: list[AppliedPatch] = []
    signature = inspect.signature(model.forward)

    @_notes_positions
    def before_model(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            bound = {**signature.bind_partial(*args, **kwargs).arguments, **kwargs}
            model_ids[:] = [bound["position_ids"]] if isinstance(bound.get("position_ids"), Tensor) else []

    @_ends_check
    def after_model(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            undo(changes)

    @_compares_positions
    def before_part(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not model_ids:
            return
        bound = inspect.signature(part.forward).bind_partial(*args, **kwargs).arguments
        used = bound.get("position_ids")
        if not isinstance(used, Tensor):
            return
        # position ids may have further axes in front
        if used.shape[-1] != model_ids[0].shape[-1] or not bool((used == model_ids[0]).all()):
            with collective(mesh, "attention"):
                raise RingPatternError(
                    f"{type(model).__name__}: expected position_ids in its {type(part).__name__}, which"
                    " numbers this rank's tokens by itself; use a model that passes its position_ids down"
                )

    return NumberingCheck([before_model, after_model], before_part, changes)


# transformers' dynamic NTK and LongRoPE (and own code of models such as PhiMoE) choose the frequencies of a
# rotary embedding by `max(position_ids)`, which on a shard is the shard's own. So the greatest position of
# the batch is appended to the position ids while such a module runs, and its row of the result is removed:
# so the module computes the same as on one process. The position is a tensor of
# the batch's sharding, so that a compiled graph serves every length.

_BY_LENGTH = ("dynamic", "longrope")


def check_lengths(model: nn.Module) -> None:
    """Refuse a model whose rotary embedding depends on the length and cannot be given it.

    Raises:
        RingConfigError: a module computes it inside a layer that may be computed again in the backward pass,
            or takes no position_ids.
    """
    for name, module in model.named_modules():
        if not depends_on_length(module):
            continue
        parts = name.split(".")
        around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
        if any(isinstance(parent, GradientCheckpointingLayer) for parent in around):
            reason = "computed inside each layer, again in the backward pass of a checkpointed one"
        elif "position_ids" not in inspect.signature(module.forward).parameters:
            reason = "computed without position_ids"
        else:
            continue
        raise RingConfigError(
            f"{type(model).__name__} cannot run on a ring: its rotary embedding {type(module).__name__}"
            f" (rope_type {module.rope_type!r}) depends on the length, and is {reason}; use another"
        )


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a rotary embedding's frequencies change with the greatest position."""
    types = getattr(module, "rope_type", None)
    if types is None:
        return False
    names = types.values() if isinstance(types, dict) else (types,)
    if any(kind in str(name) for name in names for kind in _BY_LENGTH):
        return True
    source = _read_source(type(module).forward)
    return "max(position_ids" in source or "position_ids.max(" in source  # PhiMoE asks for it itself


def make_rotary_hooks(module: nn.Module, batches: RecentBatches) -> list[Any]:
    """Return the hooks of a rotary embedding that depends on the length."""
    signature = inspect.signature(module.forward)

    @_appends_position
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = signature.bind(*args, **kwargs)
        position_ids = arguments.arguments["position_ids"]
        # [..., S] followed by the greatest of the batch: [..., S + 1]
        longest = batches.current.longest.to(position_ids).expand(*position_ids.shape[:-1], 1)
        arguments.arguments["position_ids"] = torch.cat([position_ids, longest], dim=-1)
        return arguments.args, arguments.kwargs

    @_removes_row
    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if isinstance(output, Tensor):
            return output[..., :-1, :]
        return tuple(part[..., :-1, :] for part in output)

    return [before, after]
