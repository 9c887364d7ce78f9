"""A package that is missing is named, with how to install it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_what_is_missing_is_named_with_how_to_install_it(tmp_path: Path) -> None:
    """Python that cannot import a package stands in for an environment that lacks the extra `train`."""
    hide = "import sys; sys.modules['transformers'] = None; from ds_ring_launcher.cli import main; "
    run = subprocess.run(
        [sys.executable, "-c", hide + "sys.exit(main(['check-model', 'llama']))"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 2
    assert "expected transformers, got no transformers; pip install 'ds_ring[train]'" in run.stderr
