"""Let `generate` of a transformers model run on the ring: the same tokens as on one process.

Every rank of a sequence calls `model.generate` with the same whole prompts and gets the same whole sequences.
Owns what happens around each forward pass of it: the prompt is cut and runs as a ring pass, which leaves keys
and values where they are (ring_cache.py); each new token runs on every rank, as replicated queries. Decoding
itself (sampling, beams, stopping) is transformers'.

Shapes: B samples, T tokens so far, Q tokens of a call, V words.

[Note: the same tokens on all ranks]
A prompt is cut in front of the model's first hook, as a batch is. A later token runs whole on every rank, and
only its attention over the cache is shared. All ranks get the logits of the prompt's last token from its
owner; the logits of later tokens have the same bits everywhere by themselves. Each call first compares
prompts, settings and the state of the random numbers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from ds_ring.errors import RingConfigError, RingError, RingShapeError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.deepspeed.packing import PADDING, RowGroup, group_rows
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.integrations.transformers.images import OF_IMAGES, images_of_prompt
from ds_ring.integrations.transformers.layer_masks import makes_such_masks
from ds_ring.integrations.transformers.ring_cache import CachedSharding, RingCache
from ds_ring.runtime.agreement import agree
from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.one_ring import one_ring
from ds_ring.runtime.shard import shard_sequence

_MODES = {
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
}
_OFF = "or generate without a ring: with engine.ring.off(): model.generate(...)"


class Generation:
    """Run the forward passes of `generate` on a ring.

    Attributes:
        sharding: of the forward pass under way, if it is one of a generation.
    """

    def __init__(self, model: PreTrainedModel, session: RingSession) -> None:
        self.sharding: BatchSharding | None = None
        self._model, self._session = model, session
        self._signature = inspect.signature(model.forward)
        self._cache: RingCache | None = None
        self._last = 0  # slot of the prompt's last token, on the rank that has it

    @functools.cached_property
    def mesh(self) -> RingMesh:
        """Return the mesh that generation runs on. Collective in the sequence, at first use."""
        return one_ring(self._session.mesh)

    def start(self, asked: dict[str, Any], rewritten: bool) -> dict[str, Any]:
        """Check a call of `generate`, by its arguments, on all ranks; return what it gets beside them.

        Raises:
            RingError: it cannot be honoured, or the ranks of the sequence ask for different things.
        """
        refused: RingError | None = None
        fields: dict[str, object] = {}
        try:
            fields = _described(asked, _settings(self._model, asked))
            self._check(asked, rewritten)
        except RingError as error:
            refused = error
        if self.mesh.ring_size > 1:
            agree(Exchange(self.mesh), "generate", fields, refused)
        elif refused is not None:
            raise refused
        given: dict[str, Any] = {"past_key_values": RingCache(self.mesh.ring_rank, self.mesh.ring_size)}
        # Replicas that end early go on with the others: at ZeRO 3 each layer's weights come from all ranks.
        sharded = any(hasattr(parameter, "ds_id") for parameter in self._model.parameters())
        if sharded and self.mesh.data_size > 1:
            given["synced_gpus"] = True
        return {name: value for name, value in given.items() if asked.get(name) is None}

    def _check(self, asked: dict[str, Any], rewritten: bool) -> None:
        name = f"{type(self._model).__name__}.generate"
        settings = _settings(self._model, asked)
        mode = settings.get_generation_mode(asked.get("assistant_model"))
        cache = asked.get("past_key_values")
        faults = {
            "expected attention of the model's own, got one that the backend has rewritten": rewritten,
            "expected evaluation mode, got training: call engine.eval()": self._model.training,
            f"expected a causal pattern, got {self._session.pattern}": not self._session.pattern.is_causal,
            f"expected greedy decoding, sampling or beams, got {mode.value}": mode not in _MODES
            or asked.get("custom_generate") is not None,
            "expected use_cache=True, got False": settings.use_cache is False,
            "expected no config.sliding_window, got one that its attention does not know: transformers' cache"
            " would forget tokens; set it to None": _only_the_cache_slides(self._model),
            f"expected no cache of another kind, got {type(cache).__name__}": cache is not None
            and not isinstance(cache, RingCache),
            "expected no cache_implementation, got one: keys and values stay on the ring": bool(
                settings.cache_implementation
            ),
            "expected no hidden states or attentions as a result, got a request for them": bool(
                settings.output_hidden_states or settings.output_attentions
            ),
        }
        for fault, applies in faults.items():
            if applies:
                raise RingConfigError(f"{name}: {fault}; {_OFF}")

    def before(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a forward pass of a generation, for this rank; None for any other pass."""
        self.sharding = None
        cache = given.get("past_key_values")
        if not isinstance(cache, RingCache):
            return None
        self._cache = cache
        tokens = _tokens_of(given)
        positions = given.get("position_ids")
        if positions is None or positions.ndim != 2:
            raise RingShapeError(
                f"{type(self._model).__name__}: expected position_ids [samples, tokens], got"
                f" {None if positions is None else list(positions.shape)}; {_OFF}"
            )
        mask_BT = given.pop("attention_mask", None)
        if "output_router_logits" in self._signature.parameters:
            given["output_router_logits"] = False  # nobody reads the loss that they are for
        longest = positions.max()
        if cache.get_seq_length() == 0:
            return self._prompt(given, tokens, mask_BT, longest)
        cache.begin(tokens)
        _note_padding(cache, mask_BT, tokens)
        assert cache.layout is not None
        session, groups = self._session, self._groups(cache.layout.tokens)
        self.sharding = CachedSharding(
            session.config, cache.layout, self.mesh, session.patterns, groups, longest,
            q_positions=torch.tensor(list(cache.arriving)),
        )  # fmt: skip
        session.batches.work_on(self.sharding)
        return given

    def _prompt(
        self, given: dict[str, Any], tokens: int, mask_BT: Tensor | None, longest: Tensor
    ) -> dict[str, Any]:
        """Return this rank's part of a prompt, which is cut as the batches of training are."""
        session, mesh, cache = self._session, self.mesh, self._cache
        assert cache is not None
        _note_padding(cache, mask_BT, tokens)
        groups = self._groups(tokens)
        layout = session.layout_for(tokens, mesh, groups)
        cache.begin(tokens, layout)
        images = images_of_prompt(given, session.needs.images, layout, mesh)
        self.sharding = BatchSharding(
            session.config, layout, mesh, session.patterns, groups, longest, images=images
        )
        session.batches.work_on(self.sharding)
        owner, self._last = divmod(int(layout.slots_by_position()[-1]), layout.local_tokens)
        self._owns_last = owner == mesh.ring_rank
        local = {
            key: shard_sequence(value, layout, mesh=mesh, dim=1) if _has_tokens(key, value, tokens) else value
            for key, value in given.items()
        }
        if "logits_to_keep" in self._signature.parameters:
            local["logits_to_keep"] = torch.tensor([self._last], device=longest.device)
        return local

    def _groups(self, tokens: int) -> tuple[RowGroup, ...]:
        """Return the rows of the batch by their padding, for a layout of so many tokens."""
        assert self._cache is not None
        real_BT, kept = self._cache.real_BT, self._cache.groups
        if real_BT is None:
            return ()
        if tokens not in kept:
            ids_BT = torch.zeros(real_BT.shape[0], tokens, dtype=torch.int64)
            ids_BT[:, : real_BT.shape[1]].masked_fill_(~real_BT, PADDING)
            kept[tokens] = group_rows(ids_BT, real_BT.shape[0])
        return kept[tokens]

    def after(self, output: Any) -> None:
        """Count the tokens as stored; of a prompt give every rank the logits of its last token."""
        assert self._cache is not None
        if self._cache.arriving.start == 0:
            logits = output.logits
            slot = self._last if logits.shape[1] > 1 else 0
            last_B1V = logits[:, slot : slot + 1] * int(self._owns_last)
            if self.mesh.ring_group is not None:
                exchange = Exchange(self.mesh, self._session.config.hop_timeout_seconds)
                exchange.all_reduce(last_B1V, self.mesh.ring_group)
            output.logits = last_B1V
        self._cache.finish()


def allow_generation(
    model: PreTrainedModel, session: RingSession, rewritten: Callable[[], bool]
) -> tuple[Generation, RemovableHandle]:
    """Make `model.generate` run on the ring.

    Returns what the model's hooks must know of its passes, and the handle of the hook that is added here.
    """
    generation = Generation(model, session)
    signature = generation._signature

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling():
            return None
        local = generation.before(dict(signature.bind_partial(*args).arguments) | kwargs)
        return None if local is None else ((), local)

    # Before all other hooks: they see this rank's tokens, as in training.
    handle = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    if hasattr(model, "generate"):
        model.__dict__["generate"] = _Generate(model, generation, rewritten)
    return generation, handle


class _Generate:
    """Stand in front of a model's own `generate`."""

    def __init__(self, model: Any, generation: Generation, rewritten: Callable[[], bool]) -> None:
        self._model, self._own = model, model.generate
        self._generation, self._rewritten = generation, rewritten
        functools.update_wrapper(self, self._own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self._own).bind(*args, **kwargs).arguments
        asked = {**bound, **bound.pop("kwargs", {})}
        return self._own(**asked | self._generation.start(asked, self._rewritten()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copy of the model its own method: this one would go on with the original's weights."""
        return types.MethodType(type(self._model).generate, memo[id(self._model)])


def _only_the_cache_slides(model: PreTrainedModel) -> bool:
    """Return whether a window is in the configuration but in no mask (Moshi)."""
    config = model.config.get_text_config()
    window, types = (getattr(config, name, None) for name in ("sliding_window", "layer_types"))
    return bool(window) and types is None and not makes_such_masks(model, "sliding_attention")


def _settings(model: PreTrainedModel, asked: dict[str, Any]) -> Any:
    """Return the generation config of a call, as transformers puts it together."""
    settings = copy.deepcopy(asked.get("generation_config") or model.generation_config)
    settings.update(**{name: value for name, value in asked.items() if hasattr(settings, name)})
    return settings


def _described(asked: dict[str, Any], settings: Any) -> dict[str, object]:
    """Return what must be equal on all ranks of a sequence, by its name in messages."""
    tensors = {name: value for name, value in asked.items() if isinstance(value, Tensor)}
    fields: dict[str, object] = {
        name: f"{list(value.shape)}, checksum {_crc(value):08x}" for name, value in tensors.items()
    }
    fields["generation config"] = settings.to_diff_dict()
    if settings.do_sample:
        device = next((value.device for value in tensors.values()), torch.device("cpu"))
        state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
        fields["random numbers (call torch.manual_seed with one seed on all ranks)"] = f"{_crc(state):08x}"
    return fields


def _crc(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().tobytes())


def _tokens_of(given: dict[str, Any]) -> int:
    """Return how many tokens a forward pass is given."""
    for key in ("input_ids", "inputs_embeds"):
        if given.get(key) is not None:
            return int(given[key].shape[1])
    raise RingShapeError("generate: expected input_ids or inputs_embeds, got none")


def _has_tokens(key: str, value: object, tokens: int) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == tokens and key not in OF_IMAGES


def _note_padding(cache: RingCache, mask_BT: Tensor | None, tokens: int) -> None:
    """Keep which tokens are padding, if new ones are; those behind the mask that is kept are none."""
    if mask_BT is None or bool(mask_BT[:, -tokens:].all()):
        return
    cache.real_BT = mask_BT.detach().cpu().bool()
    cache.groups.clear()
