"""The rows of tools/gpu_first.py in the order of what they are worth. Pure data: imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

PARTS = {
    "questions": "Questions of tools/results/gpu_h200.md", "longest": "The longest sequence of one device",
    "virtual": "A virtual ring against one device", "versions": "Versions and implementations",
    "kernels": "Kernels: exactness and ten timed passes", "overlap": "A ring that sends to itself",
    "trace": "One profiler trace", "host": "Host, merge, probes",
    "nccl": "NCCL between ranks on one GPU", "models": "Small models on a ring of two",
    "rates": "Rates by kind of tile", "tests": "tests/gpu",
}  # fmt: skip
TOTAL_S, CALLS = 590.0, 2  # of a borrowed GPU, and in how many calls
# What a row of a part is expected to take, for those without a budget of their own; of the H200's two calls.
BUDGETS = {
    "versions": 4.0,
    "kernels": 7.0,
    "overlap": 6.0,
    "trace": 8.0,
    "host": 4.0,
    "nccl": 15.0,
    "models": 5.0,
    "rates": 8.0,
    "tests": 40.0,
    "longest": 60.0,
    "virtual": 12.0,
}
KERNELS = {"cuda": ("FA2", "cuDNN", "FA3", "flex", "FA4"), "cpu": ("flash", "cpu")}
# A softmax with sinks, windows, chunks, ALiBi; selected and compressed keys; recurrences after convolutions.
MODELS = (
    "qwen3_5_text", "gpt_oss", "deepseek_v32", "mamba2", "gemma3_text", "deepseek_v4", "bloom", "lfm2",
    "rwkv", "kimi_linear", "nemotron_h", "llama4_text", "recurrent_gemma", "minimax",
)  # fmt: skip
ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}


class Row(NamedTuple):
    """Describe a row: one or more results, computed by one call.

    Attributes:
        part: a key of PARTS.
        call: "module.function" of this package; it takes the device and `arguments`, and yields results.
        seconds: a row that takes longer is ended, and costs no other row.
        budget: the seconds that it is expected to take.
        environment: of the process. Rows of one part with the same environment share a process.
    """

    part: str
    name: str
    call: str
    arguments: Mapping[str, Any]
    seconds: float
    budget: float
    environment: Mapping[str, str]


def rows(device: str) -> Iterator[Row]:
    """Yield all rows, the most important ones first."""

    def row(
        part: str, name: str, call: str, seconds: float, environment: Any = None, budget: float = 0.0,
        **arguments: Any,
    ) -> Row:  # fmt: skip
        return Row(part, name, call, arguments, seconds, budget or BUDGETS[part], environment or {})

    def ask(name: str, call: str, budget: float, environment: Any = None, **arguments: Any) -> Row:
        return row("questions", name, f"questions.{call}", 6 * budget + 10, environment, budget, **arguments)

    # A fault of an asynchronous kernel would be raised in a later one: those that may fail wait.
    waits = {"CUDA_LAUNCH_BLOCKING": "1"}
    for mask in ("causal", "LongNet"):
        yield ask(f"flex, old tables, {mask}", "check_tables", 4, waits, mask=mask, old=True)
    for mask in ("causal", "LongNet"):
        yield ask(f"flex, {mask}", "check_tables", 3, mask=mask, old=False)
    if device == "cuda":
        yield row(
            "questions", "test_flex.py", "machine.gpu_tests", 30, None, 6, file="test_flex.py", limit_s=20.0
        )
    yield ask(
        "flex, LongNet, 32 Ki, old tables", "run_long_pass", 8, waits, kernel="flex", mask="LongNet", old=True
    )
    yield ask("flex, LongNet, 32 Ki", "run_long_pass", 8, waits, kernel="flex", mask="LongNet")
    for mask in ("documents", "LongNet"):
        yield ask(f"cuDNN, {mask}, 32 Ki", "run_long_pass", 7, kernel="cuDNN", mask=mask)
    for queries, keys in ((64, 64), (64, 192), (64, 128), (1, 128)):
        yield ask(
            f"cuDNN, {queries} x {keys}, low lse", "count_faults_at_low_lse", 0.5, queries=queries, keys=keys
        )
    for mask in ("causal", "window"):
        yield ask(f"cuDNN, layouts, {mask}", "check_layouts", 12.5, mask=mask)
    for kernel in ("FA2", "cuDNN"):
        yield ask(f"{kernel}, a rank's pass", "time_production", 5, kernel=kernel)
    for blocks in ("ours", "Inductor's"):
        yield ask(f"flex backward, blocks {blocks}", "time_flex_backward", 20, blocks=blocks)
    for count in (4095, 4096):
        yield ask(f"FA2, {count} sequences", "check_sequences", 2.5, count=count)
    yield row(
        "questions", "test_merge.py", "machine.gpu_tests", 75, None, 20, file="test_merge.py", limit_s=60.0
    )
    yield row("longest", "Qwen3-8B's layer", "machine.longest", 150)
    for ring_size in (1, 8, 16):
        yield row("virtual", f"ring {ring_size}", "machine.virtual", 60, ring_size=ring_size)

    yield row("versions", "packages", "kernels.packages", 30)
    yield row("versions", "ceilings", "kernels.ceilings", 30)
    for head_dim, value_dim in ((128, 128), (64, 64), (192, 128), (256, 256)):
        name = f"implementation ({head_dim}, {value_dim})"
        yield row("versions", name, "kernels.implementation", 60, head_dim=head_dim, value_dim=value_dim)
    yield row("kernels", "float64 reference", "kernels.make_references", 60)
    for step in ("exact", "timed"):
        for kernel in KERNELS[device]:
            yield row("kernels", f"{kernel} {step}", f"kernels.{step}", 90, kernel=kernel)
    for kernel in ("cuDNN-flex", "flex FLASH") if device == "cuda" else ():  # refused without their packages
        yield row("kernels", f"{kernel} exact", "kernels.exact", 90, None, 5, kernel=kernel)
    for kernel in ("flash", "flex") if device == "cuda" else KERNELS["cpu"]:
        yield row("overlap", f"exact, {kernel}", "overlap.exact", 90, kernel=kernel)
    for cluster in (None, "0", "4"):
        environment = {} if cluster is None else {"NCCL_CGA_CLUSTER_SIZE": cluster}
        for margin in (8, 0, 4, 16) if cluster is None else (8,):
            name = f"sm_margin {margin}, cluster {cluster or 'unset'}"
            yield row("overlap", name, "overlap.measure", 60, environment, sm_margin=margin, cluster=cluster)
    yield row("trace", "trace", "overlap.trace", 60)
    for kernel in ("flash", "flex") if device == "cuda" else KERNELS["cpu"]:
        yield row("host", f"host, {kernel}", "probes.host", 60, kernel=kernel)
    yield row("host", "merge", "probes.merge", 30)
    for probe in ("idle", "launching", "capture"):
        yield row("host", f"probe {probe}", "probes.probe", 30, what=probe)
    for ranks in (2, 4):
        yield row("nccl", f"ring, {ranks} ranks", "ranks.ring", 60, ONE_GPU, ranks=ranks)
    yield row("nccl", "a rank is killed", "ranks.killed", 90, ONE_GPU, ranks=3)
    yield row("nccl", "DeepSpeed, ZeRO 3", "ranks.deepspeed", 120, ONE_GPU, ranks=2)
    for model_type in MODELS:
        yield row("models", model_type, "ranks.model", 60, ONE_GPU, ranks=2, model_type=model_type)
    yield row("rates", "hardware file", "machine.hardware", 120)  # forks: before this process uses CUDA
    for kind in ("full", "causal", "window", "documents", "LongNet"):
        for kernel in ("flash", "flex") if device == "cuda" else KERNELS["cpu"]:
            yield row("rates", f"{kind}, {kernel}", "machine.rates", 60, kind=kind, kernel=kernel)
    for head_dim in (128, 64, 256):
        yield row("rates", f"blocks of flex, {head_dim}", "machine.flex_blocks", 120, head_dim=head_dim)
    of_tests = {"host_heads": 30.0, "flash": 110.0, "flex": 150.0}
    for name, most in of_tests.items() if device == "cuda" else ():
        file = f"test_{name}.py"
        yield row("tests", file, "machine.gpu_tests", most + 15, file=file, limit_s=most)


def get_call(spent: float) -> str:
    """Return in which call of the tool a row ends that is over after so many seconds, by the budgets."""
    number = int(spent // (TOTAL_S / CALLS)) + 1
    return f"call {number}" if number <= CALLS else "beyond the budget"
