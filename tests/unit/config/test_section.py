"""The "ring_attention" section: what it and its patterns resolve to, a sentence for each mistake."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ring import Causal, Chunked, DilatedWindow, Full, PrefixLM, Sinks, SlidingWindow
from ds_ring import plugin as registry
from ds_ring.config.pattern_section import FURTHER_KEYS, PATTERNS_BY_KEY, PatternConfig
from ds_ring.config.section import (
    PARTS,
    RingConfig,
    by_json_key,
    named_patterns,
    pattern_from_config,
    strip_section,
)
from ds_ring.errors import RingConfigError, RingError, RingMeshError
from ds_ring.masks.pattern import Pattern
from tests.cases import rows_of
from tests.clock import unqueued_seconds

Json = dict[str, Any]


def differing_keys(a: RingConfig, b: RingConfig) -> list[str]:
    left, right = by_json_key(a), by_json_key(b)
    return [key for key in left if left[key] != right[key]]


LONG = 10**5000  # Python itself refuses to print it

DILATED: Json = {"segment_lengths": [2048, 4096], "dilation_rates": [1, 2], "head_offsets": "paper_kv"}

DESIGN_EXAMPLE: Json = {
    "sequence_parallel_size": 4,
    "ring_attention": {
        "ring_size": "auto",
        "ulysses_size": 1,
        "layout": "auto",
        "pattern": {
            "causal": True,
            "window": None,
            "window_dilation": 1,
            "sinks": None,
            "documents": False,
            **{name: key.default for keys in FURTHER_KEYS for name, key in keys.model_fields.items()},
            **dict.fromkeys(PATTERNS_BY_KEY),
            "layers": None,
        },
        "attention": "ring",
        "kernel": "auto",
        "block_size": 128,
        "kernel_options": {},
        "transport": "ring",
        "overlap": True,
        "prune": True,
        "gradient_payload": "float32",
        "chunk_bytes": None,
        "stage_bytes": "auto",
        "latents": "auto",
        "recompute_attention": False,
        "long_sequence": {"tiled_loss": False, "tiled_mlp": False, "offload_checkpoints": False,
            "offload_attention": False},
        "min_sequence_length": 0,
        "dynamic_ring": False,
        "heartbeat_timeout_seconds": 10,
        "hop_timeout_seconds": 60,
        "first_pass_timeout_seconds": 600,
        "step_timeout_seconds": 600,
        "checkpoint_timeout_seconds": 1800,
        "start_timeout_seconds": 1800,
        "check_finite": False,
        "verify_first_batch": False,
        "check_modules": True,
        "monitor": False,
    },
}  # fmt: skip


def section(**keys: Any) -> Json:
    """A DeepSpeed JSON whose ring is sound but for `keys`."""
    return {"sequence_parallel_size": 4, "ring_attention": keys}


def pattern(**keys: Any) -> Json:
    return section(pattern=keys)


IS_WHOLE = set(registry.PLUGINS) >= set(json.loads(registry.INDEX.read_text()))


def readable(keys: Json) -> Json:
    """Leave out the keys of capabilities that are not there (tests/removals.py)."""
    if IS_WHOLE:
        return keys
    parts = {name: kind.model_fields for name, kind in PARTS.items()}
    return {
        name: {key: x for key, x in value.items() if key in parts[name]} if name in parts else value
        for name, value in keys.items()
        if name in RingConfig.model_fields
    }


def refusal(source: Any) -> str:
    started = unqueued_seconds()
    with pytest.raises(RingConfigError) as caught:
        RingConfig.from_deepspeed(source)
    assert unqueued_seconds() - started < 0.5
    assert isinstance(caught.value, RingError) and isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "pydantic" not in message and "validation error" not in message
    return message


# ---------------------------------------------------------------- what is accepted


def test_the_example_of_the_design_is_the_default() -> None:
    example = readable(DESIGN_EXAMPLE["ring_attention"])
    config = RingConfig.from_deepspeed(DESIGN_EXAMPLE | {"ring_attention": example})
    assert config == RingConfig.from_deepspeed(section())
    assert config.ring_size == 4
    assert config.pattern == PatternConfig()
    dumped = config.model_dump()
    assert dumped.pop("sequence_parallel_size") == 4
    assert dumped == example | {"ring_size": 4}


def test_every_key_can_be_set() -> None:
    keys: Json = {
        "ring_size": 2,
        "ulysses_size": 2,
        "layout": "zigzag",
        "pattern": {
            "causal": False,
            "window": 512,
            "window_dilation": 2,
            "sinks": 4,
            "documents": True,
            **rows_of(
                "Slices", lambda _: {"slices": [[[0, 8], [0, 8], "causal"], [[8, 16], [0, 8], "bi-causal"]]}
            ),
            **rows_of("Dilated", lambda _: DILATED),
            **rows_of("MaskMod", lambda _: {"mask_mod": "tests.masks:causal"}),
            **{name: None if key.conflicts else 1024 for name, (key, _) in PATTERNS_BY_KEY.items()},
            "layers": None,
        },
        "attention": "as_is",
        "kernel": next((name for name, row in registry.KERNELS.items() if row.takes_blocks), "auto"),
        "block_size": 64,
        "kernel_options": {"BLOCK_M": 64, "nested": {"list": [1, 2.5, None, "x"]}},
        "transport": "ring",
        "overlap": False,
        "prune": False,
        "gradient_payload": "bfloat16",
        "chunk_bytes": 1 << 22,
        "stage_bytes": 1 << 28,
        "latents": True,
        "recompute_attention": True,
        "long_sequence": {
            "tiled_loss": 4096,
            "tiled_mlp": "auto",
            "offload_checkpoints": True,
            "offload_attention": "auto",
        },
        "min_sequence_length": 4096,
        "dynamic_ring": False,
        "heartbeat_timeout_seconds": 2.5,
        "hop_timeout_seconds": 2.5,
        "first_pass_timeout_seconds": 1.0,
        "step_timeout_seconds": 3.0,
        "checkpoint_timeout_seconds": 4.0,
        "start_timeout_seconds": 5.0,
        "check_finite": True,
        "verify_first_batch": True,
        "check_modules": False,
        "monitor": True,
    }
    keys = readable(keys)
    config = RingConfig.from_deepspeed(section(**keys))
    assert json.loads(config.model_dump_json()) == keys | {"sequence_parallel_size": 4}


@pytest.mark.parametrize("choice", registry.LAYOUTS)
def test_layouts(choice: str) -> None:
    assert RingConfig.from_deepspeed(section(layout=choice)).layout == choice


@pytest.mark.parametrize("choice", ["auto", *registry.KERNELS])
def test_kernels(choice: str) -> None:
    assert RingConfig.from_deepspeed(section(kernel=choice)).kernel == choice


@pytest.mark.parametrize(
    ("whole", "keys", "sizes"),
    [
        (4, {}, (4, 1, 4)),
        (8, {"ulysses_size": 2}, (4, 2, 8)),
        (8, {"ring_size": "auto", "ulysses_size": 8}, (1, 8, 8)),
        (6, {"ring_size": 3, "ulysses_size": 2}, (3, 2, 6)),
        (1, {}, (1, 1, 1)),
        (None, {"ring_size": 3, "ulysses_size": 2}, (3, 2, 6)),
        (None, {"ring_size": 4}, (4, 1, 4)),
        ("auto", {"ring_size": 4}, (4, 1, 4)),
    ],
)
def test_sizes_resolve(whole: Any, keys: Json, sizes: tuple[int, int, int]) -> None:
    ds_config = {"ring_attention": keys} | ({} if whole is None else {"sequence_parallel_size": whole})
    config = RingConfig.from_deepspeed(ds_config)
    assert (config.ring_size, config.ulysses_size, config.sequence_parallel_size) == sizes


def test_two_sided_window_is_allowed() -> None:
    assert RingConfig.from_deepspeed(pattern(causal=False, window=1)).pattern.window == 1


def test_the_callers_dict_is_left_alone_and_not_shared() -> None:
    ds_config = section(kernel_options={"a": [1]}, pattern={"layers": {"0": {"window": 4}}})
    before = copy.deepcopy(ds_config)
    config = RingConfig.from_deepspeed(ds_config)
    stripped = strip_section(ds_config)
    assert ds_config == before
    ds_config["ring_attention"]["kernel_options"]["a"].append(2)
    assert config.kernel_options == {"a": [1]}
    assert "ring_attention" not in stripped


def test_frozen_picklable_and_hashable() -> None:
    config = RingConfig.from_deepspeed(section(kernel_options={"a": 1}))
    with pytest.raises(ValueError, match="frozen"):
        config.ring_size = 2  # type: ignore[misc]
    twin = pickle.loads(pickle.dumps(config))
    assert twin == config and hash(twin) == hash(config)


def test_a_call_from_python_speaks_the_same_language() -> None:
    config = RingConfig(ring_size=2, ulysses_size=3, pattern=PatternConfig(window=8))
    assert (config.sequence_parallel_size, config.pattern.window) == (6, 8)
    with pytest.raises(
        RingConfigError, match=r"window: expected a whole number of at least 1, or null, got 0"
    ):
        PatternConfig(window=0)
    with pytest.raises(RingConfigError, match="did you mean 'layout'"):
        RingConfig(ring_size=2, laoyut="zigzag")  # type: ignore[call-arg]


def test_every_key_is_described() -> None:
    for model in (RingConfig, PatternConfig):
        assert all(field.description for field in model.model_fields.values())


# ---------------------------------------------------------------- what is refused

LAYOUTS = ", ".join(f'"{name}"' for name in registry.LAYOUTS)

# (the JSON, pieces that the message must hold: the key, what was expected, what was got, what to do)
REFUSED: list[tuple[str, Any, list[str]]] = [
    # the section and the top level
    ("no section", {"sequence_parallel_size": 4}, ["ring_attention: expected this section, got none; add"]),
    ("no section, no size", {}, ['got none; add "ring_attention": {"ring_size": 4} at the top level']),
    ("section null", {"ring_attention": None},
        ["ring_attention: expected an object {...}, got null; use {}"]),
    ("section list", {"ring_attention": [4]}, ["expected an object {...}, got [4]"]),
    ("section number", {"ring_attention": 4}, ["expected an object {...}, got 4"]),
    ("section true", {"ring_attention": True}, ["expected an object {...}, got true"]),
    ("ring_atention", {"ring_atention": {}}, ["'ring_atention'; did you mean 'ring_attention'?"]),
    ("ringattention", {"ringattention": {}}, ["'ringattention'; did you mean 'ring_attention'?"]),
    ("ring-attention", {"ring-attention": {}}, ["'ring-attention'; did you mean 'ring_attention'?"]),
    ("RingAttention", {"RingAttention": {}}, ["'RingAttention'; did you mean 'ring_attention'?"]),
    ("sequence_parallel", {"sequence_parallel": 4, "ring_attention": {"ring_size": 2}},
        ["sequence_parallel: ", "did you mean 'sequence_parallel_size'?"]),
    ("sequence-parallel-size", {"sequence-parallel-size": 4, "ring_attention": {"ring_size": 2}},
        ["did you mean 'sequence_parallel_size'?"]),
    ("sequnce_parallel_size", {"sequnce_parallel_size": 4, "ring_attention": {}},
        ["2 problems", "did you mean 'sequence_parallel_size'?", '"auto" and no sequence_parallel_size']),
    ("mesh_param", section() | {"mesh_param": [2, 2]},
        ["mesh_param: ", "got [2, 2]", "gradients", "remove it"]),
    ("data_parallel_size", section() | {"data_parallel_size": 2},
        ["data_parallel_size: ", "got 2", "drift apart", "remove it"]),
    ("size in the section", {"ring_attention": {"ring_size": 4, "sequence_parallel_size": 4}},
        ["ring_attention.sequence_parallel_size: ", "inside the section", "move it to the top level"]),
    ("not a config", 7, ["expected a path or a dict, got 7", "pass the whole DeepSpeed JSON"]),
    ("None", None, ["expected a path or a dict, got None"]),
    # sizes
    ("both open", {"ring_attention": {}},
        ['got "auto" and no sequence_parallel_size', 'add "sequence_parallel_size": 4 at the top level']),
    (
        "product is not the whole",
        section(ring_size=3, ulysses_size=2),
        ["ring_size 3 x ulysses_size 2 = 6, but sequence_parallel_size is 4; ",
            'set ring_size to 2 or "auto", or sequence_parallel_size to 6'],
    ),
    ("ulysses does not divide", section(ring_size=1, ulysses_size=3),
        ["1 x ulysses_size 3 = 3, but sequence_parallel_size is 4; set ulysses_size to 1, or"]),
    ("auto is not whole", section(ulysses_size=3),
        ['"auto" = sequence_parallel_size / ulysses_size', "got 4 / 3", "use ulysses_size 1, 2 or 4"]),
    ("ring_size string", section(ring_size="4"), ['or "auto", got "4"; ']),
    ("ring_size float", section(ring_size=4.0), ["got 4.0; "]),
    ("ring_size true", section(ring_size=True), ["got true; "]),
    ("ring_size 0", section(ring_size=0), ['a whole number of at least 1, or "auto", got 0; use "auto"']),
    ("ring_size null", section(ring_size=None), ['or "auto", got null; use "auto"']),
    ("ring_size Auto", section(ring_size="Auto"), ['got "Auto"; use "auto"']),
    ("ulysses_size 0", section(ulysses_size=0), ["ring_attention.ulysses_size: ", "got 0; use 1"]),
    ("ulysses_size string", section(ulysses_size="2"), ['got "2"; ']),
    ("whole string", {"sequence_parallel_size": "4", "ring_attention": {}},
        ["Speed configuration: sequence_parallel_size: expected a whole", 'got "4"; ']),
    ("whole 0", {"sequence_parallel_size": 0, "ring_attention": {}}, ["at least 1", "got 0"]),
    ("whole true", {"sequence_parallel_size": True, "ring_attention": {}}, ["got true; "]),
    ("whole null", {"sequence_parallel_size": None, "ring_attention": {}}, ["got null; use ring_size x"]),
    # numbers that no machine has
    ("huge ring", section(ring_size=LONG), ["ring_size: ", "at most 1,048,576, got a number of more than"]),
    ("huge ulysses", section(ulysses_size=2**31), ["at most 1,048,576, got 2147483648; "]),
    ("huge whole", {"sequence_parallel_size": LONG, "ring_attention": {}}, ["at most 1,048,576"]),
    ("huge block", section(block_size=LONG), ["ring_attention.block_size: ", "at most 2,147,483,648"]),
    ("huge window", pattern(window=LONG), ["or null, at most 9,007,199,254,740,992"]),
    ("huge chunk", section(chunk_bytes=LONG), ["(bytes), or null, at most 9,007,199,254,740,992"]),
    ("dynamic Ulysses", section(dynamic_ring=True, ulysses_size=2),
        ["dynamic_ring: expected false, got true beside ulysses_size 2"]),
    ("dynamic as_is", section(dynamic_ring=True, attention="as_is"),
        ['got true beside "attention": "as_is"; a graph has one ring']),
    ("huge min length", section(min_sequence_length=LONG), ["0 or more, at most 9,007,199,254,740,992"]),
    ("huge seconds", section(hop_timeout_seconds=1e300),
        ["seconds above 0, at most 100,000,000, got 1e+300"]),
    # numbers in quotes
    ("quoted ring", section(ring_size="2"), ['got "2"; write it without quotes']),
    ("quoted window", pattern(window="512"), ["pattern.window: ", 'got "512"; write it without quotes']),
    ("a word, not a number", section(ring_size="two"), ['got "two"; use "auto"']),
    # keys of the section outside it
    ("pattern at the top", {"sequence_parallel_size": 2, "pattern": {"window": 4}, "ring_attention": {}},
        ["pattern: got it at the top level", 'move it into "ring_attention"']),
    ("layout at the top", {"sequence_parallel_size": 2, "layout": "zigzag", "ring_attention": {}},
        ["layout: got it at the top level"]),
    # unknown keys
    ("layuot", section(layuot="zigzag"), ["ring_attention.layuot: ", "'layuot'; did you mean 'layout'?"]),
    ("ringSize", section(ringSize=4), ["did you mean 'ring_size'?"]),
    ("hop_timeout", section(hop_timeout=4), ["did you mean 'hop_timeout_seconds'?"]),
    ("windw", pattern(windw=4), ["ring_attention.pattern.windw: ", "did you mean 'window'?"]),
    ("causal one up", section(causal=True), ["did you mean 'ring_attention.pattern.causal'?"]),
    ("windw one up", section(windw=4), ["'windw'; did you mean 'ring_attention.pattern.window'?"]),
    ("kernel one down", pattern(kernel="cpu"), ["'kernel'; did you mean 'ring_attention.kernel'?"]),
    ("foreign", section(zzz=1), ["expected one of ulysses_size, ring_size, layout", "'zzz'; remove it"]),
    ("key 3", section(**{}) | {"ring_attention": {3: 4}}, ["the unknown key '3'"]),
    # words
    ("layout", section(layout="zigzg"), [f'one of {LAYOUTS}, got "zigzg"; did you mean "zigzag"?']),
    ("layout case", section(layout="ZigZag"), ['got "ZigZag"; did you mean "zigzag"?']),
    ("layout far", section(layout="qqq"), ['got "qqq"; write one of these in double quotes']),
    ("layout null", section(layout=None), ["got null; "]),
    ("kernel", section(kernel="refrence"), ['got "refrence"; did you mean "reference"?']),
    ("transport", section(transport="rinng"),
        [", ".join(f'"{name}"' for name in registry.PASSES) + ', got "rinng"; did you mean "ring"?']),
    # flags
    ("overlap string", section(overlap="true"), ['true or false, got "true"; ']),
    ("prune 1", section(prune=1),
        ["ring_attention.prune: expected true or false, got 1; write true or false"]),
    ("documents 0", pattern(documents=0),
        ["ring_attention.pattern.documents: expected true or false, got 0"]),
    # the pattern
    ("pattern null", section(pattern=None),
        ["ring_attention.pattern: expected an object", "got null; write {"]),
    ("layers word", pattern(layers="0-4"), ['keys, or null, got "0-4"; write {"0-4, 6": {']),
    ("layer names", pattern(layers={"first": {}}), ['ranges of layers, "0-4, 6", got "first"; count from 0']),
    ("layer twice", pattern(layers={"0-4": {}, "3": {}}), ["each layer once, got 3 twice"]),
    ("layer windw", pattern(layers={"0": {"windw": 4}}), ['"0".windw: ', "did you mean 'window'?"]),
    ("layer causal", pattern(layers={"0": {"causal": False}}), ["expected no causal", "same for all layers"]),
    ("layer prefix", pattern(window=8, layers={"0": {"prefix": 4}}), ['"0".prefix: ', "hides later tokens"]),
    ("pattern word", section(pattern="causal"), ['got "causal"; write {"causal": true}']),
    ("window 0", pattern(window=0), ["a whole number of at least 1, or null, got 0; use null for no window"]),
    ("window true", pattern(window=True), ["got true; "]),
    # numbers
    ("block 100", section(block_size=100), ["a power of two of at least 16 tokens, got 100; use 64 or 128"]),
    ("40 000 keys", section(pattern={f"k{n}": n for n in range(40_000)}),
        ["40000 problems", "ring_attention.pattern.k0: expected one of ", "and 39,980 more"]),
    ("block 8", section(block_size=8), ["got 8; use 16 or more"]),
    ("block 24", section(block_size=24), ["got 24; use 16 or 32"]),
    ("options list", section(kernel_options=[]),
        ["ring_attention.kernel_options: expected an object", "got []"]),
    ("options null", section(kernel_options=None), ["got null; use {} for no options"]),
    ("options object", section(kernel_options={"a": object()}),
        ["ring_attention.kernel_options.a: ", "JSON val"]),
    ("min length -1", section(min_sequence_length=-1),
        ["a whole number of tokens, 0 or more, got -1; use 0"]),
    ("chunk 0", section(chunk_bytes=0),
        ["ring_attention.chunk_bytes: expected a whole number", "got 0; use null"]),
    ("stage -1", section(stage_bytes=-1), ['0 or more, or "auto", got -1; use 0']),
    ("stage true", section(stage_bytes=True),
        ["ring_attention.stage_bytes: expected a whole number", "got true"]),
    ("stage text", section(stage_bytes="1"), ['0 or more, or "auto", got "1"']),
    ("huge stage", section(stage_bytes=LONG), ["ring_attention.stage_bytes"]),
    ("heartbeat 0", section(heartbeat_timeout_seconds=0), ["a number of seconds above 0, got 0; "]),
    ("heartbeat true", section(heartbeat_timeout_seconds=True), ["got true; "]),
    ("heartbeat 10s", section(heartbeat_timeout_seconds="10s"), ['got "10s"; use 10 or 60, say']),
    ("hop below heartbeat", section(hop_timeout_seconds=5),
        ["at least heartbeat_timeout_seconds, 10, got 5; raise it, or lower the other"]),
    ("heartbeat above hop", section(heartbeat_timeout_seconds=90),
        ["hop_timeout_seconds: expected at least heartbeat_timeout_seconds, 90, got 60"]),
    ("NaN", section(hop_timeout_seconds=float("nan")),
        ["hop_timeout_seconds: expected a finite number, got nan"]),
    ("inf", section(hop_timeout_seconds=float("inf")),
        ["a finite number, got inf; JSON has no NaN and no Inf"]),
    ("NaN option", section(kernel_options={"a": [float("nan")]}),
        ["ring_attention.kernel_options.a[0]: ", "nan"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "pieces"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refused(source: Any, pieces: list[str]) -> None:
    message = refusal(source)
    for piece in pieces:
        assert piece in message


def test_all_problems_stand_in_one_message_each_on_a_line() -> None:
    message = refusal(
        {
            "sequence_parallel_size": 4,
            "mesh_param": [2, 2],
            "ring_attention": {
                "ring_size": 3,
                "layuot": "zigzag",
                "pattern": {"window": "512", "window_dilation": 0, "sinks": 0},
                "hop_timeout_seconds": 1,
            },
        }
    )
    head, *lines = message.splitlines()
    assert head == "the DeepSpeed configuration: 7 problems"
    assert [line.removeprefix("  - ").split(":")[0] for line in lines] == [
        "mesh_param",
        "ring_attention.ring_size",
        "ring_attention.pattern.window",
        "ring_attention.pattern.window_dilation",
        "ring_attention.pattern.sinks",
        "ring_attention.hop_timeout_seconds",
        "ring_attention.layuot",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "sparse_attention", "tensor_parallel", "pipeline_parallel_size",
        "seq_parallel_communication_data_type", "expert_parallel_size", "train_batch_size",
    ],
)  # fmt: skip
def test_keys_of_deepspeed_are_no_near_misses(key: str) -> None:
    assert RingConfig.from_deepspeed({key: 1, "ring_attention": {"ring_size": 4}}).ring_size == 4


WHAT_JSON_CAN_SAY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(
    st.dictionaries(
        st.sampled_from(list(DESIGN_EXAMPLE["ring_attention"])) | st.text(max_size=8),
        WHAT_JSON_CAN_SAY,
        max_size=5,
    ),
    WHAT_JSON_CAN_SAY,
)
def test_nothing_but_our_error_comes_out(keys: Json, whole: Any) -> None:
    config = None
    with contextlib.suppress(RingConfigError):
        config = RingConfig.from_deepspeed({"sequence_parallel_size": whole, "ring_attention": keys})
    assert config is None or config.ring_size * config.ulysses_size == config.sequence_parallel_size


# ---------------------------------------------------------------- the world


@pytest.mark.parametrize(("whole", "world"), [(4, 4), (4, 8), (1, 7), (3, 6)])
def test_a_world_that_fits(whole: int, world: int) -> None:
    RingConfig(ring_size=whole).validate_world(world)


@pytest.mark.parametrize(
    ("ring", "ulysses", "world", "message"),
    [
        (6, 1, 8, "sequence_parallel_size 6 does not divide world size 8; use 1, 2, 4 or 8"),
        (4, 1, 2, "sequence_parallel_size 4 does not divide world size 2; use 1 or 2"),
        (2, 1, 1, "world size 1; use 1, or start 2 processes (deepspeed --num_gpus 2 SCRIPT.py, or"),
        (3, 2, 8, "sequence_parallel_size 6 does not divide world size 8; use 2, 4 or 8"),
        (2, 3, 8, "6 does not divide world size 8; no multiple of ulysses_size 3 does: change that"),
        (2, 1, 0, "world size: expected a whole number of at least 1, got 0; pass the number of ranks"),
        (2, 1, True, "got True"),
        (2, 1, 2.0, "got 2.0"),
    ],
)
def test_a_world_that_does_not_fit(ring: int, ulysses: int, world: Any, message: str) -> None:
    with pytest.raises(RingMeshError) as caught:
        RingConfig(ring_size=ring, ulysses_size=ulysses).validate_world(world)
    assert message in str(caught.value)


def test_a_mistyped_world_does_not_hang() -> None:
    started = unqueued_seconds()
    with pytest.raises(RingMeshError):
        RingConfig(ring_size=7).validate_world(10**15)
    assert unqueued_seconds() - started < 0.5


# ---------------------------------------------------------------- what DeepSpeed gets


def test_strip_section_keeps_the_rest_and_resolves_ours() -> None:
    ds_config = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2},
        "ring_attention": {"ring_size": 2, "ulysses_size": 2},
    }
    stripped = strip_section(ds_config)
    assert stripped == {
        "train_batch_size": "auto",  # the Trainer's to fill in
        "zero_optimization": {"stage": 2},
        "sequence_parallel_size": 4,
    }
    stripped["zero_optimization"]["stage"] = 3
    assert ds_config["zero_optimization"] == {"stage": 2}


def test_strip_section_takes_a_path_and_checks(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"sequence_parallel_size": "auto", "ring_attention": {"ring_size": 3}}))
    assert strip_section(str(path)) == {"sequence_parallel_size": 3}
    with pytest.raises(RingConfigError, match="did you mean 'ring_attention'"):
        strip_section({"ring_atention": {}})


# ---------------------------------------------------------------- rank against rank


def test_fingerprint_is_short_stable_and_blind_to_order_and_spelling() -> None:
    config = RingConfig.from_deepspeed(section(layout="zigzag", heartbeat_timeout_seconds=10))
    twin = RingConfig.from_deepspeed(section(heartbeat_timeout_seconds=10.0, layout="zigzag", ring_size=4))
    assert config.fingerprint() == twin.fingerprint()
    assert differing_keys(config, twin) == []
    assert len(config.fingerprint()) == 16 and int(config.fingerprint(), 16) >= 0
    # Written down, so that a change of the hash (two versions in one ring disagree) is seen in review.
    if IS_WHOLE:  # the keys of every capability are in it
        assert RingConfig(ring_size=4).fingerprint() == "4e204f758b67933d"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"layout": "zigzag"}, ["ring_attention.layout"]),
        ({"pattern": {"window": 512}}, ["ring_attention.pattern.window"]),
        ({"kernel_options": {"a": 1}}, ["ring_attention.kernel_options"]),
        ({"chunk_bytes": 4096}, ["ring_attention.chunk_bytes"]),
        ({"ring_size": 2, "ulysses_size": 2}, ["ring_attention.ulysses_size", "ring_attention.ring_size"]),
        (
            {"pattern": {"window": 4, "sinks": 1}, "prune": False},
            ["ring_attention.prune", "ring_attention.pattern.window", "ring_attention.pattern.sinks"],
        ),
    ],
)
def test_differing_keys_are_named(keys: Json, named: list[str]) -> None:
    here, there = RingConfig.from_deepspeed(section()), RingConfig.from_deepspeed(section(**keys))
    assert differing_keys(here, there) == named
    assert here.fingerprint() != there.fingerprint()


def test_a_differing_whole_is_named() -> None:
    named = differing_keys(RingConfig(ring_size=2), RingConfig(ring_size=4))
    assert named == ["sequence_parallel_size", "ring_attention.ring_size"]


# --- patterns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "pattern"),
    [
        ({}, Causal()),
        ({"causal": False}, Full()),
        ({"window": 8}, SlidingWindow(8)),
        ({"window": 8, "causal": False}, SlidingWindow(8, False)),
        ({"window": 8, "window_dilation": 3}, DilatedWindow(8, 3)),
        ({"window": 8, "sinks": 2}, SlidingWindow(8) | Sinks(2)),
        ({"window": 8, "sinks": 2, "causal": False}, SlidingWindow(8, False) | Sinks(2, False)),
        ({"chunk": 16}, Chunked(16)),
        ({"chunk": 16, "window": 8}, SlidingWindow(8) & Chunked(16)),
        ({"prefix": 5}, PrefixLM(5)),
    ],
    ids=str,
)
def test_sections_and_their_patterns(section: dict[str, Any], pattern: Pattern) -> None:
    config = RingConfig.from_deepspeed({"sequence_parallel_size": 2, "ring_attention": {"pattern": section}})
    assert pattern_from_config(config) == pattern


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"sinks": 2}, "pattern.sinks: .*window null, which sees all tokens already; leave it out"),
        ({"window_dilation": 2}, "pattern.window_dilation: .*it has no effect"),
        ({"prefix": 2, "causal": False}, "pattern.prefix: .*causal false, which hides no later token"),
        ({"prefix": 2, "window": 8}, "pattern.prefix: .*beside window 8, which hides later tokens"),
        ({"chunk": 0}, "pattern.chunk: expected a whole number of at least 1, or null, got 0"),
    ],
    ids=str,
)
def test_sections_that_mean_nothing_are_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(RingConfigError, match=said):
        RingConfig.from_deepspeed({"sequence_parallel_size": 2, "ring_attention": {"pattern": section}})


def test_named_layers_keep_what_they_do_not_say() -> None:
    layers = {"0-2, 5": {"chunk": 16}, "4": {"window": None}}
    pattern: Any = {"window": 8, "documents": True, "layers": layers}
    config = RingConfig.from_deepspeed({"ring_attention": {"ring_size": 2, "pattern": pattern}})
    local = SlidingWindow(8) & Chunked(16)
    assert named_patterns(config) == {0: local, 1: local, 2: local, 5: local, 4: Causal()}
    assert pattern_from_config(config) == SlidingWindow(8)
