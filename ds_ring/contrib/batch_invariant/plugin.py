"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.batch_invariant.session import batch_invariant, generated_logprobs
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=50,
    requires=("transports/reproducible", "decode"),
    session_methods={"batch_invariant": batch_invariant, "generated_logprobs": generated_logprobs},
)
