"""Seconds of samples on a machine whose rates are known: by hand, and what ranks and slow links change."""

from __future__ import annotations

import pytest

from ds_ring.config.section import RingConfig
from ds_ring.data.dynamic_ring.sample_times import MeasuredRates, ModelSizes, SampleTimes, _fit
from ds_ring.kernels.select import get_kernel

SIZES = ModelSizes(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256)
RATES = MeasuredRates(
    kernel_flops=(4e9, 2e9), tile_s=(0.0, 0.0), product_flops=1e10, link_bytes_per_s=1e9, hop_s=1e-3
)


def times_on(rates: MeasuredRates = RATES, **section: object) -> SampleTimes:
    config = RingConfig.from_deepspeed({"ring_attention": {"ring_size": 4, "dynamic_ring": True, **section}})
    # The reference kernel executes each pair of a tile's rectangle: what it takes is plain arithmetic.
    return SampleTimes(SIZES, config, get_kernel("reference", "cpu"), rates, ("cpu", 4))


def whole_on_one(tokens: int) -> float:
    """Full attention of three layers on one rank, and six FLOPs a parameter of a matrix, and token."""
    pairs = tokens**2 * SIZES.heads * SIZES.head_dim
    matrices = 3 * (2 * 64 * 16 * (4 + 2) + 3 * 64 * 128) + 256 * 64
    return 3 * pairs * (4 / 4e9 + 10 / 2e9) + 6 * matrices * tokens / 1e10


@pytest.mark.parametrize("tokens", [256, 512, 1024])  # where there are knots, so that nothing is interpolated
def test_seconds_on_one_rank(tokens: int) -> None:
    times = times_on(pattern={"causal": False})
    assert times.fixed(1) + times.sample(tokens, 1) == pytest.approx(whole_on_one(tokens), rel=1e-9)


def test_seconds_between_two_knots_are_on_a_line() -> None:
    times = times_on(pattern={"causal": False})
    middle = (whole_on_one(256) + whole_on_one(362)) / 2
    assert times.fixed(1) + times.sample(309, 1) == pytest.approx(middle, rel=1e-9)


def test_seconds_of_nine_ranks_are_between_those_of_eight_and_ten() -> None:
    times = times_on(pattern={"causal": False})
    eight, nine, ten = (times._attention(1024, ranks) for ranks in (8, 9, 10))
    assert nine == pytest.approx((eight + ten) / 2, rel=1e-12) and eight != ten


def test_a_rate_of_two_times() -> None:
    assert _fit((2.0, 6.0), (3.0, 5.0)) == (2.0, 2.0)
    assert _fit((2.0, 6.0), (3.0, 3.0)) == (2.0, 0.0)  # that of the larger one


def test_hops_and_messages_of_a_ring() -> None:
    tokens, element, gradient = 1024, 4, 4
    shard = 2 * SIZES.kv_heads * SIZES.head_dim * tokens // 4  # elements of K and V
    whole = whole_on_one(tokens) / 4
    free = times_on(RATES._replace(link_bytes_per_s=1e30, hop_s=0.0), pattern={"causal": False})
    assert free.fixed(4) + free.sample(tokens, 4) == pytest.approx(whole, rel=1e-9)
    # Each way K/V of three hops arrive, and backward three hops' gradients leave. Nothing overlaps.
    slow = times_on(pattern={"causal": False}, overlap=False)
    moved = 3 * shard * (2 * element + gradient) / 1e9
    expected = whole + 3 * (moved + 2 * 3 * 1e-3)
    assert slow.fixed(4) + slow.sample(tokens, 4) == pytest.approx(expected, rel=1e-9)
    hidden = times_on(pattern={"causal": False})
    assert hidden.sample(tokens, 4) < slow.sample(tokens, 4)
    # Links that nothing hides: a short sample is faster on one rank, a long one on four.
    links = times_on(RATES._replace(link_bytes_per_s=2e7), pattern={"causal": False})
    at_once = [[links.fixed(ranks) + links.sample(n, ranks) for ranks in (1, 4)] for n in (64, 8192)]
    assert at_once[0][0] < at_once[0][1] and at_once[1][0] > at_once[1][1]


@pytest.mark.parametrize("pattern", [{"causal": True}, {"window": 100, "layers": {"0, 2": {"window": None}}}])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_seconds_rise_with_tokens(pattern: dict[str, object], ranks: int) -> None:
    times = times_on(pattern=pattern)
    seconds = [times.sample(tokens, ranks) for tokens in (1, 63, 64, 65, 300, 301, 1000, 1500, 4000)]
    assert seconds == sorted(seconds) and seconds[0] > 0
    wider = times_on(pattern={"causal": True})
    assert times.sample(4000, ranks) <= wider.sample(4000, ranks)
