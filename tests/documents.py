"""The fenced blocks of our documents, and a folder in which a stranger would run them.

Owns finding blocks, inline commands and links, and running a block's text: bash blocks by bash with what is
installed already, python blocks on real gloo ranks. How each block is run, and what must come of it, stands
in tests/integration/test_documents.py.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.dist.harness import run_ranks

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md", "MIGRATING.md", "configs/README.md", "ds_ring/README.md", "ds_ring/TUTORIAL.md",
    "launcher/README.md", "launcher/TROUBLESHOOTING.md", "tools/README.md",
    "tools/upstream/README.md", "configs/recipes/README.md",
)  # fmt: skip
# About the code: the names of files in them are checked, too.
OF_THE_CODE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *(f"ds_ring/{name}.md" for name in ("DESIGN", "NOTES", "READING", "models/PATCHES")),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("ds_ring/*/**/README.md")),
)
TEXTS = (*DOCUMENTS, *OF_THE_CODE)
TROUBLESHOOTING = "launcher/TROUBLESHOOTING.md"
# arguments of launcher/demo/train_lm.py
SMALL_RUN = "--steps 2 --sequence_length 64 --hidden_size 16 --layers 1 --evaluate_every 2"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"`((?:python tools/|python -m tools\.|pytest |ds-ring )[^`\n]+)`")
# what a section is made of: a fenced block, or lines up to an empty one
_BLOCK = re.compile(r"^```.*?^```$|^[^\n].*?(?=\n\s*\n|\n```|\Z)", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^(?=- )", re.MULTILINE)
_UNITS = "s|ms|us|seconds|minutes|hours|KiB|MiB|GiB|TiB|MB|GB|TB|%|tokens/s|units|times"
# with a unit, an error like 1.2e-7, or a ratio below 2 with two decimals
_FIGURE = re.compile(
    rf"(?<![\w.])(?:\d[\d,.]*\s?(?:{_UNITS})(?![\w-])|\d(?:\.\d+)?e-\d+|[01]\.\d\d(?![\d.]\d))"
)
_RUNS = re.compile(r"python (?:tools/|-m tools\.)|ds-ring |deepspeed --num_gpus")
_TEST = re.compile(r"pytest |\btest_\w+\.py")
_EVIDENCE = re.compile(r"\]\((?:\.\./)*tools/README\.md#")
_DATE = re.compile(r"\b\d{1,2} (?:November|December|January|February) 20\d\d\b")
_WORD = re.compile(r"`[^`]*`|[^\s`]*\w[^\s`]*")  # a span of code is one word
_BREAK = re.compile(r"(?<=[.?!])[)\"*]*\s+(?=[\"*(`\[A-Z0-9])|\n\s*\n|\n(?=\s*(?:[-*#>]|\d+\.) )")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_INSTALL = """#!/bin/sh
echo "$@" >> pip.log
"""
_RUN = """#!/bin/sh
exec "{python}" "$@"
"""
_MAKE_ENVIRONMENT = """#!/bin/sh
[ "$*" = "-m venv .venv" ]
"""


class Block(NamedTuple):
    """A fenced block: where it stands, its language and its text."""

    document: str
    line: int
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.split("\n", 1)[0]


def blocks() -> list[Block]:
    """Every fenced block of the texts, in their order."""
    found = []
    for document in TEXTS:
        text = (ROOT / document).read_text()
        for match in _FENCE.finditer(text):
            found.append(Block(document, text[: match.start()].count("\n") + 1, match[1], match[2]))
    return found


def inline_commands() -> list[tuple[str, str]]:
    """Each command that stands in backquotes, with its document; one with "..." in it is no whole command."""
    found = {
        (document, match[1])
        for document in TEXTS
        for match in _COMMAND.finditer((ROOT / document).read_text())
        if "..." not in match[1]
    }
    return sorted(found)


def links() -> list[tuple[str, str]]:
    """Each relative link, with its document."""
    found = ((name, match[1]) for name in TEXTS for match in _LINK.finditer((ROOT / name).read_text()))
    return sorted({(name, target) for name, target in found if "://" not in target})


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    text = _FENCE.sub("", document.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Figure(NamedTuple):
    """A measured figure: its place, the paragraph, item or row with it, and that with its neighbours."""

    document: str
    line: int
    text: str
    nearby: str

    def lacks(self) -> str:
        """Return what does not stand next to it, "" for nothing.

        A test holds its bound in each run, and needs no date. A link to a section of tools/README.md, where
        each figure has both, does as well.
        """
        if _TEST.search(self.nearby) or _EVIDENCE.search(self.nearby):
            return ""
        if not _RUNS.search(self.nearby):
            return "a command or a test"
        return "" if _DATE.search(self.nearby) else "a date"


def figures(document: str, text: str) -> list[Figure]:
    """Every unit of a text (paragraph, list item, row of a table) with a number as of a measurement in it.

    What stands next to a unit is the block before it and the one after it, within its section; of a row this
    is what stands next to its table (two blocks above: a command and its words), and the table's head.
    """
    found = []
    for section, line in _sections(text):
        parts = list(_BLOCK.finditer(section))
        for i, part in enumerate(parts):
            if part[0].startswith("```"):
                continue
            is_table, start = part[0].startswith("|"), part.start()
            places = (i - 2, i - 1, i + 1) if is_table else (i - 1, i + 1)
            around = [parts[j][0] for j in places if 0 <= j < len(parts)]
            for unit in part[0].splitlines(keepends=True) if is_table else _ITEM.split(part[0]):
                if _FIGURE.search(re.sub(r"`[^`]*`", "", unit)):
                    own = part[0].split("\n", 1)[0] + unit if is_table else unit
                    number = line + section.count("\n", 0, section.index(unit, start))
                    found.append(Figure(document, number, unit.strip(), "\n".join([own, *around])))
    return found


def prose(text: str) -> tuple[list[str], list[str]]:
    """Return a document's sentences, and the cells of its tables; headings and fenced blocks are neither."""
    text = re.sub(r"\]\([^)]*\)", "]", _FENCE.sub("\n", text))
    text = re.sub(r"`[^`]*`", lambda code: re.sub(r"\s", "·", code[0]), text)  # no sentence ends in it
    lines = [line for line in text.splitlines() if not line.startswith(("#", "<", "!["))]
    rows = [line.replace(r"\|", "/") for line in lines if line.startswith("|")]
    rest = "\n".join("" if line.startswith("|") else line for line in lines)
    sentences = [part.strip() for part in _BREAK.split(rest)]
    return [one for one in sentences if one], [cell.strip() for row in rows for cell in row.split("|")[1:-1]]


def rows_without_head(text: str) -> list[str]:
    """Return the first rows of tables without a head, which no reader of Markdown takes for tables."""
    tables = re.findall(r"(?:^\|.*\n?)+", _FENCE.sub("\n", text), re.MULTILINE)
    return [table.splitlines()[0] for table in tables if not re.match(r"\|.*\n\|[-:| ]+\|\n", table)]


def messages() -> set[str]:
    """Return the texts of both packages, with a NUL for each value in them; errors in one piece."""
    found = set()
    for path in [*(ROOT / "ds_ring").rglob("*.py"), *(ROOT / "launcher").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            found.add(_text_of(node))
            if isinstance(node, ast.Call) and len(node.args) == 4:  # RingError.wrong
                name, expected, got, advice = map(_text_of, node.args)
                found.add(f"{name}: expected {expected}, got {got}; {advice}")
    return found


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text_of, node.values))
    if isinstance(node, ast.BinOp):
        return _text_of(node.left) + _text_of(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"


def words(text: str) -> int:
    """Return the number of words; a span of code is one."""
    return len(_WORD.findall(text))


def _sections(text: str) -> Iterator[tuple[str, int]]:
    """Yield each section of a text without its heading, and the number of its first line."""
    plain = _FENCE.sub(lambda fence: fence[0].replace("\n#", "\n "), text)  # a comment is no heading
    line = 1
    for part in re.split(r"^(#+ .*\n)", plain, flags=re.MULTILINE):
        if not part.startswith("#"):
            yield part, line
        line += part.count("\n")


class Results(NamedTuple):
    """Hold what the pages of tools/results say: counts of model types, and what ran on a GPU."""

    counts: dict[str, dict[str, int]]  # by the name of the page: of "types", "exact", "refused" and others
    gpus: list[str]
    names_on_gpus: set[str]

    def contradictions(self, document: str, text: str) -> list[str]:
        """Return the sentences and rows that state another count, or another run on a GPU, than the pages."""
        wrong = []
        for head, unit in _units(text):
            plain = _DATE.sub("", re.sub(r"\]\([^)]*\)|`[^`]*`", " ", unit))
            if pages := self._pages(unit) if re.search(r"\b(exact|types)\b", head + unit) else []:
                columns = zip(_cells(head), _cells(unit), strict=False)
                table = [(name, int(cell)) for name, cell in columns if cell.isdigit() and name in pages[0]]
                pairs = re.findall(r"(\d+) of (?:the )?(\d+)", plain)
                numbers = re.findall(r"(?<![\d.,\w-])\d{2,3}(?![\d.,]*\d|[\w-])", plain)
                known = {count for page in pages for count in page.values()}
                is_right = all(pages[0][name] == count for name, count in table)
                is_right &= all(
                    any((str(one["exact"]), str(one["types"])) == x for one in pages) for x in pairs
                )
                is_right &= {*map(int, numbers)} <= known
                wrong += [] if is_right else [f"{document}: expected counts of {pages}, got {unit!r}"]
            if claim := _RUN_ON.search(plain):
                gpus = [name for name in self.gpus if claim[2] in ("GPU", name)]
                is_right = _NUMBERS[claim[1].lower()] == len(gpus)
                wrong += [] if is_right else [f"{document}: expected runs on {self.gpus}, got {unit!r}"]
            if _NOT_RUN.search(plain):
                names = {*re.findall(r"`(\w+)(?:\.py|/)?`", unit)} or {Path(document).parent.name}
                wrong += [f"{document}: {name} ran: {unit!r}" for name in names & self.names_on_gpus]
        return wrong

    def _pages(self, unit: str) -> list[dict[str, int]]:
        """Return the counts of the pages to which a unit links, or else of the newest about its heads."""
        heads = [head for head, words in _HEADS.items() if re.search(words, unit)]
        newest = [max(name for name in self.counts if name.endswith(f"_{head}.md")) for head in heads]
        return [self.counts[name] for name in _PAGE.findall(unit) or newest]


_PAGE = re.compile(r"results/(models_[\w.-]+\.md)\)")
_HEADS = {
    "causal-lm": r"causal (?:language models|types)|`causal-lm`",
    "image-text": r"image-text",
    "seq2seq-lm": r"encoder-decoders",
}
_NUMBERS = {"no": 0, "a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "several": 2}
_RUN_ON = re.compile(rf"\b({'|'.join(_NUMBERS)}) (GPU|[AHB]\d00)s?\b.*\br[au]ns?\b", re.IGNORECASE)
_NOT_RUN = re.compile(r"\b(?:not|never|nothing|none)\b.*\br[au]n on (?:a |one )?GPU", re.IGNORECASE)


def read_results(folder: Path = ROOT / "tools/results") -> Results:
    """Read the pages that commands have written."""
    counts = {}
    for path in folder.glob("models_*.md"):
        line = path.read_text().splitlines()[2].partition("`")[0]
        counts[path.name] = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", line)}
    pages = [path.read_text() for path in folder.glob("gpu_*.md")]
    gpus = [re.search(r"^One NVIDIA (\w+)", page, re.MULTILINE) for page in pages]
    names = {re.sub(r"\.py$", "", word) for page in pages for word in re.findall(r"[\w.]+", page)}
    return Results(counts, [gpu[1] for gpu in gpus if gpu], names)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")]


def _units(text: str) -> list[tuple[str, str]]:
    """Return the sentences of a document, and the rows of its tables with the heads of these."""
    sentences, rows, head = [], [], ""
    for line in _FENCE.sub("\n", text).splitlines():
        is_row = line.startswith("|")
        head = "" if not is_row else head or line
        rows += [(head, line)] if is_row else []
        sentences.append("" if is_row or line.startswith("#") else line)
    return [*(("", " ".join(part.split())) for part in _BREAK.split("\n".join(sentences))), *rows]


def changed(text: str, instead: Mapping[str, str]) -> str:
    """Return a block's text with smaller sizes in it; what they are put for must be there."""
    for old, new in instead.items():
        assert old in text, f"the block has no {old!r} any more: change what is put in its place"
        text = text.replace(old, new)
    return text


class Place:
    """A folder that looks like a fresh clone; its `.venv` runs what is installed and installs nothing.

    `pip` only writes its arguments to `pip.log`, and `python3 -m venv .venv` changes nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("configs", "ds_ring", "launcher", "tests", "tools", "pyproject.toml", "README.md"):
            (folder / name).symlink_to(ROOT / name)
        programs = folder / ".venv/bin"
        programs.mkdir(parents=True)
        (programs / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
        scripts = {"pip": _INSTALL, "python3": _MAKE_ENVIRONMENT}
        for name, script in scripts.items() | {("python", _RUN.format(python=sys.executable))}:
            (programs / name).write_text(script)
            (programs / name).chmod(0o755)

    def bash(self, text: str, instead: Mapping[str, str] | None = None) -> str:
        """Run a block's text, all of it, and return its output; `instead` says what is put for what in it."""
        text = changed(text, instead or {})
        own, shims = Path(sys.executable).parent, self.folder / ".venv/bin"
        path = os.pathsep.join([str(shims), str(own), os.environ["PATH"]])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DS_")}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=environment | {"PATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, f"{text}\nended with status {done.returncode}:\n{done.stdout[-4000:]}"
        return done.stdout

    def python(self, ranks: int, before: str, text: str, after: str) -> float:
        """Run a block's text on real gloo ranks; the largest `result` that `after` leaves on one of them."""
        results = run_ranks(run_python, ranks, str(self.folder), before, text, after, timeout_s=270)
        return max(map(abs, results))

    def installed(self) -> list[str]:
        """The arguments that `pip` was called with since the last time this was asked, word by word."""
        log = self.folder / "pip.log"
        words = log.read_text().split()
        log.unlink()
        return words


def run_python(rank: int, world_size: int, folder: str, before: str, text: str, after: str) -> Any:
    """Run a python block's text on one rank, between what its document says is there and a check of it."""
    os.chdir(folder)
    names: dict[str, Any] = {"rank": rank, "world_size": world_size}
    for part, what in ((before, "<before>"), (text, "<the block>"), (after, "<after>")):
        exec(compile(part, what, "exec"), names)
    return names.get("result")
