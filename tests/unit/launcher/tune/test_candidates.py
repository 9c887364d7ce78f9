"""The candidates: each once, all of them sound sections, and what they mean in bytes."""

from __future__ import annotations

import pytest

from ds_ring.ops.options import Options
from ds_ring.schedule.lowering import split_heads
from ds_ring_launcher.tune.candidates import (
    candidates,
    default_candidate,
    head_bytes,
    kernel_choices,
    make_keys,
    read_section,
)
from tests.unit.launcher.tune.cases import request

LONGNET = {"segment_lengths": [2048, 4096], "dilation_rates": [1, 2]}


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_sizes_multiply_and_ulysses_divides_the_heads(world: int) -> None:
    found = candidates(request(world, heads=4, kv_heads=2))
    sizes = {(one.ring_size, one.ulysses_size) for one in found}
    assert sizes == {(world // n, n) for n in (1, 2) if world % n == 0}
    assert len(found) == len(set(found))
    assert found[0] == default_candidate(request(world, heads=4, kv_heads=2))


def test_every_candidate_is_a_section_that_means_it() -> None:
    asked = request(4)
    for one in candidates(asked):
        config = read_section(one, asked, asked.tokens)
        assert (config.ring_size, config.ulysses_size) == (one.ring_size, one.ulysses_size)
        if one.ring_size == 1:
            assert (config.layout, config.overlap) == ("auto", True)  # as the section had it
            continue
        assert (config.layout, config.overlap) == (one.layout, one.overlap)
        options = Options.make(config)
        of_a_head = head_bytes(asked, one.ring_size, one.ulysses_size, asked.tokens)
        heads = slice(0, asked.kv_heads // one.ulysses_size, 1)
        chunk_bytes = options.chunk_bytes_on("cpu", one.ring_size)
        groups = split_heads(heads, of_a_head, chunk_bytes)
        assert len(range(4)[groups[0]]) == one.heads_per_message


def test_an_all_gather_has_no_hops_to_choose_for() -> None:
    """The section refuses overlap and chunk_bytes beside it: the search ended in pydantic's error."""
    asked = request(4, section={"transport": "all_gather"})
    found = candidates(asked)
    assert {one.ulysses_size for one in found} == {1, 2, 4} and len({one.layout for one in found}) > 1
    for one in found:
        for tokens in (asked.tokens, 512):  # of a short pass, whose default is another one
            assert read_section(one, asked, tokens).transport == "all_gather"
            assert "overlap" not in make_keys(one, asked, tokens)


def test_the_defaults_write_no_options() -> None:
    asked = request(2)
    keys = make_keys(default_candidate(asked), asked, asked.tokens)
    assert keys["kernel_options"] == {} and keys["chunk_bytes"] is None


def test_options_that_are_not_tuned_stay() -> None:
    asked = request(2, section={"kernel_options": {"block": 512}})
    assert make_keys(default_candidate(asked), asked, 8192)["kernel_options"] == {}  # it is tuned
    asked = request(2, section={"kernel": "flex", "kernel_options": {"BLOCK_M": 64}})
    assert make_keys(default_candidate(asked), asked, 8192)["kernel_options"] == {"BLOCK_M": 64}


def test_layouts_are_those_that_the_pattern_permits() -> None:
    assert "residue" not in {one.layout for one in candidates(request(2))}
    assert "residue" in {one.layout for one in candidates(request(2, section={"pattern": LONGNET}))}
    assert {one.layout for one in candidates(request(1))} == {"contiguous"}


def test_blocks_that_hold_a_whole_shard_are_one_candidate() -> None:
    blocks = [{dict(c.options)["block"] for c in kernel_choices(request(), n)} for n in (512, 3000, 9000)]
    assert blocks == [{2048}, {1024, 2048, 4096}, {1024, 2048, 4096}]
    assert dict(kernel_choices(request(), 512)[0].options) == {"block": 2048, "triangle": 128}


def test_kernels_have_their_own_options() -> None:
    flex = kernel_choices(request(section={"kernel": "flex", "block_size": 256}), 4096)
    assert [choice.block_size for choice in flex] == [256, 64, 128] and not any(c.options for c in flex)
    assert len(kernel_choices(request(section={"kernel": "reference"}), 4096)) == 1
