"""Whether all names that are used of other packages exist in the lowest versions that are allowed."""

from __future__ import annotations

import json
import re
import tomllib

import lowest_names
import pytest

MODULES = {"pyyaml": "yaml", "megatron-core": "megatron"}


@pytest.fixture(scope="module")
def table():
    return json.loads(lowest_names.TABLE.read_text())


def test_every_name_that_is_used_was_found_in_the_lowest_versions(table):
    unknown = sorted(set(lowest_names.all_used()) - set(table["names"]))
    assert not unknown and not table["missing"], (
        f"{unknown}: expected names of the table that tools/lowest_names.py makes in an environment of the"
        " lowest versions (tools/version_matrix.py --lowest); ask for one that is not there where it is used"
    )


def test_the_table_was_made_with_the_lower_bounds(table):
    project = tomllib.loads((lowest_names.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = list(project["dependencies"])
    for name in ("plot", "train", "trainers", "megatron"):
        wanted += extras[name]
    found = [re.match(r"([\w-]+)>=([\w.]+)", one) for one in wanted]
    bounds = dict(one.groups() for one in found if one)
    compared = {MODULES.get(name, name): bound for name, bound in bounds.items()}
    assert {"torch", "deepspeed", "transformers", "accelerate"} <= set(compared)
    for name, bound in compared.items():
        if name in table["versions"]:
            assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", table["versions"][name]), name


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
