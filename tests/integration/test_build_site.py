"""The site has every text and every public name with its docstring, and a broken link in it is an error."""

from __future__ import annotations

import html
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ds_ring
from tests.documents import ROOT
from tools import build_site


@pytest.fixture(scope="module", autouse=True)
def _modules_as_before() -> Iterator[None]:
    """pdoc executes what stands under TYPE_CHECKING, in the modules themselves: another RingConfig, say."""
    import ds_ring.config.section  # noqa: F401

    before = {
        module: dict(vars(module)) for name, module in sys.modules.items() if name.startswith("ds_ring")
    }
    yield
    for module, names in before.items():
        vars(module).update(names)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    assert build_site.main(["--output", str(folder)]) == 0
    return folder


@pytest.mark.night
@pytest.mark.needs("pdoc")
def test_the_command_of_contributing_builds_it(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/build_site.py"), "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and (tmp_path / "api/ds_ring.html").is_file(), done.stderr


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
    shown = re.findall(r"\w+", section_of((pages / "api/ds_ring.html").read_text(), name))
    places = [shown[i : i + len(first_words)] for i in range(len(shown))]
    assert first_words in places, f"{name}: {first_words} not in {shown[:80]}"


@pytest.mark.needs("pdoc")
def test_every_page_is_linked_from_the_index(pages: Path) -> None:
    for module in build_site.MODULES:
        assert (pages / f"api/{module.replace('.', '/')}.html").is_file(), module
    assert "ds_ring.html" in (pages / "api/index.html").read_text()
    listed = subprocess.run(
        ["git", "ls-files", "*.md", ":!tools/results", ":!.github"], cwd=ROOT, capture_output=True, text=True
    )
    assert listed.returncode or sorted(build_site.TEXTS) == sorted(listed.stdout.split())
    linked = re.findall(r'<li><a href="([^"]+)">', (pages / "index.html").read_text())
    assert linked[:2] == ["index.html", "ds_ring/TUTORIAL.html"]
    assert len(linked) == len(build_site.TEXTS) + 1 and all((pages / link).is_file() for link in linked)
    assert all((pages / name).is_file() for name in ("tools/results/ring.svg", "configs/recipes/8_gpus.svg"))


@pytest.mark.night
@pytest.mark.needs("pdoc")
def test_a_broken_link_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An anchor, a text, a picture and a file that are not there, in a copy of the texts."""
    root, output = tmp_path / "root", tmp_path / "site"
    for text in build_site.TEXTS:
        (root / text).parent.mkdir(parents=True, exist_ok=True)
        (root / text).write_text((ROOT / text).read_text())
    shutil.copytree(ROOT / "tools/results", root / "tools/results")
    for file in ("launcher/run/run_folder.py", "ds_ring/patches.py", "configs/recipes/8_gpus.svg"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("")
    with (root / "ds_ring/TUTORIAL.md").open("a") as tutorial:
        tutorial.write("[1](../README.md#limit) [2](GONE.md) ![3](gone.svg) [4](../tools/gone.py)\n")
    assert build_site.main(["--root", str(root), "--output", str(output)]) == 1
    told = capsys.readouterr().err.splitlines()
    broken = ("../index.html#limit", "../tools/gone.py", "GONE.html", "gone.svg")
    assert told == [f"broken link: ds_ring/TUTORIAL.html: {link}" for link in broken]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(SystemExit):
        build_site.main(["--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
