"""Attention over keys that an indexer selects, in transformers models: DeepSeek-V3.2 and its relatives.

Owns how a layer's own indexer meets the keys of all ranks. The indexer runs as it is, with its projections,
norms, rotary embedding and formula; only its keys are replaced, by an object that stands for the keys of all
ranks (`KeysOfAllRanks`). What the indexer does with them is noted and done again with each shard that
arrives (`ring_select`). Another formula than those of `_NOTED` is refused by name. The positions that it
returns reach `attention.py` as `indices`, which attends to them (`selected_attention`).

transformers computes indexers without a gradient, so there is none here.

Shapes: B samples, S local tokens, T tokens, n keys of a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.integrations.deepspeed.batch import SHARDING
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.transformers.generation import CachedSharding
from ds_ring.integrations.transformers.indexed_blocks import joined, selects_blocks
from ds_ring.integrations.transformers.layer_masks import LayerMask, pattern_in
from ds_ring.masks.pattern import Pattern
from ds_ring.runtime.selection import ring_select, selected_attention

# Computes some scores: of samples and of slots of this rank's queries, with some keys.
Computation = Callable[[Any, slice, Tensor], Tensor]
_NOTED = (torch.matmul, Tensor.matmul, torch.relu, nn.functional.relu)


def selects_keys(module: nn.Module) -> bool:
    """Return whether a layer attends to keys that its own indexer, or that of a layer before it, selects."""
    indexer = getattr(module, "indexer", None)
    if hasattr(module, "compress_rate"):  # of entries: compressed.py
        return False
    return isinstance(indexer, nn.Module) and hasattr(indexer, "index_topk") and not selects_blocks(module)


class _Visible:
    """Stand for the mask that an indexer applies to its scores: `ring_select` applies the layer's pattern."""

    dtype = torch.bool

    def __invert__(self) -> _Visible:
        return self


class KeysOfAllRanks:
    """Stand for an indexer's keys, or for scores of them, which exist for one shard at a time.

    Notes what the indexer does with them; `topk` does it.
    """

    def __init__(
        self, select: Callable[[Computation, int], Tensor], shape: torch.Size, of: Computation
    ) -> None:
        self._select, self.shape, self._of = select, shape, of

    def _then(self, step: Callable[[Tensor], Tensor]) -> KeysOfAllRanks:
        return KeysOfAllRanks(self._select, self.shape, lambda *which: step(self._of(*which)))

    def transpose(self, one: int, other: int) -> KeysOfAllRanks:
        return self._then(lambda x: x.transpose(one, other))

    def unsqueeze(self, dim: int) -> KeysOfAllRanks:
        return self._then(lambda x: x.unsqueeze(dim))

    def squeeze(self, dim: int) -> KeysOfAllRanks:
        return self._then(lambda x: x.squeeze(dim))

    def float(self) -> KeysOfAllRanks:
        return self._then(lambda x: x.float())

    def __mul__(self, factor: Any) -> KeysOfAllRanks:
        if not isinstance(factor, (int, float)):
            raise _another_formula(f"multiplies scores by {type(factor).__name__}")
        return self._then(lambda x: x * factor)

    def masked_fill(self, mask: Any, value: Any) -> KeysOfAllRanks:
        if not isinstance(mask, _Visible):
            raise _another_formula("masks scores by a mask of its own")
        return self

    def topk(self, k: int, dim: int = -1) -> SimpleNamespace:
        if dim != -1:
            raise _another_formula(f"chooses along dimension {dim}")
        return SimpleNamespace(indices=self._select(self._of, k))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = [x for x in args if isinstance(x, KeysOfAllRanks)]
        if function not in _NOTED or any((kwargs or {}).values()) or len(mine) != 1:
            raise _another_formula(f"calls {getattr(function, '__name__', function)}")
        (keys,) = mine

        def of(samples: Any, slots: slice, shard: Tensor) -> Tensor:
            # Whatever else takes part belongs to this rank's queries, [B, S, ..].
            given = (keys._of(samples, slots, shard) if x is keys else x[:, slots][samples] for x in args)
            found: Tensor = function(*given)
            return found

        return KeysOfAllRanks(keys._select, keys.shape, of)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python's protocols
            raise AttributeError(name)
        raise _another_formula(f"reads {name} of its keys")


def _another_formula(how: str) -> RingConfigError:
    return RingConfigError(
        f"indexer: expected one that scores keys as DeepSeek-V3.2 does, weights * relu(q k), got one that"
        f" {how}, which no ring computes; use another model, or a version of transformers that ds_ring knows"
    )


class _Keys:
    """Stand for the cache to which an indexer gives its keys."""

    def __init__(self, sharding: BatchSharding, pattern: Pattern) -> None:
        self._sharding, self._pattern = sharding, pattern

    def update_indexer(self, keys_BSD: Tensor, layer: int) -> KeysOfAllRanks:
        sharding, tokens = self._sharding, self._sharding.layout.tokens

        def select(scores: Computation, k: int) -> Tensor:
            return selected(sharding, self._pattern, scores, k, keys_BSD)

        shape = torch.Size((*keys_BSD.shape[:2], tokens))
        return KeysOfAllRanks(select, shape, lambda samples, slots, shard: shard)


def selected(sharding: BatchSharding, pattern: Pattern, scores: Computation, k: int, keys: Tensor) -> Tensor:
    """Return the chosen positions, int64 [B, S, k], or [B, C, S, k] where C heads choose for themselves.

    Rows with documents of their own are chosen for one after the other.
    """
    place: dict[str, Any] = {"layout": sharding.layout, "mesh": sharding.mesh}
    place["hop_timeout_s"] = float(sharding.config.hop_timeout_seconds)
    if not sharding.groups:
        return ring_select(partial(scores, slice(None)), k, keys, pattern=pattern, **place)
    found = []
    for group in sharding.groups:
        rows = list(group.rows)
        of_rows = partial(scores, rows)
        found.append(ring_select(of_rows, k, keys[rows], pattern=pattern & group.pattern, **place))
    return joined(sharding, found)


def attend(
    sharding: BatchSharding, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scale: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return attention [B, H, S, E] over chosen positions."""
    out: Tensor = selected_attention(
        q, k, v, chosen, layout=sharding.layout, mesh=sharding.mesh, scale=scale, sinks=sinks,
        hop_timeout_s=float(sharding.config.hop_timeout_seconds),
    )  # fmt: skip
    return out


class IndexedLayer:
    """Provide the hooks of a layer and of its indexer."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._sharding: BatchSharding | None = None
        self.layer = SimpleNamespace(before_forward=self._note)
        self.indexer = SimpleNamespace(before_forward=self._give_keys)

    def _note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The layer does not hand its arguments down to the indexer.
        self._sharding = kwargs.get(SHARDING)

    def _give_keys(
        self, indexer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sharding, name = self._sharding, type(indexer).__name__
        if isinstance(sharding, CachedSharding) or kwargs.get("past_key_values") is not None:
            raise RingConfigError(
                f"{name}: expected a call without a cache, got one: generation selects keys of a cache, which"
                " lies on all ranks; generate in engine.ring.off()"
            )
        masks = [x for x in (*args, *kwargs.values()) if isinstance(x, LayerMask)]
        if not isinstance(sharding, BatchSharding) or len(masks) != 1:
            raise RingPatternError(
                f"{name}: expected the mask of its layer and the batch's sharding, got {len(masks)} masks and"
                f" {type(sharding).__name__}; call the model through the engine, not compiled"
            )
        visible, keys = _Visible(), _Keys(sharding, pattern_in(self._layer, sharding, masks[0].pattern))
        args = tuple(visible if isinstance(x, LayerMask) else x for x in args)
        kwargs = {key: visible if isinstance(x, LayerMask) else x for key, x in kwargs.items()}
        return args, kwargs | {"past_key_values": keys}
