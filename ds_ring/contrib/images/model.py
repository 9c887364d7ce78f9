"""Give the language part of a vision-language model the image features of its own tokens.

[Note: features of images]
Each rank runs the image encoders on its share of the images of a batch and gets the features of its own image
tokens (batch.py counts them before the batch is cut): [Note: shares of images]. Image encoders keep their own
attention. Every rank encodes all images where samples are whole (below min_sequence_length), and in a
generation, whose `generate` encodes them before the ring sees the prompt.

Shapes: B samples, T tokens, S local tokens, N image tokens of the batch, E width of the language part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.comm.collective import collective
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.contrib.images.batch import ENCODED, OF_IMAGES, Images, ImageTokens, has_images
from ds_ring.contrib.images.blocks import numbers_blocks
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.integrations.adapter import patch
from ds_ring.integrations.deepspeed.batch import Batch
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.integrations.transformers.layer_masks import LayerMask
from ds_ring.integrations.transformers.model import PRETRAINED, TABLE
from ds_ring.integrations.transformers.model_part import Loss, ModelPart
from ds_ring.integrations.transformers.variants.variant import Variant

if TYPE_CHECKING:
    from ds_ring.integrations.transformers.model_adapter import ModelAdapter

# By model_type, those that tests compare with one process. Each takes in its forward pass what
# `get_image_features` returns, and puts one feature in the place of each image token. Gemma 3 and PaliGemma
# also let the tokens of an image, or of a prompt, see each other: [Note: tokens of a block].
EXACT = tuple(
    """
    apertus1p5 aria aya_vision blip-2 chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni
    deepseek_ocr2 deepseek_vl deepseek_vl_hybrid dots3_note emu3 ernie4_5_vl_moe exaone4_5 fuyu gemma3
    gemma4 gemma4_unified glm46v glm4v glm4v_moe glm5_next glm_ocr glmga got_ocr2 granite4_vision
    granite_docling hunyuan_vl hy_v4_vl hyperclovax_vision_v2 idefics2 idefics3 inkling2 inkling2_loop
    inkling_mm_model instructblip internvl janus
    kimi_k25 lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next llava_next_video llava_onevision
    minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral_large4 molmo2 muse_glimmer muse_spark
    nemotron_h_omni ovis2 paddleocr_vl paligemma pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl
    qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp smolvlm step3p7
    unlimited_ocr video_llama_3 video_llava vipllava
    """.split()  # noqa: SIM905
)
# Those whose texts are: the images and sounds of these are refused.
TEXTS = ("phi4_multimodal",)
# What `get_image_features` returns for each image token: of most models, and of layers of the language part.
_FEATURES, _OF_LAYERS = ("pooler_output", "last_hidden_state"), "deepstack_features"
_OF_BLIP = ("opt", "llama")  # language parts which BLIP-2 and InstructBLIP give a mask of ones
_MAKE_MASKS = ("paligemma", "molmo2")
_GRIDS = ("image_grid_thw", "image_grid_hw", "target_sizes")  # numbers of each image's patches
# Each rank encodes all images where some have tiles, tokens pool patches of several, or a layer normalizes
# over the batch.
_TILES = frozenset({"pixel_values_local", "image_token_pooling"})
_REFUSED = (
    "pixel_values_videos", "video_grid_thw", "input_features", "audio_values", "image_pixel_values",
    "audio_input_features",
)  # fmt: skip
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ImageModels(Variant):
    """Models with image encoders, which keep their own attention."""

    encoder_types = EXACT

    def own_attention(self, model: nn.Module) -> list[PreTrainedModel]:
        return image_encoders(model)

    def apart(self, model: nn.Module) -> list[nn.Module]:
        """Return all modules but the language part: encoders, and what makes features of their outputs."""
        return modules_of_encoders(model) if image_encoders(model) else []

    def makes_full_masks(self, model_type: str) -> bool:
        return model_type in _OF_BLIP

    def install(self, adapter: ModelAdapter) -> None:
        """Let the language part of models that make its mask themselves make a causal one."""
        model: Any = adapter.model
        if _takes_images(model) and model.config.model_type in _MAKE_MASKS:
            adapter.apply(partial(_leave_mask_out, adapter.session), decoder=model.get_decoder())

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        text = model.config.get_text_config()
        if "reference_sliding_attention" not in (getattr(text, "layer_types", None) or ()):
            return None
        return "expected layers without a window over generated tokens alone, got reference_sliding_attention"

    def attention_names(self, model: PreTrainedModel, name: str) -> dict[str, str] | None:
        return attention_of_parts(model, name) if image_encoders(model) else None


class ImagePart(ModelPart):
    """Give a model the image features of its own tokens."""

    def patches(self, loss: Loss) -> list[Any]:
        """Return the hook that makes the model take images, or refuse them."""
        hook = images_hook(self.model, self.session)
        return [] if hook is None else [hook]


def _takes_images(model: nn.Module) -> bool:
    return _type_of(model) in EXACT


def _type_of(model: nn.Module) -> str | None:
    found: str | None = getattr(getattr(model, "config", None), "model_type", None)
    return found


def image_encoders(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models inside `model` that read whole images, and those inside them."""
    return encoders_of(model) if _type_of(model) in (*EXACT, *TEXTS) else []


def encoders_of(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models inside `model` but itself and its text part, and those inside them."""
    config: Any = model.config
    of_text = (type(config), type(getattr(config, "text_config", config)))
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    roots = [part for part in parts if type(part.config) not in of_text]
    found = {id(part): part for root in roots for part in root.modules() if isinstance(part, PreTrainedModel)}
    return list(found.values())


def modules_of_encoders(model: Any) -> list[nn.Module]:
    """Return all modules but the language part: encoders, and what makes features of their outputs."""
    of_text = {id(module) for module in model.get_decoder().modules()}
    return [module for module in model.modules() if id(module) not in of_text] + [
        module for part in encoders_of(model) for module in part.modules()
    ]


def attention_of_parts(model: Any, name: str) -> dict[str, str]:
    """Return what to set as a model's attention so that all of it but its encoders gets `name`."""
    own = {
        key: part._attn_implementation
        for key in model.config.sub_configs
        if key != "text_config" and (part := getattr(model.config, key, None)) is not None
    }
    return {"": name, "text_config": name} | own


@patch(
    TABLE.given("decoder", PRETRAINED), stage="before_forward", feature="images.masks",
    reason="leaves out the mask with blocks, which the batch's rows have",
    when="a model of images makes the mask of its language part",
)  # fmt: skip
def _leave_mask_out(
    session: RingSession, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let the language part make its own mask: it would read the shape of the one that it is given."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, LayerMask):
        return None
    mask.check_blocks(session.batches.current)
    return args, kwargs | {"attention_mask": None}


_gives_features = patch(
    TABLE.given("base", PRETRAINED), stage="before_forward", feature="images",
    reason="gives the features of this rank's image tokens", when="the model takes images",
)  # fmt: skip


def images_hook(model: PreTrainedModel, session: RingSession) -> Callable[..., Any] | None:
    """Return the hook that makes `model` take images, or refuse them; None if its class takes none.

    Raises:
        RingConfigError: (from a forward pass) images for a model that is not in `EXACT`, videos or sound.
        RingShapeError: (from a forward pass) other numbers of image tokens than of features.
    """
    base = model.base_model
    if not hasattr(base, "get_image_features") and _type_of(model) not in TEXTS:
        return None
    if _takes_images(model):
        number = _axes_of(base) if hasattr(base, "get_rope_index") else None
        session.needs.whole = Images(int(model.config.image_token_id), number, numbers_blocks(model))
    signature = inspect.signature(base.forward)

    @_gives_features
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = dict(signature.bind_partial(*args).arguments) | kwargs
        _check_given(model, given)
        if not has_images(given):
            return None
        images = session.batches.current.whole
        if images is None:
            raise RingShapeError(
                "images: expected those of the batch, got others; give them to engine.ring.shard_batch"
            )
        mesh, wait_s = session.batches.current.mesh, session.config.hop_timeout_seconds
        given[ENCODED] = {"image": _local_features(base, given, images, mesh, wait_s)}
        if images.axes_BSA is not None:
            given["position_ids"] = images.axes_BSA.permute(2, 0, 1)
        return (), given

    return before


def _check_given(model: PreTrainedModel, given: dict[str, Any]) -> None:
    name = type(model).__name__
    refused = [key for key in _REFUSED if given.get(key) is not None]
    refused += [key for key in given.get(ENCODED) or {} if key != "image"]
    if has_images(given) and not _takes_images(model):
        refused.append("images")
    if refused:
        raise RingConfigError(
            f"{name}: expected texts, got {', '.join(refused)}; images are exact with the model types"
            f" {', '.join(EXACT)}: leave them out, or pass inputs_embeds through engine.ring.shard_batch"
        )
    if has_images(given) and torch.compiler.is_compiling():
        raise RingConfigError.wrong(name, "no compiled model with images", "one", "do not compile it")


# [Note: shares of images]
# Images are divided among the ranks of a sequence in their order, by their numbers of patches: each is
# encoded once. An image token takes one feature, so each feature is sent to the one rank that has its
# token, and its gradient comes back from there: the encoder's gradient is a sum over the ranks, like any
# other. Which rank needs which feature is known from the whole batch; how many features a rank has found is
# exchanged once. A rank that has no image encodes the first one without using its features, so every rank
# runs the same modules (ZeRO 3 gathers their parameters) and has a gradient for each parameter.
def _local_features(
    base: Any, given: dict[str, Any], images: ImageTokens, mesh: RingMesh, wait_s: float
) -> Any:
    """Return what `get_image_features` found, with the features of this rank's image tokens in their order.

    Takes the images out of `given`.
    """
    found = (given.get(ENCODED) or {}).get("image")
    shared, is_used = False, True
    if found is None:
        takes = inspect.signature(base.get_image_features).parameters
        pixels = {key: given[key] for key in OF_IMAGES if given.get(key) is not None and key in takes}
        shared = bool(images.wanted) and mesh.sequence_size > 1 and not _TILES.intersection(pixels)
        shared = shared and not any(map(_reads_other_images, base.modules()))
        if shared:
            pixels, is_used = _share(pixels, takes, mesh)
        layer = given.get("vision_feature_layer")
        more = {} if layer is None or "vision_feature_layer" not in takes else {"vision_feature_layer": layer}
        if isinstance(pixels.get("num_local_patches"), Tensor):
            pixels["num_local_patches"] = pixels["num_local_patches"].tolist()  # some split a tensor by it
        found = base.get_image_features(**pixels, **more, return_dict=True)
    given["pixel_values"] = None  # which BLIP-2 has to be given
    features = _features(found)
    parts = [_rows(of_tokens) for _, _, of_tokens in features]
    rows_NE = torch.cat(parts, dim=1)
    if shared:
        mine = _exchanged(rows_NE if is_used else rows_NE[:0], base, images, mesh, wait_s)
    else:
        check_number(base, len(rows_NE), images)
        mine = rows_NE[images.places_BS[images.places_BS > 0] - 1]
    local: dict[str, Any] = {}
    for (name, layer, whole), part in zip(
        features, mine.split([x.shape[1] for x in parts], dim=1), strict=True
    ):
        own = (part,) if isinstance(whole, (tuple, list)) else part.view(*[1] * (whole.ndim - 2), *part.shape)
        if name == _OF_LAYERS:
            local.setdefault(name, []).append(own if layer is None else (layer, own))
        else:
            local[name] = own
    return type(found)(**local)


def _reads_other_images(module: nn.Module) -> bool:
    """Return whether a module normalizes over all images of a batch, as Emu3's in training."""
    return module.training and isinstance(module, _BATCH_NORMS)


def _features(found: Any) -> list[tuple[str, int | None, Any]]:
    """Return each output that has a feature for each image token: its name, the layer it is for, itself."""
    name = next((name for name in _FEATURES if found.get(name) is not None), None)
    features: list[tuple[str, int | None, Any]] = [] if name is None else [(name, None, found[name])]
    for part in found.get(_OF_LAYERS) or []:
        layer, whole = part if isinstance(part[0], int) else (None, part)  # Granite 4's name the layer
        features.append((_OF_LAYERS, layer, whole))
    return features


def _rows(features: Any) -> Tensor:
    """Return the features [N, E] of a tensor, or of one for each image."""
    several = isinstance(features, (tuple, list))
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in (features if several else [features])])


def check_number(base: Any, features: int, images: ImageTokens, kind: str = "image") -> None:
    """Raise RingShapeError unless a batch has a token for each feature."""
    if features != images.tokens:
        raise RingShapeError(
            f"batch: expected {features} {kind} tokens, got {images.tokens}; use one processor for both"
        )


def _share(pixels: dict[str, Tensor], takes: Any, mesh: RingMesh) -> tuple[dict[str, Tensor], bool]:
    """Return the tensors of the images that this rank encodes, and whether it uses their features."""
    values, dim = pixels["pixel_values"], 0
    grid = next((name for name in _GRIDS if name in pixels), None)
    # where the patches of all images are concatenated: in rows, or as squares of one strip (MiniCPM's)
    pixel_dim, unit = (values.ndim - 1, values.shape[-2]) if grid == "target_sizes" else (0, 1)
    if grid is not None:
        patches_I = pixels[grid].prod(dim=1).cpu()
        if int(patches_I.sum()) * unit != values.shape[pixel_dim]:
            raise RingShapeError(
                f"pixel_values: expected {int(patches_I.sum()) * unit} patches ({grid}), got"
                f" {values.shape[pixel_dim]}"
            )
    elif values.ndim == 5 and "pixel_attention_mask" in takes:
        # Idefics: by sample, and images of zeros where a sample has fewer
        mask = pixels.get("pixel_attention_mask")
        has_pixels_BI = (values != 0).flatten(2).any(dim=2)
        real_BI = mask.bool() if mask is not None and mask.ndim == 2 else has_pixels_BI
        pixels = {key: x[real_BI][None] for key, x in pixels.items()}
        patches_I, dim = torch.ones(int(real_BI.sum()), dtype=torch.int64), 1
    else:
        patches_I = torch.ones(len(values), dtype=torch.int64)
    ends_I = patches_I.cumsum(0)
    # an image belongs to the rank whose share of all patches has its middle
    owners_I = (2 * ends_I - patches_I) * mesh.sequence_size // (2 * int(ends_I[-1]))
    mine = (owners_I == mesh.sequence_rank).nonzero()[:, 0]
    first, count = (int(mine[0]), len(mine)) if len(mine) else (0, 1)
    start, stop = int(ends_I[first] - patches_I[first]), int(ends_I[first + count - 1])

    def cut(key: str, x: Tensor) -> Tensor:
        if grid is not None and key == "pixel_values":
            return x.narrow(pixel_dim, start * unit, (stop - start) * unit)
        return x.narrow(dim, first, count)

    return {key: cut(key, x) for key, x in pixels.items()}, bool(len(mine))


@dataclass(frozen=True)
class _Routes:
    """Say which features go to which rank of the sequence.

    Attributes:
        sends: by rank, the rows of this rank's features that it needs.
        receives: by rank, the places of its features among this rank's image tokens.
        count: image tokens of this rank.
    """

    mesh: RingMesh
    wait_s: float
    sends: dict[int, Tensor]
    receives: dict[int, Tensor]
    count: int


class _Exchanged(torch.autograd.Function):
    """Send features to the ranks of their tokens, and their gradients back. Collective in both directions."""

    @staticmethod
    def forward(ctx: Any, rows_NE: Tensor, routes: _Routes) -> Tensor:
        ctx.routes, ctx.rows = routes, len(rows_NE)
        return _sent(rows_NE, "image features", routes, routes.sends, routes.receives, routes.count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        routes = ctx.routes
        name = "image features backward"
        return _sent(grads[0], name, routes, routes.receives, routes.sends, ctx.rows), None


def _sent(
    rows_NE: Tensor,
    name: str,
    routes: _Routes,
    sends: dict[int, Tensor],
    receives: dict[int, Tensor],
    count: int,
) -> Tensor:
    """Return `count` rows: those of other ranks and of this one, at the places in `receives`."""
    mesh, own = routes.mesh, routes.mesh.sequence_rank
    with collective(mesh, name, Exchange(mesh, routes.wait_s)) as call:
        call.agree({"features": rows_NE.shape[1], "dtype": rows_NE.dtype})
        arrived = rows_NE.new_zeros((count, rows_NE.shape[1]))
        arrived[receives[own]] = rows_NE[sends[own]]
        leaving = [(peer, rows_NE[index]) for peer, index in sends.items() if peer != own and len(index)]
        coming = [
            (peer, rows_NE.new_empty((len(places), rows_NE.shape[1])))
            for peer, places in receives.items()
            if peer != own and len(places)
        ]
        if leaving or coming:
            call.exchange.post_in_sequence(leaving, coming).wait()
        for peer, rows in coming:
            arrived[receives[peer]] = rows
    return arrived


def _exchanged(rows_NE: Tensor, base: Any, images: ImageTokens, mesh: RingMesh, wait_s: float) -> Tensor:
    """Return the features of this rank's image tokens, of the features that each rank has encoded."""
    own = mesh.sequence_rank
    count = torch.tensor([len(rows_NE)], device=rows_NE.device)
    with collective(mesh, "number of image features", Exchange(mesh, wait_s)) as call:
        call.agree({"image tokens": images.tokens})
        counts = torch.cat(call.exchange.all_gather(count, mesh.sequence_group, mesh.sequence_size)).tolist()
    check_number(base, sum(counts), images)
    starts = [sum(counts[:rank]) for rank in range(len(counts))]

    def of_rank(index: Tensor, rank: int) -> Tensor:
        return (index >= starts[rank]) & (index < starts[rank] + counts[rank])

    wanted = images.wanted
    sends = {rank: index[of_rank(index, own)] - starts[own] for rank, index in enumerate(wanted)}
    receives = {rank: of_rank(wanted[own], rank).nonzero()[:, 0] for rank in range(len(counts))}
    routes = _Routes(mesh, wait_s, sends, receives, len(wanted[own]))
    found: Tensor = _Exchanged.apply(rows_NE, routes)
    return found


def _axes_of(base: Any) -> Callable[[Batch], Tensor]:
    """Return what numbers the tokens of a batch on the axes of time, height and width: [B, T, 3]."""
    takes = inspect.signature(base.get_rope_index).parameters

    def number(batch: Batch) -> Tensor:
        if "mm_token_type_ids" in takes and batch.get("mm_token_type_ids") is None:
            raise RingShapeError.wrong(
                "batch", "mm_token_type_ids with images", "none", "use the model's processor"
            )
        positions_3BT = base.get_rope_index(**{key: batch[key] for key in takes if key in batch})[0]
        return positions_3BT.permute(1, 2, 0).contiguous()

    return number
