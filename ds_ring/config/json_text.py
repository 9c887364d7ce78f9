"""Read a DeepSpeed JSON strictly, and say where it is broken.

DeepSpeed itself reads with hjson, which takes comments and trailing commas that every other reader of the
same file (Accelerate, Transformers, the launcher, an editor) refuses, and answers a missing file with
"Invalid base64". Here a file is plain JSON in UTF-8, or an error names the line.

Our section is found inside the whole JSON, and keys of the top level that break a ring are refused. The
model of the section (section.py) comes as an argument.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from ds_ring.config.messages import (
    MAX_PROBLEMS,
    Problem,
    config_error,
    did_you_mean,
    problems_of,
    sentence,
    shown,
)
from ds_ring.errors import RingConfigError
from ds_ring.errors import shown as shown_in_errors

# Small text files. A pipe, a device or a socket is refused before it is opened: to open a FIFO waits for its
# writer, and to read /dev/zero never ends.

MAX_BYTES = 4 * 2**20
_KINDS = {"p": "a pipe", "c": "a device", "b": "a device", "s": "a socket"}  # as `ls -l` has them


def read_small(path: Path, most_bytes: int = MAX_BYTES) -> str:
    """Return the text of the file `path`, without a byte order mark.

    Raises:
        RingConfigError: it is no regular file, larger than `most_bytes`, not UTF-8, or cannot be read.
        FileNotFoundError, IsADirectoryError: that; the caller knows what was expected.
    """
    label = str(path) if str(path).isprintable() else repr(str(path))
    label = label if len(label) <= 200 else f"{label[:100]}...{label[-90:]}"
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError
        if not stat.S_ISREG(mode):
            got = _KINDS.get(stat.filemode(mode)[0], "something else")
            what = sentence("a regular file", got, "write its contents to a file first")
            raise config_error(label, what)
        # O_NONBLOCK: if the path has become a pipe since the check, the open must not wait.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            data = file.read(most_bytes + 1)
    except (FileNotFoundError, IsADirectoryError, RingConfigError):
        raise
    except (OSError, ValueError) as error:  # no permission, a name that is too long, a NUL in the name
        got = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        what = sentence("a file that can be read", got, "give the path of a file")
        raise config_error(label, what) from None
    if len(data) > most_bytes:
        most = f"{most_bytes:,} bytes"
        what = sentence(f"a file of at most {most}", f"more than {most}", "is this the right file?")
        raise config_error(label, what)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"the byte {error.object[error.start]:#04x} at offset {error.start}"
        raise config_error(label, sentence("text in UTF-8", got, "save the file as UTF-8")) from None


def is_file(path: Path) -> bool:
    """Return whether there is a regular file, also where the name is none that a file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


Json = dict[str, Any]
MAX_NESTED = 64


def read_object(source: str | os.PathLike[str]) -> Json:
    """Return the JSON object in the file `source`; RingConfigError if it cannot be read."""
    path = Path(source)
    if str(path).lstrip().startswith("{"):
        advice = "pass json.loads(text), or write it to a file"
        raise config_error(f"{str(path)[:40]!r}", sentence("the path of a file", "JSON text", advice))
    try:
        text = read_small(path)
    except FileNotFoundError:
        raise config_error(str(path), f"the file does not exist: {_what_is_there(path)}") from None
    except IsADirectoryError:
        raise config_error(str(path), f"expected a JSON file, got a directory; {_files_in(path)}") from None
    if not text.strip():
        advice = 'it must hold at least {"ring_attention": {"ring_size": 4}}'
        raise config_error(str(path), f"expected a JSON object, got an empty file; {advice}")
    return parse_object(text, str(path))


def parse_object(text: str, label: str) -> Json:
    """Return the JSON object that `text` is; RingConfigError, beginning with `label`, where it is none."""
    # An object, and its keys that occur in it more than once: json would silently keep the last.
    duplicates: list[tuple[Json, list[str]]] = []

    def built(pairs: list[tuple[str, Any]]) -> Json:
        value: Json = dict(pairs)
        if len(value) < len(pairs):
            times = Counter(name for name, _ in pairs)
            duplicates.append((value, [name for name, count in times.items() if count > 1]))
        return value

    # The parser recurses: deeper nesting would overflow its stack.
    if _depth(text) > MAX_NESTED:
        what = sentence(f"at most {MAX_NESTED} brackets in each other", "more", "is this the right text?")
        raise config_error(label, f"cannot be read as JSON: {what}")
    try:
        value = json.loads(text, object_pairs_hook=built)
    except json.JSONDecodeError as error:
        raise config_error(label, _syntax_message(text, error)) from None
    except ValueError as error:  # an integer of 5000 digits
        got = str(error).split(";")[0]
        what = sentence("numbers that can be read", got, "correct them")
        raise config_error(label, f"cannot be read as JSON: {what}") from None
    if not isinstance(value, dict):
        expected = "a JSON object {...} at the top level"
        raise config_error(label, sentence(expected, shown(value), "write {...} with keys"))
    problems = []
    what = sentence("each key once in an object", "this one more than once", "keep one of them")
    for owner, names in duplicates[:MAX_PROBLEMS]:
        # An owner that was itself overwritten by a later duplicate is no longer in the tree.
        prefix = next((key for key, item in _walk(value) if item is owner), "")
        problems += [Problem(f"{prefix}.{name}".removeprefix("."), what) for name in names]
    problems += non_finite(value)
    if problems:
        raise config_error(label, *problems)
    return value


def _depth(text: str) -> int:
    """Return how deep brackets are nested, texts in quotes left out: linear, and known before parsing."""
    depth = deepest = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', text, re.DOTALL):
        bracket = found.group()
        depth += (bracket in "[{") - (bracket in "]}")
        deepest = max(deepest, depth)
    return deepest


def non_finite(value: object) -> list[Problem]:
    """Return one problem for each NaN or infinity anywhere inside `value` (JSON has neither)."""
    advice = "JSON has no NaN and no Infinity: write a number"
    return [
        Problem(key, sentence("a finite number", repr(item), advice))
        for key, item in _walk(value)
        if isinstance(item, float) and not math.isfinite(item)
    ]


def _walk(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value inside `value`, with its dotted key."""
    yield key, value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _walk(item, f"{key}[{index}]")


def _what_is_there(path: Path) -> str:
    where = "" if path.is_absolute() else f" (the current folder is {Path.cwd()})"
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either{where}; check the path"
    near = difflib.get_close_matches(path.name, sorted(os.listdir(path.parent)), n=3, cutoff=0.6)
    advice = f"did you mean {' or '.join(near)}?" if near else _files_in(path.parent)
    return f"nothing of that name in {path.parent.resolve()}{where}; {advice}"


def _files_in(folder: Path) -> str:
    names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    more = ", ..." if len(names) > 5 else ""
    return f"the JSON files there: {', '.join(names[:5])}{more}" if names else "there is no JSON file there"


def _syntax_message(text: str, error: json.JSONDecodeError) -> str:
    """Return line, column, the line itself with a caret under the fault, and its probable cause."""
    position, hint = _diagnose(text, error)
    line_number = text.count("\n", 0, position) + 1
    line_start = text.rfind("\n", 0, position) + 1
    line = text[line_start:].split("\n", 1)[0].rstrip("\r")
    column = position - line_start + 1
    shown_from = max(0, column - 60)  # a minified file is one line of any length
    excerpt = line[shown_from : shown_from + 100].replace("\t", " ")
    caret = " " * (column - 1 - shown_from) + "^"
    return f"not JSON at line {line_number}, column {column}: {hint}\n    {excerpt}\n    {caret}"


def _diagnose(text: str, error: json.JSONDecodeError) -> tuple[int, str]:
    """Return where the fault really is (a trailing comma is noticed one token late), and its name."""
    position = error.pos
    before, here = text[:position].rstrip(), text[position : position + 12]
    trailing = "JSON allows no trailing comma; remove this one"
    if here[:1] in ("}", "]") and before.endswith(","):
        return len(before) - 1, trailing
    if here.startswith(",") and text[position + 1 :].lstrip()[:1] in ("}", "]"):  # what Python 3.13 points at
        return position, trailing
    if here.startswith(("//", "/*", "#")):
        return position, "JSON has no comments; remove it"
    if here.startswith("'"):
        return position, "JSON strings stand in double quotes; replace the single quotes"
    if here.startswith(("True", "False", "None")):
        return position, "Python's True, False and None are true, false and null in JSON"
    if position >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
        return position, f"the text ends too early ({error.msg}); a bracket or a quote is not closed"
    if error.msg.startswith("Expecting ',' delimiter"):
        return position, "expected a comma or a closing bracket here; is the comma before it missing?"
    if error.msg.startswith("Extra data"):
        return position, "expected one JSON object, got more text after its end; remove it"
    return position, f"{error.msg}; correct it here or just before"


SECTION = "ring_attention"
SP_KEY = "sequence_parallel_size"
MAX_KEYS = 500  # of an object in the section

_BREAKS_GRADIENTS = ("mesh_param", "data_parallel_size")
_WHY = (
    "DeepSpeed then builds a device mesh and synchronises gradients over its data axis alone, so that the "
    f"ranks of one sequence drift apart without a word; remove it: {SP_KEY} is all it takes"
)

Model = TypeVar("Model", bound=BaseModel)
JsonSource = str | os.PathLike[str] | Json


def resolve(source: JsonSource, model: type[Model]) -> tuple[Model, Json]:
    """Return the section as a `model`, and the whole JSON. One RingConfigError names all faults."""
    label, given = "the DeepSpeed configuration", cast(object, source)
    if not isinstance(given, (dict, str, os.PathLike)):
        advice = "pass the whole DeepSpeed JSON, or where it is"
        raise config_error(label, sentence("a path or a dict", shown_in_errors(given), advice))
    if isinstance(source, dict):
        whole = source
    else:
        label, whole = str(source), read_object(source)
    problems = _top_level_problems(whole)
    section = whole.get(SECTION)
    if not isinstance(section, dict):
        raise config_error(label, *problems, _no_section(whole))
    if crowded := _crowded(section):
        raise config_error(label, *problems, *crowded)
    if SP_KEY in section:
        problems.append(Problem(f"{SECTION}.{SP_KEY}", "got it inside the section; move it to the top level"))
    ours = {key: whole[key] for key in (SP_KEY, SECTION) if key in whole}
    problems += non_finite(ours)
    try:
        config = model.model_validate(copy.deepcopy(section | {SP_KEY: whole.get(SP_KEY, "auto")}))
    except ValidationError as error:
        # A fault that was found above has the better words for its key.
        known = {problem.key for problem in problems}
        problems += [new for new in problems_of(error, model, SECTION) if new.key not in known]
    if problems:
        raise config_error(label, *problems)
    return config, whole


def _top_level_problems(whole: Json) -> list[Problem]:
    """Return what DeepSpeed swallows: keys that break the gradient, a misspelt sequence_parallel_size."""
    problems = [
        Problem(key, sentence("no such key beside a ring", shown(whole[key]), _WHY))
        for key in _BREAKS_GRADIENTS
        if key in whole
    ]
    return problems if SP_KEY in whole else [*problems, *_misspelt(whole, SP_KEY)]


def _crowded(section: Json) -> list[Problem]:
    """Find objects with more keys than a person writes: naming each as unknown would take long."""
    objects = {SECTION: section} | {f"{SECTION}.{key!s:.80}": value for key, value in section.items()}
    advice = "is this the right text? Leave out what the section does not know"
    return [
        Problem(key, sentence(f"an object of at most {MAX_KEYS} keys", f"{len(value):,} keys", advice))
        for key, value in objects.items()
        if isinstance(value, dict) and len(value) > MAX_KEYS
    ]


def _no_section(whole: Json) -> Problem:
    if SECTION in whole:
        return Problem(SECTION, sentence("an object {...}", shown(whole[SECTION]), "use {} for the defaults"))
    if misspelt := _misspelt(whole, SECTION):
        return misspelt[0]
    add = f'"{SECTION}": {{}}' if SP_KEY in whole else f'"{SECTION}": {{"ring_size": 4}}'
    return Problem(SECTION, sentence("this section", "none", f"add {add} at the top level to run a ring"))


def _misspelt(whole: Json, wanted: str) -> list[Problem]:
    """Return the problem of the first key that was meant to be `wanted`, if there is one."""
    if len(whole) > MAX_KEYS:  # no DeepSpeed JSON: nothing was meant, and to compare takes seconds
        return []
    # 0.85: "sequence_parallel" is a slip of the pen, DeepSpeed's own "tensor_parallel" and its like are not.
    for key in whole:
        if did_you_mean(key, [wanted], cutoff=0.85):
            what = sentence(f"'{wanted}'", f"the unknown key '{key}'", f"did you mean '{wanted}'?")
            return [Problem(str(key), what)]
    return []
