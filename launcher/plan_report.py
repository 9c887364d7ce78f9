"""Print what `ds-ring plan` found, as tables for people and as JSON for machines."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from ds_ring.estimator.advice import Advice
from ds_ring.estimator.estimate import Estimate
from ds_ring.estimator.remedies import Remedy
from ds_ring.tables import console as make_console
from ds_ring.tables import print_table

GIB = 2**30


def as_json(found: Estimate, advice: Advice) -> str:
    """Return one object; sizes in bytes, times in seconds."""
    return json.dumps(as_dict(found, advice), indent=2)


def as_dict(found: Estimate, advice: Advice) -> dict[str, Any]:
    """Return everything that the tables have, in full precision."""
    setting, cost = found.setting, found.attention
    return {
        "hardware": setting.hardware.name,
        "devices": setting.devices,
        "ring_size": setting.ring_size,
        "ulysses_size": setting.ulysses_size,
        "tokens": setting.tokens,
        "local_tokens": found.layout.local_tokens,
        "batch": setting.batch,
        "layout": found.layout.name,
        "pattern": str(setting.pattern),
        "dtype": setting.dtype,
        "zero_stage": setting.zero.stage,
        "activation_checkpointing": setting.checkpointing,
        "parameters": setting.model.parameters,
        "memory": {
            "peak_bytes": found.peak.total,
            "usable_bytes": int(setting.usable_bytes),
            "fits": found.fits,
            "moment": found.peak.name,
            "components": {name: size for name, size in found.peak.components.items() if size},
            "moments": {moment.name: moment.total for moment in found.moments},
        },
        "attention": {
            "pairs": cost.pairs,
            "executed_pairs": cost.executed,
            "forward_bytes_sent": cost.forward_bytes,
            "backward_bytes_sent": cost.backward_bytes,
            "forward_s": cost.forward_s,
            "backward_s": cost.backward_s,
            "exposed_s": cost.exposed_s,
            "hops": cost.hops,
            "exposed_hops": cost.exposed_hops,
        },
        "step": {
            "attention_s": found.attention_s,
            "exposed_s": found.exposed_s,
            "dense_flops": found.dense_flops,
            "dense_s": found.dense_s,
            "zero_bytes_sent": found.zero_bytes,
            "zero_s": found.zero_s,
            "total_s": found.step_s,
        },
        "ranks_looked_at": found.ranks,
        "longest_tokens": advice.longest_tokens,
        "fewest_devices": advice.fewest_devices,
        "hiding_tokens_per_rank": advice.hiding.tokens,
        "never_hides": advice.hiding.never,
        "remedies": [_remedy(one) for one in advice.remedies],
        "warnings": list(advice.warnings),
    }


def _remedy(one: Remedy) -> dict[str, Any]:
    setting = one.setting
    row = {"change": one.change, "peak_bytes": one.peak_bytes, "step_s": one.step_s}
    return row | {"devices": setting.devices, "tokens": setting.tokens}


def print_report(found: Estimate, advice: Advice) -> None:
    """Print the tables, then the warnings, on stdout."""
    console = make_console()
    setting = found.setting
    ring = f"ring {setting.ring_size} x Ulysses {setting.ulysses_size}"
    data = setting.devices // (setting.ring_size * setting.ulysses_size)
    console.print(
        f"{setting.model.parameters / 1e9:.2f} billion parameters, {setting.tokens:,} tokens on"
        f" {setting.devices} x {setting.hardware.name}: {ring} x data {data}, {found.layout.name} layout,"
        f" ZeRO {setting.zero.stage}, {setting.dtype}"
    )
    print_table(_memory_table(found))
    print_table(_cost_table(found))
    console.print(f"longest sequence on these devices: {advice.longest_tokens:,} tokens")
    fewest = "none up to 16384" if advice.fewest_devices is None else f"{advice.fewest_devices:,}"
    console.print(f"fewest devices for these tokens (one ring): {fewest}")
    tokens, never = advice.hiding
    hides = f"never: {never}" if tokens is None else f"T/P >= {tokens:,} (here {found.layout.local_tokens:,})"
    console.print(f"transfers hide behind compute: {hides}")
    for warning in advice.warnings:
        console.print(f"[yellow]warning:[/] {warning}")
    for remedy in advice.remedies:
        needs = f"{remedy.peak_bytes / GIB:.1f} GiB, a step of {remedy.step_s:.3g} s"
        console.print(f"would fit with {remedy.change}: {needs}", markup=False)
    if not (found.fits or advice.remedies):
        console.print("no change that ds-ring knows makes it fit")


def _memory_table(found: Estimate) -> Table:
    table = Table("memory of a device", "GiB", title=f"highest at: {found.peak.name}", title_justify="left")
    table.columns[1].justify = "right"
    for name, size in sorted(found.peak.components.items(), key=lambda item: -item[1]):
        if size:
            table.add_row(name, f"{size / GIB:.3f}")
    table.add_section()
    usable = found.setting.usable_bytes / GIB
    table.add_row(f"peak, of {usable:.1f} that tensors can have", f"{found.peak.total / GIB:.3f}")
    return table


def _cost_table(found: Estimate) -> Table:
    """Build the table of costs per device and step."""
    layers, cost = found.setting.model.layers, found.attention
    table = Table("cost of a step, slowest device", "amount", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    share = cost.exposed_s / cost.seconds if cost.seconds else 0.0
    attended = cost.pairs / max(cost.executed, 1)
    table.add_row("attention", f"{cost.pairs * layers:.3g} pairs", f"{found.attention_s:.3g}")
    table.add_row("  of it waiting for K/V", f"{share:.1%}", f"{found.exposed_s:.3g}")
    table.add_row("  attended of executed pairs", f"{attended:.1%}", "")
    sent = (cost.forward_bytes + cost.backward_bytes) * layers / GIB
    table.add_row("  K/V, dK/dV sent", f"{sent:.3g} GiB", "")
    table.add_row("other matrices", f"{found.dense_flops:.3g} FLOPs", f"{found.dense_s:.3g}")
    table.add_row("ZeRO, not overlapped", f"{found.zero_bytes / GIB:.3g} GiB", f"{found.zero_s:.3g}")
    table.add_section()
    table.add_row("step", "", f"{found.step_s:.3g}")
    return table
