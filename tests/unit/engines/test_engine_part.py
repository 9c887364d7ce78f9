"""Keys of the JSON whose capability has been removed: they are unknown."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ds_ring.errors import RingConfigError
from ds_ring.ops.options import Options
from ds_ring.plugin import SAVED_TENSORS

KEYS: dict[str, dict[str, Any]] = {
    "latents": {"latents": True},
    "monitor": {"monitor": True},
    "verify_first_batch": {"verify_first_batch": True},
    "tiled_loss": {"long_sequence": {"tiled_loss": True}},
    "tiled_mlp": {"long_sequence": {"tiled_mlp": 64}},
    "offload_checkpoints": {"long_sequence": {"offload_checkpoints": True}},
}
FOLDERS = ("contrib/families/latents", "engines/first_batch", "measure", "memory/tiles")
_READ = """
import json, sys
sys.path.insert(0, sys.argv[1])
sys.meta_path = [one for one in sys.meta_path if "__editable__" not in getattr(one, "__module__", "")]
from ds_ring.config.section import RingConfig
for values in json.loads(sys.argv[2]):
    try:
        RingConfig(ring_size=2, **values)
        print("taken")
    except ValueError as error:
        print(str(error).replace(chr(10), " "))
"""


def test_keys_go_with_the_folder_of_their_capability(tmp_path: Path) -> None:
    """Those of a capability that stays are read as before, also beside one that went."""
    root = Path(__file__).resolve().parents[3]
    shutil.copytree(root / "ds_ring", tmp_path / "ds_ring", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", _READ, str(tmp_path), json.dumps(list(KEYS.values()))]
    whole = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert whole.stdout.split() == ["taken"] * len(KEYS)
    for folder in FOLDERS:
        shutil.rmtree(tmp_path / "ds_ring" / folder)
    left = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    *refused, last = left.stdout.splitlines()
    assert last == "taken" and len(refused) == len(KEYS) - 1
    for key, text in zip(KEYS, refused, strict=False):
        assert f"got the unknown key '{key}'" in text


def test_attention_is_not_kept_on_the_host_without_its_row() -> None:
    assert Options(offload_attention="auto").offload_on("cuda", 1 << 20)
    with mock.patch.dict(SAVED_TENSORS, clear=True):
        assert not Options(offload_attention="auto").offload_on("cuda", 1 << 20)
        with pytest.raises(RingConfigError, match="offload_attention: expected false, got true"):
            Options(offload_attention=True).offload_on("cpu", 64)
