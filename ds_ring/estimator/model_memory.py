"""Estimate peak memory of a training step on one device, by component and by moment.

Owns the moments of a step at which memory can be highest, and what lives at each. The blocks are those of an
eager Llama in transformers 5 (what autograd saves was counted in the profiler's events and is exact there;
fused norms, fused losses and compilation save less). Attention's own part comes from `pass_memory.py`, states
from `zero_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ds_ring.estimator.model_shape import ModelShape
from ds_ring.estimator.pass_memory import PassMemory
from ds_ring.estimator.zero_memory import FLOAT, Zero

Components = dict[str, int]


class Moment(NamedTuple):
    """Hold bytes by component at one moment of a step."""

    name: str
    components: Components

    @property
    def total(self) -> int:
        """Return bytes alive."""
        return sum(self.components.values())


@dataclass(frozen=True)
class LocalTokens:
    """Hold what one device has of a batch."""

    outside: int  # tokens outside attention: batch x T / (ring x Ulysses)
    inside: int  # token slots inside attention: batch x T / ring
    # heads, kv_heads: there: those of the model over the Ulysses size
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class TrainingStep:
    """Describe a training step on one device."""

    # model, zero: what is trained and how its states are kept
    model: ModelShape
    zero: Zero
    tokens: LocalTokens  # how many here
    ring: PassMemory  # what the pass needs beside q, k, v, out and their gradients
    checkpointing: bool = False  # a layer keeps its input and is computed again
    keeps_attention: bool = False  # but for attention's output and lse, which are kept then
    loss_tokens: int | None = None  # tokens whose logits are there at once (a chunked loss); None for all

    @property
    def norm_bytes(self) -> int:
        """Return what a norm saves: its input in float32 (itself, where that is its dtype), x / rms, its
        output.
        """
        return self.tokens.outside * self.model.hidden * (FLOAT + 2 * self.zero.element_bytes)

    @property
    def attention_bytes(self) -> int:
        """Return bytes of q, k, v, out, the output in the order of tokens, and the float32 lse."""
        here, element = self.tokens, self.zero.element_bytes
        inside = here.inside * (here.heads + 2 * here.kv_heads) * self.model.head_dim * element
        return inside + self._results_bytes + self._query_bytes

    @property
    def _results_bytes(self) -> int:
        here = self.tokens
        return here.inside * here.heads * (self.model.head_dim * self.zero.element_bytes + FLOAT)

    @property
    def _query_bytes(self) -> int:
        model = self.model
        return self.tokens.outside * model.heads * model.head_dim * self.zero.element_bytes

    @property
    def mlp_bytes(self) -> int:
        """Return bytes of gate, silu(gate), up, and their product."""
        return 4 * self.tokens.outside * self.model.intermediate * self.zero.element_bytes

    @property
    def layer_input_bytes(self) -> int:
        """Return bytes of the residual stream at one layer."""
        return self.tokens.outside * self.model.hidden * self.zero.element_bytes

    @property
    def logits(self) -> int:
        """Return the elements of the local logits that are there at once."""
        tokens = self.tokens.outside
        return min(tokens, self.loss_tokens or tokens) * self.model.vocab

    def saved(self, layers: int, attention: bool) -> int:
        """Return what whole layers keep for the backward pass, of attention or of the rest."""
        if self.checkpointing:
            kept = self._results_bytes if self.keeps_attention else 0
            return layers * (kept if attention else self.layer_input_bytes)
        return layers * (self.attention_bytes if attention else 2 * self.norm_bytes + self.mlp_bytes)

    def moments(self) -> list[Moment]:
        """Return every moment that can be the highest, in the order of a step."""
        return [
            self._start(),
            *self._loss(),
            *self._layers(),
            self._end_of_backward(),
            self._optimizer_step(),
        ]

    def peak(self) -> Moment:
        """Return the moment of the most memory."""
        return max(self.moments(), key=lambda moment: moment.total)

    def _states(self, made: int, passing: bool = True) -> Components:
        zero, model = self.zero, self.model
        return {
            "parameters": zero.parameters(model),
            "gathered parameters": zero.gathered(model) if passing else 0,
            "optimizer states": zero.optimizer(model),
            "gradients": zero.standing_gradients(model) + zero.gradients(model, made),
            "ring buffers": self.ring.buffers,
        }

    def _start(self) -> Moment:
        zero, model = self.zero, self.model
        return Moment("start of the engine", {"parameters": zero.start(model)})

    def _loss(self) -> Iterator[Moment]:
        """Yield the moments of the loss: logits, again in float32, log-softmax; backward two more."""
        element, layers = self.zero.element_bytes, self.model.layers
        before = self._states(0) | {
            "activations": self.saved(layers, False) + self.norm_bytes,
            "attention": self.saved(layers, True),
        }
        forward = element + FLOAT + (FLOAT if self.zero.low else 0)
        yield Moment("loss, forward", before | {"logits and loss": forward * self.logits})
        yield Moment("loss, backward", before | {"logits and loss": 3 * FLOAT * self.logits})
        weight = self.zero.element_bytes * self.model.head_parameters
        backward = element * self.logits + 2 * self.layer_input_bytes
        after = before | {"logits and loss": backward, "gradients": before["gradients"] + weight}
        yield Moment("output matrix, backward", after)

    def _layers(self) -> Iterator[Moment]:
        """Yield the last layer, while all others are saved, and the first, when all gradients exist."""
        layers, per_layer = self.model.layers, self.model.layer_parameters
        head = self.model.head_parameters
        for name, left in (("last", layers), ("first", 1)):
            made = head + (layers - left) * per_layer
            saved, attention = self.saved(left, False), self.saved(left, True)
            if self.checkpointing:  # computed again
                saved += 2 * self.norm_bytes + self.mlp_bytes
                attention += self.attention_bytes - (self._results_bytes if self.keeps_attention else 0)
            yield self._mlp(name, made, saved, attention)
            yield self._attention(name, made + self.model.mlp_parameters, saved, attention)

    def _mlp(self, name: str, made: int, saved: int, attention: int) -> Moment:
        element, tokens = self.zero.element_bytes, self.tokens.outside
        passing = tokens * element * 2 * (self.model.intermediate + self.model.hidden)
        gradients = {"activations": saved + passing, "attention": attention}
        return Moment(f"MLP of the {name} layer, backward", self._states(made) | gradients)

    def _attention(self, name: str, made: int, saved: int, attention: int) -> Moment:
        """Return attention's backward: four gradients beside q, k, v, out; the MLP's part is freed."""
        here, element = self.tokens, self.zero.element_bytes
        saved += 2 * self.layer_input_bytes - self.mlp_bytes - self.norm_bytes
        gradients = here.inside * (2 * here.heads + 2 * here.kv_heads) * self.model.head_dim * element
        return Moment(
            f"attention of the {name} layer, backward",
            self._states(made)
            | {"activations": saved, "attention": attention + gradients - self._query_bytes}
            | {"accumulators": self.ring.accumulators, "kernel workspace": self.ring.workspace},
        )

    def _end_of_backward(self) -> Moment:
        states = self._states(self.model.parameters)
        states["gradients"] += self.zero.reduction(self.model)
        return Moment("end of the backward pass", states)

    def _optimizer_step(self) -> Moment:
        states = self._states(0, passing=False)
        gradients, temporary = self.zero.step(self.model)
        states["gradients"] += gradients
        return Moment("optimizer step", states | {"optimizer temporaries": temporary})


def attention_alone(
    rows: int, kv_rows: int, local_tokens: int, head_dim: int, element: int, ring: PassMemory,
    v_head_dim: int | None = None,
) -> Moment:  # fmt: skip
    """Return the memory of a forward and backward pass with no model around it.

    Args:
        rows, kv_rows: batch x query heads, batch x K/V heads.
        local_tokens: slots S.
        head_dim: D.
        element: bytes of one element of q, k, v.
        ring: what the pass needs beside them.
        v_head_dim: E of values and outputs; None is D.
    """
    both = head_dim + (head_dim if v_head_dim is None else v_head_dim)
    tensors = 2 * (rows + kv_rows) * local_tokens * both * element  # q, k, v, out and their gradients
    parts = {"attention": tensors + rows * local_tokens * FLOAT, "ring buffers": ring.buffers}
    parts |= {"accumulators": ring.accumulators, "kernel workspace": ring.workspace}
    return Moment("attention, backward", parts)
