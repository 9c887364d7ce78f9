"""Methods of `engine.ring`: one number for a token's log-probability in a rollout and in its update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_ring.contrib.batch_invariant.mode import BatchInvariant
from ds_ring.data.loss import logprobs_and_entropies
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.plugin import PASSES


@contextmanager
def batch_invariant(session: RingSession) -> Iterator[None]:
    """Give each token the bits that it has in any batch, in a generation, and on a ring of any size.

        with engine.ring.batch_invariant():
            rollouts = engine.generate(prompts, return_dict_in_generate=True, output_logits=True, ...)
            old = engine.ring.generated_logprobs(rollouts)
        ...
        with engine.ring.batch_invariant():
            new = engine.ring.logprobs(engine, batch)  # of the same weights: the bits of `old`
        loss.backward()  # outside

    Needs `"transport": "reproducible"`, whose blocks are the same in both, and prompts without padding on the
    left: a token keeps its position. Forward passes alone: a weight's gradient is a sum over a rank's tokens.
    On the CPU, products of `ROWS` rows; slower than without.

    Raises:
        RingConfigError: another transport; in the block, an operator of whose bits nothing is known, such as
            those of recurrent layers, of latents and of chosen keys.
    """
    if not PASSES[session.config.transport].whole_blocks:
        got = f'"{session.config.transport}"'
        raise RingConfigError.wrong(
            "batch_invariant", '"transport": "reproducible"', got, "set it in the JSON"
        )
    with BatchInvariant():
        yield


def generated_logprobs(session: RingSession, output: Any) -> Tensor:
    """Return the log-probability of each token that `generate` has added, float32 [B, new].

    Args:
        output: of `generate(..., return_dict_in_generate=True, output_logits=True)`, not of beams.

    Raises:
        RingShapeError: it has no logits.
    """
    logits = getattr(output, "logits", None)
    if not logits:
        raise RingShapeError.wrong(
            "generated_logprobs", "logits", "none", "pass output_logits=True to generate"
        )
    sampled = output.sequences[:, -len(logits) :]
    return logprobs_and_entropies(torch.stack(list(logits), dim=1), sampled)[..., 0]
