"""Model one attention layer of a ring over several nodes: one ring of all ranks, or two levels.

    python tools/compare_levels.py --nodes 8 --hardware h100_flash3

Prints seconds of a forward and a backward pass by tokens a rank, from the lowered schedules and the rates of
a hardware file. Nothing is measured. Ranks 0, P / 2 and P - 1 stand for all; 32 heads
of 128.
"""

from __future__ import annotations

import argparse

from ds_ring import Causal, build_plan, make_layout
from ds_ring.config.hardware import Hardware
from ds_ring.estimator.cost import executed_pairs
from ds_ring.estimator.pass_memory import PassShape
from ds_ring.estimator.pass_time import Rates, time_line, work_of
from ds_ring.schedule.head_chunks import chunk_bytes_on
from ds_ring_launcher.hardware_file import read_hardware

QUERY_HEADS, HEAD_DIM, ELEMENT_BYTES = 32, 128, 2


def seconds(
    hardware: Hardware, nodes: int, local: int, kv_heads: int, node: int | None, payload: str
) -> float:
    """Return the seconds of both passes on the slowest of three ranks; `node` None for one ring of all."""
    size, of_node = nodes * hardware.devices_per_node, hardware.devices_per_node
    layout = make_layout("zigzag", tokens=size * local, ring_size=size)
    plan = build_plan(
        Causal(), layout, query_heads=QUERY_HEADS, kv_heads=kv_heads, ranks_per_node=node,
        gradient_payload=payload,
    )  # fmt: skip
    chunk_bytes = chunk_bytes_on("cuda", size)
    shape = PassShape(1, plan.group, local, HEAD_DIM, ELEMENT_BYTES, chunk_bytes, "flex")
    near = hardware.intra_node_bytes_per_s if node else None
    slowest = 0.0
    for rank in (0, size // 2, size - 1):
        total = 0.0
        for backward in (False, True):
            schedule = shape.schedule(plan.rank(rank).classes, backward)

            def is_inside(peer: int, rank: int = rank) -> bool:
                # in one ring of all ranks the slowest link, between two nodes, is the pace of every hop
                return node is not None and peer // of_node == rank // of_node

            steps = {id(chunk.steps): chunk.steps for chunk in schedule.chunks}
            work = {key: work_of(one, shape, executed_pairs, is_inside) for key, one in steps.items()}
            efficiency = hardware.attention_efficiency
            rate = hardware.flops("bfloat16") * (efficiency.backward if backward else efficiency.forward)
            fixed = (hardware.call_overhead_s, True, hardware.hop_overhead_s)
            rates = Rates(rate, *fixed, hardware.inter_node_bytes_per_s, hardware.link_latency_s, near)
            total += time_line(schedule, work, shape, rates).seconds(overlap=True)
        slowest = max(slowest, total)
    return slowest


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=QUERY_HEADS, help="of 32 query heads")
    parser.add_argument("--hardware", default="h100_flash3", help="name or file, as of ds-ring plan")
    parser.add_argument("--local-tokens", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    options = parser.parse_args()
    hardware = read_hardware(options.hardware)
    node = hardware.devices_per_node
    print("tokens a rank   one ring   two levels   ratio   with bfloat16 gradients: one ring   two levels")
    for local in options.local_tokens:
        row = [
            seconds(hardware, options.nodes, local, options.kv_heads, levels, payload)
            for payload in ("float32", "bfloat16")
            for levels in (None, node)
        ]
        flat, two, flat_less, two_less = row
        print(f"{local:13,d} {flat:10.4f} {two:12.4f} {flat / two:7.3f} {flat_less:35.4f} {two_less:12.4f}")


if __name__ == "__main__":
    main()
