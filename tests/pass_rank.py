"""One rank of `pass_check.py` under torchrun: `torchrun --nproc-per-node=2 tests/pass_rank.py`."""

from __future__ import annotations

import os
import sys

from pass_check import MOST, run_rank

if __name__ == "__main__":
    errors = run_rank(int(os.environ["RANK"]), "", False)
    sys.exit(int(max(errors.values()) > MOST))
