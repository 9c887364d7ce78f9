"""Draw NEFTune's noise for the tokens of a whole sequence, of which a rank keeps its own.

transformers' hook on the embeddings (`neftune_noise_alpha` of Trainer and TRL) scales its noise by the length
of the tensor that it gets. On a ring that is the shard's, and the noise would be larger by the root of the
number of ranks. Owns what takes the hook's place while a batch is sharded.

Shapes: B samples, S local tokens, T global tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.session import RingSession
from ds_ring.models.model import TABLE
from ds_ring.patches import apply, patch

_HOOK = "neftune_post_forward_hook"  # by name: versions of transformers have it in different files
_DRAWN_AT_ONCE = 2**22  # numbers


class HookSlot:
    """The place of one hook among those of a module."""

    def __init__(self, hooks: MutableMapping[int, Any], key: int) -> None:
        self._hooks, self._key = hooks, key

    @property
    def function(self) -> Any:
        """Return the hook; None where its owner has removed it."""
        return self._hooks.get(self._key)

    @function.setter
    def function(self, hook: Any) -> None:
        if self._key in self._hooks:
            self._hooks[self._key] = hook


def scale_noise(model: PreTrainedModel, session: RingSession) -> None:
    """Wrap NEFTune's hook on the embeddings of a model, where it has one that is not wrapped yet."""
    embeddings = model.get_input_embeddings()
    hooks = embeddings._forward_hooks if isinstance(embeddings, nn.Module) else {}
    for key, hook in list(hooks.items()):
        if getattr(hook, "__name__", "") == _HOOK and not hasattr(hook, "__wrapped__"):
            apply(partial(_add_noise, session), session=session, slot=HookSlot(hooks, key))


@patch(
    TABLE.given("slot"), "function", stage="after_forward", feature="neftune", when="NEFTune is on",
    reason="scales and draws the noise by the whole sequence; calls the original without a ring",
)  # fmt: skip
def _add_noise(
    session: RingSession, hook: Callable[..., Tensor], module: Any, args: Any, output_BSH: Tensor
) -> Tensor:
    """Add the noise of the whole sequence.

    On the CPU, with one seed on all ranks, it has the values of one process; on a GPU, or with other seeds,
    the same distribution.
    """
    batches = session.batches
    if not module.training or batches.is_off:
        return hook(module, args, output_BSH)
    # Encoder-decoders embed by modules of their two parts, which have no hook.
    sharding = batches.current
    if sharding.mesh.sequence_size == 1 or sharding.local_tokens != output_BSH.shape[1]:
        return hook(module, args, output_BSH)
    return output_BSH + _draw_noise(output_BSH, sharding, module.neftune_noise_alpha)


def _draw_noise(output_BSH: Tensor, sharding: BatchSharding, alpha: float) -> Tensor:
    """Draw for all tokens in their order, block by block, and keep this rank's; padding gets none."""
    samples, _, hidden = output_BSH.shape
    tokens = sharding.layout.tokens
    most = float(alpha / torch.sqrt(torch.tensor(tokens * hidden, device="cpu")))
    slots_S = sharding.with_slots(output_BSH.device).slots
    assert slots_S is not None
    block = max(1, min(tokens, _DRAWN_AT_ONCE // hidden))
    noise_BSH = torch.zeros_like(output_BSH, requires_grad=False)
    for sample in range(samples):
        for first in range(0, tokens, block):
            drawn = output_BSH.new_empty(min(block, tokens - first), hidden).uniform_(-most, most)
            mine_S = (slots_S >= first) & (slots_S < first + block)
            noise_BSH[sample, mine_S] = drawn[slots_S[mine_S] - first]
    return noise_BSH
