"""Model training steps and longest sequences that others have published, by the planner itself.

Owns torch's context parallelism as TRL trains with it, steps of DeepSpeed Ulysses, lengths of ALST and UPipe.
Seconds of a step are the planner's (`plan/estimate.py`) with the rates of the row's kernel, and what torch's
ring adds to them.
"""

from __future__ import annotations

from dataclasses import replace

from ds_ring.masks.catalog import Causal
from ds_ring_launcher.plan.compare import FINE, GIB, compute_torch_waiting, get_torch_peak
from ds_ring_launcher.plan.estimate import Estimate, estimate, fits, training_step
from ds_ring_launcher.plan.hardware import AttentionEfficiency, Hardware, get_collective_rate, read_hardware
from ds_ring_launcher.plan.model_file import ModelShape
from ds_ring_launcher.plan.model_memory import LocalTokens, Zero
from ds_ring_launcher.plan.options import MAX_TOKENS, longest_that
from ds_ring_launcher.plan.pass_memory import PassMemory
from ds_ring_launcher.plan.training_setting import TrainingSetting
from published.table import Kernel, LengthRow, Machine, StepRow, Table, rate_at

MERGE_BYTES = 38  # of out in torch's `out - sigmoid(.) * (out - block)` in float32, block cast before it
CAST_AND_ADD_BYTES = 18  # of torch's `a += b.to(float32)`: a copy of b, then the sum
FLOAT, ELEMENT = 4, 2


def make_published_setting(table: Table, row: StepRow) -> TrainingSetting:
    """Return the setting of a row: one ring of all devices, ZeRO 3, everything computed again."""
    model = ModelShape(**table.models[row.model])
    hardware = with_kernel(read_hardware("h100_flash3"), table.kernels[row.kernel])
    return TrainingSetting(
        tokens=row.tokens, ring_size=row.devices, ulysses_size=1, model=model, pattern=Causal(),
        layout="auto", zero=Zero(3, row.devices, ELEMENT), dtype="bfloat16", hardware=hardware,
        checkpointing=True, recompute_attention=1.0, loss_tokens=256, offload_checkpoints=True,
    )  # fmt: skip


def with_kernel(hardware: Hardware, kernel: Kernel) -> Hardware:
    """Return hardware whose attention runs at the rates of another kernel, which long hops reach."""
    peak = hardware.flops("bfloat16")
    forward, backward = (kernel.curve(way).full for way in ("forward", "backward"))
    rates = (rate_at(curve, max(curve)) / peak for curve in (forward, backward))
    efficiency = AttentionEfficiency(**dict(zip(("forward", "backward"), rates, strict=True)))
    return hardware.model_copy(update={"attention_efficiency": efficiency})


def torch_step(table: Table, row: StepRow) -> tuple[float, float]:
    """Return seconds and peak (GB) of a step of torch's context parallelism.

    Read in torch/distributed/tensor/experimental/_context_parallel.
    K and V of all ranks are gathered behind the first hop's kernel: once forward, once more where it is
    computed again, once backward. Every hop merges out in float32 by torch operations, or casts and adds dq,
    dk and dv; dK and dV travel to the next rank behind the next hop's kernel, the last ones behind none.
    """
    setting = make_published_setting(table, row)
    planned = estimate(setting)
    seconds = planned.step_s - planned.host_s + torch_extra_s(planned, table.machines["h100"])
    return seconds, get_torch_peak(setting) / 1e9


def torch_extra_s(planned: Estimate, machine: Machine) -> float:
    """Return the seconds of a step that torch's ring takes beside kernels and matrices."""
    setting = planned.setting
    model, ranks = setting.model, setting.devices
    local = setting.tokens // ranks
    out = local * model.heads * model.head_dim
    kv = 2 * local * model.kv_heads * model.head_dim
    inside = ranks <= machine.node
    rate = machine.link if inside else get_collective_rate(machine.link, machine.node, machine.network)
    gather = ELEMENT * kv * (ranks - 1) / rate
    merge = MERGE_BYTES * out * (ranks - 1) / machine.memory
    added = CAST_AND_ADD_BYTES * (out + kv) * ranks / machine.memory
    hop = FLOAT * kv / (machine.link if inside else machine.network)
    attention = planned.attention
    kernels = tuple(seconds / model.layers / ranks for seconds in (attention.forward_s, attention.backward_s))
    waiting = compute_torch_waiting(ranks, 2, gather, hop, kernels)
    return model.layers * (waiting + 2 * merge + added)


def longest_tokens(table: Table, row: LengthRow) -> int:
    """Return the longest sequence of ALST, or of UPipe, which has one query head of a rank at a time.

    ALST (section 3): the loss in tiles of a GiB of float32 logits, MLPs in tiles of `hidden` tokens,
    checkpoints and ZeRO 3's optimizer on the host, on one device the parameters as well; heads by all-to-all.
    """
    model, devices = ModelShape(**table.models[row.model]), row.devices
    zero = Zero(3, devices, ELEMENT, offload_optimizer=True, offload_parameters=devices == 1)
    hardware = read_hardware("h100_flash3")
    setting = TrainingSetting(
        tokens=devices, ring_size=1, ulysses_size=devices, model=model, pattern=Causal(), layout="auto",
        zero=zero, dtype="bfloat16", hardware=hardware, checkpointing=True, recompute_attention=1.0,
        loss_tokens=GIB // (FLOAT * model.vocab), mlp_tokens=model.hidden, offload_checkpoints=True,
    )  # fmt: skip
    heads = 1 if row.method == "UPipe" else max(model.heads // devices, 1)
    kv_heads = 1 if row.method == "UPipe" else max(model.kv_heads // devices, 1)

    def holds(tokens: int) -> bool:
        ring = PassMemory(0, tokens * heads * model.head_dim * FLOAT, 0)  # FlashAttention sums dq in float32
        local = LocalTokens(-(-tokens // devices), tokens, heads, kv_heads)
        step = replace(training_step(replace(setting, tokens=tokens), 1, ring), tokens=local)
        return fits(setting, step.moments())

    falls = [devices * setting.mlp_tokens + 1] if setting.mlp_tokens is not None else []
    return longest_that(holds, falls, MAX_TOKENS, 1, FINE)


def ulysses_tflops(table: Table, row: StepRow) -> float:
    """Return the TFLOPS that Megatron's formula gives a step of DeepSpeed Ulysses on A100.

    The formula counts the whole matrix of attention and four passes of everything, the repeated one included;
    a kernel skips the masked half. Matrices at the planner's share of the peak; states are taken as hidden.
    """
    model, kernel = ModelShape(**table.models[row.model]), table.kernels[row.kernel]
    hardware = read_hardware("a100")
    dense = 24.0 * model.hidden**2
    attention = 4.0 * row.tokens * model.heads * model.head_dim
    rate = rate_at(kernel.curve("both").causal, row.tokens)
    swaps = 3 * 8 * model.hidden * ELEMENT * (row.devices - 1) / row.devices / table.machines["a100"].network
    seconds = 4 * dense / (hardware.flops("bfloat16") * hardware.matmul_efficiency) + swaps
    seconds += 4.5 * attention / 2 / rate
    return 4 * (dense + attention) / seconds / 1e12
