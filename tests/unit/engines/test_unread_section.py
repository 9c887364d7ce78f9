"""`import ds_ring` alone starts no ring: an engine whose JSON has the section is refused."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
if sys.argv[1] == "DeepSpeed first":
    import deepspeed
import ds_ring
import deepspeed, torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
for section in ({}, {"ring_attention": {"ring_size": 1}}):
    try:
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config | section)
        print("started")
    except ds_ring.RingConfigError as error:
        print(error)
"""


@pytest.mark.parametrize("order", ["ds_ring first", "DeepSpeed first"])
@pytest.mark.day("ds_ring first")
def test_a_section_that_nobody_reads_is_refused(order: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SCRIPT, order, str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    plain, with_section = done.stdout.strip().splitlines()[-2:]
    assert plain == "started" and "call ds_ring.initialize in its place, or ds_ring.enable()" in with_section
