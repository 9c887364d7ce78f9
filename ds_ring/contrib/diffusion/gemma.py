"""DiffusionGemma of transformers on a ring, as it is: its encoder's keys are shared, those of canvases stay.

The model encodes a text causally. Its decoder attends from a canvas to the text before it and to the canvas.
In training the text is the clean copy of a batch of `diffusion_batch`, and the canvases of all its blocks are
the corrupted copy, in one call. `batch.py` has such batches.

Shapes: B samples, H query heads, G K/V heads, C clean tokens, S local slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ds_ring.config.pattern_section import PatternConfig
from ds_ring.contrib.diffusion.batch import BLOCKS, DiffusionRows
from ds_ring.data.batch import (
    LABEL_KEYS,
    SHARDING,
    Batch,
    cache_in,
    cache_name,
    prepare_batch,
    split_tokens,
    token_shape,
)
from ds_ring.data.batch_sharder import BatchSharder
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.data.loss import local_loss
from ds_ring.data.model_needs import BatchKind
from ds_ring.data.packing import RowGroup, group_rows
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.masks.catalog import Causal, Full
from ds_ring.masks.slots import IntArray
from ds_ring.models.checks import THROUGH_SHARD_BATCH, cannot_run, check_length
from ds_ring.models.families import check_outputs
from ds_ring.models.layer_masks import LayerMask
from ds_ring.models.model_call import ModelCall
from ds_ring.models.variant import (
    POSITIONS,
    TWO_SEQUENCES,
    AttachRequest,
    Variant,
    find_forward_home,
)
from ds_ring.patterns.private.attention import PrivateAttention, RowsPass, attend_by_rows
from ds_ring.patterns.private.pattern import BlockDiffusion
from ds_ring.patterns.private.private_layout import PrivateLayout, make_private

if TYPE_CHECKING:
    from ds_ring.models.attention_call import AttentionCall
    from ds_ring.models.model_adapter import ModelAdapter

_DECODER = "decoder_"
_FULL = LayerPatterns(Full(), {})
_CANVAS = "canvas"


def _is_part(model: nn.Module) -> bool:
    known = find_forward_home(model).startswith("transformers.models.diffusion_gemma.")
    return known and isinstance(model, PreTrainedModel)


def _is_one(model: nn.Module) -> bool:
    return _is_part(model) and hasattr(model, "lm_head")


class DiffusionGemma(Variant):
    """DiffusionGemma, whose decoder reads the keys of the encoder and those of its canvas."""

    encoder_types = ("diffusion_gemma",)

    def matches(self, module: nn.Module) -> bool:
        return _is_one(module)

    def refuse(self, model: PreTrainedModel, request: AttachRequest) -> None:
        if not _is_part(model):
            return
        if request.is_outermost and not _is_one(model):
            raise cannot_run(model, "it is a part of DiffusionGemmaForBlockDiffusion; use that")
        config = request.config
        settings = {
            '"attention": "as_is"': request.as_is or config.attention == "as_is",
            '"dynamic_ring": true': config.get("dynamic_ring"),
            '"long_sequence"': config.changes_models,
            f'"layout": "{config.layout}"': config.layout not in ("auto", "private"),
            f'"ulysses_size": {config.ulysses_size}': config.ulysses_size > 1,
            '"verify_first_batch": true': config.get("verify_first_batch"),
            '"min_sequence_length"': config.min_sequence_length > 0,
        }
        for key, applies in settings.items():
            if applies:
                raise RingConfigError.wrong(type(model).__name__, f"a section without {key}", "it", "drop it")
        if config.pattern != PatternConfig():
            raise cannot_run(model, 'its batches have their pattern; leave "pattern" out')

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        return {TWO_SEQUENCES, POSITIONS} if _is_part(model) and not as_is else set()

    def own_attention(self, model: nn.Module) -> list[PreTrainedModel]:
        if not _is_one(model):
            return []
        whole: Any = model
        texts = (type(whole.config), type(whole.config.text_config))
        parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
        return [part for part in parts if type(part.config) not in texts]

    def attention_names(self, model: PreTrainedModel, name: str) -> dict[str, str] | None:
        if not _is_one(model):
            return None
        images: Any = model.config.vision_config
        return {"": name, "text_config": name, "vision_config": images._attn_implementation}

    def model_call(self, model: PreTrainedModel) -> type[ModelCall] | None:
        return CanvasCall if _is_one(model) else None

    def install(self, adapter: ModelAdapter) -> None:
        if _is_one(adapter.model):
            adapter.session.needs.batches = Canvases()

    def read(self, call: AttentionCall) -> None:
        whole = call.sharding.whole
        if not isinstance(whole, WholeCopies):
            return
        if type(call.module).__name__.startswith("DiffusionGemmaDecoder"):
            call.taken[_CANVAS] = (whole, call.arguments.pop("sliding_window", None))
            call.mask, call.sharding = LayerMask(Full()), whole.canvases
        else:
            assert call.sharding.encoder is not None
            call.sharding = call.sharding.encoder

    def attend(self, call: AttentionCall) -> Tensor | None:
        if _CANVAS not in call.taken:
            return None
        whole, window = call.taken[_CANVAS]
        out: Tensor = whole.attend(call, window)
        return out

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        return (
            "expected a model that continues a text, got one that fills canvases" if _is_one(model) else None
        )


@dataclass(frozen=True, eq=False)
class WholeCopies:
    """Hold how both copies of a batch are cut: `BatchSharding.whole`.

    Attributes:
        layout: of both copies.
        clean: of the clean copy alone.
        canvases: of the attention of canvases, whose keys are those of both copies.
    """

    layout: PrivateLayout
    clean: BatchSharding
    canvases: BatchSharding

    def attend(self, call: AttentionCall, window: int | None) -> Tensor:
        """Return attention [B, H, S, E] of canvases to the clean copy and to themselves."""
        sharding = call.sharding
        copies = (self.clean, sharding)
        parts = [(x.local_tokens, x.layout.valid_tokens(x.mesh.ring_rank)) for x in copies]
        passes = []
        for group in sharding.groups:
            pattern = replace(group.pattern, window=window)

            def make(pattern: BlockDiffusion = pattern) -> PrivateAttention:
                return PrivateAttention(sharding.config, pattern, self.layout, sharding.mesh, call.scale)

            attend = sharding.cached((pattern, call.scale), make)
            passes.append(RowsPass(attend, parts, group.rows))
        return attend_by_rows(passes, call.q_BHSD, call.k_BGSD, call.v_BGSE)


class Canvases(BatchKind):
    """Batches of `diffusion_batch` as the encoder's tokens and those of the decoder."""

    name = "DiffusionGemma"

    def prepare(self, batch: Mapping[str, Tensor], number: Callable[[Batch], Tensor] | None) -> Batch:
        """Return the batch, checked: see `prepare_batch`.

        Raises:
            RingPatternError: no batch of `diffusion_batch`, or rows of different lengths.
        """
        if BLOCKS not in batch:
            raise RingPatternError.wrong(
                "batch", f"{BLOCKS} for {self.name}", f"{sorted(batch)}", "use engine.ring.diffusion_batch"
            )
        prepared = prepare_batch(batch, Causal())
        lengths = (prepared[BLOCKS] > 0).sum(dim=1)
        if int(lengths.min()) < int(lengths.max()):
            raise RingPatternError.wrong(
                f"batch[{BLOCKS!r}]", "rows of one length", lengths.tolist(), "fill them with documents"
            )
        return prepared

    def cut(self, prepared: Batch, sharder: BatchSharder) -> tuple[Batch, BatchSharding]:
        """Return this rank's tokens of both copies, and the sharding of the decoder's."""
        config, mesh, samples = sharder.config, sharder.mesh, token_shape(prepared)[0]
        groups = group_rows(prepared[BLOCKS], samples, _make_pattern)
        first: BlockDiffusion = groups[0].pattern
        layout = make_private(2 * first.tokens, mesh.ring_size, 1, ((first, 1),))
        assert isinstance(layout, PrivateLayout)
        clean, corrupted = (layout.copy(start, first.tokens) for start in (0, first.tokens))
        packed = [
            RowGroup(group.pattern.documents, group.rows) for group in groups if group.pattern.documents
        ]
        of_text = BatchSharding(config, clean, mesh, sharder.patterns, tuple(packed))
        canvases = BatchSharding(config, corrupted, mesh, _FULL, groups, key_layout=layout)
        whole = WholeCopies(layout, of_text, canvases)
        sharding = BatchSharding(config, corrupted, mesh, sharder.patterns, whole=whole, encoder=of_text)
        rest = {key: x for key, x in prepared.items() if key != BLOCKS}
        inputs = {key: x[:, : first.tokens] for key, x in rest.items() if key not in LABEL_KEYS}
        outputs = {
            key if key in LABEL_KEYS else _DECODER + key: x[:, first.tokens : 2 * first.tokens]
            for key, x in rest.items()
        }
        return split_tokens(inputs, clean, mesh) | split_tokens(outputs, corrupted, mesh), sharding


def _make_pattern(row_T: IntArray) -> BlockDiffusion:
    return replace(DiffusionRows().make_row_pattern(row_T), causal=True, padding=0)


class CanvasCall(ModelCall):
    """Give the model the sharding of its batch and a cache of all keys, and compute its loss."""

    one_sequence = False

    def start(self) -> None:
        self._labels: tuple[Tensor, Tensor] | None = None

    def before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the call, take the labels out, and put sharding and cache in."""
        arguments = dict(self.signature.bind_partial(*args, **kwargs).arguments) | kwargs
        arguments.pop("kwargs", None)
        extra = ("attention_mask", "decoder_attention_mask", "pixel_values", "mm_encoder_outputs")
        faults = [name for name in extra if arguments.get(name) is not None]
        faults += ["a cache"] * (cache_in(arguments) is not None)
        names = [start + name for start in ("", _DECODER) for name in ("input_ids", "position_ids")]
        faults += [f"no {name}" for name in names if arguments.get(name) is None]
        if faults:
            raise RingShapeError.wrong(self.name, "the copies of a batch", faults[0], THROUGH_SHARD_BATCH)
        self.session.batches.select(x for x in arguments.values() if isinstance(x, Tensor))
        sharding = self.session.batches.current
        whole: WholeCopies = sharding.whole
        for start, part in (("", whole.clean), (_DECODER, sharding)):
            check_length(
                self.name, {key: arguments[start + key] for key in ("input_ids", "position_ids")}, part
            )
        _, aligned, items = (arguments.pop(key, None) for key in (*LABEL_KEYS, "num_items_in_batch"))
        self._labels = None if aligned is None or items is None else (aligned, items)
        cache = {cache_name(self.signature.parameters): DynamicCache()}  # without windows: of all keys
        return (), arguments | cache | {SHARDING: sharding}

    def after(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Check the output; put this rank's part of the mean over all labels in."""
        slots = self.session.batches.current.local_tokens
        check_outputs(self.model, output, slots, ("encoder_last_hidden_state",))
        if self._labels is not None:
            output["loss"] = local_loss(output.logits, *self._labels)
