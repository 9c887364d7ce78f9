"""What differs between versions of DeepSpeed's launcher, of which nothing is imported (it brings torch)."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def takes_log_level() -> bool:
    """Return whether the launcher has the option --log_level; 0.16.9 has not, and logs at "info".

    True if DeepSpeed is not installed here.
    """
    spec = find_spec("deepspeed")
    places = (spec.submodule_search_locations if spec is not None else None) or []
    texts = [file.read_text() for place in places for file in Path(place, "launcher").glob("runner.py")]
    return not texts or "--log_level" in "".join(texts)
