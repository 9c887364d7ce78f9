"""Published measurements beside the model: each has a source, most are close, a wrong rate is found."""

from __future__ import annotations

import copy
from datetime import date

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from ds_ring import Causal, Documents, make_layout
from ds_ring_launcher.cli import main
from ds_ring_launcher.published import evaluate as evaluation
from ds_ring_launcher.published.evaluate import evaluate, predict, share
from ds_ring_launcher.published.methods import METHODS, Pass, dispatched, rate_at, te_ring, ulysses
from ds_ring_launcher.published.own import compute_own_pass, count_reads
from ds_ring_launcher.published.packed import STAGE_SHARDS, model_packed_rows
from ds_ring_launcher.published.packs import LONGEST_PART, draw_packs, get_packs
from ds_ring_launcher.published.report import as_json, describe_limits, print_report
from ds_ring_launcher.published.steps import make_published_setting, torch_extra_s
from ds_ring_launcher.published.table import ROWS, Table, published, table_from

SHARE = 0.58  # of all figures within a tenth
DENSE, RINGS, STEPS = 0.9, 1.0, 1.0  # of causal passes on H100, of ring-flash-attention, of steps' seconds
WAYS = ("forward", "backward")


def values() -> dict:
    return yaml.safe_load(ROWS.read_text())


def only(table: Table, **keep: list) -> Table:
    """Return the table with other rows; what is not named is left out."""
    return table.model_copy(update={"passes": [], "steps": [], "lengths": []} | keep)


def dense(table: Table) -> list:
    return [one for one in table.passes if (one.machine, one.mask) == ("h100", "causal")]


@pytest.fixture(scope="module")
def results():
    return evaluate(published())


@pytest.mark.slow
def test_every_figure_has_a_source_and_a_date(results):
    sources = published().sources
    assert len(results) >= 30
    for one in results:
        source = sources[one.source]
        assert source.link.startswith("https://")
        assert one.date == str(source.date)
        assert date(2017, 1, 1) < source.date
        assert one.published > 0


@pytest.mark.slow
def test_most_figures_are_within_a_tenth(results):
    assert share(results) >= SHARE
    kinds = {
        DENSE: [one for one in results if one.setting.startswith("h100 causal")],
        RINGS: [one for one in results if one.source == "zhuzilin"],
        STEPS: [one for one in results if one.quantity == "step, seconds"],
    }
    assert all(len(rows) >= 6 for rows in kinds.values())
    for bound, rows in kinds.items():
        assert share(rows) >= bound


@pytest.mark.slow
def test_a_figure_that_is_off_says_why(results):
    assert [one for one in results if not one.holds and not one.why] == []


@pytest.mark.parametrize(
    ("part", "name", "field", "factor"),
    [
        ("kernels", "flash3", None, 0.7),
        ("machines", "h100", "memory", 0.1),
        ("machines", "h100", "link", 0.02),
    ],
    ids=["kernel", "memory", "link"],
)
def test_a_wrong_rate_is_found(part, name, field, factor):
    wrong = values()
    row = wrong[part][name]
    if field is None:
        for rates in row.values():
            for curve in (rates["causal"], rates["full"]):
                curve.update({length: rate * factor for length, rate in curve.items()})
    else:
        row[field] *= factor
    right, seeded = (only(one, passes=dense(one)) for one in (published(), table_from(wrong)))
    assert share(evaluate(right)) >= DENSE
    assert share(evaluate(seeded)) < DENSE - 0.2


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows["sources"]["magi"].pop("date"),
        lambda rows: rows["sources"]["magi"].update(link="a blog"),
        lambda rows: rows["passes"][0].update(source="nobody"),
        lambda rows: rows["steps"][0].update(model="qwen9"),
        lambda rows: rows["passes"][0].update(machine="h300"),
        lambda rows: rows["passes"][0].update(secret=1),
    ],
    ids=["no date", "no link", "no source", "no model", "no machine", "unknown key"],
)
def test_a_row_without_its_source_is_refused(change):
    wrong = copy.deepcopy(values())
    change(wrong)
    with pytest.raises(ValidationError):
        table_from(wrong)


def a_pass(
    ranks: int = 8, lengths: tuple[int, ...] | None = None, direction: str = "forward", **more
) -> Pass:
    table = published()
    machine = table.machines["h100"].model_copy(update=more)
    return Pass(machine, table.kernels["flash3"], ranks, 8192, 64, 8, direction, lengths or (ranks * 8192,))


def test_rates_between_lengths():
    curve = {1024: 100.0, 4096: 300.0}
    assert [rate_at(curve, n) / 1e12 for n in (512, 1024, 2048, 4096, 9999)] == pytest.approx(
        [100, 100, 200, 300, 300]
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("direction", WAYS)
def test_no_method_is_faster_than_its_kernel(method, direction):
    """Without links and copies what is left is the kernel, whose best rate bounds every method."""
    free = {"link": 1e30, "network": 1e30, "memory": 1e30}
    for ranks in (8, 16):
        one, real = a_pass(ranks, direction=direction, **free), a_pass(ranks, direction=direction)
        curve = one.kernel.curve(direction)
        best = max(*curve.full.values(), *curve.causal.values())
        assert one.flops / METHODS[method](one) / 1e12 <= best * 1.001
        assert METHODS[method](real) >= METHODS[method](one)


def test_ulysses_swaps_what_its_paper_says():
    """Jacobs et al., section 3.2: q, k, v and out, each (P - 1) / P of it."""
    one = a_pass(8, memory=1e30)
    kernel = one.causal_s(one.lengths, one.heads / 8)
    swapped = 8192 * (64 + 8 + 8 + 64) * 128 * 2 * 7 / 8
    assert ulysses(one) - kernel == pytest.approx(swapped / one.machine.link)


def test_a_ring_hides_what_its_hops_compute():
    """K/V travel while a hop computes: only links slower than that count."""
    fast, slow = (te_ring(a_pass(8, link=rate)) for rate in (3.7e11, 1e12))
    assert fast == slow
    message = a_pass(8).kv_bytes / 1e9
    assert te_ring(a_pass(8, link=1e9)) == pytest.approx(8 * message, rel=0.01)


def test_magi_dispatches_every_chunk_once():
    lengths = (9000, 30000, 5000, 21536)
    load = dispatched(a_pass(8, lengths))
    assert 1 <= load.imbalance < 1.5
    assert 0 < load.local < 1
    assert 0 < load.near <= 7 * 8192
    assert load.far == 0  # one node
    assert (
        dispatched(a_pass(16, (131072,))).far == 8192
    )  # of the other node's tokens each rank gets an eighth


def test_packs_are_those_of_the_benchmark():
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


def test_reads_are_those_of_the_mask():
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
def test_our_ring_beside_them(ranks: int, pack: int):
    """Every exchange of the same tokens is slower than its kernel; the direct one faster than the others."""
    attention = a_pass(ranks, get_packs(8192 * ranks)[pack])
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
@pytest.mark.parametrize(
    ("ranks", "packs", "least"), [(64, 6, 0.95), pytest.param(1024, 1, 0.75, marks=pytest.mark.night)]
)
def test_a_direct_exchange_keeps_the_figures_of_one_node(ranks: int, packs: int, least: float):
    first, large = model_packed_rows(published(), {8: 6, ranks: packs}, lambda what: None)
    for kept in (now / then for now, then in zip(large.direct, first.direct, strict=True)):
        assert kept > least
    assert all(now / then < 0.9 for now, then in zip(large.staged, first.staged, strict=True))


def test_torch_adds_little_to_a_long_step():
    table = published()
    row = table.steps[1]
    extra = torch_extra_s(make_published_setting(table, row), table.machines["h100"])
    assert 0.01 < extra / row.seconds < 0.05


def test_ours_is_said_only_where_the_peers_hold(monkeypatch):
    table = published()
    wrong, right = (
        only(
            table,
            passes=[
                group.model_copy(update={way: {8: rate or getattr(group, way)[8]} for way in WAYS})
                for group in dense(table)
            ],
        )
        for rate in (1.0, None)
    )
    assert predict(wrong, evaluate(wrong)) == []
    monkeypatch.setattr(evaluation, "HOLDS", 0.5)
    predictions = [(row.devices, row.quantity.partition(",")[0]) for row in predict(right, evaluate(right))]
    assert predictions == [(8, way) for way in WAYS]


def test_what_is_printed(capsys):
    table = published()
    few = only(
        table, passes=[one for one in table.passes if one.source == "zhuzilin"], lengths=table.lengths[:1]
    )
    found = evaluate(few)
    packed = model_packed_rows(table, {8: 1, 16: 1}, lambda what: None)
    print_report(table, found, [], packed)
    text = " ".join(capsys.readouterr().out.split())
    assert "ring-flash-attention" in text
    assert "off: ALST, llama-8b: Unexplained" in text
    assert "86% within 10%" in text
    assert " ".join(describe_limits(packed).split()) in text
    assert "16 GPUs: the ring keeps" in text
    read = yaml.safe_load(as_json(table, found, [], packed))
    assert read["share_within_a_tenth"] == share(found)
    assert {one["source"] for one in read["published"]} <= set(read["sources"])


def test_the_command(capsys, monkeypatch):
    table = published()
    few = only(table, passes=[one for one in table.passes if one.source == "zhuzilin"])
    monkeypatch.setattr("ds_ring_launcher.published.table.published", lambda: few)
    monkeypatch.setattr(
        "ds_ring_launcher.published.packed.model_packed_rows",
        lambda _, packs, say: model_packed_rows(table, {8: packs[8] // 6}, say),
    )
    assert main(["plan", "--published", "--json"]) == 0
    read = yaml.safe_load(capsys.readouterr().out)
    assert [one["devices"] for one in read["published"]] == [8] * 6
    assert [one["devices"] for one in read["packed"]] == [8]
    assert main(["plan", "--published"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no constant is fitted to a row" in text
    assert "ds_ring, computed, not measured" in text
