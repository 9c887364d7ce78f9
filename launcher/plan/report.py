"""Print what `ds-ring plan` found, as tables for people and as JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ds_ring.schedule.choose import in_words

from ..tables import console as make_console
from ..tables import print_table
from .advice import Advice, Reach, latents_on_the_wire
from .compare import ComparisonRow
from .estimate import Estimate
from .layer_passes import LayerPass
from .options import json_of
from .other_layers import LayerCost

GIB = 2**30


def as_json(found: Estimate, advice: Advice, rows: Sequence[ComparisonRow] = ()) -> str:
    """Return one object; sizes in bytes, times in seconds."""
    compared = {"compared": [row._asdict() for row in rows]} if rows else {}
    return json.dumps(as_dict(found, advice) | compared, indent=2)


def as_dict(found: Estimate, advice: Advice) -> dict[str, Any]:
    """Return everything that the tables have, in full precision."""
    setting, latents = found.setting, latents_on_the_wire(found)
    return {
        "hardware": setting.hardware.name,
        "devices": setting.devices,
        "ring_size": setting.ring_size,
        "ulysses_size": setting.ulysses_size,
        "tokens": setting.tokens,
        "local_tokens": found.layout.local_tokens,
        "batch": setting.batch,
        "layout": found.layout.name,
        "kernel": setting.kernel_that_runs,
        "tokens_per_device": setting.tokens // (setting.ring_size * setting.ulysses_size),
        "pattern": in_words(setting.mix),
        "dtype": setting.dtype,
        "zero_stage": setting.zero.stage,
        "activation_checkpointing": setting.checkpointing,
        "recompute_attention": float(setting.recompute_attention),
        "tiled_loss_tokens": setting.loss_tokens,
        "tiled_mlp_tokens": setting.mlp_tokens,
        "offload_checkpoints": setting.offload_checkpoints,
        "offload_attention": setting.offload_attention,
        "offload_optimizer": setting.zero.offload_optimizer,
        "offload_param": setting.zero.offload_parameters,
        "deepspeed_json": json_of(setting),
        "parameters": setting.model.parameters,
        "memory": {
            "peak_bytes": found.peak.total,
            "usable_bytes": int(setting.usable_bytes),
            "fits": found.fits,
            "moment": found.peak.name,
            "components": {name: size for name, size in found.peak.components.items() if size},
            "moments": {moment.name: moment.total for moment in found.moments},
        },
        "host": {
            "node_bytes": found.node_host_bytes,
            "usable_node_bytes": _usable_of_node(found),
            "components": {name: size for name, size in found.host_peak.host.items() if size},
        },
        "attention": _pass(max(found.passes, key=lambda one: one.cost.seconds)) if found.passes else None,
        "attention_by_pattern": [
            {"pattern": str(one.pattern), "layers": one.layers} | _pass(one) for one in found.passes
        ],
        "other_layers": [_layer(one, found) for one in found.other_layers],
        "step": {
            "attention_s": found.attention_s,
            "exposed_s": found.exposed_s,
            "other_layers_s": found.other_layers_s,
            "swap_bytes_sent": found.swap_bytes,
            "swap_s": found.swap_s,
            "dense_flops": found.dense_flops,
            "dense_s": found.dense_s,
            "zero_bytes_sent": found.zero_bytes,
            "zero_s": found.zero_s,
            "host_bytes": found.host_bytes,
            "host_s": found.host_s,
            "total_s": found.step_s,
        },
        "ranks_looked_at": found.ranks,
        "longest_tokens": advice.reach.longest_tokens,
        "fewest_devices": advice.reach.fewest_devices,
        "with_fit_options": None if advice.fit_reach is None else advice.fit_reach._asdict(),
        "hiding_tokens_per_rank": advice.hiding.tokens,
        "never_hides": advice.hiding.never,
        "latents": None if latents is None else latents._asdict(),
        "warnings": list(advice.warnings),
    }


def _pass(one: LayerPass) -> dict[str, Any]:
    """Return what a layer's passes cost; the costliest layer's where patterns differ."""
    cost = one.cost
    return {
        "pairs": cost.pairs,
        "executed_pairs": cost.executed,
        "forward_bytes_sent": cost.forward_bytes,
        "backward_bytes_sent": cost.backward_bytes,
        "forward_s": cost.forward_s,
        "backward_s": cost.backward_s,
        "exposed_s": cost.exposed_s,
        "hops": cost.hops,
        "exposed_hops": cost.exposed_hops,
    }


def _layer(one: LayerCost, found: Estimate) -> dict[str, Any]:
    """Return what a layer of a kind costs; in a step each sends its forward bytes again if checkpointed."""
    forward, backward = one.bytes_sent
    return {
        "kind": one.kind.name,
        "layers": one.layers,
        "messages": {part.what: {"forward": part.forward, "backward": part.backward} for part in one.sent},
        "forward_bytes_sent": forward,
        "backward_bytes_sent": backward,
        "step_bytes_sent": one.layers * ((1 + found.setting.checkpointing) * forward + backward),
        "forward_s": one.forward_s,
        "backward_s": one.backward_s,
        "waiting_s": one.waiting_s,
    }


def _usable_of_node(found: Estimate) -> int | None:
    usable = found.setting.usable_host_bytes
    return None if usable is None else int(usable * found.setting.devices_of_node)


def print_report(found: Estimate, advice: Advice, rows: Sequence[ComparisonRow] = ()) -> None:
    """Print the tables, then the warnings, on stdout."""
    console = make_console()
    setting = found.setting
    ring = f"ring {setting.ring_size} x Ulysses {setting.ulysses_size}"
    data = setting.devices // (setting.ring_size * setting.ulysses_size)
    console.print(
        f"{_count(setting.model.parameters)} parameters, {setting.tokens:,} tokens on"
        f" {setting.devices} x {setting.hardware.name}: {ring} x data {data}, {found.layout.name} layout,"
        f" kernel {setting.kernel_that_runs},"
        f" ZeRO {setting.zero.stage}, {setting.dtype};"
        f" {setting.tokens // (setting.ring_size * setting.ulysses_size):,} tokens a device"
    )
    if len(setting.mix) > 1:
        console.print(f"attention: {in_words(setting.mix)}", markup=False)
    options = json_of(setting)
    if options or setting.checkpointing:
        how = "activation checkpointing; " if setting.checkpointing else ""
        console.print(f"with {how}in the JSON {json.dumps(options)}", markup=False)
    print_table(_memory_table(found))
    print_table(_cost_table(found))
    if rows:
        print_table(_compared_table(rows))
        for row in rows:
            console.print(_options_of(row), markup=False)
    own, more = advice.reach, advice.fit_reach
    longest, fewest = f"{own.longest_tokens:,} tokens with these options", _fewest(own)
    if more is not None and more.longest_options != own.longest_options:
        longest += f"; {more.longest_tokens:,} with {_added(more.longest_options, own.longest_options)}"
    if more is not None and more.fewest_devices != own.fewest_devices:
        fewest += f"; {_fewest(more, own)}"
    console.print(f"longest sequence on these devices: {longest}", markup=False)
    console.print(f"fewest devices for these tokens (one ring): {fewest}", markup=False)
    tokens, never = advice.hiding
    hides = f"never: {never}" if tokens is None else f"T/P >= {tokens:,} (here {found.layout.local_tokens:,})"
    console.print(f"transfers hide behind compute: {hides}")
    for warning in advice.warnings:
        console.print(f"[yellow]warning:[/] {warning}")


def _count(number: int) -> str:
    """Return a number in words of the size that it has."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return f"{number:,}"


def _added(options: Sequence[str], before: Sequence[str]) -> str:
    """Return the options that another set has more, as arguments; "no option more" where there is none."""
    return " ".join(one for one in options if one not in before) or "no option more"


def _fewest(reach: Reach, before: Reach | None = None) -> str:
    how = "these options" if before is None else _added(reach.fewest_options, before.fewest_options)
    return f"{'none up to 16384' if reach.fewest_devices is None else f'{reach.fewest_devices:,}'} with {how}"


def _options_of(row: ComparisonRow) -> str:
    """Return which options a row's figures have."""
    own = " ".join(row.options) or "no option that saves memory"
    if row.most_options is None or row.most_options == row.options:
        return f"{row.method}: {own}"
    return f"{row.method}: {own}; longest with {_added(row.most_options, row.options)}"


def _unit(size: int) -> tuple[str, int]:
    """Return the unit of a table whose largest figure this is."""
    return ("GiB", GIB) if size >= 4 * GIB else ("MiB", 2**20)


def _memory_table(found: Estimate) -> Table:
    label, unit = _unit(found.peak.total)
    table = Table("memory of a device", label, title=f"highest at: {found.peak.name}", title_justify="left")
    table.columns[1].justify = "right"
    for name, size in sorted(found.peak.components.items(), key=lambda item: -item[1]):
        if size:
            table.add_row(name, f"{size / unit:.3f}")
    table.add_section()
    usable = found.setting.usable_bytes / unit
    table.add_row(f"peak, of {usable:,.1f} that tensors can have", f"{found.peak.total / unit:.3f}")
    if found.node_host_bytes:
        table.add_section()
        devices = found.setting.devices_of_node
        for name, size in found.host_peak.host.items():
            if size:
                table.add_row(f"{name}, {devices} devices of a node", f"{size * devices / unit:.3f}")
        whole = _usable_of_node(found)
        limit = "" if whole is None else f", of {whole / unit:,.1f} that tensors can have"
        table.add_row(f"host of a node{limit}", f"{found.node_host_bytes / unit:.3f}")
    return table


def _size(size: int) -> str:
    name, unit = _unit(size)
    return f"{size / unit:.3g} {name}"


def _cost_table(found: Estimate) -> Table:
    """Build the table of costs per device and step."""
    cost = found.attention
    table = Table("cost of a step, slowest device", "amount", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    share = cost.exposed_s / cost.seconds if cost.seconds else 0.0
    attended = cost.pairs / max(cost.executed, 1)
    table.add_row("attention", f"{cost.pairs:.3g} pairs", f"{found.attention_s:.3g}")
    for one in found.passes if len(found.passes) > 1 else ():
        pairs, seconds = one.layers * one.cost.pairs, one.layers * one.cost.seconds
        table.add_row(f"  {one.layers} x {one.pattern}", f"{pairs:.3g} pairs", f"{seconds:.3g}")
    table.add_row("  of it waiting for K/V", f"{share:.1%}", f"{found.exposed_s:.3g}")
    table.add_row("  attended of executed pairs", f"{attended:.1%}", "")
    if found.swap_bytes:
        table.add_row("  Ulysses' all-to-alls", _size(found.swap_bytes), f"{found.swap_s:.3g}")
    table.add_row("  K/V, dK/dV sent", _size(cost.forward_bytes + cost.backward_bytes), "")
    for layer in found.other_layers:
        size, count = _layer(layer, found)["step_bytes_sent"], layer.layers
        seconds = count * ((1 + found.setting.checkpointing) * layer.forward_s + layer.backward_s)
        table.add_row(f"{count} x {layer.kind.name}", f"{_size(size)} sent", f"{seconds:.3g}")
    table.add_row("other matrices", f"{found.dense_flops:.3g} FLOPs", f"{found.dense_s:.3g}")
    table.add_row("ZeRO, not overlapped", _size(found.zero_bytes), f"{found.zero_s:.3g}")
    if found.host_bytes or found.host_s:
        table.add_row("host, not overlapped", _size(found.host_bytes), f"{found.host_s:.3g}")
    table.add_section()
    table.add_row("step", "", f"{found.step_s:.3g}")
    return table


def _compared_table(rows: Sequence[ComparisonRow]) -> Table:
    """Build the table of other methods; `launcher/plan/compare.py` has the sources of their formulas."""
    label, unit = _unit(max(row.peak_bytes for row in rows))
    sizes = (label, f"host {label}", f"sent {label}")
    most = ("longest, any options",) if rows[0].most_tokens is not None else ()
    table = Table(
        "method", "ranks", *sizes, "longest tokens", *most, title="by published formulas, options below"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        figures = [f"{size / unit:,.1f}" for size in (row.peak_bytes, row.host_bytes, row.sent_bytes)]
        mark = "" if row.fits else " (does not fit)"
        longest = [f"{tokens:,}" for tokens in (row.longest_tokens, row.most_tokens) if tokens is not None]
        table.add_row(row.method + mark, str(row.ranks), *figures, *longest)
    return table
