"""Read a DeepSpeed JSON strictly, and say where it is broken.

DeepSpeed itself reads with hjson, which takes comments and trailing commas that every other reader of the
same file (Accelerate, Transformers, the launcher, an editor) refuses. Here a file is plain JSON in UTF-8, or
an error names the line. Keys of the top level that break a ring are refused, too. The model of the section
(section.py) is an argument.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from ds_ring.config.messages import Refused, sentence, shown
from ds_ring.config.problems import Problem, config_error, did_you_mean, list_problems
from ds_ring.errors import RingConfigError
from ds_ring.errors import shown as shown_in_errors

MAX_BYTES = 4 * 2**20
MAX_NESTED = 64
_TOO_DEEP = sentence(f"at most {MAX_NESTED} brackets in each other", "more", "is this the right text?")


def read_small(path: Path, most_bytes: int = MAX_BYTES) -> str:
    """Return the text of the file `path`, without a byte order mark.

    Raises:
        RingConfigError: it is no regular file, larger than `most_bytes`, not UTF-8, or cannot be read.
        FileNotFoundError, IsADirectoryError: that; the caller knows what was expected.
    """
    label = repr(str(path)[:200])[1:-1]
    try:
        # to open a FIFO would wait for its writer, and /dev/zero has no end
        if path.exists() and not path.is_dir() and not path.is_file():
            got = "a pipe, a device or a socket"
            raise RingConfigError.wrong(label, "a regular file", got, "write its contents to a file")
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except (FileNotFoundError, IsADirectoryError):
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        got = str(getattr(error, "strerror", None) or error)
        raise RingConfigError.wrong(label, "a file that can be read", got, "check the path") from None
    if len(data) > most_bytes:
        most = f"{most_bytes:,} bytes"
        raise RingConfigError.wrong(label, f"at most {most}", "more", "is this the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"the byte {error.object[error.start]:#04x} at offset {error.start}"
        raise RingConfigError.wrong(label, "text in UTF-8", got, "save the file as UTF-8") from None


Json = dict[str, Any]


def read_object(source: str | os.PathLike[str]) -> Json:
    """Return the JSON object in the file `source`; RingConfigError if it cannot be read."""
    path = Path(source)
    if str(path).lstrip().startswith("{"):
        advice = "pass json.loads(text), or write it to a file"
        raise config_error(f"{str(path)[:40]!r}", sentence("the path of a file", "JSON text", advice))
    try:
        return parse_object(read_small(path), str(path))
    except FileNotFoundError:
        near = did_you_mean(path.name, os.listdir(path.parent)) if path.parent.is_dir() else None
        advice = f"did you mean {near}?" if near else f"the current folder is {Path.cwd()}"
        raise config_error(str(path), f"the file does not exist; {advice}") from None
    except IsADirectoryError:
        raise config_error(str(path), "expected a JSON file, got a directory; name a file in it") from None


def parse_object(text: str, label: str) -> Json:
    """Return the JSON object that `text` is; RingConfigError, beginning with `label`, if it is none."""
    try:
        value = json.loads(text, object_pairs_hook=_each_key_once)
        problems = non_finite(value)
    except json.JSONDecodeError as error:
        advice = "JSON has no comments, no trailing commas, and strings in double quotes"
        raise config_error(label, f"not JSON: {error}; {advice}") from None
    except RecursionError:
        raise config_error(label, f"cannot be read as JSON: {_TOO_DEEP}") from None
    except Refused as error:
        raise config_error(label, f"cannot be read as JSON: {error}") from None
    except ValueError:
        what = sentence(f"integers of at most {sys.get_int_max_str_digits()} digits", "more", "shorten them")
        raise config_error(label, f"cannot be read as JSON: {what}") from None
    if not isinstance(value, dict):
        expected = "a JSON object {...} at the top level"
        raise config_error(label, sentence(expected, shown(value), "write {...} with keys"))
    if problems:
        raise config_error(label, *problems)
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> Json:
    value = dict(pairs)
    if len(value) < len(pairs):  # json would silently keep the last of them
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise Refused(sentence("each key once in an object", f"{twice!r} twice", "keep one of them"))
    return value


def non_finite(value: object) -> list[Problem]:
    """Return one problem for each NaN or infinity anywhere inside `value` (JSON has neither)."""
    advice = "JSON has no NaN and no Infinity: write a number"
    return [
        Problem(key, sentence("a finite number", repr(item), advice))
        for key, item in _walk(value)
        if isinstance(item, float) and not math.isfinite(item)
    ]


def _walk(value: object, key: str = "", levels: int = MAX_NESTED) -> Iterator[tuple[str, object]]:
    """Yield every value inside `value`, with its dotted key; Refused beyond so many levels."""
    yield key, value
    items: list[tuple[str, object]] = []
    if isinstance(value, dict):
        items = [(f"{key}.{name}" if key else str(name), item) for name, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{key}[{index}]", item) for index, item in enumerate(value)]
    if items and not levels:
        raise Refused(_TOO_DEEP)
    for name, item in items:
        yield from _walk(item, name, levels - 1)


SECTION = "ring_attention"
SP_KEY = "sequence_parallel_size"

_BREAKS_GRADIENTS = ("mesh_param", "data_parallel_size")
_WHY = (
    "DeepSpeed then builds a device mesh and synchronises gradients over its data axis alone, so that the "
    f"ranks of one sequence drift apart without a word; remove it: {SP_KEY} is all it takes"
)

Model = TypeVar("Model", bound=BaseModel)
JsonSource = str | os.PathLike[str] | Json


def resolve(source: JsonSource, model: type[Model]) -> tuple[Model, Json]:
    """Return the section as a `model`, and the whole JSON. One RingConfigError names all faults."""
    label, document = "the DeepSpeed configuration", cast(object, source)
    if not isinstance(document, (dict, str, os.PathLike)):
        advice = "pass the whole DeepSpeed JSON, or where it is"
        raise config_error(label, sentence("a path or a dict", shown_in_errors(document), advice))
    if isinstance(source, dict):
        whole = source
    else:
        label, whole = str(source), read_object(source)
    problems = _top_level_problems(whole)
    section = whole.get(SECTION)
    if not isinstance(section, dict):
        raise config_error(label, *problems, _no_section(whole))
    if SP_KEY in section:
        problems.append(Problem(f"{SECTION}.{SP_KEY}", "got it inside the section; move it to the top level"))
    # DeepSpeed has no key of these names, and ignores what it does not know.
    advice = f'got it at the top level, where it has no effect; move it into "{SECTION}"'
    problems += [Problem(key, advice) for key in model.model_fields if key != SP_KEY and key in whole]
    ours = {key: whole[key] for key in (SP_KEY, SECTION) if key in whole}
    try:
        problems += non_finite(ours)
        config = model.model_validate(copy.deepcopy(section | {SP_KEY: whole.get(SP_KEY, "auto")}))
    except Refused as refused:
        raise config_error(label, str(refused)) from None
    except ValidationError as error:
        # A fault that was found above has the better words for its key.
        known = {problem.key for problem in problems}
        problems += [new for new in list_problems(error, model, SECTION) if new.key not in known]
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


def _no_section(whole: Json) -> Problem:
    if SECTION in whole:
        return Problem(SECTION, sentence("an object {...}", shown(whole[SECTION]), "use {} for the defaults"))
    if misspelt := _misspelt(whole, SECTION):
        return misspelt[0]
    add = f'"{SECTION}": {{}}' if SP_KEY in whole else f'"{SECTION}": {{"ring_size": 4}}'
    return Problem(SECTION, sentence("this section", "none", f"add {add} at the top level to run a ring"))


def _misspelt(whole: Json, wanted: str) -> list[Problem]:
    """Return the problem of the first key that was meant to be `wanted`, if there is one."""
    # 0.85: "sequence_parallel" is a slip of the pen, DeepSpeed's own "tensor_parallel" and its like are not.
    for key in list(whole)[:500]:  # to compare more takes seconds
        if did_you_mean(key, [wanted], cutoff=0.85):
            what = sentence(f"'{wanted}'", f"the unknown key '{key}'", f"did you mean '{wanted}'?")
            return [Problem(str(key), what)]
    return []
