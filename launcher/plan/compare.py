"""Plan the same training by other ways to split a sequence, from what their authors have published.

Owns rows for each: with the setting's own options, the same for all methods, and with the options of its
longest sequences: of other methods those of their authors, of ds_ring what a search chooses. Ulysses of
ds_ring, inside a ring and alone, has the setting's own options. Under checkpointing other methods have a row
that computes attention again, as Hugging Face's checkpointing does, and one that keeps its results, as
ds_ring does and as selective checkpointing can: torchtitan's saves the outputs of SDPA
(`torch.utils.checkpoint.create_selective_checkpoint_contexts`). The layer around attention, the states, the
hardware and the kernel are those of ds_ring's own plan, so that rows differ by method and options only. A
method's attention computes all pairs of the sequence, evenly divided among its ranks, at the hardware's rates
of torch's own call if it has them. It holds what FlashAttention allocates: float32 sums of dq, and dk and dv
of every query head ([Note: what FlashAttention allocates] in `kernels/flash/workspace.py`). All-gathers and
reduce-scatters, ZeRO's included, come by every adapter of a node, other messages by one a device. All-to-alls
are exposed, and so is ZeRO in every row.

- DeepSpeed Ulysses (Jacobs et al. 2023, arXiv 2309.14509, sections 3.1 and 3.2): all-to-alls give each rank
  all tokens of H / P heads; q, k, v and out cross once a pass, so a device sends (P - 1) / P of its shards of
  them. Ranks divide the heads, and the K/V heads or a multiple of these: K/V heads that are fewer than the
  ranks are copied (DeepSpeed 0.19.8, `UlyssesSPAttentionHF`). The other devices are data replicas.
- ALST (Bekman et al. 2025, arXiv 2506.13996, section 3): the same all-to-alls, with the loss in tiles of a
  GiB of float32 logits, MLPs in ceil(tokens / hidden) tiles (as DeepSpeed's `TiledMLP`), checkpoints on
  the host, and at ZeRO 3 optimizer states on the host; parameters as well on a single GPU. Its published
  lengths for Llama-8B are 0.5, 3.7 and 15 million tokens on 1, 8 and 32 H100.
- torch's context parallelism as TRL's guide to a million tokens uses it (torch 2.13: K and V of all ranks
  are gathered, the default of `torch.distributed.tensor.experimental`'s `set_rotate_method`;
  huggingface.co/docs/trl/long_context_training: `chunked_nll`, checkpoints on the host). In torch's
  `_templated_ring_attention`, which takes no mask but the causal one, the gather is posted before the
  kernel of the own shard and waited for after it; in its backward dK and dV leave for the next rank after a
  hop and are waited for after the next hop's kernel. What exceeds these kernels is exposed, and so is the
  last message. Its published figure is Qwen3-8B, 1,048,576 tokens on 8 H100, 56.2 GB a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import gcd
from typing import NamedTuple

from ds_ring.limits import divisors
from ds_ring.masks.catalog import Causal, Full

from .estimate import Estimate, HeadSwaps, estimate, fits, head_swaps, host_traffic, training_step
from .layer_passes import layer_passes
from .model_memory import FLOAT, LocalTokens, TrainingStep
from .options import MAX_TOKENS, SHARD_PARTS, list_flags, longest_planned, longest_that
from .pass_memory import PassMemory
from .pass_time import PassCost
from .training_setting import ELEMENT_BYTES, TrainingSetting

GIB = 1 << 30
FINE = 256  # lengths are exact to 1 / FINE
CHUNK_TOKENS = 256  # of TRL's chunked_nll


class ComparisonRow(NamedTuple):
    """Hold what a method needs."""

    method: str  # its name
    best_options: bool  # those of the longest sequences, else the setting's own
    keeps_attention: bool  # of another method: its checkpointing keeps attention's results
    options: tuple[str, ...]  # of `ds-ring plan`, which the method has then
    ranks: int  # that share a sequence
    replicas: int  # of so many ranks: sequences of a step
    kv_copies: int  # ranks that get a copy of each K/V head
    note: str  # of replicas and copies, for people; empty where there is one replica and no copy
    # peak_bytes, host_bytes: of a device, and of a node's host
    peak_bytes: int
    host_bytes: int
    sent_bytes: int  # by a device for all layers' attention in a step, what is computed again included
    fits: bool  # whether the devices and their hosts have that much
    step_s: float  # of one step
    tokens_per_s: float  # of a device
    longest_tokens: int  # that fit the same devices with these options; 0 if none
    attention_flops: tuple[float, float]  # of attention in a second, forward and backward


class _Method(NamedTuple):
    name: str
    best_name: str  # with the options of its authors
    with_best_options: Callable[[TrainingSetting], TrainingSetting]
    step: Callable[[TrainingSetting], TrainingStep]
    ranks: Callable[[TrainingSetting], int]
    copies_kv: bool  # K/V heads that are fewer than the ranks
    has_masks: bool  # computes attention that is neither causal nor of all pairs
    # bytes and exposed seconds of a step's messages, beside a kernel that has all pairs on one device
    messages: Callable[[TrainingSetting, PassCost], HeadSwaps]


def compare(planned: Estimate, longest_tokens: int) -> list[ComparisonRow]:
    """Return the rows of ds_ring and of the other methods, for the same model, tokens and devices.

    The rows with the setting's own options come first.

    Args:
        planned: ds_ring's plan.
        longest_tokens: of ds_ring on these devices, with the setting's options.
    """
    setting = replace(planned.setting, may_add_options=False)
    alone = replace(setting, ring_size=1, ulysses_size=1, layout="contiguous")
    hardware, torch_attention = setting.hardware, setting.hardware.torch_attention
    if torch_attention is not None and setting.kernel_that_runs == "flash":
        rates = {"kernel": "flash", "attention_efficiency": torch_attention, "attention_by_kernel": None}
        alone = replace(alone, hardware=hardware.model_copy(update=rates))
    whole, flops = layer_passes(alone).total, _get_attention_flops(alone)
    longest, _ = longest_planned(replace(setting, may_add_options=True))
    rows = [_make_own_row("ds_ring", planned, False, longest_tokens)]
    for ulysses in _list_ulysses_sizes(setting):
        ring = setting.ring_size * setting.ulysses_size // ulysses
        hybrid = replace(setting, ring_size=ring, ulysses_size=ulysses)
        name, note = f"Ulysses {ulysses} x ring {ring}", f"--ring-size {ring} --ulysses-size {ulysses}"
        (reached, _), planned_here = longest_planned(hybrid), estimate(hybrid)
        tokens = 0 if reached is None else reached.tokens
        rows.append(_make_own_row(f"ds_ring, {name}", planned_here, False, tokens, f"; for its JSON: {note}"))
    others = (planned, whole, flops)
    methods = [method for method in _METHODS if _computes(method, setting)]
    for keeps in (False, True) if setting.checkpointing else (False,):
        rows += [_make_row(method, _as_others(setting, keeps), *others, False, keeps) for method in methods]
    if longest is not None:
        best = estimate(replace(longest, tokens=setting.tokens, may_add_options=False))
        kept = "" if setting.may_split_heads else ", the sizes asked for"
        rows.append(_make_own_row("ds_ring, longest", best, True, longest.tokens, f"; {longest.split}{kept}"))
    return rows + [_make_row(method, method.with_best_options(setting), *others, True) for method in methods]


def list_left_out(setting: TrainingSetting) -> list[str]:
    """Return the methods that have no row, for people."""
    return [
        f"{method.name}: no row; it computes causal attention or that of all pairs, no other mask"
        for method in _METHODS
        if not _computes(method, setting)
    ]


def _computes(method: _Method, setting: TrainingSetting) -> bool:
    return method.has_masks or all(isinstance(pattern, Causal | Full) for pattern, _ in setting.mix)


def _get_attention_flops(setting: TrainingSetting) -> tuple[float, float]:
    """Return the rates of attention, forward and backward, FLOPs a second."""
    hardware, peak = setting.hardware, setting.hardware.flops(setting.dtype)
    efficiency = hardware.efficiency(setting.kernel_that_runs)
    return efficiency.forward * peak, efficiency.backward * peak


def _list_ulysses_sizes(setting: TrainingSetting) -> list[int]:
    """Return 1, the most Ulysses ranks of a node inside a ring, and all ranks, where K/V heads allow them.

    The setting's own number is left out; all are where more than 1 was asked for.
    """
    if setting.ulysses_size > 1 and not setting.may_split_heads:
        return []
    ranks = setting.ring_size * setting.ulysses_size
    sizes = divisors(gcd(setting.model.kv_heads, ranks))
    inside = max((n for n in sizes if n < ranks and n <= setting.hardware.devices_per_node), default=1)
    return sorted({1, inside, sizes[-1] if sizes[-1] == ranks else 1} - {setting.ulysses_size})


def _make_own_row(
    name: str, planned: Estimate, best: bool, longest_tokens: int, note: str = ""
) -> ComparisonRow:
    setting = planned.setting
    ranks = setting.ring_size * setting.ulysses_size
    if setting.replicas > 1:
        note = f"; {setting.replicas} data replicas of {ranks} ranks{note}"
    return ComparisonRow(
        name, best, False, list_flags(setting), ranks, setting.replicas, 1, note, planned.peak.total,
        planned.node_host_bytes, planned.sent_bytes + planned.swap_bytes, planned.fits, planned.step_s,
        setting.batch * setting.tokens / ranks / planned.step_s, longest_tokens,
        _get_attention_flops(setting),
    )  # fmt: skip


def _make_row(
    method: _Method, setting: TrainingSetting, planned: Estimate, whole: PassCost,
    flops: tuple[float, float], best: bool, keeps: bool = False,
) -> ComparisonRow:  # fmt: skip
    step, ranks = method.step(setting), method.ranks(setting)
    here = estimate(setting, attention=planned.attention_passes)
    # The rest of a step is that of ds_ring's plan, for as many tokens as a device has here.
    tokens_ratio = setting.ring_size * setting.ulysses_size / ranks
    again = whole.forward_s * setting.repeated_attention
    messages = method.messages(setting, whole)
    attention_s = (whole.compute_s + again) / ranks + messages.seconds
    host_s = host_traffic(setting, step)[1]
    seconds = attention_s + here.dense_s * tokens_ratio + here.zero_s + host_s
    model, replicas = setting.model, setting.devices // ranks
    copies = max(ranks // model.kv_heads, 1) if method.copies_kv else 1
    note = ""
    if replicas > 1:
        note = f"; {replicas} data replicas of {ranks} ranks, the most that {model.heads} query heads and"
        note += f" {model.kv_heads} K/V heads allow on {setting.devices} devices"
    if copies > 1:
        note += f"; each of {model.kv_heads} K/V heads is copied to {copies} ranks, as"
        note += " UlyssesSPAttentionHF does (DistributedAttention refuses that)"
    name = method.best_name if best else method.name
    return ComparisonRow(
        f"{name}, attention kept" if keeps else name, best, keeps, list_flags(setting), ranks,
        replicas, copies, note, step.peak().total, step.host_bytes * setting.node_devices,
        messages.sent_bytes, fits(setting, step.moments()), seconds,
        setting.batch * setting.tokens / ranks / seconds, _longest(method, setting), flops,
    )  # fmt: skip


def _longest(method: _Method, setting: TrainingSetting) -> int:
    """Return the longest sequence for which a method has room."""
    tile, ranks = setting.mlp_tokens, method.ranks(setting)
    falls = [] if tile is None else [ranks * tile // setting.batch + 1]
    return longest_that(partial(_has_room, method, setting), falls, MAX_TOKENS, ranks * SHARD_PARTS, FINE)


def _has_room(method: _Method, setting: TrainingSetting, tokens: int) -> bool:
    tried = replace(setting, tokens=tokens)
    return fits(tried, method.step(tried).moments())


def _ulysses_ranks(setting: TrainingSetting) -> int:
    """Return the most ranks that divide heads and devices, each with as many K/V heads or one's copy."""
    heads, kv_heads, devices = setting.model.heads, setting.model.kv_heads, setting.devices
    return max(
        ranks
        for ranks in range(1, heads + 1)
        if heads % ranks == 0 and devices % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    )


def _ulysses_step(setting: TrainingSetting) -> TrainingStep:
    ranks, model = _ulysses_ranks(setting), setting.model
    inside = setting.batch * setting.tokens
    tokens = LocalTokens(-(-inside // ranks), inside, model.heads // ranks, max(model.kv_heads // ranks, 1))
    step = _step(setting, tokens, PassMemory(0, 0, _get_kernel_bytes(setting, tokens)))
    return replace(step, pins=False)  # ALST copies checkpoints to pageable memory, TRL to pinned memory


def _as_others(setting: TrainingSetting, keeps: bool = False) -> TrainingSetting:
    """Return a setting without attention on the host, which only ds_ring has.

    Checkpointing computes attention again, unless it keeps its results.
    """
    again = 1.0 if setting.checkpointing and not keeps else 0.0
    return replace(setting, recompute_attention=again, offload_attention=False)


def _apply_alst(setting: TrainingSetting) -> TrainingSetting:
    zero, model = setting.zero, setting.model
    return _as_others(
        replace(
            setting,
            checkpointing=True,
            loss_tokens=max(GIB // (FLOAT * model.vocab), 1),
            mlp_tokens=model.hidden,
            offload_checkpoints=True,
            zero=replace(
                zero,
                stage=3,
                offload_optimizer=True,
                offload_parameters=zero.offload_parameters or zero.world == 1,
            ),
        )
    )


def _apply_trl(setting: TrainingSetting) -> TrainingSetting:
    return _as_others(
        replace(setting, checkpointing=True, loss_tokens=CHUNK_TOKENS, offload_checkpoints=True)
    )


def _torch_step(setting: TrainingSetting) -> TrainingStep:
    ranks, model = setting.devices, setting.model
    local = -(-setting.batch * setting.tokens // ranks)
    # K and V of the whole sequence; out, and dq, dk and dv in the backward pass, are added up in float32.
    gathered = (
        2 * setting.batch * setting.tokens * model.kv_heads * model.head_dim * ELEMENT_BYTES[setting.dtype]
    )
    added = local * (model.heads + 2 * model.kv_heads) * model.head_dim * FLOAT
    tokens = LocalTokens(local, local, model.heads, model.kv_heads)
    return _step(setting, tokens, PassMemory(gathered, added, _get_kernel_bytes(setting, tokens)))


def _get_kernel_bytes(setting: TrainingSetting, tokens: LocalTokens) -> int:
    """Return what FlashAttention's backward pass allocates beside its results (Dao 2023, section 3.2)."""
    expanded = 2 * ELEMENT_BYTES[setting.dtype] * setting.model.head_dim * (tokens.heads > tokens.kv_heads)
    return tokens.inside * tokens.heads * ((setting.model.head_dim + 1) * FLOAT + expanded)


def _step(setting: TrainingSetting, tokens: LocalTokens, ring: PassMemory) -> TrainingStep:
    return replace(training_step(setting, 1, ring), tokens=tokens)


def _swap_heads(setting: TrainingSetting, whole: PassCost) -> HeadSwaps:
    """Return all-to-alls of all layers, checkpointing's too; K/V heads fewer than the ranks are copied."""
    ranks, model = _ulysses_ranks(setting), setting.model
    copied = replace(model, kv_heads=max(model.kv_heads, ranks))
    swaps = head_swaps(replace(setting, ulysses_size=ranks, model=copied), setting.tokens)
    times = (2 + setting.checkpointing) * model.layers
    return HeadSwaps(times * swaps.sent_bytes, times * swaps.seconds)


def _sent_by_torch(setting: TrainingSetting) -> int:
    """K and V forward, again where attention is, and backward; float32 gradients all the way round."""
    ranks, shard = setting.devices, _torch_shard(setting)
    gathered = (2 + bool(setting.repeated_attention)) * ELEMENT_BYTES[setting.dtype] * (ranks - 1)
    return setting.model.layers * shard * (gathered + FLOAT * ranks) * (ranks > 1)


def _torch_shard(setting: TrainingSetting) -> int:
    """Return the elements of K and V of a rank."""
    model = setting.model
    return 2 * setting.batch * setting.tokens // setting.devices * model.kv_heads * model.head_dim


def get_torch_peak(setting: TrainingSetting) -> int:
    """Return the peak of a device by torch's context parallelism with the options of TRL's guide, bytes."""
    return _torch_step(_apply_trl(setting)).peak().total


def get_torch_waiting(setting: TrainingSetting, whole: PassCost) -> float:
    """Return the seconds of messages that torch's kernels do not hide, in all layers.

    Args:
        setting: of all ranks.
        whole: passes of all layers on one device, of which a hop of a rank computes an equal part.
    """
    ranks, hardware, shard = setting.devices, setting.hardware, _torch_shard(setting)
    layers, forwards = setting.model.layers, 1 + bool(setting.repeated_attention)
    forward_s, backward_s = (seconds / layers / ranks**2 for seconds in (whole.forward_s, whole.backward_s))
    gather_s = ELEMENT_BYTES[setting.dtype] * shard * (ranks - 1) / hardware.collective_bytes_per_s(ranks)
    hop_s = shard * FLOAT * (ranks > 1) / hardware.link_bytes_per_s(ranks)
    exposed_s = forwards * max(0.0, gather_s - forward_s) + max(0.0, gather_s - backward_s)
    return layers * (exposed_s + (ranks - 1) * max(0.0, hop_s - backward_s) + hop_s)


_METHODS = (
    _Method(
        "DeepSpeed Ulysses", "ALST", _apply_alst, _ulysses_step, _ulysses_ranks, True, True, _swap_heads,
    ),
    _Method(
        "torch context parallel", "torch, TRL's guide", _apply_trl, _torch_step,
        lambda setting: setting.devices, False, False,
        lambda setting, whole: HeadSwaps(_sent_by_torch(setting), get_torch_waiting(setting, whole)),
    ),
)  # fmt: skip
