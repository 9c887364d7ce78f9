"""Estimate what training on a sample takes on rings of several sizes, on the machine that runs it.

Owns the measurement at the start of a job (a second or two) and the seconds that follow from it: the time
model of `tuning/model.py` for attention, one product's rate for the other matrices. What is done with them
is `schedule/sub_rings.py`'s.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from ds_ring.config.section import RingConfig
from ds_ring.estimator.model_shape import ModelShape
from ds_ring.estimator.tuning.candidates import KernelChoice, TuningCandidate, default_heads, kernel_choices
from ds_ring.estimator.tuning.clock import Clock
from ds_ring.estimator.tuning.links import measure_links
from ds_ring.estimator.tuning.model import Measured, Model
from ds_ring.estimator.tuning.passes import Passes
from ds_ring.estimator.tuning.probe import Probe
from ds_ring.estimator.tuning.request import Request
from ds_ring.runtime.mesh import RingMesh

_LEAST = 64  # tokens of the shortest sample that is told from none
_PROBED = 2048  # tokens of the largest pass that is timed
_DENSE = 6  # FLOPs for each parameter of a matrix and token, forward and backward (Kaplan et al. 2020)


class SampleTimes:
    """Say what samples take: `Times` of schedule/sub_rings.py.

    Args:
        shape: of the model.
        request: what was measured for; its section's pattern is taken for all layers.
        measured: the machine.
    """

    def __init__(self, shape: ModelShape, request: Request, measured: Measured) -> None:
        self.shape, self.measured = shape, measured
        self._request, self._model = request, Model(request, measured)
        self._choice = next(iter(measured.kernels))
        self._known: dict[tuple[int, int], float] = {}

    def fixed(self, ranks: int) -> float:
        """Return the seconds of all layers' hops with next to nothing in them."""
        return self._attention(self._knot(0, ranks), ranks)

    def sample(self, tokens: int, ranks: int) -> float:
        """Return the seconds of a sample's attention beyond `fixed`, and of the other matrices."""
        # Between the powers of the root of two, a straight line: a plan for every length would take longer
        # than it is good for.
        step = max(math.floor(2 * math.log2(max(tokens, 1) / self._knot(0, ranks))), 0)
        left, right = self._knot(step, ranks), self._knot(step + 1, ranks)
        low, high = self._attention(left, ranks), self._attention(right, ranks)
        between = low + (high - low) * max(tokens - left, 0) / (right - left)
        dense = _DENSE * self.shape.matrix_parameters * tokens / ranks / self.measured.matmul_flops
        return max(between - self.fixed(ranks), 0.0) + dense

    def _knot(self, step: int, ranks: int) -> int:
        return round(max(_LEAST, ranks) * 2 ** (step / 2))

    def _attention(self, tokens: int, ranks: int) -> float:
        """Return the seconds of all layers' passes, forward and backward."""
        if (tokens, ranks) not in self._known:
            base, heads = self._request.base, default_heads(self._request, ranks, 1, tokens)
            layout = "contiguous" if ranks == 1 else base.layout
            candidate = TuningCandidate(ranks, 1, layout, base.overlap, self._choice, heads)
            self._known[tokens, ranks] = self.shape.layers * self._model(candidate, tokens)
        return self._known[tokens, ranks]


def measure_times(
    shape: ModelShape, config: RingConfig, mesh: RingMesh, device: torch.device, dtype: torch.dtype
) -> SampleTimes:
    """Measure kernel, products, links and hops on all ranks at once. Collective over the world.

    Returns the same on every rank, to the bit.
    """
    size = dist.get_world_size()
    request = Request(
        tokens=_PROBED * mesh.ring_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        batch=1,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        world_size=size,
        base=config,
    )
    clock = Clock(device)
    choice = _choice(request)
    probe, passes = Probe(request, clock), Passes(request, clock, {(mesh.ring_size, 1): mesh})
    whole = TuningCandidate(mesh.ring_size, 1, config.layout, config.overlap, choice, 1)
    measured = Measured(
        kernels=probe.rates([choice], _PROBED, lambda: None),
        alone_speedup=probe.alone_speedup(choice, dist.get_rank(), _PROBED),
        matmul_flops=probe.matmul_flops(),
        links=measure_links(mesh, None, clock),
        hop_overhead_s=passes.hop_overhead(whole),
    )
    return SampleTimes(shape, request, measured)


def _choice(request: Request) -> KernelChoice:
    """Return the options that the section comes to."""
    return kernel_choices(request, request.tokens)[0]
