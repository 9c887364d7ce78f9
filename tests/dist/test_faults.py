"""One round of every fault of the campaign (`tools/campaign.py fault` has the long one), on real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.campaign import Round, Zygote, play
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
OF_THE_DAY = (
    Round("stop in a small hop", "attention", 0), Round("swapped order", "attention", 0),
    Round("kill before it connects", "attention", 0), Round("kill in a collective of the script", "outside", 0),
    Round("kill in mid 64 MB", "attention", 0),
)  # fmt: skip
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
    assert zygote.run({"world_size": 0, "deadline_s": 1.0}) == [[]]


def check(zygote: Zygote, *rounds: Round) -> None:
    """Play rounds at once."""
    for verdict in play(zygote, *rounds):
        assert not verdict.wrong, verdict.wrong


@pytest.mark.alone
def test_five_jobs_at_once_each_name_their_culprit_in_time(zygote: Zygote) -> None:
    check(zygote, *OF_THE_DAY)


# Each kind in a pass; in a step under DeepSpeed; while the mesh is made, where the others waited for half an hour; outside
# of the ring, where gloo's RuntimeError named nobody; late, where they waited for a key that no document named.
ROUNDS = [
    *(Round(kind, "attention", 0) for kind in (*KINDS, *WHILE_STARTING)),
    *(Round(kind, "deepspeed", 0) for kind in IN_TRAINING),
    *(Round(kind, "outside", stage) for kind, stage in OUTSIDE_THE_RING),
    *(Round(kind, "late", 1) for kind in LATE),
]


@pytest.mark.alone
@pytest.mark.parametrize("fault", ROUNDS, ids=lambda fault: f"{fault.kind}, {fault.mode}")
@pytest.mark.night
def test_every_survivor_names_the_culprit_in_time(zygote: Zygote, fault: Round) -> None:
    check(zygote, fault)
