"""Options of a pass: values with an order of their own, equal if their fields are; those of a call."""

from __future__ import annotations

import pytest
import torch

import ds_ring
from ds_ring import Causal, PassOptions, RingConfig, RingConfigError, RingMesh
from ds_ring.ops.context import ContextCache, RingContext
from ds_ring.ops.options import Options

Q = torch.ones(1, 2, 8, 4)
LAYOUT = ds_ring.make_layout("contiguous", tokens=8, ring_size=1)


@pytest.mark.parametrize("kind", [Options, PassOptions])
def test_what_was_asked_of_options_changes_neither_their_hash_nor_their_copies(
    kind: type[PassOptions],
) -> None:
    """Properties are cached beside the fields."""
    asked, fresh = (kind(kernel="cpu", kernel_options={"block": 64}) for _ in range(2))
    assert asked.kernel_pairs == (("block", 64),)
    assert asked == fresh and hash(asked) == hash(fresh)
    assert asked != kind(kernel="cpu", kernel_options={"block": 128})


def test_a_copy_with_another_scale() -> None:
    other = Options(kernel="cpu", kernel_options={"block": 64}).replaced(scale=0.5)
    assert other.scale == 0.5 and other.kernel_options == {"block": 64}


def contexts_of(*calls: dict[str, object]) -> list[RingContext]:
    """The contexts that some calls of `ring_attention` on one mesh make, in their order."""
    mesh = RingMesh.single()
    for more in calls:
        ds_ring.ring_attention(Q, Q, Q, pattern=Causal(), layout=LAYOUT, mesh=mesh, **more)  # type: ignore[arg-type]
    return list(mesh.owners[ContextCache].by_key.values())


def test_a_kernel_named_in_the_call_goes_before_that_of_the_options() -> None:
    given = {"options": PassOptions(kernel="reference")}
    first, second = contexts_of(given, given | {"kernel": "cpu"})
    assert (first.options.kernel, second.options.kernel) == ("reference", "cpu")


def test_equal_options_of_two_calls_are_one_context() -> None:
    calls = [{"options": PassOptions(kernel="cpu", kernel_options={"block": n})} for n in (128, 128, 256)]
    assert len(contexts_of(*calls)) == 2


def test_a_config_of_the_json_is_taken_as_options() -> None:
    section = {"long_sequence": {"offload_attention": True}, "check_finite": True, "prune": False}
    config = RingConfig.from_deepspeed({"sequence_parallel_size": 1, "ring_attention": section})
    (context,) = contexts_of({"options": config})
    found = context.options
    assert (found.check_finite, found.prune, found.offload_attention) == (True, False, True)
    assert found == Options.make(config)


def test_what_is_no_options_is_refused() -> None:
    with pytest.raises(RingConfigError, match=r"options: expected PassOptions, got .*PassOptions\(transport"):
        contexts_of({"options": {"transport": "ring"}})
