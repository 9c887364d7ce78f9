"""Give the samples of a batch to smaller rings of the same ranks: `"dynamic_ring": true`.

Owns what samples take on rings of each size, which samples a rank reads of each batch, and how they become
one batch of its ring. The division is `sub_rings.py`'s, the path from there to the model the session's.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils.data import Dataset

from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import Message
from ds_ring.config.section import RingConfig, named_patterns, pattern_from_config
from ds_ring.data.batch import IGNORE, LABEL_KEYS, Batch
from ds_ring.data.intervals import Place, SubRings, between_neighbours, ring_order
from ds_ring.data.loader import SampleOrder, is_sliced, padded
from ds_ring.data.packing import DOCUMENT_IDS, DocumentPart, PackedRows, part_of
from ds_ring.data.sub_rings import BatchLengths as Lengths
from ds_ring.data.sub_rings import SampleSeconds, SubRing, divide
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.masks.catalog import Causal, Full
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import count_slots
from ds_ring.masks.tiles import Tiles
from ds_ring.ops.context import RingContext, block_side, context_for
from ds_ring.ops.options import Options
from ds_ring.ops.passes import Operands
from ds_ring.ops.prepare import prepare
from ds_ring.ops.ring_op import ring_attention_backward_op, ring_attention_op
from ds_ring.plugin import GRADIENT_PAYLOADS, KV_PAYLOADS
from ds_ring.schedule.layout import make_layout
from ds_ring.schedule.lowering import count_heads
from ds_ring.schedule.plan import Plan, build_plan, sampled_origins

# Measure the ranks of a job at its start (a second or two), and estimate the seconds of training on a sample.

_LEAST = 64  # tokens of the shortest sample whose attention is estimated
_DENSE = 6  # FLOPs for each parameter of a matrix and token, forward and backward (Kaplan et al. 2020)
_PAIR_FLOPS = np.array([4.0, 10.0])  # forward, backward: for each pair, query head and element of D
_TRIANGLES = 512, 2048  # tokens of the kernel passes that are timed
_MESSAGES = 64 << 10, 8 << 20  # bytes
_HOP_TOKENS = 16  # tokens of a rank in the ring pass that times the overhead of hops
_SIDES = {"cpu": 1024, "cuda": 8192}  # of the product that is timed
_ROUNDS = 3


class ModelSizes(NamedTuple):
    """Hold the sizes of a decoder with gated MLPs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


class MeasuredRates(NamedTuple):
    """Rates measured while all ranks were busy; those of the slowest rank."""

    kernel_flops: tuple[float, float]  # FLOP/s, forward and backward, of the pairs that the kernel executes
    tile_s: tuple[float, float]  # fixed cost of a tile, forward and backward
    product_flops: float  # FLOP/s of a product of large matrices
    link_bytes_per_s: float  # from a rank to the next one
    hop_s: float  # of a hop that computes and sends next to nothing


class SampleTimes:
    """Estimate the seconds of samples: `SampleSeconds` of sub_rings.py.

    Takes the patterns of `config`, the section, not those that a model names by itself. `kernel` is what the
    section's is for tensors of this job; `tensors` are device type and bytes of an element of q, k and v.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        config: RingConfig,
        kernel: Any,
        rates: MeasuredRates,
        tensors: tuple[str, int],
    ) -> None:
        self.sizes, self.config, self.kernel, self.rates = sizes, config, kernel, rates
        device_type, self._element_bytes = tensors
        named = Counter(named_patterns(config).values())
        rest = Counter({pattern_from_config(config): max(sizes.layers - named.total(), 0)})
        self._layers: dict[Pattern, int] = dict(+(named + rest))
        self._block = block_side(config.kernel, device_type, self._layers, config.block_size)
        self._known: dict[tuple[int, int], float] = {}
        attention = 2 * sizes.hidden * sizes.head_dim * (sizes.heads + sizes.kv_heads)
        layer = attention + 3 * sizes.hidden * sizes.intermediate
        # The parameters that multiply every token: all but the embedding's rows and the norms.
        matrices = sizes.layers * layer + sizes.vocab * sizes.hidden
        self._dense_s = _DENSE * matrices / rates.product_flops  # for each token of one rank

    def fixed(self, ranks: int) -> float:
        """Return the seconds of all layers' hops with next to nothing in them."""
        return self._attention(self._knot(0, ranks), ranks)

    def sample(self, tokens: int, ranks: int) -> float:
        """Return the seconds of a sample's attention beyond `fixed`, and of the other matrices."""
        # Linear between powers of the root of two: a plan for every length would take too long to build.
        step = max(math.floor(2 * math.log2(max(tokens, 1) / self._knot(0, ranks))), 0)
        left, right = self._knot(step, ranks), self._knot(step + 1, ranks)
        low, high = self._attention(left, ranks), self._attention(right, ranks)
        between = low + (high - low) * max(tokens - left, 0) / (right - left)
        return max(between - self.fixed(ranks), 0.0) + self._dense_s * tokens / ranks

    def _knot(self, step: int, ranks: int) -> int:
        return round(max(_LEAST, ranks) * 2 ** (step / 2))

    def _attention(self, tokens: int, ranks: int) -> float:
        """Return the seconds of the slowest rank's passes of all layers, forward and backward."""
        # Four sizes an octave are planned, from 8 ranks on; between them seconds are linear.
        step = 1 << max(ranks.bit_length() - 3, 0)
        if beyond := ranks % step:
            low, high = (self._attention(tokens, ranks - beyond + more) for more in (0, step))
            return low + (high - low) * beyond / step
        if (tokens, ranks) not in self._known:
            sizes, total = self.sizes, 0.0
            name = "contiguous" if ranks == 1 else self.config.layout
            layout = make_layout(
                name, tokens=tokens, ring_size=ranks, pattern=self._layers, block_size=self._block
            )
            for pattern, layers in self._layers.items():
                heads, kv_heads, prune = sizes.heads, sizes.kv_heads, self.config.prune
                plan = build_plan(pattern, layout, query_heads=heads, kv_heads=kv_heads, prune=prune)
                plan = between_neighbours(plan, ring_order(ranks), 2 * ranks)
                total += layers * max(self._pass(plan, rank) for rank in sampled_origins(ranks))
            self._known[tokens, ranks] = total
        return self._known[tokens, ranks]

    def _pass(self, plan: Plan, rank: int) -> float:
        """Return the seconds of one rank's pass, forward and backward."""
        busy_s = np.zeros((2, plan.ring_size + 1))  # forward and backward, by hop
        tokens = np.zeros(plan.ring_size + 1)  # that arrive for a hop, times K/V heads
        for head_class in plan.rank(rank).classes:
            kv_heads = count_heads(head_class.kv_heads)
            for hop in head_class.hops:
                busy_s[:, hop.hop] += self._kernel_s(hop.tiles, kv_heads, plan.group)
                tokens[hop.hop] += kv_heads * count_slots(hop.held) if hop.hop else 0
        busy_s += np.where(tokens > 0, self.rates.hop_s, 0.0)
        seconds = tokens * 2 * self.sizes.head_dim / self.rates.link_bytes_per_s  # of K and V, for each byte
        gradient_bytes = GRADIENT_PAYLOADS[self.config.gradient_payload].bytes_each(4)
        # While a hop computes, K/V of the next one arrive, and backward the gradients of the last one leave.
        key_bytes = KV_PAYLOADS[self.config.kv_payload].bytes_each(self._element_bytes)
        moves_s = np.tile(np.append(seconds[1:], 0.0) * key_bytes, (2, 1))
        moves_s[1, 1:] += seconds[:-1] * gradient_bytes
        both = np.maximum(busy_s, moves_s) if self.config.overlap else busy_s + moves_s
        return float(both.sum())

    def _kernel_s(self, tiles: Tiles, kv_heads: int, group: int) -> np.ndarray:
        """Return the kernel's seconds for a hop, forward and backward; `group` heads share a K/V head."""
        pairs = np.zeros(2)
        single = tiles.head_in_group >= 0  # such a tile is for one query head of the group
        for part, heads in ((tiles.rows(single), 1), (tiles.rows(~single), group)):
            if len(part):
                pairs += heads * np.array([self.kernel.executed_pairs(part, back) for back in (False, True)])
        flops = pairs * kv_heads * self.sizes.head_dim * _PAIR_FLOPS
        return np.asarray(flops / self.rates.kernel_flops + len(tiles) * np.array(self.rates.tile_s))


def measure_times(
    sizes: ModelSizes, config: RingConfig, mesh: RingMesh, device: torch.device, dtype: torch.dtype
) -> SampleTimes:
    """Measure kernel, product, links and hops on all ranks at once. Collective over the world.

    Returns the same on every rank, to the bit.
    """
    options = Options.of(config)
    more: dict[str, Any] = {"dtype": dtype, "device": device}
    heads = 1 if device.type == "cpu" else sizes.heads  # one head would not fill a GPU
    context = context_for(Causal(), "contiguous", RingMesh.single(), options)
    seconds: list[float] = []
    flops: list[np.ndarray] = []
    for tokens in _TRIANGLES:
        shape = (1, heads, tokens, sizes.head_dim)
        seconds += _pass_seconds(context, shape, heads, **more)
        q = torch.empty(shape, **more)
        with context.call("attention forward", q) as call:
            (plan, _, kernel, *_), _ = prepare(context, call, Operands(q, q, q))
        tiles = plan.rank(0).classes[0].hops[0].tiles
        pairs = np.array([kernel.executed_pairs(tiles, back) for back in (False, True)])
        flops.append(pairs * _PAIR_FLOPS * heads * sizes.head_dim)
    matrix = torch.ones(_SIDES[device.type], _SIDES[device.type], **more)
    seconds.append(_seconds(lambda: matrix @ matrix, device))
    exchange = Exchange(mesh, options.hop_timeout_seconds)
    ahead, behind = ((mesh.ring_rank + step) % mesh.ring_size for step in (1, -1))
    for size in _MESSAGES:
        sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        post = ([Message(sent, ahead)], [Message(received, behind)])
        seconds.append(_seconds(lambda post=post: exchange.post(*post).wait(), device))  # type: ignore[misc]
    ring = context_for(Full(), "contiguous", mesh, options)
    shape = (1, sizes.heads, _HOP_TOKENS, sizes.head_dim)
    seconds.append(sum(_pass_seconds(ring, shape, sizes.kv_heads, **more)) / (2 * mesh.ring_size + 1))
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    *kernel_s, product_s, small_s, large_s, hop_s = slowest.tolist()
    forward, backward = (_fit((flops[0][i], flops[1][i]), (kernel_s[i], kernel_s[i + 2])) for i in (0, 1))
    # The difference of two sizes: the fixed cost of a message drops out.
    link_bytes_per_s = (_MESSAGES[1] - _MESSAGES[0]) / max(large_s - small_s, 1e-9)
    product_flops = 2 * _SIDES[device.type] ** 3 / product_s
    rates = (forward[0], backward[0]), (forward[1], backward[1]), product_flops, link_bytes_per_s, hop_s
    return SampleTimes(sizes, config, kernel, MeasuredRates(*rates), (device.type, dtype.itemsize))


def _pass_seconds(
    context: RingContext, shape: tuple[int, ...], kv_heads: int, **more: Any
) -> tuple[float, float]:
    """Return the seconds of a pass forward and of one backward; `shape` is [B, H, S, D] of q."""
    q, grad = torch.randn(shape, **more), torch.randn(shape, **more)
    k, v = (torch.randn(shape[0], kv_heads, *shape[2:], **more) for _ in range(2))
    out, lse = ring_attention_op(q, k, v, context.handle)
    return (
        _seconds(lambda: ring_attention_op(q, k, v, context.handle), q.device),
        _seconds(lambda: ring_attention_backward_op(grad, q, k, v, out, lse, context.handle), q.device),
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return this rank's least seconds of some rounds; all ranks begin each round together."""
    rounds = []
    work()
    for _ in range(_ROUNDS):
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device))
        get_accelerator().synchronize()
        began = time.perf_counter()
        work()
        get_accelerator().synchronize()
        rounds.append(time.perf_counter() - began)
    return min(rounds)


def _fit(flops: tuple[float, float], seconds: tuple[float, float]) -> tuple[float, float]:
    """Return rate and fixed seconds through two points; the larger one's rate where the time did not rise."""
    rise_s = seconds[1] - seconds[0]
    if rise_s <= 0:
        return flops[1] / seconds[1], 0.0
    rate = (flops[1] - flops[0]) / rise_s
    return rate, max(seconds[0] - flops[0] / rate, 0.0)


# [Note: dynamic rings]
# Every rank runs one forward and one backward pass of each batch, in a ring of any size: ZeRO and gradient
# accumulation count calls. So a batch is divided as a whole, and a rank has one ring in it. The loss of each
# rank is its labelled tokens' sum over those of the world ([Note: gradient scale] in loss.py), so gradients
# do not depend on the division. A sum over all samples (a router's loss) is taken over the whole ring, as
# without division: each token is on one rank. Divisions are made from lengths alone, by the same arithmetic
# everywhere; a checksum of them travels with the report of every batch.


class Assigned(NamedTuple):
    """Hold a rank's part of a batch before it is read."""

    ring: SubRing  # the ranks that share it
    places: tuple[Place, ...]  # of all rings of the division
    # what they hold; of a ring without samples one of the others', to know names and types by
    pieces: tuple[DocumentPart, ...]
    longest: int  # the greatest position in the whole batch
    crc: int  # checksum of the division


@dataclass
class DynamicRing:
    """Hold what divisions are made with; empty until `start`."""

    rings: SubRings | None = None
    times: SampleSeconds | None = None  # what samples take

    def start(self, sizes: ModelSizes, session: Any, dtype: torch.dtype) -> None:
        """Measure the machine. Collective over the world."""
        self.rings = SubRings(session.mesh)
        if (ranks := session.mesh.ring_size) > 1:
            mesh = self.rings.of([(0, ranks)])
            self.times = measure_times(sizes, session.config, mesh, session.device, dtype)

    def assign(
        self, pieces: Sequence[DocumentPart], most_tokens: int, packed: bool, mesh: RingMesh
    ) -> Assigned:
        lengths = tuple(piece.stop - piece.start for piece in pieces)
        if self.times is None or mesh.ring_size == 1:
            rings: tuple[SubRing, ...] = (SubRing(0, 1, tuple(range(len(pieces)))),)
        else:
            node = 0 if self.rings is None else self.rings.node
            rings = divide(Lengths(lengths, most_tokens, not packed), mesh.ring_size, self.times, node).rings
        mine = next(one for one in rings if one.first <= mesh.ring_rank < one.first + one.ranks)
        held = tuple(pieces[sample] for sample in mine.samples) or (pieces[0],)
        places = tuple((one.first, one.ranks) for one in rings)
        return Assigned(mine, places, held, max(lengths) - 1, zlib.crc32(repr((rings, lengths)).encode()))


class AssignedBatches:
    """Yield this rank's part of each batch of an order; a batch sampler of one item a batch."""

    def __init__(
        self,
        order: SampleOrder,
        dataset: Any,
        lengths: Sequence[int],
        most_tokens: int,
        packed: bool,
        session: Any,
    ) -> None:
        self.generator = order.generator
        self._order, self._rows, self._lengths = order, getattr(dataset, "rows", None), lengths
        self._most_tokens, self._packed, self._session = most_tokens, packed, session

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[list[Assigned]]:
        for indices in self._order:
            if self._rows is None:
                pieces = [DocumentPart(index, 0, int(self._lengths[index]), 0) for index in indices]
            else:
                pieces = [piece for index in indices for piece in self._rows[index]]
            session = self._session
            yield [session.dynamic.assign(pieces, self._most_tokens, self._packed, session.mesh)]


class AssignedSamples(Dataset[tuple[Assigned, list[Mapping[str, Any]]]]):
    """Read the samples of what was assigned; `dataset` may hold packed rows, of which pieces are read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, assigned: Assigned) -> tuple[Assigned, list[Mapping[str, Any]]]:
        return assigned, [self._read(piece) for piece in assigned.pieces]

    def _read(self, piece: DocumentPart) -> Mapping[str, Any]:
        packed = isinstance(self.dataset, PackedRows)
        documents = self.dataset.documents if packed else self.dataset
        if not packed and not is_sliced(documents):
            whole: Mapping[str, Any] = documents[piece.document]
            return whole
        found = dict(part_of(documents, piece.document, piece.start, piece.stop))
        return {"labels": found["input_ids"]} | found


def joined(assigned: Assigned, samples: Sequence[Mapping[str, Any]], packed: bool) -> Batch:
    """Return the samples of a ring as one batch: a packed row [1, N], or padded rows [B, T].

    Raises:
        RingShapeError: a sample has another length than reported, or other tensors than the one before.
        RingPatternError: a sample has positions or documents of its own.
    """
    rows: list[dict[str, Tensor]] = []
    for piece, sample in zip(assigned.pieces, samples, strict=True):
        rows.append(_checked(piece, sample))
        if rows[-1].keys() != rows[0].keys():
            raise RingShapeError.wrong(
                "data set", f"{sorted(rows[0])} in each sample", sorted(rows[-1]), "make them equal"
            )
    if not assigned.ring.samples:  # one token of padding, with the names and types of a sample
        rows = [{key: tensor[:1].clone() for key, tensor in rows[0].items()}]
        for key in rows[0].keys() & LABEL_KEYS:
            rows[0][key].fill_(IGNORE)
        rows[0]["attention_mask"] = torch.zeros(1, dtype=torch.int64, device="cpu")
    if not packed:
        return padded(rows)
    ids = [torch.full((len(row["input_ids"]),), number, device="cpu") for number, row in enumerate(rows)]
    batch = {key: torch.cat([row[key] for row in rows])[None] for key in rows[0]}
    return batch | {DOCUMENT_IDS: torch.cat(ids)[None]}


def _checked(piece: DocumentPart, sample: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {key: torch.as_tensor(value, device="cpu") for key, value in sample.items()}
    tokens = piece.stop - piece.start
    for key, tensor in tensors.items():
        if key in ("position_ids", DOCUMENT_IDS):
            raise RingPatternError(
                f"data set: expected one document a sample, got {key} in sample {piece.document}"
            )
        if tensor.ndim == 0 or len(tensor) != tokens:
            raise RingShapeError(
                f"sample {piece.document}: {key}: expected {tokens} entries (lengths), got {[*tensor.shape]}"
            )
    if "input_ids" not in tensors:
        raise RingShapeError(f"data set: expected input_ids in sample {piece.document}, got {[*tensors]}")
    return tensors


def sizes_of(model: torch.nn.Module) -> ModelSizes:
    """Return the sizes of a transformers model, which a sample's seconds follow from.

    Raises:
        RingConfigError: its configuration does not tell them.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = {
        "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
        "vocab": "vocab_size",
    }  # fmt: skip
    sizes: dict[str, Any] = {size: getattr(config, name, None) for size, name in names.items()}
    missing = [name for name, value in sizes.items() if not isinstance(value, int) or value < 1]
    if missing:
        raise RingConfigError(
            f"dynamic_ring: expected a transformers model, got {type(model).__name__} without {missing[0]}"
        )
    heads, hidden = sizes["heads"], sizes["hidden"]
    return ModelSizes(
        **sizes,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or max(hidden // heads, 1),
        intermediate=getattr(config, "intermediate_size", None) or 4 * hidden,
    )
