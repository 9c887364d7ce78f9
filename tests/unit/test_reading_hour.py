"""The hour of ds_ring/READING.md is an hour; its steps have the minutes that their parts take."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "ds_ring"
WORDS_A_MINUTE = 250
_STEP = re.compile(r"^## (\d+\. [^\n]*) \((\d+)\)$\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_PART = re.compile(r"docstring|\[Note: [^\]]+\]|(?:head of )?`[\w.]+`")


def count_words(text: str, part: str) -> int:
    """The words of one part of a file: its docstring, a note, a definition, or the head of a class."""
    if part == "docstring":
        return len((ast.get_docstring(ast.parse(text)) or "").split())
    if part.startswith("[Note"):
        text = re.sub(r"^ +#", "#", text, flags=re.MULTILINE)
        at = re.search(rf"^(# )?{re.escape(part)}$", text, re.MULTILINE)
        assert at, f"expected the definition of {part}, got none"
        end = r"\n#?\s*\n#? ?\[Note|\n(?!#)" if at[1] else r'\n\n\[Note|"""'
        return len(re.split(end, text[at.end() + 1 :], maxsplit=1)[0].replace("#", "").split())
    found: Any = ast.parse(text)
    for name in part.removeprefix("head of ").strip("`").split("."):
        named = [
            (getattr(node, "name", None) or ast.unparse(node).split(" =")[0], node) for node in found.body
        ]
        (found,) = [node for defined, node in named if defined == name]
    methods = [node.lineno for node in getattr(found, "body", ()) if isinstance(node, ast.FunctionDef)]
    last = methods[0] - 1 if part.startswith("head") else found.end_lineno
    return len(" ".join(text.splitlines()[found.lineno - 1 : last]).split())


def count_step(lines: str) -> int:
    words = 0
    for path, parts in re.findall(r"^- `([\w/]+\.py)`(?:: (.*))?$", lines, re.MULTILINE):
        text = (FOLDER / path).read_text()
        words += sum(count_words(text, part) for part in _PART.findall(parts)) if parts else len(text.split())
    return words


def test_the_hour_is_an_hour() -> None:
    page = (FOLDER / "READING.md").read_text().split("\n## After the hour")[0]
    design = (FOLDER / "DESIGN.md").read_text().split("\n## The folders")[0]
    steps = _STEP.findall(page)
    assert len(steps) == 10 and all(count_step(lines) for _, _, lines in steps)
    expected = [f"{title} ({round(count_step(lines) / WORDS_A_MINUTE)})" for title, _, lines in steps]
    assert [f"{title} ({minutes})" for title, minutes, _ in steps] == expected
    words = sum(count_step(lines) for _, _, lines in steps) + len(f"{page} {design}".split())
    assert words <= 60 * WORDS_A_MINUTE, f"{words} words"


def test_parts_are_counted_and_missing_parts_are_found() -> None:
    text = '"""One two.\n\n[Note: a]\nThree four\nfive.\n\n[Note: b]\nSix.\n"""\nN = 1\n\n'
    text += '# [Note: c]\n# Seven.\nclass C:\n    """Eight."""\n\n    def f(self) -> None:\n        pass\n'
    counts = {"docstring": 10, "[Note: a]": 3, "[Note: b]": 1, "[Note: c]": 1, "`N`": 3}
    counts |= {"head of `C`": 3, "`C`": 8, "`C.f`": 5}
    assert {part: count_words(text, part) for part in counts} == counts
    for missing in ("`D`", "[Note: d]"):
        with pytest.raises((AssertionError, ValueError)):
            count_words(text, missing)
