"""Options of a pass: values with an order of their own, equal if their fields are."""

from __future__ import annotations

from ds_ring.ops.options import Options


def test_what_was_asked_of_options_changes_neither_their_hash_nor_their_copies() -> None:
    """Properties are cached beside the fields."""
    asked, fresh = (Options(kernel="cpu", kernel_options={"block": 64}) for _ in range(2))
    assert asked.kernel_pairs == (("block", 64),)
    assert asked == fresh and hash(asked) == hash(fresh)
    other = asked.replaced(scale=0.5)
    assert other.scale == 0.5 and other.kernel_options == {"block": 64}
