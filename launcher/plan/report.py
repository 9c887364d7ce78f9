"""Print what `ds-ring plan` found, as tables for people and as JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from ds_ring.schedule.choose import describe_mix

from ..tables import console as make_console
from ..tables import print_table
from .advice import Advice, Reach, describe_plan, get_longest_work, latents_on_the_wire
from .compare import ComparisonRow, list_left_out
from .estimate import Estimate
from .layer_passes import LayerPass
from .options import list_flags, make_deepspeed_json
from .other_layers import LayerCost
from .pass_time import EXPOSED
from .training_setting import MEMORY_ERROR, TrainingSetting

GIB = 2**30
BAR, BAR_WIDTH = "\u2588", 16  # the memory that a plan may take, in a table


def as_json(
    planned: Estimate, advice: Advice, config: dict[str, Any], rows: Sequence[ComparisonRow] = (),
    counts: Sequence[Estimate] = (),
) -> str:  # fmt: skip
    """Return one object; sizes in bytes, times in seconds. `config` is the DeepSpeed JSON of --config."""
    compared: dict[str, Any] = {}
    if rows:
        left_out = list_left_out(planned.setting)
        compared = {"compared": [row._asdict() for row in rows], "not_compared": left_out}
    if counts:
        compared["more_devices"] = [_summarize(plan) for plan in counts]
    setting, latents = planned.setting, latents_on_the_wire(planned)
    whole = {
        "hardware": setting.hardware.name,
        "devices": setting.devices,
        "ring_size": setting.ring_size,
        "ulysses_size": setting.ulysses_size,
        "tokens": setting.tokens,
        "local_tokens": planned.layout.local_tokens,
        "batch": setting.batch,
        "layout": planned.layout.name,
        "kernel": setting.kernel_that_runs,
        "tokens_per_device": setting.tokens // (setting.ring_size * setting.ulysses_size),
        "pattern": describe_mix(setting.mix),
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
        "deepspeed_json": make_deepspeed_json(setting, config),
        "parameters": setting.model.parameters,
        "memory": {
            "peak_bytes": planned.peak.total,
            "usable_bytes": int(setting.usable_bytes),
            "fits": planned.fits,
            "moment": planned.peak.name,
            "components": {name: size for name, size in planned.peak.components.items() if size},
            "moments": {moment.name: moment.total for moment in planned.moments},
        },
        "host": {
            "node_bytes": planned.node_host_bytes,
            "usable_node_bytes": _usable_node_bytes(planned),
            "components": {name: size for name, size in planned.host_peak.host.items() if size},
        },
        "attention": _pass(max(planned.passes, key=lambda layer_pass: layer_pass.cost.seconds))
        if planned.passes
        else None,
        "attention_by_pattern": [
            {"pattern": str(layer_pass.pattern), "layers": layer_pass.layers} | _pass(layer_pass)
            for layer_pass in planned.passes
        ],
        "other_layers": [_layer(layer, planned) for layer in planned.other_layers],
        "step": {
            "attention_s": planned.attention_s,
            "exposed_s": planned.exposed_s,
            "fixed_share": planned.fixed_share,
            "attention_bytes_sent": planned.sent_bytes,
            "other_layers_s": planned.other_layers_s,
            "swap_bytes_sent": planned.swap_bytes,
            "swap_s": planned.swap_s,
            "dense_flops": planned.dense_flops,
            "dense_s": planned.dense_s,
            "zero_bytes_sent": planned.zero_bytes,
            "zero_s": planned.zero_s,
            "host_bytes": planned.host_bytes,
            "host_s": planned.host_s,
            "total_s": planned.step_s,
            "tokens_per_s": planned.tokens_per_s,
            "mfu": planned.mfu,
        },
        "ranks_looked_at": planned.attention_passes.ranks,
        "longest_tokens": advice.reach.longest_tokens,
        "longest_step_s": advice.reach.longest_step_s,
        "longest_ends_at": advice.reach.longest_ends_at,
        "fewest_devices": advice.reach.fewest_devices,
        "fewest_step_s": advice.reach.fewest_step_s,
        "with_fit_options": None if advice.fit_reach is None else advice.fit_reach._asdict(),
        "roomier_set": None if advice.roomier is None else _summarize(advice.roomier),
        "longest_work_s": get_longest_work(planned),
        "hiding_tokens_per_rank": advice.hiding.tokens,
        "never_hides": advice.hiding.never,
        "latents": None if latents is None else latents._asdict(),
        "warnings": list(advice.warnings),
    } | compared
    return json.dumps(whole, indent=2)


def _summarize(planned: Estimate) -> dict[str, Any]:
    setting = planned.setting
    return {
        "devices": setting.devices,
        "split": setting.split,
        "sequences_per_step": setting.batch * setting.replicas,
        "peak_bytes": planned.peak.total,
        "host_bytes": planned.node_host_bytes,
        "fits": planned.fits,
        "step_s": planned.step_s,
        "tokens_per_s": planned.tokens_per_s,
        "mfu": planned.mfu,
        "options": list(list_flags(setting)),
    }


def _pass(layer_pass: LayerPass) -> dict[str, Any]:
    """Return what a layer's passes cost; the costliest layer's where patterns differ."""
    cost = layer_pass.cost
    return {
        "pairs": cost.pairs,
        "count_executed_pairs": cost.executed,
        "forward_bytes_sent": cost.forward_bytes,
        "backward_bytes_sent": cost.backward_bytes,
        "forward_s": cost.forward_s,
        "backward_s": cost.backward_s,
        "exposed_s": cost.exposed_s,
        "hops": cost.hops,
        "exposed_hops": cost.exposed_hops,
    }


def _layer(layer: LayerCost, planned: Estimate) -> dict[str, Any]:
    """Return what a layer of a kind costs; in a step each sends its forward bytes again if checkpointed."""
    forward, backward = layer.bytes_sent
    return {
        "kind": layer.kind.name,
        "layers": layer.layers,
        "messages": {part.what: {"forward": part.forward, "backward": part.backward} for part in layer.sent},
        "forward_bytes_sent": forward,
        "backward_bytes_sent": backward,
        "step_bytes_sent": layer.layers * ((1 + planned.setting.checkpointing) * forward + backward),
        "forward_s": layer.forward_s,
        "backward_s": layer.backward_s,
        "waiting_s": layer.waiting_s,
    }


def _usable_node_bytes(planned: Estimate) -> int | None:
    usable = planned.setting.usable_host_bytes
    return None if usable is None else int(usable * planned.setting.node_devices)


def print_report(
    planned: Estimate, advice: Advice, config: dict[str, Any], rows: Sequence[ComparisonRow] = (),
    counts: Sequence[Estimate] = (), spare: Sequence[Estimate | None] = (),
) -> None:  # fmt: skip
    """Print the tables, then the warnings, on stdout."""
    console = make_console()
    setting = planned.setting
    shard = f", {planned.layout.local_tokens:,} in a ring's shard" if setting.ulysses_size > 1 else ""
    console.print(
        f"{describe_size(setting)}: {setting.split}, {planned.layout.name} layout,"
        f" kernel {setting.kernel_that_runs},"
        f" ZeRO {setting.zero.stage}, {setting.dtype};"
        f" {setting.tokens // (setting.ring_size * setting.ulysses_size):,} tokens a device{shard}"
    )
    if len(setting.mix) > 1:
        console.print(f"attention: {describe_mix(setting.mix)}", markup=False)
    console.print(f"these options: {_join(list_flags(setting))}", markup=False)
    print_table(_memory_table(planned))
    if planned.node_host_bytes and not setting.host_is_device:
        console.print("on the host each pinned tensor takes a power of two of bytes (torch's allocator)")
    print_table(_cost_table(planned))
    used = "" if planned.mfu is None else f", {planned.mfu:.0%} of its peak in the model's arithmetic (MFU)"
    console.print(f"speed, computed: {planned.tokens_per_s:,.0f} tokens/s a device{used}", markup=False)
    deepspeed_json = make_deepspeed_json(setting, config)
    steps = deepspeed_json.get("gradient_accumulation_steps", 1)
    if isinstance(steps, int) and steps > 1:
        seconds = _seconds(steps * planned.step_s)
        console.print(f"a step above has one micro-batch: the JSON's {steps} take at most {seconds} s")
    if rows:
        ways = f"ways to split {setting.tokens:,} tokens, computed"
        for options, group in groupby(rows, key=_describe_options):
            print_table(_compared_table(list(group), f"{ways}: {options}"))
        for row in rows:
            has_these = row.options == list_flags(setting)
            if not has_these or row.note:
                how = "these options" if has_these else _join(row.options)
                console.print(f"{row.method}: {how}{row.note}", markup=False)
        for sentence in list_left_out(setting):
            console.print(sentence, markup=False)
        # by the code of each: compare.py
        console.print(
            "messages of a ring travel behind its kernels, torch's all-gather behind the first one, its dK/dV"
            " behind the next one: what is longer is exposed. All-to-alls and ZeRO are exposed"
        )
        console.print(
            "memory of each row has its kernel's buffers: of other methods, what FlashAttention allocates"
        )
        if setting.checkpointing:
            console.print(
                "under checkpointing ds_ring keeps attention's results. Rows with --recompute-attention"
                " compute attention again, as Hugging Face's checkpointing does; those with attention kept"
                " need selective checkpointing in the training code, as torchtitan has it"
            )
        own, others = (_rates(row.attention_flops) for row in (rows[0], rows[-1]))
        rest = f"that of other methods at torch's own call, {others}"
        if own == others:
            rest = "as that of other methods: they compare messages and what is computed again"
        console.print(f"seconds have ds_ring's attention at {own}, {rest}")
    if counts:
        print_table(_devices_table(counts))
        for plan, roomier in zip(counts, spare or [None] * len(counts), strict=True):
            text = f"{plan.setting.devices} devices, {plan.setting.split}: {_join(list_flags(plan.setting))}"
            text += "" if roomier is None else f"; with more memory to spare {describe_plan(roomier)}"
            console.print(text, markup=False)
        if isinstance(sequences := config.get("train_batch_size"), int):
            console.print(f"replicas divide the JSON's train_batch_size, {sequences}: without it, all may")
    reach, fit_reach = advice.reach, advice.fit_reach
    longest, fewest = _longest(reach, "tokens with these options"), _fewest(reach)
    if fit_reach is not None and fit_reach.longest_options != reach.longest_options:
        how = f"with these and {_added(fit_reach.longest_options, reach.longest_options)}"
        how += "" if fit_reach.longest_split == setting.split else f" on {fit_reach.longest_split}"
        longest += f"; {_longest(fit_reach, how)}"
    if fit_reach is not None and fit_reach.fewest_devices is not None and reach.fewest_devices is None:
        fewest += f"; {_fewest(fit_reach, reach)}"
    console.print(f"longest sequence on {setting.split}: {longest}", markup=False)
    sizes = "one ring; of 1, 2, 4, ... devices or 1, 2, 3, 4, 6, ... nodes"
    console.print(f"fewest devices for these tokens ({sizes}): {fewest}", markup=False)
    tokens, never = advice.hiding
    hides = (
        f"never: {never}" if tokens is None else f"from {tokens // setting.ulysses_size:,} tokens a device on"
    )
    if setting.ring_size > 1:
        console.print(f"transfers hide behind arithmetic (under {EXPOSED:.0%} of a pass waits): {hides}")
    console.print(
        f"a rank is without a message for at most {_seconds(get_longest_work(planned))} s"
        " (hop_timeout_seconds)"
    )
    if advice.roomier is not None:
        console.print(f"with more memory to spare: {describe_plan(advice.roomier)}", markup=False)
    for warning in advice.warnings:
        console.print(f"[yellow]warning:[/] {warning}")
    console.print("DeepSpeed JSON:")
    console.print_json(data=deepspeed_json)
    if setting.checkpointing:
        console.print(
            "and in the script: model.gradient_checkpointing_enable(); to plan this JSON again add"
            " --activation-checkpointing"
        )


def describe_size(setting: TrainingSetting) -> str:
    """Return parameters, tokens and devices of a plan."""
    parameters = format_count(setting.model.parameters)
    return (
        f"{parameters} parameters, {setting.tokens:,} tokens on {setting.devices} x {setting.hardware.name}"
    )


def format_count(number: int) -> str:
    """Return a number in words of the size that it has."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return f"{number:,}"


def _added(options: Sequence[str], before: Sequence[str]) -> str:
    """Return the options that another set has more, as arguments; "no option more" where there is none."""
    return " ".join(option for option in options if option not in before) or "no option more"


def _fewest(reach: Reach, before: Reach | None = None) -> str:
    how = "these options"
    if before is not None:
        how = f"these and {_added(reach.fewest_options, before.fewest_options)}"
    seconds = "" if reach.fewest_step_s is None else f", {_seconds(reach.fewest_step_s)} s a step"
    count = "none up to 16384" if reach.fewest_devices is None else f"{reach.fewest_devices:,}"
    if reach.fewest_split is not None:
        count += f" ({reach.fewest_split})"
    return f"{count} with {how}{seconds}"


def _longest(reach: Reach, how: str) -> str:
    if not reach.longest_tokens:
        return f"none {how.removeprefix('tokens ')}"
    seconds = "" if reach.longest_step_s is None else f", {_seconds(reach.longest_step_s)} s a step"
    return f"{reach.longest_tokens:,} {how}{seconds} (limit: {reach.longest_ends_at})"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _rates(flops: tuple[float, float]) -> str:
    return "{:.0f} TFLOP/s forward and {:.0f} backward".format(*(rate / 1e12 for rate in flops))


def _join(options: Sequence[str]) -> str:
    return " ".join(options) or "no option that saves memory"


def get_unit(size: int) -> tuple[str, int]:
    """Return the unit of a table whose largest figure this is."""
    return ("GiB", GIB) if size >= 4 * GIB else ("MiB", 2**20)


def _memory_table(planned: Estimate) -> Table:
    label, unit = get_unit(planned.peak.total)
    title = f"highest at: {planned.peak.name}"
    table = Table("memory of a device", label, "of all that it has", title=title, title_justify="left")
    table.columns[1].justify = "right"
    whole = max(planned.setting.usable_bytes, planned.peak.total)

    def bar(size: float) -> str:
        return BAR * max(round(BAR_WIDTH * size / whole), 1)

    for name, size in sorted(planned.peak.components.items(), key=lambda item: -item[1]):
        if size:
            table.add_row(name, f"{size / unit:.3f}", bar(size))
    table.add_section()
    usable = planned.setting.usable_bytes / unit
    row = f"peak, of {usable:,.1f} with a margin of {MEMORY_ERROR:.0%}"
    table.add_row(row, f"{planned.peak.total / unit:.3f}", bar(planned.peak.total))
    if planned.node_host_bytes:
        table.add_section()
        devices = planned.setting.node_devices
        for name, size in planned.host_peak.host.items():
            if size:
                table.add_row(
                    f"{planned.setting.host_name}: {name.removesuffix(' on the host')}",
                    f"{size * devices / unit:.3f}",
                )
        node = _usable_node_bytes(planned)
        limit = "" if node is None else f", of {node / unit:,.1f}"
        table.add_row(f"{planned.setting.host_name}, in all{limit}", f"{planned.node_host_bytes / unit:.3f}")
    return table


def _size(size: int) -> str:
    name, unit = get_unit(size)
    return f"{size / unit:.3g} {name}"


def _cost_table(planned: Estimate) -> Table:
    """Build the table of costs per device and step."""
    cost = planned.attention
    table = Table("cost of a step, slowest device", "amount", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    share = planned.exposed_s / (planned.attention_s - planned.swap_s) if cost.seconds else 0.0
    attended = cost.pairs / max(cost.executed, 1)
    table.add_row("attention", f"{cost.pairs:.3g} pairs", _seconds(planned.attention_s))
    for layer_pass in planned.passes if len(planned.passes) > 1 else ():
        pairs, seconds = (
            layer_pass.layers * layer_pass.cost.pairs,
            layer_pass.layers * layer_pass.cost.seconds,
        )
        table.add_row(
            f"  {layer_pass.layers} x {layer_pass.pattern}", f"{pairs:.3g} pairs", _seconds(seconds)
        )
    table.add_row("  of it waiting for K/V", f"{share:.1%}", _seconds(planned.exposed_s))
    table.add_row(
        "  fixed costs of calls, hops",
        f"{planned.fixed_share:.1%}",
        _seconds(planned.fixed_share * (planned.attention_s - planned.swap_s)),
    )
    table.add_row("  attended of executed pairs", f"{attended:.1%}", "")
    if planned.swap_bytes:
        table.add_row("  Ulysses' all-to-alls", _size(planned.swap_bytes), _seconds(planned.swap_s))
    if planned.sent_bytes:
        table.add_row("  K/V, dK/dV sent, at most", _size(planned.sent_bytes), "")
    for layer in planned.other_layers:
        size, count = _layer(layer, planned)["step_bytes_sent"], layer.layers
        seconds = count * ((1 + planned.setting.checkpointing) * layer.forward_s + layer.backward_s)
        table.add_row(f"{count} x {layer.kind.name}", f"{_size(size)} sent", _seconds(seconds))
    table.add_row("other matrices", f"{planned.dense_flops:.3g} FLOPs", _seconds(planned.dense_s))
    table.add_row("ZeRO, not overlapped", _size(planned.zero_bytes), _seconds(planned.zero_s))
    if planned.host_bytes or planned.host_s:
        table.add_row("host, not overlapped", _size(planned.host_bytes), _seconds(planned.host_s))
    table.add_section()
    table.add_row("step", "", _seconds(planned.step_s))
    return table


def _devices_table(plans: Sequence[Estimate]) -> Table:
    """Build the table of the same step on more devices."""
    columns = (
        *("ring x Ulysses x data", "sequences a step", "tokens a device", "GiB a device", "GiB a host"),
        *("s a step", "tokens/s a device"),
    )
    table = Table("devices", *columns, title="more devices, each row with what --fit chooses there")
    for column in table.columns:
        column.justify = "right"
    for plan in plans:
        setting = plan.setting
        figures = (
            f"{setting.ring_size}x{setting.ulysses_size}x{setting.replicas}",
            f"{setting.batch * setting.replicas}",
            f"{setting.tokens // (setting.ring_size * setting.ulysses_size):,}",
            f"{plan.peak.total / GIB:.1f}",
            f"{plan.node_host_bytes / GIB:,.0f}",
            _seconds(plan.step_s),
            f"{plan.tokens_per_s:,.0f}",
        )
        mark = "" if plan.fits else " (does not fit)"
        table.add_row(f"{setting.devices}{mark}", *figures)
    return table


def _describe_options(row: ComparisonRow) -> str:
    if row.best_options:
        return "its options for the longest"
    if row.keeps_attention:
        return "these options, attention kept by selective checkpointing"
    return "these options, others as listed"


def _compared_table(rows: Sequence[ComparisonRow], title: str) -> Table:
    """Build the table of other methods; `launcher/plan/compare.py` has the sources of their formulas."""
    label, unit = get_unit(max(row.peak_bytes for row in rows))
    columns = (
        *(f"{label} a device", f"{label} of a host", f"{label} sent by a device"),
        *("seconds a step", "tokens/s a device", "longest tokens"),
    )
    table = Table("method", "ranks", *columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        figures = [f"{size / unit:,.1f}" for size in (row.peak_bytes, row.host_bytes, row.sent_bytes)]
        figures += [_seconds(row.step_s), f"{row.tokens_per_s:,.0f}", f"{row.longest_tokens:,}"]
        mark = "" if row.fits else " (does not fit)"
        several = f", {row.replicas} sequences a step" if row.replicas > 1 else ""
        table.add_row(row.method + mark, f"{row.ranks}{several}", *figures)
    return table
