"""Families of transformers models on a real ring of two: exact, or refused with a reason. Nothing third.

Each row is a small model with random weights (`ds-ring check-model` makes the same ones): windows, chunks
and the length that rotary scaling was trained on lie below the number of tokens, which does not divide by the
number of ranks. Each exact family runs with one form of a batch (plain, padded, packed), in turn. The day
takes one of each kind, the night all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import CONFIG_MAPPING

from ds_ring_launcher.check.model_check import CheckRequest, ModelReport, _gather_reports
from ds_ring_launcher.check.small_model import FORMS, Form
from tests.dist.deepspeed_ranks import start_deepspeed
from tests.dist.test_first_batch import silently_wrong

EXACT = "exact"
ROWS = FORMS[:3]  # trees of rollouts have tests of their own, below and in contrib/policies
POOLED = "with a head on engine.ring.gather(output.last_hidden_state): [:, 0]"

# (family, what the request says beside it, "exact" or a part of the reason for which it is refused)
EXACTLY = """
    llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma phi phi3 gpt2 gpt_neox gpt_bigcode opt
    starcoder2 olmo olmo2 olmoe cohere granite granitemoe glm glm4 glm4_moe persimmon smollm3 ernie4_5
    hunyuan_v1_dense hunyuan_v1_moe helium arcee apertus bert roberta xlm-roberta distilbert electra
    albert ernie deepseek_v2 deepseek_v3 moshi deepseek_v32 glm_moe_dsa axk2 hy_v4 dots3_note_text
    minimax_m3_vl_text doge
"""
# With layers that pass a state on, or convolve tokens. They run with all forms.
RECURRENT = """
    mamba mamba2 falcon_mamba nemotron_h bamba granitemoehybrid jamba zamba zamba2 lfm2 lfm2_moe lfm3 falcon_h1
    qwen3_next qwen3_5_text qwen3_5_moe_text kimi_linear olmo_hybrid bailing_hybrid minimax recurrent_gemma zaya
    rwkv xlstm qwen4_exp_text glm5_next_text
"""
# ds_ring/contrib/families/eager_attention/families.py
WRITTEN_OUT = """
    bloom mpt gptj gpt_neo codegen xglm biogpt falcon stablelm gpt_neox_japanese megatron-bert rembert roformer
    openai-gpt xlm nemotron
"""
DECODERS_ALONE = """
    bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart whisper trocr git musicgen
    musicgen_melody roformer xlm emu3 mllama
"""
IMAGE_TEXT = """
    qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe qwen4_exp gemma4 llava llava_next llava_onevision
    internvl mistral3 idefics2 idefics3 smolvlm aya_vision glm4v glm4v_moe glm46v kimi_k25 minimax_m3_vl llama4
    deepseek_vl ovis2 lfm2_vl vipllava cohere2_vision paddleocr_vl gemma3 paligemma step3p7
"""
MASKED = "camembert data2vec-text eurobert gte megatron-bert neomme nomic_bert xlm-roberta-xl"
ENCODER_DECODERS = """
    bart blenderbot blenderbot-small m2m_100 marian mbart mt5 mvp pegasus plbart t5 umt5
"""
NO_PAIRS = {  # and a part of the reason
    "bigbird_pegasus": "draws blocks of keys at random",
    "fsmt": "its attention is written out with tokens before samples",
    "led": "its encoder attends within windows that it cuts",
    "longt5": "its encoder attends within blocks that it cuts",
    "nllb-moe": "its experts take as many tokens of the sequence as they have room for",
    "pegasus_x": "its encoder attends within blocks that it cuts",
    "prophetnet": "it predicts several tokens ahead",
    "switch_transformers": "its experts take as many tokens of the sequence as they have room for",
    "whisper": "its encoder reads input_features and not tokens",
}
SINCE_5_24 = "dory lara_mini apertus1p5_text exaone sarvam_mla sarvam_moe inkling2_loop_text"
MIXED_LAYERS = "gpt_oss gemma2 llama4_text gemma3_text olmo3 cohere2 exaone4 modernbert"
MIXED_QWEN = {"use_sliding_window": True, "max_window_layers": 16, "layer_types": None}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
LONGROPE = YARN | {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
}

FAMILIES: list[tuple[str, dict[str, Any], str]] = [
    *((family, {}, EXACT) for family in EXACTLY.split()),
    *((family, {}, EXACT) for family in RECURRENT.split()),
    *((family, {}, EXACT) for family in MIXED_LAYERS.split()),
    ("qwen2", {"changes": MIXED_QWEN}, EXACT),
    ("gemma4_text", {"changes": {"num_kv_shared_layers": 20}}, EXACT),  # E2B's; it slices its masks
    (
        "doge",
        {"changes": {"is_moe": True, "num_experts": 16}},
        "its router takes the scores of an expert from",
    ),
    ("minimax_m3_vl_text", {"changes": {"index_local_blocks": 0}}, "expected index_local_blocks from 1"),
    ("llama", {"section": {"transport": "reproducible", "block_size": 16}}, EXACT),
    ("minimax_m3_vl_text", {"section": {"layout": "striped"}}, "keys are chosen by blocks of 4 tokens"),
    *((family, {"head": "image-text"}, EXACT) for family in IMAGE_TEXT.split()),
    *((family, {"head": "masked-lm"}, EXACT) for family in MASKED.split()),
    *((family, {"head": "seq2seq-lm"}, EXACT) for family in ENCODER_DECODERS.split()),
    *((family, {"head": "seq2seq-lm"}, EXACT) for family in ("seamless_m4t", "seamless_m4t_v2")),
    ("bigbird_pegasus", {"head": "seq2seq-lm", "changes": {"attention_type": "original_full"}}, EXACT),
    *((family, {}, reason) for family, reason in NO_PAIRS.items()),
    ("t5", {"head": "token-classification", "section": {"pattern": {"causal": False}}}, EXACT),
    ("bart", {"head": "sequence-classification"}, "its head pools tokens"),
    *((family, {}, EXACT) for family in WRITTEN_OUT.split()),
    *((family, {"head": "causal-lm"}, EXACT) for family in DECODERS_ALONE.split()),
    ("big_bird", {"changes": {"attention_type": "original_full"}}, EXACT),
    ("big_bird", {}, EXACT),
    ("deberta", {}, "terms of learned relative positions"),
    ("mpnet", {}, "a learned bias for each distance"),
    ("cpmant", {}, EXACT),
    ("prophetnet", {"head": "causal-lm"}, "it predicts several tokens ahead"),
    ("reformer", {"head": "causal-lm"}, "it sorts tokens into buckets by random projections"),
    ("xlnet", {}, EXACT),
    *((family, {"section": {"attention": "as_is"}}, EXACT) for family in ("falcon", "stablelm", "nemotron")),
    *((family, {"head": "causal-lm"}, EXACT) for family in ("hrm_text", "xmod")),
    ("mobilebert", {}, "trigram_input"),
    # n-gram embeddings and delta rules alone
    ("qwen4_exp_text", {"changes": {"layer_types": ["linear_attention"] * 40, "use_cache": False}}, EXACT),
    *(("llama", {"changes": {"rope_parameters": rope}}, EXACT) for rope in (DYNAMIC, YARN, LONGROPE)),
    *(
        (item, {"changes": {"output_router_logits": True}}, EXACT)
        for item in ("mixtral", "olmoe", "granitemoe")
    ),
    ("llama", {"head": "sequence-classification"}, EXACT),
    *((item, {"head": "sequence-classification"}, POOLED) for item in ("bert", "roberta", "distilbert")),
    ("llama", {"head": "token-classification"}, EXACT),
    ("gpt2", {"head": "base"}, EXACT),
    ("deepseek_v4", {}, EXACT),
    *((family, {}, EXACT) for family in SINCE_5_24.split() if family in CONFIG_MAPPING),
    ("phi4_multimodal", {"head": "causal-lm"}, EXACT),
    ("big_bird", {"tokens": 190}, "draws blocks of keys at random for more than 176 tokens, got 190"),
]  # fmt: skip


# Of exact families the forms of a batch that are refused, and a part of the reason.
FORMS_REFUSED = {
    ("cpmant", "padded"): "samples of one document after the one prompt",
    ("roformer", "packed"): "expected samples whose tokens have the same positions",
    **{(family, "packed"): "attention: expected the batch's" for family in ("musicgen", "musicgen_melody")},
}


def forms_of(family: str, requested: dict[str, Any]) -> tuple[Form, ...]:
    """All but packed rows for a head on the last token of a row: documents have none of their own.

    Nor in encoder-decoders, nor beside images: their positions on several axes, which many of these models
    have, are not of documents.
    """
    two = ("sequence-classification", "image-text", "seq2seq-lm")
    return FORMS[:2] if requested.get("head") in two else ROWS


def forms_run(row: tuple[str, dict[str, Any], str]) -> tuple[Form, ...]:
    """The forms that a family runs with: of most exact ones the next of all in the order of the table."""
    family, requested, expected = row
    if expected != EXACT:
        return FORMS[:1]
    forms = forms_of(family, requested)
    number = FAMILIES.index(row) % len(forms)
    if requested.get("head") == "seq2seq-lm":
        return forms
    # Of CPM-Ant one form is refused; a check ends there.
    if family == "cpmant":
        return FORMS[:2]
    return ROWS if family in (*RECURRENT.split(), "deepseek_v4") else forms[number : number + 1]


def name_of(row: tuple[str, dict[str, Any], str]) -> str:
    family, requested, _ = row
    words = [str(value) for value in requested.values() if not isinstance(value, dict)]
    words += [str(value) for value in requested.get("section", {}).values()]
    words += [
        f"{key}={value}" for key, value in requested.get("changes", {}).items() if not isinstance(value, dict)
    ]
    return "-".join([family, *words])


def checked(rank: int, world_size: int, request: CheckRequest) -> list[ModelReport]:
    start_deepspeed()
    from ds_ring_launcher.check.model_check import check_forms

    return check_forms(request)


@pytest.mark.day(
    "llama0",
    "mixtral",
    "deepseek_v32",
    "doge",
    "gemma3_text",
    "inkling2_loop_text",
    "led",
    "bart-causal-lm",
    "llama-sequence-classification",
)
@pytest.mark.parametrize("row", FAMILIES, ids=name_of)
def test_a_family_is_exact_or_refused(rank_pool, row):
    family, requested, expected = row
    forms = forms_run(row)
    reports = rank_pool(2).run(checked, CheckRequest(family, forms=forms, **requested))[0]
    assert [report.form for report in reports] == list(forms)
    for report in reports:
        reason = FORMS_REFUSED.get((family, report.form), expected)
        if reason == EXACT:
            assert report.result == "exact", (report.form, report.reason)
        else:
            assert report.result == "refused" and reason in report.reason, report


# One for each wrapper of variants/recurrent/ that no family of the day, and no generation of the day, runs.
OTHER_RECURRENCES: dict[str, dict[str, Any]] = {
    "mamba2": {"time_step_limit": [0.5, 0.8]},  # steps are cut off on both sides
    **{family: {} for family in ("falcon_mamba", "minimax", "recurrent_gemma", "rwkv", "xlstm", "zaya")},
}


@pytest.mark.day("minimax", "recurrent_gemma", "rwkv", "xlstm", "zaya")
@pytest.mark.parametrize("family", OTHER_RECURRENCES)
def test_a_recurrence_is_exact_within_documents(rank_pool, family):
    request = CheckRequest(family, forms=("packed",), changes=OTHER_RECURRENCES[family])
    (report,) = rank_pool(2).run(checked, request)[0]
    assert report.result == "exact", report.reason


def with_an_orphan(rank: int, world_size: int, request: CheckRequest) -> list[ModelReport]:
    """Let the last node of each tree go on from nothing."""
    from ds_ring.contrib.policies import trees

    def careless(ends_T: Any, read: Any = trees.make_tree) -> Any:
        tree = read(ends_T)
        return replace(tree, parents=(*tree.parents[:-1], -1))

    with mock.patch.object(trees, "make_tree", careless):
        return checked(rank, world_size, request)


# Of the first one, which numbers tokens by itself, the numbers go on along each path.
TREES = (
    {} if FORMS == ROWS else {"xmod": EXACT, "deepseek_v4": "no blocks of tokens with a tree", "bloom": EXACT}
)


@pytest.mark.day("deepseek_v4")
@pytest.mark.parametrize("family", TREES)
def test_a_tree_of_rollouts_is_exact_or_refused(rank_pool, family):
    (report,) = rank_pool(2).run(checked, CheckRequest(family, head="causal-lm", forms=("tree",)))[0]
    reason = TREES[family]
    if reason == EXACT:
        assert report.result == EXACT, report.reason
    else:
        assert report.result == "refused" and reason in report.reason, report


@pytest.mark.night
@pytest.mark.parametrize(
    "family", [pytest.param("gemma3_text", marks=pytest.mark.night), "qwen3_5_text"] if TREES else []
)
def test_an_orphan_of_a_tree_is_found(rank_pool, family):
    (report,) = rank_pool(2).run(checked, CheckRequest(family, forms=("tree",)))[0]
    assert report.result == "exact", report.reason
    (report,) = rank_pool(2).run(with_an_orphan, CheckRequest(family, forms=("tree",)))[0]
    assert report.result == "WRONG" and report.differences


def reports_of_rank_0_alone(rank: int, world_size: int) -> list[str]:
    both, one = ModelReport("a", "A", "exact"), ModelReport("b", "B", "exact")
    return [report.result for report in _gather_reports([both] if rank else [both, one])]


def test_a_form_that_a_rank_does_not_report_is_wrong(rank_pool):
    assert rank_pool(2).run(reports_of_rank_0_alone) == [["exact", "WRONG"]] * 2


@pytest.mark.night
def test_a_causal_xlnet_is_exact(rank_pool):
    """Not padded: transformers adds its mask of padding to one that all samples share, which fails."""
    (report,) = rank_pool(2).run(checked, CheckRequest("xlnet", changes={"attn_type": "uni"}))[0]
    assert report.result == "exact", report.reason


def with_profiles_of_other_distances(rank: int, world_size: int, family: str) -> list[ModelReport]:
    """Add to each score the term of the distance after its own."""
    from ds_ring.layers.distance_bias.kernel import Profiles

    def shifted(self: Any, tensor: Any, first: int, built: Any = Profiles.__init__) -> None:
        built(self, tensor, first + 1)

    with mock.patch.object(Profiles, "__init__", shifted):
        return checked(rank, world_size, CheckRequest(family, head="causal-lm"))


@pytest.mark.night
@pytest.mark.parametrize("family", ["cpmant", "xlnet"])
def test_terms_of_other_distances_are_found(rank_pool, family):
    (report,) = rank_pool(2).run(with_profiles_of_other_distances, family)[0]
    assert report.result == "WRONG" and report.differences, report.reason


def with_local_positions(rank: int, world_size: int) -> list[ModelReport]:
    """Number each rank's tokens from 0, as a model does that works out its positions by itself.

    The watch of a user's modules would refuse it before there are numbers to compare.
    """
    from ds_ring.models.module_watch import ModuleWatch

    with silently_wrong("local positions"), mock.patch.object(ModuleWatch, "_watched", return_value=()):
        return checked(rank, world_size, CheckRequest("llama"))


def with_other_keys(rank: int, world_size: int, family: str) -> list[ModelReport]:
    """Choose the second best key, or block, of each query instead of the best one."""
    from ds_ring.contrib.families.indexed_blocks import layers as indexed_blocks
    from ds_ring.layers.selection import rows as selection

    select = selection.ring_select

    def careless(scores: Any, k: int, *args: Any, **kwargs: Any) -> Any:
        return select(scores, k + 1, *args, **kwargs)[..., 1:]

    selection.ring_select = indexed_blocks.ring_select = careless
    try:
        return checked(rank, world_size, CheckRequest(family))
    finally:
        selection.ring_select = indexed_blocks.ring_select = select


@contextmanager
def changed_on_the_ring(change: Callable[[Any], None]) -> Iterator[None]:
    """Change the model that runs on the ring, and not the one that runs on one process."""
    from ds_ring_launcher.check import model_check

    run = model_check._on_the_ring

    def careless(model: Any, *args: Any) -> Any:
        change(model)
        return run(model, *args)

    with mock.patch.object(model_check, "_on_the_ring", careless):
        yield


@contextmanager
def close_experts() -> Iterator[None]:
    """Let rounding in float32 decide between two experts of a token. In a model without experts, nothing."""
    from ds_ring_launcher.check import model_check

    make = model_check.build

    def tied(*args: Any) -> Any:
        model = make(*args)
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                noise = torch.randn(parameter.shape[1], generator=torch.Generator().manual_seed(0))
                parameter.data[1] = parameter.data[0] * (1 + 2**-19 * noise)
        return model

    with mock.patch.object(model_check, "build", tied):
        yield


def with_other_rounding(rank: int, world_size: int, family: str) -> list[ModelReport]:
    """Move the ring's weights by about a unit in the last place of float32, which float64 does not round to."""
    from ds_ring_launcher.check.rounding import move

    def change(model: Any) -> None:
        if next(model.parameters()).dtype == torch.float32:
            move(model, seed=0)

    with close_experts(), changed_on_the_ring(change):
        return checked(rank, world_size, CheckRequest(family))


def with_a_small_fault(rank: int, world_size: int, family: str, name: str, fault: float) -> list[ModelReport]:
    """Make the gradient of one parameter wrong by so much of it."""

    def change(model: Any) -> None:
        model.get_parameter(name).register_hook(lambda gradient: gradient * (1.0 + fault))

    with close_experts(), changed_on_the_ring(change):
        return checked(rank, world_size, CheckRequest(family))


def with_a_crash(rank: int, world_size: int) -> list[ModelReport]:
    from ds_ring.data.batch_sharding import BatchSharding

    def fail(self: BatchSharding, *_: Any) -> Any:
        raise KeyError("ds_ring")

    with mock.patch.object(BatchSharding, "attention", fail):
        return checked(rank, world_size, CheckRequest("llama"))


def test_rotary_positions_of_the_shard_are_found(rank_pool):
    (report,) = rank_pool(2).run(with_local_positions)[0]
    assert report.result == "WRONG"
    assert report.differences[0].name == "model.layers.0"


@pytest.mark.night
@pytest.mark.parametrize(
    ("family", "layer"), [("deepseek_v32", 0), ("doge", 0), ("qwen4_exp_text", 1), ("minimax_m3_vl_text", 1)]
)
def test_other_keys_than_the_indexer_selects_are_found(rank_pool, family, layer):
    (report,) = rank_pool(2).run(with_other_keys, family)[0]
    assert report.result == "WRONG"
    assert report.differences[0].name == f"model.layers.{layer}"


# What rounding tips: a choice of experts, or (24 s) activations that are cut off; and a parameter that then jumps.
TIPPED = {
    "llama4_text": "model.layers.1.feed_forward.experts.gate_up_proj",
    "gemma3n": "model.layers.1.mlp.gate_proj.weight",
}


@pytest.mark.night
@pytest.mark.parametrize("family", TIPPED)
def test_a_threshold_that_rounding_tips_is_told_from_a_fault(rank_pool, family):
    (report,) = rank_pool(2).run(with_other_rounding, family)[0]
    assert report.result == "exact", report.reason
    assert any(TIPPED[family][15:] in item.name and item.error > 1e-3 for item in report.tipped)
    assert report.in_float64 == "exact" and report.measured == "float64"
    assert report.rounding["gradient"].error < 1e-4


@pytest.mark.night
@pytest.mark.parametrize("family", TIPPED)
def test_a_fault_that_is_as_large_as_a_jump_is_found_in_float64(rank_pool, family):
    (report,) = rank_pool(2).run(with_a_small_fault, family, TIPPED[family], 4e-3)[0]
    assert report.result == "WRONG" and report.in_float64 == "WRONG", report.reason
    assert [item.name for item in report.differences] == [TIPPED[family]]


@pytest.mark.parametrize(("family", "name"), [("llama", "model.layers.1.self_attn.v_proj.weight")])
def test_a_fault_just_above_rounding_is_found(rank_pool, family, name):
    (report,) = rank_pool(2).run(with_a_small_fault, family, name, 0.0)[0]
    assert report.result == "exact", report.reason
    local = max(1e-6, report.rounding["gradient"].error)
    (report,) = rank_pool(2).run(with_a_small_fault, family, name, 15 * local)[0]
    assert report.result == "WRONG" and [item.name for item in report.differences] == [name], report.reason


def test_a_raw_error_is_no_refusal(rank_pool):
    (report,) = rank_pool(2).run(with_a_crash)[0]
    assert report.result == "WRONG" and "crash: KeyError" in report.reason


# Of model types whose defaults leave something open, or whose sizes must fit each other when they are small.
MADE_BY_HAND = """
    bamba blt cohere_compass_text dbrx dots1 dots3_note emu3 falcon_h1 gemma3n git hrm_text lfm2_moe mamba2
    musicgen qwen4_exp recurrent_gemma reformer xlm xlnet xlstm zamba zamba2
"""


@pytest.mark.night
@pytest.mark.parametrize("family", MADE_BY_HAND.split())
def test_a_small_model_can_be_made(family):
    from ds_ring_launcher.check.small_model import build, read_config, shrink

    config = shrink(read_config(family), tokens=61)
    config.is_decoder = True
    assert build(config, "causal-lm", seed=0).training


ALL = """
from ds_ring_launcher.check import model_check
from ds_ring_launcher.cli import main
from ds_ring_launcher.commands import check_model

make = model_check.build
model_check.build = lambda config, *others: os._exit(3) if config.model_type == "olmo" else make(config, *others)
check_model._types = lambda head: ["gemma4_assistant", "bert", "olmo", "prophetnet"]
raise SystemExit(main(["check-model", "--all", "--head", "causal-lm", "--jobs", "2"]))
"""


@pytest.mark.night
def test_all_has_a_row_for_each_type_also_for_one_that_crashes():
    done = subprocess.run([sys.executable, "-c", ALL], capture_output=True, text=True, timeout=300)
    rows = [line.partition(":")[0].split() for line in done.stdout.splitlines() if line[0] != "["]
    assert rows[:2] == [["no", "model", "gemma4_assistant"], ["exact", "bert"]], done.stderr
    assert rows[2:4] == [["WRONG", "olmo"], ["refused", "prophetnet"]]
    last = done.stdout.splitlines()[-1]
    assert last.startswith("4 model types (causal-lm, transformers ")
    assert last.endswith(": 1 exact, 1 refused, 1 no model, 1 WRONG")
    assert done.returncode == 1
