"""Describe the attention that is profiled, in a form that can be sent to another process.

Owns the description, its checks and its one-line name. Measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_ring.errors import RingConfigError
from ds_ring.masks.pattern import Pattern
from ds_ring.runtime.context import Options
from ds_ring.runtime.kernels import get_kernel
from ds_ring.schedule.layout import Layout, Mix, make_layout
from ds_ring.schedule.plan import check_length
from ds_ring.simulation.generate import GeneratedSource
from ds_ring.simulation.rank import Geometry

MIB = 2**20


@dataclass(frozen=True)
class Job:
    """Describe one attention over generated numbers, for rings of any size."""

    sizes: Geometry  # of the global tensors
    pattern: Pattern  # which position attends to which
    layout_name: str = "auto"  # "contiguous", "zigzag", ..., or "auto"
    # kernel, least size of messages, whether to prune, deadline of a hop
    options: Options = field(default_factory=Options)
    backward: bool = True  # the backward pass as well
    seed: int = 0  # of the numbers
    threads: int = 1  # of a rank's kernel
    # layers of this pattern and of others, which share the layout; none: all layers have this one
    mix: Mix = ()

    @property
    def source(self) -> GeneratedSource:
        """Return the numbers; the same in every process."""
        sizes = self.sizes
        return GeneratedSource(
            sizes.tokens,
            sizes.query_heads,
            sizes.kv_heads,
            sizes.head_dim,
            sizes.batch,
            sizes.dtype,
            self.seed,
        )

    def layout(self, ring_size: int) -> Layout:
        """Return where the tokens of a ring lie.

        Raises:
            RingConfigError: fewer tokens than ranks.
            RingLayoutError, RingPatternError: no such layout, or none for this pattern.
        """
        if 0 < self.sizes.tokens < ring_size:
            raise RingConfigError(
                f"expected at least one token for each of {ring_size} ranks, got {self.sizes.tokens} tokens;"
                f" profile a ring of at most {self.sizes.tokens}, or more tokens"
            )
        mix = dict(self.mix) or self.pattern
        layout = make_layout(self.layout_name, tokens=self.sizes.tokens, ring_size=ring_size, pattern=mix)
        check_length(self.pattern, layout)
        return layout

    def check(self, ring_sizes: list[int]) -> None:
        """Raise what any of these rings would raise, before anything is run.

        Raises:
            RingError: what is wrong.
        """
        _ = self.source
        get_kernel(self.options.kernel, "cpu", self.options.kernel_options, self.options.block_size)
        if not isinstance(self.threads, int) or self.threads < 1:
            raise RingConfigError(f"threads: expected at least 1, got {self.threads}")
        for ring_size in ring_sizes:
            self.layout(ring_size)

    @property
    def title(self) -> str:
        """Return one line for tables and pictures."""
        sizes = self.sizes
        heads = f"{sizes.query_heads} heads"
        if sizes.kv_heads != sizes.query_heads:
            heads += f" on {sizes.kv_heads} K/V heads"
        dtype = str(sizes.dtype).removeprefix("torch.")
        passes = "forward + backward" if self.backward else "forward"
        what = f"{sizes.tokens} tokens, {heads}, head_dim {sizes.head_dim}, {dtype}, {self.pattern}, {passes}"
        layers = dict(self.mix).get(self.pattern)
        return what if layers is None else f"{what}, {layers} of {sum(n for _, n in self.mix)} layers"
