"""Hardware descriptions: those that come with the package, and what a wrong one is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_ring.errors import RingConfigError
from ds_ring_launcher.plan import known_hardware
from ds_ring_launcher.plan.hardware import DTYPES, Hardware, hardware_from, read_hardware

FOLDER = Path(__file__).resolve().parents[4] / "configs" / "hardware"


def values(**changes: Any) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "h100.yaml").read_text()) | changes


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_parses_and_says_where_its_figures_are_from(path):
    found = read_hardware(path.stem)
    assert found == read_hardware(str(path))
    about = {"name", "kind", "kernel", "devices_per_node", "source"}
    assert set(found.source) == found.model_fields_set - about
    assert all(found.flops(dtype) > 0 for dtype in DTYPES)


def test_one_file_explains_every_key():
    """Its commented keys are keys, too."""
    text = re.sub(r"^# (?=[a-z_]+: )", "", (FOLDER / "cpu.yaml").read_text(), flags=re.MULTILINE)
    whole = yaml.safe_load(text)
    whole["source"] |= dict.fromkeys(whole.keys() - {"name", "kind", "devices_per_node", "source"}, "assumed")
    assert list(whole) == list(Hardware.model_fields)
    hardware_from(whole, "cpu.yaml")


def test_names_are_the_files():
    assert set(known_hardware()) == {path.stem for path in FOLDER.glob("*.yaml")}


def test_a_name_in_capitals_is_found():
    assert read_hardware("H100") == read_hardware("h100")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_byte": 1}, "did you mean 'memory_bytes'"),
        ({"kind": "gpu"}, 'one of "cuda", "cpu", got "gpu"'),
        ({"memory_bytes": "80GB"}, "memory_bytes: expected a whole number of bytes above 0"),
        ({"matmul_efficiency": 1.5}, "expected a number of at least 1e-06 and at most 1, got 1.5"),
        ({"attention_efficiency": {"forward": 0.5}}, "attention_efficiency"),
        ({"attention_efficiency": None}, "attention_efficiency: expected a mapping"),
        ({"peak_flops": {"float8": 1.0e15}}, "peak_flops"),
        ({"peak_flops": {}}, "a rate for one dtype at least"),
        ({"link_latency_s": -1.0}, "link_latency_s: expected a number of seconds, 0 or more"),
        ({"inter_node_bytes_per_s": 0}, "inter_node_bytes_per_s: expected a number of at least 1"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(RingConfigError) as caught:
        hardware_from(values(**changes), "mine.yaml")
    assert message in str(caught.value) and "mine.yaml" in str(caught.value)


def test_a_dtype_without_a_figure():
    found = hardware_from(values(peak_flops={"float32": 1.0e12}), "mine.yaml")
    with pytest.raises(RingConfigError, match="expected one of float32, got bfloat16"):
        found.flops("bfloat16")


@pytest.mark.parametrize(
    ("name", "message"), [("h10", "did you mean 'h100'"), ("no/such.yaml", "does not exist")]
)
def test_hardware_that_is_not_there(name, message):
    with pytest.raises(RingConfigError, match=message):
        read_hardware(name)
