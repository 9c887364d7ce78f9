"""Let `generate` of an encoder-decoder run on the ring: the encoder once, then the decoder token by token.

Owns the shardings of such passes, and the cache of two sequences.

transformers calls the encoder by itself, with whole prompts. A hook of the encoder cuts them, and each rank
keeps the encoder's states of its shard. From these each layer's cross attention makes its keys and values
once. The decoder's first tokens are cut as a prompt is. Cross attention of a later token is a pass of
replicated queries over the encoder's shards.

Shapes: B samples, E tokens of the encoder, D of the decoder so far, Q new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ds_ring.attention_module import RingAttention
from ds_ring.contrib.encoder_decoder.batch import DECODER, FULL, between, prepare_encoder
from ds_ring.data.batch import SHARDING, cache_in, split_tokens, token_shape
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.packing import DOCUMENT_IDS, RowGroup, group_rows, without_padding
from ds_ring.data.session import RingSession
from ds_ring.decode.generation import CachedSharding, Generation
from ds_ring.errors import RingPatternError
from ds_ring.ops.shard import shard_sequence
from ds_ring.plugin import HOOKS, PASSES, load

# For a transport in whole blocks.


@dataclass(frozen=True, eq=False)
class CrossSharding(CachedSharding):
    """The blocks of some queries, which every rank has, and the layout of the encoder's keys."""

    def _make_attention(self, **options: Any) -> RingAttention:
        attention: RingAttention = load(HOOKS["FewCrossQueries"])(
            self.config, mesh=self.mesh, layout=self.layout, key_layout=self.key_layout,
            q_positions=self.q_positions, **options,
        )  # fmt: skip
        return attention


class PairGeneration(Generation):
    """Run the forward passes of `generate` of an encoder-decoder on a ring.

    Attributes:
        positions: ids of this rank's tokens, by the beginning of the name of the sequence's tensors.
    """

    def __init__(self, model: PreTrainedModel, session: RingSession, rewritten: Callable[[], bool]) -> None:
        super().__init__(model, session, rewritten)
        self.positions: dict[str, Tensor] = {}
        self._waits = False  # for the encoder's call
        self._encoder: BatchSharding | None = None
        self._groups_of_keys: tuple[RowGroup, ...] = ()  # rows by the padding of the encoder
        self._seen = 0  # position of a token of the encoder that is no padding in any row

    def new_cache(self) -> Any:
        return EncoderDecoderCache(super().new_cache(), DynamicCache())

    def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        changes = super().start(arguments)
        self._waits = True
        return changes

    def end(self) -> None:
        self._waits = False

    def _faults(self, arguments: dict[str, Any], settings: Any) -> dict[str, bool]:
        mask = arguments.get("decoder_attention_mask")
        return {
            "expected decoder_input_ids without padding, got a mask that hides some": mask is not None
            and not bool(mask.bool().all()),
            "expected a prompt, got encoder_outputs": arguments.get("encoder_outputs") is not None,
        }

    def encode(self, inputs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of the encoder for this rank; None unless `generate` calls it."""
        if not self._waits:
            return None
        self._waits = False
        names = ("input_ids", "inputs_embeds", "attention_mask")
        whole = {name: inputs[name] for name in names if inputs.get(name) is not None}
        prepared = prepare_encoder(whole, self.session.needs.number_tokens)
        ids, (samples, tokens) = prepared.pop(DOCUMENT_IDS, None), token_shape(prepared)
        groups = () if ids is None else group_rows(ids, samples)
        layout = self.session.sharder.layout_for(tokens, self.mesh, groups, FULL)
        local = split_tokens(prepared, layout, self.mesh)
        self.positions[""] = local.pop("position_ids")
        encoder = BatchSharding(self.session.config, layout, self.mesh, FULL, groups)
        self._encoder = encoder
        self.session.batches.work_on(replace(encoder, encoder=encoder))
        return inputs | dict.fromkeys(names) | local | {SHARDING: encoder}

    def before(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        self.sharding = None
        pair = cache_in(arguments)
        if not isinstance(pair, EncoderDecoderCache):
            return None
        ids_BQ, mask_BE = arguments["decoder_input_ids"], arguments.pop("attention_mask", None)
        arguments.pop(DECODER + "attention_mask", None)
        first = pair.get_seq_length()
        if first == 0:
            self._find_rows(mask_BE)
        local = super().before({"input_ids": ids_BQ, self._name: pair.self_attention_cache})
        if local is None:
            return None
        sharding: Any = self.sharding
        self.sharding = replace(sharding, cross=self._cross(sharding), encoder=self._encoder)
        self.session.batches.work_on(self.sharding)
        positions = self._numbered(ids_BQ, first)
        if first == 0:
            positions = shard_sequence(positions, sharding.layout, mesh=self.mesh, dim=1)
        self.positions[DECODER] = positions
        return arguments | {"decoder_input_ids": local["input_ids"]}

    def _find_rows(self, mask_BE: Tensor | None) -> None:
        """Note the rows by the padding of the encoder: beams have as many rows as the decoder's ids.

        Raises:
            RingPatternError: there is no position that has a token in all rows.
        """
        self._groups_of_keys, self._seen = (), 0
        if mask_BE is None or bool(mask_BE.bool().all()):
            return
        ids = without_padding(torch.zeros_like(mask_BE[:1], dtype=torch.int64), mask_BE)
        self._groups_of_keys = group_rows(ids, len(mask_BE))
        of_all = mask_BE.bool().all(dim=0).nonzero()
        if not len(of_all):
            raise RingPatternError.wrong(
                "attention_mask", "prompts padded on one side", "none that has a token in all", "pad them"
            )
        self._seen = int(of_all[0])

    def _cross(self, sharding: BatchSharding) -> BatchSharding:
        """Return the sharding of cross attention of the pass under way."""
        config, mesh, encoder = self.session.config, self.mesh, self._encoder
        assert encoder is not None
        if isinstance(sharding, CachedSharding) and PASSES[config.transport].whole_blocks:
            make = load(HOOKS["make_query_blocks"])
            layout, where = make(sharding.q_positions, mesh.ring_size, config.block_size)
            groups = tuple(
                RowGroup(between(layout.tokens, key_group.documents), key_group.rows)
                for key_group in self._groups_of_keys
            )
            return CrossSharding(
                config, layout, mesh, FULL, groups, key_layout=encoder.layout, q_positions=where
            )
        if isinstance(sharding, CachedSharding):
            where = torch.full_like(sharding.q_positions, self._seen)
            groups = self._groups_of_keys
            return CachedSharding(config, encoder.layout, mesh, FULL, groups, q_positions=where)
        tokens = sharding.layout.tokens
        groups = tuple(
            RowGroup(between(tokens, group.documents), group.rows) for group in self._groups_of_keys
        )
        return BatchSharding(config, sharding.layout, mesh, FULL, groups, key_layout=encoder.layout)

    def _numbered(self, ids_BQ: Tensor, first: int) -> Tensor:
        """Return the position ids [B or 1, Q] of the decoder's tokens, as its model numbers them."""
        positions = torch.arange(first, first + ids_BQ.shape[1], device=ids_BQ.device)[None]
        if self.session.needs.number_tokens is None:
            return positions
        of_tokens = {"input_ids": ids_BQ, "position_ids": positions}
        if first:  # they count on
            of_tokens[DOCUMENT_IDS] = torch.zeros_like(positions)
        return self.session.needs.number_tokens(of_tokens)
