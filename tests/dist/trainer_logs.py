"""What the tests of trainers have in common: the JSON with and without a ring, a fresh start, and the comparison of logs.

No key of a log is left out of a comparison. TIMES lists those that cannot be equal, with the reason; a rate times its
runtime is a count, and that is compared.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "configs/examples"
RING_KEYS = ("sequence_parallel_size", "ring_attention")

Logs = list[dict[str, Any]]

# What two runs cannot have in common, and why. A rate times its runtime is a count, which is compared.
TIMES = {
    r"(\w+_)?runtime": "seconds of a run",
    r"\w+_model_preparation_time": "seconds that the engine took to start",
    r"step_time": "seconds of a step",
    r"profiling/.*": "seconds of a function",
}
# Differences of numbers that are larger by far, whose rounding they have: relative above 1, others above 0.01.
DIFFERENCES = r"(eval_)?rewards/(chosen|rejected|margins)"  # 0.1 times those of log-probabilities of -300
# KTO's kl, the mean of such differences, unlike that of GRPO, which has no log-probabilities of samples. Ring 2 x
# data 2: all samples in 14 calls are equal to the bit, but one of -167.50674, by two of its last bits.
OF_KTO = "kl", "eval_kl"
RATES = r"(\w+)_(samples|steps|tokens)_per_second"


def check_logs(got: Logs, expected: Logs, rel: float = 2e-5) -> float:
    """Compare all keys of all logs; return the greatest difference of a number that is no time."""
    assert len(got) == len(expected) > 0
    worst, faults = 0.0, []
    for item, second in zip(got, expected, strict=True):
        assert item.keys() == second.keys(), f"keys {sorted(item.keys() ^ second.keys())} of {second}"
        for key, value in second.items():
            if isinstance(value, list) and all(isinstance(x, float) for x in value):
                worst = max(worst, check_logs([dict(enumerate(item[key]))], [dict(enumerate(value))], rel))
                continue
            rate = re.fullmatch(RATES, str(key))
            if rate:
                counts = [entry[key] * entry[f"{rate[1]}_runtime"] for entry in (item, second)]
                result, most = abs(counts[0] - counts[1]), max(0.02 * counts[1], 0.05)
            elif any(re.fullmatch(pattern, str(key)) for pattern in TIMES):
                result, most = -float(item[key]), 0.0
            elif isinstance(value, int | float):
                is_kto = key in OF_KTO and any(str(name).endswith("logps/chosen") for name in second)
                least = 1.0 if is_kto or re.fullmatch(DIFFERENCES, str(key)) else 1e-2
                result, most = abs(item[key] - value) / max(abs(value), least), rel
                worst = max(worst, result)
            else:
                result, most = float(item[key] != value), 0.0
            if not result <= most:
                faults.append(f"{key}: got {item[key]}, expected {value}, in {second}")
    assert not faults, "\n".join(faults)
    return worst


def start_trainers() -> None:
    """Take back what another Trainer or Accelerator has left in this process."""
    from accelerate.state import AcceleratorState, GradientState
    from deepspeed.ops import __compatible_ops__
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    __compatible_ops__["deepspeed_shm_comm"] = False  # two minutes of compiling
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    multiprocessing.current_process()._config["daemon"] = False  # DeepSpeed's loader starts workers
    sys.path.insert(0, str(EXAMPLES))


def configs(folder: Path, ring: int | str = 2, **changes: Any) -> tuple[str, str]:
    """Write the examples' JSON without a ring, and with one."""
    config = json.loads((EXAMPLES / "ds_config.json").read_text()) | changes
    plain = {key: value for key, value in config.items() if key not in RING_KEYS}
    (folder / "plain.json").write_text(json.dumps(plain))
    (folder / "ring.json").write_text(json.dumps(config | {"sequence_parallel_size": ring}))
    return str(folder / "plain.json"), str(folder / "ring.json")
