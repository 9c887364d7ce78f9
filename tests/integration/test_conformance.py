"""`tools/conformance.py`: a short round of real ranks with a seeded fault, and what answers amount to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conformance import collect_verdicts, main, table
from field import flash_attn
from field.cells import CELLS
from field.peers import PEERS, SEEDED

from ds_ring_launcher.compare import cells
from ds_ring_launcher.compare.cells import NAMES, Cell, worst_errors
from ds_ring_launcher.compare.group import Reply, Verdict, verdict
from ds_ring_launcher.compare.peers import Entry, NotOfferedError, Peer, Where, make_pattern
from ds_ring_launcher.compare.worker import CHECK, Command, Rank

CAUSAL = next(cell for cell in CELLS if cell.name == "causal")


@pytest.mark.alone
@pytest.mark.parametrize(
    "peers", [["ring"], ["ring", "torch context parallel", "DeepSpeed Ulysses"]], ids=["ours", "others"]
)
@pytest.mark.night  # by day its parts: dense answers, verdicts, the table
def test_a_short_round_finds_the_seeded_fault(peers: list[str], tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    arguments = ["--cells", "causal", "--seeded", "--no-trainers", "--output", str(path)]
    assert main(["--peers", *peers, *arguments]) == 0
    rows = {line.split(" |")[0]: line for line in path.read_text().splitlines() if line.startswith("| ")}
    found = {name: line for name, line in rows.items() if not name.startswith("| peer")}
    assert len(found) == len(peers) + 1
    for name, line in found.items():
        verdict_shown = line.split("|")[2].strip()
        if "swapped" in name:
            assert verdict_shown.startswith("**wrong** dk") and ", dv" in verdict_shown, line
        else:  # torch's has no kernel on the CPU
            assert verdict_shown == ("does not run (1)" if "torch" in name else "exact"), line


def test_the_table_numbers_reasons_and_tells_sizes_apart() -> None:
    found = {
        "ring": [[Verdict("exact")], [Verdict("exact")]],
        SEEDED.name: [[Verdict("wrong", "dk 1")], [Verdict("does not run", "no | kernel")]],
    }
    lines = table([PEERS[0], SEEDED], ["causal"], [2, 4], found).splitlines()
    rows = [line.split(" | ")[1].removesuffix(" |") for line in lines if line.startswith("| ring")]
    assert rows == ["exact", "2: **wrong** dk 1; 4: does not run (1)"]
    assert "1. no / kernel" in lines and f"- {SEEDED.name}: {SEEDED.note}." in lines


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_dense_answer_is_that_of_the_pattern(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask is written by hand; blocks of rows add up to the same."""
    positions = np.arange(cell.tokens)
    q, k = positions[:, None], positions[None]
    counts = make_pattern(cell).multiplicity(0, cell.heads, cell.kv_heads, q, k)
    assert torch.equal(torch.as_tensor(counts) > 0, cell.allowed)
    answer = cell.answer()
    monkeypatch.setattr(cells, "MAX_SCORES", 13 * cell.heads * cell.tokens)  # rows of a block
    blocks = cell.answer()
    assert all(torch.allclose(blocks[name], answer[name], rtol=0, atol=1e-12) for name in NAMES)
    assert set(answer) == set(NAMES) and all(x.dtype == torch.float64 for x in answer.values())
    assert answer["dk"].shape == (1, cell.kv_heads, cell.tokens, 16)


def one_process(change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> Peer:
    """Be a peer that needs no other rank."""

    def prepare(cell: Cell, where: Where) -> Entry:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return change(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=cell.allowed))

        return Entry(torch.arange(cell.tokens), attend)

    return Peer("one process", "torch", prepare)


def check(peer: Peer, folder: Path) -> Reply:
    """Reply as the only rank of a peer."""
    torch.save(CAUSAL.answer(), folder / "answer.pt")
    return Rank(peer, Where(0, 1)).reply(Command(1, CHECK, CAUSAL, folder / "answer.pt"))


def judge(size: int, replies: list[Reply], printed: str = "") -> Verdict:
    return verdict(CAUSAL, torch.float32, size, replies, printed)


def test_errors_are_of_each_tensor_by_itself(tmp_path: Path) -> None:
    right = check(one_process(), tmp_path)
    assert judge(1, [right]).word == "exact"
    small = check(one_process(lambda out: out * 1.0001), tmp_path)
    assert str(judge(1, [small])) == "wrong: out 0.0001, dq 0.0001, dk 0.0001, dv 0.0001"
    nan = check(one_process(lambda out: out * float("nan")), tmp_path)
    assert "out not finite" in judge(1, [nan]).why
    answer = CAUSAL.answer()
    found = {name: x[:, :, :32].float() for name, x in answer.items()}
    found["dv"][0, 0, 3, 0] += answer["dv"].abs().max()
    errors = worst_errors(answer, found, torch.arange(32))
    assert errors["dv"] == pytest.approx(1, abs=1e-5) and max(errors[one] for one in NAMES[:3]) < 1e-6


@pytest.mark.parametrize(
    ("error", "ranks", "word"),
    [
        (NotOfferedError("no argument"), 2, "not offered"),
        (NotImplementedError("no"), 2, "refused"),
        (AssertionError("must divide"), 2, "refused"),
        (AssertionError("must divide"), 1, "does not run"),
        (TypeError("missing argument"), 2, "does not run"),
    ],
    ids=str,
)
def test_what_is_raised_decides_the_verdict(error: Exception, ranks: int, word: str, tmp_path: Path) -> None:
    def prepare(cell: Cell, where: Where) -> Entry:
        raise error

    raised = check(Peer("raises", "torch", prepare), tmp_path)
    assert raised["stage"] == "prepared"
    done = {"errors": dict.fromkeys(NAMES, 0.0), "count": 32}
    found = judge(2, [raised] * ranks + [done] * (2 - ranks))
    assert found.word == word and str(error) in found.why


def test_ranks_that_say_nothing_and_tokens_that_are_missing_are_no_success() -> None:
    done = {"errors": dict.fromkeys(NAMES, 0.0), "count": 20}
    assert str(judge(2, [done, done])) == "wrong: 40 of 64 tokens"
    assert judge(2, [done]).word == "does not run"
    assert (
        judge(2, [{"stage": "started"}] * 2, "killed").why
        == "no answer in time: its ranks hang or have ended: killed"
    )


def test_a_peer_that_is_not_installed_is_a_row() -> None:
    peer = PEERS[0]._replace(package="no-such-package")
    assert [one.word for one in collect_verdicts(peer, 2)] == ["not installed"] * len(CELLS)
    assert SEEDED not in PEERS


@pytest.mark.parametrize("cell", [one for one in CELLS if not one.documents and one.dtype == torch.float32])
def test_the_stand_in_of_flash_attn_is_exact(cell: Cell) -> None:
    """One call with all tokens, and one of variable lengths with each document."""
    q, k, v, grad = (x.transpose(1, 2).contiguous() for x in cell.operands())
    window = (-1 if cell.window is None else cell.window - 1, 0 if cell.causal else -1)
    out, lse, *_ = flash_attn._flash_attn_forward(q, k, v, 0.0, 0.25, cell.causal, *window)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    flash_attn._flash_attn_backward(grad, q, k, v, out, lse, *grads, 0.0, 0.25, cell.causal, *window)
    found = dict(zip(NAMES, (x.transpose(1, 2) for x in (out, *grads)), strict=True))
    errors = worst_errors(cell.answer(), found, torch.arange(cell.tokens))
    assert max(errors.values()) < 2e-5, errors


def test_the_stand_in_of_variable_lengths_is_exact() -> None:
    cell = next(one for one in CELLS if one.documents)
    q, k, v, grad = (x[0].transpose(0, 1).contiguous() for x in cell.operands())
    ends = (cell.ends, cell.ends, 30, 30)
    out, lse, *_ = flash_attn._flash_attn_varlen_forward(q, k, v, *ends, 0.0, 0.25, True)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    flash_attn._flash_attn_varlen_backward(grad, q, k, v, out, lse, *grads, *ends, 0.0, 0.25, True)
    found = dict(zip(NAMES, (x.transpose(0, 1)[None] for x in (out, *grads)), strict=True))
    errors = worst_errors(cell.answer(), found, torch.arange(cell.tokens))
    assert max(errors.values()) < 2e-6, errors
