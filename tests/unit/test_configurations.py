"""The configurations of a model type: which switches are found, and that each changes the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from check_configurations import main, read_rows, row_key
from configurations import WAYS, list_configurations

from ds_ring import RingConfigError
from ds_ring_launcher.check.small_model import HEADS, read_config, shrink

TOKENS = 61
# Some of a type's configurations, beside the four ways of running its default.
SWITCHES = {
    "falcon": {
        "alibi=True", "parallel_attn=False", "multi_query=False", "bias=True", "num_kv_heads=1",
        "new_decoder_architecture=True", "alibi=True, attn_implementation=eager", "rope_type=yarn",
    },
    "gpt2": {"scale_attn_by_inverse_layer_idx=True", "reorder_and_upcast_attn=True"},
    "gpt_neox": {"attention_bias=False", "use_parallel_residual=False", "partial_rotary_factor=1.0"},
    "gpt_neo": {"attention_layers=all global", "attention_layers=all local", "window_size=8"},
    "mistral": {"sliding_window=None", "num_key_value_heads=1", "num_key_value_heads=32", "use_cache=False"},
    "qwen2": {"use_sliding_window=True, max_window_layers=0", "rope_type=longrope"},
    "gemma2": {"attn_logit_softcapping=None", "layer_types=all full_attention"},
    "gemma3_text": {"rope_type=dynamic", "head_dim=8", "use_bidirectional_attention=True"},
    "gemma4_text": {"num_kv_shared_layers=15, checkpointing=reentrant", "attention_k_eq_v=True"},
    "mpt": {"attn_config.alibi=False", "attn_config.clip_qkv=0.5", "no_bias=False"},
    "minicpm3": {"scale_emb=18", "q_lora_rank=None"},
    "opt": {"do_layer_norm_before=False", "word_embed_proj_dim=32"},
}  # fmt: skip


@pytest.mark.parametrize("family", SWITCHES)
def test_the_switches_of_a_type_are_found(family: str) -> None:
    found = list_configurations(read_config(family), TOKENS)
    names = [one.name for one in found]
    assert tuple(found[:4]) == WAYS
    assert len({*names}) == len(names)
    assert {*names} >= SWITCHES[family]


@pytest.mark.parametrize("family", ["falcon", "gpt_neox", "gemma2", "dbrx"])
def test_each_switch_changes_the_small_model(family: str) -> None:
    config = read_config(family)
    default = shrink(config, TOKENS).to_dict()
    for one in list_configurations(config, TOKENS)[len(WAYS) :]:
        try:
            small = shrink(config, TOKENS, changes=one.changes)
        except RingConfigError:  # transformers refuses it, as its row will say
            continue
        changed = {key for key, value in small.to_dict().items() if value != default.get(key)}
        assert changed or small._attn_implementation == "eager", one.name


@pytest.mark.night
def test_all_causal_types_have_many_configurations() -> None:
    count = 0
    for family in HEADS["causal-lm"].families:
        if not family.endswith("_assistant"):
            count += len(list_configurations(read_config(family), TOKENS))
    assert count > 2000


def a_row(**changes: Any) -> dict[str, Any]:
    row = {"source": "llama", "configuration": "default", "shape": "2x61x2", "seed": 0, "transformers": "5"}
    return row | {"verdict": "exact"} | changes


def test_the_later_of_two_rows_holds_and_one_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert read_rows(file) == {} and read_rows(None) == {}
    rows = [a_row(), a_row(seed=1), a_row(verdict="WRONG")]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(text + json.dumps(a_row(seed=2))[:40])
    found = read_rows(file)
    assert [row["verdict"] for row in found.values()] == ["WRONG", "exact"]
    assert row_key(a_row()) in found and row_key(a_row(section={"gradient_payload": "bfloat16"})) not in found
    assert file.read_text() == text, "what was cut off does not run into the next row"
    file.write_text("exact llama\n" + text)
    with pytest.raises(RingConfigError, match="line 1: expected a row of this tool, got 'exact llama"):
        read_rows(file)


def test_no_regular_expression_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["falcon", "--only", "("])
    assert (
        ended.value.code == 2 and "--only: expected a regular expression, got '('" in capsys.readouterr().err
    )


def test_rows_in_no_folder_are_refused() -> None:
    with pytest.raises(
        RingConfigError, match="--rows none/f: expected a file in a folder to write to, got no"
    ):
        main(["falcon", "--rows", "none/f"])
