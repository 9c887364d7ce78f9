"""Files of .github are valid in SchemaStore's schemas (of check-jsonschema), and what they run exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.document_readers import read_command
from tests.documents import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [GITHUB / f"ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "model")]
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE/config.yml"],
}
# A fault in the text of the first file of each schema, and what the schema says of it.
FAULTS = {
    "github-workflows": ("runs-on:", "runs_on:", "$.jobs.day"),
    "github-issue-forms": ("type: textarea", "type: textfield", "'textfield' is not one of"),
    "github-issue-config": ("true", "perhaps", "'perhaps' is not of type 'boolean'"),
}


def validate(schema: str, files: list[Path]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    return subprocess.run([*command, *map(str, files)], capture_output=True, text=True, timeout=60)


@pytest.mark.needs("check_jsonschema")
@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_is_valid_and_a_fault_in_it_is_found(tmp_path: Path, schema: str) -> None:
    done = validate(schema, SCHEMAS[schema])
    assert done.returncode == 0, done.stdout
    right, wrong, words = FAULTS[schema]
    text = SCHEMAS[schema][0].read_text()
    assert right in text
    (tmp_path / "wrong.yml").write_text(text.replace(right, wrong))
    done = validate(schema, [tmp_path / "wrong.yml"])
    assert done.returncode == 1 and words in done.stdout, done.stdout


def test_every_file_has_its_schema() -> None:
    assert sorted(file for files in SCHEMAS.values() for file in files) == sorted(GITHUB.rglob("*.yml"))
    assert [path.stem for path in WORKFLOWS] == ["ci", "night", "release"]


def steps(name: str) -> list[dict[str, Any]]:
    """The steps of a workflow's jobs."""
    jobs = yaml.safe_load((GITHUB / f"workflows/{name}.yml").read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_the_commands_of_a_workflow_exist() -> None:
    lines = {
        name: [step["run"] for step in steps(name) if "run" in step] for name in ("ci", "night", "release")
    }
    assert lines["ci"][-1] == "bash .ci/run" and lines["night"][-1] == "bash .ci/run --night"
    for line in (line for found in lines.values() for line in found):
        assert subprocess.run(["bash", "-n"], input=line, text=True).returncode == 0, line
        for file in re.findall(r"(?:bash|python) ([\w.]\S*)", line):
            assert (ROOT / file).is_file(), line


def test_only_the_job_that_publishes_may_ask_for_a_token() -> None:
    release = yaml.safe_load((GITHUB / "workflows/release.yml").read_text())
    allowed = {name: job.get("permissions", release["permissions"]) for name, job in release["jobs"].items()}
    assert allowed == {"build": {"contents": "read"}, "publish": {"id-token": "write"}}
    assert release["jobs"]["publish"]["environment"] == "pypi"


@pytest.mark.parametrize(("tag", "status"), [("v0.1.0", 0), ("0.1.0", 0), ("v0.2.0", 1)])
def test_a_release_has_the_version_of_its_tag(tmp_path: Path, tag: str, status: int) -> None:
    (step,) = [step for step in steps("release") if step.get("name") == "the tag is the version"]
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/ds_ring-0.1.0-py3-none-any.whl").write_text("")
    done = subprocess.run(
        ["bash", "-c", step["run"]], cwd=tmp_path, env={"TAG": tag, "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == status


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_what_the_commands_print(form: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {part["id"]: part for part in yaml.safe_load(form.read_text())["body"]}
    assert fields["doctor"]["validations"]["required"]
    commands = re.findall(r"`(ds-ring [^`]+)`", form.read_text())
    assert {command.split()[1] for command in commands} == {"doctor", "check-model"}
    for command in commands:
        assert command.endswith("--json")
        read_command(command, monkeypatch)
