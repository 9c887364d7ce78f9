"""Check each switch of a model type's configuration by itself, gradient checkpointing and inputs_embeds.

Ranks check one configuration after another as `ds-ring check-model` does (launcher/check/model_check.py);
where one ends the ranks, others begin with the next. configurations.py lists the configurations. A row is
printed for each, and with --rows appended to a file, whose rows are not checked again. The exit status is 1
where one is WRONG or a raw error.

Examples:
    python tools/check_configurations.py falcon --only alibi
    python tools/check_configurations.py --rows runs/rows.jsonl    # every causal type, goes on where it ended
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import make_parser
from configurations import Configuration, list_configurations

from ds_ring.errors import RingConfigError
from ds_ring.written_files import append_text, replace_text
from ds_ring_launcher.check.model_check import CheckRequest, ModelReport, check_forms
from ds_ring_launcher.check.small_model import HEADS, read_config
from ds_ring_launcher.commands.parsers import require_writable
from ds_ring_launcher.run.local_ranks import RanksError, run_ranks

Row = dict[str, Any]
_ROWS_PER_START = 40  # of ranks: engines leave a little behind
VERDICTS = ("exact", "refused", "no model", "WRONG", "raw error")


@dataclass(frozen=True)
class RowRun:
    """What all rows of a run have in common."""

    processes: int
    tokens: int
    layers: int
    seed: int
    head: str | None = None

    @property
    def shape(self) -> str:
        """Return ranks x tokens x layers."""
        return f"{self.processes}x{self.tokens}x{self.layers}"


def get_verdict(report: ModelReport) -> str:
    """Return "exact", "refused", "no model", "WRONG" (other numbers) or "raw error"."""
    if report.result == "WRONG":
        return "WRONG" if report.differences or report.in_float64 == "WRONG" else "raw error"
    return {"invalid": "no model"}.get(report.result, report.result)


def row_key(row: Row) -> tuple[str, ...]:
    """Return what tells a row from others: of two in a file, the later holds."""
    required = ("source", "configuration", "shape", "seed", "transformers")
    return (*(str(row[name]) for name in required), str(row.get("head")), str(row.get("section")))


def read_rows(file: Path | None) -> dict[tuple[str, ...], Row]:
    """Return the rows in a file, which may not be there yet; a last line that was cut off is removed.

    Raises:
        RingConfigError: the file has other lines than rows.
    """
    rows: dict[tuple[str, ...], Row] = {}
    if file is None or not file.exists():
        return rows
    text = file.read_text()
    whole, _, cut_off = text.rpartition("\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            rows[row_key(row)] = row
        except (ValueError, KeyError, TypeError) as error:
            raise RingConfigError(
                f"--rows: {file}, line {number}: expected a row of this tool, got {line[:60]!r}"
            ) from error
    if cut_off:
        replace_text(file, text[: len(text) - len(cut_off)])
    return rows


def check_rows(
    source: str,
    run: RowRun,
    known: Mapping[tuple[str, ...], Row],
    deadline_s: float,
    only: str = "",
) -> Iterator[Row]:
    """Yield a row for each configuration of a model type: first the known ones, then as they are checked.

    Args:
        source: a config.json, its folder, or a model type.
        run: what all rows have in common.
        known: rows by their keys, which are not checked again.
        deadline_s: of one row, in which a rank that hangs is ended.
        only: a regular expression, to be found in a configuration's name.
    """
    about = {"shape": run.shape, "seed": run.seed, "transformers": version("transformers"), "head": run.head}
    about["section"] = None  # one made of the model's attention

    def row(configuration: Configuration, verdict: str, reason: str, report: Row) -> Row:
        told = {"source": source, "configuration": configuration.name, "verdict": verdict, "reason": reason}
        return told | about | report

    try:
        waiting = list_configurations(read_config(source), run.tokens, run.layers)
    except RingConfigError as error:
        yield row(Configuration("default"), "no model", str(error), {})
        return
    waiting = [configuration for configuration in waiting if re.search(only, configuration.name)]
    for configuration in list(waiting):
        old = known.get(row_key(row(configuration, "", "", {})))
        if old is not None:
            waiting.remove(configuration)
            yield old
    while waiting:
        reports, fault = _checked(source, run, waiting[:_ROWS_PER_START], deadline_s)
        for configuration, (verdict, reason, report) in zip(waiting, reports, strict=False):
            yield row(configuration, verdict, reason, report)
        waiting = waiting[len(reports) :]
        if fault and waiting:
            yield row(waiting.pop(0), "raw error", fault, {})


def _checked(
    source: str, run: RowRun, waiting: Sequence[Configuration], deadline_s: float
) -> tuple[list[tuple[str, str, Row]], str]:
    """Return the reports of the first configurations, and the error that kept the next one from having one.

    The ranks end after a row that another error than a refusal ended: their groups may be out of step.
    """
    with tempfile.TemporaryDirectory(prefix="ds-ring-rows-") as folder:
        answers = Path(folder, "answers")
        answers.touch(exist_ok=False)
        last = [time.monotonic(), 0.0]  # when the size of the answers changed, and that size

        def look() -> None:
            size = answers.stat().st_size
            if size != last[1]:
                last[:] = [time.monotonic(), size]
            elif time.monotonic() - last[0] > deadline_s:
                raise RanksError(f"expected an answer of all ranks within {deadline_s:g} s, got none")

        fault = ""
        try:
            run_ranks(
                _on_rank, run.processes, (source, run, list(waiting), str(answers)), threads=1,
                deadline_s=deadline_s * (len(waiting) + 1), waiting=look, imported=True,
            )  # fmt: skip
        except RanksError as error:
            fault = str(error)
        lines = answers.read_text().splitlines(keepends=True)
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")], fault


def _on_rank(source: str, run: RowRun, configurations: Sequence[Configuration], answers: str) -> None:
    """Check one configuration after another; rank 0 writes the answers."""
    import torch.distributed as dist

    sys.stdout.flush()
    os.dup2(2, 1)  # what libraries print must not mix with the command's output
    for configuration in configurations:
        (report,) = check_forms(
            CheckRequest(
                source, run.tokens, run.layers, run.head, None, configuration.changes, seed=run.seed,
                checkpointing=configuration.checkpointing, inputs_embeds=configuration.inputs_embeds,
            )
        )  # fmt: skip
        if dist.get_rank() == 0:
            values = report.as_json()
            fields = (
                "model",
                "largest",
                "rounding",
                "measured",
                "tipped",
                "in_float64",
                "differences",
                "eager_differs",
            )
            answer = (get_verdict(report), report.reason, {name: values[name] for name in fields})
            append_text(Path(answers), json.dumps(answer) + "\n")
        if get_verdict(report) == "raw error":
            return


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each configuration of the types, then the counts."""
    parser = make_parser(
        __doc__, ring_size=2, tokens=(61, "of each sample"), layers=(2, "at least"), head="causal-lm", seed=0,
        deadline_seconds=(120.0, "of one row"), rows=("", "file to append rows to"),
        only=("", "a regular expression, to be found in a configuration's name"),
    )  # fmt: skip
    parser.add_argument("models", nargs="*", help="a config.json or a model type; default: all with the head")
    options = parser.parse_args(arguments)
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only: expected a regular expression, got {options.only!r}: {error}")
    file = Path(options.rows) if options.rows else None
    if file is not None:
        require_writable(file, "--rows")
    run = RowRun(options.ring_size, options.tokens, options.layers, options.seed, options.head)
    known, counts = read_rows(file), Counter[str]()
    types = options.models or sorted(HEADS[options.head].families)
    for source in types:
        for row in check_rows(source, run, known, options.deadline_seconds, options.only):
            counts[row["verdict"]] += 1
            if file is not None and row_key(row) not in known:
                append_text(file, json.dumps(row) + "\n")
            reason = " ".join(row["reason"].split())
            text = f"{row['verdict']:<9} {source} {row['configuration']}"
            print(text + f": {reason}" * bool(reason), flush=True)
    totals = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    print(f"{counts.total()} configurations of {len(types)} model types: {totals}")
    return int(bool(counts["WRONG"] or counts["raw error"]))


if __name__ == "__main__":
    sys.exit(main())
