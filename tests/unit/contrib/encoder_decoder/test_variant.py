"""Refusals of encoder-decoders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from ds_ring.config.section import RingConfig
from ds_ring.contrib.encoder_decoder import variant as encoder_decoder
from ds_ring.errors import RingConfigError, RingShapeError
from tests.refusals import Refusals, refuse
from tests.unit.models.calls import IDS

CONFIG = RingConfig.from_deepspeed({"sequence_parallel_size": 1, "ring_attention": {}})
check_pair: Any = encoder_decoder.check_pair
make_decoder_ids: Any = encoder_decoder.make_decoder_ids


class ReadsSound(nn.Module):
    def forward(self, input_features: Any) -> None: ...


class PairForSequenceClassification(nn.Module):
    base_model = nn.Linear(1, 1)

    def forward(self, decoder_input_ids: Any) -> None: ...


class PairWithoutShift(nn.Module):
    config = SimpleNamespace(pad_token_id=0, decoder_start_token_id=0)

    def forward(self, decoder_input_ids: Any) -> None: ...


class Pair(nn.Module):
    def __init__(self, model_type: str, main_input_name: str = "input_ids") -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True, model_type=model_type)
        self.main_input_name = main_input_name

    def forward(self, input_ids: Any) -> None: ...


def attach(*names: str) -> None:
    pair: Any = Pair(*names)
    encoder_decoder.EncoderDecoder().refuse(pair, SimpleNamespace(is_outermost=True))  # type: ignore[arg-type]


CASES: Refusals = {
    "another input": (
        lambda: attach("whisper", "input_features"),
        RingConfigError,
        "it is an encoder-decoder, and its encoder reads input_features and not tokens; use BART",
    ),
    "windows of an encoder": (
        lambda: attach("led"), RingConfigError, "its encoder attends within windows that it cuts out"
    ),
    "an unknown type": (
        lambda: attach("novel"), RingConfigError, "no test compares it with one process"
    ),
    "sound": (
        lambda: check_pair(ReadsSound(), CONFIG), RingConfigError, "a class that reads sound"
    ),
    "a pair's pooled head": (
        lambda: check_pair(PairForSequenceClassification(), CONFIG),
        RingConfigError,
        "its head pools tokens",
    ),
    "a pair that does not shift": (
        lambda: make_decoder_ids(PairWithoutShift())(IDS),
        RingShapeError,
        "expected decoder_input_ids beside labels",
    ),
}  # fmt: skip


test_it_is_refused = refuse(CASES)
