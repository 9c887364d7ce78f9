"""Whether all names that are used of other packages exist in the versions that were tried."""

from __future__ import annotations

import json
import re
import tomllib

import lowest_names
import pytest
from packaging.version import Version

# Import names of distributions in pyproject.toml.
MODULES = {"pyyaml": "yaml", "megatron-core": "megatron"}
EXTRAS = ("deepspeed", "launch", "plot", "train", "trainers", "megatron")
# Names that a version lacks, and modules outside of compat that are left out, or refuse by name, then.
LEFT_OUT = {
    "transformers.cache_utils.LinearAttention": ("ds_ring/decode/ring_cache.py",),
    "transformers.masking_utils.create_bidirectional_mask": ("ds_ring/contrib/sound/model.py",),
    "torch.distributed.ProcessGroupNCCL": ("ds_ring/comm/groups.py",),  # torch without CUDA
}


@pytest.fixture(scope="module")
def table():
    return json.loads(lowest_names.TABLE.read_text())


def names_outside_compat() -> dict[str, set[str]]:
    """The names that each file uses."""
    root = lowest_names.ROOT
    files = [path for folder in ("ds_ring", "launcher") for path in (root / folder).rglob("*.py")]
    by_file = {str(path.relative_to(root)): lowest_names.names_used(path) for path in files}
    return {name: used for name, used in by_file.items() if not name.startswith("ds_ring/compat/")}


def find_unguarded(rows: dict[str, list[str]]) -> list[str]:
    """Each use of a name that a tried version lacks, outside of compat and of what is left out then."""
    uses = names_outside_compat()
    return [
        f"{file} uses {name}, which {row} lacks"
        for row, missing in rows.items()
        for name in missing
        for file, used in uses.items()
        if name in used
        and not any(name.startswith(part) and file in files for part, files in LEFT_OUT.items())
    ]


def test_every_name_that_is_used_was_looked_for_in_the_versions_that_were_tried(table):
    known = {name for names in table["names"].values() for name in names}
    # of packages that have rows: others are peers, which a comparison imports if they are there
    used = {name for name in lowest_names.all_used() if name.partition(".")[0] in table["names"]}
    unknown = sorted(used - known)
    assert not unknown, (
        f"{unknown}: expected names of the table; `python tools/version_matrix.py --names` looks for them in"
        " each version"
    )


def test_a_name_that_a_version_lacks_is_used_in_compat_alone(table):
    assert find_unguarded(table["rows"]) == []


@pytest.mark.night
def test_a_use_of_a_name_that_a_version_lacks_is_found():
    rows = {"deepspeed 0.1": ["deepspeed.pipe.PipelineModule"]}
    assert find_unguarded(rows) == [
        "ds_ring/engines/deepspeed/refusals.py uses deepspeed.pipe.PipelineModule, which deepspeed 0.1 lacks"
    ]


def test_the_lower_bounds_were_tried(table):
    project = tomllib.loads((lowest_names.ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for name in EXTRAS:
        wanted += project["optional-dependencies"].get(name, [])
    bounds = dict(match.groups() for one in wanted if (match := re.match(r"([\w-]+)>=([\w.]+)", one)))
    lowest: dict[str, Version] = {}
    for row in table["rows"]:
        name, _, version = row.partition(" ")
        lowest[name] = min(Version(version), lowest.get(name, Version(version)))
    compared = {MODULES.get(name, name): Version(bound) for name, bound in bounds.items()}
    assert {"torch", "deepspeed", "transformers", "accelerate", "trl", "peft"} <= set(compared) & set(lowest)
    for name, bound in compared.items():
        assert name not in lowest or lowest[name] <= bound, name


def test_a_name_is_read_through_aliases_and_not_of_blocks_for_types(tmp_path):
    file = tmp_path / "file.py"
    file.write_text("""
from typing import TYPE_CHECKING
import json
import torch.distributed as dist
from torch import nn
import rich
if TYPE_CHECKING:
    import peft
def f():
    import yaml
    dist.get_rank(nn.Linear.bias, rich.print, yaml.CLoader, json.dumps)
""")
    assert lowest_names.names_used(file) == {
        "torch.distributed.get_rank", "torch.nn.Linear", "torch.nn.Linear.bias", "rich", "rich.print", "yaml",
        "yaml.CLoader",
    }  # fmt: skip


def test_a_name_that_is_missing_is_seen(capsys, monkeypatch):
    assert lowest_names.is_there("json.dumps") and not lowest_names.is_there("json.no_such")
    assert lowest_names.is_there("torch.nn.functional.relu")
    monkeypatch.setattr(lowest_names, "all_used", lambda: ["json.dumps", "no_such_package.name"])
    assert lowest_names.main(["--print"]) == 1
    assert capsys.readouterr().out == "no_such_package.name\n"
