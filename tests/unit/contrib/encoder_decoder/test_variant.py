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


CASES: Refusals = {
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
