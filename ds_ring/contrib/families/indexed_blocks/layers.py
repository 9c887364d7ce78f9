"""Attention to blocks of keys that an indexer selects: Qwen 4, MiniMax M3 and GLM-5.3.

Here is what takes the place of such an indexer's forward on a ring. It computes with the indexer's own
projections, norms and rotary embedding. The tokens of a block may be on two ranks: the block's owner, which
has its first token, gets the others by `halo`. Blocks begin with each document, as they do in a row of
their own. `ring_select` chooses blocks, and attention reads the tokens of these.

transformers computes indexers without a gradient, so there is none here.

Shapes: B samples, S local tokens, T tokens, H heads of an indexer, L tokens of a block, D head dim.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.comm.device_tables import on_device
from ds_ring.data.batch import SHARDING, cache_in
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.layers.selection.block_layout import BlockLayout
from ds_ring.layers.selection.rows import (
    CHOOSES,
    attend_to_chosen,
    joined,
    layers_with_indexers,
)
from ds_ring.layers.selection.select import ScoresFunction, ring_select
from ds_ring.layers.selection.total_order import TotalOrder
from ds_ring.layers.sparse.blocks import gather_blocks
from ds_ring.masks.catalog import Causal
from ds_ring.models.attention_name import NAME
from ds_ring.models.checks import has_cache, no_sharding
from ds_ring.models.layer_masks import LayerMask, choose_layer_pattern, read_call_pattern
from ds_ring.models.model import TABLE
from ds_ring.models.variant import Variant
from ds_ring.patches import patch
from ds_ring.patterns.documents.pattern import Documents

if TYPE_CHECKING:
    from ds_ring.models.attention_call import AttentionCall
    from ds_ring.models.model_adapter import ModelAdapter

_patch = partial(
    patch, feature="chosen blocks", when="an indexer selects blocks of keys (Qwen 4, MiniMax M3, GLM-5.3)"
)

SCORED = 2048  # tokens whose scores exist at a time
_blocks = lru_cache(maxsize=64)(BlockLayout.from_tokens)  # the same for all layers and steps


@dataclass(frozen=True)
class ChosenMask:
    """The mask of a layer that applies it to what its indexer returns; then what was chosen, and the mask."""

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
        """Return the tokens of this rank's blocks, and where they begin: `gather_blocks`."""
        timeout = float(self._sharding.config.hop_timeout_seconds)
        return gather_blocks(x, self.blocks, self._sharding.mesh, timeout)

    def choose(self, scores: ScoresFunction, k: int, keys: Tensor, delay: int) -> Tensor:
        """Return the tokens [.., S, k * L] of the k best blocks of each query, -1 for none."""
        sharding = self._sharding
        numbers = ring_select(
            scores, k, keys, layout=self.blocks.of, mesh=sharding.mesh, blocks=self.blocks, delay=delay,
            hop_timeout_s=float(sharding.config.hop_timeout_seconds),
        )  # fmt: skip
        starts = on_device(np.append(self.blocks.starts, -self.size), keys.device)
        return self.expand(starts[numbers])  # number -1 is that of the last entry

    def expand(self, firsts: Tensor) -> Tensor:
        """Return the tokens [.., S, k * L] of blocks that begin at positions [.., S, k].

        A negative position is no block. Tokens after the query are -1, as all tokens of padding.
        """
        tokens = (firsts.unsqueeze(-1) + torch.arange(self.size, device=firsts.device)).flatten(-2)
        last = on_device(np.where(self.is_real, self.positions, -1), firsts.device)
        return tokens.masked_fill_((tokens < 0) | (tokens > last[:, None]), -1)

    def local(self, count: int, device: torch.device) -> Tensor:
        """Return the first positions [S, count] of a query's own block and those before it; -L for none."""
        within = (self.positions - self.begins) // self.size
        number = within[:, None] - np.arange(count)
        firsts = np.where(number >= 0, self.begins[:, None] + number * self.size, -self.size)
        return on_device(firsts, device)

    def with_last(self, chosen: Tensor) -> Tensor:
        """Return chosen tokens [B, S, k] of whole blocks, and those of a query's own block if cut off."""
        # A query that ends its block sees it whole: it was chosen, or not.
        ends_block = (self.positions - self.begins) % self.size == self.size - 1
        hidden = on_device(ends_block[:, None], chosen.device)
        last = self.local(1, chosen.device).masked_fill_(hidden, -self.size)
        return torch.cat([chosen, self.expand(last).expand(len(chosen), -1, -1)], dim=2)


def _split_rows(sharding: BatchSharding, size: int, whole: bool) -> list[tuple[Any, _BlockRows]]:
    """Return the samples of each set of documents, and their blocks."""
    if not sharding.groups:
        return [(slice(None), _BlockRows(sharding, None, size, whole))]
    return [
        (list(group.rows), _BlockRows(sharding, group.documents, size, whole)) for group in sharding.groups
    ]


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
        products = torch.matmul(of_samples[:, slots], keys.float().unsqueeze(1).transpose(2, 3))
        return torch.relu(products).sum(dim=2) / math.sqrt(dim)

    parts = _split_rows(sharding, size, True)
    gathered = [rows.gather(raw_keys[samples]) for samples, rows in parts]
    pooled = [tokens.float().mean(dim=2).to(raw_keys.dtype) for tokens, _ in gathered]
    # One call for all samples: at ZeRO 3 every rank must call a module as often as the others.
    normed = indexer.k_layernorm(torch.cat([x.flatten(0, 1) for x in pooled]))
    normed = normed.split([x.shape[0] * x.shape[1] for x in pooled])
    results = []
    for (samples, rows), (_, slots), pools, flat in zip(parts, gathered, pooled, normed, strict=True):
        of_starts = {"cos": cos[samples][:, slots], "sin": sin[samples][:, slots]}
        keys = rotary(flat.view_as(pools).unsqueeze(2), **of_starts, unsqueeze_dim=2).squeeze(2)
        chosen = rows.choose(partial(scores, queries[samples]), indexer.block_topk, keys, size - 1)
        results.append(rows.with_last(chosen))
    return joined(sharding, results)


def minimax_m3(
    indexer: Any, sharding: BatchSharding, hidden_states: Tensor, cos_sin: Sequence[Tensor]
) -> Tensor:
    """Return the tokens [B, H, S, k] that MiniMax M3's indexer selects: local blocks, and the best others.

    The score of a block is that of its best token.
    """
    size, local = indexer.block_size, indexer.local_blocks
    if not 1 <= local <= indexer.topk_blocks:
        expected = f"expected index_local_blocks from 1 to index_topk_blocks, {indexer.topk_blocks}"
        raise RingConfigError(f"{type(indexer).__name__}: {expected}, got {local}; set index_local_blocks")
    dim = indexer.head_dim
    queries = indexer.q_norm(indexer.q_proj(hidden_states).unflatten(2, (-1, dim))).transpose(1, 2)
    keys = indexer.k_norm(indexer.k_proj(hidden_states).unflatten(2, (-1, dim))).transpose(1, 2)
    queries, keys = _rotary(indexer)(queries, keys, *(x[..., :dim] for x in cos_sin))
    keys = keys.squeeze(1)

    def scores(of_samples: Tensor, slots: slice, tokens: Tensor) -> Tensor:
        products = [
            torch.matmul(of_samples[:, :, slots], part.float().flatten(1, 2).unsqueeze(1).mT)
            .unflatten(3, (-1, size))
            .amax(dim=4)
            for part in tokens.split(max(1, SCORED // size), dim=1)
        ]
        return torch.cat(products, dim=3)

    results = []
    for samples, rows in _split_rows(sharding, size, False):
        of_samples = queries[samples].float()
        firsts = rows.local(local, keys.device)
        chosen = rows.expand(firsts).expand(*of_samples.shape[:2], -1, -1)
        if indexer.topk_blocks > local:
            others, _ = rows.gather(keys[samples])
            count = indexer.topk_blocks - local
            best = rows.choose(partial(scores, of_samples), count, others, local * size)
            chosen = torch.cat([chosen, best], dim=3)
        results.append(chosen)
    return joined(sharding, results)


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
        select_heads = torch.relu(products * indexer.softmax_scale)
        return torch.matmul(weights[samples][:, slots].unsqueeze(2), select_heads).squeeze(2)

    results = []
    for samples, rows in _split_rows(sharding, size, True):
        keys, gates = rows.gather(both[samples])[0].split(dim, dim=-1)
        shares = (gates.float() + indexer.index_kpool_compress_ape.float()).softmax(dim=2).to(keys.dtype)
        pooled, count = (shares * keys).sum(dim=2), indexer.index_topk // size
        chosen = rows.choose(partial(scores, samples), count, pooled, size - 1)
        results.append(rows.with_last(chosen) if indexer.index_kpool_always_select_tail else chosen)
    return joined(sharding, results)


# By the class of an indexer.
_INDEXERS: dict[str, Callable[..., Tensor]] = {
    "Qwen4ExpTextQSAIndexer": qwen4,
    "MiniMaxM3VLIndexer": minimax_m3,
    "Glm5NextTextIndexer": glm5,
}


class IndexedBlocks(Variant):
    """Layers that attend to blocks of keys, which their indexer or that of a layer before them selects."""

    def matches(self, module: nn.Module) -> bool:
        return type(getattr(module, "indexer", None)).__name__ in _INDEXERS

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        indexed = layers_with_indexers(model)
        known = bool(indexed) and all(map(self.matches, indexed))
        return {"indexed_attention", "minimax_m3_sparse"} if known and not as_is else set()

    def install(self, adapter: ModelAdapter) -> None:
        if adapter.rewritten:
            return
        super().install(adapter)
        for module in adapter.model.modules():
            if hasattr(module, "build_attention_mask_from_topk"):
                adapter.apply(make_chosen_mask, masking=module)

    def install_on(self, module: nn.Module, adapter: ModelAdapter) -> None:
        layer = BlockIndexedLayer(module)
        adapter.apply(layer, block_indexed=module, block_indexer=module.indexer)
        adapter.session.needs.one_process = TotalOrder

    def read(self, call: AttentionCall) -> None:
        chosen = call.arguments.pop("block_indices", None)  # of this file, so positions
        if isinstance(call.mask, ChosenMask):
            chosen, call.mask = call.mask.chosen, call.mask.mask
        call.taken["blocks"] = chosen

    def attend(self, call: AttentionCall) -> Tensor | None:
        chosen = call.taken["blocks"]
        return None if chosen is None else attend_to_chosen(call, chosen)

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        return CHOOSES if any(map(self.matches, model.modules())) else None


@patch(
    TABLE.given("masking"), "build_attention_mask_from_topk", stage="around_forward",
    feature="chosen blocks.mask", reason="hands on what was chosen; calls the original without a ring",
    when="the layer makes a mask of chosen keys (GLM-5.3)",
)  # fmt: skip
def make_chosen_mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return, in place of a mask, what the indexer of a layer or of one before it chose (GLM-5.3)."""
    layer: Any = original.__self__  # type: ignore[attr-defined]
    if layer.config._attn_implementation != NAME:
        return original(*args, **kwargs)  # engine.ring.off()
    bound = inspect.signature(original).bind(*args, **kwargs)
    return ChosenMask(None, bound.arguments["topk_indices"])


class BlockIndexedLayer:
    """The hook of a layer, and what runs in place of its indexer's forward."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._indexer = layer, layer.indexer
        self._sharding: BatchSharding | None = None
        self._mask: LayerMask | None = None

    @_patch(
        TABLE.given("block_indexed", "torch.nn.Module"), stage="before_forward",
        reason="notes the batch's sharding and the mask, which the layer does not hand down to its indexer",
    )  # fmt: skip
    def note(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # The layer does not hand the sharding down to the indexer.
        self._sharding = kwargs.get(SHARDING)
        self._mask = next((x for x in (*args, *kwargs.values()) if isinstance(x, LayerMask)), None)
        if _INDEXERS[type(self._indexer).__name__] is not qwen4:
            return args, kwargs

        def with_choice(x: Any) -> Any:
            return ChosenMask(x) if isinstance(x, LayerMask) else x

        return tuple(map(with_choice, args)), {key: with_choice(x) for key, x in kwargs.items()}

    @_patch(
        TABLE.given("block_indexer", "torch.nn.Module"), "forward", stage="around_forward",
        reason="selects from the blocks of all ranks; calls the original without a ring",
    )  # fmt: skip
    def choose(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if self._layer.config._attn_implementation != NAME:
            return forward(*args, **kwargs)  # engine.ring.off()
        sharding, name = self._sharding, type(self._indexer).__name__
        arguments = inspect.signature(forward).bind(*args, **kwargs).arguments
        if cache_in(arguments) is not None:
            raise has_cache(name)
        if not isinstance(sharding, BatchSharding) or torch.compiler.is_compiling():
            raise no_sharding(name, sharding)
        layer_pattern = self._mask.pattern if self._mask is not None else read_call_pattern(self._layer, {})
        pattern = choose_layer_pattern(self._layer, sharding, layer_pattern)
        if not isinstance(pattern, Causal):
            expected = f"expected a causal pattern, with or without documents, got {pattern}"
            raise RingPatternError(f"{name}: {expected}; leave the pattern out of the JSON")
        with torch.no_grad():
            # the hidden states, and what else scores are made of
            first, second = [*arguments.values()][:2]
            return _INDEXERS[name](self._indexer, sharding, first, second)
