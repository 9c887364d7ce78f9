"""What `decode_attention` takes where nothing is said: the last positions of the layout, causally."""

from __future__ import annotations

import pytest
import torch

import ds_ring
from ds_ring import Causal, Full, PassOptions, RingConfigError, RingMesh

KEYS, QUERIES = 12, 4
LAYOUT = ds_ring.make_layout("contiguous", tokens=KEYS, ring_size=1)


def test_the_default_is_causal_from_the_last_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (QUERIES, KEYS, KEYS))
    place = {"layout": LAYOUT, "mesh": RingMesh.single()}
    default = ds_ring.decode_attention(q, k, v, **place)  # type: ignore[arg-type]
    last = range(KEYS - QUERIES, KEYS)
    same = ds_ring.decode_attention(q, k, v, **place, pattern=Causal(), positions=last)  # type: ignore[arg-type]
    assert torch.equal(default, same)
    full = ds_ring.decode_attention(q, k, v, **place, pattern=Full())  # type: ignore[arg-type]
    torch.testing.assert_close(default[:, :, -1:], full[:, :, -1:])  # it sees all keys
    assert not torch.allclose(default[:, :, :-1], full[:, :, :-1])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_options_that_have_no_effect_are_refused(compiled: bool) -> None:
    x, options = torch.ones(1, 1, KEYS, 4), PassOptions(gradient_payload="bfloat16")
    place = {"layout": LAYOUT, "mesh": RingMesh.single(), "options": options}
    attend = lambda q: ds_ring.decode_attention(q, x, x, **place)  # noqa: E731
    with pytest.raises(RingConfigError, match='gradient_payload "float32", got "bfloat16"'):
        (torch.compile(attend, backend="eager") if compiled else attend)(x[:, :, :2])
