"""Plan the same training by other ways to split a sequence, from what their authors have published.

Owns one row for each: memory of device and host, bytes that a device sends, how many ranks a sequence may
have. The layer around attention, the states and the hardware are those of ds_ring's own plan, so that the
rows differ by method only; times are not compared.

- DeepSpeed Ulysses (Jacobs et al. 2023, arXiv 2309.14509, sections 3.1 and 3.2): all-to-alls give each rank
  all tokens of H / P heads; q, k, v and out cross once a pass, so a device sends (P - 1) / P of its shards of
  them. Ranks are at most the heads; K/V heads that are fewer than the ranks are copied.
- ALST (Bekman et al. 2025, arXiv 2506.13996, section 3): the same all-to-alls, with the loss in tiles of a
  GiB of float32 logits, MLPs in ceil(tokens / hidden) tiles (as DeepSpeed's `TiledMLP`), checkpoints on
  the host, and at ZeRO 3 optimizer states on the host; parameters as well on a single GPU. Its published
  lengths for Llama-8B are 0.5, 3.7 and 15 million tokens on 1, 8 and 32 H100.
- torch's context parallelism as TRL's guide to a million tokens uses it (torch 2.13: K and V of all ranks are
  gathered, the default of `torch.distributed.tensor.experimental`'s `set_rotate_method`;
  huggingface.co/docs/trl/long_context_training: `chunked_nll`, checkpoints on the host). Its published figure
  is Qwen3-8B, 1,048,576 tokens on 8 H100, 56.2 GB a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from .estimate import Estimate, fits, training_step
from .model_memory import FLOAT, LocalTokens, TrainingStep
from .options import MAX_TOKENS, list_flags, longest_that, option_sets
from .pass_memory import PassMemory
from .training_setting import ELEMENT_BYTES, TrainingSetting

GIB = 1 << 30
CHUNK_TOKENS = 256  # of TRL's chunked_nll
FINE = 256  # lengths are exact to 1 / FINE


class ComparisonRow(NamedTuple):
    """Hold what a method needs."""

    method: str  # its name
    ranks: int  # that share a sequence; the other devices are data-parallel replicas
    # peak_bytes, host_bytes: of a device, and of a node's host
    peak_bytes: int
    host_bytes: int
    sent_bytes: int  # by a device for all layers' attention, forward and backward
    fits: bool  # whether the devices and their hosts have that much
    options: tuple[str, ...]  # of `ds-ring plan`, which the method has then
    longest_tokens: int  # that fit the same devices with these options, to 1 / 256; 0 if none
    # most_tokens, most_options: the same with all that --fit may add; None without --fit
    most_tokens: int | None = None
    most_options: tuple[str, ...] | None = None


class _Method(NamedTuple):
    name: str
    with_own_options: Callable[[TrainingSetting], TrainingSetting]
    step: Callable[[TrainingSetting], TrainingStep]
    ranks: Callable[[TrainingSetting], int]
    sent: Callable[[TrainingSetting], int]


def compare(
    planned: Estimate, longest_tokens: int, most: tuple[int, tuple[str, ...]] | None = None
) -> list[ComparisonRow]:
    """Return ds_ring's own row and those of the other methods, for the same model, tokens and devices.

    All have the setting's options, and those that belong to a method.

    Args:
        found: ds_ring's plan.
        longest_tokens: of ds_ring on these devices.
        most: the same with all that --fit may add, and with which options; None without --fit.
    """
    setting, sent = planned.setting, planned.attention.forward_bytes + planned.attention.backward_bytes
    ranks = setting.ring_size * setting.ulysses_size
    ring_figures = (
        "ds_ring",
        ranks,
        planned.peak.total,
        planned.node_host_bytes,
        sent,
        planned.fits,
        list_flags(setting),
    )
    rows = [ComparisonRow(*ring_figures, longest_tokens, *(most or ()))]
    for method in _METHODS:
        mine = method.with_own_options(setting)
        step = method.step(mine)
        rows.append(
            ComparisonRow(
                method.name,
                method.ranks(setting),
                step.peak().total,
                step.host_bytes * setting.node_devices,
                method.sent(setting),
                fits(setting, step.moments()),
                list_flags(mine),
                longest_that(partial(_has_room, method, mine), setting.devices, MAX_TOKENS, 1, FINE),
                *(() if most is None else _most(method, mine)),
            )
        )
    return rows


def _has_room(method: _Method, setting: TrainingSetting, tokens: int) -> bool:
    tried = replace(setting, tokens=tokens)
    return fits(tried, method.step(tried).moments())


def _most(method: _Method, setting: TrainingSetting) -> tuple[int, tuple[str, ...]]:
    """Return a method's longest sequence with any of the options, and the fewest that it needs for it."""

    def with_room(tokens: int) -> TrainingSetting | None:
        return next(
            (candidate for _, candidate in option_sets(setting) if _has_room(method, candidate, tokens)), None
        )

    tokens = longest_that(lambda tried: with_room(tried) is not None, setting.devices, MAX_TOKENS, 1, FINE)
    best = with_room(tokens)
    return tokens, () if best is None else list_flags(best)


def _ulysses_ranks(setting: TrainingSetting) -> int:
    """Return the most ranks that divide both heads and devices."""
    heads, devices = setting.model.heads, setting.devices
    return max(n for n in range(1, heads + 1) if heads % n == 0 and devices % n == 0)


def _ulysses_step(setting: TrainingSetting) -> TrainingStep:
    ranks, model = _ulysses_ranks(setting), setting.model
    inside = setting.batch * setting.tokens
    tokens = LocalTokens(-(-inside // ranks), inside, model.heads // ranks, max(model.kv_heads // ranks, 1))
    # FlashAttention adds dq up in float32 (Dao 2023, section 3.2).
    return _step(setting, tokens, PassMemory(0, inside * (model.heads // ranks) * model.head_dim * FLOAT, 0))


def _apply_checkpointing(setting: TrainingSetting) -> TrainingSetting:
    """Turn on what all of them train long sequences with: checkpointing, and attention computed again."""
    return replace(setting, checkpointing=True, recompute_attention=1.0)


def _apply_alst(setting: TrainingSetting) -> TrainingSetting:
    zero, model = setting.zero, setting.model
    return replace(
        _apply_checkpointing(setting),
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


def _apply_trl(setting: TrainingSetting) -> TrainingSetting:
    return replace(_apply_checkpointing(setting), loss_tokens=CHUNK_TOKENS, offload_checkpoints=True)


def _torch_step(setting: TrainingSetting) -> TrainingStep:
    ranks, model = setting.devices, setting.model
    local = -(-setting.batch * setting.tokens // ranks)
    # K and V of the whole sequence; out, and dq, dk and dv in the backward pass, are added up in float32.
    gathered = (
        2 * setting.batch * setting.tokens * model.kv_heads * model.head_dim * ELEMENT_BYTES[setting.dtype]
    )
    added = local * (model.heads + 2 * model.kv_heads) * model.head_dim * FLOAT
    tokens = LocalTokens(local, local, model.heads, model.kv_heads)
    return _step(setting, tokens, PassMemory(gathered, added, 0))


def _step(setting: TrainingSetting, tokens: LocalTokens, ring: PassMemory) -> TrainingStep:
    return replace(training_step(setting, 1, ring), tokens=tokens)


def _sent_by_ulysses(setting: TrainingSetting) -> int:
    ranks, model = _ulysses_ranks(setting), setting.model
    heads = 2 * model.heads + 2 * max(model.kv_heads, ranks)
    local = setting.batch * setting.tokens // ranks
    once = local * heads * model.head_dim * ELEMENT_BYTES[setting.dtype] * (ranks - 1) // ranks
    return 2 * model.layers * once  # and their gradients


def _sent_by_torch(setting: TrainingSetting) -> int:
    """K and V once forward and once backward to all others, and their float32 gradients home."""
    model, ranks = setting.model, setting.devices
    elements = 2 * setting.batch * setting.tokens // ranks * model.kv_heads * model.head_dim * (ranks - 1)
    return model.layers * elements * (2 * ELEMENT_BYTES[setting.dtype] + FLOAT)


_METHODS = (
    _Method("DeepSpeed Ulysses", _apply_checkpointing, _ulysses_step, _ulysses_ranks, _sent_by_ulysses),
    _Method("ALST", _apply_alst, _ulysses_step, _ulysses_ranks, _sent_by_ulysses),
    _Method(
        "torch context parallel, TRL's guide", _apply_trl, _torch_step, lambda s: s.devices, _sent_by_torch
    ),
)
