"""Options are checked alike with pydantic and without it."""

from __future__ import annotations

import subprocess
import sys

from tests.documents import ROOT

ROWS = """
import pickle, sys
hidden = sys.argv[1:]
sys.modules.update(dict.fromkeys(hidden))
from ds_ring.config.messages import BaseModel
from ds_ring.config.pass_options import PassOptions as P
from ds_ring.ops.options import Options as O
assert BaseModel.__module__.startswith("ds_ring" if hidden else "pydantic"), BaseModel.__module__
nan, inf = float("nan"), float("inf")
for kind, values in [
    (P, {}), (O, {}), (O, dict(scale=1)), (O, dict(scale="x")), (O, dict(scale=inf)),
    (P, dict(kernel="cpuu")),
    (P, dict(block_size=100, overlap=1)), (P, dict(nope=1, kernel=3)), (P, dict(block_size=17)),
    (P, dict(block_size=2**30)), (P, dict(kernel="cpu", block_size=64)), (P, dict(stage_bytes=-1)),
    (P, dict(stage_bytes="auto")), (P, dict(stage_bytes=2**60)), (P, dict(chunk_bytes=0)),
    (P, dict(chunk_bytes=2**70)), (P, dict(chunk_bytes=True)), (P, dict(hop_timeout_seconds=0)),
    (P, dict(hop_timeout_seconds=nan)), (P, dict(hop_timeout_seconds=inf)), (P, dict(hop_timeout_seconds=5)),
    (P, dict(hop_timeout_seconds=True)), (P, dict(recompute_attention=0.5)), (P, dict(recompute_attention=2)),
    (P, dict(kernel_options={"a": [1, {"b": None}]})), (P, dict(kernel_options=[])),
    (P, dict(transport="all_gather", overlap=False)), (P, dict(check_finite="yes")),
    (P, dict(transport="direct", gradient_payload="bfloat16", prune=False)), (O, dict(offload_attention=3)),
    (O, dict(offload_attention="auto")), (O, dict(transport="all_gather", offload_attention=True)),
]:
    try:
        options = kind(**values)
        again = pickle.loads(pickle.dumps(options))
        print(sorted(dict(options).items()), options == again, hash(options) == hash(again), options.has_hops)
        print(options == kind(**values | {"check_finite": True}), options == 3)
    except Exception as error:
        print(type(error).__name__, error)
try:
    P().kernel = "cpu"
except ValueError:
    print("frozen")
"""


def test_options_are_checked_alike_without_pydantic() -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", ROWS, *hidden], cwd=ROOT, capture_output=True, text=True, timeout=100
        )
        for hidden in ((), ("pydantic", "pydantic_core"))
    ]
    assert not printed[0].returncode, printed[0].stderr
    assert printed[0].stdout == printed[1].stdout, printed[1].stderr
    assert printed[0].stdout.count("RingConfigError") == 22 and "frozen" in printed[0].stdout
