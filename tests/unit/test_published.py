"""Published measurements beside the model: each has a source, steps' seconds hold, a wrong rate is found."""

from __future__ import annotations

import copy
import re
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import yaml
from benchmarks.measuring import ResultRow
from benchmarks.published import (
    FEW_PACKS,
    STAGE_SHARDS,
    compare_with_published,
    model_packed_rows,
    predict,
)
from published.own import Pass, compute_own_pass, count_reads
from published.packs import LONGEST_PART, draw_packs, get_packs
from published.steps import make_published_setting, torch_extra_s
from published.table import ROWS, Table, published, rate_at
from pydantic import ValidationError

from ds_ring import Causal, Documents, make_layout
from ds_ring_launcher.plan.estimate import estimate

SHARE = 0.58  # of all figures within a tenth
PAGE = Path(__file__).resolve().parents[2] / "tools/results/published.md"


def values() -> dict:
    return yaml.safe_load(ROWS.read_text())


def select_seconds(rows: list[ResultRow]) -> list[ResultRow]:
    return [row for row in rows if row.case["quantity"] == "step, seconds"]


@pytest.fixture(scope="module")
def rows() -> list[ResultRow]:
    return list(compare_with_published(published()))


def test_every_name_is_in_the_file_and_every_source_has_a_date() -> None:
    table = published()
    named = {rates.source for kernel in table.kernels.values() for _, rates in kernel if rates is not None}
    named |= {name for machine in table.machines.values() for name in machine.sources}
    named |= {row.source for part in (table.passes, table.steps, table.lengths) for row in part}
    assert named | {table.documents.source} == set(table.sources)
    assert {row.model for part in (table.steps, table.lengths) for row in part} == set(table.models)
    assert {row.kernel for row in table.steps} | {"flash3"} == set(table.kernels)
    assert all(source.date > date(2017, 1, 1) for source in table.sources.values())


def test_figures_are_close_or_say_why(rows: list[ResultRow]) -> None:
    assert [row for row in rows if row.wrong] == []
    assert len(rows) == 21 and len(select_seconds(rows)) == 8
    assert all(row.results["holds"] for row in select_seconds(rows))
    settled = [float(ratio) for ratio in re.findall(r"\((\d\.\d\d)\)", PAGE.read_text())]
    near = sum(abs(ratio - 1) <= 0.1 for ratio in settled) + sum(row.results["holds"] for row in rows)
    assert len(settled) == 108 and near / 129 >= SHARE


@pytest.mark.parametrize(("part", "name"), [("kernels", "cudnn"), ("machines", "h100")])
def test_a_wrong_rate_is_found(part: str, name: str) -> None:
    wrong = values()
    if part == "kernels":
        for rates in wrong[part][name].values():
            rates["full"] = {length: 0.7 * rate for length, rate in rates["full"].items()}
    else:
        wrong[part][name]["memory"] *= 0.1
    seeded = Table.model_validate(wrong | {"lengths": []})
    assert not all(row.results["holds"] for row in select_seconds(list(compare_with_published(seeded))))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows["sources"]["magi"].pop("date"),
        lambda rows: rows["sources"]["magi"].update(link="a blog"),
        lambda rows: rows["passes"][0].update(secret=1),
    ],
    ids=["no date", "no link", "unknown key"],
)
def test_a_row_without_its_source_is_refused(change) -> None:
    wrong = copy.deepcopy(values())
    change(wrong)
    with pytest.raises(ValidationError):
        Table.model_validate(wrong)


def make_pass(ranks: int, lengths: tuple[int, ...] | None = None) -> Pass:
    table = published()
    return Pass(table.machines["h100"], table.kernels["flash3"], ranks, lengths or (ranks * 8192,))


def test_rates_between_lengths() -> None:
    curve = {1024: 100.0, 4096: 300.0}
    assert [rate_at(curve, n) / 1e12 for n in (512, 1024, 2048, 4096, 9999)] == pytest.approx(
        [100, 100, 200, 300, 300]
    )


def test_packs_are_those_of_the_benchmark() -> None:
    documents = published().documents
    for pack in draw_packs(documents, 65536, 50, 3):
        assert sum(pack) == 65536
        assert max(pack) <= 65536 // LONGEST_PART
    # of their own sampler, computed from its seed
    for ranks, keys in {8: 3605, 16: 6379, 32: 9030, 64: 11386}.items():
        packs = get_packs(ranks * 8192)
        assert len(packs) == 20
        mean = np.mean([sum(n * n / 2 for n in pack) for pack in packs]) / (ranks * 8192)
        assert mean == pytest.approx(keys, rel=0.05)


def test_reads_are_those_of_the_mask() -> None:
    lengths = (70, 10, 3, 45)
    ids = np.repeat(np.arange(4), lengths)
    layout = make_layout(
        "balanced", tokens=128, ring_size=4, pattern=Documents(ids) & Causal(), multiple_of=1
    )
    mask = (ids[:, None] == ids[None, :]) & np.tri(128, dtype=bool)
    shards = [layout.positions(rank)[layout.positions(rank) >= 0] for rank in range(4)]
    read = [set(np.flatnonzero(mask[shard].any(axis=0))) - set(shard) for shard in shards]
    assert count_reads(layout, lengths) == np.mean([len(tokens) for tokens in read])


@pytest.mark.parametrize(("ranks", "pack"), [(8, 0), (64, 0)])
def test_our_ring_beside_them(ranks: int, pack: int) -> None:
    """Every exchange of the same tokens is slower than its kernel; the direct one faster than the others."""
    attention = make_pass(ranks, get_packs(8192 * ranks)[pack])
    ring, staged, direct = (compute_own_pass(attention, *way) for way in ((), (STAGE_SHARDS,), (0, "direct")))
    assert 1 <= ring.imbalance < 1.2
    assert ring.reads / ((ranks - 1) * 8192) <= ring.sent <= 1
    for own, slower, more in zip(direct.seconds, staged.seconds, ring.seconds, strict=True):
        assert own < slower <= more
    assert all(own > kernel for own, kernel in zip(direct.seconds, ring.kernel_s, strict=True))
    for own in (ring, direct):
        assert 0 <= own.exposed + own.fixed + own.merging < 1
    assert direct.fixed < ring.fixed


@pytest.mark.night
@pytest.mark.parametrize(("ranks", "least"), [(64, 0.95), (1024, 0.75)])
def test_a_direct_exchange_keeps_the_figures_of_one_node(ranks: int, least: float) -> None:
    first, large = (row.results for row in model_packed_rows(published(), [8, ranks], FEW_PACKS))
    for now, then in zip(large["direct"], first["direct"], strict=True):
        assert now / then > least
    assert all(now / then < 0.9 for now, then in zip(large["staged"], first["staged"], strict=True))
    assert first["ring_kept"] == 1 and large["ring_kept"] < large["staged_kept"] < large["direct_kept"]


def test_torch_adds_little_to_a_long_step() -> None:
    table = published()
    row = table.steps[1]
    extra = torch_extra_s(estimate(make_published_setting(table, row)), table.machines["h100"])
    assert row.seconds is not None and 0.01 < extra / row.seconds < 0.05


def test_ours_is_between_the_peers_and_the_kernel() -> None:
    predictions = list(predict(published()))
    assert [row.case["devices"] for row in predictions[:8]] == [8, 8, 16, 16, 32, 32, 64, 64]
    assert len(predictions) == 15
    for row in predictions:
        best = float(row.results["best_published"].partition(" ")[0].replace(",", ""))
        assert row.results["model"] == pytest.approx(best, rel=0.2)
