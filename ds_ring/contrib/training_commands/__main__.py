"""Print the path of a plug-in.

Example:
    python "$(python -m ds_ring.contrib.training_commands llama_factory)" train sft.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

PLUGINS = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if path.stem != "plugin")

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PLUGINS:
        sys.exit(f"expected one of {PLUGINS}, got {sys.argv[1:]}")
    print(Path(__file__).with_name(f"{sys.argv[1]}.py"))
