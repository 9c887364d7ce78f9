"""Prepare and cut the batches of encoder-decoders: two sequences, each with a layout of its own.

Owns what such a batch has: `input_ids` and `attention_mask` of the encoder; the decoder's tensors, whose
names begin with `decoder_`; and labels, which are aligned with the decoder's tokens. Pure: no collective, no
model.

[Note: two sequences]
The encoder's attention is full, the decoder's own is causal, and its cross attention reads the encoder's
sequence. Each of these has a sharding, and the decoder's holds the others (`BatchSharding.encoder`, `cross`).
An attention_mask of the encoder makes its padding a document that sees nothing and is not seen; rows of
different lengths are passes of their own. The decoder's ids are made of labels before they are cut, because
the first token of a shard is the last label of the shard before.

Shapes: B samples, E and D tokens of the encoder and of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.data.batch import (
    LABEL_KEYS,
    Batch,
    prepare_batch,
    split_samples,
    split_tokens,
    token_shape,
    whole_tensors,
)
from ds_ring.data.batch_sharder import BatchSharder
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.data.model_needs import BatchKind
from ds_ring.data.packing import DOCUMENT_IDS, RowGroup, group_rows
from ds_ring.errors import RingPatternError, RingShapeError
from ds_ring.masks.catalog import Causal, Full
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.plugin import ROW_KINDS

DECODER = "decoder_"
FULL = LayerPatterns(Full(), {})


def _two_sequences(batch: Mapping[str, Tensor]) -> tuple[Batch, Batch]:
    """Return the encoder's and the decoder's tensors, labels among them, by the names of one sequence."""
    of_decoder = {key for key in batch if key.startswith(DECODER) or key in LABEL_KEYS}
    encoder = {key: x for key, x in batch.items() if key not in of_decoder}
    return encoder, {key.removeprefix(DECODER): x for key, x in batch.items() if key in of_decoder}


def _one_batch(encoder: Batch, decoder: Batch) -> Batch:
    """Return the batch of the tensors of both: `_two_sequences` reversed."""
    return encoder | {key if key in LABEL_KEYS else DECODER + key: x for key, x in decoder.items()}


class Pairs(BatchKind):
    """Batches of an encoder-decoder: see [Note: two sequences].

    Args:
        decoder_ids: makes decoder_input_ids [B, D] of labels, as the model does.
    """

    name = "an encoder-decoder"

    def __init__(self, decoder_ids: Callable[[Tensor], Tensor]) -> None:
        self._decoder_ids = decoder_ids

    def prepare(self, batch: Mapping[str, Tensor], number: Callable[[Batch], Tensor] | None) -> Batch:
        """Return the batch with everything that looks across token borders done: see `prepare_batch`.

        Args:
            batch: input_ids [B, E] and perhaps attention_mask; labels [B, D], decoder_input_ids [B, D] or
                both.
            number: makes the position ids of a sequence; None: from 0 on.

        Raises:
            RingShapeError: neither labels nor decoder_input_ids, or other numbers of samples.
            RingPatternError: packed documents, or padding in front of the decoder's tokens.
        """
        encoder, decoder = _two_sequences(whole_tensors(batch, frozenset())[0])
        for key in (DOCUMENT_IDS, *ROW_KINDS, "position_ids"):
            if key in encoder or key in decoder:
                raise RingPatternError.wrong(
                    "batch", "samples of one text and one answer", key, "pad samples"
                )
        labels_BD = decoder.pop("labels", None)
        if labels_BD is not None and labels_BD.ndim != 2:
            raise RingShapeError(f"labels: expected [samples, tokens], got {list(labels_BD.shape)}")
        if "input_ids" not in decoder and "inputs_embeds" not in decoder:
            if labels_BD is None:  # what some models make of the text then is not the caller's to guess
                raise RingShapeError(f"batch: expected labels or decoder_input_ids, got {sorted(batch)}")
            decoder["input_ids"] = self._decoder_ids(labels_BD)
        if labels_BD is not None:
            decoder.setdefault("shift_labels", labels_BD)  # aligned as they are
        samples = [token_shape(half)[0] for half in (encoder, decoder)]
        if samples[0] != samples[1]:
            raise RingShapeError(
                f"batch: expected as many samples in both sequences, got {samples[0]} and {samples[1]}"
            )
        halves = prepare_encoder(encoder, number), prepare_batch(decoder, Causal())
        if number is not None:
            halves[1]["position_ids"] = number(halves[1])
        return _one_batch(*halves)

    def cut(self, prepared: Batch, sharder: BatchSharder) -> tuple[Batch, BatchSharding]:
        """Return this rank's part of a prepared batch, and its sharding.

        A batch of which both sequences are short is not cut: each rank takes whole samples.
        """
        encoder, decoder = _two_sequences(prepared)
        tokens, mesh = (token_shape(encoder)[1], token_shape(decoder)[1]), sharder.mesh
        is_short = mesh.sequence_size > 1 and max(tokens) < sharder.config.min_sequence_length
        if is_short:
            place = mesh.sequence_rank, mesh.sequence_size
            encoder, decoder = split_samples(encoder, *place), split_samples(decoder, *place)
            mesh = RingMesh.single()
        ids = encoder.pop(DOCUMENT_IDS, None)
        if ids is None:
            sharding = sharder.kept_by_length(tokens, mesh, lambda: shard_pair(sharder, tokens, mesh))
        else:
            sharding = shard_pair(sharder, tokens, mesh, group_rows(ids, token_shape(encoder)[0]))
        if not is_short:
            assert sharding.encoder is not None
            encoder = split_tokens(encoder, sharding.encoder.layout, mesh)
            decoder = split_tokens(decoder, sharding.layout, mesh)
        return _one_batch(encoder, decoder), sharding


def prepare_encoder(encoder: Batch, number: Callable[[Batch], Tensor] | None) -> Batch:
    """Return the encoder's tensors, prepared: its padding is a document of its own."""
    mask_BE = encoder.get("attention_mask")
    is_padded = mask_BE is not None and not bool(mask_BE.bool().all())
    prepared = prepare_batch(encoder, Full(), documents=is_padded)
    if number is not None:
        prepared["position_ids"] = number({key: x for key, x in prepared.items() if key != DOCUMENT_IDS})
    return prepared


def shard_pair(
    sharder: BatchSharder, tokens: tuple[int, int], mesh: RingMesh, groups: tuple[RowGroup, ...] = ()
) -> BatchSharding:
    """Return the sharding of the decoder's sequence, with those of the encoder and of cross attention.

    Args:
        tokens: E and D.
        mesh: of this batch.
        groups: rows by the padding of the encoder.
    """
    config, layout_for = sharder.config, sharder.layout_for
    of_encoder, layout = layout_for(tokens[0], mesh, groups, FULL), layout_for(tokens[1], mesh)
    crossed = tuple(RowGroup(between(tokens[1], group.documents), group.rows) for group in groups)
    return BatchSharding(
        config, layout, mesh, sharder.patterns,
        encoder=BatchSharding(config, of_encoder, mesh, FULL, groups),
        cross=BatchSharding(config, layout, mesh, FULL, crossed, key_layout=of_encoder),
    )  # fmt: skip


def between(queries: int, keys: Documents) -> Documents:
    """Return the documents of queries that see all tokens of the encoder but padding."""
    ids = np.repeat(keys.ids, np.diff([*keys.starts, keys.tokens]))
    return Documents(np.concatenate([np.zeros(queries, dtype=np.int64), np.where(ids < 0, -1, 0)]))
