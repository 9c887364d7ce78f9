"""Attention to keys that an indexer selects: DeepSeek-V3.2 and its relatives.

The layer's own indexer meets the keys of all ranks. It runs as it is, with its projections, norms, rotary
embedding and formula; only its keys are replaced, by an object that represents the keys of all ranks
(`KeysOfAllRanks`). What the indexer does with them is recorded and done again with each shard that arrives
(`ring_select`). Another formula than those of `_RECORDED` is refused by name. The positions that it returns
reach the call of attention as `indices`.

transformers computes indexers without a gradient, so there is none here.

Shapes: B samples, S local tokens, D head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.data.batch import SHARDING, cache_in, cache_name
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.layers.selection.rows import (
    CHOOSES,
    Computation,
    attend_to_chosen,
    layers_with_indexers,
    selected,
)
from ds_ring.layers.selection.total_order import TotalOrder
from ds_ring.masks.pattern import Pattern
from ds_ring.models.checks import has_cache
from ds_ring.models.layer_masks import LayerMask, choose_layer_pattern
from ds_ring.models.model import TABLE
from ds_ring.models.variant import Variant
from ds_ring.patches import patch

if TYPE_CHECKING:
    from ds_ring.models.attention_call import AttentionCall
    from ds_ring.models.model_adapter import ModelAdapter

_patch = partial(
    patch, stage="before_forward", feature="chosen keys", when="an indexer selects the keys of a layer"
)

_RECORDED = (torch.matmul, Tensor.matmul, torch.relu, nn.functional.relu)


class IndexedKeys(Variant):
    """Layers that attend to single keys, which their indexer or that of a layer before them selects."""

    def matches(self, module: nn.Module) -> bool:
        indexer = getattr(module, "indexer", None)
        # Not of compressed entries, and not of keys that are pooled to blocks.
        selects_others = hasattr(module, "compress_rate") or hasattr(indexer, "index_kpool")
        return isinstance(indexer, nn.Module) and hasattr(indexer, "index_topk") and not selects_others

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        indexed = layers_with_indexers(model)
        known = bool(indexed) and all(map(self.matches, indexed))
        return {"indexed_attention"} if known and not as_is else set()

    def install_on(self, module: nn.Module, adapter: ModelAdapter) -> None:
        adapter.apply(IndexedLayer(module), indexed=module, indexer=module.indexer)
        adapter.session.needs.one_process = TotalOrder

    def read(self, call: AttentionCall) -> None:
        call.taken["indices"] = call.arguments.pop("indices", None)

    def attend(self, call: AttentionCall) -> Tensor | None:
        chosen = call.taken["indices"]
        return None if chosen is None else attend_to_chosen(call, chosen)

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        return CHOOSES if any(map(self.matches, model.modules())) else None


class _Visible:
    """Stand for the mask that an indexer applies to its scores: `ring_select` applies the layer's pattern."""

    dtype = torch.bool

    def __invert__(self) -> _Visible:
        return self


class KeysOfAllRanks:
    """Stand for an indexer's keys, or for scores of them, which exist for one shard at a time.

    Records what the indexer does with them; `topk` does it.
    """

    def __init__(
        self, select: Callable[[Computation, int], Tensor], shape: torch.Size, of: Computation
    ) -> None:
        self._select, self.shape, self._of = select, shape, of

    def _then(self, step: Callable[[Tensor], Tensor]) -> KeysOfAllRanks:
        return KeysOfAllRanks(self._select, self.shape, lambda *which: step(self._of(*which)))

    def transpose(self, dim0: int, dim1: int) -> KeysOfAllRanks:
        return self._then(lambda x: x.transpose(dim0, dim1))

    def unsqueeze(self, dim: int) -> KeysOfAllRanks:
        return self._then(lambda x: x.unsqueeze(dim))

    def squeeze(self, dim: int) -> KeysOfAllRanks:
        return self._then(lambda x: x.squeeze(dim))

    def float(self) -> KeysOfAllRanks:
        return self._then(lambda x: x.float())

    def __mul__(self, factor: Any) -> KeysOfAllRanks:
        if not isinstance(factor, (int, float)):
            raise _refuse_formula(f"multiplies scores by {type(factor).__name__}")
        return self._then(lambda x: x * factor)

    def masked_fill(self, mask: Any, value: Any) -> KeysOfAllRanks:
        if not isinstance(mask, _Visible):
            raise _refuse_formula("masks scores by a mask of its own")
        return self

    def topk(self, k: int, dim: int = -1) -> SimpleNamespace:
        if dim != -1:
            raise _refuse_formula(f"chooses along dimension {dim}")
        return SimpleNamespace(indices=self._select(self._of, k))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = [x for x in args if isinstance(x, KeysOfAllRanks)]
        if function not in _RECORDED or any((kwargs or {}).values()) or len(mine) != 1:
            raise _refuse_formula(f"calls {getattr(function, '__name__', function)}")
        (keys,) = mine

        def scores(samples: Any, slots: slice, shard: Tensor) -> Tensor:
            # Whatever else takes part belongs to this rank's queries, [B, S, ..].
            operands = (keys._of(samples, slots, shard) if x is keys else x[:, slots][samples] for x in args)
            result: Tensor = function(*operands)
            return result

        return KeysOfAllRanks(keys._select, keys.shape, scores)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python's protocols
            raise AttributeError(name)
        raise _refuse_formula(f"reads {name} of its keys")


def _refuse_formula(how: str) -> RingConfigError:
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


class IndexedLayer:
    """The hooks of a layer and of its indexer."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._sharding: BatchSharding | None = None

    @_patch(
        TABLE.given("indexed", "torch.nn.Module"),
        reason="notes the batch's sharding, which the layer does not hand down to its indexer",
    )
    def note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The layer does not hand its arguments down to the indexer.
        self._sharding = kwargs.get(SHARDING)

    @_patch(
        TABLE.given("indexer", "torch.nn.Module"),
        reason="gives an object for the keys of all ranks in place of a cache",
    )
    def give_keys(
        self, indexer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sharding, name = self._sharding, type(indexer).__name__
        if cache_in(kwargs) is not None:
            raise has_cache(name)
        masks = [x for x in (*args, *kwargs.values()) if isinstance(x, LayerMask)]
        if not isinstance(sharding, BatchSharding) or len(masks) != 1:
            got = f"got {len(masks)} masks and {type(sharding).__name__}"
            raise RingPatternError(f"{name}: expected its layer's mask, {got}; call the engine, not compiled")
        masks[0].check_blocks(sharding)
        pattern = choose_layer_pattern(self._layer, sharding, masks[0].pattern)
        visible, keys = _Visible(), _Keys(sharding, pattern)
        args = tuple(visible if isinstance(x, LayerMask) else x for x in args)
        kwargs = {key: visible if isinstance(x, LayerMask) else x for key, x in kwargs.items()}
        return args, kwargs | {cache_name(inspect.signature(indexer.forward).parameters): keys}
