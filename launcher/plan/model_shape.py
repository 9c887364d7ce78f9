"""Describe the sizes of a decoder-only transformer, and count its parameters.

Owns the arithmetic of a Llama-like block (grouped-query attention, gated MLP, RMS norms, no biases). What a
block needs of memory stands in model_memory.py, what attention costs in cost.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ds_ring.errors import RingConfigError

MOST = 2**31  # of any size: products of three of them are still exact


@dataclass(frozen=True)
class ModelShape:
    """Describe the sizes of a decoder."""

    layers: int  # decoder layers
    hidden: int  # width of the residual stream
    # heads, kv_heads: query and K/V heads of a layer; heads is a multiple of kv_heads
    heads: int
    kv_heads: int
    head_dim: int  # D
    intermediate: int  # width of the MLP
    vocab: int  # rows of the embedding
    tied: bool = False  # the output matrix is the embedding

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST:
                bound = "of at least 1" if type(value) is not int or value < 1 else f"of at most {MOST:,}"
                got = f"{value!r:.40}"
                raise RingConfigError(
                    f"model: {name}: expected a whole number {bound}, got {got}; correct it"
                )
        if self.heads % self.kv_heads:
            raise RingConfigError(
                f"model: heads: expected a multiple of kv_heads {self.kv_heads}, got {self.heads};"
                " grouped-query attention shares each K/V head among equally many query heads"
            )

    @cached_property
    def attention_parameters(self) -> int:
        """Count the q, k, v and output projections of one layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @cached_property
    def mlp_parameters(self) -> int:
        """Count the gate, up and down projections of one layer."""
        return 3 * self.hidden * self.intermediate

    @cached_property
    def layer_parameters(self) -> int:
        """Count the parameters of one layer, its two norms included."""
        return self.attention_parameters + self.mlp_parameters + 2 * self.hidden

    @cached_property
    def head_parameters(self) -> int:
        """Count the output matrix, which may be the embedding."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Count all parameters, each once."""
        matrices = (1 if self.tied else 2) * self.head_parameters
        return self.layers * self.layer_parameters + matrices + self.hidden

    @cached_property
    def largest_parameter(self) -> int:
        """Return the elements of the largest single tensor."""
        return max(
            self.head_parameters, self.hidden * self.intermediate, self.hidden * self.heads * self.head_dim
        )

    @cached_property
    def matrix_parameters(self) -> int:
        """Count parameters that multiply every token: all but the embedding's rows and the norms."""
        # A training step costs 6 FLOPs per token for each (Kaplan et al. 2020, Scaling Laws, section 2.1).
        return self.layers * (self.attention_parameters + self.mlp_parameters) + self.head_parameters
