"""Encoder-decoders of transformers on a ring: which sequence a module works on, and the loss of all answers.

Owns the hooks of such models; `pairs.py` has their batches ([Note: two sequences]).

The model is given the decoder's sharding, and a hook of its encoder replaces it by the encoder's. A layer of
the decoder whose attention is not causal is cross attention (`attention.py`). These models compute a mean
over the labels that they are given. So they are given none, and the loss is computed from their logits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.config.pattern_section import PatternConfig
from ds_ring.config.section import RingConfig, pattern_from_config
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.integrations.deepspeed.batch import SHARDING
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.deepspeed.loss import local_loss
from ds_ring.integrations.deepspeed.pairs import DECODER
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.integrations.transformers.checks import (
    THROUGH_SHARD_BATCH,
    check_length,
    check_model_call,
)
from ds_ring.integrations.transformers.families import check_outputs
from ds_ring.integrations.transformers.written_out import check_inputs, family_of

_LABELS = ("labels", "shift_labels", "num_items_in_batch")


def is_pair(model: PreTrainedModel) -> bool:
    """Return whether a model is an encoder-decoder of `FAMILIES`."""
    return bool(getattr(model.config, "is_encoder_decoder", False)) and family_of(model) is not None


def check_pair(model: PreTrainedModel, config: RingConfig) -> None:
    """Refuse a class, its settings or a section that a ring of two sequences does not compute.

    Raises:
        RingConfigError, RingPatternError: with the reason.
    """
    name, parameters = type(model).__name__, inspect.signature(model.forward).parameters
    if "decoder_input_ids" not in parameters or "input_features" in parameters:
        raise RingConfigError(
            f"{name} cannot run on a ring: expected an encoder-decoder that reads and writes tokens, got a"
            " class that reads sound, or has one of the two parts; use the class for conditional generation"
        )
    if name.endswith(("ForSequenceClassification", "ForQuestionAnswering")):
        raise RingConfigError(
            f"{name} cannot run on a ring: its head pools tokens, or normalizes over them, and a rank has its"
            f" own alone; take {type(model.base_model).__name__} in a module of your own, with a head on"
            " engine.ring.gather(output.last_hidden_state)"
        )
    for key in ("encoder_layerdrop", "decoder_layerdrop"):
        if getattr(model.config, key, 0):
            raise RingConfigError(
                f"{name} cannot run on a ring: config.{key} {getattr(model.config, key)} leaves out layers at"
                " random, and others on each rank; set it to 0"
            )
    if config.pattern != PatternConfig():
        documents = " and documents" if config.pattern.documents else ""
        raise RingPatternError(
            f"{name}: expected the plain causal pattern, got {pattern_from_config(config)}{documents}: an"
            " encoder-decoder says itself who sees whom in its two sequences, and an attention_mask is enough"
            ' for padding; leave "pattern" out of the section'
        )
    given = {
        '"attention": "as_is"': config.attention == "as_is",
        '"dynamic_ring": true': config.dynamic_ring,
        '"verify_first_batch": true': config.verify_first_batch,
        '"long_sequence"': config.long_sequence.any,
        '"rank_speeds": "measured"': config.rank_speeds == "measured",
        '"transport": "reproducible"': config.transport == "reproducible",
    }
    for key, applies in given.items():
        if applies:
            raise RingConfigError(
                f"{name}: expected a section without {key}, got it: it is made for one sequence of tokens,"
                " and an encoder-decoder has two; leave it out"
            )


def decoder_ids_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return how the model makes decoder_input_ids of labels, of whole sequences [B, D]."""
    module, config = sys.modules[type(model).__module__], model.config

    def shifted(labels_BD: Tensor) -> Tensor:
        takes_labels = "labels" in inspect.signature(model.forward).parameters
        if not takes_labels or not hasattr(module, "shift_tokens_right"):
            raise RingShapeError(
                f"batch: expected decoder_input_ids beside labels, got none, and {type(model).__name__} does"
                " not say how it makes them"
            )
        found: Tensor = module.shift_tokens_right(
            labels_BD, config.pad_token_id, config.decoder_start_token_id
        )
        return found

    made: Callable[[Tensor], Tensor] = getattr(model, "prepare_decoder_input_ids_from_labels", shifted)
    return made


def encoder_hook() -> SimpleNamespace:
    """Return the hook that gives the encoder the sharding of its own sequence."""

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        sharding = kwargs.get(SHARDING)
        if not isinstance(sharding, BatchSharding) or sharding.encoder is None:
            return None
        return args, kwargs | {SHARDING: sharding.encoder}

    return SimpleNamespace(before_forward=before)


class PairCall:
    """Give an encoder-decoder the sharding of its batch, and compute its loss."""

    def __init__(self, model: PreTrainedModel, session: RingSession) -> None:
        self._model, self._session = model, session
        self._name, self._signature = type(model).__name__, inspect.signature(model.forward)
        # Of the call under way: position ids by the beginning of their name, and shift_labels with
        # num_items_in_batch.
        self._positions: dict[str, Tensor] = {}
        self._labels: tuple[Tensor, Tensor] | None = None

    def positions(self, of_encoder: bool) -> Callable[[], Tensor | None]:
        """Return what tells a module that numbers tokens those of its sequence."""
        return lambda: self._positions.get("" if of_encoder else DECODER)

    def before_forward(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the call; take positions and labels out, and put the sharding in."""
        given = dict(self._signature.bind_partial(*args, **kwargs).arguments) | kwargs
        given.pop("kwargs", None)
        check_inputs(self._model, given)
        for prefix in ("", DECODER):
            of_one = {key.removeprefix(prefix): x for key, x in given.items() if key.startswith(prefix)}
            check_model_call(self._name, of_one)
        self._session.batches.select(x for x in given.values() if isinstance(x, Tensor))
        sharding = self._session.batches.current
        assert sharding.encoder is not None
        for prefix, one in (("", sharding.encoder), (DECODER, sharding)):
            names = ("input_ids", "inputs_embeds", "position_ids")
            check_length(self._name, {name: given.get(prefix + name) for name in names}, one)
            self._positions[prefix] = given.pop(prefix + "position_ids")
        labels, aligned, items = (given.pop(name, None) for name in _LABELS)
        if labels is not None and (aligned is None or items is None):
            raise RingShapeError(
                f"{self._name}: expected shift_labels and num_items_in_batch beside labels, got labels alone:"
                f" the loss would be a mean over this rank's tokens; {THROUGH_SHARD_BATCH}"
            )
        self._labels = None if aligned is None or items is None else (aligned, items)
        return (), given | {"use_cache": False, SHARDING: sharding}

    def after_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Check the output; put this rank's part of the mean over all labels in."""
        check_outputs(self._model, output, self._session.batches.current.local_tokens)
        if self._labels is not None and getattr(output, "logits", None) is not None:
            output["loss"] = local_loss(output.logits, *self._labels)
