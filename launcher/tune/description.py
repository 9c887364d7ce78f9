"""Describe the measured hardware in the form of `configs/hardware`, for `ds-ring plan`."""

from __future__ import annotations

import os
import platform
import socket

import psutil
import torch

from ds_ring.config.json_text import Json
from ds_ring.registry import FAST_KERNELS
from ds_ring.schedule.lowering import chunk_bytes_on

from ..plan.hardware import Hardware, hardware_from
from ..plan.layer_passes import LayerPass, slowest_pass, total_cost
from ..plan.pass_memory import PassShape
from ..plan.pass_time import BACKWARD_FLOPS, FORWARD_FLOPS
from .model import plan_of
from .request import Request
from .result import Result

MOST = 4.0  # how far a pass can move the rate of the kernel; beyond that something else was measured


def describe_hardware(result: Result) -> Json:
    """Describe this hardware; rates are per rank, with all ranks at work."""
    # A rank of the CPU counts as a device. What was not measured, with one rank, is not in it. Where the
    # choice has Ulysses ranks, whose exchanges `ds-ring plan` does not time, the kernel's own rate stands.
    whole_kernel = _describe(result, 1.0)
    if result.measured.links is None or result.chosen.ulysses_size > 1:
        return whole_kernel
    times = _slower(result, hardware_from(whole_kernel, "what tune measured"))
    description = _describe(result, times)
    description["source"]["attention_efficiency"] = (
        f"a pass of {result.request.tokens} tokens with the chosen section: {times:.2f} times the arithmetic"
        " of the kernel by itself, on a causal triangle"
    )
    return description


def _describe(result: Result, times: float) -> Json:
    """Describe it with a kernel `times` slower than it was by itself."""
    request, measured, links = result.request, result.measured, result.measured.links
    kernel = measured.kernels[result.chosen.kernel]
    forward, backward = kernel.forward_flops / times, kernel.backward_flops / times
    peak = max(measured.matmul_flops, forward, backward)
    description: Json = {
        "name": _device_name(request, result.ranks_per_node),
        "kind": request.device,
        "memory_bytes": _memory_bytes(request, result.ranks_per_node),
        "devices_per_node": result.ranks_per_node,
        "peak_flops": {request.dtype: peak},
        "attention_efficiency": {"forward": forward / peak, "backward": backward / peak},
        "matmul_efficiency": measured.matmul_flops / peak,
        "call_overhead_s": kernel.forward_tile_s,
    }
    if links is not None:
        description["intra_node_bytes_per_s"] = links.fastest_bytes_per_s
        description["inter_node_bytes_per_s"] = links.bytes_per_s
        description["link_latency_s"] = links.latency_s
        description["hop_overhead_s"] = measured.hop_overhead_s
    return description | {"source": _source(request)}


# [Note: the rate of a pattern]
# The kernel by itself is timed on a causal triangle. A window's strips and the branches of a dilated pattern
# are smaller calls with a bias, which run at another rate, as do the additions into accumulators between
# them. So the rate that is written down is the one at which the chosen pass, as it was timed at the full
# length with the pattern of the request, comes out right: what it took beyond the plan's figure is laid to
# its arithmetic.
def _slower(result: Result, hardware: Hardware) -> float:
    """Return seconds of arithmetic in the chosen pass over those planned; [Note: the rate of a pattern]."""
    request, chosen = result.request, result.chosen
    plans = [(plan_of(chosen, request, request.tokens, one), layers) for one, layers in request.mix]
    chunk_bytes = result.section()["chunk_bytes"] or chunk_bytes_on(request.device, chosen.ring_size)
    shape = PassShape(
        request.batch, request.heads // request.kv_heads, plans[0][0].layout.local_tokens, request.head_dim,
        request.item_bytes, chunk_bytes, FAST_KERNELS[request.device],
    )  # fmt: skip
    link = hardware.inter_node_bytes_per_s
    rates = (hardware, request.dtype, link, chosen.overlap)
    passes = [LayerPass(plan.pattern, layers, slowest_pass(plan, shape, *rates)) for plan, layers in plans]
    planned, count = total_cost(passes), sum(layers for _, layers in plans)
    efficiency = hardware.attention_efficiency
    per_pair = FORWARD_FLOPS / efficiency.forward + BACKWARD_FLOPS / efficiency.backward
    arithmetic = planned.executed * request.head_dim * per_pair / hardware.flops(request.dtype)
    took = arithmetic + count * result.chosen_s - planned.seconds  # `chosen_s` is a layer's mean
    return min(max(took / arithmetic, 1 / MOST), MOST)


def _device_name(request: Request, ranks_per_node: int) -> str:
    cuda = request.device == "cuda"
    name = torch.cuda.get_device_name(0) if cuda else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return f"{name}, {ranks_per_node} ranks on {socket.gethostname()}"


def _memory_bytes(request: Request, ranks_per_node: int) -> int:
    """Return the memory of a device: a GPU's own, or a rank's part of the host's."""
    if request.device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(psutil.virtual_memory().total) // ranks_per_node


def _source(request: Request) -> dict[str, str]:
    return {
        "all": f"ds-ring tune, torch {torch.__version__}, {request.world_size} ranks at once",
        "peak_flops": "the best of a large product of matrices and the attention kernel",
        "inter_node_bytes_per_s": "the slowest link of the ring",
        "intra_node_bytes_per_s": "the fastest link of the ring",
    }
