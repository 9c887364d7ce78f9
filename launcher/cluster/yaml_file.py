"""Read a YAML mapping strictly, and say where it is broken. Knows no key.

PyYAML keeps the last of two equal keys without a word, and an empty file is None. Both are refused here, and
so is what no file of ours needs and a hostile one uses: aliases, tags, keys that are no single words, depth.
Dates are words: nothing here is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ds_ring.config.json_text import read_small
from ds_ring.config.messages import config_error, did_you_mean, sentence, shown

MOST_BYTES = 2**17  # some thousand hosts; PyYAML reads about a MB in two seconds
MOST_NESTED = 16
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, ten times as fast
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _StrictLoader(_Loader):  # type: ignore[misc]  # yaml has no types
    """Refuse a mapping in which a key stands twice, and read no dates."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # PyYAML itself would keep the last of two equal keys.
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                what = "expected a word for a key, got a list or a mapping; write 'key: value'"
                raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
            if key_node.value in seen:
                what = f"expected every key once, got {key_node.value[:80]!r} twice; keep one of them"
                raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
            seen.add(key_node.value)
        built: dict[Any, Any] = super().construct_mapping(node, deep)
        return built


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping at the top of the file `path`; RingConfigError for whatever keeps it from being
    read.
    """
    text = _read_text(path)
    try:
        _require_plain(text)
        value = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader: builds plain data only
    except yaml.YAMLError as error:
        raise config_error(str(path), _where_and_what(error, text)) from None
    except (ValueError, RecursionError) as error:  # an integer of 5000 digits
        got = str(error).split(";")[0]
        raise config_error(str(path), sentence("values that can be read", got, "correct them")) from None
    if value is None:
        raise config_error(str(path), "expected a mapping, got an empty file; copy quickstart.yaml")
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        odd = (
            next((key for key in value if not isinstance(key, str)), None)
            if isinstance(value, dict)
            else None
        )
        got = (
            f"{type(value).__name__}"
            if not isinstance(value, dict)
            else f"the key {shown(odd)}, which is no word"
        )
        raise config_error(str(path), f"expected 'key: value' lines, got {got}; see quickstart.yaml")
    return value


def _require_plain(text: str) -> None:
    """Raise yaml.YAMLError for what a plain mapping has not; without recursion, before anything is built."""
    depth = 0
    # Events only: an alias bomb is refused before it is expanded.
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        what, tag = "", getattr(event, "tag", None)
        if depth > MOST_NESTED:
            what = f"expected at most {MOST_NESTED} levels in each other, got more; is this the right file?"
        elif isinstance(event, yaml.AliasEvent):
            what = f"expected plain values, got the alias *{str(event.anchor)[:80]}; write the value itself"
        elif tag not in (None, "!"):
            what = f"expected plain values, got the tag {tag[:80]}; remove it"
        if what:
            mark: Any = event.start_mark  # the stubs have two classes for the same
            raise yaml.constructor.ConstructorError(None, None, what, mark)


def _read_text(path: Path) -> str:
    try:
        return read_small(path, MOST_BYTES)
    except FileNotFoundError:
        raise config_error(str(path), missing_file(path, "a cluster YAML")) from None
    except IsADirectoryError:
        raise config_error(str(path), "expected a file, got a directory; name the file in it") from None


def missing_file(path: Path, what: str) -> str:
    """Format the sentence for a file that is not there, with the name that was probably meant."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return f"expected {what}, but the folder {path.parent} does not exist; check the path"
    near = did_you_mean(path.name, names)
    advice = f"did you mean '{near}'?" if near else "check the path"
    return f"expected {what}, but there is no '{path.name}' in {path.parent.resolve()}; {advice}"


def _where_and_what(error: yaml.YAMLError, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"expected YAML, got what is none: {str(error).splitlines()[0]}; correct it"
    what = getattr(error, "problem", None) or "cannot be read"
    lines = text.splitlines()
    tab = mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]
    advice = "" if ";" in what else "; indent with blanks" if tab else "; correct it here or just before"
    expected = "" if "expected" in what else "expected YAML, got: "
    return f"not YAML at line {mark.line + 1}, column {mark.column + 1}: {expected}{what}{advice}"
