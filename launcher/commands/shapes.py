"""Define what `simulate` and `profile` ask alike: sizes of an attention, its pattern, layout and kernel.

Owns these options and how they become a source of numbers, a section of the JSON, a pattern and a layout.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ds_ring.registry import LAYOUTS

from .parsers import require_memory, require_sizes

if TYPE_CHECKING:
    from ds_ring.config.section import RingConfig
    from ds_ring.masks.pattern import Pattern
    from ds_ring.simulation.simulate import GeneratedSource

_MOST = {
    "tokens": 2**40,
    "heads": 4096,
    "kv_heads": 4096,
    "head_dim": 4096,
    "ring_sizes": 4096,
    "chunk_bytes": 2**53,
}
DTYPES = ("float32", "bfloat16", "float16", "float64")
MIB = 2**20


def add_shapes(parser: argparse.ArgumentParser, ring_sizes: list[int]) -> None:
    """Add the options that say what is attended with what."""
    parser.add_argument("--tokens", type=int, required=True, metavar="T", help="tokens of the sequence")
    sizes = " ".join(map(str, ring_sizes))
    parser.add_argument(
        "--ring-sizes",
        type=int,
        nargs="+",
        default=ring_sizes,
        metavar="P",
        help=f"ranks of a ring ({sizes})",
    )
    parser.add_argument("--heads", type=int, default=8, metavar="H", help="query heads (8)")
    parser.add_argument(
        "--kv-heads", type=int, metavar="G", help="K/V heads; as many as query heads if left out"
    )
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="head_dim (64)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--layout", help=", ".join(LAYOUTS))
    parser.add_argument("--pattern", metavar="JSON", help='as "pattern" in the JSON; causal if left out')
    parser.add_argument(
        "--config", metavar="DS_JSON", type=Path, help="take pattern, layout and kernel from this file"
    )
    parser.add_argument(
        "--chunk-bytes",
        type=int,
        metavar="BYTES",
        help="least size of a K or V message (1 MiB); 1: head by head",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the numbers (0)")


def config_of(options: argparse.Namespace) -> RingConfig:
    """Return the section that says pattern, layout and kernel: of --config, or made of --pattern."""
    from ds_ring.config.json_text import parse_object
    from ds_ring.config.section import RingConfig
    from ds_ring.errors import RingConfigError

    if options.config is not None and options.pattern is not None:
        raise RingConfigError(
            f"{options.command}: expected --pattern or --config, got both; leave one of them out"
        )
    if options.config is not None:
        return RingConfig.from_deepspeed(options.config)
    pattern = parse_object("{}" if options.pattern is None else options.pattern, "--pattern")
    return RingConfig.from_deepspeed({"sequence_parallel_size": 1, "ring_attention": {"pattern": pattern}})


def pattern_of(options: argparse.Namespace, config: RingConfig) -> Pattern:
    """Return the pattern of a section."""
    from ds_ring.config.section import pattern_from_config
    from ds_ring.errors import RingConfigError

    if config.pattern.documents:
        raise RingConfigError(
            f'{options.command}: expected a pattern without "documents", which come with a batch, got true;'
            " set it to false, or call ds_ring.simulate with Documents(...)"
        )
    return pattern_from_config(config)


def source_of(options: argparse.Namespace) -> GeneratedSource:
    """Return generated numbers of these sizes.

    Raises:
        RingShapeError, RingConfigError: sizes or a seed that cannot be.
    """
    require_sizes(options, _MOST)
    element_bytes = {"float64": 8, "float32": 4}.get(options.dtype, 2)
    require_memory(options.tokens, options.heads, options.head_dim, element_bytes)
    import torch  # a second or two, for which a wrong size need not wait

    from ds_ring.simulation.simulate import GeneratedSource

    return GeneratedSource(
        options.tokens,
        options.heads,
        options.kv_heads,
        options.head_dim,
        dtype=getattr(torch, options.dtype),
        seed=options.seed,
    )
