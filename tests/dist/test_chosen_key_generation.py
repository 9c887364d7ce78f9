"""`model.generate` of models whose layers choose their keys, on a ring against one process.

Where scores are equal one process chooses by the same order as the ring (`TotalOrder`).
"""

from __future__ import annotations

import pytest

from ds_ring.layers.selection.total_order import TotalOrder
from tests.dist.test_generation import Case, Pool, compare

WAYS = ("greedy", "sampled", "padded on the left", "beams", "in chunks", "one token")
FAMILIES = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text", "doge")
# Not padded: blocks begin in the padding on one process.
BLOCKS = ("greedy", "sampled", "beams", "in chunks, not padded", "one token")
CASES = {
    f"{name} on {size}": Case(size, WAYS, name, alone=TotalOrder) for name in FAMILIES for size in (2, 4)
}
CASES |= {
    f"minimax_m3_vl_text on {size}": Case(size, BLOCKS, "minimax_m3_vl_text", alone=TotalOrder)
    for size in (2, 4)
}


@pytest.mark.night
@pytest.mark.parametrize("name", CASES)
@pytest.mark.day("deepseek_v32 on 2")
def test_tokens_and_logits_are_those_of_one_process(rank_pool: Pool, name: str) -> None:
    compare(rank_pool(CASES[name].ring_size), CASES[name], True)
