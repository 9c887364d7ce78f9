"""Refusals of learned keys of distances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers

from ds_ring.contrib.families.relative_keys import layers as relative_keys
from ds_ring.errors import RingConfigError
from ds_ring.models import checks
from ds_ring.models.attach import attach
from tests.refusals import refuse
from tests.sessions import session_of
from tests.unit.models.calls import IDS, REQUEST, check_alone

VARIANT = relative_keys.RelativeKeys()
SIZES = {"vocab_size": 61, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "dropout": 0.0}


def xlnet(**changes: Any) -> Any:
    return transformers.XLNetLMHeadModel(transformers.XLNetConfig(**SIZES, **changes))


def called(**inputs: Any) -> Any:
    model, session = xlnet(), session_of(pattern={"causal": False, "documents": True})
    attach(model, session)
    return model(**session.shard_batch({"input_ids": IDS}), **inputs)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "the backend": (
        lambda: checks.check_class(xlnet(), replace(REQUEST, as_is=True)), "its layers have learned keys"
    ),
    "two directions": (lambda: checks.check_class(xlnet(bi_data=True), REQUEST), "config.bi_data"),
    "memories of one length": (
        lambda: checks.check_class(xlnet(same_length=True), REQUEST), "config.same_length"
    ),
    **{
        name: (lambda name=name: called(**{name: torch.zeros(2, 4)}), f"leave {name} out of the batch")
        for name in ("perm_mask", "target_mapping", "token_type_ids", "input_mask")
    },
    "attentions": (lambda: called(output_attentions=True), "output_attentions: expected False"),
}  # fmt: skip


test_it_is_refused = refuse({name: (call, RingConfigError, words) for name, (call, words) in CASES.items()})


def test_layers_are_found_and_do_not_generate() -> None:
    model = xlnet()
    parts = [part for layer in model.transformer.layer for part in (layer, layer.rel_attn)]
    assert VARIANT.apart(model) == parts
    assert "which no pass over a cache adds" in str(VARIANT.refuse_generation(model))
    assert VARIANT.refuse_generation(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=0))) is None


def test_without_a_ring_it_is_the_own_attention() -> None:
    check_alone(xlnet(), {"causal": False, "documents": True})
