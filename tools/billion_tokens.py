"""2^30 tokens, really attended: causal LongNet over 1024 virtual ranks of 1 Mi tokens, on a small machine.

Keys, queries and values are generated where they are read, ranks are walked in blocks of queries, checksums
and some rows are kept; rows are compared with float64 by the definition. A killed run continues from
its last state (--state); another --ranks must give the same checksums.

Example:
    python tools/billion_tokens.py --state runs/billion
    python tools/billion_tokens.py --tokens 1048576 --ranks 16 --backward --state runs/million
    python tools/billion_tokens.py --sample 1023 512 0
    python tools/billion_tokens.py --fake 0 1023
    python tools/billion_tokens.py --plan h100
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from common import parser_of, print_row
from streamed.fake_layer import HEADS, fake_layer
from streamed.ledger import Ledger
from streamed.long_run import LongRun, Progress, collect, errors, peak_rss_mib, run
from streamed.ranks import PendingGradients
from tqdm import tqdm

from ds_ring.errors import RingError
from ds_ring_launcher import cli as ds_ring_cli

LLAMA_8B = [
    *("--layers", "32", "--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--intermediate", "14336"),
    *("--vocab", "128256", "--activation-checkpointing", "--loss-chunk", "4096"),
]


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    own = parser_of(
        __doc__, tokens=(1 << 30, "T (2^30)"), ranks=(1024, "virtual ranks (1024)"), head_dim=32,
        first_segment=(256, "of the first branch, tokens (256)"), seed=0,
        growth=(4, "of segments and rates from branch to branch (4)"),
        backward=(False, "gradients as well"), query_block=(1 << 16, "queries attended at once (65536)"),
        workers=(2, "processes, one thread each (2)"),
        check_rows=(5000, "rows held against float64, about (5000)"),
        state=(Path("runs/billion_tokens"), "folder of the state"),
        save_every=(8, "ranks of a worker between two saves (8)"),
        plan=("", "HARDWARE: what a model of 8 billion parameters would need"),
    )  # fmt: skip
    own.add_argument("--sample", type=int, nargs="+", metavar="RANK", help="time these ranks, save nothing")
    own.add_argument(
        "--fake", type=int, nargs="+", metavar="RANK", help="memory of a transformer layer on fake tensors"
    )
    return own.parse_args(arguments)


def sample(job: LongRun, wanted: list[int]) -> int:
    """Processor seconds of some ranks in this process, after a first one that fills the caches."""
    torch.set_num_threads(1)
    ranks, pending = job.ranks(), PendingGradients(job.head_dim)
    ledger = Ledger(job.source, job.checked_rows, job.ring_size)
    for number, rank in enumerate([wanted[0], *wanted]):
        began = time.process_time()
        ledger.note_all(rank, job.parts(ranks, rank, pending))
        if number:
            row = {"rank": rank, "cpu_seconds": round(time.process_time() - began, 2)}
            print_row(row | {"peak_rss_mib": round(peak_rss_mib(), 1)})
    return 0


def fake_layers(job: LongRun, wanted: list[int]) -> int:
    """Peak memory of a whole layer, forward and backward, on some ranks of the real plan."""
    for rank in wanted:
        began = time.perf_counter()
        mib = fake_layer(job, rank)
        row = {"rank": rank, "ranks": job.ring_size, "heads": HEADS, "peak_mib": mib}
        print_row(row | {"seconds": round(time.perf_counter() - began, 1)})
    return 0


def whole(job: LongRun, options: argparse.Namespace) -> int:
    """All ranks, then the comparison; one JSON line."""
    began, peaks = time.perf_counter(), dict.fromkeys(range(job.workers), 0.0)
    done = sum(int(job.restored(options.state, worker)[0].done.sum()) for worker in range(job.workers))
    with tqdm(total=job.ring_size, initial=done, unit="rank", desc="ranks", smoothing=0.05) as bar:
        word: Progress
        for word in run(job, options.state, options.save_every):
            peaks[word.worker] = word.peak_rss_mib
            bar.update(word.ring_rank >= 0)
            bar.set_postfix_str(" ".join(f"{peak:.0f} MiB" for peak in peaks.values()))
    seconds = time.perf_counter() - began
    ledger = collect(job, options.state)
    row = {
        "tokens": job.tokens,
        "ranks": job.ring_size,
        "branches": len(job.pattern.segment_lengths),
        "backward": job.backward,
        "seconds_here": round(seconds, 1),
        "ranks_here": job.ring_size - done,
        "peak_rss_mib": [round(peak, 1) for peak in peaks.values()],
        "checksums": ledger.totals,
        "rows_checked": len(ledger.rows),
        "errors": errors(job, ledger),
    }
    partial = options.state / "result.partial"
    partial.write_text(json.dumps(row, indent=1))
    partial.replace(options.state / "result.json")
    print(json.dumps(row))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The whole run, or a sample."""
    options = options_of(arguments)
    try:
        job = LongRun(
            options.tokens, options.ranks, options.head_dim, options.first_segment, options.growth,
            options.seed, options.backward, options.query_block, options.workers, options.check_rows,
        )  # fmt: skip
        if options.plan:  # a Llama of 8 billion parameters with this pattern, a device for each rank
            dilated = job.pattern.segment_lengths, job.pattern.dilation_rates
            pattern = dict(zip(("segment_lengths", "dilation_rates"), dilated, strict=True))
            sizes = ["--tokens", str(job.tokens), "--devices", str(job.ring_size), "--hardware", options.plan]
            sizes += ["--pattern", json.dumps(pattern)]
            return ds_ring_cli.main(["plan", *sizes, *LLAMA_8B, "--fit"])
        if options.fake:
            return fake_layers(job, options.fake)
        return sample(job, options.sample) if options.sample else whole(job, options)
    except RingError as error:
        print(f"billion_tokens: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the workers, which import torch anew
    sys.exit(main())
