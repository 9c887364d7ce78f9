"""Every public operator and every dtype of torch: right, or refused by a typed error, and the mesh lives.

By day the dtypes that transports or torch's operators lack, by night all (`tools/campaign.py dtype` prints rows).
"""

from __future__ import annotations

import pytest
import torch

import ds_ring
from ds_ring import RingMesh
from tests.dist.dtype_table import DTYPES, Outcome, outcomes, rows_for
from tests.dist.harness import Pool, RankPool, catch_failure
from tests.operator_table import OPERATORS, Place, T

NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
OF_THE_DAY = ("uint16", "float8_e5m2", "complex64")


def bad_cases(
    pool: RankPool, ulysses_size: int, cases: list[tuple[str, str]]
) -> dict[tuple[str, str], set[Outcome]]:
    """The cases that some rank sees as wrong, raw or lost."""
    by_rank = pool.run(outcomes, ulysses_size, cases)
    seen = {case: {item.get(case, Outcome("lost", "no answer")) for item in by_rank} for case in cases}
    return {
        case: result for case, result in seen.items()
        if any(item is not None and item.kind not in ("right", "refused", "caller") for item in result)
    }  # fmt: skip


@pytest.mark.night
@pytest.mark.situation("dtypes", "shards of uint16, float8, bits and other dtypes are copied between ranks")
@pytest.mark.parametrize(("world_size", "ulysses_size"), [(2, 1), (2, 2)])
def test_values_of_all_dtypes_are_copied(rank_pool: Pool, world_size: int, ulysses_size: int) -> None:
    copying = [name for name in rows_for(ulysses_size) if OPERATORS[name].any_dtype]
    cases = [(name, dtype) for name in copying for dtype in NAMES]
    assert bad_cases(rank_pool(world_size), ulysses_size, cases) == {}


@pytest.mark.situation("dtypes", "an operator gets tensors of a dtype that it does not compute with")
def test_other_dtypes_are_right_or_refused(rank_pool: Pool) -> None:
    cases = [(name, dtype) for name in rows_for(1) for dtype in OF_THE_DAY]
    assert bad_cases(rank_pool(2), 1, cases) == {}


@pytest.mark.night
@pytest.mark.parametrize(("world_size", "ulysses_size"), [(2, 1), (2, 2), (3, 1)])
def test_every_operator_and_dtype(rank_pool: Pool, world_size: int, ulysses_size: int) -> None:
    cases = [(name, dtype) for name in rows_for(ulysses_size) for dtype in NAMES]
    assert bad_cases(rank_pool(world_size), ulysses_size, cases) == {}


def one_rank_has_another_dtype(rank: int, world_size: int) -> list[str]:
    """What each call raises: where elements are equally large, where rank 0 alone is wrong; then a right one."""
    place = Place(RingMesh.from_world(world_size))
    x = torch.zeros(2, T // world_size, 3, dtype=(torch.uint16, torch.int16)[rank])
    calls = (
        lambda: ds_ring.halo(x, 1, dim=1, **place.where),
        lambda: ds_ring.gather_sequence(x, place.layout, mesh=place.mesh, dim=1),
        lambda: ds_ring.shift_sequence(x, 1, dim=1, fill=-1 if rank else 70000, **place.where),
        lambda: ds_ring.ngram_rows(x[..., 0].long(), (3, 5 if rank else "five"), ((7,),), **place.where),
        lambda: ds_ring.halo(x.view(torch.int16).long(), 1, dim=1, **place.where).sum(),
    )
    return [catch_failure(call).error for call in calls]


@pytest.mark.situation(
    "dtypes", "one rank alone has another dtype, or an error of its own before anything is sent"
)
def test_one_rank_alone_is_wrong(rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(one_rank_has_another_dtype)
    mismatch = "RingMismatchError"
    assert first == [mismatch, mismatch, "RingShapeError", "ValueError", ""]
    assert second == [*4 * [mismatch], ""]


def lazy_conjugates(rank: int, world_size: int) -> list[bool]:
    place, result = Place(RingMesh.from_world(world_size)), []
    whole = torch.randn(T, 3, dtype=torch.complex64)
    mine = place.grid.shard(whole, 0, rank)
    for lazy, want in ((mine.conj(), whole.conj()), (mine.conj().imag, whole.conj().imag)):
        assert lazy.is_conj() or lazy.is_neg()
        got = ds_ring.gather_sequence(lazy, place.layout, mesh=place.mesh, dim=0)
        result.append(torch.equal(got, want))
    return result


@pytest.mark.situation("dtypes", "gather_sequence of the conjugate of a complex tensor")
def test_lazy_conjugates_are_gathered(rank_pool: Pool) -> None:
    assert rank_pool(2).run(lazy_conjugates) == [[True, True]] * 2
