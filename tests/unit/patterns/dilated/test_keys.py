"""The JSON's keys of dilated attention."""

from __future__ import annotations

import pytest

from ds_ring import Dilated, RingConfig, SlidingWindow
from ds_ring.config.section import pattern_from_config
from ds_ring.masks.pattern import Pattern
from tests.unit.config.test_section import LONG, Json, pattern, refusal

DILATED: Json = {"segment_lengths": [16, 64], "dilation_rates": [1, 4]}


@pytest.mark.parametrize("choice", ["paper", "paper_kv", "torchscale", "zero"])
def test_head_offsets(choice: str) -> None:
    dilated = {"segment_lengths": [8], "dilation_rates": [2]} if choice != "paper" else {}
    got = RingConfig.from_deepspeed(pattern(head_offsets=choice, **dilated))
    assert got.pattern.head_offsets == choice


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (DILATED, Dilated((16, 64), (1, 4))),
        (DILATED | {"head_offsets": "zero", "causal": False}, Dilated((16, 64), (1, 4), False, "zero")),
        (DILATED | {"window": 8}, Dilated((16, 64), (1, 4)) & SlidingWindow(8)),
    ],
    ids=str,
)
def test_sections_and_their_patterns(section: Json, expected: Pattern) -> None:
    assert pattern_from_config(RingConfig.from_deepspeed(pattern(**section))) == expected


WRONG: list[tuple[str, Json, list[str]]] = [
    (
        "huge segment",
        pattern(segment_lengths=[LONG], dilation_rates=[1]),
        [
            "pattern.segment_lengths[0]: ",
            "at most 9,007,199,254,740,992, got a number of more than 30 digits",
        ],
    ),
    ("segment_length", pattern(segment_length=[4]), ["did you mean 'segment_lengths'?"]),
    (
        "offsets",
        pattern(head_offsets="papr"),
        ["ring_attention.pattern.head_offsets: ", 'did you mean "paper"?'],
    ),
    (
        "segments alone",
        pattern(segment_lengths=[4, 8]),
        ["dilation_rates: expected 2 rates, one for each of segment_lengths [4, 8], got null; "],
    ),
    (
        "rates alone",
        pattern(dilation_rates=[1, 2]),
        ["null while segment_lengths is null, got [1, 2]; add 2 segment_lengths"],
    ),
    (
        "lengths differ",
        pattern(segment_lengths=[4, 8, 16], dilation_rates=[1, 2]),
        ["expected 3 rates, one for each of segment_lengths [4, 8, 16], got 2 in [1, 2]; make the two lists"],
    ),
    (
        "segments fall",
        pattern(segment_lengths=[8, 4], dilation_rates=[1, 2]),
        [
            "pattern.segment_lengths: ",
            "rising whole numbers of at least 1, got 8 followed by 4 in [8, 4]",
        ],
    ),
    (
        "segments equal",
        pattern(segment_lengths=[8, 8], dilation_rates=[1, 2]),
        ["got 8 followed by 8 in [8, 8]; sort the branches, none twice"],
    ),
    (
        "rates equal",
        pattern(segment_lengths=[4, 8], dilation_rates=[2, 2]),
        ["pattern.dilation_rates: ", "got 2 followed by 2"],
    ),
    (
        "rates fall",
        pattern(segment_lengths=[4, 8], dilation_rates=[2, 1]),
        ["pattern.dilation_rates: ", "got 2 followed by 1 in [2, 1]"],
    ),
    (
        "segment 0",
        pattern(segment_lengths=[0, 8], dilation_rates=[1, 2]),
        ["pattern.segment_lengths[0]: ", "at least 1", "got 0; "],
    ),
    (
        "rate negative",
        pattern(segment_lengths=[4, 8], dilation_rates=[1, -2]),
        ["pattern.dilation_rates[1]: ", "at least 1", "got -2; "],
    ),
    ("empty lists", pattern(segment_lengths=[], dilation_rates=[]), ["2 problems", "got []; use null"]),
    (
        "segment string",
        pattern(segment_lengths=["2048"], dilation_rates=[1]),
        ["segment_lengths[0]: ", 'got "2048"; '],
    ),
    ("segments bare", pattern(segment_lengths=2048, dilation_rates=[1]), ["a list", "got 2048; "]),
    (
        "segments word",
        pattern(segment_lengths="2048,4096", dilation_rates=[1]),
        ["a list", 'got "2048,4096"; '],
    ),
    (
        "segment true",
        pattern(segment_lengths=[True], dilation_rates=[1]),
        ["segment_lengths[0]: ", "got true; "],
    ),
    (
        "with a prefix",
        pattern(**DILATED, prefix=2),
        ["pattern.prefix: ", "beside segment_lengths [16, 64], which hides later tokens"],
    ),
]


@pytest.mark.parametrize(("name", "source", "pieces"), WRONG, ids=[row[0] for row in WRONG])
def test_what_is_refused_is_named(name: str, source: Json, pieces: list[str]) -> None:
    message = refusal(source)
    for piece in pieces:
        assert piece in message
