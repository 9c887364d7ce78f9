"""Random draws of a model in training: other ones for each rank's tokens, equal ones for whole layers.

Ranks of a sequence that are seeded alike would draw one dropout mask for tokens of different positions. Ranks
that are seeded otherwise would leave out other layers (LayerDrop), which no ring pass survives. Owns the
states of torch's generators during a forward pass of an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_ring.data.engine import ENGINE, draws_random_numbers, drops_layers
from ds_ring.data.engine_part import EnginePart, EngineStart
from ds_ring.data.loss import get_mesh_number, sequence_sum_op
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError
from ds_ring.memory.regions import running_regions
from ds_ring.patches import patch

_STEP = 0x9E3779B97F4A7C15  # odd, so that the seeds of ranks differ (splitmix64)
_DRAW = torch.rand
_draws_patch = partial(patch, ENGINE, feature="random_draws", when="the model draws random numbers")
_before_pass = _draws_patch(
    stage="before_forward", reason="ranks draw other dropout masks, and leave out the same layers"
)
_after_pass = _draws_patch(
    stage="after_forward", options=("always_call",), reason="the generators go on from where they were"
)


# [Note: random draws]
# A forward pass draws one number of the CPU's generator, and makes two seeds of it. The CPU's generator gets
# the first one, which all ranks of a sequence share: models draw there whether they leave a layer out. The
# device's generator, of dropout, gets the second one, in which the rank counts. After the pass both
# generators go on from where they were, so a script's own draws stay equal on all ranks. Checkpointed regions
# restore generators by themselves. On a CPU there is one generator only: it gets the second seed, and
# `_SharedDraws` makes draws of one number by another generator.
class RandomDraws(EnginePart):
    """Seed the generators for each forward pass in training."""

    def patches(self, start: EngineStart) -> list[Any]:
        """Return the hooks of the engine; none where no sequence is cut."""
        if start.session.run_mesh.sequence_size == 1:
            return []
        return list(_hooks(start.session, start.engine))


def _hooks(session: RingSession, engine: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    passes: list[_PassDraws | None] = []  # under way, innermost last

    @_before_pass
    def seed_generators(*_: Any) -> None:
        model = engine.module
        passes.append(None)
        if model.training and not session.batches.is_off and draws_random_numbers(model):
            passes[-1] = _PassDraws(session, drops_layers(model), engine.is_compiled)

    @_after_pass
    def restore_generators(*_: Any) -> None:
        draws = passes.pop() if passes else None
        if draws is not None:
            draws.end()

    return seed_generators, restore_generators


class _PassDraws:
    """The generators during one forward pass."""

    def __init__(self, session: RingSession, drops_layers: bool, is_compiled: bool) -> None:
        self._device = session.device
        base = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        if drops_layers:
            base = _share_first_number(base, session)
        self._states = _states(self._device)
        rank_seed = (base + _STEP * (session.run_mesh.global_rank + 1)) % 2**63
        on_cpu = self._device.type == "cpu"
        torch.default_generator.manual_seed(rank_seed if on_cpu else base)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(rank_seed)
        self._mode: AbstractContextManager[Any] = nullcontext()
        if drops_layers and on_cpu and not is_compiled:
            self._mode = _SharedDraws(base)
        self._mode.__enter__()

    def end(self) -> None:
        """Let the generators go on from where they were."""
        self._mode.__exit__(None, None, None)
        torch.set_rng_state(self._states[0])
        for state in self._states[1:]:
            torch.cuda.set_rng_state(state, self._device)


def _states(device: torch.device) -> list[Tensor]:
    on_cpu = torch.get_rng_state()
    return [on_cpu, torch.cuda.get_rng_state(device)] if device.type == "cuda" else [on_cpu]


def _share_first_number(number: int, session: RingSession) -> int:
    """Return the number of the sequence's first rank. Collective."""
    mesh = session.run_mesh
    mine = torch.tensor(number if mesh.sequence_rank == 0 else 0, device=session.device)
    return int(sequence_sum_op(mine, get_mesh_number(mesh)))


class _SharedDraws(TorchFunctionMode):
    """Draw single numbers by a generator that is equal on all ranks: `torch.rand([])`, as LayerDrop does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._regions = len(list(running_regions()))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not _DRAW or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        sizes = kwargs.get("size", args)
        sizes = sizes[0] if sizes and isinstance(sizes[0], list | tuple) else sizes
        if math.prod(sizes) != 1:
            return func(*args, **kwargs)
        if len(list(running_regions())) > self._regions:
            raise RingConfigError.wrong(
                "layerdrop", "draws outside of checkpointed layers", "one inside, which would be drawn anew",
                "set it to 0",
            )  # fmt: skip
        return func(*args, **kwargs, generator=self._generator)
