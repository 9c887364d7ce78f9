"""List what can be chosen: sizes, layout, overlap, kernel options and heads per message.

Owns the enumeration and the translation to keys of the JSON. A candidate has the number of heads that travel
together, not how many bytes, so that it means the same at every length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ds_ring.config.section import RingConfig
from ds_ring.errors import RingLayoutError
from ds_ring.kernels.cpu import BLOCK, TRIANGLE
from ds_ring.ops.options import Options
from ds_ring.plugin import KERNELS, LAYOUTS
from ds_ring.schedule.layout import Layout, make_layout
from ds_ring.schedule.lowering import split_heads
from ds_ring.schedule.plan import find_head_classes

from .request import TuningRequest

BLOCKS, TRIANGLES = (1024, 2048, 4096), (64, 128, 256)  # tokens, of the cpu kernel
BLOCK_SIZES = (64, 128, 256)  # tokens, of the flex kernel


class KernelChoice(NamedTuple):
    """Hold options of the kernel, as pairs, and the side of a mask block in tokens."""

    options: tuple[tuple[str, int], ...]
    block_size: int


@dataclass(frozen=True)
class TuningCandidate:
    """Describe one way to run a pass."""

    # ring_size, ulysses_size: their product is the number of ranks that share a sequence
    ring_size: int
    ulysses_size: int
    layout: str  # its name
    overlap: bool  # compute while sending
    kernel: KernelChoice  # its options
    heads_per_message: int  # K/V heads that travel together; 0 where nothing travels

    @property
    def family(self) -> tuple[int, int, str, bool]:
        """Return what the model predicts least well; every family gets one real pass."""
        return self.ring_size, self.ulysses_size, self.layout, self.overlap

    def __str__(self) -> str:
        parts = [f"ring {self.ring_size} x Ulysses {self.ulysses_size}"]
        if self.ring_size > 1:
            parts += [self.layout, "overlap" if self.overlap else "no overlap"]
            parts += [f"{self.heads_per_message} K/V heads a message"]
        parts += [f"{name} {value}" for name, value in self.kernel.options]
        return ", ".join(
            [*parts, f"block_size {self.kernel.block_size}"] if not self.kernel.options else parts
        )


def candidates(request: TuningRequest) -> list[TuningCandidate]:
    """Return all that is worth a try, each once; the first one is what the defaults come to."""
    first = default_candidate(request)
    return list(dict.fromkeys([first, *_all(request)]))


def default_candidate(request: TuningRequest) -> TuningCandidate:
    """Return one ring of all ranks with the runtime's own choices."""
    size = request.sequence_size
    shard = plan_layout(request, "auto", size, 1, request.tokens).local_tokens
    name = "contiguous" if size == 1 else layout_names(request, size, 1)["auto"]
    choice = kernel_choices(request, shard)[0]
    return TuningCandidate(size, 1, name, True, choice, default_heads(request, size, 1, request.tokens))


def _all(request: TuningRequest) -> Iterator[TuningCandidate]:
    for ulysses in range(1, request.sequence_size + 1):
        if request.sequence_size % ulysses or request.heads % ulysses or request.kv_heads % ulysses:
            continue
        ring = request.sequence_size // ulysses
        shard = plan_layout(request, "auto", ring, ulysses, request.tokens).local_tokens
        kernels = kernel_choices(request, shard)
        # Nothing moves in a ring of one: layout, overlap and message size mean nothing.
        if ring == 1:
            yield from (TuningCandidate(1, ulysses, "contiguous", True, choice, 0) for choice in kernels)
            continue
        layouts = dict.fromkeys(layout_names(request, ring, ulysses).values())
        heads = [default_heads(request, ring, ulysses, request.tokens)]
        if request.has_hops:  # the default, one, and all that are read alike
            heads = list(dict.fromkeys([*heads, 1, _largest_class(request, ulysses)]))
        overlaps = (True, False) if request.has_hops else (True,)
        for parts in itertools.product(layouts, overlaps, kernels, heads):
            yield TuningCandidate(ring, ulysses, *parts)


@lru_cache(maxsize=256)
def plan_layout(request: TuningRequest, name: str, ring: int, ulysses: int, tokens: int) -> Layout:
    """Return the layout of that name for `tokens`; RingLayoutError where the patterns have none."""
    mix = dict(request.mix)
    block = request.base.block_size if KERNELS[request.kernel].takes_blocks else 1
    return make_layout(
        name, tokens=tokens, ring_size=ring, pattern=mix, multiple_of=ulysses, block_size=block
    )


def layout_names(request: TuningRequest, ring: int, ulysses: int) -> dict[str, str]:
    """Map every layout name that the pattern permits to the first name of an equal layout."""
    names: dict[str, str] = {}
    first: dict[Layout, str] = {}
    for name in sorted(LAYOUTS, key=lambda name: name == "auto"):  # an equal one is more precise
        try:
            layout = plan_layout(request, name, ring, ulysses, request.tokens)
        except RingLayoutError:
            continue  # residue, for a pattern that is not dilated
        names[name] = first.setdefault(layout, name)
    return names


def kernel_choices(request: TuningRequest, shard_tokens: int) -> list[KernelChoice]:
    """Return options of the kernel, the default first; of blocks that hold a whole shard only one."""
    size = request.base.block_size
    if request.kernel == "flex":
        return [KernelChoice((), n) for n in dict.fromkeys((size, *BLOCK_SIZES))]
    if request.kernel != "cpu":
        return [KernelChoice((), size)]
    covering = [n for n in BLOCKS if n >= shard_tokens]
    whole_shard = BLOCK if BLOCK in covering else min(covering, default=BLOCK)
    blocks = sorted({whole_shard, *(n for n in BLOCKS if n < shard_tokens)}, key=lambda n: (n != BLOCK, n))
    triangles = sorted(TRIANGLES, key=lambda n: n != TRIANGLE)
    pairs = itertools.product(blocks, triangles)
    return [KernelChoice((("block", block), ("triangle", triangle)), size) for block, triangle in pairs]


def head_bytes(request: TuningRequest, ring: int, ulysses: int, tokens: int, layout: str = "auto") -> int:
    """Return bytes of K of one head of a ring shard."""
    shard = plan_layout(request, layout, ring, ulysses, tokens).local_tokens
    return request.batch * shard * request.head_dim * request.item_bytes


def default_heads(request: TuningRequest, ring: int, ulysses: int, tokens: int) -> int:
    """Return K/V heads that go round together by default; 0 in a ring of one."""
    if ring == 1:
        return 0
    most = _largest_class(request, ulysses)
    of_a_head = head_bytes(request, ring, ulysses, tokens)
    bytes_ = Options.make(request.base).chunk_bytes_on(request.device, ring)
    first = split_heads(slice(0, most, 1), of_a_head, bytes_)[0]
    return len(range(most)[first])


def _largest_class(request: TuningRequest, ulysses: int) -> int:
    heads, kv_heads = request.heads // ulysses, request.kv_heads // ulysses
    classes = (part for pattern, _ in request.mix for part, _ in find_head_classes(pattern, heads, kv_heads))
    return max(len(range(kv_heads)[part]) for part in classes)


def make_keys(candidate: TuningCandidate, request: TuningRequest, tokens: int) -> dict[str, Any]:
    """Return the keys of the section that the candidate sets, for sequences of `tokens`."""
    ring, ulysses, heads = candidate.ring_size, candidate.ulysses_size, candidate.heads_per_message
    keys: dict[str, Any] = {"ring_size": ring, "ulysses_size": ulysses}
    if ring > 1:  # or neither means anything: the section's values stay
        keys |= {"layout": candidate.layout} | ({"overlap": candidate.overlap} if request.has_hops else {})
    keys |= {"block_size": candidate.kernel.block_size}
    keys["kernel_options"] = _kernel_options(candidate, request)
    keys["chunk_bytes"] = request.base.chunk_bytes
    if request.has_hops and heads and heads != default_heads(request, ring, ulysses, tokens):
        keys["chunk_bytes"] = heads * head_bytes(request, ring, ulysses, tokens, candidate.layout)
    return keys


def _kernel_options(candidate: TuningCandidate, request: TuningRequest) -> dict[str, Any]:
    """Return options without the defaults, so that the file serves on another device as well."""
    chosen = dict(candidate.kernel.options)
    options = {name: value for name, value in request.base.kernel_options.items() if name not in chosen}
    default = {"block": BLOCK, "triangle": TRIANGLE}
    return options if chosen == default else options | chosen


@lru_cache(maxsize=1024)
def read_section(candidate: TuningCandidate, request: TuningRequest, tokens: int) -> RingConfig:
    """Return the section that the candidate comes to."""
    keys = request.base.model_dump() | make_keys(candidate, request, tokens)
    return RingConfig.model_validate(keys)
