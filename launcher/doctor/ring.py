"""Be the script of a job that `ds-ring doctor` starts: each rank measures the ring of the job's JSON.

Started by the engine of the cluster YAML, as the user's own script is. Rank 0 prints one line for the doctor.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

MARK = "DS_RING_DOCTOR "


def main() -> int:
    """Measure, and print what was found on rank 0; a RingError is the last line of stderr."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()

    import torch
    import torch.distributed as dist

    from ds_ring import RingMesh
    from ds_ring.config.section import RingConfig
    from ds_ring.integrations.deepspeed.initialize import init_distributed
    from ds_ring.module import options_from_config
    from ds_ring_launcher.doctor.self_test import self_test

    if init_distributed().type == "cpu":
        torch.set_num_threads(1)
    config = RingConfig.from_deepspeed(options.deepspeed_config)
    config.validate_world(dist.get_world_size())
    mesh = RingMesh.from_world(config.ring_size, config.ulysses_size)
    answers = self_test(mesh, options_from_config(config))
    if dist.get_rank() == 0:
        told = [{**one._asdict(), "link": one.link and one.link._asdict()} for one in answers]
        print(MARK + json.dumps(told), flush=True)
    mesh.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
