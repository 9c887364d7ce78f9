"""The rule of the house: a capability is removed by deleting its folder; no row goes with it.

Each capability (tests/removals.py) is deleted from a copy of the tree. Every module that is left is
imported, and two real ranks attend, against float64. By night the core's tests pass in the copy, too.
Without an attention variant a model that needs it is refused with a reason, and a model of another variant
trains on two ranks as on one process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_ring.models.variants import variants
from ds_ring.plugin import FAMILIES, INDEX, KINDS, PLUGINS, make_index
from tests import removals
from tests.removals import (
    CAPABILITIES,
    CORE_TESTS,
    NAMED,
    ROOT,
    core_lines,
    environment_of,
    removed,
    still_needing,
)

# Families whose variant is a capability: a model that needs it, part of the reason why it is refused without
# it ("": it is exact all the same), and a model of another variant.
_BYPASSES = "its attention bypasses transformers' attention interface"
MODELS = {
    "contrib/encoder_decoder": ("t5", "it is an encoder-decoder", "bloom"),
    "contrib/families/eager_attention": ("bloom", _BYPASSES, "t5"),
    "contrib/families/recurrent": ("qwen3_next", _BYPASSES, "deepseek_v4"),
    "contrib/families/compressed": ("deepseek_v4", "its layers compressed_sparse_attention", "deepseek_v32"),
    "contrib/families/indexed": ("deepseek_v32", "its layers indexed_attention mix", "deepseek_v4"),
    "contrib/families/indexed_blocks": ("minimax_m3_vl_text", "its layers minimax_m3_sparse", "deepseek_v32"),
    "contrib/families/latents": ("deepseek_v3", "", "mamba2"),
    "contrib/families/relative_bias": ("t5", _BYPASSES, "bart"),
    "contrib/families/distance_bias": ("inkling_text", "expected no position_bias", "t5"),
    "contrib/families/relative_keys": ("xlnet", _BYPASSES, "t5"),
    "contrib/families/prompt": ("cpmant", _BYPASSES, "t5"),
    "contrib/families/key_terms": ("doge", "expected a model that hands its mask", "llama4_text"),
    "contrib/families/query_scale": ("llama4_text", "config.attn_temperature_tuning scales queries", "doge"),
}  # fmt: skip


def ranks_attend(copy: Path, folder: Path, ranks: int = 2) -> list[str]:
    """Run the copy's package on the first ranks of two; return what a rank that failed printed."""
    script = str(copy / "tests/integration/removals/rank.py")
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(folder / "store")],
            cwd=copy, env=environment_of(copy), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        printed = [rank.communicate(timeout=400)[0] for rank in started]
    finally:
        for rank in started:
            rank.kill()
    return [text for rank, text in zip(started, printed, strict=True) if rank.returncode]


def test_the_index_has_the_rows_of_every_plugin() -> None:
    assert INDEX.read_text() == make_index(), "run python tools/plugin_index.py"


def test_a_plugin_has_rows_of_known_kinds_alone() -> None:
    known = {*KINDS, "order", "requires", "needs"}
    assert all(set(fields) <= known for fields in removals.INDEXED.values())
    assert set(PLUGINS) >= set(removals.INDEXED)


@pytest.mark.night  # by day ranks of a copy with a fault, below, and the imports of all copies
@pytest.mark.parametrize("name", [name for name in CAPABILITIES if "/families/" not in name])
def test_a_capability_is_deleted_with_its_folder(name: str, tmp_path: Path) -> None:
    assert not ranks_attend(removed(name, tmp_path / "copy"), tmp_path)


@pytest.mark.night
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_tests_of_the_core_pass_without_it(name: str, tmp_path: Path) -> None:
    assert not removals.run_tests(removed(name, tmp_path / "copy"), *CORE_TESTS)


@pytest.mark.night
@pytest.mark.timeout(1200)
def test_the_tests_of_the_adapter_pass_without_a_variant(tmp_path: Path) -> None:
    assert not removals.run_tests(
        removed("contrib/families/relative_bias", tmp_path / "copy"), "tests/unit/models"
    )


@pytest.mark.parametrize("name", CAPABILITIES)
def test_no_module_that_stays_imports_it(name: str) -> None:
    assert still_needing(name) == []


def test_an_import_by_a_module_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(removals.INDEXED, "masks", {})
    assert "schedule.layout imports masks.pattern" in still_needing("masks")


@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_core_does_not_name_it(name: str) -> None:
    allowed, why = NAMED.get(name, (0, ""))
    assert allowed <= 5 and bool(allowed) == bool(why)
    assert len(core_lines(name)) <= allowed, "\n".join(core_lines(name))


def test_a_line_of_the_core_that_names_a_capability_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = removals.CodeLine("config.section, line 1", 'long_sequence = {"tiled_loss": True}')
    monkeypatch.setattr(removals, "code_of_the_core", lambda: (seeded,))
    assert core_lines("memory/tiles") and not core_lines("memory/host")


@pytest.mark.night
def test_a_module_that_still_needs_it_is_found(tmp_path: Path) -> None:
    """A seeded fault: the core imports a capability when a module is loaded."""
    copy = removed("simulation", tmp_path / "copy")
    with open(copy / "ds_ring/ring/merge.py", "a") as file:
        file.write("\nfrom ds_ring.simulation.simulate import simulate\n")
    (first,) = ranks_attend(copy, tmp_path, ranks=1)
    assert "No module named 'ds_ring.simulation'" in first


def check_models(copy: Path, *families: str) -> list[dict[str, Any]]:
    """Compare small models on two ranks with one process, by the copy's `ds-ring check-model`."""
    code = (
        "import sys; from ds_ring_launcher.cli import main\n"
        "sys.exit(max(main(['check-model', family, '--json']) for family in sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *families],
        cwd=copy, env=environment_of(copy), capture_output=True, text=True, timeout=480,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    reports: list[dict[str, Any]] = json.loads(f"[{done.stdout.replace(chr(10) + '{', ',{')}]")
    return reports


@pytest.mark.night  # by day: nothing imports them, and one capability is deleted
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_variant_trains_without_it(name: str, tmp_path: Path) -> None:
    family, reason, different = MODELS[name]
    report, other = check_models(removed(name, tmp_path / "copy"), family, different)
    if reason:
        assert report["result"] == "refused" and reason in report["reason"], report
    else:
        assert report["result"] == "exact", report
    assert other["result"] == "exact", other


def test_each_variant_has_a_model_and_tests() -> None:
    families = [name for name in CAPABILITIES if "/families/" in name]
    assert set(families) == {name for name in MODELS if "/families/" in name}
    assert all(map(removals.tests_named_like, families)), "a variant without tests of its own"


def test_no_file_of_the_adapter_names_a_variant() -> None:
    classes = {type(variant).__name__ for variant in variants()}
    assert classes == set(FAMILIES)
    for path in (ROOT / "ds_ring/models").rglob("*.py"):
        named = {name for name in classes if name in path.read_text().replace("`", " ").split()}
        assert not named, f"{path.relative_to(ROOT)} names {sorted(named)}"


def test_the_table_has_a_row_for_each_capability() -> None:
    rows = [row.split(" | ") for row in removals.table().splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == CAPABILITIES
    assert all(int(row[1]) and int(row[2].replace(",", "")) for row in rows), "a capability without files"
