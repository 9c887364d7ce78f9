"""One round of every fault of the campaign (`tools/campaign.py fault` has the long one), on real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.campaign import Zygote, play
from tests.dist.faults import KINDS, LATE, WHILE_STARTING

pytestmark = pytest.mark.slow

# With its ZeRO stage; `tools/campaign.py fault --mode outside` has all kinds at all stages.
OUTSIDE_THE_RING = (
    ("kill in step", 1),
    ("exit(0) in step", 3),
    ("stop in backward's collectives", 2),
    ("kill in save_checkpoint", 3),
    ("kill in a collective of the script", 0),
    ("kill while configurations are compared", 1),
)
IN_TRAINING = (
    "kill in mid 64 MB", "stop in a small hop", "exception", "different hop counts", "different config",
)  # fmt: skip


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """One for all modes, with what the last of them imports."""
    built = Zygote("outside")
    yield built
    built.close()


def test_a_job_without_ranks_ends(zygote: Zygote) -> None:
    """And the imports, which take seconds, are over when tests begin for which the other worker waits."""
    assert zygote.run({"world_size": 0, "deadline_s": 1.0}) == {"exits": []}


@pytest.mark.alone
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.day("kill in mid 64 MB", "stop in a small hop", "swapped order")
def test_every_survivor_names_the_culprit_in_time(zygote: Zygote, kind: str) -> None:
    verdict = play(zygote, kind, "attention", 0)
    assert not verdict.wrong, verdict.wrong


@pytest.mark.alone
@pytest.mark.parametrize("kind", IN_TRAINING)
@pytest.mark.night
def test_in_a_training_step_under_deepspeed_too(zygote: Zygote, kind: str) -> None:
    verdict = play(zygote, kind, "deepspeed", 0)
    assert not verdict.wrong, verdict.wrong


@pytest.mark.alone
@pytest.mark.parametrize("kind", WHILE_STARTING)
@pytest.mark.day("kill before it connects")
def test_a_rank_that_fails_while_the_mesh_is_made_is_named(zygote: Zygote, kind: str) -> None:
    """The others waited there for half an hour."""
    verdict = play(zygote, kind, "attention", 0)
    assert not verdict.wrong, verdict.wrong


@pytest.mark.alone
@pytest.mark.parametrize(("kind", "stage"), OUTSIDE_THE_RING)
@pytest.mark.day("kill in a collective of the script-0")
def test_a_rank_that_fails_outside_the_ring_is_named(zygote: Zygote, kind: str, stage: int) -> None:
    """gloo's RuntimeError named nobody."""
    verdict = play(zygote, kind, "outside", stage)
    assert not verdict.wrong, verdict.wrong


@pytest.mark.night
@pytest.mark.alone
@pytest.mark.parametrize("kind", LATE)
@pytest.mark.day("sleep in the data set")
def test_a_rank_that_is_late_or_leaves_outside_of_a_pass_is_named(zygote: Zygote, kind: str) -> None:
    """The others waited for half an hour, for a key that no document named."""
    verdict = play(zygote, kind, "late", 1)
    assert not verdict.wrong, verdict.wrong
