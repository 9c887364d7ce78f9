"""Select keys for the rows of a batch, and attend to them: for variants whose layers choose their keys.

Shapes: B samples, S local tokens, C heads that choose for themselves, k chosen keys, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.errors import RingConfigError
from ds_ring.layers.selection.attention import selected_attention
from ds_ring.layers.selection.select import ring_select
from ds_ring.masks.pattern import Pattern
from ds_ring.models.attention_call import AttentionCall
from ds_ring.models.rows import in_order

# Why such a model does not generate on a ring.
CHOOSES = "expected layers that read all keys, got layers that choose theirs, which train on a ring alone"
# Computes some scores: of samples and of slots of this rank's queries, with some keys.
Computation = Callable[[Any, slice, Tensor], Tensor]


def selected(sharding: BatchSharding, pattern: Pattern, scores: Computation, k: int, keys: Tensor) -> Tensor:
    """Return the chosen positions, int64 [B, S, k], or [B, C, S, k] where C heads choose for themselves.

    Rows with documents of their own are chosen for one after the other.
    """
    place: dict[str, Any] = {"layout": sharding.layout, "mesh": sharding.mesh}
    place["hop_timeout_s"] = float(sharding.config.hop_timeout_seconds)
    results = []
    if not sharding.groups:
        return ring_select(partial(scores, slice(None)), k, keys, pattern=pattern, **place)
    for group in sharding.groups:
        rows = list(group.rows)
        of_rows = partial(scores, rows)
        results.append(ring_select(of_rows, k, keys[rows], pattern=group.narrowed(pattern), **place))
    return joined(sharding, results)


def joined(sharding: BatchSharding, chosen: Sequence[Tensor]) -> Tensor:
    """Return [B, ...] of what was chosen for each set of documents."""
    return in_order(chosen, [list(group.rows) for group in sharding.groups] or [[]])


def layers_with_indexers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that have an indexer of tokens: a module that selects keys."""
    return [
        part
        for part in model.modules()
        if isinstance(getattr(part, "indexer", None), nn.Module) and not hasattr(part, "compress_rate")
    ]


def attend_to_chosen(call: AttentionCall, chosen: Tensor) -> Tensor:
    """Return attention [B, H, S, E] over chosen positions, which were chosen by the layer's pattern.

    Raises:
        RingConfigError: the layer has a softcap.
    """
    if call.softcap is not None:
        raise RingConfigError(f"{call.name}: expected no softcap beside chosen keys, got {call.softcap}")
    return selected_attention(
        call.q_BHSD, call.k_BGSD, call.v_BGSE, chosen, layout=call.sharding.layout, mesh=call.sharding.mesh,
        scale=call.scale, sinks=call.sinks, hop_timeout_s=float(call.sharding.config.hop_timeout_seconds),
    )  # fmt: skip
