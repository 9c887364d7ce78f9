"""Attention to a window and to compressed entries, in transformers models: DeepSeek V4.

A layer of V4 has a compressor, which makes one entry of every `rate` tokens. A query attends to the tokens of
its window and to entries: to all that are complete ("heavily compressed"), or to those that an indexer
selects ("compressed sparse"). All of them are in one softmax, with a sink for each head.

On a ring, compressor and indexer run as they are, with their projections, norms, rotary embedding and
formulas. They are given an object in place of a cache (`_LocalWindows`), which hands them the windows whose
entries this rank has, with their places in their documents. Tokens before a run come from their owners
(`halo`). In "compressed sparse" layers an entry has a part of the window before its own, too. The attention
function gets the tokens' keys followed by this rank's entries, and merges two parts by their log-sum-exps:
the ring's attention to the window, and attention to the entries of all ranks.

Windows begin with each document of a packed row, as they do in a row of its own (windows.py), and no query
sees an entry of another document. Samples with different documents are attended to one set after the other.

[Note: queries by their place in a window]
Query b * rate + r sees the entries before b; with r = rate - 1 it sees entry b, too. So entries are a
sequence of their own, with a slot for each fragment of a window. Queries with one r are queries of that
sequence, one for each fragment. All heads and all r are query heads of one causal pass, which share the one
K/V head of the entries. Entry b of the last r is on the query's own rank, and is merged there.

Shapes: B samples, b samples with the same documents, H query heads, S local tokens, n local entries, D head
dim, k chosen entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.comm.device_tables import leave_inference_mode, on_device
from ds_ring.config.pattern_section import PatternConfig
from ds_ring.config.section import RingConfig, pattern_from_config
from ds_ring.contrib.families.compressed.windows import Windows
from ds_ring.data.batch import SHARDING
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.packing import refuse_trees
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.layers.parts import merged
from ds_ring.layers.scan.context import scan_context
from ds_ring.layers.scan.halo import halo_op
from ds_ring.layers.scan.recurrence import padded
from ds_ring.layers.selection.attention import selected_attention
from ds_ring.layers.selection.select import ring_select
from ds_ring.layers.selection.total_order import TotalOrder
from ds_ring.masks.pattern import Pattern
from ds_ring.models.attention_name import NAME
from ds_ring.models.model import TABLE
from ds_ring.models.rows import in_order
from ds_ring.models.variant import STATE, AttachRequest, Variant
from ds_ring.ops.eager import run_compared
from ds_ring.patches import patch
from ds_ring.patterns.documents.pattern import Documents

if TYPE_CHECKING:
    from ds_ring.models.attention_call import AttentionCall
    from ds_ring.models.model_adapter import ModelAdapter

_patch = partial(
    patch, feature="compressed entries", when="a layer attends to compressed entries (DeepSeek V4)"
)
_MODULE = "torch.nn.Module"

# By the class of a compressor: whether an entry has a part of the window before its own, and is selected.
_COMPRESSORS = {"DeepseekV4HCACompressor": False, "DeepseekV4CSACompressor": True}


class CompressedAttention(Variant):
    """Layers that attend to a window and to compressed entries."""

    def matches(self, module: nn.Module) -> bool:
        return type(getattr(module, "compressor", None)).__name__ in _COMPRESSORS

    def refuse(self, model: PreTrainedModel, request: AttachRequest) -> None:
        if any(map(self.matches, model.modules())):
            check_section(model, request.config)

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        if as_is or not any(map(self.matches, model.modules())):
            return set()
        # transformers calls the model stateful for the sake of keys that its cache compresses.
        return {STATE, "compressed_sparse_attention", "heavily_compressed_attention"}

    def positioned(self, model: PreTrainedModel) -> Iterator[nn.Module]:
        for module in filter(self.matches, model.modules()):
            yield from module.compressor.modules()  # type: ignore[union-attr]

    def install_on(self, module: nn.Module, adapter: ModelAdapter) -> None:
        compressor: Any = module.compressor
        objects = {"compressing": module, "compressor": compressor}
        if hasattr(compressor, "indexer"):
            objects["scorer"] = compressor.indexer.scorer
            adapter.gather_once(compressor.indexer.scorer)
            adapter.session.needs.one_process = TotalOrder
        adapter.apply(CompressedEntries(module), **objects)

    def read(self, call: AttentionCall) -> None:
        entries = find_entries(call.module)
        if entries is None:
            return
        if call.softcap is not None or call.score_mod is not None:
            raise RingConfigError.wrong(
                call.name, "no softcap or score_mod with entries", "one", "set it to None"
            )
        # Keys are those of the tokens, followed by this rank's entries.
        call.taken["entries"] = entries, call.k_BGSD
        call.k_BGSD = call.v_BGSE = call.k_BGSD[:, :, : call.q_BHSD.shape[2]]

    def attend(self, call: AttentionCall) -> Tensor | None:
        if "entries" not in call.taken:
            return None
        entries, kv = call.taken["entries"]
        out: Tensor = entries.attend(call.q_BHSD, kv, call.sharding, call.pattern, call.scale, call.sinks)
        return out

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        if not any(map(self.matches, model.modules())):
            return None
        return (
            "expected attention to tokens alone, got layers that attend to compressed entries, which a ring's"
            " cache lacks"
        )


def check_section(model: nn.Module, config: RingConfig) -> None:
    """Refuse a section with which compressed entries are not defined, or not computed on a ring.

    Raises:
        RingConfigError, RingPatternError: with the key.
    """
    name = type(model).__name__
    if config.pattern != PatternConfig(documents=config.pattern.documents):
        raise RingPatternError.wrong(
            name, "the plain causal pattern", str(pattern_from_config(config)), 'leave "pattern" out'
        )
    if config.layout not in ("auto", "contiguous", "zigzag", "balanced", "document_zigzag"):
        raise RingConfigError.wrong(
            f"{name}: layout", "shards of consecutive tokens", f'"{config.layout}"', 'use "zigzag"'
        )
    if config.ulysses_size > 1:
        raise RingConfigError.wrong(
            f"{name}: ulysses_size",
            "1, since it has one key head",
            config.ulysses_size,
            "use a ring: by heads each rank needs the key of every token, in place of one entry for a window",
        )


class _Rows:
    """The windows and entries of samples that have the same documents, on this rank.

    Attributes:
        samples: numbers of the samples; none for all of the batch.
        slots: of the entries on each rank, n.
        sharding: of the fragments, whose slots those of the entries are; None if no document has an entry.
        before, until: which fragments attend to which entries: without, and with, a fragment's own.
        windows: number of a sample's windows that the compressor takes, m.
        first: position in its document of the first token of each, less rate * index, int64 [m].
        hidden: whether each stands for what is before a document, bool [m]; begins_documents: if one does.
    """

    def __init__(
        self, sharding: BatchSharding, samples: list[int], documents: Documents | None, rate: int,
        overlaps: bool, device: torch.device,
    ) -> None:  # fmt: skip
        windows, rank = Windows(sharding.layout, rate, documents), sharding.mesh.ring_rank
        self.samples, self.sharding = samples, None
        if windows.layout is not None:
            self.sharding = BatchSharding(sharding.config, windows.layout, sharding.mesh, sharding.patterns)
            self.before, self.until = windows.pattern(1), windows.pattern(0)
        places, sources = windows.places(rank), windows.sources(rank, overlaps)
        self._tokens, self._places, self._tokens_of_windows, self._own = (
            on_device(x.reshape(-1), device)
            for x in (places.tokens, places.places, sources.tokens, sources.windows)
        )
        self._outside = on_device(places.outside, device) if places.outside.any() else None
        self.slots, self.rate = len(sources.windows), rate
        self.windows, self._halo = len(sources.tokens), windows.before(overlaps)
        self.hidden, self.begins_documents = on_device(sources.hidden, device), bool(sources.hidden.any())
        self.first = on_device(sources.positions - np.arange(self.windows) * rate, device)
        self._scan = scan_context(sharding.layout, sharding.mesh, None, get_timeout(sharding))

    def take(self, x: Tensor) -> Tensor:
        """Return these samples of a batch."""
        return x[self.samples] if self.samples else x

    def by_place(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens in `dim` of x by their place in a window: S -> rate, n."""
        return x.index_select(dim, self._tokens).unflatten(dim, (self.rate, self.slots))

    def by_token(self, x: Tensor, dim: int, none: float) -> Tensor:
        """Return the reverse: rate, n -> S; `none` for tokens whose document has no entry."""
        rows = x.flatten(dim, dim + 1).index_select(dim, self._places)
        if self._outside is None:
            return rows
        return rows.masked_fill(self._outside.view(-1, *[1] * (rows.dim() - 1 - dim)), none)

    def gather_windows(self, x: Tensor) -> Tensor:
        """Return the windows [windows, rate, W] of tokens x [b, S, W], sample by sample."""
        if self._halo:
            operands = (x.contiguous(), 1, self._halo, 0, self._scan.handle)
            beside = run_compared(self._scan.mesh, "compressed keys", halo_op, *operands)
            x = torch.cat([x, beside.flatten(1, 2)], dim=1)
        return x.index_select(1, self._tokens_of_windows).reshape(-1, self.rate, x.shape[2])

    def gather_entries(self, x: Tensor) -> Tensor:
        """Return the entries [b, n, D] of what was computed of each window, [b * m, D]."""
        return x.unflatten(0, (-1, self.windows)).index_select(1, self._own)

    def attend(
        self, q: Tensor, entries: Tensor, chosen: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return (out [b, H, S, D], lse [b, H, S]) of attention to entries; lse -inf where a query sees none.

        Args:
            q: [b, H, S, D].
            entries: this rank's, [b, 1, n or more, D]; keys and values.
            chosen: fragments whose entries each query attends to, int64 [b, S, k]; None for all entries.
            scale: factor of the scores; None is 1 / sqrt(D).
        """
        blocks = self.sharding
        if blocks is None:  # every rank has a gradient of the compressor
            out = torch.zeros_like(q) + entries.flatten()[:0].sum()
            return out, out.new_full(
                out.shape[:3], -torch.inf, dtype=torch.promote_types(out.dtype, torch.float32)
            )
        entries = entries[:, :, : self.slots].contiguous()
        if chosen is None:
            return self._attend_to_all(q, entries, blocks.attention(scale, self.before), scale)
        result: tuple[Tensor, Tensor] = selected_attention(
            q, entries, entries, chosen, layout=blocks.layout, mesh=blocks.mesh, scale=scale,
            return_lse=True, hop_timeout_s=get_timeout(blocks),
        )  # fmt: skip
        return result

    def _attend_to_all(
        self, q: Tensor, entries: Tensor, before: Callable[..., Any], scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to all entries that are complete; see [Note: queries by their place in a window]."""
        scale = q.shape[3] ** -0.5 if scale is None else scale
        by_place, heads = self.by_place(q, 2), q.shape[1]  # [b, H, rate, n, D]
        out, lse = before(by_place.flatten(1, 2), entries, entries, return_lse=True)
        out, lse = out.unflatten(1, (heads, self.rate)), lse.unflatten(1, (heads, self.rate))
        own_lse = (by_place[:, :, -1].to(lse.dtype) * entries.to(lse.dtype)).sum(-1) * scale  # [b, H, n]
        last, last_lse = merged((out[:, :, -1], lse[:, :, -1]), (entries, own_lse))
        out = torch.cat([out[:, :, :-1], last.unsqueeze(2)], dim=2)
        lse = torch.cat([lse[:, :, :-1], last_lse.unsqueeze(2)], dim=2)
        return self.by_token(out, 2, 0.0), self.by_token(lse, 2, -torch.inf)

    def choose(self, scores: Callable[[int, slice, Tensor], Tensor], k: int, keys: Tensor) -> Tensor | None:
        """Return the fragments whose entries each query chooses, int64 [b, S, k]; None without entries.

        Args:
            scores: called with a place, a slice of fragments and keys; returns [b, fragments, keys].
            k: entries that a query chooses at most.
            keys: this rank's, [b, n or more, D].
        """
        blocks = self.sharding
        if blocks is None:
            return None
        keys = keys[:, : self.slots].contiguous()

        def by_places(pattern: Pattern, places: range) -> Tensor:
            def score_rows(rows: slice, others: Tensor) -> Tensor:
                return torch.stack([scores(place, rows, others) for place in places], dim=1)

            return ring_select(
                score_rows, k, keys, layout=blocks.layout, mesh=blocks.mesh, pattern=pattern,
                hop_timeout_s=get_timeout(blocks),
            )  # fmt: skip

        chosen = [by_places(self.until, range(self.rate - 1, self.rate))]
        if self.rate > 1:
            chosen.insert(0, by_places(self.before, range(self.rate - 1)))
        return self.by_token(torch.cat(chosen, dim=1), 1, -1)


def get_timeout(sharding: BatchSharding) -> float:
    """Return the seconds that a hop may take."""
    return float(sharding.config.hop_timeout_seconds)


def split_rows(sharding: BatchSharding, rate: int, overlaps: bool, device: torch.device) -> list[_Rows]:
    """Return the samples of each set of documents with their windows; made once a batch.

    Raises:
        RingPatternError: the rows are trees, or a document is in several places.
        RingLayoutError: shards that are not consecutive tokens.
    """

    @leave_inference_mode  # saved for later backward passes
    def make() -> list[_Rows]:
        refuse_trees(sharding.groups)
        groups = [(list(group.rows), group.documents) for group in sharding.groups]
        if len(groups) < 2:
            documents = groups[0][1] if groups else None
            return [_Rows(sharding, [], documents, rate, overlaps, device)]
        return [_Rows(sharding, *group, rate, overlaps, device) for group in groups]

    return sharding.cached(("windows", rate, overlaps, device), make)


class _LocalWindows:
    """Stand for a layer's cache: give its compressor, and the indexer in it, the windows of this rank.

    The compressor runs with the tokens of all samples as one: samples may have different documents.

    Args:
        rows: all samples.
        batch: number of samples.
    """

    def __init__(self, rows: list[_Rows], batch: int) -> None:
        self.rows, self.batch = rows, batch
        self._counts = [(len(part.samples) or batch) * part.windows for part in rows]
        self.entries: dict[str, Tensor] = {}  # of the compressor and of its indexer: [B, n, D]

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the windows of this rank's entries, of kv and gate [1, B * S, W], and where they begin.

        Returns:
            kv and gate [1, windows * rate, W] of all samples, and an int64 tensor [windows]: added to
            rate * index, it is the position of a window's first token in its document.
        """
        both = torch.cat([kv, gate], dim=-1).unflatten(1, (self.batch, -1))[0]
        windows = torch.cat(
            [part.gather_windows(part.take(both)) for part in self.rows]
        )  # [windows, rate, 2 W]
        kv, gate = windows.split(kv.shape[-1], dim=-1)
        of_rows = list(zip(self.rows, self._counts, strict=True))
        if any(part.begins_documents for part in self.rows):  # no weight for what is before them
            hidden = torch.cat([part.hidden.repeat(count // part.windows) for part, count in of_rows])
            first, second = gate.chunk(2, dim=-1)
            gate = torch.cat([first.masked_fill(hidden[:, None, None], -torch.inf), second], dim=-1)
        begins, done = [], 0
        for part, count in of_rows:
            index = torch.arange(0, count, part.windows, device=kv.device) + done
            begins.append((part.first - index[:, None] * part.rate).flatten())
            done += count
        return kv.flatten(0, 1)[None], gate.flatten(0, 1)[None], torch.cat(begins)

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        """Return none: windows are in front of those that need them."""
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Keep this rank's entries, and return none, so that no mask of tokens and entries is made."""
        slots = max(part.slots for part in self.rows)
        parts = compressed[0].split(self._counts)
        entries = [padded(part.gather_entries(x), slots, 1) for part, x in zip(self.rows, parts, strict=True)]
        self.entries[name] = in_order(entries, [part.samples for part in self.rows])
        return compressed[:, :0]


class CompressedEntries:
    """Run in place of the forward of a compressor; then attend to its entries.

    Args:
        layer: the attention layer.
    """

    def __init__(self, layer: Any) -> None:
        self._layer, self._own = layer, layer.compressor.forward
        self._overlaps = _COMPRESSORS[type(layer.compressor).__name__]
        self._sharding: BatchSharding | None = None
        self._windows: _LocalWindows | None = None
        self._chosen: list[Tensor | None] | None = None  # by the sets of documents

    @_patch(
        TABLE.given("compressing", _MODULE), stage="before_forward",
        reason="notes the batch's sharding, which the layer does not hand down to its compressor",
    )  # fmt: skip
    def note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the sharding before the layer runs, which does not hand it down to the compressor."""
        self._sharding = kwargs.get(SHARDING)

    @_patch(
        TABLE.given("compressor", _MODULE), "forward", stage="around_forward", kind="replaced",
        reason="calls the original with this rank's windows in place of a cache",
    )  # fmt: skip
    def compress(
        self, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, past_key_values: Any,
        layer_idx: int,
    ) -> Any:  # fmt: skip
        """Return this rank's entries [B, 1, n, D], and no mask."""
        if self._layer.config._attn_implementation != NAME:  # engine.ring.off()
            return self._own(hidden_states, q_residual, position_ids, past_key_values, layer_idx)
        name, sharding = type(self._layer.compressor).__name__, self._sharding
        if past_key_values is not None:
            raise RingConfigError.wrong(name, "a call without a cache", "one", "use engine.ring.off()")
        if not isinstance(sharding, BatchSharding) or torch.compiler.is_compiling():
            raise RingConfigError.wrong(
                name, "the batch's sharding", type(sharding).__name__, "call the engine, uncompiled"
            )
        batch = len(hidden_states)
        windows = _LocalWindows(self._rows(sharding, hidden_states.device), batch)
        self._windows, self._chosen = windows, None
        cache = SimpleNamespace(layers={layer_idx: windows})
        states = hidden_states, q_residual, position_ids.expand(batch, -1)
        try:
            self._own(*(x.flatten(0, 1)[None] for x in states), cache, layer_idx)
        finally:
            self._windows = None
        return windows.entries["compressor"].unsqueeze(1), None

    @_patch(
        TABLE.given("scorer", _MODULE), "forward", stage="around_forward",
        reason="calls the original with the entries of all ranks, shard by shard",
    )  # fmt: skip
    def select(
        self, forward: Callable[..., Tensor], q: Tensor, compressed_kv: Tensor, hidden_states: Tensor
    ) -> Tensor:
        """Choose entries of all ranks; return scores of none. Runs around the scorer's forward."""
        windows = self._windows
        if windows is None:
            return forward(q, compressed_kv, hidden_states)
        keys, k = windows.entries["indexer"].detach(), self._layer.compressor.indexer.index_topk
        of_samples = [x.unflatten(1, (windows.batch, -1))[0] for x in (q, hidden_states)]
        self._chosen = []
        for part in windows.rows:
            queries, states = (part.by_place(part.take(x), 1) for x in of_samples)  # [b, rate, n, ...]

            of_rows = partial(_scores, forward, queries, states)
            self._chosen.append(part.choose(of_rows, k, part.take(keys)))
        return hidden_states.new_zeros((1, q.shape[1], 0))

    def attend(
        self, q: Tensor, kv: Tensor, sharding: BatchSharding, pattern: Pattern | None, scale: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return attention [B, H, S, D] of the layer whose compressor ran last; arguments as of `attend`."""
        chosen, self._chosen = self._chosen, None
        assert self._overlaps == (chosen is not None), "an indexer runs in each compressor that has one"
        return attend(q, kv, sharding, self._rows(sharding, q.device), chosen, pattern, scale, sinks)

    def _rows(self, sharding: BatchSharding, device: torch.device) -> list[_Rows]:
        return split_rows(sharding, self._layer.compressor.compress_rate, self._overlaps, device)


def _scores(
    forward: Callable[..., Tensor], q: Tensor, hidden_states: Tensor, place: int, rows: slice, keys: Tensor
) -> Tensor:
    """Return a scorer's scores of the queries in one place of some windows."""
    return forward(q[:, place, rows], keys, hidden_states[:, place, rows])


def attend(
    q: Tensor, kv: Tensor, sharding: BatchSharding, rows: list[_Rows], chosen: list[Tensor | None] | None,
    pattern: Pattern | None, scale: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return attention [B, H, S, D] to the window of `pattern` and to entries.

    Args:
        q: [B, H, S, D].
        kv: this rank's tokens followed by its entries, keys and values alike: [B, 1, S + n, D].
        sharding: of the tokens.
        rows: of `split_rows`.
        chosen: for each of them what `_Rows.choose` returned; None for all complete entries.
        pattern, scale, sinks: see `BatchSharding.attention`.
    """
    tokens = q.shape[2]
    tokens_kv, entries = kv[:, :, :tokens].contiguous(), kv[:, :, tokens:]
    window = sharding.attention(scale, pattern)(q, tokens_kv, tokens_kv, sinks, return_lse=True)
    results = [
        part.attend(part.take(q), part.take(entries), None if chosen is None else chosen[number], scale)
        for number, part in enumerate(rows)
    ]
    out, lse = (in_order(parts, [part.samples for part in rows]) for parts in zip(*results, strict=True))
    return merged(window, (out, lse))[0]


def find_entries(module: nn.Module) -> CompressedEntries | None:
    """Return what runs in place of the compressor of an attention layer; None if it has none."""
    forward = getattr(getattr(module, "compressor", None), "forward", None)
    owner = getattr(forward, "__self__", None)
    return owner if isinstance(owner, CompressedEntries) else None
