"""Reads a YAML mapping strictly, and says where it is broken. Knows no key.

PyYAML keeps the last of two equal keys without a word, and an empty file is None. Both are refused here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ds_ring.config_errors import config_error, did_you_mean


class _UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """SafeLoader that refuses a mapping in which a key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                what = f"expected every key once, got {key_node.value!r} twice; keep one of them"
                raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
            if isinstance(key_node.value, str):
                seen.add(key_node.value)
        built: dict[Any, Any] = super().construct_mapping(node, deep)
        return built


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping at the top of the file `path`; RingConfigError for whatever keeps it from being read."""
    text = _read_text(path)
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)  # a SafeLoader: builds plain data only
    except yaml.YAMLError as error:
        raise config_error(str(path), _where_and_what(error)) from None
    if value is None:
        raise config_error(str(path), "expected a mapping, got an empty file; copy quickstart.yaml")
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        got = type(value).__name__ if not isinstance(value, dict) else "keys that are no words"
        raise config_error(str(path), f"expected 'key: value' lines, got {got}; see quickstart.yaml")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise config_error(str(path), missing_file(path, "a cluster YAML")) from None
    except IsADirectoryError:
        raise config_error(str(path), "expected a file, got a directory; name the file in it") from None
    except (OSError, ValueError) as error:
        raise config_error(str(path), f"expected text in UTF-8, cannot read it: {error}") from None


def missing_file(path: Path, what: str) -> str:
    """The sentence for a file that is not there, with the name that was probably meant."""
    if not path.parent.is_dir():
        return f"expected {what}, but the folder {path.parent} does not exist; check the path"
    near = did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()])
    advice = f"did you mean '{near}'?" if near else "check the path"
    return f"expected {what}, but there is no '{path.name}' in {path.parent.resolve()}; {advice}"


def _where_and_what(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"not YAML: {error}"
    what = getattr(error, "problem", None) or "cannot be read"
    advice = "; indent with blanks" if "\\t" in what else ""
    return f"not YAML at line {mark.line + 1}, column {mark.column + 1}: {what}{advice}"
