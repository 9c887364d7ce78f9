"""The API pages are built by pdoc, and every public name has a section with a docstring in them."""

from __future__ import annotations

import html
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ds_ring
from tests.documents import ROOT


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages, built by the command of CONTRIBUTING."""
    folder = tmp_path_factory.mktemp("api")
    command = [sys.executable, str(ROOT / "tools/api_pages.py"), "--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def section_of(page: str, name: str) -> str:
    """What the page says about one name, without its members, as text."""
    start = page.find(f'<section id="{name}">')
    assert start >= 0, f"{name} has no section"
    end = page.find("<section id=", start + 1)
    text = re.sub(r"<[^>]+>", " ", page[start : end if end >= 0 else len(page)])
    return " ".join(html.unescape(text).split())


@pytest.mark.needs("pdoc")
@pytest.mark.parametrize("name", ds_ring.__all__)
def test_public_name_has_a_section_with_its_docstring(pages: Path, name: str) -> None:
    docstring = inspect.getdoc(getattr(ds_ring, name))
    assert docstring, f"ds_ring.{name} has no docstring"
    first_words = re.findall(r"\w+", docstring.split("\n")[0])[:5]
    shown = re.findall(r"\w+", section_of((pages / "ds_ring.html").read_text(), name))
    places = [shown[i : i + len(first_words)] for i in range(len(shown))]
    assert first_words in places, f"{name}: {first_words} not in {shown[:80]}"


@pytest.mark.needs("pdoc")
def test_every_page_is_linked_from_the_index(pages: Path) -> None:
    from tools.api_pages import MODULES

    for module in MODULES:
        assert (pages / f"{module.replace('.', '/')}.html").is_file(), module
    assert "ds_ring.html" in (pages / "index.html").read_text()
