"""`ds-ring plan --goodput`: its rows, what a save costs, the keys of its JSON, wrong ones."""

from __future__ import annotations

import json
from random import Random

import pytest

from ds_ring import Causal
from ds_ring_launcher import cli
from ds_ring_launcher.plan.goodput.closed_forms import daly
from ds_ring_launcher.plan.goodput.jobs import (
    FIXED_PAUSE_S,
    STORAGE_BYTES_PER_S,
    GoodputOptions,
    job_of,
    options_from,
    saving_cost,
)
from ds_ring_launcher.plan.hardware import read_hardware
from ds_ring_launcher.plan.model_file import ModelShape
from ds_ring_launcher.plan.model_memory import Zero
from ds_ring_launcher.plan.training_setting import TrainingSetting

PLAN = [
    *("plan", "--layers", "2", "--hidden", "256", "--heads", "4", "--vocab", "4096", "--tokens", "4096"),
    *("--devices", "4", "--hardware", "h100_flash3"),
]
MODEL = ModelShape(layers=2, hidden=256, heads=4, kv_heads=4, head_dim=64, intermediate=1024, vocab=4096)


def setting(stage: int, hardware: str = "h100_flash3", dtype: str = "bfloat16") -> TrainingSetting:
    return TrainingSetting(
        4096, 4, 1, MODEL, Causal(), "zigzag", Zero(stage, 4, 2), dtype, read_hardware(hardware)
    )


def test_the_json_has_8_64_1024_gpus_and_the_plan_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--goodput", '{"days": 30}', "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["goodput"]
    assert found["days"] == 30 and [row["gpus"] for row in found["rows"]] == [4, 8, 64, 1024]
    assert found["save_every_steps"]["4"] >= 1
    for row in found["rows"] + found["other_rates"]:
        parts = [row[name] for name in ("useful", "saving", "lost", "detection", "restart")]
        assert sum(parts) == pytest.approx(1) and min(parts) >= 0
        assert row["useful"] == pytest.approx(row["expected"], abs=0.01)  # the closed form
    useful = [row["useful"] for row in found["rows"]]
    assert useful == sorted(useful, reverse=True)  # more GPUs, more faults
    shares = {row["name"]: row for row in found["published_shares"]}
    assert shares["ByteRobust, dense"]["published"] == 0.97
    minutes = {row["what"]: (row["published"], row["simulated"]) for row in found["schedule_minutes"]}
    published, simulated = minutes["restarts, faults known after 10 minutes"]
    assert simulated == pytest.approx(published, rel=0.05)


def test_the_tables_have_the_interval_in_steps_for_the_plan_s_devices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*PLAN, "--goodput", '{"gpu_mtbf_hours": 8000, "days": 20}']) == 0
    printed = capsys.readouterr().out
    for words in (
        "20 days of faults",
        "by the given MTBF",
        "steps",
        "useful",
        "TorchPass",
        "ByteRobust",
        "RSC-1",
    ):
        assert words in printed, words
    assert "1,000.0 h" in printed  # 8,000 hours of a GPU, by eight


def test_without_the_option_nothing_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--json"]) == 0
    assert "goodput" not in json.loads(capsys.readouterr().out)


def test_a_save_copies_a_rank_s_part_and_writes_all_of_it() -> None:
    """By hand: 14 bytes a parameter in bfloat16, over 64 devices of 8 nodes."""
    count, link = 1_000_000_000, 5.5e10
    options = GoodputOptions()
    pause_s, write_s = saving_cost(setting(3), count, 64, options)
    assert pause_s == pytest.approx(FIXED_PAUSE_S + 14e9 / 64 / link)
    assert write_s == pytest.approx(14e9 / (8 * STORAGE_BYTES_PER_S))
    assert saving_cost(setting(1), count, 64, options).pause_s == pytest.approx(1 + (2e9 + 12e9 / 64) / link)
    whole = saving_cost(setting(0, dtype="float32"), count, 64, options)
    assert whole == pytest.approx((1 + 12e9 / link, 12e9 / STORAGE_BYTES_PER_S))
    # no link in the file: all ranks wait for the writing
    assert saving_cost(setting(3, "cpu"), count, 8, options)[1] == 0
    given = GoodputOptions(pause_seconds=3.0, write_seconds=0.0)
    assert saving_cost(setting(3), count, 64, given) == (3.0, 0.0)


def test_the_interval_is_daly_s_but_not_shorter_than_a_save() -> None:
    random = Random(0)
    cost = saving_cost(setting(3), 10**9, 64, GoodputOptions())
    assert job_of(cost, 1e6, GoodputOptions(), random).interval_s == pytest.approx(daly(cost.pause_s, 1e6))
    assert job_of(cost, 1.0, GoodputOptions(), random).interval_s == cost.write_s


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"day": 3}', "did you mean 'days'"),
        ('{"days": 0}', "expected a whole number of days of at least 1"),
        ('{"rates": "llama2"}', 'did you mean "llama3"'),
        ('{"gpu_mtbf_hours": 0}', "expected a number of hours"),
        ('{"start_seconds": -1}', "expected a number of seconds"),
        ("[]", "--goodput"),
        ("{", "not JSON"),
    ],
)
def test_wrong_json_is_refused_before_anything_is_planned(
    text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*PLAN, "--goodput", text]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and not printed.out


def test_options_are_read() -> None:
    assert options_from("{}") == GoodputOptions()
    assert options_from('{"rates": "rsc1", "false_alarm_hours": 700}').false_alarm_hours == 700
