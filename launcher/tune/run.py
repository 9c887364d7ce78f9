"""Run one search from a command line: read, tune, write, print. Rank 0 writes."""

from __future__ import annotations

import argparse
import json
import sys

import torch.distributed as dist
import yaml

from ds_ring.config.deepspeed_file import SECTION
from ds_ring.config.json_text import Json, parse_object, read_object, write_at_once

from ..plan.layer_mix import said_of
from .description import describe_hardware
from .report import print_tables
from .request import Request, request_from
from .result import Result, require_writable
from .search import tune


def read(options: argparse.Namespace, world_size: int) -> tuple[Json, Request]:
    """Read the DeepSpeed JSON and the request; measure nothing.

    Raises:
        RingConfigError: whatever in the options or files cannot be.
    """
    for option in ("output", "hardware_output"):
        if getattr(options, option) is not None:
            require_writable(getattr(options, option), "--" + option.replace("_", "-"))
    whole = read_object(options.config) if options.config is not None else {}
    if options.pattern is not None:
        section = whole.get(SECTION, {})
        whole = whole | {SECTION: dict(section) | {"pattern": parse_object(options.pattern, "--pattern")}}
    request = request_from(
        whole,
        tokens=options.tokens,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        batch=options.batch,
        device=options.device,
        dtype=options.dtype,
        world_size=world_size,
        said=said_of(options.hf_config, options.layers),
    )
    return whole, request


def run(options: argparse.Namespace) -> Result:
    """Read, tune, and on rank 0 write and print. Collective."""
    whole, request = read(options, dist.get_world_size())
    result = tune(request, progress=True)
    if dist.get_rank() == 0:
        merged = result.merged(whole)
        if options.output is not None:
            write_at_once(options.output, json.dumps(merged, indent=2) + "\n")
        if options.hardware_output is not None:
            write_at_once(options.hardware_output, yaml.safe_dump(describe_hardware(result), sort_keys=False))
        _print(options, result, merged)
    return result


def _print(options: argparse.Namespace, result: Result, merged: Json) -> None:
    if options.json:
        print(json.dumps(result.as_json(), indent=2))
        return
    print_tables(result)
    if options.output is None:
        print(json.dumps({key: merged[key] for key in ("sequence_parallel_size", SECTION)}, indent=2))
    for path in (options.output, options.hardware_output):
        if path is not None:
            print(f"written: {path}")
    sys.stdout.flush()
