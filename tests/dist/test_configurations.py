"""`tools/check_configurations.py`: a row for each configuration, and what becomes of those that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# A fault of numbers (ALiBi once where eager attention adds it twice), and a rank that dies.
SEEDED = """
import os, sys
from ds_ring.contrib.families.eager_attention import families, scores
from ds_ring_launcher.check import model_check

rows, tools = sys.argv[1:]
sys.path.insert(0, tools)
import check_configurations
from check_configurations import main
alibi, make = families._falcon_alibi, model_check.build
row = families.FAMILIES["falcon"]
object.__setattr__(row, "bias", lambda module, factor, implementation: alibi(module, factor, "sdpa"))
model_check.build = lambda config, *others: os._exit(3) if config.bias else make(config, *others)
only = "default|alibi=True, attn_implementation|bias|inputs_embeds|checkpointing=reentrant|tie_word"
command = ["falcon", "--tokens", "21", "--rows", rows, "--only", only]
first = main(command)
check_configurations.run_ranks = None  # a row that is there is not checked again
raise SystemExit(10 * first + main(command))
"""
TOOLS = Path(__file__).resolve().parents[2] / "tools"
VERDICTS = {
    "default": "exact",
    "checkpointing=reentrant": "exact",
    "inputs_embeds": "exact",
    "bias=True": "raw error",
    "tie_word_embeddings=False": "exact",
    "alibi=True, attn_implementation=eager": "WRONG",
}


@pytest.mark.night
@pytest.mark.situation(
    "configurations", "checks all configurations of a model type, and goes on where it was ended"
)
def test_rows_name_the_configuration_that_is_wrong_or_ends_a_rank(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", SEEDED, str(rows), str(TOOLS)], capture_output=True, text=True, timeout=300
    )
    result = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["configuration"]: row["verdict"] for row in result} == VERDICTS, done.stderr
    assert len(result) == len(VERDICTS)
    printed = [line for line in done.stdout.splitlines() if line[0] != "["]
    assert sorted(printed[:6]) == sorted(printed[7:13]), "the second run prints the rows of the first"
    counts = "6 configurations of 1 model types: 4 exact, 0 refused, 0 no model, 1 WRONG, 1 raw error"
    assert printed[6] == printed[13] == counts
    assert done.returncode == 11
    (wrong,) = (row for row in result if row["verdict"] == "WRONG")
    assert "differ: first layer transformer.h.0" in wrong["reason"]
    (dead,) = (row for row in result if row["verdict"] == "raw error")
    assert "rank 0 with 3" in dead["reason"] or "rank 1 with 3" in dead["reason"]
