"""Compare the ways in which keys and values move inside one node: messages, pulls, Ulysses, an all-gather.

Owns the rows and the advice. Messages and pulls are estimated as any setting is (pass_time.py): kernels of
NCCL hold a part of the device while they move a message, and pulls by copy engines hold none and start later.
Both have the rate of the link. Ulysses computes each pass at once and waits for its all-to-alls. An
all-gather waits for all keys before it computes, in both passes, and returns float32 gradients at the end; it
is there to be compared with.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from ds_ring.plugin import PASSES

from .estimate import Estimate, estimate
from .layer_passes import layer_passes
from .model_memory import FLOAT
from .training_setting import ELEMENT_BYTES

_GATHERED = "all_gather"
ALIKE = 0.01  # of attention's time: less is no reason to change anything


class TransportRow(NamedTuple):
    """Hold one way to move keys and values; times are those of a step, seconds."""

    name: str
    section: dict[str, Any]  # of the JSON
    attention_s: float
    waiting_s: float  # of it, for keys, values and gradients
    step_s: float


class Transports(NamedTuple):
    """Hold all ways, and what to do."""

    rows: tuple[TransportRow, ...]
    advice: str  # one sentence


def transports(found: Estimate) -> Transports | None:
    """Return the ways for a plan's sizes; None unless its sequence has a GPU node with figures of pulls."""
    setting, hardware = found.setting, found.setting.hardware
    ranks = setting.ring_size * setting.ulysses_size
    inside = setting.ring_size > 1 and ranks <= hardware.devices_per_node
    pull_name = next((name for name, row in PASSES.items() if row.shares_memory), None)
    if (
        not inside
        or pull_name is None
        or hardware.pull_latency_s is None
        or not found.passes
        or found.other_layers
    ):
        return None
    names = ("ring", pull_name)
    by_messages, by_pulls = (estimate(replace(setting, transport=name)) for name in names)
    rows = [
        _row(name, {"transport": name}, one) for name, one in zip(names, (by_messages, by_pulls), strict=True)
    ]
    if math.gcd(setting.model.heads, setting.model.kv_heads) % ranks == 0:
        sizes: dict[str, Any] = {"ring_size": 1, "ulysses_size": ranks}
        rows.append(_row(f"Ulysses {ranks}", sizes, estimate(replace(by_messages.setting, **sizes))))
    if _GATHERED in PASSES:
        rows.append(_gathered(by_messages))
    ring, pull = rows[:2]
    figures = "; ".join(f"{row.name} {row.attention_s:.3g} s" for row in rows if row is not pull)
    wins = pull.attention_s < (1 - ALIKE) * ring.attention_s
    advice = (
        f'inside a node {"take" if wins else "keep"} "transport": "{names[wins]}": {pull_name}'
        f" {pull.attention_s:.3g} s of attention a step ({figures}); computed, pulls have not run between"
        " several GPUs"
    )
    return Transports(tuple(rows), advice)


def _row(name: str, section: dict[str, Any], found: Estimate) -> TransportRow:
    waiting = found.exposed_s + found.swap_s
    return TransportRow(name, section, found.attention_s, waiting, found.step_s)


def _gathered(found: Estimate) -> TransportRow:
    """Return the row of an all-gather, which computes what the ring does, in as many calls of the kernel."""
    setting, model, hardware = found.setting, found.setting.model, found.setting.hardware
    free: dict[str, Any] = {"hop_overhead_s": 0.0, "link_latency_s": 0.0, "intra_node_bytes_per_s": 1e30}
    free |= {"message_share": None}
    alone = layer_passes(
        replace(setting, hardware=hardware.model_copy(update=free), stage_bytes=0)  # shard by shard
    ).total
    elements = 2 * model.kv_heads // setting.ulysses_size * model.head_dim * found.layout.local_tokens
    elements *= setting.batch * (setting.ring_size - 1)
    fixed_s, element = hardware.link_latency_s + hardware.hop_overhead_s, ELEMENT_BYTES[setting.dtype]
    forward_s, backward_s = (
        elements * nbytes / hardware.intra_node_bytes_per_s + calls * fixed_s
        for nbytes, calls in ((element, 1), (element + FLOAT, 2))  # gradients return apart
    )
    again = 1 + setting.recompute_attention * setting.checkpointing
    waiting = model.attention_layers * (again * forward_s + backward_s) + found.swap_s
    attention = again * alone.forward_s + alone.backward_s + waiting
    step_s = found.step_s - found.attention_s + attention
    return TransportRow("all-gather", {"transport": _GATHERED}, attention, waiting, step_s)
