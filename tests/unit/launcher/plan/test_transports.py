"""Ways to move keys inside a node: what messages take from the kernel, when pulls win, and the other rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_ring import Causal
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.hardware import Hardware, read_hardware
from ds_ring_launcher.plan.layer_passes import layout_of, parts_of, pass_shape, plans_of
from ds_ring_launcher.plan.model_file import ModelShape
from ds_ring_launcher.plan.model_memory import Zero
from ds_ring_launcher.plan.pass_time import PassRates, executed_pairs, pass_cost, time_line, work_of
from ds_ring_launcher.plan.training_setting import TrainingSetting
from ds_ring_launcher.plan.transports import transports

H100 = read_hardware("h100_flash3")
MODEL = ModelShape(layers=2, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=1000)


def setting(tokens: int, hardware: Hardware = H100, **changes: Any) -> TrainingSetting:
    given = TrainingSetting(
        tokens, 8, 1, MODEL, Causal(), "zigzag", Zero(3, 8, 2), "bfloat16", hardware, checkpointing=True
    )
    return replace(given, **changes)


def hardware(**changes: Any) -> Hardware:
    return H100.model_copy(update=changes)


def test_kernels_of_messages_take_their_share_for_as_long_as_they_travel() -> None:
    """By hand: the kernel has 1 - share of the device while the messages of its batch travel."""
    planned = setting(8 * 2048)
    layout = layout_of(planned)
    (plan, _), shape = plans_of(planned, layout)[0], pass_shape(planned, layout)
    schedule = shape.schedule([part.head_class for part in parts_of(plan, 3)], True)
    work = {id(chunk.steps): work_of(chunk.steps, shape, executed_pairs) for chunk in schedule.chunks}
    rates = PassRates(5e14, 2e-5, True, 5e-5, 4.5e11, 1e-5)
    alone, beside = (time_line(schedule, work, shape, rates._replace(message_share=x)) for x in (0.0, 0.25))
    assert np.array_equal(alone.transfer, beside.transfer) and np.array_equal(alone.posting, beside.posting)
    for kernel, transfer, slower in zip(alone.kernel, alone.transfer, beside.kernel, strict=True):
        # what is left when the messages have arrived runs alone
        done = min(kernel, 0.75 * transfer)
        assert slower == pytest.approx(done / 0.75 + kernel - done)


def test_a_share_of_nothing_and_one_latency_make_both_alike() -> None:
    same = hardware(message_share=None, pull_latency_s=H100.link_latency_s)
    ring, pull, *_ = transports(estimate(setting(8 * 4096, same))).rows
    assert ring.attention_s == pull.attention_s and ring.step_s == pull.step_s


@pytest.mark.parametrize(
    ("changes", "wins"), [({}, True), ({"message_share": 0.0}, False), ({"pull_latency_s": 1e-3}, False)]
)
def test_the_advice_is_the_faster_transport(changes: dict[str, Any], wins: bool) -> None:
    found = transports(estimate(setting(8 * 4096, hardware(**changes))))
    ring, pull = found.rows[:2]
    assert (pull.attention_s < 0.99 * ring.attention_s) == wins
    assert (
        f'inside a node {"take" if wins else "keep"} "transport": "{"pull" if wins else "ring"}"'
        in found.advice
    )
    assert "pulls have not run between several GPUs" in found.advice


def test_the_other_rows_are_what_they_send() -> None:
    planned = setting(8 * 8192)
    rows = {row.name: row for row in transports(estimate(planned)).rows}
    assert list(rows) == ["ring", "pull", "Ulysses 8", "all-gather"]
    ulysses = estimate(replace(planned, ring_size=1, ulysses_size=8))
    assert rows["Ulysses 8"].attention_s == ulysses.attention_s
    assert rows["Ulysses 8"].waiting_s == pytest.approx(ulysses.swap_s)
    # K and V of 7 shards forward; again backward, and their float32 gradients: 2 layers
    shard = 2 * 8192 * 8 * 128
    seconds = 2 * 7 * shard * (2 + 2 + 4) / H100.intra_node_bytes_per_s
    fixed = 2 * 3 * (H100.link_latency_s + H100.hop_overhead_s)
    assert rows["all-gather"].waiting_s == pytest.approx(seconds + fixed)
    for row in rows.values():
        others = estimate(planned).step_s - estimate(planned).attention_s
        if row.name != "Ulysses 8":
            assert row.step_s - row.attention_s == pytest.approx(others)


@pytest.mark.parametrize(
    "changes",
    [
        {"ring_size": 16, "zero": Zero(3, 16, 2)},
        {"ring_size": 1, "ulysses_size": 8},
        {"hardware": read_hardware("mi300x")},
        {"hardware": read_hardware("cpu"), "dtype": "float32"},
    ],
    ids=["two nodes", "no ring", "no figures", "cpu"],
)
def test_there_are_no_rows_where_pulls_are_no_option(changes: dict[str, Any]) -> None:
    assert transports(estimate(setting(8 * 1024, **changes))) is None


def test_a_ring_over_nodes_and_no_overlap_lose_nothing_to_kernels() -> None:
    planned = setting(8 * 2048)
    layout = layout_of(planned)
    (plan, _), shape = plans_of(planned, layout)[0], pass_shape(planned, layout)
    for rate, overlap in ((H100.inter_node_bytes_per_s, True), (H100.intra_node_bytes_per_s, False)):
        costs = [
            pass_cost(parts_of(plan, 0), shape, one, "bfloat16", rate, overlap)
            for one in (H100, hardware(message_share=None))
        ]
        assert costs[0] == costs[1]
