"""Rates into files, tests/gpu, the longest sequence, and virtual rings."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu_rates import flex_rates, kernel_rates, ring_row
from benchmarks.measuring import ResultRow
from common import ROOT, provenance

from ds_ring.measure.rates import RATES
from ds_ring.plugin import KERNELS
from ds_ring_launcher.commands.tune import declare
from ds_ring_launcher.run.local_ranks import run_ranks
from ds_ring_launcher.tune.__main__ import run as tune

from .kernels import get_shape, is_cuda
from .longest import Trial, attempt
from .overlap import OUTPUT

SIZES = ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab")
QWEN3 = dict(zip(SIZES, (1, 4096, 32, 8, 12_288, 151_936), strict=True))
SMALL = dict(zip(SIZES, (1, 64, 2, 1, 128, 512), strict=True))
TUNE_S, TRIAL_S = 110.0, 90.0


# Blocks of queries and of keys, stages, warps: forward, backward. From 64 rows on Hopper's matrix units work.
TRIED = {
    64: (
        ((128, 128, 3, 8), (64, 64, 3, 4)), ((128, 64, 3, 4), (64, 128, 2, 8)),
        ((64, 128, 3, 4), (64, 128, 3, 4)),
    ),
    128: (
        ((128, 128, 2, 8), (64, 64, 2, 4)), ((128, 64, 2, 8), (64, 64, 2, 8)),
        ((128, 64, 3, 4), (64, 128, 2, 8)), ((64, 64, 3, 4), (64, 64, 3, 4)),
        ((128, 128, 3, 8), (64, 64, 3, 8)), ((128, 32, 3, 8), (64, 128, 3, 8)),
    ),
    256: (((128, 64, 2, 8), (64, 64, 2, 8)), ((128, 32, 2, 8), (64, 64, 1, 8))),
}  # fmt: skip


def rates(device: str, kind: str, kernel: str) -> Iterator[ResultRow]:
    """Yield TFLOP/s of a kernel on a kind of tile, and add them to rates.json for `ds_ring/measure`."""
    size, rounds = (32_768, 5) if is_cuda(device) else (256, 1)
    results = kernel_rates(get_shape(device), size, rounds, {kind}, {kernel})
    yield from results
    write_rates(provenance(device)["hardware"]["device"], results, Path(os.environ[OUTPUT], "rates.json"))


def write_rates(device: str, rows: Sequence[ResultRow], path: Path) -> None:
    """Write the rates of a device, in addition to its others and to those that `ds_ring/measure` has."""
    by_tiles: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.case["kernel"] in KERNELS and "refused" not in row.results:
            both = [float(row.results[f"{way}_tflops"]) for way in ("forward", "backward")]
            by_tiles.setdefault(row.case["tiles"], {})[row.case["kernel"]] = both
    source = path if path.is_file() else RATES
    known = json.loads(source.read_text()) if source.is_file() else {}
    earlier = known.get(device, {})
    by_tiles = earlier | {tiles: earlier.get(tiles, {}) | kernels for tiles, kernels in by_tiles.items()}
    path.write_text(json.dumps(known | {device: by_tiles}, indent=1, sort_keys=True) + "\n")


def flex_blocks(device: str, head_dim: int) -> Iterator[ResultRow]:
    """Yield rates of flex with our blocks, and with Inductor's."""
    if not is_cuda(device):
        yield ResultRow({"head_dim": head_dim}, {"not_shown": "needs CUDA"})
        return
    yield from flex_rates(get_shape(device)._replace(head_dim=head_dim), 16_384, 5, TRIED[head_dim])


def hardware(device: str) -> Iterator[ResultRow]:
    """Let `ds-ring tune` write hardware.yaml, which `ds-ring plan --hardware` reads."""
    shape, path = get_shape(device), Path(os.environ[OUTPUT], "hardware.yaml")
    tokens, dtype = (16_384, "bfloat16") if is_cuda(device) else (128, "float32")
    parser = argparse.ArgumentParser()
    declare(parser)
    sizes = f"--heads {shape.heads} --kv-heads {shape.kv_heads} --head-dim {shape.head_dim} --tokens {tokens}"
    words = f"--device {device} --dtype {dtype} --hardware-output {path} {sizes}".split()
    run_ranks(tune, 1, (parser.parse_args(words),), threads=1, deadline_s=TUNE_S, imported=True)
    yield ResultRow({"file": path.name}, {"keys": _keys(path)})


def _keys(path: Path) -> str:
    """Return the numbers of a YAML file in one line."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return "; ".join(line.strip() for line in lines if re.search(r": [\d.e+]+$", line))


def gpu_tests(device: str, file: str, limit_s: float) -> Iterator[ResultRow]:
    """Run a file of tests/gpu, with each result in tests_gpu.log; yield the counts, and each failure."""
    workers = max(1, min(6, (os.cpu_count() or 2) // 2)) if is_cuda(device) else 0
    command = [
        sys.executable, "-m", "pytest", f"tests/gpu/{file}", "--day", "-v", "-n", str(workers), "--tb=short",
        "-o", "addopts=-rfE",
    ]  # fmt: skip
    log = Path(os.environ[OUTPUT], "tests_gpu.log")
    begin = log.stat().st_size if log.is_file() else 0
    with log.open("ab") as output:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
    text = log.read_bytes()[begin:].decode(errors="replace")
    lines = text.strip().splitlines() or ["nothing printed"]
    if process.returncode is None:
        counts = {word: sum(word in line for line in lines) for word in ("PASSED", "FAILED", "SKIPPED")}
        lines.append(f"stopped after {limit_s:g} s: {counts['PASSED']} passed, {counts['FAILED']} failed")
    yield tests_row(file, lines[-1].strip("= "), process.returncode or 0, device)
    yield from (
        ResultRow({"file": file}, {"result": printed[:100]}, printed[:300])
        for printed in lines
        if "FAILED tests" in printed
    )


def tests_row(name: str, counts: str, status: int, device: str) -> ResultRow:
    """Return the row of pytest's last line; on a GPU a run in which no test passed is wrong."""
    wrong = counts if status else ""
    if is_cuda(device) and not re.search(r"\b[1-9]\d* passed", counts):
        wrong = f"no test of tests/gpu/{name} passed: {counts}"
    return ResultRow({"file": name}, {"result": counts, "exit_status": status}, wrong)


def longest(device: str) -> Iterator[ResultRow]:
    """Yield each length that is tried with real training steps of one layer, and the longest."""
    sizes, good, bad, tokens = (QWEN3, 0, None, 131_072) if is_cuda(device) else (SMALL, 0, 512, 256)
    section = {"long_sequence": "auto", "pattern": {}}
    while bad is None or bad - good > good // 5:
        trial = Trial(device, 1, tokens, sizes, section, 3, False, 4.0)
        row = attempt(trial, TRIAL_S, imported=True)
        yield ResultRow({"tokens": row.pop("tokens")}, row)
        good, bad = (tokens, bad) if row["fits"] else (good, tokens)
        if not good or not is_cuda(device):
            break
        tokens = 2 * good if bad is None else (good + bad) // 2 // 128 * 128
    yield ResultRow(
        {"tokens": "longest"}, {"tokens_that_fit": good}, "" if good else "the first does not fit"
    )


def virtual(device: str, ring_size: int) -> Iterator[ResultRow]:
    """Yield the time of the hops of a virtual ring's slowest rank against one device's attention."""
    tokens, kernels = (131_072, ("flash", "flex")) if is_cuda(device) else (512, ("flash", "cpu"))
    for kernel in kernels:
        yield ring_row(get_shape(device), tokens, ring_size, kernel, 5 if is_cuda(device) else 1)
