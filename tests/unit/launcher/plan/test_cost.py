"""FLOPs, bytes and time of a plan; memory of states. Figures by hand, from the plan and from papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_ring import Causal, Dilated, Full, SlidingWindow, build_plan, make_layout
from ds_ring.errors import RingConfigError
from ds_ring.kernels.cpu.kernel import CpuKernel
from ds_ring.schedule import lowering
from ds_ring_launcher.plan.estimate import estimate, head_swaps
from ds_ring_launcher.plan.hardware import hardware_from, read_hardware
from ds_ring_launcher.plan.hiding import MIN_TOKENS, hides, hiding_shard
from ds_ring_launcher.plan.layer_passes import slowest_pass
from ds_ring_launcher.plan.model_file import ModelShape
from ds_ring_launcher.plan.model_memory import Zero
from ds_ring_launcher.plan.options import can_hold, fewest_devices, longest_sequence
from ds_ring_launcher.plan.pass_memory import PassShape
from ds_ring_launcher.plan.pass_time import (
    CostPart,
    PassRates,
    bytes_sent,
    count_executed_pairs,
    count_work,
    pass_cost,
    time_line,
)
from ds_ring_launcher.plan.training_setting import TrainingSetting
from tests.cases import least_kept

LLAMA_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
SMALL = ModelShape(2, 64, 4, 2, 16, 128, 256)
RATES = {
    "name": "one", "kind": "cpu", "memory_bytes": 1 << 30, "devices_per_node": 2,
    "peak_flops": {"float32": 1.0e12}, "attention_efficiency": {"forward": 0.5, "backward": 0.25},
    "matmul_efficiency": 1.0, "call_overhead_s": 0.0, "intra_node_bytes_per_s": 1.0e9,
    "inter_node_bytes_per_s": 1.0e8, "link_latency_s": 0.0, "hop_overhead_s": 0.0, "source": {},
}  # fmt: skip
MACHINE = hardware_from(RATES, "test")


def parts(pattern, layout, heads, kv_heads, rank):
    plan = build_plan(pattern, layout, query_heads=heads, kv_heads=kv_heads)
    return plan, [CostPart(head_class, 1) for head_class in plan.rank(rank).classes]


def shape(layout, group=1, element=4, chunk=1 << 40):
    return PassShape(1, group, layout.local_tokens, 64, element, chunk, "cpu")


def setting(tokens=4096, ring=2, stage=3, hardware=MACHINE, **changes):
    zero = Zero(stage, ring, 4, bucket_elements=1000, fused_adam=False)
    return replace(
        TrainingSetting(tokens, ring, 1, SMALL, Causal(), "zigzag", zero, "float32", hardware), **changes
    )


def test_parameters_of_llama_3_8b():
    assert LLAMA_8B.parameters == 8_030_261_248  # as transformers counts them


def test_wrong_sizes_are_refused():
    with pytest.raises(RingConfigError, match="heads: expected a multiple of 3 kv_heads, got 4"):
        replace(SMALL, kv_heads=3)
    with pytest.raises(RingConfigError, match="layers: expected a whole number of at least 1, got 0"):
        replace(SMALL, layers=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_at_least_those_of_the_zero_paper(stage):
    """Rajbhandari et al. 2020, figure 1: 2 + 2 + 12 bytes per parameter, divided by stage over N devices."""
    devices, zero = 64, Zero(stage, 64, 2, bucket_elements=0)
    count = LLAMA_8B.parameters
    expected = {
        0: 16 * count,
        1: 4 * count + 12 * count / devices,
        2: 2 * count + 14 * count / devices,
        3: 16 * count / devices,
    }[stage]
    found = zero.parameters(LLAMA_8B) + zero.optimizer(LLAMA_8B)
    found += zero.standing_gradients(LLAMA_8B) + zero.gradients(LLAMA_8B, count)
    assert found == pytest.approx(expected, rel=1e-3)


def test_pairs_and_bytes_are_the_plans():
    layout = make_layout("zigzag", tokens=1024, ring_size=4)
    plan, mine = parts(Causal(), layout, 8, 2, 1)
    found = pass_cost(mine, shape(layout, group=4), MACHINE, "float32", 1e9)
    own = plan.rank(1)
    assert found.pairs == own.pairs
    assert found.forward_bytes == 2 * 64 * 4 * own.tokens_sent
    assert found.backward_bytes == 2 * 64 * 4 * (own.tokens_sent + own.tokens_received)
    assert bytes_sent(mine, shape(layout, group=4, element=2))[0] == found.forward_bytes // 2


def test_all_ranks_together_attend_the_triangle():
    layout, total = make_layout("zigzag", tokens=1024, ring_size=4), 0
    for rank in range(4):
        _, mine = parts(Causal(), layout, 2, 2, rank)
        total += pass_cost(mine, shape(layout), MACHINE, "float32", 1e9).pairs
    assert total == 2 * 1024 * 1025 // 2


def test_time_without_messages_is_flops_over_rate():
    layout = make_layout("contiguous", tokens=256, ring_size=1)
    _, mine = parts(Full(), layout, 3, 3, 0)
    found = pass_cost(mine, shape(layout), MACHINE, "float32", 1e9)
    pairs = 3 * 256 * 256
    assert found.forward_s == pytest.approx(pairs * 4 * 64 / 0.5e12)
    assert found.backward_s == pytest.approx(pairs * 10 * 64 / 0.25e12)
    assert found.exposed_s == pytest.approx(0, abs=1e-12)


def test_overlap_takes_the_larger_and_without_it_the_sum():
    layout = make_layout("zigzag", tokens=4096, ring_size=2)
    _, mine = parts(Causal(), layout, 1, 1, 0)
    slow, fast = 1e6, 1e15
    arithmetic = pass_cost(mine, shape(layout), MACHINE, "float32", fast).seconds
    both = pass_cost(mine, shape(layout), MACHINE, "float32", slow, overlap=False)
    hidden = pass_cost(mine, shape(layout), MACHINE, "float32", slow)
    plan, _ = parts(Causal(), layout, 1, 1, 0)
    keys, home = plan.rank(0).tokens_received, plan.rank(0).tokens_sent  # K/V twice, own dK/dV once
    received = 2 * 64 * 4 * (2 * keys + home)
    assert both.seconds == pytest.approx(arithmetic + received / slow, rel=1e-6)
    assert arithmetic < hidden.seconds < both.seconds and hidden.exposed_hops > 0


def test_gradients_that_return_last_hide_behind_a_part_of_the_own_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A causal layer of 8 x 8 Ki tokens by the figures of an H100: by a hundredth faster than without."""
    hardware = read_hardware("h100_flash3")
    layout = make_layout("zigzag", tokens=8 * 8192, ring_size=8)
    asked = PassShape(1, 4, 8192, 128, 2, 64 << 20, "flash"), hardware, "bfloat16"
    costs = []
    for least in (1 << 30, lowering.LEAST_KEPT):
        with least_kept(least):
            plan = build_plan(Causal(), layout, query_heads=32, kv_heads=8, stage_shards=4)
            costs.append(slowest_pass(plan, *asked, hardware.intra_node_bytes_per_s))
    exposed, hidden = costs
    assert exposed.exposed_hops == 1 and hidden.exposed_hops == 0
    assert 0.99 < hidden.backward_s / exposed.backward_s < 0.996


@pytest.mark.parametrize(
    "pattern", [Causal(), SlidingWindow(512), Full()], ids=lambda pattern: type(pattern).__name__
)
def test_executed_pairs_are_near_the_kernels(pattern):
    layout = make_layout("zigzag", tokens=8192, ring_size=2)
    plan, _ = parts(pattern, layout, 1, 1, 0)
    for hop_plan in plan.rank(0).classes[0].hops:
        counted = CpuKernel().count_executed_pairs(hop_plan.tiles)
        assert count_executed_pairs(hop_plan.tiles) == pytest.approx(counted, rel=0.15)


def test_peak_grows_with_tokens_and_falls_with_the_ring():
    at = {
        (tokens, ring): estimate(setting(tokens, ring)).peak.total
        for tokens in (4096, 8192)
        for ring in (1, 2, 4)
    }
    assert at[8192, 1] > at[4096, 1] and at[8192, 4] < at[8192, 2] < at[8192, 1]


def test_checkpointing_needs_less_memory_and_more_time():
    deep = replace(SMALL, layers=16)
    plain, again = (estimate(setting(model=deep, checkpointing=c)) for c in (False, True))
    assert again.peak.total < plain.peak.total and again.step_s > plain.step_s


def test_the_longest_sequence_fits_and_little_more_does_not():
    sized = setting(ring=4)
    tokens = longest_sequence(sized)
    assert can_hold(sized, tokens // 4) and not can_hold(sized, int(tokens / 4 * 1.05))
    assert estimate(replace(sized, tokens=tokens)).peak.total == pytest.approx(sized.usable_bytes, rel=0.05)


def test_the_fewest_devices_fit_and_half_of_them_do_not():
    found = fewest_devices(setting(tokens=1 << 20))
    assert found is not None and found.devices == found.ring_size > 1
    assert estimate(found).fits
    half = replace(found, ring_size=found.ring_size // 2, zero=replace(found.zero, world=found.devices // 2))
    assert not estimate(half).fits
    assert (
        fewest_devices(setting(tokens=1 << 20, hardware=MACHINE.model_copy(update={"memory_bytes": 1})))
        is None
    )


@pytest.mark.parametrize(
    ("pattern", "layout", "ring"),
    [
        (Causal(), "zigzag", 4),
        (Causal(), "contiguous", 3),
        (Full(), "contiguous", 5),
        (SlidingWindow(512), "auto", 4),
        (Dilated((1024, 8192), (1, 8), causal=True), "auto", 2),
    ],
    ids=str,
)
@pytest.mark.day("SlidingWindow(window=512, causal=True)-auto-4")
def test_transfers_hide_above_the_threshold_and_not_just_below_it(pattern, layout, ring):
    def planned(shard):
        return estimate(replace(sized, tokens=shard * ring)).attention

    sized = setting(tokens=512 * ring, ring=ring, pattern=pattern, layout=layout)
    found = hiding_shard(sized)
    assert found.tokens is not None and found.tokens > MIN_TOKENS and found.never is None
    assert not hides(planned(found.tokens * 31 // 32))
    assert all(hides(planned(shard)) for shard in (found.tokens, found.tokens * 33 // 32, 4 * found.tokens))
    longer = replace(sized, tokens=4 * found.tokens * ring)  # a shard that hides has the same threshold
    assert hiding_shard(longer) == found


def test_fixed_costs_hide_nothing():
    """By hand: a hop computes n^2 x 4 heads x 4 D / 5e11 s, receives n x 2 x 2 heads x D x 4 bytes / 1e8.

    (With fixed costs counted as what hides, any shard was long enough.)
    """
    slow = MACHINE.model_copy(update={"devices_per_node": 1, "call_overhead_s": 1.0, "hop_overhead_s": 1.0})
    sized = setting(tokens=4096, ring=4, pattern=Full(), layout="contiguous", hardware=slow)
    assert hiding_shard(sized).tokens == pytest.approx(2 * 2 * 4 * 5e11 / (4 * 4 * 1e8), rel=1 / 32)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pattern": SlidingWindow(512), "layout": "striped"}, "grow alike"),
        ({"ring": 1}, "a ring of one sends nothing"),
        ({"overlap": False}, "every hop waits"),
        ({"hardware": MACHINE.model_copy(update={"inter_node_bytes_per_s": 1.0})}, "these links"),
    ],
    ids=["striped window", "ring of one", "no overlap", "slow links"],
)
def test_where_transfers_never_hide_the_reason_is_said(changes, why):
    found = hiding_shard(setting(**{"tokens": 4096, "ring": 4} | changes))
    assert found.tokens is None and why in (found.never or "")


@pytest.mark.parametrize(
    "pattern", [Causal(), Dilated((1024, 8192), (1, 8), causal=True)], ids=["causal", "longnet"]
)
def test_a_large_ring_is_sampled(pattern):
    found = estimate(setting(tokens=128 * 1024, ring=128, pattern=pattern, layout="auto"))
    assert found.attention_passes.ranks == 2 and found.peak.total > 0


def test_a_swap_of_heads_sends_all_but_the_own_part():
    found = head_swaps(setting(ulysses_size=4), 1024)
    rows = 1024 // 4 * 2 * (SMALL.heads + SMALL.kv_heads)
    assert found[0] == rows * SMALL.head_dim * 4 * 3 // 4 and head_swaps(setting(), 1024)[0] == 0


@pytest.mark.parametrize("bytes_per_s", [1e3, 1e15])
def test_messages_hold_their_share_of_the_device_while_a_kernel_runs(bytes_per_s):
    """A kernel that messages accompany to its end takes 1 / (1 - share) of its time alone."""
    layout = make_layout("contiguous", tokens=256, ring_size=2)
    _, mine = parts(Full(), layout, 1, 1, 0)
    schedule = shape(layout).schedule([part.head_class for part in mine], False)
    work = {
        id(chunk.steps): count_work(chunk.steps, shape(layout), count_executed_pairs)
        for chunk in schedule.chunks
    }
    alone, shared = (
        time_line(
            schedule,
            work,
            shape(layout),
            PassRates(1e9, 0.0, False, 0.0, bytes_per_s, 0.0, message_share=share),
        )
        for share in (0.0, 0.2)
    )
    lost = shared.kernel - alone.kernel
    most = 0.2 * alone.transfer if bytes_per_s > 1e9 else alone.kernel / 0.8 - alone.kernel
    assert lost[0] == pytest.approx(most[0]) and alone.kernel[0] > 0


@pytest.mark.parametrize(("stage", "copies"), [(0, 1), (1, 0.25), (2, 0), (3, 0)])
def test_only_stages_below_2_reduce_a_flat_copy(stage, copies):
    zero = Zero(stage, 4, 4, bucket_elements=1000, fused_adam=False)
    assert zero.reduction(SMALL) == int(4 * SMALL.parameters * copies)
    assert replace(zero, world=1).reduction(SMALL) == 0


@pytest.mark.parametrize(
    ("stage", "offload", "kept"),
    [
        (0, False, 1),
        (1, False, 1),
        (1, True, 1),
        (2, False, 1 / 4),
        (2, True, 0),
        (3, False, 0),
        (3, True, 0),
    ],
)
def test_gradients_of_earlier_micro_batches_are_there_throughout(stage, offload, kept):
    """(A plan of eight micro-batches at ZeRO 1 had no gradients at its peak, and did not fit.)"""
    base = setting(ring=4, stage=stage)
    zero = replace(base.zero, offload_optimizer=offload)
    several = estimate(replace(base, zero=replace(zero, accumulates=True))).moments
    one = estimate(replace(base, zero=zero)).moments
    kept_bytes = pytest.approx(4 * kept * SMALL.parameters, rel=1e-3)
    more = {
        later.name: later.components.get("gradients", 0) - first.components.get("gradients", 0)
        for later, first in zip(several, one, strict=True)
    }
    kept_bytes = pytest.approx(4 * kept * SMALL.parameters, rel=1e-3)
    assert more["loss, forward"] == kept_bytes == more["loss, backward"]
    assert more["optimizer step"] == 0 == more["start of the engine"]
    if stage < 2:  # all are there at the end of one micro-batch, too
        assert more["end of the backward pass"] == 4 * SMALL.largest_parameter
    else:
        assert more["end of the backward pass"] == kept_bytes


@pytest.mark.parametrize(
    ("stage", "element", "fused", "gradients", "temporaries"),
    [
        (3, 2, True, 4 / 8, 2 / 8),  # one of two sub-groups, and its flat copy in low precision
        (3, 4, True, 4 / 8, 0),
        (3, 2, False, 4 / 8, 8 / 8),  # torch's AdamW
        (1, 2, True, 4 / 4, 4 / 4),  # the flat copy, and the gradients of which it is made
        (2, 2, True, 4 / 4, 4 / 4),
        (2, 4, True, 4 / 4, 4 / 4),  # the flat copy is what the optimizer gets
        (2, 2, False, 4 / 4, 8 / 4),
    ],
)
def test_the_optimizer_takes_one_sub_group_and_a_flat_copy(stage, element, fused, gradients, temporaries):
    """(Stage 3 had the gradients of all sub-groups, stages 1 and 2 no copies: `tools/check_plan.py` has.)"""
    zero = Zero(stage, 4, element, fused_adam=fused, sub_group_elements=-(-SMALL.parameters // 8))
    expected = (gradients * SMALL.parameters, temporaries * SMALL.parameters)
    assert zero.step(SMALL) == pytest.approx(expected, rel=1e-3)


def test_a_large_partition_steps_in_its_sub_groups():
    """(30 billion parameters on 8 H100 did not fit for gradients that are never there together.)"""
    model = replace(LLAMA_8B, layers=128)
    zero = Zero(3, 8, 2)
    assert zero.share(model.parameters) > 3e9
    assert zero.step(model) == (4_000_000_000, 2_000_000_000)
    assert zero.start(model) < replace(zero, sub_group_elements=10**12).start(model)


@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_an_all_reduce_is_two_messages_and_stage_3_gathers_twice(stage, times):
    """Rajbhandari et al. 2020, section 7: 2 W of parameters for stages 0 to 2, 3 W for stage 3."""
    assert estimate(setting(ring=4, stage=stage)).zero_bytes == times * 4 * SMALL.parameters * 3 // 4


@pytest.mark.parametrize(
    ("stage", "offload", "held", "buckets"),
    [
        (0, False, 1, 0),
        (1, False, 1, 1),
        (2, False, 1 / 4, 1),
        (3, False, 0, 0),
        (1, True, 1, 1),
        (2, True, 0, 1),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_held_with_a_bucket_and_one_that_is_sent(stage, offload, held, buckets, overlap):
    """(ZeRO 1 moves them to the host in the backward pass only where it overlaps.)"""
    zero = Zero(stage, 4, 4, bucket_elements=1000, offload_optimizer=offload, overlap_comm=overlap)
    moves = offload and (stage == 2 or overlap)
    elements = SMALL.largest_parameter if moves else held * SMALL.parameters
    elements += buckets * 1000 * (2 if overlap else 1)
    assert zero.gradients(SMALL, SMALL.parameters) == 4 * elements
