"""Attention over keys that an indexer selects, in transformers models: single keys, or blocks of them.

Single keys are selected by DeepSeek-V3.2 and its relatives; here their own indexers meet the keys of all
ranks. The indexer runs as it is, with its projections, norms, rotary embedding and formula; only its keys are
replaced, by an object that stands for the keys of all ranks (`KeysOfAllRanks`). What the indexer does with
them is noted and done again with each shard that arrives (`ring_select`). Another formula than those of
`_NOTED` is refused by name. The positions that it returns reach `attention.py` as `indices`, which attends to
them (`selected_attention`).

Blocks are selected by Qwen 4, MiniMax M3 and GLM-5.3; here is what takes the place of such an indexer's
forward on a ring. It computes with the indexer's own projections, norms and rotary embedding. The tokens of a
block may lie on two ranks: the block's owner, which has its first token, gets the others by `halo`. Blocks
begin with each document, as they do where it stands alone. `ring_select` chooses blocks, and `attention.py`
attends to the tokens of these.

transformers computes indexers without a gradient, so there is none here.

Shapes: B samples, S local tokens, T tokens, n keys of a shard, H heads of an indexer, N local blocks, L
tokens of a block, D head dim.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.integrations.deepspeed.batch import SHARDING, cache_in, cache_name
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.transformers.attention_name import NAME
from ds_ring.integrations.transformers.generation import CachedSharding
from ds_ring.integrations.transformers.layer_masks import LayerMask, pattern_in, said_by_call
from ds_ring.integrations.transformers.recurrent import in_order
from ds_ring.layers.selection.select import ScoresFunction, ring_select, selected_attention
from ds_ring.layers.sparse.attention import tokens_of_blocks
from ds_ring.masks.catalog import Causal, Documents
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.layout import BlockLayout

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


def _in_generation(name: str) -> RingConfigError:
    return RingConfigError(
        f"{name}: expected a call without a cache, got one: generation selects keys of a cache, which"
        " lies on all ranks; generate in engine.ring.off()"
    )


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
        if isinstance(sharding, CachedSharding) or cache_in(kwargs) is not None:
            raise _in_generation(name)
        masks = [x for x in (*args, *kwargs.values()) if isinstance(x, LayerMask)]
        if not isinstance(sharding, BatchSharding) or len(masks) != 1:
            raise RingPatternError(
                f"{name}: expected the mask of its layer and the batch's sharding, got {len(masks)} masks and"
                f" {type(sharding).__name__}; call the model through the engine, not compiled"
            )
        visible, keys = _Visible(), _Keys(sharding, pattern_in(self._layer, sharding, masks[0].pattern))
        args = tuple(visible if isinstance(x, LayerMask) else x for x in args)
        kwargs = {key: visible if isinstance(x, LayerMask) else x for key, x in kwargs.items()}
        return args, kwargs | {cache_name(inspect.signature(indexer.forward).parameters): keys}


SCORED = 2048  # tokens whose scores exist at a time
_blocks = lru_cache(maxsize=64)(BlockLayout.of_tokens)  # the same for all layers and steps


@dataclass(frozen=True)
class ChosenMask:
    """The mask of a layer that applies it to what its indexer returns; then what was chosen, beside it."""

    mask: LayerMask | None
    chosen: Tensor | None = None
    dtype: ClassVar[torch.dtype] = torch.bool

    def __and__(self, chosen: Tensor) -> ChosenMask:
        return ChosenMask(self.mask, chosen)


class _BlockRows:
    """The blocks of samples that have the same documents, on this rank."""

    def __init__(self, sharding: BatchSharding, documents: Documents | None, size: int, whole: bool) -> None:
        self._sharding = sharding
        self.size, layout = size, sharding.layout
        self.blocks = _blocks(layout, size, documents, whole)
        positions = layout.positions(sharding.mesh.ring_rank)
        begins, ids = ([0], [0]) if documents is None else (documents.starts, documents.ids)
        document = np.searchsorted(np.array(begins), positions, side="right") - 1
        self.is_real = (positions >= 0) & (np.array(ids)[document] >= 0)
        self.positions, self.begins = positions, np.array(begins)[document]  # of tokens, [S]

    def gather(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of this rank's blocks, and where they begin: `tokens_of_blocks`."""
        timeout = float(self._sharding.config.hop_timeout_seconds)
        return tokens_of_blocks(x, self.blocks, self._sharding.mesh, timeout)

    def choose(self, scores: ScoresFunction, k: int, keys: Tensor, delay: int) -> Tensor:
        """Return the tokens [.., S, k * L] of the k best blocks of each query, -1 for none."""
        sharding = self._sharding
        numbers = ring_select(
            scores, k, keys, layout=self.blocks.of, mesh=sharding.mesh, blocks=self.blocks, delay=delay,
            hop_timeout_s=float(sharding.config.hop_timeout_seconds),
        )  # fmt: skip
        starts = torch.from_numpy(np.append(self.blocks.starts, -self.size)).to(keys.device)
        return self.expand(starts[numbers])  # number -1 is that of the last entry

    def expand(self, firsts: Tensor) -> Tensor:
        """Return the tokens [.., S, k * L] of blocks that begin at positions [.., S, k].

        A negative position is no block. Tokens behind the query are -1, and all of a query that is padding.
        """
        tokens = (firsts.unsqueeze(-1) + torch.arange(self.size, device=firsts.device)).flatten(-2)
        last = torch.from_numpy(np.where(self.is_real, self.positions, -1)).to(firsts.device)
        return tokens.masked_fill_((tokens < 0) | (tokens > last[:, None]), -1)

    def local(self, count: int, device: torch.device) -> Tensor:
        """Return the first positions [S, count] of a query's own block and those before it; -L for none."""
        within = (self.positions - self.begins) // self.size
        number = within[:, None] - np.arange(count)
        firsts = np.where(number >= 0, self.begins[:, None] + number * self.size, -self.size)
        return torch.from_numpy(firsts).to(device)

    def with_last(self, chosen: Tensor) -> Tensor:
        """Return chosen tokens [B, S, k] of whole blocks, and those of a query's own block if cut off."""
        # A query that ends its block sees it whole: it was chosen, or not.
        ends_block = torch.from_numpy((self.positions - self.begins) % self.size == self.size - 1)[:, None]
        last = self.local(1, chosen.device).masked_fill_(ends_block.to(chosen.device), -self.size)
        return torch.cat([chosen, self.expand(last).expand(len(chosen), -1, -1)], dim=2)


def _rows_of(sharding: BatchSharding, size: int, whole: bool) -> list[tuple[Any, _BlockRows]]:
    """Return the samples of each set of documents, and their blocks."""
    if not sharding.groups:
        return [(slice(None), _BlockRows(sharding, None, size, whole))]
    return [
        (list(group.rows), _BlockRows(sharding, group.documents, size, whole)) for group in sharding.groups
    ]


def joined(sharding: BatchSharding, chosen: Sequence[Tensor]) -> Tensor:
    """Return [B, ...] of what was chosen for each set of documents."""
    return in_order(chosen, [list(group.rows) for group in sharding.groups] or [[]])


def _rotary(indexer: nn.Module) -> Callable[..., Any]:
    function: Callable[..., Any] = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    return function


def qwen4(indexer: Any, sharding: BatchSharding, hidden_states: Tensor, cos_sin: Sequence[Tensor]) -> Tensor:
    """Return the tokens [B, S, k] that Qwen 4's indexer selects: of whole blocks, and of a query's last one.

    Keys of blocks are means of their tokens' keys.
    """
    size, dim, rotary = indexer.compress_ratio, indexer.index_head_dim, _rotary(indexer)
    cos, sin = (x.expand(len(hidden_states), -1, -1) for x in cos_sin)
    both = indexer.index_qk_proj(hidden_states).unflatten(2, (-1, dim))
    queries, raw_keys = both.split([indexer.index_n_heads, indexer.index_kv_heads], dim=2)
    queries = rotary(indexer.q_layernorm(queries), cos=cos, sin=sin, unsqueeze_dim=2).float()
    raw_keys = raw_keys.squeeze(2)

    def scores(of_samples: Tensor, slots: slice, keys: Tensor) -> Tensor:
        found = torch.matmul(of_samples[:, slots], keys.float().unsqueeze(1).transpose(2, 3))
        return torch.relu(found).sum(dim=2) / math.sqrt(dim)

    parts = _rows_of(sharding, size, True)
    gathered = [rows.gather(raw_keys[samples]) for samples, rows in parts]
    pooled = [tokens.float().mean(dim=2).to(raw_keys.dtype) for tokens, _ in gathered]
    # One call for all samples: at ZeRO 3 every rank must call a module as often as the others.
    normed = indexer.k_layernorm(torch.cat([x.flatten(0, 1) for x in pooled]))
    normed = normed.split([x.shape[0] * x.shape[1] for x in pooled])
    found = []
    for (samples, rows), (_, slots), pools, flat in zip(parts, gathered, pooled, normed, strict=True):
        of_starts = {"cos": cos[samples][:, slots], "sin": sin[samples][:, slots]}
        keys = rotary(flat.view_as(pools).unsqueeze(2), **of_starts, unsqueeze_dim=2).squeeze(2)
        chosen = rows.choose(partial(scores, queries[samples]), indexer.block_topk, keys, size - 1)
        found.append(rows.with_last(chosen))
    return joined(sharding, found)


def minimax_m3(
    indexer: Any, sharding: BatchSharding, hidden_states: Tensor, cos_sin: Sequence[Tensor]
) -> Tensor:
    """Return the tokens [B, H, S, k] that MiniMax M3's indexer selects: local blocks, and the best others.

    The score of a block is that of its best token.
    """
    size, local, dim = indexer.block_size, indexer.local_blocks, indexer.head_dim
    if not 1 <= local <= indexer.topk_blocks:
        raise RingConfigError(
            f"{type(indexer).__name__}: expected index_local_blocks from 1 to index_topk_blocks"
            f" ({indexer.topk_blocks}), got {local}: without its own block among them, a query scores a part"
            " of it by the tokens before it, which a ring does not; set index_local_blocks"
        )
    queries = indexer.q_norm(indexer.q_proj(hidden_states).unflatten(2, (-1, dim))).transpose(1, 2)
    keys = indexer.k_norm(indexer.k_proj(hidden_states).unflatten(2, (-1, dim))).transpose(1, 2)
    queries, keys = _rotary(indexer)(queries, keys, *(x[..., :dim] for x in cos_sin))
    keys = keys.squeeze(1)  # [B, S, D]

    def scores(of_samples: Tensor, slots: slice, tokens: Tensor) -> Tensor:
        found = [
            torch.matmul(of_samples[:, :, slots], part.float().flatten(1, 2).unsqueeze(1).mT)
            .unflatten(3, (-1, size))
            .amax(dim=4)
            for part in tokens.split(max(1, SCORED // size), dim=1)
        ]
        return torch.cat(found, dim=3)

    found = []
    for samples, rows in _rows_of(sharding, size, False):
        of_samples = queries[samples].float()
        firsts = rows.local(local, keys.device)
        chosen = rows.expand(firsts).expand(*of_samples.shape[:2], -1, -1)
        if indexer.topk_blocks > local:
            others, _ = rows.gather(keys[samples])
            count = indexer.topk_blocks - local
            best = rows.choose(partial(scores, of_samples), count, others, local * size)
            chosen = torch.cat([chosen, best], dim=3)
        found.append(chosen)
    return joined(sharding, found)


def glm5(indexer: Any, sharding: BatchSharding, hidden_states: Tensor, q_resid: Tensor) -> Tensor:
    """Return the tokens [B, S, k] that GLM-5.3's indexer selects: of whole blocks, and of a query's last one.

    Keys of blocks are averages of their tokens' keys with learned weights.
    """
    size, dim, heads = indexer.index_kpool, indexer.head_dim, indexer.n_heads
    queries = indexer.wq_b(q_resid).unflatten(2, (-1, dim)).float()
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float() * heads**-0.5
    gates = nn.functional.linear(hidden_states, indexer.index_kpool_compress_gate)
    both = torch.cat([indexer.k_norm(indexer.wk(hidden_states)), gates], dim=-1)

    def scores(samples: Any, slots: slice, keys: Tensor) -> Tensor:
        products = torch.matmul(queries[samples][:, slots], keys.float().unsqueeze(1).transpose(2, 3))
        of_heads = torch.relu(products * indexer.softmax_scale)
        return torch.matmul(weights[samples][:, slots].unsqueeze(2), of_heads).squeeze(2)

    found = []
    for samples, rows in _rows_of(sharding, size, True):
        keys, gates = rows.gather(both[samples])[0].split(dim, dim=-1)
        shares = (gates.float() + indexer.index_kpool_compress_ape.float()).softmax(dim=2).to(keys.dtype)
        pooled, count = (shares * keys).sum(dim=2), indexer.index_topk // size
        chosen = rows.choose(partial(scores, samples), count, pooled, size - 1)
        found.append(rows.with_last(chosen) if indexer.index_kpool_always_select_tail else chosen)
    return joined(sharding, found)


# By the class of an indexer.
_INDEXERS: dict[str, Callable[..., Tensor]] = {
    "Qwen4ExpTextQSAIndexer": qwen4,
    "MiniMaxM3VLIndexer": minimax_m3,
    "Glm5NextTextIndexer": glm5,
}


def selects_blocks(module: nn.Module) -> bool:
    """Return whether a layer attends to blocks of keys that its indexer selects."""
    return type(getattr(module, "indexer", None)).__name__ in _INDEXERS


def chosen_mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return, in place of a mask, what the indexer of a layer or of one before it chose (GLM-5.3)."""
    layer: Any = original.__self__  # type: ignore[attr-defined]
    if layer.config._attn_implementation != NAME:
        return original(*args, **kwargs)  # engine.ring.off()
    bound = inspect.signature(original).bind(*args, **kwargs)
    return ChosenMask(None, bound.arguments["topk_indices"])


class BlockIndexedLayer:
    """Provide the hook of a layer, and what runs in place of its indexer's forward."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._indexer = layer, layer.indexer
        self._sharding: BatchSharding | None = None
        self._mask: LayerMask | None = None
        self.layer = SimpleNamespace(before_forward=self._note)
        self.indexer = SimpleNamespace(around_forward=self._choose)

    def _note(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # The layer does not hand the sharding down to the indexer.
        self._sharding = kwargs.get(SHARDING)
        self._mask = next((x for x in (*args, *kwargs.values()) if isinstance(x, LayerMask)), None)
        if _INDEXERS[type(self._indexer).__name__] is not qwen4:
            return args, kwargs

        def told(x: Any) -> Any:
            return ChosenMask(x) if isinstance(x, LayerMask) else x

        return tuple(map(told, args)), {key: told(x) for key, x in kwargs.items()}

    def _choose(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if self._layer.config._attn_implementation != NAME:
            return forward(*args, **kwargs)  # engine.ring.off()
        sharding, name = self._sharding, type(self._indexer).__name__
        if isinstance(sharding, CachedSharding):
            raise _in_generation(name)
        if not isinstance(sharding, BatchSharding) or torch.compiler.is_compiling():
            raise RingPatternError(
                f"{name}: expected the batch's sharding, got {type(sharding).__name__}; call the model"
                " through the engine, not compiled"
            )
        said = self._mask.pattern if self._mask is not None else said_by_call(self._layer, {})
        pattern = pattern_in(self._layer, sharding, said)
        if not isinstance(pattern, Causal):
            raise RingPatternError(
                f"{name}: expected a causal pattern, with or without documents, got {pattern}: the blocks of"
                " a query are those of all tokens of its document before it; leave the pattern out of the"
                " JSON"
            )
        with torch.no_grad():
            # the hidden states, and what else scores are made of
            first, second = [*inspect.signature(forward).bind(*args, **kwargs).arguments.values()][:2]
            return _INDEXERS[name](self._indexer, sharding, first, second)
