"""`ds-ring compare` on two CPU ranks: its page and JSON; who fails, hangs or is wrong is a row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ds_ring_launcher import cli
from ds_ring_launcher.compare import comparison
from ds_ring_launcher.compare.cells import Cell
from ds_ring_launcher.compare.comparison import Clock, Request, Row, _take_turns, compare, make_documents
from ds_ring_launcher.compare.group import Verdict, explain_failure
from ds_ring_launcher.compare.peers import ONE, PEERS, Peer
from ds_ring_launcher.compare.report import advise, as_json, write_page
from tests import seeded_contestants
from tests.seeded_contestants import SEEDED

SIZES = ["--device", "cpu", "--gpus", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
WORKER = (sys.executable, str(Path(seeded_contestants.__file__)))
RING = next(peer for peer in PEERS if peer.name == "ring")


@pytest.mark.slow
def test_the_command_writes_a_page_and_a_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ours.md"
    words = ["--tokens", "256", "--packed", "--rounds", "2", "--only", "ring", "magi", "--output", str(path)]
    assert cli.main(["compare", *SIZES, *words, "--budget-seconds", "200"]) == 0
    page, document = path.read_text(), json.loads(path.with_suffix(".json").read_text())
    assert page in capsys.readouterr().out
    rows = {(row["case"], row["contestant"]): row for row in document["rows"]}
    assert len(document["advice"]) == 3 and len({case for case, _ in rows}) == 3
    for (case, name), row in rows.items():
        if name in ("ring", ONE.name):
            assert row["verdict"]["word"] == "exact" and len(row["seconds"]) == 2, row
            assert f"| {name} " in page and case in page
    assert rows["causal, 4:2 heads of 16", "MagiAttention"]["verdict"]["word"] == "not installed"
    assert {row["contestant"] for row in document["advice"]} == {"ring"}
    assert document["spent_s"] <= document["budget_s"] == 200


def run_seeded(peers: tuple[Peer, ...]) -> tuple[dict[str, Verdict], set[str]]:
    """Compare them with a ring; return verdicts by name, and who was timed."""
    request = Request((Cell("causal", tokens=64),), (2,), "cpu", 1, 200, deadline_s=10)
    rows = compare(request, (*peers, RING), WORKER)
    return {row.contestant: row.verdict for row in rows}, {row.contestant for row in rows if row.seconds}


@pytest.mark.night
@pytest.mark.slow
def test_who_is_wrong_raises_or_hangs_is_a_row() -> None:
    """An error of one rank's gradient, an exception on one rank while the other waits, a hang."""
    verdicts, timed = run_seeded(SEEDED[:3])
    assert verdicts["wrong"].word == "wrong" and verdicts["wrong"].why.startswith("dk "), verdicts
    assert verdicts["raises"].word == "does not run"
    assert "some ranks raise RuntimeError" in verdicts["raises"].why
    assert verdicts["hangs"] == Verdict("does not run", "no answer in time: its ranks hang or have ended")
    assert timed == {"ring", ONE.name}, verdicts


@pytest.mark.slow
@pytest.mark.night
def test_whose_process_ends_or_who_fails_while_timed_is_a_row() -> None:
    verdicts, timed = run_seeded(SEEDED[3:])
    assert {verdicts[peer.name].word for peer in SEEDED[3:]} == {"does not run"}
    assert "its process ended" in verdicts["dies"].why
    assert verdicts["fails_later"].why == "exact, then RuntimeError: out of memory"
    assert timed == {"ring", ONE.name}, verdicts


def test_what_the_budget_has_no_time_for_is_left_out() -> None:
    cell = Cell("causal", tokens=64)
    rows = compare(Request((cell,), (2, 4), "cpu", budget_s=0.2), (RING,), WORKER)
    assert [(row.devices, row.contestant) for row in rows] == [
        (size, name) for size in (2, 4) for name in (ONE.name, "ring")
    ]
    assert not any(row.seconds for row in rows) and {row.verdict.word for row in rows} == {"left out"}
    assert {row.contestant for row in advise(rows)} == {"nothing"}


def make_row(name: str, seconds: list[float], peak_bytes: int = 0) -> Row:
    return Row(8, "causal", name, "1.0", "take", Verdict("exact", "", 1e-6), 64, seconds, peak_bytes)


@pytest.mark.parametrize(
    ("rows", "taken", "why"),
    [
        ([("a", [1.0, 9.0, 2.0], 5), ("b", [3.0], 1)], "a", "exact; 1.50 times as fast as b, the next"),
        ([("a", [2.0], 5), ("b", [2.05], 1)], "b", "exact, least memory; a within 5%"),
        (
            [("a", [2.0], 1), (ONE.name, [1.0], 9)],
            "a",
            "exact; no other was exact and timed; but one process alone is 2.00 times as fast",
        ),
        ([("a", [], 0), (ONE.name, [1.0], 9)], "nothing", "none was exact and timed"),
    ],
)
def test_the_advice_is_the_fastest_exact_one(
    rows: list[tuple[str, list[float], int]], taken: str, why: str
) -> None:
    advice = advise([make_row(*row) for row in rows])
    assert [(row.contestant, row.why) for row in advice] == [(taken, why)]


def test_a_page_shows_what_is_wrong_and_peaks_where_there_are_some() -> None:
    rows = [make_row("a", [2e-3], 2**30), make_row(ONE.name, [4e-3])]
    rows.append(Row(8, "causal", "c", "2.0", "", Verdict("wrong", "dk 1 | 2", 1.0), 64))
    rows.append(Row(8, "causal", "d", None, "", Verdict("not installed")))
    request = Request((Cell("causal", dtype=torch.bfloat16),), (8,), "cpu")
    lines = write_page(as_json(request, rows, "ds-ring compare", 3.0), rows).splitlines()
    assert "| a (1.0) | exact | 1.0e-06 | 2.0 | 2.0 to 2.0 | 2.00 | 1.00 |" in lines
    assert "| c (2.0) | **wrong**: dk 1 / 2 | 1.0e+00 |  |  |  |  |" in lines
    assert "Not installed: d." in lines and "It took 3 of 600 seconds." in lines


@pytest.mark.parametrize("tokens", [8, 64, 4096, 65536])
@pytest.mark.parametrize("multiple", [4, 16])
def test_documents_are_whole_multiples(tokens: int, multiple: int) -> None:
    if tokens % multiple == 0:
        documents = make_documents(tokens, multiple)
        assert sum(documents) == tokens and all(n > 0 and n % multiple == 0 for n in documents)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--tokens", "258"],
            "--tokens: expected a multiple of twice each number of --gpus, got 258; take 260",
        ),
        (["--tokens", "256", "--hf-config", "qwen3-8b"], "--hf-config: expected no sizes with it"),
        (["--tokens", "256", "--kv-heads", "3"], "--kv-heads: expected a divisor of 4 heads, got 3"),
        (["--tokens", "256", "--only", "rong"], "--only: expected parts of ring, Ulysses"),
        (["--tokens", "256", "--device", "tpu"], "device: expected one of cpu, cuda, got tpu"),
        (["--tokens", "256", "--dtype", "int8"], "dtype: expected one of float32, bfloat16, float16"),
        (["--tokens", "256", "--budget-seconds", "0"], "--budget-seconds: expected a number above 0, got 0"),
        (["--tokens", "256", "--output", "no/x.md"], "--output no/x.md: expected a file in a folder"),
        (["--tokens", "256", "--output", "x.json"], "--output: expected a name that ends with .md"),
    ],
)
def test_wrong_input_starts_nothing(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *SIZES, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and words in printed.err, printed.err


class Uneven:
    """A contestant of two ranks, the second one slower and the first one larger."""

    peer, size = SimpleNamespace(name="uneven"), 2

    def call(self, *_: Any) -> tuple[list[dict[str, float]], str]:
        return [{"seconds": 0.1, "peak_bytes": 30}, {"seconds": 0.3, "peak_bytes": 20}], ""


def test_a_round_takes_what_the_slowest_rank_takes() -> None:
    row, group, answer = (
        Row(2, "a", "uneven", "1", "", Verdict("exact")),
        Uneven(),
        SimpleNamespace(path=None),
    )
    arguments: Any = [group], {"uneven": row}, None, answer, Request((), (2,), "cpu", rounds=3), Clock(600.0)
    _take_turns(*arguments)
    assert (row.seconds, row.peak_bytes, row.median_s) == ([0.3] * 3, 30, 0.3)


class Ranks:
    """The ranks of a contestant as a table sees them: whether they join, and what they reply."""

    def __init__(self, name: str, *replies: Any, joins: bool = True, has_ended: bool = False) -> None:
        self.peer, self.size, self.start_s = RING._replace(name=name), 1, 60.0
        self.replies, self.joins, self.has_ended = replies, joins, has_ended

    def join(self, seconds: float) -> bool:
        return self.joins

    def end(self) -> str:
        return "killed"

    def call(self, *_: Any) -> tuple[list[Any], str]:
        return list(self.replies), "its last line"


ASKED = Request((Cell("causal", tokens=64),), (2,), "cpu", 1, 200.0, deadline_s=10)


@pytest.mark.parametrize(
    ("ranks", "seconds", "says"),
    [
        (Ranks("a", joins=False), 100, "left out: its ranks did not join within 25 s killed"),
        (Ranks("a", joins=False, has_ended=True), 400,
            "does not run: its ranks did not join within 60 s killed"),
        (Ranks("a"), 0.1, "left out: the budget of 200 s is spent"),
        (Ranks("a"), 100, "does not run: no answer in time: its ranks hang or have ended: its last line"),
    ],
    ids=["late", "ended", "spent", "silent"],
)  # fmt: skip
def test_who_does_not_answer_has_a_verdict(ranks: Any, seconds: float, says: str, tmp_path: Path) -> None:
    answer = comparison.Answer(ASKED.cells[0], tmp_path)
    assert str(comparison._check(ranks, answer, ASKED, comparison.Clock(seconds))) == says


def test_who_fails_while_timed_is_not_timed_again(tmp_path: Path) -> None:
    groups: list[Any] = [Ranks("fails"), Ranks("times", {"seconds": 0.5, "peak_bytes": 7})]
    table = {group.peer.name: make_row(group.peer.name, []) for group in groups}
    answer = comparison.Answer(ASKED.cells[0], tmp_path)
    comparison._take_turns(groups, table, answer.cell, answer, ASKED, comparison.Clock(100))
    assert table["fails"].verdict.word == "does not run" and not table["fails"].seconds
    assert table["fails"].verdict.why.startswith("exact, then no answer in time")
    assert (table["times"].seconds, table["times"].peak_bytes) == ([0.5], 7)
    table = {"times": make_row("times", [])}
    comparison._take_turns(groups[1:], table, answer.cell, answer, ASKED, comparison.Clock(0.1))
    assert str(table["times"].verdict) == "left out: exact; the budget of 200 s is spent"


def test_one_process_computes_longer_answers_while_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    def write(alone: Any, cell: Cell, path: Path, seconds: float) -> float | str:
        computed.append(cell.tokens)
        return 0.0 if cell.tokens < 4 * least else "out of memory"

    least = comparison.MIN_CHECK_TOKENS
    monkeypatch.setattr(comparison, "write_answer", write)
    cell, nobody = Cell("causal", tokens=4 * least), cast(Any, None)
    answer = comparison._find_answer(nobody, cell, ASKED, tmp_path / "answer", lambda text: None)
    assert computed == [least, 2 * least, 4 * least]
    assert (answer.cell.tokens, answer.failure, answer.path) == (2 * least, "", tmp_path / "answer.1")


def test_what_a_cpu_lacks_is_no_refusal() -> None:
    texts = "Could not run 'aten::flash_fwd' on CPU", "aten.mm.default: no sharding strategy"
    said = [explain_failure(1, [{"raised": "NotImplementedError", "text": text}]) for text in texts]
    assert [str(one) for one in said] == [
        "does not run: flash_fwd needs a GPU",
        "does not run: on CPU ranks: aten.mm.default: no sharding strategy",
    ]
