"""Measure the ranks of a job at its start, and estimate the seconds of training on a sample."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import Message
from ds_ring.config.section import RingConfig, named_patterns, pattern_from_config
from ds_ring.data.dynamic_ring.intervals import between_neighbours, ring_order
from ds_ring.errors import RingConfigError
from ds_ring.masks.catalog import Causal, Full
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import count_slots
from ds_ring.masks.tiles import Tiles
from ds_ring.ops.context import RingContext, get_block_side, make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.passes import Operands
from ds_ring.ops.prepare import prepare
from ds_ring.ops.ring_op import ring_attention_backward_op, ring_attention_op
from ds_ring.plugin import GRADIENT_PAYLOADS
from ds_ring.schedule.directions import sample_origins
from ds_ring.schedule.layout import make_layout
from ds_ring.schedule.lowering import count_heads
from ds_ring.schedule.plan import Plan, build_plan

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
        self._block = get_block_side(config.kernel, device_type, self._layers, config.block_size)
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
            low, high = (self._attention(tokens, ranks - beyond + extra) for extra in (0, step))
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
                total += layers * max(self._pass(plan, rank) for rank in sample_origins(ranks))
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
        gradient_bytes = GRADIENT_PAYLOADS[self.config.gradient_payload].element_bytes
        # While a hop computes, K/V of the next one arrive, and backward the gradients of the last one leave.
        moves_s = np.tile(np.append(seconds[1:], 0.0) * self._element_bytes, (2, 1))
        moves_s[1, 1:] += seconds[:-1] * gradient_bytes
        both = np.maximum(busy_s, moves_s) if self.config.overlap else busy_s + moves_s
        return float(both.sum())

    def _kernel_s(self, tiles: Tiles, kv_heads: int, group: int) -> np.ndarray:
        """Return the kernel's seconds for a hop, forward and backward; `group` heads share a K/V head."""
        pairs = np.zeros(2)
        single = tiles.head_in_group >= 0  # such a tile is for one query head of the group
        for part, heads in ((tiles.rows(single), 1), (tiles.rows(~single), group)):
            if len(part):
                pairs += heads * np.array(
                    [self.kernel.count_executed_pairs(part, back) for back in (False, True)]
                )
        flops = pairs * kv_heads * self.sizes.head_dim * _PAIR_FLOPS
        return np.asarray(flops / self.rates.kernel_flops + len(tiles) * np.array(self.rates.tile_s))


def measure_times(
    sizes: ModelSizes, config: RingConfig, mesh: RingMesh, device: torch.device, dtype: torch.dtype
) -> SampleTimes:
    """Measure kernel, product, links and hops on all ranks at once. Collective over the world.

    Returns the same on every rank, to the bit.
    """
    options = Options.make(config)
    tensors: dict[str, Any] = {"dtype": dtype, "device": device}
    heads = 1 if device.type == "cpu" else sizes.heads  # one head would not fill a GPU
    context = make_ring_context(Causal(), "contiguous", RingMesh.single(), options)
    seconds: list[float] = []
    flops: list[np.ndarray] = []
    for tokens in _TRIANGLES:
        shape = (1, heads, tokens, sizes.head_dim)
        seconds += _pass_seconds(context, shape, heads, **tensors)
        q = torch.empty(shape, **tensors)
        with context.call("attention forward", q) as call:
            (plan, _, kernel, *_), _ = prepare(context, call, Operands(q, q, q))
        tiles = plan.rank(0).classes[0].hops[0].tiles
        pairs = np.array([kernel.count_executed_pairs(tiles, back) for back in (False, True)])
        flops.append(pairs * _PAIR_FLOPS * heads * sizes.head_dim)
    matrix = torch.ones(_SIDES[device.type], _SIDES[device.type], **tensors)
    seconds.append(_seconds(lambda: matrix @ matrix, device))
    exchange = Exchange(mesh, options.hop_timeout_seconds)
    ahead, behind = ((mesh.ring_rank + step) % mesh.ring_size for step in (1, -1))
    for size in _MESSAGES:
        sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        post = ([Message(sent, ahead)], [Message(received, behind)])
        seconds.append(_seconds(lambda post=post: exchange.post(*post).wait(), device))  # type: ignore[misc]
    ring = make_ring_context(Full(), "contiguous", mesh, options)
    shape = (1, sizes.heads, _HOP_TOKENS, sizes.head_dim)
    seconds.append(sum(_pass_seconds(ring, shape, sizes.kv_heads, **tensors)) / (2 * mesh.ring_size + 1))
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
    context: RingContext, shape: tuple[int, ...], kv_heads: int, **tensors: Any
) -> tuple[float, float]:
    """Return the seconds of a pass forward and of one backward; `shape` is [B, H, S, D] of q."""
    q, grad = torch.randn(shape, **tensors), torch.randn(shape, **tensors)
    k, v = (torch.randn(shape[0], kv_heads, *shape[2:], **tensors) for _ in range(2))
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
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        rounds.append(time.perf_counter() - began)
    return min(rounds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fit(flops: tuple[float, float], seconds: tuple[float, float]) -> tuple[float, float]:
    """Return rate and fixed seconds through two points; the larger one's rate where the time did not rise."""
    rise_s = seconds[1] - seconds[0]
    if rise_s <= 0:
        return flops[1] / seconds[1], 0.0
    rate = (flops[1] - flops[0]) / rise_s
    return rate, max(seconds[0] - flops[0] / rate, 0.0)


def read_model_sizes(model: torch.nn.Module) -> ModelSizes:
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
