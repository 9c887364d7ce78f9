"""Write the tables of the section's keys into configs/README.md, from ds_ring/config/section.py.

Example:
    python tools/document_keys.py --check      # status 1 if the tables do not agree with the model
    python tools/document_keys.py --write
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_ring.config.messages import shown
from ds_ring.config.pattern_section import PatternConfig
from ds_ring.config.problems import accepted_by, list_choices
from ds_ring.config.section import PARTS, RingConfig

DOCUMENT = Path(__file__).resolve().parents[1] / "configs/README.md"
BEGIN = "<!-- keys: written by tools/document_keys.py from ds_ring/config/section.py -->"
END = "<!-- end of keys -->"


# What errors say in words, for a narrow column.
_SHORT = {
    "a whole number of at least 1": "positive `int`",
    "a number of seconds above 0": "seconds",
    "a whole number of bytes, 0 or more": "`int >= 0`",
    "a whole number of tokens, 0 or more": "`int >= 0`",
    "a list of rising whole numbers of at least 1": "rising `int`s",
    "true or false": "`bool`",
}


def tables() -> str:
    """The keys of the section and those of its parts, as Markdown."""
    parts: dict[str, type[BaseModel]] = {"pattern": PatternConfig, **PARTS}
    inner = [f'### Keys of "{name}"\n\n{table(model)}' for name, model in parts.items()]
    return "\n\n".join([table(RingConfig), *inner])


def table(model: type[BaseModel]) -> str:
    """A row for every key of a section: key, type, default, meaning."""
    rows = [_row(name, field) for name, field in model.model_fields.items()]
    return "\n".join(["| key | takes | default | meaning |", "|---|---|---|---|", *rows])


def _row(name: str, field: FieldInfo) -> str:
    takes = accepted_by(field)
    assert field.description, f"{name}: a key without a description cannot be documented"
    accepted = ", ".join(f"`{shown(word)}`" for word in list_choices(field)) or takes.what
    for long, short in _SHORT.items():
        accepted = accepted.replace(long, short)
    place = " (top level of the JSON)" if takes.outside else ""
    return f"| `{name}`{place} | {accepted} | `{_default(field)}` | {field.description} |"


def _default(field: FieldInfo) -> str:
    """As it would be written in the JSON."""
    if accepted_by(field).outside:
        return '"auto"'  # filled in by a validator
    if isinstance(field.default, BaseModel):
        return "{}"
    return shown(field.default)


def with_tables(document: str) -> str:
    """`document` with the tables of today between its two marks."""
    head, mark, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{DOCUMENT}: expected the lines {BEGIN} and {END}, got none")
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{tail}"


def main(arguments: list[str] | None = None) -> int:
    """Write the tables, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="bring configs/README.md up to date")
    what.add_argument("--check", action="store_true", help="change nothing; status 1 if it is not up to date")
    options = parser.parse_args(arguments)
    before = DOCUMENT.read_text()
    after = with_tables(before)
    if options.write:
        DOCUMENT.write_text(after)
    elif after != before:
        print(
            f"{DOCUMENT.name}: the tables of keys differ from ds_ring/config/section.py; run"
            " `python tools/document_keys.py --write`",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
