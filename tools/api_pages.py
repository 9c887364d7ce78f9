"""Build the API pages from the docstrings, by pdoc: the public names and the classes that they lead to.

ds_ring imports a public name when it is first asked for, and pdoc does not ask; so this tool asks for all of
them, and then calls pdoc.

Example:
    python tools/api_pages.py --output runs/api    # then open runs/api/index.html
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import ds_ring

# `ds_ring` has a section for every public name. The others hold what these names take and return.
MODULES = (
    "ds_ring",
    "ds_ring.integrations.deepspeed.session",  # RingSession: engine.ring
    "ds_ring.masks.pattern",  # Pattern: what all patterns have in common
    "ds_ring.module",  # AttentionResult
    "ds_ring.schedule.layout",  # Layout: what make_layout returns
    "ds_ring.schedule.plan",  # Plan: what build_plan returns
    "ds_ring.simulation.simulate",  # SimulationResult
)


def build(output: Path) -> None:
    """Write one HTML page for each module of MODULES, an index and a search index.

    Raises:
        UserWarning: a name of `__all__` does not resolve.
    """
    import pdoc  # only this function needs it

    for name in ds_ring.__all__:
        getattr(ds_ring, name)
    pdoc.render.configure(docformat="google", show_source=False, search=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found .* does not resolve", UserWarning)
        # In a NamedTuple typing keeps an annotation as text without its module; pdoc then shows that text.
        warnings.filterwarnings("ignore", "Error parsing type annotation", UserWarning)
        pdoc.pdoc(*MODULES, output_directory=output)


def main(arguments: list[str] | None = None) -> int:
    """Build the pages in a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/api"), help="folder (default runs/api)")
    options = parser.parse_args(arguments)
    build(options.output)
    print(options.output / "index.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
