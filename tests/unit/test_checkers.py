"""Every checker finds the fault that it is for: what no test beside the checker seeds is seeded here."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks import host
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ring.engines.first_batch.first_batch import Numbers, Tolerance, beyond, compare, recording
from ds_ring.ring.merge import merge_parts_by_operators_
from tests import test_architecture as architecture
from tests.dist import training_table
from tests.fake_cuda import cuda_guard
from tests.host_waits import HostWaits
from tests.integration import test_documents as documents
from tests.merge_cases import cases, wrong, wrong_parts
from tools import (
    campaign,
    check_long,
    check_plan,
    check_training,
    soak,
)

NAN = float("nan")


# --- comparisons with one process ------------------------------------------------------------------


def numbers() -> Numbers:
    """Of a model of one layer and two parameters."""
    generator = torch.Generator().manual_seed(0)
    logits, layer = (torch.randn(2, 64, 8, generator=generator) for _ in range(2))
    gradients = {name: torch.randn(8, 8, generator=generator) for name in ("first", "second")}
    return Numbers(logits, 1.0, {"layers.0": layer}, gradients)


def swap(gradients: dict[str, Tensor]) -> None:
    gradients["first"], gradients["second"] = gradients["second"], gradients["first"]


# What is damaged, and what the first finding names.
SEEDED: dict[str, tuple[Callable[[Numbers], object], str]] = {
    "one token": (lambda got: got.logits[1, 40].mul_(1.01), "logits"),
    "one token of a layer": (lambda got: got.layers["layers.0"][0, 3].zero_(), "layer layers.0"),
    "not a number": (lambda got: got.logits[0, 0].fill_(NAN), "logits"),
    "loss of one rank": (lambda got: setattr(got, "loss", 1.0 / 2), "loss"),
    "gradient halved": (lambda got: got.gradients["second"].div_(2), "gradient second"),
    "gradients swapped": (lambda got: swap(got.gradients), "gradient first"),
    "gradient missing": (lambda got: got.gradients.pop("first"), "gradient first"),
    "gradient not a number": (lambda got: got.gradients["second"][0].fill_(NAN), "gradient second"),
    "fewer tokens": (lambda got: setattr(got, "logits", got.logits[:, :63]), "logits"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SEEDED)
def test_the_first_batch_check_and_check_model_find(fault: str) -> None:
    (damage, named), got, allowed = SEEDED[fault], numbers(), Tolerance.for_dtype(torch.float32)
    assert not beyond(compare(got, numbers()), allowed), "without a fault nothing differs"
    damage(got)
    found = beyond(compare(got, numbers()), allowed)
    assert found and str(found[0]).startswith(named), found


def test_the_first_batch_check_compares_layers_that_learn() -> None:
    """Not rotary embeddings in a ModuleList (Granite SWA), of which one row may serve all samples."""
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Identity()])})
    with recording(model) as outputs:
        for layer in model["layers"]:
            layer(torch.ones(1, 3, 2))
    assert list(outputs) == ["layers.0"]


@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_tables_of_training_find_a_nan_behind_a_number(place: str) -> None:
    """`max` passes over a NaN that does not come first."""
    fine = {"first": torch.ones(2), "second": torch.ones(2)}
    bad = fine | ({"second": torch.tensor([1.0, NAN])} if place == "gradient" else {})

    def run(loss: float, gradients: dict[str, Tensor]) -> Any:
        return training_table.Run([loss], gradients)

    runs = [run(1.0, bad), run(NAN if place == "loss" else 1.0, bad)]
    errors = training_table.errors(runs, run(1.0, fine))
    assert errors[place == "gradient"] == float("inf") and errors[place != "gradient"] == 0


# --- tools that end with 1 -------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [check_plan, check_training, campaign], ids=lambda tool: tool.__name__)
def test_a_tool_that_would_look_at_nothing_is_refused(tool: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main([*["fault"][: tool is campaign], "--only", "no such thing"])
    assert ended.value.code == 2 and "--only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("peak", "sent", "code"), [(100, 8, 0), (106, 8, 1), (94, 8, 1), (100, 9, 1), (100, 0, 1)]
)
def test_check_plan_finds(peak: int, sent: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak that is off by more than 5 %, and bytes that are not those of the plan."""
    monkeypatch.setattr(check_plan, "POINTS", check_plan.POINTS[2:3])
    monkeypatch.setattr(check_plan, "planned", lambda _: check_plan.PeakAndTraffic(peak, 8))
    monkeypatch.setattr(check_plan, "measured", lambda _: check_plan.PeakAndTraffic(100, sent))
    assert check_plan.main(["--json"]) == code


@pytest.mark.parametrize("tool", [check_long, check_training], ids=lambda tool: tool.__name__)
@pytest.mark.parametrize(("loss", "gradient"), [(1e-2, 0.0), (0.0, 1e-2), (NAN, 0.0), (0.0, NAN)])
def test_a_cell_beyond_rounding_is_bad(
    tool: Any, loss: float, gradient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "errors", lambda *_: (loss, gradient))
    monkeypatch.setattr(training_table, "train_alone", lambda _: None)
    monkeypatch.setattr(check_training, "train_alone", lambda _: None)

    class Pool:
        world_size = 1

        def run(self, *_: object) -> None: ...

    name = next(iter(training_table.VARIANTS))
    call = (name, 3, "") if tool is check_training else ("llama", 0, "", False, None)
    text, good = tool.cell(Pool(), *call)
    assert not good and text.endswith("!")


SOAKED = [{"pass": n, "rss_mib": 100.0, "descriptors": 9, "threads": 5} for n in (0, 10, 100)]


@pytest.mark.parametrize(
    ("seeded", "says"),
    [
        ({}, ""),
        ({"different": 1}, "1 results differ"),
        ({"large_hop_exact": False}, "bit for bit"),
        ({"seen": [*SOAKED[:2], SOAKED[2] | {"rss_mib": 109.0}]}, "rss_mib grew by 9"),
        ({"seen": [*SOAKED[:2], SOAKED[2] | {"descriptors": 10}]}, "descriptors grew by 1"),
        ({"seen": [*SOAKED[:2], SOAKED[2] | {"threads": 6}]}, "threads grew by 1"),
    ],
)
def test_soak_finds(seeded: dict[str, Any], says: str) -> None:
    found = soak.judge({"different": 0, "large_hop_exact": True, "seen": SOAKED} | seeded, 100, 8.0)
    assert says in str(found) if says else not found


def without_the_maximum(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """lse + log1p(exp(part_lse - lse)): overflows at a gap of 89."""
    merged = lse + torch.log1p((part_lse - lse).exp())
    out.mul_((lse - merged).exp().unsqueeze(-1)).add_(part_out * (part_lse - merged).exp().unsqueeze(-1))
    lse.copy_(merged)


def without_the_part(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """A part is lost."""


@pytest.mark.parametrize("merge", [without_the_maximum, without_the_part])
def test_merge_cases_find(merge: Callable[..., None]) -> None:
    assert any(what for case in cases((5,)) for what in wrong(case, merge))


def without_the_last(out: Tensor, lse: Tensor | None, parts: list[Any]) -> None:
    """The last one of several parts is lost."""
    merge_parts_by_operators_(out, lse, parts[:-1] or parts)


def test_merge_cases_find_a_part_of_several() -> None:
    found = [what for case in cases((5,)) for what in wrong_parts(case, without_the_last)]
    assert any("out of 3" in what for what in found) and any("sum of 5" in what for what in found)
    assert not any(" of 1 " in what for what in found)


# --- the rules of tests themselves -----------------------------------------------------------------


WAITS: dict[str, Callable[[Tensor], object]] = {
    "cpu()": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "index": lambda x: x[x > 0],
    "copy_: cpu to cuda:0": lambda x: x.copy_(torch.ones(4)),
    "_to_copy: cpu": lambda x: torch.ones(4).to(x.device),
    "cuda()": lambda x: torch.ones(4).cuda(),
    "repeat_interleave": lambda x: torch.repeat_interleave(torch.ones_like(x, dtype=torch.long)),
    "synchronize()": lambda x: torch.cuda.synchronize(),
    "item()": lambda x: x.item(),
    "stream": lambda x: torch.cuda.Stream.synchronize(mock.Mock()),
    "event": lambda x: torch.cuda.Event.synchronize(mock.Mock()),
    "sleep()": lambda x: time.sleep(0),
}


@pytest.mark.parametrize("what", WAITS)
def test_the_test_of_host_waits_finds(what: str) -> None:
    with cuda_guard(), FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.ones(4, device="cuda")
        with HostWaits().watching() as waits:
            x.mul_(2)
            assert not waits.found
            with suppress(Exception):  # a fake tensor has no value to read, and this machine no GPU
                WAITS[what](x)
    what = "synchronize()" if what in ("stream", "event") else what
    assert any(one.startswith(what) for one in waits.found), waits.found


DOWN, OUTSIDE = "imports_go_downward", "outside_packages_stay_in_their_place"
ENVIRONMENT = "nothing_below_the_launcher_reads_the_environment"
SENDS = "only_the_exchange_sends_from_rank_to_rank"
WAITS_FOR_A_COPY = "arrays_go_to_a_device_without_a_wait"
BROKEN: dict[str, tuple[str, str, str]] = {
    "up": (DOWN, "masks.seeded", "from ds_ring.runtime import mesh"),
    "the package": (DOWN, "masks.seeded", "import ds_ring"),
    "in a function": (DOWN, "masks.seeded", "def f():\n    from ..schedule import plan"),
    "a part of the runtime": ("parts_of_the_runtime_do_not_import_each_other", "ring.merge",
        "from ds_ring.comm.exchange import Exchange"),
    "a pass": ("only_autograd_sees_a_pass", "ops.seeded", "from ds_ring.ring.ring_pass import RingPass"),
    "an outside package": (OUTSIDE, "ops.seeded", "import deepspeed"),
    "torch in arithmetic": (OUTSIDE, "schedule.seeded", "import torch"),
    "tests": (OUTSIDE, "ops.seeded", "import tests.cases"),
    "the environment": (ENVIRONMENT, "ops.seeded", "import os\nx = os.environ.get('X')"),
    "the environment by name": (ENVIRONMENT, "ops.seeded", "from os import getenv"),
    "a send": (SENDS, "ops.seeded", "import torch.distributed as dist\ndist.send(x, 1)"),
    "a send under another name": (SENDS, "ops.seeded", "import torch.distributed as c10d\nc10d.send(x, 1)"),
    "a send of a backend": (SENDS, "ops.seeded",
        "way = group._get_backend(device)\nway.send([x], 1, 0)"),
    "a send of a group": (SENDS, "ops.seeded",
        "import torch.distributed as dist\ndist.group.WORLD.send([x], 1, 0)"),
    "a pageable copy": (WAITS_FOR_A_COPY, "layers.seeded", "y = torch.from_numpy(x).to(device)"),
    "an index on the CPU": (WAITS_FOR_A_COPY, "layers.seeded", "y = x[..., torch.from_numpy(index)]"),
    "a list": (WAITS_FOR_A_COPY, "layers.seeded", "y = torch.tensor([1]).to(device)"),
    "an all-gather": (SENDS, "ops.seeded", "import torch.distributed as dist\ndist.all_gather(parts, x)"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_the_rules_of_the_architecture_find(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, name, source = BROKEN[what]
    path = tmp_path / "seeded.py"
    path.write_text(source + "\n")
    monkeypatch.setitem(architecture.MODULES, name, path)
    with pytest.raises(AssertionError):
        getattr(architecture, rule)(name)


def test_the_rule_of_machine_paths_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "seeded.md"
    path.write_text("pip install --index" + "-url https://mirror\n")
    monkeypatch.setattr(architecture, "ROOT", tmp_path)
    monkeypatch.setattr(architecture, "tracked_files", lambda: [path])
    with pytest.raises(AssertionError, match="seeded"):
        architecture.test_no_machine_paths_in_tracked_files()


@pytest.mark.parametrize("command", ["ds-ring no-such-command", "ds-ring plan --no-such-option 1"])
def test_the_test_of_commands_finds(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        documents.test_inline_command_is_understood("README.md", command, monkeypatch)


@pytest.mark.parametrize("text", ["see `comm/no_such_file.py`", "`NO_SUCH_NAME` in `comm/exchange.py`"])
def test_the_test_of_named_files_finds(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seeded.md").write_text(text)
    (tmp_path / "ds_ring").symlink_to(documents.ROOT / "ds_ring")
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    with pytest.raises(AssertionError):
        documents.test_files_and_names_in_them_are_there("seeded.md")


def test_the_host_benchmark_finds_a_hop_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    given = argparse.Namespace(ring_size=4, rounds=3, slots=16, profile="", warm_up=1)
    for goal, late in ((1e9, [False, False]), (1e-9, [False, True])):
        monkeypatch.setattr(host, "GOALS_US", {"forward": 1e9, "backward": goal})
        assert [bool(row.wrong) for row in host.measure_rows(given)] == late
