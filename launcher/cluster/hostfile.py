"""Read a hostfile, DeepSpeed's own format: a line `node-0 slots=8` for each host, `#` starts a comment.

DeepSpeed trains on this machine alone when the file is missing, with a warning, and accepts slots=0. Both are
refused here, and so is a host that stands there twice.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ds_ring.config.json_text import read_small
from ds_ring.config.messages import MOST_PROBLEMS, Problem, sentence, shown
from ds_ring.errors import RingConfigError

from .yaml_file import MOST_BYTES, missing_file

_LINE = re.compile(r"(?P<name>\S{1,253})\s+slots\s*=\s*(?P<slots>\d{1,12})", re.ASCII)


def read_hostfile(path: Path) -> tuple[list[dict[str, Any]], list[Problem]]:
    """Return the hosts as a YAML would list them, and what is wrong with the file, with line numbers."""
    try:
        text = read_small(path, MOST_BYTES)
    except FileNotFoundError:
        return [], [Problem("hostfile", missing_file(path, "a hostfile"))]
    except IsADirectoryError:
        return [], [
            Problem("hostfile", f"expected a hostfile, got the directory {path}; name the file in it")
        ]
    except RingConfigError as error:
        return [], [Problem("hostfile", str(error))]
    hosts: list[dict[str, Any]] = []
    problems: list[Problem] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#")[0].strip()
        if not content:
            continue
        # A file of another kind has a problem on each line: the first ones are enough.
        if len(problems) > MOST_PROBLEMS:
            break
        problem = _problem_of(content, number, seen)
        if problem:
            problems.append(Problem("hostfile", f"{path}, line {number}: {problem}"))
        elif (found := _LINE.fullmatch(content)) is not None:
            hosts.append({"name": found["name"], "slots": int(found["slots"])})
            seen[found["name"]] = number
    if not hosts and not problems:
        expected = sentence("a line 'node-0 slots=8' for each host", "no host", "write them down")
        problems.append(Problem("hostfile", f"{path}: {expected}"))
    return hosts, problems


def _problem_of(content: str, number: int, seen: dict[str, int]) -> str:
    found = _LINE.fullmatch(content)
    if found is None:
        return sentence("'node-0 slots=8'", _quoted(content), "write the name, a blank, slots=number")
    if int(found["slots"]) == 0:
        return sentence("at least one slot", f"{found['name']} slots=0", "remove the line, or give it slots")
    if found["name"] in seen:
        first = f"{found['name']} on line {seen[found['name']]} and again"
        return sentence("every host once", first, "add its slots up in one line")
    return ""


def _quoted(content: str) -> str:
    return repr(content) if len(content) <= 80 else shown(content)
