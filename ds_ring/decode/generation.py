"""Let `generate` of a transformers model run on the ring: the same tokens as on one process.

Every rank of a sequence calls `model.generate` with the same whole prompts and gets the same whole sequences.
Decoding itself (sampling, beams, stopping) is transformers'.

Shapes: B samples, T tokens so far, Q new tokens, V words.

[Note: the same tokens on all ranks]
A prompt is cut before the model's other hooks, as a batch is. It runs as a ring pass, after which each rank
keeps its part of the keys and values. A later token runs on every rank, as replicated queries over the
sharded cache, and through recurrent layers with the state after the prompt, which every rank gets. All ranks
get the logits of the prompt's last token from its owner; the logits of later tokens are bit-equal on all
ranks. Each call first compares prompts, settings and the state of the random number generator.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.attention_module import RingAttention
from ds_ring.comm.collective import collective
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import Observers
from ds_ring.data.batch import cache_in, cache_name
from ds_ring.data.batch_sharding import BatchSharding, RowsAttention
from ds_ring.data.packing import PADDING, RowGroup, group_rows
from ds_ring.data.session import RingSession
from ds_ring.decode.replicated_op import replicated_attention_op
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.masks.pair_masks import ScoreFunction
from ds_ring.masks.pattern import Pattern
from ds_ring.models.attention_name import NAME
from ds_ring.models.layer_masks import makes_such_masks
from ds_ring.models.model import GENERATOR, MODEL
from ds_ring.models.model_part import Loss, ModelPart
from ds_ring.models.variants import variants
from ds_ring.ops.context import ContextCache
from ds_ring.ops.shard import shard_sequence
from ds_ring.patches import guard_imports, patch
from ds_ring.plugin import PASSES
from ds_ring.schedule.grid import Grid

if TYPE_CHECKING:
    from ds_ring.decode.ring_cache import RingCache


@dataclass(frozen=True, eq=False)
class CachedSharding(BatchSharding):
    """The layout of a cache's tokens, and the positions of the queries, which every rank has."""

    is_replicated: ClassVar[bool] = True
    q_positions: Tensor = field(kw_only=True)  # int64 [Q], on the CPU

    def attention(
        self,
        scale: float | None = None,
        pattern: Pattern | None = None,
        score_mod: ScoreFunction | None = None,
        make: type[RingAttention] | None = None,
    ) -> RowsAttention:
        assert make is None, "queries that every rank has"
        layer_pattern = self.patterns.pattern if pattern is None else pattern
        parts: list[RingAttention] = [
            _CachedAttention(
                self.config, mesh=self.mesh, layout=self.layout, scale=scale, pattern=row_pattern,
                score_mod=score_mod, q_positions=self.q_positions,
            )
            for row_pattern in self.list_row_patterns(layer_pattern)
        ]  # fmt: skip
        return RowsAttention(parts, tuple(group.rows for group in self.groups))


class _CachedAttention(RingAttention):
    """Attention of few queries, which every rank has, over the keys of all ranks."""

    def __init__(self, *args: Any, q_positions: Tensor, **options: Any) -> None:
        super().__init__(*args, **options)
        self._q_positions = q_positions

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        **kwargs: Any,
    ) -> Any:
        assert not args and not kwargs
        handle = self.context.handle
        result = replicated_attention_op(query, key, value, self._q_positions, handle, sinks)
        return result if return_lse else result[0]


def _cache_class() -> type[RingCache]:
    # Only a generation needs transformers' classes of caches.
    with guard_imports("generate on a ring", "transformers", since="transformers 5.6 or later"):
        from ds_ring.decode.ring_cache import RingCache
    return RingCache


_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_OFF = "or generate without a ring: with engine.ring.off(): model.generate(...)"


_cuts_prompt = patch(
    MODEL, stage="before_forward", feature="generation", options=("prepend",),
    reason="cuts the prompt, so that the other hooks get this rank's tokens",
)  # fmt: skip
_generates = patch(
    GENERATOR, "generate", stage="around_generate", kind="replaced", feature="generation",
    reason="calls the original with the ring's cache, compares the arguments of the ranks",
)  # fmt: skip
_own_generate = patch(
    GENERATOR, "generate", stage="around_off", kind="set", feature="generation.off",
    reason="engine.ring.off()",
)  # fmt: skip


class Generation(ModelPart):
    """Run the forward passes of `generate` on a ring."""

    def __init__(self, model: PreTrainedModel, session: RingSession, rewritten: Callable[[], bool]) -> None:
        super().__init__(model, session, rewritten)
        self.signature = inspect.signature(model.forward)
        self._name = cache_name(self.signature.parameters)
        self._has_own_cache = any(variant.has_own_cache(model) for variant in variants())
        self._cache: RingCache | None = None
        self._last = 0  # slot of the prompt's last token, on the rank that has it

    @functools.cached_property
    def mesh(self) -> RingMesh:
        """Return the mesh that generation runs on. Collective in the sequence, at first use."""
        return one_ring(self.session.run_mesh)

    def patches(self, loss: Loss) -> list[Any]:
        """Return the patches with which `model.generate` runs on the ring."""

        @_cuts_prompt
        def before(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if torch.compiler.is_compiling():
                return None
            local = self.before(dict(self.signature.bind_partial(*args).arguments) | kwargs)
            return None if local is None else ((), local)

        return [before, *([_generates.to(_Generate(self))] if hasattr(self.model, "generate") else [])]

    def own(self) -> list[Any]:
        generate = getattr(self.model, "generate", None)
        return [] if generate is None else [_own_generate.to(generate.own)]

    def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check a call of `generate`, by its arguments, on all ranks; return the arguments to add.

        Raises:
            RingError: it cannot be honoured, or the ranks of the sequence ask for different things.
        """
        with collective(self.mesh, "generate") as call:
            # as transformers puts it together
            settings = copy.deepcopy(arguments.get("generation_config") or self.model.generation_config)
            settings.update(**{name: value for name, value in arguments.items() if hasattr(settings, name)})
            self._check(arguments, settings)
            call.agree(_described(arguments, settings))
        changes: dict[str, Any] = {} if cache_in(arguments) is not None else {self._name: self._make_cache()}
        # Replicas that end early go on with the others: at ZeRO 3 each layer's weights come from all ranks.
        sharded = any(hasattr(parameter, "ds_id") for parameter in self.model.parameters())
        if sharded and self.mesh.data_size > 1 and arguments.get("synced_gpus") is None:
            changes["synced_gpus"] = True
        return changes

    def _make_cache(self) -> RingCache:
        """Return an empty cache."""
        config, model = self.session.config, self.model
        has_states = not self._has_own_cache and any(variant.has_states(model) for variant in variants())
        return _cache_class()(
            self.mesh.ring_rank, self.mesh.ring_size,
            model.config.get_text_config(decoder=True) if has_states else None,
            Exchange(self.mesh, config.hop_timeout_seconds),
            config.block_size if PASSES[config.transport].whole_blocks else 1,
        )  # fmt: skip

    def _check(self, arguments: dict[str, Any], settings: Any) -> None:
        name = f"{type(self.model).__name__}.generate"
        mode = settings.get_generation_mode(arguments.get("assistant_model"))
        cache, config = cache_in(arguments), self.model.config.get_text_config()
        modules = [module for module in self.model.modules() if module.training]
        only_in_training = [
            name
            for name, is_on in {
                "dropout": any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules),
                "checkpointing": any(getattr(module, "gradient_checkpointing", False) for module in modules),
            }.items()
            if is_on
        ]
        ids_BT, mask_BT = arguments.get("inputs", arguments.get("input_ids")), arguments.get("attention_mask")
        padding, ends = settings.pad_token_id, settings.eos_token_id
        if mask_BT is None and ids_BT is not None and padding is not None and padding not in _listed(ends):
            mask_BT = ids_BT != padding  # as transformers makes it
        # A window in the configuration, but in no mask (Moshi).
        only_the_cache_slides = (
            bool(getattr(config, "sliding_window", None))
            and getattr(config, "layer_types", None) is None
            and not makes_such_masks(self.model, "sliding_attention")
        )
        attention = config._attn_implementation
        faults = {
            "expected attention of the model's own, got one that the backend has rewritten": self.rewritten(),
            f"expected attention '{NAME}', got {attention!r}, which does not read a cache that is on a ring:"
            f" call model.set_attn_implementation('{NAME}') to generate under the JSON's pattern"
            " (engine.ring.off() has the model's own attention, without a mask of yours)": attention != NAME,
            "expected evaluation mode, or training without dropout and checkpointing, got training with"
            f" {' and '.join(only_in_training)}: call engine.eval(), or leave that out (in TRL"
            " disable_dropout=True)": bool(only_in_training),
            f"expected a causal pattern, got {self.session.pattern}": not self.session.pattern.is_causal,
            f"expected greedy decoding, sampling or beams, got {mode.value}": mode.value not in _MODES
            or arguments.get("custom_generate") is not None,
            "expected use_cache=True, got False": settings.use_cache is False,
            f"expected greedy decoding or sampling, got {mode.value}: transformers' cache does not reorder"
            " the model's states, and beams would go on with those of others": "beam" in mode.value
            and any(module.mixes_beams(self.model) for module in variants()),
            "expected no config.sliding_window, got one that its attention does not know: transformers' cache"
            " would forget tokens; set it to None": only_the_cache_slides,
            f"expected no cache of another kind, got {type(cache).__name__}": cache is not None
            and not isinstance(cache, _cache_class()),
            "expected no cache_implementation, got one: keys and values stay on the ring": bool(
                settings.cache_implementation
            ),
            "expected no hidden states or attentions as a result, got a request for them": bool(
                settings.output_hidden_states or settings.output_attentions
            ),
            # On one process a last token that is padding sees the tokens before it.
            "expected prompts that end with a token, got padding there: pad them on the left, or give an"
            " attention_mask": isinstance(mask_BT, Tensor)
            and mask_BT.ndim == 2
            and not self._has_own_cache
            and not bool(mask_BT[:, -1].bool().all()),
        }
        reasons = [variant.refuse_generation(self.model) for variant in variants()]
        reasons += [fault for fault, applies in faults.items() if applies]
        for fault in filter(None, reasons):
            raise RingConfigError(f"{name}: {fault}; {_OFF}")

    def before(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a forward pass of a generation, for this rank; None for any other pass."""
        self.sharding = None
        cache = cache_in(arguments)
        if cache is None or not isinstance(cache, _cache_class()):
            return None
        self._cache = cache
        inputs = arguments.get("input_ids")
        if inputs is None:
            inputs = arguments.get("inputs_embeds")
        if inputs is None:
            raise RingShapeError("generate: expected input_ids or inputs_embeds, got none")
        tokens = int(inputs.shape[1])
        positions = arguments.get("position_ids")
        if positions is None and "position_ids" not in self.signature.parameters:
            positions = torch.arange(tokens, device=inputs.device)[None] + cache.get_seq_length()
        if positions is None or positions.ndim != 2:
            raise RingShapeError.wrong(
                type(self.model).__name__, "position_ids [samples, tokens]", "others", _OFF
            )
        mask_BT = arguments.pop("attention_mask", None)
        if self._has_own_cache:
            arguments |= {self._name: cache.own, "use_cache": True}
        elif not getattr(self.model, "_supports_default_dynamic_cache", lambda: True)():
            arguments["use_cache"] = False  # the cache is given; the model would ask for one of its own class
        if "output_router_logits" in self.signature.parameters:
            arguments["output_router_logits"] = False  # their loss is not read
        real_tokens: Tensor | None = None
        # Keep the mask if new tokens are padding; tokens that come after a kept mask are not.
        if mask_BT is not None and not bool(mask_BT[:, -tokens:].all()):
            cache.real_BT = mask_BT.detach().cpu().bool()
            cache.groups.clear()
            real_tokens = mask_BT[:, -tokens:]
        longest = positions.max()
        if cache.get_seq_length() == 0:
            return self._prompt(arguments, tokens, longest, real_tokens)
        cache.begin(tokens)
        assert cache.layout is not None
        session, groups = self.session, self._groups(cache.layout.tokens)
        self.sharding = CachedSharding(
            session.config, cache.layout, self.mesh, session.patterns, groups, longest,
            q_positions=torch.tensor(list(cache.arriving), device="cpu"), real_tokens=real_tokens,
            masks_padding=True,
        )  # fmt: skip
        session.batches.work_on(self.sharding)
        return arguments

    def _prompt(
        self, inputs: dict[str, Any], tokens: int, longest: Tensor, real_tokens: Tensor | None
    ) -> dict[str, Any]:
        """Return this rank's part of a prompt, which is cut as the batches of training are."""
        session, mesh, cache = self.session, self.mesh, self._cache
        assert cache is not None
        groups = self._groups(tokens)
        layout = session.sharder.layout_for(tokens, mesh, groups)
        cache.begin(tokens, layout)
        kind = session.needs.whole
        whole = None if kind is None else kind.make_prompt_features(inputs, layout, mesh)
        if real_tokens is not None:
            real_tokens = shard_sequence(real_tokens, layout, mesh=mesh, dim=1)
        self.sharding = BatchSharding(
            session.config, layout, mesh, session.patterns, groups, longest,
            whole=whole, real_tokens=real_tokens, masks_padding=True,
        )  # fmt: skip
        session.batches.work_on(self.sharding)
        owner, self._last = divmod(int(layout.slots_by_position()[-1]), layout.local_tokens)
        self._owns_last = owner == mesh.ring_rank
        local = dict(inputs)
        for key, value in inputs.items():
            is_of_tokens = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == tokens
            if is_of_tokens and (kind is None or key not in kind.names):
                local[key] = shard_sequence(value, layout, mesh=mesh, dim=1)
        if "logits_to_keep" in self.signature.parameters:
            local["logits_to_keep"] = torch.tensor([self._last], device=longest.device)
        return local

    def _groups(self, tokens: int) -> tuple[RowGroup, ...]:
        """Return the rows of the batch by their padding, for a layout of so many tokens."""
        assert self._cache is not None
        real_BT, groups = self._cache.real_BT, self._cache.groups
        if real_BT is None:
            return ()
        if tokens not in groups:
            ids_BT = torch.zeros(real_BT.shape[0], tokens, dtype=torch.int64, device="cpu")
            ids_BT[:, : real_BT.shape[1]].masked_fill_(~real_BT, PADDING)
            groups[tokens] = group_rows(ids_BT, real_BT.shape[0])
        return groups[tokens]

    def after(self, output: Any) -> None:
        """Count the tokens as stored; of a prompt give every rank the logits of its last token."""
        assert self._cache is not None
        if self._cache.arriving.start == 0:
            logits = output.logits
            slot = self._last if logits.shape[1] > 1 else 0
            last_B1V = logits[:, slot : slot + 1] * int(self._owns_last)
            if self.mesh.ring_group is not None:
                exchange = Exchange(self.mesh, self.session.config.hop_timeout_seconds)
                exchange.all_reduce(last_B1V, self.mesh.ring_group)
            output["logits"] = last_B1V
        if self._has_own_cache:
            self._cache.own, output[self._name] = output[self._name], self._cache
        self._cache.finish()


class _Generate:
    """Stand in front of a model's own `generate`."""

    def __init__(self, generation: Generation) -> None:
        model: Any = generation.model
        self._generation, self._model, self.own = generation, model, model.generate
        functools.update_wrapper(self, self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self.own).bind(*args, **kwargs).arguments
        arguments = {**bound, **bound.pop("kwargs", {})}
        return self.own(**arguments | self._generation.start(arguments))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copy of the model its own method: this one would go on with the original's weights."""
        return types.MethodType(type(self._model).generate, memo[id(self._model)])


def _described(arguments: dict[str, Any], settings: Any) -> dict[str, object]:
    """Return what must be equal on all ranks of a sequence, by its name in messages."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    fields: dict[str, object] = {
        name: f"{list(value.shape)}, checksum {_crc(value):08x}" for name, value in tensors.items()
    }
    fields["generation config"] = settings.to_diff_dict()
    if settings.do_sample:
        device = next((value.device for value in tensors.values()), torch.device("cpu"))
        state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
        fields["random numbers (call torch.manual_seed with one seed on all ranks)"] = f"{_crc(state):08x}"
    return fields


def _listed(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _crc(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().tobytes())


def one_ring(mesh: RingMesh) -> RingMesh:
    """Return a mesh whose ring is the whole sequence group of `mesh`, in order. Collective in the sequence.

    For replicated queries over a sharded cache, where heads are not split.

    It shares the groups, the failure detector and the count of calls of `mesh`; it has plans of its own, and
    is not traced. Use one of the two at a time.
    """
    grid = Grid(mesh.grid.world_size, mesh.sequence_size, 1, mesh.grid.order)
    owners = mesh.owners.derived({ContextCache, Observers}.__contains__)
    mesh_of_one = dataclasses.replace(
        mesh, grid=grid, ring_group=mesh.sequence_group, ulysses_group=None, owners=owners
    )
    group = mesh_of_one.ring_group
    if mesh.ulysses_size > 1 and group is not None and dist.get_backend(group) == "nccl":
        # NCCL connects in the first call, which all ranks must make; a hop may have messages of a few only.
        Exchange(mesh_of_one).all_reduce(torch.zeros(1, dtype=torch.float32, device="cuda"), group)
    return mesh_of_one
