"""Describe this machine as a file that `ds-ring plan --hardware` reads.

[Note: the rate of a pattern]
The kernel by itself is timed on a causal triangle. A window's strips and the branches of a dilated pattern
are smaller calls with a bias, which run at another rate, by up to 27 %, as do the additions into accumulators
between them. So the written rate is corrected by passes of the whole length with the request's pattern: the
time above the plan's figure is attributed to its arithmetic.
"""

from __future__ import annotations

import os
import platform
import socket

import psutil
import torch

from ds_ring.config.json_text import Json
from ds_ring.plugin import FAST_KERNELS
from ds_ring.schedule.lowering import chunk_bytes_on
from ds_ring.schedule.plan import Plan, build_plan

from ..plan.hardware import Hardware, hardware_from
from ..plan.layer_passes import LayerPass, slowest_pass, total_cost
from ..plan.pass_memory import PassShape
from ..plan.pass_time import BACKWARD_FLOPS, FORWARD_FLOPS
from .measurements import Measured, plan_layout
from .request import TuningRequest

MAX_CHANGE = 4.0  # how far a pass can move the rate of the kernel; beyond that something else was measured


def describe_hardware(request: TuningRequest, measured: Measured) -> Json:
    """Describe this hardware; rates are per rank, with all ranks at work."""
    # A rank of the CPU counts as a device. What was not measured, with one rank, is not in it.
    kernel_alone = _describe(request, measured, 1.0)
    if measured.links is None:
        return kernel_alone
    times = _compare_with_plan(request, measured, hardware_from(kernel_alone, "what tune measured"))
    description = _describe(request, measured, times)
    documents = ", without a batch's documents" if request.base.pattern.documents else ""
    description["source"]["attention_efficiency"] = (
        f"a pass of {request.tokens} tokens with this section{documents}: {times:.2f} times the arithmetic"
        f" of the kernel by itself, on a causal triangle; {measured.pass_s:.4g} s"
    )
    return description


def _describe(request: TuningRequest, measured: Measured, times: float) -> Json:
    """Describe it with a kernel `times` slower than it was by itself."""
    links, kernel = measured.links, measured.kernel
    forward, backward = kernel.forward_flops / times, kernel.backward_flops / times
    peak = max(measured.matmul_flops, forward, backward)
    if request.device == "cuda":
        name = torch.cuda.get_device_name(0)
        memory_bytes = int(torch.cuda.get_device_properties(0).total_memory)
    else:  # a rank's part of the host's
        name = f"{platform.machine()} CPU, {os.cpu_count()} cores"
        memory_bytes = int(psutil.virtual_memory().total) // measured.ranks_per_node
    description: Json = {
        "name": f"{name}, {measured.ranks_per_node} ranks on {socket.gethostname()}",
        "kind": request.device,
        "memory_bytes": memory_bytes,
        "devices_per_node": measured.ranks_per_node,
        "peak_flops": {request.dtype: peak},
        "attention_efficiency": {"forward": forward / peak, "backward": backward / peak},
        "matmul_efficiency": measured.matmul_flops / peak,
        "call_overhead_s": kernel.call_s,
    }
    if links is not None:
        description["intra_node_bytes_per_s"] = links.fastest_bytes_per_s
        description["inter_node_bytes_per_s"] = links.bytes_per_s
        description["link_latency_s"] = links.latency_s
        description["hop_overhead_s"] = measured.hop_overhead_s
    return description | {
        "source": {
            "all": f"ds-ring tune, torch {torch.__version__}, {request.world_size} ranks at once",
            "peak_flops": "the best of a large product of matrices and the attention kernel",
            "inter_node_bytes_per_s": "the slowest link of the ring",
            "intra_node_bytes_per_s": "the fastest link of the ring; intra_node_links, not measured, is 1",
        }
    }


def build_pass_plans(request: TuningRequest) -> list[tuple[Plan, int]]:
    """Build the plan of each pattern, with the number of its layers."""
    layout, base = plan_layout(request, request.tokens), request.base
    return [
        (
            build_plan(
                pattern, layout, query_heads=request.heads, kv_heads=request.kv_heads, prune=base.prune,
                gradient_payload=base.gradient_payload,
            ),
            layers,
        )
        for pattern, layers in request.mix
    ]  # fmt: skip


def _compare_with_plan(request: TuningRequest, measured: Measured, hardware: Hardware) -> float:
    """Return seconds of arithmetic in the timed pass over those planned; [Note: the rate of a pattern]."""
    plans, base = build_pass_plans(request), request.base
    shape = PassShape(
        request.batch, request.heads // request.kv_heads, plans[0][0].layout.local_tokens, request.head_dim,
        request.item_bytes, base.chunk_bytes or chunk_bytes_on(request.device, request.sequence_size),
        FAST_KERNELS[request.device],
    )  # fmt: skip
    rates = (hardware, request.dtype, hardware.inter_node_bytes_per_s, base.overlap)
    passes = [LayerPass(plan.pattern, layers, slowest_pass(plan, shape, *rates)) for plan, layers in plans]
    planned, count = total_cost(passes), sum(layers for _, layers in plans)
    efficiency = hardware.attention_efficiency
    per_pair = FORWARD_FLOPS / efficiency.forward + BACKWARD_FLOPS / efficiency.backward
    arithmetic = planned.executed * request.head_dim * per_pair / hardware.flops(request.dtype)
    took = arithmetic + count * measured.pass_s - planned.seconds  # `pass_s` is a layer's mean
    return min(max(took / arithmetic, 1 / MAX_CHANGE), MAX_CHANGE)
