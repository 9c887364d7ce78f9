"""Compare ring, Ulysses and other packages' attention on this machine: `ds-ring compare`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .parsers import (
    Commands,
    add_command,
    add_json,
    print_json,
    read_tokens,
    refuse_extra,
    require_deadline,
    require_memory,
    require_sizes,
    require_writable,
)

if TYPE_CHECKING:
    from ..compare.cells import Cell

_MAX_SIZES = {
    "tokens": 2**30,
    "gpus": 1024,
    "heads": 4096,
    "kv_heads": 4096,
    "head_dim": 4096,
    "rounds": 1000,
}
_HELP = "ring, Ulysses and other packages on this machine: exact? how fast? what to take"
_DESCRIPTION = (
    "Run ring, Ulysses, both, torch's context parallelism and installed packages on this machine, each in"
    " processes of its own. Compare each with one process, then time those that are exact in turns. Writes"
    " one page (Markdown) and one JSON."
)
_EXAMPLE = """\
examples:
  ds-ring compare --gpus 2 8 --hf-config qwen3-8b --tokens 65536 --packed
  ds-ring compare --gpus 8 --heads 32 --kv-heads 8 --head-dim 128 --tokens 128k --output ours.md
  ds-ring compare --device cpu --gpus 2 --heads 4 --kv-heads 2 --head-dim 64 --tokens 2048
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "compare", run, _HELP, _DESCRIPTION, _EXAMPLE)
    parser.add_argument(
        "--tokens", type=read_tokens, required=True, metavar="T", help="of a sequence, say 65536 or 64k"
    )
    parser.add_argument(
        "--gpus", "--devices", type=int, nargs="+", required=True, metavar="N",
        help="numbers of GPUs to compare on; with --device cpu of ranks",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda", help="cpu or cuda (default cuda)")
    shapes = parser.add_argument_group("shapes of a layer")
    shapes.add_argument(
        "--hf-config", metavar="NAME|FILE|JSON", help="a transformers config.json, its text or a known name"
    )
    shapes.add_argument("--heads", type=int, help="query heads")
    shapes.add_argument("--kv-heads", type=int, help="K/V heads; by default as many as query heads")
    shapes.add_argument("--head-dim", type=int, help="size of a head")
    shapes.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on CUDA, else float32)"
    )
    shapes.add_argument("--packed", action="store_true", help="also packed documents, of very unlike lengths")
    how = parser.add_argument_group("how long")
    how.add_argument("--budget-seconds", type=float, default=600, help="of the whole command (default 600)")
    how.add_argument(
        "--deadline-seconds", type=float, default=60, help="of a contestant's check or turn (default 60)"
    )
    how.add_argument("--rounds", type=int, default=7, help="timed rounds (default 7)")
    how.add_argument("--only", nargs="+", metavar="NAME", help="contestants whose names contain one of these")
    parser.add_argument(
        "--output", metavar="FILE.md", type=Path, help="file for the page; the JSON goes beside it"
    )
    add_json(parser)


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Compare, print and write; RingError for wrong input, before any process is started."""
    began = time.monotonic()
    refuse_extra("compare", extra_args)
    require_sizes(options, _MAX_SIZES)
    require_deadline(options.deadline_seconds)
    require_deadline(options.budget_seconds, "--budget-seconds")
    from ds_ring.errors import RingConfigError
    from ds_ring.transports.devices import select_gpu
    from ds_ring.written_files import write_at_once

    from ..tune.request import DEVICES

    if options.device not in DEVICES:
        raise RingConfigError.wrong("device", f"one of {', '.join(DEVICES)}", options.device, "choose one")
    multiple = 2 * max(options.gpus)
    if any(options.tokens % (2 * size) for size in options.gpus):
        near = -(-options.tokens // multiple) * multiple
        raise RingConfigError.wrong(
            "--tokens", "a multiple of twice each number of --gpus", options.tokens, f"take {near}"
        )
    if options.output is not None and options.output.suffix != ".md":
        raise RingConfigError.wrong("--output", "a name that ends with .md", options.output, "rename it")
    files = [options.output, options.output.with_suffix(".json")] if options.output else []
    for path in files:
        require_writable(path, "--output")
    cells = _make_cells(options)
    import torch

    from ..compare.comparison import Request, compare
    from ..compare.peers import PEERS
    from ..compare.report import as_json, write_page

    if options.device == "cuda":
        select_gpu(max(options.gpus) - 1, torch.cuda.device_count())
    peers = [
        peer
        for peer in PEERS
        if options.only is None or any(word.lower() in peer.name.lower() for word in options.only)
    ]
    if not peers:
        names = ", ".join(peer.name for peer in PEERS)
        raise RingConfigError.wrong("--only", f"parts of {names}", " ".join(options.only), "correct it")
    request = Request(
        cells, tuple(dict.fromkeys(options.gpus)), options.device, options.rounds, options.budget_seconds,
        options.deadline_seconds,
    )  # fmt: skip
    rows = compare(request, peers, show=_show, spent_s=time.monotonic() - began)
    command = shlex.join(["ds-ring", *sys.argv[1:]])
    document = as_json(request, rows, command, time.monotonic() - began)
    page = write_page(document, rows)
    if options.json:
        print_json(document)
    else:
        print(page)
    for path, text in zip(files, (page, json.dumps(document, indent=2) + "\n"), strict=False):
        write_at_once(path, text)
        print(f"written: {path}", file=sys.stderr)
    return 0


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _make_cells(options: argparse.Namespace) -> tuple[Cell, ...]:
    """Return the model's heads, causal; packed; and causal with as many K/V heads as query heads."""
    from dataclasses import replace

    import torch

    from ds_ring.errors import RingConfigError

    from ..compare.cells import Cell
    from ..compare.comparison import make_documents
    from ..plan.model_file import read_heads
    from ..plan.training_setting import ELEMENT_BYTES

    sizes = [options.heads, options.kv_heads, options.head_dim]
    if options.hf_config is not None:
        if any(size is not None for size in sizes):
            raise RingConfigError("--hf-config: expected no sizes with it, got some; remove one of the two")
        heads, kv_heads, head_dim = read_heads(options.hf_config)
    elif options.heads is None or options.head_dim is None:
        raise RingConfigError("compare: expected --hf-config, or --heads and --head-dim, got neither")
    else:
        heads, kv_heads, head_dim = options.heads, options.kv_heads or options.heads, options.head_dim
    if heads % kv_heads:
        raise RingConfigError.wrong("--kv-heads", f"a divisor of {heads} heads", kv_heads, "correct it")
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    if dtype not in ELEMENT_BYTES:
        raise RingConfigError.wrong("dtype", f"one of {', '.join(ELEMENT_BYTES)}", dtype, "choose one")
    require_memory(options.tokens, heads, head_dim, ELEMENT_BYTES[dtype])
    causal = Cell(
        f"causal, {heads}:{kv_heads} heads of {head_dim}",
        tokens=options.tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=getattr(torch, dtype),
    )  # fmt: skip
    cells = [causal]
    if options.packed:
        documents = make_documents(options.tokens, 2 * max(options.gpus))
        name = causal.name.replace("causal", f"{len(documents)} documents")
        cells.append(replace(causal, name=name, documents=documents))
    if kv_heads < heads:
        name = f"causal, {heads}:{heads} heads of {head_dim}"
        cells.append(replace(causal, name=name, kv_heads=heads))
    return tuple(cells)
