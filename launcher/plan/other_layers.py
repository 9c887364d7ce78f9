"""Estimate the layers that are not softmax attention: what crosses between ranks, its memory and its time.

Owns which of these layers `ds-ring plan` knows (`KNOWN`), their sizes in a config.json, and what one of them
costs on a ring. Bytes are counted from what real ranks walk: the messages of halos, the rounds of a scan, the
slots that ranks read (`tests/dist/test_plan_bytes.py` compares them with those of real ranks). Which rows a
learned score chooses is known at run time only: the rows of a selection are those that may be chosen at most.

Arithmetic is rough: 6 FLOPs a token and element of a state, forward, and twice that backward; scores of an
indexer for every visible pair; attention for the pairs that are chosen, as its kernel does others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ds_ring.config.messages import sentence, shown
from ds_ring.errors import RingConfigError
from ds_ring.layers.scan.sequence_runs import halo_messages, sequence_runs
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import count_slots
from ds_ring.schedule.choose import bind_one_head, count_rank_work
from ds_ring.schedule.head_class import ReadsOfShards
from ds_ring.schedule.layout import Layout

from .hardware import Hardware

FLOAT = 4  # bytes of an element of a state, and of a gradient that travels
STATE_FLOPS = 6
RUNS = 2  # of a rank, for memory: zigzag's
# By device, as in layers/selection: bytes of a batch of blocks, and pairs whose scores exist at a time.
BATCH_BYTES, SCORED_PAIRS = {"cpu": 4 << 20, "cuda": 2 << 30}, {"cpu": 1 << 18, "cuda": 1 << 22}


class Recurrence(NamedTuple):
    """Describe a layer that passes a state on or convolves tokens, in the place of attention."""

    name: str
    kept_elements: int  # a token that it keeps for the backward pass in addition to its kernel's
    # before, channels: tokens that its convolution looks back, and convolved elements a token
    before: int = 0
    channels: int = 0
    # state, transition: elements of B and M of one sample (ring_scan); no state, no scan
    state: int = 0
    transition: int = 0
    matrix: bool = False  # M is a matrix: the kernel computes it as more columns of values


class Selection(NamedTuple):
    """Describe the additional parts of attention over chosen keys."""

    name: str
    top_k: int
    heads: int  # of the indexer
    key_dim: int  # elements of its key
    row: int  # elements of a token's K and V of all heads
    finds: bool = True  # has an indexer; else it takes what a layer before it chose


Kind = Recurrence | Selection
Kinds = tuple[Kind | None, ...]  # of every layer, None for softmax attention
ModelValues = Mapping[str, Any]


def _size(values: ModelValues, key: str) -> int:
    value = values.get(key)
    if type(value) is not int or value < 1:
        expected = "a whole number of at least 1"
        raise RingConfigError(f"--hf-config: {key}: {sentence(expected, shown(value), 'correct it')}")
    return value


def _gated_delta(values: ModelValues) -> Recurrence:
    width = _size(values, "linear_conv_kernel_dim")
    heads, key_dim = _size(values, "linear_num_value_heads"), _size(values, "linear_key_head_dim")
    value_dim = _size(values, "linear_value_head_dim")
    keys, inner = _size(values, "linear_num_key_heads") * key_dim, heads * value_dim
    channels = 2 * keys + inner
    return Recurrence(
        "gated delta rule", 2 * channels + 3 * inner + 2 * heads * key_dim, width - 1, channels,
        heads * key_dim * value_dim, heads * key_dim**2, True,
    )  # fmt: skip


def _kimi_delta(values: ModelValues) -> Recurrence:
    width = _size(values, "linear_conv_kernel_dim")
    heads, dim = _size(values, "linear_num_heads"), _size(values, "linear_head_dim")
    inner = heads * dim
    return Recurrence(
        "Kimi delta attention", 12 * inner, width - 1, 3 * inner, inner * dim, inner * dim, True
    )


def _mamba2(values: ModelValues) -> Recurrence:
    width = _size(values, "mamba_d_conv")
    heads, dim = _size(values, "mamba_n_heads"), _size(values, "mamba_d_head")
    states, inner = _size(values, "mamba_d_state"), heads * dim
    channels = inner + 2 * _size(values, "mamba_n_groups") * states
    return Recurrence("Mamba 2", 2 * channels + 3 * inner, width - 1, channels, inner * states, heads)


def _lightning(values: ModelValues) -> Recurrence:
    hidden, heads = _size(values, "hidden_size"), _size(values, "num_attention_heads")
    dim = values.get("head_dim") or hidden // heads
    inner = heads * dim
    return Recurrence("lightning attention", 9 * inner, state=inner * dim, transition=heads)


def _short_convolution(values: ModelValues) -> Recurrence:
    hidden = _size(values, "hidden_size")
    before = _size(values, "conv_L_cache") - 1
    return Recurrence("short convolution", 6 * hidden, before, hidden)


def _selection(values: ModelValues) -> Selection:
    heads, dim = _size(values, "index_n_heads"), _size(values, "index_head_dim")
    of_head = sum(_size(values, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    row = _size(values, "num_attention_heads") * of_head
    return Selection("chosen keys", _size(values, "index_topk"), heads, dim, row)


Readers = Mapping[str, Callable[[ModelValues], Kind]]
# Types of models, words of their `layer_types` that are not softmax attention, and what reads the sizes.
_ROWS: tuple[tuple[str, str, Callable[[ModelValues], Kind]], ...] = (
    ("qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe", "linear_attention", _gated_delta),
    ("qwen3_5_moe_text olmo_hybrid", "linear_attention", _gated_delta),
    ("kimi_linear bailing_hybrid", "linear_attention", _kimi_delta),
    ("granitemoehybrid", "linear_attention mamba", _mamba2),
    ("minimax", "linear_attention", _lightning),
    ("lfm2 lfm2_moe lfm3", "conv", _short_convolution),
    ("deepseek_v32 glm_moe_dsa axk2 hy_v4", "indexed_attention", _selection),
)
KNOWN: Mapping[str, Readers] = {
    model: dict.fromkeys(words.split(), read) for models, words, read in _ROWS for model in models.split()
}
# Keys of configurations whose layers are not all softmax attention, for any `layer_types`.
_SIGNS = re.compile(
    r"mamba|ssm_|linear_(num|key|conv|attn)|index|lru_width|block_types?$|layers_block_type|attn_layer_"
    r"|conv_(kernel|L_cache)|compress|cca_|state_size|keep_window_size|hybrid_|ple_|attention_types$"
)


def find_readers(values: ModelValues) -> Readers:
    """Return what reads the layers of a config.json that are not softmax attention; nothing for most models.

    Raises:
        RingConfigError: the model has such layers, and none that is known.
    """
    model_type = values.get("model_type")
    if model_type in KNOWN:
        return KNOWN[str(model_type)]
    signs = [key for key, value in values.items() if _SIGNS.match(key) and value not in (None, False)]
    if not signs:
        return {}
    advice = "plan its attention alone by --layers, --hidden and the other sizes"
    expected, got = (
        f"attention alone, or one of {', '.join(KNOWN)}",
        f'{shown(model_type)}, with "{signs[0]}"',
    )
    raise RingConfigError(f"--hf-config: model_type: {sentence(expected, got, advice)}")


def read_kinds(values: ModelValues, types: Sequence[str]) -> Kinds:
    """Return the kind of every layer, by the text part of a config.json and its `layer_types`."""
    readers = find_readers(values)
    kinds_by_word = {word: read(values) for word, read in readers.items() if word in types}
    shared = values.get("indexer_types") or ["full"] * len(types)
    kinds: list[Kind | None] = []
    for word, indexer in zip(types, shared, strict=False):
        kind = kinds_by_word.get(word)
        if isinstance(kind, Selection) and indexer == "shared":
            kind = kind._replace(finds=False)
        kinds.append(kind)
    return tuple(kinds)


class Sent(NamedTuple):
    """Hold the bytes of one kind of message of a rank: sent and received, forward and backward."""

    what: str
    forward: int
    backward: int
    # messages are waited for one after the other: received by each, forward and backward
    forward_received: tuple[int, ...]
    backward_received: tuple[int, ...]
    overlaps: bool = False  # with scores and attention of the hop before; else nothing hides them


class LayerSetting(NamedTuple):
    """Say where a layer runs."""

    layout: Layout
    parts: int  # Ulysses ranks, which share a shard
    batch: int
    element_bytes: int
    pattern: Pattern  # of attention over chosen keys


Rounds = tuple[tuple[np.ndarray, np.ndarray], ...]


def sent_by(kind: Kind, place: LayerSetting, rank: int) -> list[Sent]:
    """Return what a rank of the sequence sends in one forward and one backward pass of a layer.

    Raises:
        RingLayoutError: a layout whose runs have gaps, for layers that pass something on.
    """
    if isinstance(kind, Selection):
        return [*_selected(kind, place, rank)]
    parts = []
    if kind.before:
        messages = halo_messages(place.layout, place.parts, rank, kind.before, 0)
        row = place.batch * kind.channels * place.element_bytes
        out, back = (sum(map(len, way.values())) * row for way in (messages.sends, messages.receives))
        parts.append(Sent("halo", out, back, (back,), (out,)))
    if kind.state:
        sent, received = [], []
        for reverse in (False, True):
            # `SequenceRuns.rounds`, then one shift.
            state, transition = (place.batch * FLOAT * n for n in (kind.state, kind.transition))
            rounds = _rounds(place.layout, place.parts, state, transition, reverse)
            sent.append(sum(int(out[rank]) for out, _ in rounds))
            received.append(tuple(int(got[rank]) for _, got in rounds))
        parts.append(Sent("scan", sent[0], sent[1], received[0], received[1]))
    return parts


@lru_cache(maxsize=8)
def _rounds(layout: Layout, parts: int, state: int, transition: int, reverse: bool) -> Rounds:
    ranks = sequence_runs(layout, parts).ranks
    ranks, world, rounds = ranks[::-1] if reverse else ranks, layout.ring_size * parts, []
    apart = [1 << i for i in range((len(ranks) - 1).bit_length())]
    for distance, is_shift in [*((distance_apart, False) for distance_apart in apart), (1, True)]:
        to = np.arange(distance, len(ranks))
        # A run that has the state from the start on sends no transition.
        size = state + np.where((to < 2 * distance) | is_shift, 0, transition)
        owners, readers = ranks[to - distance], ranks[to]
        crosses = owners != readers
        sent, got = (
            np.bincount(who[crosses], weights=size[crosses], minlength=world) for who in (owners, readers)
        )
        rounds.append((sent, got))
    return tuple(rounds)


@lru_cache(maxsize=16)
def _reads(pattern: Pattern, layout: Layout) -> ReadsOfShards:
    return ReadsOfShards(bind_one_head(pattern), layout)


def _selected(kind: Selection, place: LayerSetting, rank: int) -> Iterator[Sent]:
    """Yield both passes of attention over chosen keys; rows are the most that may be chosen."""
    layout, size, batch, element = place.layout, place.layout.ring_size, place.batch, place.element_bytes
    reads, hops = _reads(place.pattern, layout), range(1, size)
    out = [count_slots(reads.slots(rank, (rank + hop) % size)) for hop in hops]
    into = [count_slots(reads.slots((rank - hop) % size, rank)) for hop in hops]
    if kind.finds:
        key = batch * kind.key_dim * element
        yield Sent("indexer keys", key * sum(out), 0, tuple(key * n for n in into), (), True)
    bits = batch * -(-layout.local_tokens // 8) * (size - 1)
    yield Sent("bits of chosen rows", bits, bits, (bits,), (bits,))
    # A query chooses at most k rows.
    most = [kind.top_k * layout.valid_tokens((rank + hop) % size) for hop in hops]
    out = [min(pair) for pair in zip(out, most, strict=True)]
    into = [min(n, kind.top_k * layout.valid_tokens(rank)) for n in into]
    row, gradient = batch * kind.row * element, batch * kind.row * FLOAT
    forward, backward = row * sum(out), row * sum(out) + gradient * sum(into)
    got = tuple(row * n for n in into), tuple(row * n + gradient * m for n, m in zip(into, out, strict=True))
    yield Sent("rows that may be chosen", forward, backward, *got, overlaps=True)


class LayerCost(NamedTuple):
    """Hold what the layers of one kind cost: of one of them, on the rank that needs most."""

    kind: Kind
    layers: int
    sent: tuple[Sent, ...]  # of the rank that sends most
    # forward_s, backward_s: seconds, waiting included
    forward_s: float
    backward_s: float
    waits: tuple[float, float]  # of them, for messages

    @property
    def waiting_s(self) -> float:
        """Return the seconds of both passes in which the layer waits for messages."""
        return sum(self.waits)

    @property
    def bytes_sent(self) -> tuple[int, int]:
        """Return the bytes that the rank sends, forward and backward."""
        return sum(message.forward for message in self.sent), sum(message.backward for message in self.sent)


def layer_cost(
    kind: Kind, layers: int, place: LayerSetting, ranks: Sequence[int], hardware: Hardware,
    dtype: str, bytes_per_s: float, kernel: str,
) -> LayerCost:  # fmt: skip
    """Return the cost of a layer on the ranks of the sequence that are looked at."""
    traffic = {rank: sent_by(kind, place, rank) for rank in ranks}
    busiest = max(
        traffic.values(), key=lambda parts: sum(message.forward + message.backward for message in parts)
    )
    computed = _arithmetic(kind, place, hardware, dtype, kernel)
    fixed_s, seconds, waiting = hardware.link_latency_s + hardware.hop_overhead_s, [], []
    for backward, compute in enumerate(computed):
        waits = []
        for parts in traffic.values():
            times = [0.0, 0.0]  # of messages that nothing hides, and that overlap
            for message in parts:
                received = message.backward_received if backward else message.forward_received
                times[message.overlaps] += sum(n / bytes_per_s + fixed_s for n in received if n)
            waits.append(times[0] + max(0.0, times[1] - compute))
        waiting.append(max(waits))
        seconds.append(compute + waiting[-1])
    return LayerCost(kind, layers, tuple(busiest), seconds[0], seconds[1], (waiting[0], waiting[1]))


def _arithmetic(
    kind: Kind, place: LayerSetting, hardware: Hardware, dtype: str, kernel: str
) -> tuple[float, float]:
    """Return the seconds of arithmetic without the matrices of the layer, forward and backward."""
    rate, batch, layout = hardware.flops(dtype), place.batch, place.layout
    dense = rate * hardware.matmul_efficiency
    if isinstance(kind, Recurrence):
        elements = kind.state + kind.matrix * kind.transition
        tokens = layout.local_tokens // place.parts
        flops = STATE_FLOPS * elements * batch * tokens
        return flops / dense, 2 * flops / dense
    pairs = int(count_rank_work(bind_one_head(place.pattern), layout).max())
    scores = 2 * kind.finds * kind.heads * kind.key_dim * batch * pairs
    chosen = batch * min(pairs, layout.local_tokens * kind.top_k) * kind.row
    efficiency = hardware.efficiency(kernel)
    # Two products forward, five backward, of 2 FLOPs an element of K or V.
    forward, backward = 2 * chosen / (rate * efficiency.forward), 5 * chosen / (rate * efficiency.backward)
    return scores / dense + forward, backward


class LayerMemory(NamedTuple):
    """Hold the bytes of one layer on a rank, the most there may be."""

    kept_bytes: int  # between its passes
    messages: int  # while it exchanges


def layer_memory(
    kind: Kind, batch: int, slots: int, tokens: int, element_bytes: int, device: str
) -> LayerMemory:
    """Return the needs of a layer without the tensors of attention.

    Args:
        kind: of the layer.
        batch: samples.
        slots: local tokens, of this rank of the sequence.
        tokens: T.
        element_bytes: of activations.
        device: "cpu" or "cuda".
    """
    if isinstance(kind, Recurrence):
        kept_bytes = batch * slots * kind.kept_elements * element_bytes
        if not kind.state:
            return LayerMemory(kept_bytes, 2 * RUNS * batch * kind.before * kind.channels * element_bytes)
        # M and B of the runs, composed, sent and received; states and gradients.
        scan = 7 * FLOAT * RUNS * batch * (kind.transition + kind.state)
        return LayerMemory(kept_bytes + 2 * FLOAT * RUNS * batch * (kind.transition + kind.state), scan)
    chosen = 8 * batch * slots * min(kind.top_k, tokens)  # int64
    # Of rows: those in use and those that arrive, and of several samples a copy of the own ones; in the
    # backward pass gradients of those in use, that leave and that arrive, and sums for narrower results.
    elements = (2 + (batch > 1)) * element_bytes + (3 + (element_bytes < FLOAT)) * FLOAT
    rows = batch * slots * kind.row * elements
    # Which rows this rank and others chose, as bits and before that as bytes; three tables of positions.
    tables = batch * tokens + 2 * batch * tokens // 8 + 3 * 8 * tokens
    # Before that, the indexer's product and what it makes of it.
    scores = 2 * FLOAT * kind.finds * kind.heads * min(SCORED_PAIRS[device], batch * slots * tokens)
    return LayerMemory(chosen, max(rows + tables + BATCH_BYTES[device], scores))
