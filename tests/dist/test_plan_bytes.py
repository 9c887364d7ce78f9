"""Bytes that `ds-ring plan` estimates for layers other than attention against those that ranks count.

Real ranks train a small model of each kind for one step; all their exchanges count what they send. Virtual
ranks run scans and halos of other rings and layouts. Faults are seeded in what the ranks do.
"""

from __future__ import annotations

import gc
import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_ring import Causal, Full, RingMesh, halo, make_layout, ring_scan, ring_select, selected_attention
from ds_ring.comm.exchange import Exchange
from ds_ring.contrib.families.recurrent.layers import FUNCTIONS, METHODS
from ds_ring.errors import RingConfigError
from ds_ring.layers.scan.context import scan_context
from ds_ring.layers.scan.scan import gradient_messages, scan_messages
from ds_ring.layers.scan.sequence_runs import SequenceRuns, halo_messages, sequence_runs
from ds_ring.layers.selection import select, selected_pass
from ds_ring.measure.memory import measure_cpu_memory
from ds_ring.schedule.layout import Layout
from ds_ring_launcher import cli
from ds_ring_launcher.check.small_model import SAMPLES, build, make_batch, read_config, shrink
from ds_ring_launcher.plan import other_layers
from ds_ring_launcher.plan.advice import latents_on_the_wire
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.inputs import make_request
from ds_ring_launcher.plan.layer_passes import build_plans, choose_parts, pass_shape, plan_layout
from ds_ring_launcher.plan.model_file import _OPTIONS, read_model, text_part
from ds_ring_launcher.plan.other_layers import (
    KNOWN,
    LayerSetting,
    Recurrence,
    Selection,
    layer_memory,
    read_kinds,
    sent_by,
)
from ds_ring_launcher.plan.pass_time import bytes_sent
from ds_ring_launcher.plan.training_setting import TrainingSetting
from tests.dist.deepspeed_ranks import json_config, start_engine
from tests.dist.harness import RankPool


def scan_bytes(
    layout: Layout, transitions: Sequence[Tensor], increments: Sequence[Tensor], matrix: bool, reverse: bool
) -> list[int]:
    """The bytes that each rank sends in `ring_scan`, or in its backward pass, without documents."""
    runs, ranks = sequence_runs(layout), range(layout.ring_size)
    messages = gradient_messages if reverse else scan_messages
    jobs = [messages(runs, rank, transitions[rank], increments[rank], matrix) for rank in ranks]
    sent = [0] * layout.ring_size
    while posted := {rank: tensors for rank, job in enumerate(jobs) if (tensors := next(job, None))}:
        assert len(posted) == layout.ring_size, "all ranks have the same number of rounds"
        for rank, (sends, _) in posted.items():
            for peer, message in sends.items():
                sent[rank] += message.nbytes
                posted[peer][1][rank].copy_(message)
    return sent


def halo_bytes(layout: Layout, token_bytes: int, before: int) -> list[int]:
    """The bytes that each rank sends in `halo`, without documents."""
    plans = [halo_messages(layout, 1, rank, before, 0) for rank in range(layout.ring_size)]
    sent = [0] * layout.ring_size
    for reader, plan in enumerate(plans):
        for owner, places in plan.receives.items():
            assert len(plans[owner].sends[reader]) == len(places)
            sent[owner] += token_bytes * len(places)
    return sent


Pool = Callable[[int], RankPool]
TOKENS, BATCH = 61, 2
DELTA = Recurrence("delta", 0, 3, 5, 2 * 3 * 4, 2 * 3 * 3, matrix=True)
DECAY = Recurrence("decay", 0, 6, 2, 2 * 3 * 4, 2)


def tensors(kind: Recurrence, runs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """M and B of some runs, of two heads with states [3, 4]."""
    move = torch.ones(runs, BATCH, 2, 3, 3) if kind.matrix else torch.ones(runs, BATCH, 2, 1, 1)
    return move, torch.ones(runs, BATCH, 2, 3, 4)


@pytest.mark.parametrize("kind", [DELTA, DECAY], ids=lambda kind: kind.name)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_bytes_of_scans_and_halos_are_those_of_virtual_ranks(size: int, layout: str, kind: Any) -> None:
    place = LayerSetting(
        make_layout(layout, tokens=203, ring_size=size, pattern=Causal()), 1, BATCH, 2, Causal()
    )
    runs = sequence_runs(place.layout)
    given = [tensors(kind, len(runs.list_rank_runs(rank))) for rank in range(size)]
    scans = [
        scan_bytes(place.layout, *zip(*given, strict=True), matrix=kind.matrix, reverse=back)
        for back in (False, True)
    ]
    token_bytes = BATCH * kind.channels * torch.float16.itemsize
    halos = halo_bytes(place.layout, token_bytes, kind.before)
    for rank in range(size):
        of_halo, of_scan = sent_by(kind, place, rank)
        assert (of_scan.forward, of_scan.backward) == tuple(one[rank] for one in scans)
        assert of_halo.forward == halos[rank]
        assert sum(of_halo.backward_received) == of_halo.forward  # gradients take the way back


def counted() -> int:
    """Bytes that all exchanges of this process have sent."""
    return sum(one.counters.bytes_sent for one in gc.get_objects() if type(one) is Exchange)


def primitives(rank: int, world_size: int, kind: Recurrence, ulysses: int, fault: str = "") -> list[int]:
    """Bytes of a halo and a scan on this rank, forward and backward."""
    mesh = RingMesh.from_world(world_size // ulysses, ulysses)
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=mesh.ring_size, multiple_of=ulysses)
    named: dict[str, Any] = {"layout": layout, "mesh": mesh}
    context, rounds = scan_context(layout, mesh), SequenceRuns.rounds
    if fault == "transitions":  # are sent where the state is known
        SequenceRuns.rounds = lambda self: [  # type: ignore[method-assign]
            [one._replace(is_complete=False) for one in steps] for steps in rounds(self)
        ]
    try:
        x = torch.ones(BATCH, context.runs.local_tokens, kind.channels, requires_grad=True)
        pair = [one.requires_grad_() for one in tensors(kind, context.own_runs)]
        found, before = [], counted()
        for call in (
            lambda: halo(x, kind.before + (fault == "halo"), dim=1, **named),  # a token more
            lambda: ring_scan(*pair, matrix=kind.matrix, **named),
        ):
            out = call()
            found.append(counted() - before)
            out.sum().backward()
            found.append(counted() - before - found[-1])
            before = counted()
        return found
    finally:
        SequenceRuns.rounds = rounds  # type: ignore[method-assign]


def planned(kind: Recurrence, size: int, ulysses: int) -> list[list[int]]:
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=size // ulysses, multiple_of=ulysses)
    place = LayerSetting(layout, ulysses, BATCH, 4, Causal())
    of_ranks = [sent_by(kind, place, rank) for rank in range(size)]
    return [[n for one in of_rank for n in (one.forward, one.backward)] for of_rank in of_ranks]


@pytest.mark.parametrize(("size", "ulysses"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.day("4-1")
def test_bytes_of_scans_and_halos_are_those_of_real_ranks(rank_pool: Pool, size: int, ulysses: int) -> None:
    for kind in (DELTA, DECAY):
        assert rank_pool(size).run(primitives, kind, ulysses) == planned(kind, size, ulysses)


@pytest.mark.parametrize("fault", ["transitions", "halo"])
def test_messages_that_are_not_planned_are_found(rank_pool: Pool, fault: str) -> None:
    found, want = rank_pool(4).run(primitives, DELTA, 1, fault), planned(DELTA, 4, 1)
    assert found != want
    which = slice(2, 4) if fault == "halo" else slice(0, 2)
    assert [one[which] for one in found] == [one[which] for one in want]


# --- whole models ----------------------------------------------------------------------------------

EVERY_KEY = {"index_topk": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {}, "qwen3_5_text": {}, "olmo_hybrid": {}, "kimi_linear": {}, "bailing_hybrid": {},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}, "minimax": {},
    "lfm3": {}, "deepseek_v32": EVERY_KEY, "axk2": EVERY_KEY, "glm_moe_dsa": EVERY_KEY, "hy_v4": EVERY_KEY,
}  # fmt: skip


def configuration(family: str, changes: dict[str, Any]) -> Any:
    return shrink(read_config(family), TOKENS, 2, changes)


def trained(
    rank: int, world_size: int, family: str, changes: dict[str, Any], layout: str, latents: bool
) -> int:
    """Bytes that this rank sends in one step of a small model."""
    config, section = configuration(family, changes), {"layout": layout, "latents": latents}
    settings = json_config(world_size, SAMPLES, 0, ring_attention=section)
    engine = start_engine(build(config, "causal-lm", seed=0), settings, 0.0)
    local = engine.ring.shard_batch(make_batch(config, "causal-lm", TOKENS, 0, True))
    before = counted()
    engine.backward(engine(**local).loss)
    return counted() - before


def as_json(config: Any) -> str:
    """A config.json, without the infinity of one key, which is no JSON."""
    values = {key: value for key, value in config.to_dict().items() if key != "time_step_limit"}
    return json.dumps(values, default=str)


def setting(config: Any, size: int, layout: str) -> TrainingSetting:
    """What `ds-ring plan` reads of a model."""
    names = (
        "layers hidden heads kv_heads head_dim intermediate vocab tiled_loss tiled_mlp ulysses_size"
        " config pattern zero_stage ring_size offload_param recompute_attention activation_checkpointing"
        " offload_checkpoints offload_attention offload_optimizer recompute_half_of_attention fit"
    )
    given = dict.fromkeys(names.split()) | {
        "hf_config": as_json(config), "tokens": TOKENS, "devices": size,
        "batch": SAMPLES, "dtype": "float32", "hardware": "cpu", "layout": layout,
    }  # fmt: skip
    asked = make_request(Namespace(**given), lambda _: None).setting
    return replace(asked, ring_ranks_per_node=0)  # all ranks are in one node here


def of_ranks(asked: TrainingSetting) -> list[int]:
    """Bytes that each rank sends in a step."""
    layout, found = plan_layout(asked), []
    for rank in range(asked.ring_size):
        total = 0
        for plan, layers in build_plans(asked, layout):
            total += layers * sum(bytes_sent(choose_parts(plan, rank), pass_shape(asked, layout)))
        for kind, pattern, layers in asked.other_layers:
            place = LayerSetting(layout, 1, asked.batch, 4, pattern)
            total += layers * sum(one.forward + one.backward for one in sent_by(kind, place, rank))
        found.append(total)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.day("qwen3_5_text")
def test_bytes_of_a_step_are_those_of_a_model(rank_pool: Pool, family: str) -> None:
    changes = FAMILIES[family]
    config = configuration(family, changes)
    for size, layout in ((2, "zigzag"), (4, "contiguous")):
        want = of_ranks(setting(config, size, layout))
        assert rank_pool(size).run(trained, family, changes, layout, False) == want and max(want) > 0


def test_fewer_keys_send_fewer_rows_than_are_planned(rank_pool: Pool) -> None:
    config = configuration("deepseek_v32", {"index_topk": 2})
    asked = setting(config, 4, "zigzag")
    (kind, pattern, layers), want = asked.other_layers[0], of_ranks(asked)
    found = rank_pool(4).run(trained, "deepseek_v32", {"index_topk": 2}, "zigzag", False)
    assert isinstance(kind, Selection) and kind.top_k == 2
    for rank, (real, most) in enumerate(zip(found, want, strict=True)):
        rows = sent_by(kind, LayerSetting(plan_layout(asked), 1, SAMPLES, 4, pattern), rank)[-1]
        assert most - layers * (rows.forward + rows.backward) < real <= most


def test_of_chosen_rows_as_many_bytes_arrive_as_leave() -> None:
    """Where the last rank has a key more than the others have queries, each of which chooses one."""
    place = LayerSetting(make_layout("contiguous", tokens=53, ring_size=4), 1, 1, 4, Full())
    parts = [sent_by(Selection("", 1, 1, 4, 8), place, rank) for rank in range(4)]
    for ones in zip(*parts, strict=True):
        for way in ("forward", "backward"):
            sent, received = (
                sum(getattr(one, way) for one in ones),
                sum(sum(getattr(one, f"{way}_received")) for one in ones),
            )
            assert sent == received and (sent > 0 or way == "backward")


def test_a_layer_that_shares_its_indexer_finds_nothing() -> None:
    first, second = read_kinds(SPARSE | {"indexer_types": ["full", "shared"]}, ["indexed_attention"] * 2)
    assert first.finds and second == first._replace(finds=False)


@pytest.mark.night
def test_latents_send_what_the_advice_says(rank_pool: Pool) -> None:
    config = configuration("deepseek_v3", {})
    asked = setting(config, 2, "zigzag")
    advice = latents_on_the_wire(estimate(asked))
    for latents, want in ((True, advice.latent_bytes), (False, advice.expanded_bytes)):
        found = rank_pool(2).run(trained, "deepseek_v3", {}, "zigzag", latents)
        assert config.num_hidden_layers * want in found  # of the rank that takes longest


def peaks(rank: int, world_size: int) -> list[float]:
    """Measured bytes over planned ones: of a scan, of chosen positions, of attention over chosen keys."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=1024, ring_size=world_size)
    named: dict[str, Any] = {"layout": layout, "mesh": mesh}
    slots, heads, dim, k = layout.local_tokens, 8, 32, 64
    delta = DELTA._replace(state=8 * 64 * 64, transition=8 * 64 * 64)
    runs = scan_context(layout, mesh).own_runs
    pair = [torch.rand(runs, 1, 8, 64, 64, requires_grad=True) for _ in range(2)]
    with measure_cpu_memory() as scan:
        states = ring_scan(*pair, matrix=True, **named)
        torch.autograd.grad(states, pair, torch.ones_like(states))
    q, key, value = (torch.rand(1, heads, slots, dim, requires_grad=True) for _ in range(3))
    index_q, index_k = torch.rand(1, slots, 4), torch.rand(1, slots, 4)
    chosen = ring_select(lambda rows, keys: index_q[:, rows] @ keys.mT, k, index_k, **named)
    out = selected_attention(q, key, value, chosen, **named)
    grad = torch.ones_like(out)
    with measure_cpu_memory() as memory:
        torch.autograd.grad(out, (q, key, value), grad)
    kind = Selection("", k, 1, 4, 2 * heads * dim)
    sizes = [layer_memory(one, 1, slots, 1024, 4, "cpu") for one in (delta, kind)]
    pass_bytes = memory.peak_bytes - 3 * q.nbytes  # without its results
    mesh.close()
    found = [scan.peak_bytes / sizes[0].messages, chosen.nbytes / sizes[1].kept_bytes]
    return [*found, pass_bytes / sizes[1].messages]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.day("4")
def test_memory_is_planned(rank_pool: Pool, size: int) -> None:
    for rank, (scan, chosen, attention) in enumerate(rank_pool(size).run(peaks)):
        # The last rank has the middle of the sequence: one run, where two are planned.
        assert (0.25 if rank == size - 1 else 0.5) < scan <= 1
        assert chosen == 1
        assert 0.4 < attention <= 1  # the most that there may be
    assert other_layers.BATCH_BYTES == selected_pass.WORKSPACE
    assert {name: n * select.HEADS for name, n in other_layers.SCORED_PAIRS.items()} == select.SCORES


# --- what is not known -----------------------------------------------------------------------------


def mixing_types() -> list[str]:
    """Types of transformers whose modeling file has a layer that is not softmax attention over all keys."""
    root, found = Path(transformers.__file__).parent / "models", []
    words = (*FUNCTIONS, *(name.partition(".")[0] for name in METHODS), "Indexer(nn.Module)")
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        folder = CONFIG_MAPPING[name].__module__.split(".")[-2]
        text = "".join(file.read_text() for file in (root / folder).glob("modeling_*.py"))
        if any(word in text for word in words) or "keep_window_size" in text:
            found.append(name)
    return found


@pytest.mark.night
def test_no_model_with_other_layers_is_planned_as_attention() -> None:
    refused, read = [], []
    for name in mixing_types():
        config = text_part(json.loads(as_json(CONFIG_MAPPING[name]())))
        asked = Namespace(hf_config=json.dumps(config), **dict.fromkeys(_OPTIONS))
        try:
            shape = read_model(asked)
        except RingConfigError:
            refused.append(name)
            continue
        assert shape.other_layers or (set(config["layer_types"]) == {"full_attention"} and name in KNOWN), (
            name
        )
        read.append(name)
    assert {"nemotron_h", "jamba", "falcon_h1", "deepseek_v4", "minimax_m3_vl_text", "doge"} <= {*refused}
    assert {"qwen3_next", "kimi_linear", "deepseek_v32"} <= {*read} <= {*KNOWN}


QWEN = {
    "model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
SPARSE = {
    "model_type": "deepseek_v32", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 256, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "index_topk": 32, "index_n_heads": 2, "index_head_dim": 8,
}  # fmt: skip


def run(capsys: Any, config: dict[str, Any], *more: str) -> tuple[int, str]:
    sizes = ["--tokens", "4096", "--devices", "2", "--hardware", "cpu", "--dtype", "float32"]
    status = cli.main(["plan", "--hf-config", json.dumps(config), *sizes, *more])
    return status, "".join(capsys.readouterr())


def test_a_hybrid_plan_counts_each_kind_of_layer(capsys: Any) -> None:
    found = json.loads(run(capsys, QWEN, "--json", "--tokens", "256")[1])
    (one,) = found["other_layers"]
    assert (one["kind"], one["layers"]) == ("gated delta rule", 3)
    assert [row["layers"] for row in found["attention_by_pattern"]] == [1]
    assert one["step_bytes_sent"] == 3 * (one["forward_bytes_sent"] + one["backward_bytes_sent"]) > 0
    again = json.loads(run(capsys, QWEN, "--json", "--tokens", "256", "--activation-checkpointing")[1])[
        "other_layers"
    ][0]
    assert again["step_bytes_sent"] == 3 * (2 * one["forward_bytes_sent"] + one["backward_bytes_sent"])
    assert found["step"]["total_s"] > found["step"]["other_layers_s"] > 0
    assert found["step"]["mfu"] is None
    sparse = json.loads(run(capsys, SPARSE, "--json")[1])
    assert sparse["attention"] is None and [one["layers"] for one in sparse["other_layers"]] == [2]
    assert not any("experts" in one for one in sparse["warnings"])
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]}
    status, text = run(capsys, SPARSE | experts)
    assert "layers of experts have 16, of which a token runs 2" in " ".join(text.split())
    assert status == 0 and "2 x chosen keys" in text and "which rows cross is known at run time" in text
    assert "waits): never: all attention is over chosen keys" in " ".join(text.split())


HYBRID = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 256, "layer_types": ["linear_attention", "full_attention"],
    "tie_word_embeddings": False,
}  # fmt: skip
KIMI = HYBRID | {
    "model_type": "kimi_linear", "linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "pad_token_id": None,
    "mlp_layer_types": ["dense"] * 2,
}  # fmt: skip
GRANITE = HYBRID | {
    "model_type": "granitemoehybrid", "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_d_head": 16, "mamba_d_conv": 4, "mamba_expand": 2, "num_local_experts": 0,
    "shared_intermediate_size": 96,
}  # fmt: skip
MINIMAX = HYBRID | {"model_type": "minimax", "num_local_experts": 2, "num_experts_per_tok": 1}
LFM2 = HYBRID | {
    "model_type": "lfm2", "conv_L_cache": 3, "layer_types": ["conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "state", "transition"),
    [
        (QWEN, 4 * 8 * 8, 4 * 8 * 8), (SPARSE | {"mlp_layer_types": ["dense"] * 2}, None, None),
        (KIMI, 4 * 8 * 8, 4 * 8 * 8), (GRANITE, 8 * 16 * 16, 8), (MINIMAX, 4 * 16 * 16, 4), (LFM2, 0, 0),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_sizes_are_those_of_transformers(values: dict[str, Any], state: Any, transition: Any) -> None:
    config = CONFIG_MAPPING[values["model_type"]](**{k: v for k, v in values.items() if k != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = dict(model.named_parameters())
    asked = Namespace(hf_config=json.dumps(values), **dict.fromkeys(_OPTIONS))
    shape = read_model(asked)
    assert shape.parameters == sum(x.numel() for x in weights.values())
    convolutions = [
        x.shape for name, x in weights.items() if "layers.0." in name and "conv" in name and x.dim() == 3
    ]
    kind = shape.other_layers[0]
    if isinstance(kind, Recurrence):
        assert kind.channels == sum(size[0] for size in convolutions)
        assert kind.before == max((size[-1] for size in convolutions), default=1) - 1
        assert (kind.state, kind.transition) == (state, transition)


@pytest.mark.parametrize(
    ("config", "more", "says"),
    [
        (QWEN, ["--layout", "striped"], "expected shards of consecutive positions"),
        (QWEN, ["--compare"], "--compare: expected a model of softmax attention alone, got gated delta rule"),
        (QWEN | {"linear_conv_kernel_dim": 0}, [], "linear_conv_kernel_dim: expected a whole number"),
        (QWEN | {"layer_types": ["linear_attention"] * 4}, [], "expected a layer of attention, got none"),
        (QWEN | {"layer_types": ["mystery"] * 4}, [], "transformers cannot make it"),
        (SPARSE, ["--ulysses-size", "2"], "expected 1 for attention over chosen keys, got 2"),
        (QWEN | {"model_type": "jamba", "attn_layer_period": 8}, [], 'got "jamba", with "attn_layer_'),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys: Any, config: Any, more: list[str], says: str) -> None:
    status, text = run(capsys, config, *more)
    assert status == 2 and says in text, text
