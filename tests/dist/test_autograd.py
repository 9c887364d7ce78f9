"""Gradients of every operator, asked for in every way that autograd has: equal to one process, or refused."""

from __future__ import annotations

import pytest

from tests.dist.autograd_rounds import MODES, play
from tests.dist.harness import Pool
from tests.operator_table import OPERATORS

FEW = ["ring_attention", "gather_sequence", "halo", "ring_scan", "sharded_rows"]


@pytest.mark.situation("autograd", "asked for gradients of each operator in each way that autograd has")
@pytest.mark.parametrize("names", [FEW, list(OPERATORS)], ids=["few", "all"])
@pytest.mark.parametrize(("world_size", "ulysses"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.day("2-1-few")
def test_each_way_to_a_gradient_is_exact_or_refused(
    rank_pool: Pool, world_size: int, ulysses: int, names: list[str]
) -> None:
    result = play(rank_pool(world_size), names, list(MODES), ulysses, timeout_s=600)
    wrong = {case: said for case, said in result.items() if said not in ("equal", "refused")}
    assert result and not wrong, wrong
    # Only what no single process does, or what has no rule, is refused.
    always = [case for case, said in result.items() if case[1] in MODES_OF_ALL and said == "refused"]
    assert not always, always


MODES_OF_ALL = (
    "backward", "grad", "backward(inputs=[one])", "some inputs", "twice", "reentrant", "non-reentrant",
    "two lengths",
)  # fmt: skip
