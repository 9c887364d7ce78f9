"""Methods of recurrent layers that call no kernel functions, on a ring.

Lightning attention (MiniMax), the RG-LRU (Recurrent Gemma), mLSTM (xLSTM), wkv (RWKV), compressed
convolutional attention (ZAYA), n-grams (Qwen 4), and modules that shift or convolve tokens by themselves. On
a ring a wrapper computes what the method does from the layer's own modules and buffers, and gets from other
ranks what the wrappers of functions.py get. Without a ring it calls the method.

mLSTM and wkv keep their states as S exp(m), with the greatest exponent m in place of an overflow. The states
of all runs are then a scan of (decay, m) in the algebra of maximum and plus, and a linear one of S.

Shapes: as functions.py; A exponents of a state ([B, H] or [B, C]), X the rest of its shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_ring.comm.device_tables import on_device
from ds_ring.contrib.families.recurrent.scan import (
    Original,
    add_halo,
    by_rows,
    get_sharding,
    recurrence,
    refuse_states,
    split_rows,
    take_token_before,
)
from ds_ring.data.batch import cache_in
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.errors import RingConfigError
from ds_ring.layers.scan.context import ScanContext
from ds_ring.layers.scan.recurrence import Computed, group_pieces, on_every_rank, padded, take_last_run
from ds_ring.layers.scan.scan import scan_op
from ds_ring.models.rows import get_local_last_tokens, in_order
from ds_ring.ops.eager import run_compared


class Summary(NamedTuple):
    """What a piece makes of the state S exp(m) before it: S exp(m + log_decay) + increment exp(greatest).

    Attributes:
        log_decay: [b, A].
        greatest: greatest exponent of the increment, [b, A].
        increment: [b, A, X].
    """

    log_decay: Tensor
    greatest: Tensor
    increment: Tensor


# What a convolution of a prompt got, from its call to the end of its block.
_inputs: WeakKeyDictionary[nn.Module, tuple[Tensor, BatchSharding]] = WeakKeyDictionary()
Summarise = Callable[[Sequence[Tensor], bool], Summary]  # takes a piece's tensors, and whether a state comes
# Takes the pieces' tensors and the state before them (S, m), and returns the outputs.
Outputs = Callable[[Sequence[Tensor], tuple[Tensor, Tensor] | None], Tensor]


def _run_scaled_recurrence(
    sharding: BatchSharding, tensors: Sequence[Tensor], summarise: Summarise, call: Outputs, dim: int,
    wants_state: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """Return the outputs of a recurrence whose states are S exp(m), and the last (S, m), as `recurrence`."""
    sets = split_rows(sharding)
    results = [
        _run_scaled_pieces(
            context, [x[rows] if rows else x for x in tensors], summarise, call, dim, wants_state
        )
        for context, rows in sets
    ]
    rows = [samples for _, samples in sets]
    out = in_order([part for part, _ in results], rows)
    states = [part for _, part in results if part is not None]
    if not wants_state:
        return out, None
    S, m = (in_order(list(parts), rows) for parts in zip(*states, strict=True))
    return out, (S, m)


def _run_scaled_pieces(
    context: ScanContext, tensors: Sequence[Tensor], summarise: Summarise, call: Outputs, dim: int,
    wants_state: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """Return what `_run_scaled_recurrence` returns, of rows with the same documents."""
    batch, slots = tensors[0].shape[0], tensors[0].shape[dim]
    kinds = group_pieces(context) if context.pieces or not wants_state else {}
    last = {piece.run: piece for piece in context.pieces if piece.is_last}
    places = [(last[run].slot, last[run].length, last[run].continues) for run in range(context.own_runs)]
    # No token is here: a padding slot gives the shape of the states.
    summaries = [
        summarise([x.narrow(dim, slot, length) for x in tensors], continues)
        for slot, length, continues in places or [(0, 1, False)]
    ]
    decay, greatest, increment = (torch.stack(parts)[: len(places)] for parts in zip(*summaries, strict=True))
    before = _find_greatest_before(context, decay, greatest)
    comes = on_device(np.array([continues for *_, continues in places], dtype=bool), decay.device)
    comes = comes.view(-1, *[1] * (decay.dim() - 1))
    after = torch.where(comes, torch.maximum(before + decay, greatest), greatest)
    move = torch.where(comes, before + decay - after, 0.0).exp()
    wide = (*decay.shape, *[1] * (increment.dim() - decay.dim()))
    move, increment = move.view(wide), increment * (greatest - after).exp().view(wide)
    states = run_compared(context.mesh, "recurrence", scan_op, move, increment, False, context.handle)
    outs: dict[int, Tensor] = {}
    if not kinds:
        outs[0] = call([x.narrow(dim, 0, 1) for x in tensors], None).narrow(dim, 0, 0)
    for (length, continues), numbers in kinds.items():
        pieces = [context.pieces[number] for number in numbers]
        joined = [torch.cat([x.narrow(dim, piece.slot, length) for piece in pieces]) for x in tensors]
        runs = [piece.run for piece in pieces]
        state = (states[runs].flatten(0, 1), before[runs].flatten(0, 1)) if continues else None
        out = call(joined, state)
        for place, number in enumerate(numbers):
            outs[number] = out[place * batch : (place + 1) * batch]
    whole = torch.cat([outs[number] for number in sorted(outs)], dim=dim)
    if not any(continues for _, continues in kinds):  # every rank takes part in the backward pass of the scan
        whole = whole + states.flatten()[:0].sum().to(whole.dtype)
    final = None
    if wants_state:
        final = take_last_run(context, move * states + increment), take_last_run(context, after)
    return padded(whole, slots, dim), final


def _find_greatest_before(context: ScanContext, decay: Tensor, greatest: Tensor) -> Tensor:
    """Return m before each own run [R, ...]; 0 where no state comes.

    A scan of one-hot vectors hands every run the numbers of all runs of its document before it.
    """
    count = len(context.runs.starts)
    runs = on_device(context.runs.list_rank_runs(context.mesh.sequence_rank), decay.device)
    factors = torch.stack([torch.ones_like(decay), decay, greatest], dim=1)  # [R, 3, ...]
    places = F.one_hot(runs, count).to(decay.dtype)
    places = places.view(*places.shape, *[1] * (factors.dim() - 1))
    slots = places * factors[:, None]  # [R, N, 3, ...]
    keep = torch.ones_like(slots[:, :1, :1].flatten(1)[:, :1]).view(-1, *[1] * (slots.dim() - 1))
    is_there, decays, maxima = scan_op(keep, slots, False, context.handle).unbind(2)  # [R, N, ...]
    later = torch.cat([decays[:, 1:], torch.zeros_like(decays[:, :1])], dim=1).flip(1).cumsum(1).flip(1)
    earlier = torch.where(is_there > 0, maxima + later, -torch.inf).amax(dim=1)
    return torch.where(is_there.sum(dim=1) > 0, earlier, 0.0)


def wkv(
    original: Original, time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor,
    state: Any = None, return_state: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Compute RWKV's weighted averages of value [B, S, C] by exp(key); states: numerator, denominator."""
    sharding = get_sharding({})
    if sharding is None:
        result: tuple[Tensor, Any] = original(time_decay, time_first, key, value, state, return_state)
        return result
    wants_state = sharding.masks_padding and return_state  # of a prompt, before which the state is empty
    refuse_states("RWKV", None if wants_state else state, return_state and not wants_state)
    rate = -torch.exp(time_decay.float())  # [C]

    def summarise(tensors: Sequence[Tensor], continues: bool) -> Summary:
        key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
        tokens = key.shape[1]
        after = torch.arange(tokens - 1, -1, -1, device=key.device, dtype=key.dtype)
        exponents = key + after[:, None] * rate.to(key.dtype)
        greatest = exponents.amax(dim=1)
        weights = torch.exp(exponents - greatest[:, None])
        state = torch.stack([(weights * value).sum(dim=1), weights.sum(dim=1)], dim=-1)
        return Summary((tokens * rate.to(key.dtype)).expand_as(greatest), greatest, state)

    def call(tensors: Sequence[Tensor], state: tuple[Tensor, Tensor] | None) -> Tensor:
        key, value = tensors
        if state is not None:
            # One token represents all before: the kernels' states are no part of their backward pass.
            numerator, denominator = state[0].unbind(-1)
            token = state[1] + denominator.log(), numerator / denominator
            key, value = (
                torch.cat([x[:, None].to(y.dtype), y], dim=1)
                for x, y in zip(token, (key, value), strict=True)
            )
        out: Tensor = original(time_decay, time_first, key, value)[0]
        return out if state is None else out[:, 1:]

    out, last = _run_scaled_recurrence(sharding, (key, value), summarise, call, 1, wants_state)
    if last is None:
        return out, state
    numerator, denominator = last[0].unbind(-1)
    return out, [numerator, denominator, last[1]]


def rwkv_shift(
    original: Original, layer: Any, hidden: Tensor, state: list[Tensor] | None = None, *, place: int
) -> tuple[Any, ...]:
    """Compute what mixes tokens [B, S, C] with those before them; the last one is `state[place]`."""
    sharding = get_sharding({})
    if sharding is None or state is None:
        result: tuple[Any, ...] = original(layer, hidden, state)
        return result
    *mixed, _ = original(layer, hidden)
    state[place][:, :, layer.layer_id] = _get_last_inputs(sharding, hidden.transpose(1, 2), 1)[..., 0]
    return (*mixed, state)


def mlstm(
    original: Original, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, igate: Tensor,
    fgate: Tensor, c_initial: Tensor | None = None, n_initial: Tensor | None = None,
    m_initial: Tensor | None = None, return_last_states: bool | None = None, mode: str | None = None,
) -> Any:  # fmt: skip
    """Compute the mLSTM of q and k [B, H, S, K], v [B, H, S, V] and gates [B, H, S]; states [K, V + 1]."""
    sharding = get_sharding({})
    if sharding is None:
        first = (c_initial, n_initial, m_initial)
        return original(layer, query, key, value, igate, fgate, *first, return_last_states, mode)
    wants_state = sharding.masks_padding  # of a prompt, before which the state is empty
    refuse_states("mLSTM", None if wants_state else c_initial, False)
    if query.shape[2] != sharding.local_tokens:
        raise RingConfigError.wrong(
            "xLSTM", f"layers that get all {sharding.local_tokens} tokens of a shard", query.shape[2],
            "set config.max_inference_chunksize to as many tokens",
        )  # fmt: skip

    def summarise(tensors: Sequence[Tensor], continues: bool) -> Summary:
        _, key, value, igate, fgate = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
        decays = F.logsigmoid(fgate).cumsum(dim=2)
        decay = decays[..., -1]
        exponents = decay[..., None] - decays + igate
        greatest = exponents.amax(dim=2)
        if not continues:  # the first state is 0 exp(0)
            greatest = torch.maximum(greatest, decay)
        weights = torch.exp(exponents - greatest[..., None])
        with_ones = torch.cat([value, torch.ones_like(value[..., :1])], dim=3)
        state = torch.einsum("bhl,bhlk,bhlv->bhkv", weights, key, with_ones)
        return Summary(decay, greatest, state)

    def call(tensors: Sequence[Tensor], state: tuple[Tensor, Tensor] | None) -> Tensor:
        first = None if state is None else (state[0][..., :-1], state[0][..., -1], state[1][..., None])
        # In this mode the kernels take any number of tokens.
        out: Tensor = original(layer, *tensors, *(first or (None,) * 3), mode="inference")[0]
        return out

    tensors = query, key, value, igate, fgate
    out, last = _run_scaled_recurrence(sharding, tensors, summarise, call, 2, wants_state)
    return out, None if last is None else (last[0][..., :-1], last[0][..., -1], last[1][..., None])


def _arguments(original: Original, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names, which a version of transformers may change."""
    return dict(inspect.signature(original).bind(*args, **kwargs).arguments)


def lightning_attention(
    original: Original, layer: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute MiniMax's linear attention, whose states [B, H, D, D] decay by a constant of each head."""
    sharding = get_sharding(kwargs)
    if sharding is None:
        result: tuple[Tensor, Tensor | None] = original(layer, *args, **kwargs)
        return result
    arguments = _arguments(original, layer, *args, **kwargs)
    cache = cache_in(arguments)
    refuse_states("lightning attention", cache if torch.is_grad_enabled() else None, False)
    hidden_states, attention_mask = arguments["hidden_states"], arguments.get("attention_mask")
    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    size = layer.head_dim
    query, key, value = qkv.unflatten(2, (layer.num_attention_heads, 3 * size)).split(size, dim=3)

    def call(tensors: Sequence[Tensor], continues: bool) -> Computed:
        q, k, v = (x.transpose(1, 2) for x in tensors)  # [b, H, L, D]
        state = v.new_zeros((*v.shape[:2], size, size))
        outs, length = [], q.shape[2]
        for first in range(0, length, layer.block_size):
            q_, k_, v_ = (x[:, :, first : first + layer.block_size] for x in (q, k, v))
            count = q_.shape[2]
            scores = q_ @ k_.transpose(2, 3) * layer.diagonal_decay[:, :, :count, :count]
            outs.append((q_ * layer.query_decay[:, :count]) @ state + scores @ v_)
            added = (k_ * layer.key_decay[:, -count:]).transpose(2, 3) @ v_
            state = state * torch.exp(-layer.slope_rate * count) + added
        state = state.to(torch.promote_types(state.dtype, torch.float32))
        rate = layer.slope_rate.to(state.dtype)  # [H, 1, 1]
        places = torch.arange(1, length + 1, device=q.device, dtype=state.dtype)

        def reach(state: Tensor) -> Tensor:
            decayed = q.to(state.dtype) * torch.exp(-rate * places[:, None])
            return (decayed @ state).transpose(1, 2)

        transition = torch.exp(-rate * length).expand(len(q), -1, 1, 1)
        out = torch.cat(outs, dim=2).transpose(1, 2)
        return Computed(out, state, transition, reach if continues else None)

    out, state = recurrence(sharding, (query, key, value), call, False, 1, cache is not None)
    if cache is not None and state is not None:
        cache.set_linear_cache(layer.layer_idx, state.to(value.dtype))
    out = layer.norm(out.flatten(2))
    return layer.out_proj(F.sigmoid(layer.output_gate(hidden_states)) * out), None


def rg_lru(
    original: Original, layer: nn.Module, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor,
    recurrent_states: Tensor | None, acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute the RG-LRU's scan of [B, S, C], with a decay for each token and channel."""
    sharding = get_sharding({})
    if sharding is None:
        result: tuple[Tensor, Tensor] = original(
            layer, hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype
        )
        return result
    generates = recurrent_states is not None  # from the prompt's first token on: what it held is of another
    refuse_states("RG-LRU", recurrent_states if torch.is_grad_enabled() else None, False)
    if generates and hidden_states.shape[1] == 1:
        raise RingConfigError.wrong(
            "RecurrentGemma.generate",
            "a prompt of 2 tokens or more a rank",
            1,
            "use fewer ranks, or engine.ring.off()",
        )

    def call(tensors: Sequence[Tensor], continues: bool) -> Computed:
        x, gate, reset = tensors
        out, final = original(layer, x, gate, reset, None, acc_dtype)
        final = final.to(torch.promote_types(final.dtype, torch.float32))
        decays = (gate * ~reset).to(final.dtype).cumprod(dim=1)
        return Computed(out, final, decays[:, -1], (lambda s: decays * s[:, None]) if continues else None)

    of_tokens = hidden_states, recurrent_gate, reset.expand(len(hidden_states), -1, -1)
    return recurrence(sharding, of_tokens, call, False, 1, generates)


def compressed_convolution(
    original: Original, layer: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Project to q, k and v as ZAYA: q and k through two convolutions, half of v from the token before."""
    sharding = get_sharding({})
    if sharding is None:
        result: tuple[Tensor, Tensor, Tensor] = original(layer, *args, **kwargs)
        return result
    arguments = _arguments(original, layer, *args, **kwargs)
    cache = cache_in(arguments)
    refuse_states("compressed convolutional attention", cache if torch.is_grad_enabled() else None, False)
    hidden_states, conv_mask = arguments["hidden_states"], arguments.get("conv_mask")
    if sharding.masks_padding:  # of a prompt, whose mask the model was not given
        conv_mask = sharding.real_tokens
    if conv_mask is not None:
        hidden_states = hidden_states * conv_mask[:, :, None].to(hidden_states.dtype)
    before, groups = layer.conv_kernel_size, layer.num_key_value_groups
    query, key = layer.q_proj(hidden_states), layer.k_proj(hidden_states)

    def run(context: ScanContext, x: Tensor) -> Tensor:
        return add_halo(
            context,
            x,
            before,
            lambda x: F.pad(layer.conv_qk_grouped(layer.conv_qk_depthwise(x)), (before, 0)),
        )

    both = torch.cat([query, key], dim=-1).transpose(1, 2)
    mixed = by_rows(sharding, run, both).transpose(1, 2)
    heads = (-1, layer.head_dim)
    of_query, of_key = (x.unflatten(2, heads) for x in mixed.split([query.shape[2], key.shape[2]], dim=2))
    select_heads = key.unflatten(2, heads).repeat_interleave(groups, dim=2)
    mean = (query.unflatten(2, heads) + select_heads) * 0.5
    first = layer.v_proj_delayed(hidden_states.new_zeros(1, 1, layer.hidden_size))[0, 0]
    later = layer.v_proj_delayed(hidden_states)
    delayed = by_rows(sharding, lambda context, x: take_token_before(context, x, first), later)
    if cache is not None:
        cache.update_conv_state(both, layer.layer_idx, conv_kernel_size=before)
        cache.update_recurrent_state(cache.last_inputs(later.transpose(1, 2), 1)[..., 0], layer.layer_idx)
    value = torch.cat([layer.v_proj_current(hidden_states), delayed], dim=-1).unflatten(2, heads)
    return of_query + mean, of_key + mean.unflatten(2, (-1, groups)).mean(dim=3), value


def dynamic_convolution(
    original: Original, layer: Any, hidden_states: Tensor, dynamic_input: Tensor, **kwargs: Any
) -> Tensor:
    """Convolve as Inkling 2: [B, S, C] by taps that each token makes of its input [B, S, I]."""
    sharding = get_sharding(kwargs)
    if sharding is None:
        result: Tensor = original(layer, hidden_states, dynamic_input, **kwargs)
        return result
    refuse_states("dynamic convolution", cache_in(kwargs), False)
    widths = [hidden_states.shape[2], dynamic_input.shape[2]]

    def convolve(both: Tensor) -> Tensor:
        tokens, inputs = both.transpose(1, 2).split(widths, dim=2)
        return original(layer, tokens, inputs).transpose(1, 2)

    def run(context: ScanContext, both: Tensor) -> Tensor:
        # as wide as the tokens on a rank without any, too
        return add_halo(context, both, layer.conv_kernel_size - 1, convolve)[:, : widths[0]]

    both = torch.cat([hidden_states, dynamic_input], dim=2).transpose(1, 2)
    return by_rows(sharding, run, both).transpose(1, 2)


def token_shift(original: Original, x: Tensor) -> Tensor:
    """Shift [B, S, C] by a token, as RWKV's `time_shift`."""
    sharding = get_sharding({})
    if sharding is None:
        result: Tensor = original(x)
        return result
    return by_rows(sharding, lambda context, x: take_token_before(context, x, x.new_zeros(x.shape[2])), x)


def convolution_module(original: Original, x: Tensor) -> Tensor:
    """Convolve [B, C, S] by an nn.Conv1d that is called by itself.

    It pads both sides, and the layer takes the first S results; or the layer has padded x in front.
    """
    sharding = get_sharding({})
    if sharding is None:
        result: Tensor = original(x)
        return result
    module: nn.Conv1d = original.__self__  # type: ignore[attr-defined]
    if sharding.masks_padding:
        _inputs[module] = x, sharding
    before = module.dilation[0] * (module.kernel_size[0] - 1)
    if module.padding[0]:
        return by_rows(sharding, lambda context, x: add_halo(context, x, before, original), x)

    def convolve(x: Tensor) -> Tensor:
        return F.pad(original(x), (before, 0))

    return by_rows(sharding, lambda context, x: add_halo(context, x, before, convolve), x[:, :, before:])


def keep_last_inputs(block: Any) -> None:
    """Give a block of Recurrent Gemma the last inputs of its convolution, after a prompt. Collective."""
    inputs = _inputs.pop(getattr(block, "conv_1d", block), None)
    if inputs is not None:
        x, sharding = inputs
        # the block has made it of the tokens here
        block.conv1d_state.copy_(_get_last_inputs(sharding, x, block.conv1d_state.shape[-1]))


def _get_last_inputs(sharding: BatchSharding, x: Tensor, width: int) -> Tensor:
    """Return the last inputs [B, C, width] of a prompt [B, C, S], on every rank. Collective."""
    ((context, _),) = split_rows(sharding)
    tail = get_local_last_tokens(x, width, context.layout, context.mesh.sequence_rank)
    return on_every_rank(context, tail, "last inputs of a prompt")


def ngrams(original: Original, layer: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Embed tokens [B, S] with those before them (Qwen 4), which are end tokens where a document begins."""
    sharding = get_sharding({})
    if sharding is None:
        result: Tensor = original(layer, *args, **kwargs)
        return result
    arguments = _arguments(original, layer, *args, **kwargs)
    refuse_states("n-gram embedding", cache_in(arguments), False)
    input_ids = arguments["input_ids"]

    def embed(ids: Tensor) -> Tensor:  # [B, 1, L] of ids + 1; 0 for no token
        tokens = torch.where(ids == 0, layer.eos_token_id, ids - 1)[:, 0]
        out: Tensor = original(layer, tokens, None)
        return out.transpose(1, 2)

    def run(context: ScanContext, ids: Tensor) -> Tensor:
        group_pieces(context)
        return add_halo(context, ids[:, None] + 1, layer.context_len, embed).transpose(1, 2)

    return by_rows(sharding, run, input_ids.long())
