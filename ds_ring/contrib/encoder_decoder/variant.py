"""Encoder-decoders of transformers on a ring: which sequence a module works on, and the loss of all answers.

Owns the variant and the hooks of such models; `batch.py` has their batches ([Note: two sequences]).

The model is given the decoder's sharding, and a hook of its encoder replaces it by the encoder's. A layer of
the decoder whose attention is not causal is cross attention. These models compute a mean over the labels that
they are given. So they are given none, and the loss is computed from their logits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.config.pattern_section import PatternConfig
from ds_ring.config.section import RingConfig, pattern_from_config
from ds_ring.contrib.encoder_decoder.batch import DECODER, Pairs
from ds_ring.data.batch import SHARDING
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.loss import local_loss
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.masks.catalog import Full
from ds_ring.models.checks import (
    THROUGH_SHARD_BATCH,
    cannot_run,
    check_length,
    check_model_call,
    refuse_other_inputs,
)
from ds_ring.models.families import check_outputs
from ds_ring.models.layer_masks import LayerMask
from ds_ring.models.model import TABLE
from ds_ring.models.model_call import ModelCall
from ds_ring.models.variant import (
    TWO_SEQUENCES,
    AttachRequest,
    Variant,
    find_forward_home,
)
from ds_ring.patches import patch
from ds_ring.plugin import PASSES

if TYPE_CHECKING:
    from ds_ring.models.attention_call import AttentionCall
    from ds_ring.models.model_adapter import ModelAdapter

_LABELS = ("labels", "shift_labels", "num_items_in_batch")
# The model types that tests compare with one process: tests/dist/test_families.py.
PAIRS = frozenset(
    """
    bart bigbird_pegasus blenderbot blenderbot-small m2m_100 marian mbart mt5 mvp pegasus plbart seamless_m4t
    seamless_m4t_v2 t5 umt5
    """.split()  # noqa: SIM905
)
# By model type, what another encoder-decoder does with other tokens.
_OTHERWISE = {
    "fsmt": "its attention is written out with tokens before samples, and makes a mask of its own",
    "led": "its encoder attends within windows that it cuts out of the tokens it is given",
    "longt5": "its encoder attends within blocks that it cuts out of the tokens it is given",
    "nllb-moe": "its experts take as many tokens of the sequence as they have room for",
    "pegasus_x": "its encoder attends within blocks that it cuts out of the tokens it is given",
    "prophetnet": "it predicts several tokens ahead, from states that attend by learned bucketed distances",
    "switch_transformers": "its experts take as many tokens of the sequence as they have room for",
}


class EncoderDecoder(Variant):
    """Models with an encoder and a decoder, whose cross attention reads the encoder's sequence."""

    def matches(self, module: nn.Module) -> bool:
        has_two = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
        known = find_forward_home(module).startswith("transformers.models.")
        return (
            bool(has_two)
            and known
            and isinstance(module, PreTrainedModel)
            and module.config.model_type in PAIRS
        )

    def refuse(self, model: PreTrainedModel, request: AttachRequest) -> None:
        if not getattr(model.config, "is_encoder_decoder", False):
            return
        if self.matches(model):
            if request.is_outermost:
                check_pair(model, request.config)
            return
        unknown = "no test compares it with one process"
        if model.main_input_name != "input_ids":
            unknown = f"its encoder reads {model.main_input_name} and not tokens"
        reason = _OTHERWISE.get(model.config.model_type, unknown)
        raise cannot_run(model, f"it is an encoder-decoder, and {reason}; use BART, Marian or T5, say")

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        return {TWO_SEQUENCES} if self.matches(model) and not as_is else set()

    def model_call(self, model: PreTrainedModel) -> type[ModelCall] | None:
        return PairCall if self.matches(model) else None

    def install(self, adapter: ModelAdapter) -> None:
        if self.matches(adapter.model):
            adapter.session.needs.batches = Pairs(make_decoder_ids(adapter.model))
            adapter.apply(give_encoder_sharding(adapter), encoder=adapter.model.get_encoder())

    def read(self, call: AttentionCall) -> None:
        if call.sharding.cross is not None:
            pattern = call.model_pattern()
            if pattern is not None and not pattern.is_causal:
                call.sharding = call.sharding.cross  # the decoder's own attention is causal

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        if not self.matches(model):
            return None
        return "expected a model of one sequence, got an encoder-decoder, which trains on a ring alone"


def check_pair(model: PreTrainedModel, config: RingConfig) -> None:
    """Refuse a class, its settings or a section that a ring of two sequences does not compute.

    Raises:
        RingConfigError, RingPatternError: with the reason.
    """
    name, parameters = type(model).__name__, inspect.signature(model.forward).parameters
    if "decoder_input_ids" not in parameters or "input_features" in parameters:
        got = "got a class that reads sound, or has one of the two parts"
        raise cannot_run(model, f"expected a class for conditional generation that reads tokens, {got}")
    if name.endswith(("ForSequenceClassification", "ForQuestionAnswering")):
        advice = "with a head of your own on engine.ring.gather(output.last_hidden_state)"
        base = type(model.base_model).__name__
        raise cannot_run(model, f"its head pools tokens, or normalizes over them; take {base}, {advice}")
    if config.pattern != PatternConfig():
        documents = " and documents" if config.pattern.documents else ""
        got = f"got {pattern_from_config(config)}{documents}"
        raise RingPatternError(f'{name}: expected the plain causal pattern, {got}; leave "pattern" out')
    arguments = {
        '"attention": "as_is"': config.attention == "as_is",
        '"dynamic_ring": true': config.get("dynamic_ring"),
        '"verify_first_batch": true': config.get("verify_first_batch"),
        '"long_sequence"': config.changes_models,
        f'"transport": "{config.transport}" on Ulysses ranks': config.ulysses_size > 1
        and PASSES[config.transport].whole_blocks,
    }
    for key, applies in arguments.items():
        if applies:
            raise RingConfigError(f"{name}: expected a section without {key}, got it; leave it out")


def make_decoder_ids(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return how the model makes decoder_input_ids of labels, of whole sequences [B, D]."""
    module, config = sys.modules[type(model).__module__], model.config

    def shifted(labels_BD: Tensor) -> Tensor:
        takes_labels = "labels" in inspect.signature(model.forward).parameters
        if not takes_labels or not hasattr(module, "shift_tokens_right"):
            raise RingShapeError("batch: expected decoder_input_ids beside labels, got none; add them")
        ids: Tensor = module.shift_tokens_right(labels_BD, config.pad_token_id, config.decoder_start_token_id)
        return ids

    prepare: Callable[[Tensor], Tensor] = getattr(model, "prepare_decoder_input_ids_from_labels", shifted)
    return prepare


_encoder_patch = patch(
    TABLE.given("encoder", "transformers.modeling_utils.PreTrainedModel"), stage="before_forward",
    feature="two sequences", reason="passes the sharding of the encoder's sequence",
    when="the model is an encoder-decoder",
)  # fmt: skip


def give_encoder_sharding(adapter: ModelAdapter) -> Callable[..., Any]:
    """Return the hook that gives the encoder the sharding of its own sequence in place of the decoder's."""

    @_encoder_patch
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        sharding = kwargs.get(SHARDING)
        if isinstance(sharding, BatchSharding) and sharding.encoder is not None:
            return args, kwargs | {SHARDING: sharding.encoder}
        return None

    return before


class PairCall(ModelCall):
    """Give an encoder-decoder the sharding of its batch, and compute its loss."""

    one_sequence = False

    def start(self) -> None:
        # Of the call under way: position ids by the beginning of their name, and shift_labels with
        # num_items_in_batch.
        self._positions: dict[str, Tensor] = {}
        self._labels: tuple[Tensor, Tensor] | None = None
        self._encoder = {id(module) for module in self.model.get_encoder().modules()}

    def get_sharding(self, module: nn.Module) -> BatchSharding:
        sharding = self.session.batches.current
        if id(module) not in self._encoder:
            return sharding
        assert sharding.encoder is not None
        return sharding.encoder

    def get_mask(self, module: nn.Module) -> LayerMask | None:
        return LayerMask(Full(), self.get_sharding(module))  # only the decoder's own attention has a mask

    def position_ids(self, module: nn.Module) -> Tensor | None:
        return self._positions.get("" if id(module) in self._encoder else DECODER)

    def before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the call; take positions and labels out, and put the sharding in."""
        self._positions = {}
        arguments = dict(self.signature.bind_partial(*args, **kwargs).arguments) | kwargs
        arguments.pop("kwargs", None)
        refuse_other_inputs(self.name, arguments)
        for prefix in ("", DECODER):
            of_one = {key.removeprefix(prefix): x for key, x in arguments.items() if key.startswith(prefix)}
            check_model_call(self.name, of_one)
        self.session.batches.select(x for x in arguments.values() if isinstance(x, Tensor))
        sharding = self.session.batches.current
        assert sharding.encoder is not None
        for prefix, sequence in (("", sharding.encoder), (DECODER, sharding)):
            names = ("input_ids", "inputs_embeds", "position_ids")
            check_length(self.name, {name: arguments.get(prefix + name) for name in names}, sequence)
            self._positions[prefix] = arguments.pop(prefix + "position_ids")
        labels, aligned, items = (arguments.pop(name, None) for name in _LABELS)
        if labels is not None and (aligned is None or items is None):
            expected = "expected shift_labels and num_items_in_batch beside labels, got labels alone"
            raise RingShapeError(f"{self.name}: {expected}; {THROUGH_SHARD_BATCH}")
        self._labels = None if aligned is None or items is None else (aligned, items)
        return (), arguments | {"use_cache": False, SHARDING: sharding}

    def after(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Check the output; put this rank's part of the mean over all labels in."""
        for part in self.adapter.parts:
            if part.sharding is not None:
                part.after(output)
                return
        of_encoder = ("encoder_last_hidden_state",)
        check_outputs(self.model, output, self.session.batches.current.local_tokens, of_encoder)
        if self._labels is not None and getattr(output, "logits", None) is not None:
            output["loss"] = local_loss(output.logits, *self._labels)
