"""Declare the command line of a search, for `ds-ring tune` and `python -m ds_ring_launcher.tune`.

The standard library only: every `ds-ring` command imports it, and `--help` waits for no torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the request and of the output."""
    shapes = parser.add_argument_group("shapes of a layer")
    shapes.add_argument("--tokens", type=int, required=True, help="length of a whole sequence")
    shapes.add_argument("--heads", type=int, required=True, help="query heads")
    shapes.add_argument("--kv-heads", type=int, help="K/V heads; by default as many as query heads")
    shapes.add_argument("--head-dim", type=int, required=True, help="size of a head")
    shapes.add_argument("--batch", type=int, default=1, help="sequences of a micro batch (default 1)")
    shapes.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on CUDA, else float32)"
    )
    shapes.add_argument("--pattern", metavar="JSON", help="""instead of the file's, say '{"window": 4096}'""")
    shapes.add_argument(
        "--hf-config", metavar="FILE", help="a transformers config.json, whose layers' windows are measured"
    )
    shapes.add_argument(
        "--layers", type=int, metavar="N", help='of the model, where "layers" of the pattern names some'
    )
    shapes.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    files = parser.add_argument_group("files")
    files.add_argument(
        "--config",
        "--deepspeed_config",
        metavar="FILE.json",
        type=Path,
        help="the DeepSpeed JSON to start from; only what is tuned is changed",
    )
    files.add_argument("--output", metavar="FILE.json", type=Path, help="file for the tuned JSON")
    files.add_argument(
        "--hardware-output", metavar="FILE.yaml", type=Path, help="where a description of this hardware goes"
    )
    files.add_argument("--json", action="store_true", help="print JSON instead of tables")
