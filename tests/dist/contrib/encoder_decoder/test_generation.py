"""`model.generate` of encoder-decoders on a ring against one process: tokens, and logits of every step."""

from __future__ import annotations

import pytest

from ds_ring.contrib.encoder_decoder.variant import PAIRS
from tests.dist.test_generation import Case, Pool, compare

WAYS = ("greedy", "sampled", "padded on the right", "padded on the left", "begun", "beams")
SPEECH = {"seamless_m4t", "seamless_m4t_v2"}  # whose generate is of their own
CASES = {
    f"{family} on {size}": Case(size, WAYS, f"{family}/seq2seq-lm")
    for family in PAIRS - SPEECH
    for size in (2, 4)
}


@pytest.mark.night
@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.day("bart on 2")
def test_tokens_and_logits_are_those_of_one_process(rank_pool: Pool, name: str) -> None:
    compare(rank_pool(CASES[name].ring_size), CASES[name], True)
