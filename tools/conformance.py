"""Compare what packages of this field compute with one dense computation, ds_ring by the same harness.

Each peer answers each cell on gloo ranks: a mask, grouped heads, packed documents, a length that ranks do
not divide, large scores, bfloat16. out, dq, dk and dv are compared by themselves with float64. A cell is
exact (to 2e-5 of the largest value; bfloat16 3e-2), wrong (by how much of it), refused (an error on every
rank), not run (why), or not offered. Whole trainers follow: evaluation loss, and the gradients of a step.

Install what is to be compared into an environment of its own:

    pip install --no-deps yunchang ring-attention-pytorch ring-flash-attn beartype jaxtyping wadler-lindig

A package that is missing has rows "not installed". FlashAttention's functions are a stand-in where peers call
them, so that a row shows a peer's exchange and merging.

Example:
    python tools/conformance.py --ranks 2 4 --output tools/results/conformance.md
    python tools/conformance.py --ranks 2 --peers ring "DeepSpeed Ulysses" --cells causal --seeded
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from common import make_parser, provenance
from field import flash_attn, training
from field.cells import CELLS
from field.peers import FLASH_NOTE, PEERS, SEEDED

from ds_ring_launcher.compare import worker
from ds_ring_launcher.compare.cells import Cell
from ds_ring_launcher.compare.group import Group, Verdict, check
from ds_ring_launcher.compare.peers import Peer

FINE, BAD = ("exact",), ("wrong",)
HEAD = """# Peers and ds_ring by one harness

`python tools/conformance.py` (it names the packages to install). Errors of out, dq, dk and dv are relative to
the largest value of one dense computation in float64. Exact: 2e-5 in float32, 3e-2 in bfloat16. "Not
offered": the function has no argument for it. Only what ran here is said of a package; none of it is about
GPUs.

"""
TRAINERS = """
## Whole trainers

One step of SGD (ZeRO 0, no clipping) and one evaluation of a small Llama by transformers' Trainer; half of
the row has no labels. Adam hides a factor of the gradients; clipping and the learning rate of SGD do not.

"""
OURS = ("ring", "Ulysses", "ring and Ulysses", "ring, bfloat16")
WORKER = (sys.executable, __file__, "--as-rank")


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if ds_ring has a cell that is not exact, or a seeded fault is not found."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--as-rank"]:
        flash_attn.install()
        worker.main(words[1:], (*PEERS, SEEDED))
    if words[:1] == ["--as-trainer"]:
        training.be_rank(words[1], Path(words[2]))
        return 0
    parser = make_parser(
        __doc__, ranks=([2], "numbers of ranks"), seconds=(60.0, "for a cell"),
        peers=([item.name for item in PEERS], "which"), cells=([item.name for item in CELLS], "which"),
        no_trainers=(False, "leave whole trainers out"),
        seeded=(False, "also a peer with a fault, which must be found"),
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="a file for the table; default: stdout")
    options = parser.parse_args(words)
    peers = [peer for peer in PEERS if peer.name in options.peers] + [SEEDED] * options.seeded
    cells = [item for item in CELLS if item.name in options.cells]
    verdicts: dict[str, list[list[Verdict]]] = {}
    for peer in peers:
        verdicts[peer.name] = [collect_verdicts(peer, size, cells, options.seconds) for size in options.ranks]
        for size, row in zip(options.ranks, verdicts[peer.name], strict=True):
            said = ", ".join(f"{cell.name} {item}" for cell, item in zip(cells, row, strict=True))
            print(f"{peer.name}, {size} ranks: {said}", file=sys.stderr, flush=True)
    text = table(peers, [item.name for item in cells], options.ranks, verdicts)
    if not options.no_trainers:
        expected = training.trained("one process", 1)
        if isinstance(expected, str):
            raise SystemExit(f"one process does not train: {expected}")
        text += TRAINERS + training_table(
            {way: training.verdicts(training.trained(way, 2), expected) for way in training.TRAINERS}
        )
    if options.output is None:
        print(text)
    else:
        options.output.write_text(HEAD + text)
    is_exact = all(
        item.word in (*FINE, "not offered")
        for name, rows in verdicts.items()
        if name in OURS
        for row in rows
        for item in row
    )
    seeded = all(item.word in BAD for row in verdicts.get(SEEDED.name, []) for item in row)
    return int(not is_exact or not seeded)


def collect_verdicts(
    peer: Peer, size: int, cells: Sequence[Cell] = CELLS, seconds: float = 60.0
) -> list[Verdict]:
    """Return a peer's verdict on each cell."""
    if peer.version() is None:
        return [Verdict("not installed")] * len(cells)
    group, verdicts = Group(peer, size, "cpu", WORKER), []
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        try:
            for number, cell in enumerate(cells):
                answer = Path(folder, f"{number}.pt")
                torch.save(replace(cell, dtype=peer.dtype or cell.dtype).answer(), answer)
                verdicts.append(check(group, cell, answer, seconds))
        finally:
            group.end()
    return verdicts


def table(
    peers: list[Peer], cells: list[str], sizes: list[int], verdicts_by_peer: dict[str, list[list[Verdict]]]
) -> str:
    """Return the table in markdown, with a list of reasons below it."""
    about = provenance()
    where = f"{about['date']}, Python {about['versions']['python']}, torch {about['versions']['torch']}"
    lines = [f"{' and '.join(map(str, sizes))} gloo ranks, {where}.", ""]
    lines += [f"| peer | {' | '.join(cells)} |", f"|---|{'---|' * len(cells)}"]
    reasons: dict[str, int] = {}
    for peer in peers:
        version = peer.version()
        row = [f"{peer.name} {version or ''}".strip()]
        for number in range(len(cells)):
            verdicts = [verdicts[number] for verdicts in verdicts_by_peer[peer.name]]
            row.append(_shown(sizes, verdicts, reasons))
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", *(f"{number}. {why}" for why, number in reasons.items())]
    notes = {peer.name: peer.note or FLASH_NOTE for peer in peers if peer.note or peer.dtype is not None}
    lines += ["", *(f"- {name}: {note}." for name, note in notes.items())]
    return "\n".join(lines) + "\n"


def training_table(verdicts: dict[str, dict[str, Verdict]]) -> str:
    """Return a table of whole trainers in markdown."""
    lines = ["| two ranks, one step, beside one process | " + " | ".join(training.BOUNDS) + " |"]
    lines += [f"|---|{'---|' * len(training.BOUNDS)}"]
    for way, row in verdicts.items():
        words = [str(verdict).replace("|", "/").replace("wrong:", "**wrong**") for verdict in row.values()]
        lines.append(f"| {way} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def _shown(sizes: list[int], verdicts: list[Verdict], reasons: dict[str, int]) -> str:
    """Return a cell of the table: one verdict, or one for each number of ranks."""
    words = []
    for verdict in verdicts:
        if verdict.word == "wrong":
            words.append(f"**wrong** {verdict.why}")
        elif verdict.why:
            number = reasons.setdefault(verdict.why.replace("|", "/"), len(reasons) + 1)
            words.append(f"{verdict.word} ({number})")
        else:
            words.append(verdict.word)
    if len(set(words)) == 1:
        return words[0]
    return "; ".join(f"{size}: {word}" for size, word in zip(sizes, words, strict=True))


if __name__ == "__main__":
    sys.exit(main())
