"""A prompt of the model's own: its layout, its pattern, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ds_ring.config.section import RingConfig
from ds_ring.contrib.families.prompt import layers as prompt
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.masks.pattern import QueryHead
from ds_ring.models import checks
from ds_ring.models.attach import attach
from ds_ring.schedule.layout import make_layout
from tests.refusals import Refusals, refuse
from tests.sessions import session_of
from tests.unit.models.calls import IDS, REQUEST, check_alone

VARIANT = prompt.LearnedPrompt()
ULYSSES = replace(REQUEST, config=RingConfig(ring_size=1, ulysses_size=2))


def cpm_ant() -> Any:
    config = transformers.CpmAntConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, dim_head=16, dim_ff=32,
        prompt_length=3, prompt_types=4,
    )  # fmt: skip
    return transformers.CpmAntForCausalLM(config)


def called(documents: bool = True, ids: Any = IDS, batch: Any = None, **inputs: Any) -> Any:
    model, session = cpm_ant(), session_of(pattern={"causal": False, "documents": documents})
    attach(model, session)
    return model(**session.shard_batch({"input_ids": ids} | (batch or {})), **inputs)


CASES: Refusals = {
    "the backend": (
        lambda: checks.check_class(cpm_ant(), replace(REQUEST, as_is=True)), RingConfigError, "puts a prompt"
    ),
    "Ulysses": (lambda: checks.check_class(cpm_ant(), ULYSSES), RingConfigError, "leave ulysses_size out"),
    "outputs of layers": (lambda: called(output_hidden_states=True), RingConfigError, "logits alone"),
    "padding": (lambda: called(ids=IDS.tril()), RingPatternError, "documents, or padding"),
    "padding beside numbers": (
        lambda: called(ids=IDS.tril(), batch={"position_ids": torch.arange(4).expand(2, -1)}),
        RingPatternError,
        "documents, or padding",
    ),
    "documents": (
        lambda: called(batch={"document_ids": torch.tensor([[0, 0, 1, 1]] * 2)}),
        RingPatternError,
        "documents, or padding",
    ),
}  # fmt: skip


test_it_is_refused = refuse(CASES)


@pytest.mark.parametrize("name", ["striped", "zigzag"])
def test_the_prompt_is_in_front_of_the_tokens_of_rank_0(name: str) -> None:
    base = make_layout(name, tokens=11, ring_size=2)
    layout = prompt.PromptedLayout.before(base, 3)
    real = [layout.positions(rank)[: layout.valid_tokens(rank)] for rank in range(2)]
    assert real[0][:3].tolist() == [0, 1, 2]
    for rank, local in enumerate((real[0][3:], real[1])):
        assert np.array_equal(local - 3, base.positions(rank)[: base.valid_tokens(rank)])
    assert sorted(np.concatenate(real).tolist()) == list(range(14))
    assert str(layout).endswith(f"a prompt before the {base}")


@pytest.mark.parametrize("crosses", [False, True])
def test_each_pair_is_within_a_part_or_of_both(crosses: bool) -> None:
    positions = np.arange(7)
    seen = np.zeros((7, 7), dtype=int)
    for branch in prompt.Parts(3, crosses).branches(QueryHead()):
        q, k = branch.labels(positions, positions)
        seen += (q[:, None] == k) & (q[:, None] >= 0)
    is_prompt = positions < 3
    assert np.array_equal(seen, (is_prompt[:, None] != is_prompt) == crosses)


def test_it_does_not_generate_and_is_its_own_without_a_ring() -> None:
    model = cpm_ant().double()
    assert "without a prompt" in str(VARIANT.refuse_generation(model))
    check_alone(model, {"causal": False, "documents": True})
