"""Refusals of learned terms of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers

from ds_ring.contrib.families.key_terms import layers as key_terms
from ds_ring.data import batch
from ds_ring.errors import RingConfigError
from ds_ring.masks.catalog import Causal
from ds_ring.models import checks, layer_masks
from tests.refusals import Refusals, refuse
from tests.unit.models.calls import REQUEST, attend, cached


def masked(**terms: Any) -> Any:
    return attend(attention_mask=key_terms.TermsMask(None, torch.zeros(1), 1), **terms)


def doge(**settings: Any) -> Any:
    config = transformers.DogeConfig(
        vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        **settings,
    )  # fmt: skip
    return checks.check_class(transformers.DogeForCausalLM(config), replace(REQUEST, as_is=not settings))


CASES: Refusals = {
    "Doge for the backend": (lambda: doge(), RingConfigError, "cannot run on a ring: its layers add learned"),
    "Doge's experts": (lambda: doge(is_moe=True), RingConfigError, "config.is_moe: its router"),
    "terms of other keys": (
        lambda: attend(
            attention_mask=key_terms.TermsMask(layer_masks.LayerMask(Causal()), torch.zeros(1, 2, 3), 1),
            scaling=1.0,
            **{batch.SHARDING: cached()},
        ),
        RingConfigError,
        "expected a call without a cache",
    ),
}  # fmt: skip

COMPILED: Refusals = {
    "terms of keys": (lambda: masked(scaling=1.0), RingConfigError, "adds a term of each key to the scores"),
}  # fmt: skip


test_it_is_refused = refuse(CASES)


test_compiled_code_is_refused = refuse(COMPILED, compiling=True)
