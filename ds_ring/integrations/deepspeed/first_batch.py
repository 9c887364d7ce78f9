"""Compare the first training step on the ring with the same model on one process.

Owns the run of the model's copy on rank 0 and the error that all ranks raise. What is recorded of the step
is step_record.py's, how runs are compared comparison.py's. Reads the engine and changes nothing in it:
parameters, gradients, buffers, optimizer and random numbers are what they would be without it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ring.errors import RingConfigError, RingVerifyError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.deepspeed.comparison import (
    Difference,
    Numbers,
    Tolerance,
    beyond,
    compare_gradients,
    compare_outputs,
    largest,
    recording,
)
from ds_ring.integrations.deepspeed.lone_model import (
    arguments_for,
    choose_attention,
    filled,
    on_device,
    refuse_dropout,
    skeleton,
)
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.integrations.deepspeed.step_record import (
    Attended,
    Forward,
    gathered,
    hooked,
    results_of,
    whole_gradients,
    whole_weights,
)
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.shard import gather_sequence
from ds_ring.schedule.layouts import make_layout

log = logging.getLogger(__name__)

_NAMED = 8  # differences in the message
_AGAIN = "again"  # a verdict: the loss scale of fp16 was too large, the next step is looked at


# [Note: one process]
# Rank 0 needs memory for the whole model in float32, its gradients, and the whole batch: the check is for a
# short first batch. The copy has the model's own attention, made before the ring's was given to it; where the
# JSON asks for another one than the model's (LongNet, another window), it has the ring's kernel on all tokens
# at once, which shows hops and positions to be right but not the pattern. Modules of your own may ask
# `engine.ring.attention()`; one that holds a RingAttention, or calls ring_attention with the ring's mesh,
# cannot be run on one rank. The step compared is the one before the first `engine.step()` at a boundary of
# gradient accumulation; gradients are compared as the engine reduced them.
@dataclass
class FirstBatch:
    """Compare the first step of an engine with one process."""

    model: nn.Module
    session: RingSession
    trains: bool = True
    _alone: nn.Module | None = None
    _forwards: list[Forward] = field(default_factory=list)
    _done: bool = False

    def __post_init__(self) -> None:
        if not self.trains:
            raise RingConfigError(
                "verify_first_batch: expected an optimizer, got none: there is no training step to compare;"
                " set it to false, or give an optimizer"
            )
        refuse_dropout(self.model)
        self._alone = skeleton(self.model)

    def watch(self, engine: Any) -> None:
        """Record the engine's forward passes, and compare before its first step."""
        forward, step = engine.forward, engine.step

        @functools.wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._done or not (engine.module.training and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            sharding = self.session.batches.current
            with recording(engine.module) as layers:
                output = forward(*args, **kwargs)
            attended = Attended(sharding.layout.tokens, sharding.patterns, sharding.groups)
            logits, loss = results_of(output)
            seen = Forward(args, kwargs, attended, logits, loss, layers, sharding=sharding)
            self._forwards.append(hooked(seen))
            return output

        @functools.wraps(step)
        def verified(*args: Any, **kwargs: Any) -> Any:
            if not self._done and engine.is_gradient_accumulation_boundary():
                self._verify(engine)
            return step(*args, **kwargs)

        engine.forward, engine.step = recorded, verified

    @torch.no_grad()
    def _verify(self, engine: Any) -> None:
        """Gather the step on rank 0, compare there, and tell all ranks. Collective."""
        used = [
            one for one in self._forwards if one.loss_factor is not None or one.logits_gradient is not None
        ]
        self._forwards = []
        if not used:
            return
        means = [None if one.loss is None else float(self.session.mean_loss(one.loss)) for one in used]
        pieces = [gathered(self._piece(one)) for one in used]
        gradients = whole_gradients(engine.module)
        weights = whole_weights(engine.module)
        verdict: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                verdict = [self._compare_with_one_process(engine.module, weights, pieces, means, gradients)]
            except Exception as error:
                # Any error becomes the verdict: the other ranks wait for it in a broadcast.
                verdict = [f"the model on one process raised {type(error).__name__}: {error}"]
        dist.broadcast_object_list(verdict, src=0, device=self.session.device)
        if verdict[0] == _AGAIN:
            log.info("verify_first_batch: gradients overflowed in fp16, the next step is compared")
            return
        self._done, self._alone = True, None
        if verdict[0] is not None:
            raise RingVerifyError(
                f"verify_first_batch: expected the ring to equal one process, got: {verdict[0]}; do not train"
                " with this: report the model, or set verify_first_batch to false if you know better"
            )

    def _compare_with_one_process(
        self,
        module: nn.Module,
        weights: dict[str, Tensor],
        pieces: list[list[Forward]],
        means: list[float | None],
        gradients: dict[str, Tensor],
    ) -> str | None:
        """Return None if the ring's numbers are right, or what differs. On rank 0."""
        dtype = next((x.dtype for x in weights.values() if x.is_floating_point()), torch.float32)
        if dtype is torch.float16 and not all(bool(x.isfinite().all()) for x in gradients.values()):
            # An overflow skips the step: fp16 training lowers its loss scale and goes on, and so does this
            # check.
            return _AGAIN
        assert self._alone is not None
        alone = filled(self._alone, module, weights, self.session.device)
        choose_attention(alone, self.session.config)
        found: list[Difference] = []
        for parts, mean in zip(pieces, means, strict=True):
            found += self._forward_alone(alone, parts, mean)
        expected = {name: p.grad.cpu() for name, p in alone.named_parameters() if p.grad is not None}
        found += compare_gradients(gradients, expected)
        wrong = beyond(found, Tolerance.of(dtype))
        if wrong:
            more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            return "; ".join(str(one) for one in wrong[:_NAMED]) + more
        worst = ", ".join(str(one) for one in largest(found).values())
        log.info("verify_first_batch: the ring equals one process; largest relative errors: %s", worst)
        return None

    def _forward_alone(self, alone: nn.Module, parts: list[Forward], mean: float | None) -> list[Difference]:
        """Repeat one forward pass of the step, replica by replica; its gradients add up in `alone`."""
        found, total = [], 0.0
        divisor = self.session.gradient_divisor
        for part in parts:
            devices = [self.session.device] if self.session.device.type == "cuda" else []
            with (
                torch.enable_grad(),
                torch.random.fork_rng(devices),
                recording(alone) as layers,
                self._one_rank(part.attended) as single,
            ):
                given = arguments_for(alone, part.kwargs, single, divisor)
                args, given = on_device((part.args, given), self.session.device)
                output = alone(*args, **given)
                logits, loss = results_of(output)
                if part.loss_factor is not None and loss is not None:
                    (loss * part.loss_factor.to(loss)).backward()
                    total += float(loss.detach())
                else:
                    assert part.logits_gradient is not None
                    logits.backward(part.logits_gradient.to(logits) / divisor)
            rows = Numbers(logits.detach().cpu(), layers={name: x.cpu() for name, x in layers.items()})
            found += compare_outputs(Numbers(part.logits, layers=part.layers), rows)
        if mean is not None and parts[0].loss_factor is not None:
            both = (Numbers(torch.ones(1, 1), value) for value in (mean, total))
            found += [one for one in compare_outputs(*both) if one.kind == "loss"]
        return found

    @contextmanager
    def _one_rank(self, attended: Attended) -> Iterator[BatchSharding]:
        """Make `session.attention()` attend to all tokens on this rank meanwhile."""
        book = self.session.batches
        single = BatchSharding(
            self.session.config,
            make_layout("contiguous", tokens=attended.tokens, ring_size=1),
            RingMesh.single(),
            attended.patterns,
            attended.groups,
        )
        before, book._current = book._current, single
        try:
            yield single
        finally:
            book._current = before

    def _piece(self, one: Forward) -> Forward | None:
        """Return the whole sequence of a forward pass, on the CPU, on one rank of each that holds it."""
        sharding = one.sharding
        assert sharding is not None
        mesh = sharding.mesh
        whole = mesh is not self.session.mesh and mesh.sequence_size == 1  # this rank's samples are whole

        def take(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            sharded = value.ndim >= 2 and value.shape[1] == sharding.local_tokens and not whole
            value = value.detach()
            return (
                (gather_sequence(value, sharding.layout, mesh=mesh, dim=1) if sharded else value)
                .cpu()
                .contiguous()
            )

        taken = Forward(
            tuple(take(value) for value in one.args),
            {name: take(value) for name, value in one.kwargs.items()},
            one.attended,
            take(one.logits),
            take(one.loss),
            {name: take(value) for name, value in one.layers.items()},
            take(one.loss_factor),
            take(one.logits_gradient),
        )
        return taken if whole or mesh.sequence_rank == 0 else None
