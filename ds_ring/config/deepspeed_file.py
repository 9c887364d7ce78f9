"""Find our section inside a whole DeepSpeed JSON, and refuse what breaks a ring beside it.

These are the keys of the top level; the model of the section (section.py) comes as an argument.
"""

from __future__ import annotations

import copy
import os
from typing import TypeVar, cast

from pydantic import BaseModel, ValidationError

from ds_ring.config.json_text import Json, non_finite, read_object
from ds_ring.config.messages import Problem, config_error, did_you_mean, problems_of, sentence, shown
from ds_ring.errors import shown as shown_in_errors

SECTION = "ring_attention"
SP_KEY = "sequence_parallel_size"
MOST_KEYS = 500  # of an object in the section

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
        told = {problem.key for problem in problems}
        problems += [new for new in problems_of(error, model, SECTION) if new.key not in told]
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
    """Find objects of so many keys that nobody wrote them: to name each as unknown takes a while."""
    objects = {SECTION: section} | {f"{SECTION}.{key!s:.80}": value for key, value in section.items()}
    advice = "is this the right text? Leave out what the section does not know"
    return [
        Problem(key, sentence(f"an object of at most {MOST_KEYS} keys", f"{len(value):,} keys", advice))
        for key, value in objects.items()
        if isinstance(value, dict) and len(value) > MOST_KEYS
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
    if len(whole) > MOST_KEYS:  # no DeepSpeed JSON: nothing was meant, and to compare takes seconds
        return []
    # 0.85: "sequence_parallel" is a slip of the pen, DeepSpeed's own "tensor_parallel" and its like are not.
    for key in whole:
        if did_you_mean(key, [wanted], cutoff=0.85):
            what = sentence(f"'{wanted}'", f"the unknown key '{key}'", f"did you mean '{wanted}'?")
            return [Problem(str(key), what)]
    return []
