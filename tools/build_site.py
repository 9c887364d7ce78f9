"""Build the documentation as one site, by pdoc: the texts, tutorial first, and API pages from the docstrings.

pdoc's frame, styles and Markdown make the texts look like its API pages. Headings get GitHub's anchors, so
that a link works in both places. ds_ring imports a public name at its first use, and pdoc does not
ask; so this tool asks for all of them. A link inside the site that leads nowhere is an error.

Example:
    python tools/build_site.py --output runs/site    # then open runs/site/index.html
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import ds_ring

ROOT = Path(__file__).resolve().parents[1]
# Capabilities have a README in their folder.
_FOLDERS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("ds_ring/*/**/README.md"))
# In the order in which a newcomer reads; index.html is README.
TEXTS = {
    "README.md": "ds_ring",
    "ds_ring/TUTORIAL.md": "Tutorial",
    "launcher/TROUBLESHOOTING.md": "Troubleshooting",
    "ds_ring/README.md": "Programming",
    "launcher/README.md": "Running",
    "configs/README.md": "Configuration",
    "configs/recipes/README.md": "A worked case",
    "MIGRATING.md": "Coming from elsewhere",
    "tools/README.md": "Evidence and tools",
    "tools/upstream/README.md": "Patches for other packages",
    "ds_ring/DESIGN.md": "Design",
    "ds_ring/READING.md": "Reading the code",
    "ds_ring/NOTES.md": "Notes",
    "ds_ring/models/PATCHES.md": "Patches of other packages",
    **{path: path.removesuffix("/README.md").removeprefix("ds_ring/") for path in _FOLDERS},
    "CONTRIBUTING.md": "Contributing",
    "CHANGELOG.md": "Changelog",
}
# `ds_ring` has a section for every public name. The others hold what these names take and return.
MODULES = (
    "ds_ring",
    "ds_ring.config.section",  # RingKeys: keys that RingConfig inherits
    "ds_ring.config.pass_options",  # PassOptions: the others
    "ds_ring.data.session",  # RingSession: engine.ring
    "ds_ring.masks.pattern",  # Pattern: what all patterns have in common
    "ds_ring.api",  # AttentionResult
    "ds_ring.schedule.layout",  # Layout: what make_layout returns
    "ds_ring.schedule.plan",  # Plan: what build_plan returns
    "ds_ring.simulation.simulate",  # SimulationResult
)
_PAGE = """{% extends "frame.html.jinja2" %}
{% block title %}{{ title }}{% endblock %}
{% block style %}{{ super() | safe }}<style>
main.pdoc table {display: block; overflow-x: auto; margin: 1em 0}
main.pdoc td, main.pdoc th {padding: .2em .7em; vertical-align: top}
main.pdoc tr {border-bottom: 1px solid var(--accent2)}
main.pdoc img {max-width: 100%; background: white}
</style>{% endblock %}
{% block nav %}<ul>
{% for link, name in pages %}<li><a href="{{ link }}">{{ name }}</a></li>{% endfor %}
</ul><details><summary>Capabilities</summary><ul>
{% for link, name in capabilities %}<li><a href="{{ link }}">{{ name }}</a></li>{% endfor %}
</ul></details>{% endblock %}
{% block content %}<main class="pdoc"><section class="module-info">
{{ content | safe }}
</section></main>{% endblock %}
"""


def build_api(output: Path) -> None:
    """Write one HTML page for each module of MODULES, an index and a search index.

    Raises:
        UserWarning: a name of `__all__` does not resolve.
    """
    import pdoc  # only these functions need it

    for name in ds_ring.__all__:
        getattr(ds_ring, name)
    pdoc.render.configure(docformat="google", show_source=False, search=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found .* does not resolve", UserWarning)
        # In a NamedTuple typing keeps an annotation as text without its module; pdoc then shows that text.
        warnings.filterwarnings("ignore", "Error parsing type annotation", UserWarning)
        pdoc.pdoc(*MODULES, output_directory=output)


def build_texts(root: Path, output: Path) -> None:
    """Write one HTML page for each text of `root`, and copy the pictures and files that it links to."""
    import markdown2
    import pdoc

    class Markdown(markdown2.Markdown):  # type: ignore[misc]  # it has no types
        def header_id_from_text(self, text: str, prefix: str, n: int | None = None) -> str:
            plain = html.unescape(re.sub(r"<[^>]+>", "", text)).lower()
            return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")

    extras = {"fenced-code-blocks": {"cssclass": "pdoc-code codehilite"}} | dict.fromkeys(
        ("header-ids", "tables", "code-friendly", "cuddled-lists", "strike")
    )
    template = pdoc.render.env.from_string(_PAGE)
    for text, title in TEXTS.items():
        place, folder = output / _get_page(text), root / Path(text).parent
        content = str(Markdown(extras=extras).convert((root / text).read_text()))
        for link in set(re.findall(r'href="([^":#]+\.md)["#]', content)):
            linked = os.path.normpath(Path(text).parent / link)
            if linked not in TEXTS and (root / linked).is_file():
                continue  # a table of results, which is copied
            page = _get_page(linked)
            content = content.replace(f'href="{link}', f'href="{os.path.relpath(page, Path(text).parent)}')
        pages = [*((document, _get_page(document), name) for document, name in TEXTS.items())]
        pages.append(("", "api/index.html", "API"))
        links: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
        for document, page, name in pages:
            links[document in _FOLDERS].append((os.path.relpath(output / page, place.parent), name))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(
            template.render(title=title, pages=links[False], capabilities=links[True], content=content)
        )
        for link in _links(place)[0]:
            source = folder / link.partition("#")[0]
            if source.is_file() and source.suffix != ".html":
                copy = output / os.path.relpath(source.resolve(), root.resolve())
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)


def _get_page(text: str) -> str:
    return "index.html" if text == "README.md" else text.removesuffix(".md") + ".html"


def _links(page: Path) -> tuple[set[str], set[str]]:
    """Return the links of an HTML page that lead into the site, and its anchors."""
    links, anchors = set[str](), set[str]()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            for name, value in attributes:
                if name in ("href", "src") and value and not urlsplit(value).scheme:
                    links.add(unquote(value))
                elif name in ("id", "name") and value:
                    anchors.add(value)

    Reader().feed(page.read_text())
    return links, anchors


def broken_links(output: Path) -> list[str]:
    """Return each link of the site that leads to no file, or to no anchor of its page."""
    links_by_page = {page.resolve(): _links(page) for page in sorted(output.rglob("*.html"))}
    broken = []
    for page, (links, _) in links_by_page.items():
        for link in sorted(links):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            known = links_by_page[target][1] if target in links_by_page else set[str]()
            if not target.is_file() or (anchor and target in links_by_page and anchor not in known):
                broken.append(f"{page.relative_to(output.resolve())}: {link}")
    return broken


def main(arguments: list[str] | None = None) -> int:
    """Build the site in a folder; return 1 where a link is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/site"), help="folder (default runs/site)")
    parser.add_argument("--root", type=Path, default=ROOT, help="where the texts are (default this checkout)")
    options = parser.parse_args(arguments)
    if (options.output / "api/search.js").exists():
        shutil.rmtree(options.output)  # the site of yesterday, whose pages would keep a broken link whole
    elif options.output.exists() and any(options.output.iterdir()):
        parser.error(
            f"--output: expected a new folder or one of this tool's, got {options.output} with files"
        )
    build_api(options.output / "api")
    build_texts(options.root, options.output)
    broken = broken_links(options.output)
    for link in broken:
        print(f"broken link: {link}", file=sys.stderr)
    print(options.output / "index.html")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
