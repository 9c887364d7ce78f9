"""The section of the JSON, and what is made of it, take the same numbers: each limit stands once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ds_ring import RingConfig, RingConfigError, RingError
from ds_ring.comm.groups import check_seconds
from ds_ring.config.pass_options import PassOptions
from ds_ring.config.pattern_section import PatternConfig
from ds_ring.config.section import PARTS, pattern_from_config
from ds_ring.limits import MAX_BLOCK, MAX_BYTES, MAX_RANKS, MAX_SECONDS, MAX_TOKENS, Timeouts
from ds_ring.ops.options import Options
from ds_ring.schedule.grid import Grid

_EDGES = (
    0, 1, 16, MAX_RANKS, 2**31, MAX_TOKENS, MAX_BYTES, MAX_BLOCK, 10**9, int(MAX_SECONDS), 5 * 10**8,
)  # fmt: skip
VALUES: list[Any] = sorted({edge + step for edge in _EDGES for step in (-1, 0, 1)})
VALUES += [
    0.0, 5e-324, 0.5, 1.0, math.nextafter(1.0, 2.0), MAX_SECONDS, math.nextafter(MAX_SECONDS, math.inf),
]  # fmt: skip
VALUES += [-0.5, math.inf, math.nan, 1e300, 10**400, True, False, None, "auto", "1"]
# The keys of the section that an option of a pass has.
OPTIONS = [name for name in PassOptions.model_fields if name not in ("kernel_options",)]


def config_of(key: str, value: Any) -> RingConfig | None:
    """The section with this value; None where it refuses it."""
    section: dict[str, Any] = {"ring_size": 2, "heartbeat_timeout_seconds": 5e-324, key: value}
    if key == "sequence_parallel_size":
        section["ring_size"] = "auto"
    whole = {name: section.pop(name) for name in ("sequence_parallel_size",) if name in section}
    for name in Timeouts._fields:  # each has to be at least the heartbeat's
        if key == "heartbeat_timeout_seconds":
            section[f"{name}_timeout_seconds"] = value
    try:
        return RingConfig.from_deepspeed({**whole, "ring_attention": section})
    except RingConfigError:
        return None


@pytest.mark.parametrize("key", RingConfig.model_fields)
def test_what_the_section_takes_everything_behind_it_takes(key: str) -> None:
    for value in VALUES:
        config = config_of(key, value)
        if config is None:
            continue
        Options.make(config)
        pattern_from_config(config)
        Grid(config.sequence_parallel_size, config.ring_size, config.ulysses_size)
        for seconds in (config.heartbeat_timeout_seconds, *config.timeouts):
            check_seconds(seconds, key)


@pytest.mark.parametrize("key", OPTIONS)
def test_an_option_takes_what_the_section_takes(key: str) -> None:
    """`hop_timeout_seconds: 5e8` was accepted by the section and refused by the pass."""
    for value in VALUES:
        try:
            Options(**{key: value})
        except RingError:
            accepted = False
        else:
            accepted = True
        assert accepted == (config_of(key, value) is not None), (key, value)


@pytest.mark.parametrize("part", [PatternConfig, *PARTS.values()], ids=["pattern", *PARTS])
def test_so_do_the_keys_of_its_parts(part: type[Any]) -> None:
    name = "pattern" if part is PatternConfig else "long_sequence"
    taken = 0
    for key in part.model_fields:
        for value in [*VALUES, [1], [MAX_TOKENS], [MAX_TOKENS + 1]]:
            section = {key: value}
            if key in ("segment_lengths", "dilation_rates"):
                section = {"segment_lengths": value, "dilation_rates": value}
            config = config_of(name, section)
            if config is not None:
                taken += 1
                Options.make(config)
                pattern_from_config(config)
    assert taken > 2 * len(part.model_fields)


@pytest.mark.parametrize(
    ("key", "most"),
    [("ring_size", MAX_RANKS), ("sequence_parallel_size", MAX_RANKS), ("hop_timeout_seconds", MAX_SECONDS),
     ("step_timeout_seconds", MAX_SECONDS), ("min_sequence_length", MAX_TOKENS),
     ("stage_bytes", MAX_BYTES), ("chunk_bytes", MAX_TOKENS)],
)  # fmt: skip
def test_each_limit_is_where_limits_says(key: str, most: float) -> None:
    assert config_of(key, most) is not None
    beyond = most + 1 if isinstance(most, int) else math.nextafter(most, math.inf)
    assert config_of(key, beyond) is None
