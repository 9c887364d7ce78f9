"""Model one attention layer of a ring over several nodes: one ring of all ranks, or two levels.

    python tools/compare_levels.py --nodes 8 --hardware h100_flash3

Prints seconds of a forward and a backward pass by tokens a rank, from the lowered schedules and the rates of
a hardware file. Nothing is measured. Ranks 0, P / 2 and P - 1 represent all; 32 heads
of 128.
"""

from __future__ import annotations

from dataclasses import replace

from common import parser_of

from ds_ring import Causal
from ds_ring.plugin import KV_PAYLOADS
from ds_ring_launcher.plan.hardware import read_hardware
from ds_ring_launcher.plan.layer_passes import slowest_passes, total_cost
from ds_ring_launcher.plan.model_file import ModelShape
from ds_ring_launcher.plan.model_memory import Zero
from ds_ring_launcher.plan.training_setting import TrainingSetting

HEADS, HEAD_DIM = 32, 128


def main() -> None:
    """Print the table."""
    parser = parser_of(
        __doc__, nodes=8, kv_heads=(HEADS, "of 32 query heads"),
        hardware=("h100_flash3", "name or file, as of ds-ring plan"),
        local_tokens=[8192, 16384, 32768, 65536, 131072],
    )  # fmt: skip
    options = parser.parse_args()
    hardware = read_hardware(options.hardware)
    ranks = options.nodes * hardware.devices_per_node
    # the layer around attention is not looked at
    model = ModelShape(1, HEADS * HEAD_DIM, HEADS, options.kv_heads, HEAD_DIM, 1, 1)
    print(
        "tokens a rank, then one ring and two levels: plain, then bfloat16 gradients with keys in",
        *KV_PAYLOADS,
    )
    for local in options.local_tokens:
        setting = TrainingSetting(
            local * ranks, ranks, 1, model, Causal(), "zigzag", Zero(0, ranks, 2), "bfloat16", hardware
        )
        settings = [
            replace(setting, gradient_payload=gradients, kv_payload=keys, ring_ranks_per_node=node)
            for gradients, keys in (("float32", "as_is"), *(("bfloat16", name) for name in KV_PAYLOADS))
            for node in (0, None)
        ]
        # of both passes of a layer on the slowest rank looked at
        row = [total_cost(slowest_passes(one, one.bytes_per_s)).seconds for one in settings]
        print(f"{local:9,d}", *(f"{seconds:9.4f}" for seconds in row))


if __name__ == "__main__":
    main()
