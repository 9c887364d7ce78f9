"""Give the language part of a vision-language model the image and video features of its own tokens.

[Note: features of images]
Each rank runs the encoders on its share of the images and videos of a batch and gets the features of its own
tokens (batch.py counts them before the batch is cut): [Note: shares of images]. Encoders keep their own
attention. Every rank encodes everything where samples are whole (below min_sequence_length), and in a
generation, whose `generate` encodes images before the ring sees the prompt.

Shapes: B samples, T tokens, S local tokens, N features, E width of the language part, I images or videos, U
units: images, and steps of videos.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.comm.collective import collective
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.contrib.images.batch import (
    ENCODED,
    OF_IMAGES,
    OF_VIDEOS,
    PIXELS,
    BatchFeatures,
    FeatureTokens,
    Images,
    find_modalities,
)
from ds_ring.contrib.images.blocks import numbers_blocks
from ds_ring.data.batch import Batch
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.models.layer_masks import LayerMask
from ds_ring.models.model import PRETRAINED, TABLE
from ds_ring.models.model_part import Loss, ModelPart
from ds_ring.models.variant import Variant
from ds_ring.ops.eager import run_compared
from ds_ring.ops.layer_gradients import compare_gradient, has_run_again, note_call
from ds_ring.patches import patch

if TYPE_CHECKING:
    from ds_ring.models.model_adapter import ModelAdapter

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
# Numbers of each image's and video's patches, and those of patches that are squares of one strip (MiniCPM's).
_STRIPS = ("target_sizes", "target_sizes_videos")
_GRIDS = ("image_grid_thw", "image_grid_hw", "video_grid_thw", *_STRIPS)
# Each rank encodes all images where some have tiles, tokens pool patches of several, or a layer normalizes
# over the batch.
_TILES = frozenset({"pixel_values_local", "image_token_pooling", "video_token_pooling"})
# A video's tokens are image tokens: transformers takes no batch with both.
_ONE_TOKEN = ("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "molmo2", "nemotron_h_omni")
# Their encoders attend over all frames of a video: one rank encodes it.
_WHOLE_VIDEOS = ("kimi_k25", "minimax_m3_vl")
# Their encoders call modules once for each image: ranks have equal numbers, so that ZeRO 3 gathers alike.
_ONE_BY_ONE = (
    "apertus1p5", "hunyuan_vl", "hy_v4_vl", "lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7",
    "paddleocr_vl",
)  # fmt: skip
# An image token is a video's between the tokens that begin and end one, which may be on other ranks.
_SPANS = ("glm5_next",)
_REFUSED = ("input_features", "audio_values", "image_pixel_values", "audio_input_features")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ImageModels(Variant):
    """Models with image encoders, which keep their own attention."""

    encoder_types = EXACT

    def own_attention(self, model: nn.Module) -> list[PreTrainedModel]:
        return find_image_encoders(model)

    def apart(self, model: nn.Module) -> list[nn.Module]:
        """Return all modules but the language part: encoders, and what makes features of their outputs."""
        return list_encoder_modules(model) if find_image_encoders(model) else []

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
        return name_part_attention(model, name) if find_image_encoders(model) else None


class ImagePart(ModelPart):
    """Give a model the image features of its own tokens."""

    def patches(self, loss: Loss) -> list[Any]:
        """Return the hook that makes the model take images, or refuse them."""
        hook = make_images_hook(self.model, self.session)
        return [] if hook is None else [hook]


def _takes_images(model: nn.Module) -> bool:
    return _get_model_type(model) in EXACT


def _get_model_type(model: nn.Module) -> str | None:
    model_type: str | None = getattr(getattr(model, "config", None), "model_type", None)
    return model_type


def find_image_encoders(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models inside `model` that read whole images, and those inside them."""
    return find_encoders(model) if _get_model_type(model) in (*EXACT, *TEXTS) else []


def find_encoders(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models inside `model` but itself and its text part, and those inside them."""
    config: Any = model.config
    of_text = (type(config), type(getattr(config, "text_config", config)))
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    roots = [part for part in parts if type(part.config) not in of_text]
    inside = {
        id(part): part for root in roots for part in root.modules() if isinstance(part, PreTrainedModel)
    }
    return list(inside.values())


def list_encoder_modules(model: Any) -> list[nn.Module]:
    """Return all modules but the language part: encoders, and what makes features of their outputs."""
    of_text = {id(module) for module in model.get_decoder().modules()}
    return [module for module in model.modules() if id(module) not in of_text] + [
        module for part in find_encoders(model) for module in part.modules()
    ]


def name_part_attention(model: Any, name: str) -> dict[str, str]:
    """Return what to set as a model's attention so that all of it but its encoders gets `name`."""
    encoders = {
        key: part._attn_implementation
        for key in model.config.sub_configs
        if key != "text_config" and (part := getattr(model.config, key, None)) is not None
    }
    return {"": name, "text_config": name} | encoders


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


def make_images_hook(model: PreTrainedModel, session: RingSession) -> Callable[..., Any] | None:
    """Return the hook that makes `model` take images, or refuse them; None if its class takes none.

    Raises:
        RingConfigError: (from a forward pass) images for a model that is not in `EXACT`, videos or sound.
        RingShapeError: (from a forward pass) other numbers of image tokens than of features.
    """
    base = model.base_model
    if not hasattr(base, "get_image_features") and _get_model_type(model) not in TEXTS:
        return None
    if _takes_images(model):
        number = _make_axes_numbering(base) if hasattr(base, "get_rope_index") else None
        session.needs.whole = Images(_read_tokens(model), number, numbers_blocks(model))
    signature = inspect.signature(base.forward)

    @_gives_features
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        arguments = dict(signature.bind_partial(*args).arguments) | kwargs
        modalities = find_modalities(arguments)
        _check_given(model, arguments, modalities)
        if not modalities:
            return None
        features = session.batches.current.whole
        if not isinstance(features, BatchFeatures) or not features.by_modality.keys() >= {*modalities}:
            raise RingShapeError(
                "images: expected those of the batch, got others; give them to engine.ring.shard_batch"
            )
        mesh, wait_s = session.batches.current.mesh, session.config.hop_timeout_seconds
        encoded = {
            modality: _make_local_features(
                base, modality, arguments, features.by_modality[modality], mesh, wait_s
            )
            for modality in modalities
        }
        if _get_model_type(base) in _SPANS:
            arguments |= _embedded(base, arguments, encoded, features)
        else:
            arguments[ENCODED] = encoded
        arguments["pixel_values"] = None  # which BLIP-2 has to be given
        arguments |= dict.fromkeys(arguments.keys() & {PIXELS["video"], "video_compression_mask"})
        if features.axes_BSA is not None:
            arguments["position_ids"] = features.axes_BSA.permute(2, 0, 1)
        return (), arguments

    return before


def _embedded(
    base: Any, arguments: dict[str, Any], encoded: dict[str, Any], features: BatchFeatures
) -> dict[str, Any]:
    """Return the embeddings of local tokens with their features, in the place of ids and features."""
    embeds_BSE = base.get_input_embeddings()(arguments["input_ids"])
    for modality, encoding in encoded.items():
        rows_NE = _rows(_features(encoding)[0][2]).to(embeds_BSE.dtype)
        are_features_BS = features.by_modality[modality].places_BS > 0
        embeds_BSE = embeds_BSE.masked_scatter(are_features_BS[..., None], rows_NE)
    return {"inputs_embeds": embeds_BSE, "input_ids": None, ENCODED: None}


def _read_tokens(model: Any) -> dict[str, int | Callable[[Tensor], Tensor]]:
    """Return, by modality, the id of the tokens that take its features, or what marks them."""
    config = model.config
    tokens: dict[str, int | Callable[[Tensor], Tensor]] = {"image": int(config.image_token_id)}
    if _get_model_type(model) in _SPANS:

        def are_features(ids_BT: Tensor, of_videos: bool) -> Tensor:
            begun_BT, ended_BT = (
                (ids_BT == token).cumsum(-1)
                for token in (config.video_start_token_id, config.video_end_token_id)
            )
            return (ids_BT == config.image_token_id) & ((begun_BT > ended_BT) == of_videos)

        return {
            "image": partial(are_features, of_videos=False), "video": partial(are_features, of_videos=True)
        }  # fmt: skip
    if _takes_videos(model):
        ids = (getattr(config, name, None) for name in ("video_token_id", "video_token_index"))
        token_id = next((candidate for candidate in ids if candidate is not None), None)
        if config.model_type in _ONE_TOKEN:
            token_id = config.image_token_id
        tokens |= {} if token_id is None else {"video": int(token_id)}
    return tokens


def _takes_videos(model: Any) -> bool:
    return hasattr(model.base_model, "get_video_features")


def _check_given(model: Any, arguments: dict[str, Any], modalities: list[str]) -> None:
    name = type(model).__name__
    takes_images, takes_videos = _takes_images(model), _takes_images(model) and _takes_videos(model)
    refused = [key for key in _REFUSED if arguments.get(key) is not None]
    refused += [key for key in arguments.get(ENCODED) or {} if key not in PIXELS]
    if "image" in modalities and not takes_images:
        refused.append("images")
    if "video" in modalities and not takes_videos:
        refused.append(PIXELS["video"])
    if refused:
        takes = "texts" + ", images" * takes_images + ", videos" * takes_videos
        raise RingConfigError(
            f"{name}: expected {takes}, got {', '.join(refused)}; images are exact with the model types"
            f" {', '.join(EXACT)}, videos with those that have get_video_features: leave them out, or pass"
            " inputs_embeds through engine.ring.shard_batch"
        )
    if modalities and torch.compiler.is_compiling():
        raise RingConfigError.wrong(name, "no compiled model with images", "one", "do not compile it")
    if "video" in modalities and getattr(model.config, "video_pruning_rate", None):  # Nemotron's
        raise RingConfigError.wrong(
            name, "all tokens of a video", "a video_pruning_rate", "set config.video_pruning_rate to 0"
        )


# [Note: shares of images]
# Images are divided among the ranks of a sequence in their order, by their numbers of patches: each is
# encoded once. A video is divided by its frames, or the steps of its grid, for its encoder attends to each by
# itself; where it attends over all frames (`_WHOLE_VIDEOS`), one rank encodes the video. A token takes one
# feature, so each feature is sent to the one rank that has its token, and its gradient comes back from there:
# the encoder's gradient is a sum over the ranks, like any other. Which rank needs which feature is known from
# the whole batch; how many features a rank has found is exchanged once. A rank that has no image encodes the
# first one without using its features, so every rank runs the same modules (ZeRO 3 gathers their parameters)
# and has a gradient for each parameter. Where modules run once for each image (`_ONE_BY_ONE`), a rank encodes
# its first one as often as it lacks images.
def _make_local_features(
    base: Any, modality: str, arguments: dict[str, Any], tokens: FeatureTokens, mesh: RingMesh, wait_s: float
) -> Any:
    """Return what encodes a modality found, with the features of this rank's tokens in their order."""
    encoding = (arguments.get(ENCODED) or {}).get(modality)
    shared, share = False, _Share({})
    if encoding is None:
        encode = getattr(base, f"get_{modality}_features")
        takes = inspect.signature(encode).parameters
        names = OF_IMAGES if modality == "image" else OF_VIDEOS
        pixels = {key: arguments[key] for key in names if arguments.get(key) is not None and key in takes}
        kept_N = arguments.get("video_compression_mask") if modality == "video" else None
        shared = bool(tokens.wanted) and mesh.sequence_size > 1 and not _TILES.intersection(pixels)
        shared = shared and not any(map(_reads_other_images, base.modules())) and not _joins_frames(pixels)
        share = _share(base, pixels, takes, mesh, kept_N) if shared else _Share(pixels, kept_N=kept_N)
        layer = arguments.get("vision_feature_layer")
        options = (
            {} if layer is None or "vision_feature_layer" not in takes else {"vision_feature_layer": layer}
        )
        if isinstance(share.pixels.get("num_local_patches"), Tensor):
            # some split a tensor by it
            share.pixels["num_local_patches"] = share.pixels["num_local_patches"].tolist()
        encoding = encode(**share.pixels, **options, return_dict=True)
    features = _features(encoding)
    parts = [_rows(of_tokens) for _, _, of_tokens in features]
    rows_NE = torch.cat(parts, dim=1)
    if share.padding:  # a slice: the backward pass runs the modules of all ranks, too
        _, _, whole = features[0]
        rows_NE = rows_NE[: len(rows_NE) - len(_rows(whole[-share.padding :]))]
    rows_NE = share.taken(rows_NE)
    if shared:
        mine = _exchange_features(rows_NE, base, modality, tokens, mesh, wait_s)
    else:
        check_number(base, len(rows_NE), tokens, modality)
        mine = rows_NE[tokens.places_BS[tokens.places_BS > 0] - 1]
    local: dict[str, Any] = {}
    for (name, layer, whole), part in zip(
        features, mine.split([x.shape[1] for x in parts], dim=1), strict=True
    ):
        rows = (
            (part,) if isinstance(whole, (tuple, list)) else part.view(*[1] * (whole.ndim - 2), *part.shape)
        )
        if name == _OF_LAYERS:
            local.setdefault(name, []).append(rows if layer is None else (layer, rows))
        else:
            local[name] = rows
    return type(encoding)(**local)


def _reads_other_images(module: nn.Module) -> bool:
    """Return whether a module normalizes over all images of a batch, as Emu3's in training."""
    return module.training and isinstance(module, _BATCH_NORMS)


def _joins_frames(pixels: Mapping[str, Any]) -> bool:
    """Return whether these are frames [frames, C, H, W] of one video, which Nemotron joins by several."""
    frames = pixels.get(PIXELS["video"])
    return frames is not None and frames.ndim == 4 and not pixels.keys() & {*_GRIDS}


def _features(encoding: Any) -> list[tuple[str, int | None, Any]]:
    """Return each output that has a feature for each image token: its name, the layer it is for, itself."""
    name = next((name for name in _FEATURES if encoding.get(name) is not None), None)
    features: list[tuple[str, int | None, Any]] = [] if name is None else [(name, None, encoding[name])]
    for part in encoding.get(_OF_LAYERS) or []:
        layer, whole = part if isinstance(part[0], int) else (None, part)  # Granite 4's name the layer
        features.append((_OF_LAYERS, layer, whole))
    return features


def _rows(features: Any) -> Tensor:
    """Return the features [N, E] of a tensor, or of one for each image."""
    several = isinstance(features, (tuple, list))
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in (features if several else [features])])


def check_number(base: Any, features: int, tokens: FeatureTokens, modality: str) -> None:
    """Raise RingShapeError unless a batch has a token for each feature."""
    if features != tokens.tokens:
        raise RingShapeError(
            f"batch: expected {features} {modality} tokens, got {tokens.tokens}; use one processor for both"
        )


class _Share(NamedTuple):
    """The images and steps of videos that a rank encodes.

    Attributes:
        pixels: their tensors, by the names that the encoder takes.
        is_used: False for a rank that has none.
        kept_N: which of their features tokens take; None: all.
        ends_U: of LLaVA-OneVision, which frames are the last of a video: a line break follows them.
        padding: how many images at the end only make the number of images that of other ranks.
    """

    pixels: dict[str, Any]
    is_used: bool = True
    kept_N: Tensor | None = None
    ends_U: Tensor | None = None
    padding: int = 0

    def taken(self, rows_NE: Tensor) -> Tensor:
        """Return the features that tokens take."""
        if not self.is_used:
            return rows_NE[:0]
        if self.ends_U is not None:  # each frame was encoded as a video
            kept_UR = torch.ones(
                len(self.ends_U), len(rows_NE) // len(self.ends_U), dtype=torch.bool, device="cpu"
            )
            kept_UR[:, -1] = self.ends_U
            return rows_NE[kept_UR.flatten().to(rows_NE.device)]
        return rows_NE if self.kept_N is None else rows_NE[self.kept_N.bool()]


def _share(
    base: Any, pixels: dict[str, Tensor], takes: Any, mesh: RingMesh, kept_N: Tensor | None = None
) -> _Share:
    """Return what this rank encodes of the images or videos of a batch."""
    name = next(pixel_key for pixel_key in PIXELS.values() if pixel_key in pixels)
    values, dim, ends_U = pixels[name], 0, None
    grid = next((pixel_key for pixel_key in _GRIDS if pixel_key in pixels), None)
    # where the patches of all images are concatenated: in rows, or as squares of one strip
    pixel_dim, size = (values.ndim - 1, values.shape[-2]) if grid in _STRIPS else (0, 1)
    patches_I = torch.ones(len(values), dtype=torch.int64, device="cpu")
    if grid is not None:
        patches_I = pixels[grid].prod(dim=1).cpu()
        if int(patches_I.sum()) * size != values.shape[pixel_dim]:
            raise RingShapeError(
                f"{name}: expected {int(patches_I.sum()) * size} patches ({grid}), got"
                f" {values.shape[pixel_dim]}"
            )
    elif values.ndim == 5 and "pixel_attention_mask" in takes:
        # Idefics: by sample, and images of zeros where a sample has fewer
        mask = pixels.get("pixel_attention_mask")
        has_pixels_BI = (values != 0).flatten(2).any(dim=2)
        real_BI = mask.bool() if mask is not None and mask.ndim == 2 else has_pixels_BI
        pixels = {key: x[real_BI][None] for key, x in pixels.items()}
        patches_I, dim = torch.ones(int(real_BI.sum()), dtype=torch.int64, device="cpu"), 1
    elif values.ndim == 5 and name == PIXELS["video"]:  # [I, frames, ...]
        videos, frames = values.shape[:2]
        pixels = pixels | {name: values.flatten(0, 1)[:, None]}
        patches_I = torch.ones(videos * frames, dtype=torch.int64, device="cpu")
        if hasattr(base, "image_newline") and hasattr(base, "apply_pooling"):
            ends_U = (torch.arange(videos * frames, device="cpu") + 1) % frames == 0
    steps_I = _steps(base, pixels[grid]) if grid == "video_grid_thw" else torch.ones_like(patches_I)
    item_U = torch.arange(len(steps_I), device="cpu").repeat_interleave(steps_I)
    patches_U = (patches_I // steps_I)[item_U]
    stops_U = patches_U.cumsum(0)
    # a unit belongs to the rank whose share of all patches has its middle
    owners_U = (2 * stops_U - patches_U) * mesh.sequence_size // (2 * int(stops_U[-1]))
    mine = (owners_U == mesh.sequence_rank).nonzero()[:, 0]
    first, count = (int(mine[0]), len(mine)) if len(mine) else (0, 1)
    start, stop = int(stops_U[first] - patches_U[first]), int(stops_U[first + count - 1])
    items, counts = item_U[first : first + count].unique_consecutive(return_counts=True)
    padding = 0
    if _get_model_type(base) in _ONE_BY_ONE:
        of_ranks = [len(item_U[owners_U == rank].unique()) for rank in range(mesh.sequence_size)]
        padding = max(of_ranks) - len(items)
        items = torch.cat([items, items[:1].repeat(padding)])
        counts = torch.nn.functional.pad(counts, (0, padding), value=1)

    def cut(key: str, x: Tensor) -> Tensor:
        if key == "num_frames_per_video":  # Gemma 4's, by which it splits the features
            return x.new_tensor([count])
        if key == name and grid is not None:
            local = x.narrow(pixel_dim, start * size, (stop - start) * size)
            unit = x.narrow(pixel_dim, start * size, int(patches_U[first]) * size)
            return torch.cat([local, *[unit] * padding], dim=pixel_dim) if padding else local
        if len(steps_I) == len(item_U) and not padding:
            return x.narrow(dim, first, count)
        part = x.index_select(dim, items.to(x.device))
        if key == "video_grid_thw":
            part[:, 0] = part[:, 0] // steps_I[items].to(x) * counts.to(x)
        return part

    if kept_N is not None:  # VideoLLaMA 3's, of all features
        merged_U = patches_U // pixels["video_merge_sizes"].cpu()[item_U] ** 2
        place = int(merged_U[:first].sum())
        kept_N = kept_N[place : place + int(merged_U[first : first + count].sum())]
    mine_of = {key: cut(key, x) for key, x in pixels.items()}
    ends_U = None if ends_U is None else ends_U[first : first + count]
    return _Share(mine_of, bool(len(mine)), kept_N, ends_U, padding)


def _steps(base: Any, grids_I3: Tensor) -> Tensor:
    """Return how many steps each video has that its encoder attends to by themselves."""
    steps_I = grids_I3[:, 0].cpu()
    if _get_model_type(base) in _WHOLE_VIDEOS:
        return torch.ones_like(steps_I)
    merged = getattr(getattr(base, "resampler_model", None), "temporal_merge_size", 1)  # ERNIE's
    return torch.where(steps_I % merged == 0, steps_I // merged, 1)


@dataclass(frozen=True)
class _Routes:
    """Say which features go to which rank of the sequence.

    Attributes:
        name: of the features.
        sends: by rank, the rows of this rank's features that it needs.
        receives: by rank, the places of its features among this rank's tokens.
        count: this rank's tokens that take features.
    """

    name: str
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
        exchange = Exchange(routes.mesh, routes.wait_s)
        features = _sent(rows_NE, routes.name, exchange, routes, routes.sends, routes.receives, routes.count)
        note_call(ctx, exchange, rows_NE)
        return features

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        routes = ctx.routes
        options = (f"{routes.name} backward", Exchange(routes.mesh, routes.wait_s), routes)
        with compare_gradient(routes.mesh, has_run_again(ctx)):
            return _sent(grads[0], *options, routes.receives, routes.sends, ctx.rows), None


def _sent(
    rows_NE: Tensor,
    name: str,
    exchange: Exchange,
    routes: _Routes,
    sends: dict[int, Tensor],
    receives: dict[int, Tensor],
    count: int,
) -> Tensor:
    """Return `count` rows: those of other ranks and of this one, at the places in `receives`."""
    mesh, ring_rank = routes.mesh, routes.mesh.sequence_rank
    with collective(mesh, name, exchange) as call:
        call.agree({"features": rows_NE.shape[1], "dtype": rows_NE.dtype})
        arrived = rows_NE.new_zeros((count, rows_NE.shape[1]))
        arrived[receives[ring_rank]] = rows_NE[sends[ring_rank]]
        leaving = [
            (peer, rows_NE[index]) for peer, index in sends.items() if peer != ring_rank and len(index)
        ]
        coming = [
            (peer, rows_NE.new_empty((len(places), rows_NE.shape[1])))
            for peer, places in receives.items()
            if peer != ring_rank and len(places)
        ]
        if leaving or coming:
            call.exchange.post_in_sequence(leaving, coming).wait()
        for peer, rows in coming:
            arrived[receives[peer]] = rows
    return arrived


def _exchange_features(
    rows_NE: Tensor, base: Any, modality: str, tokens: FeatureTokens, mesh: RingMesh, wait_s: float
) -> Tensor:
    """Return the features of this rank's tokens, of the features that each rank has encoded."""
    ring_rank = mesh.sequence_rank
    count = torch.tensor([len(rows_NE)], device=rows_NE.device)
    with collective(mesh, f"number of {modality} features", Exchange(mesh, wait_s)) as call:
        call.agree({f"{modality} tokens": tokens.tokens})
        counts = torch.cat(call.exchange.all_gather(count, mesh.sequence_group, mesh.sequence_size)).tolist()
    check_number(base, sum(counts), tokens, modality)
    starts = [sum(counts[:rank]) for rank in range(len(counts))]

    def match_rank(index: Tensor, rank: int) -> Tensor:
        return (index >= starts[rank]) & (index < starts[rank] + counts[rank])

    wanted = tokens.wanted
    sends = {
        rank: index[match_rank(index, ring_rank)] - starts[ring_rank] for rank, index in enumerate(wanted)
    }
    receives = {rank: match_rank(wanted[ring_rank], rank).nonzero()[:, 0] for rank in range(len(counts))}
    routes = _Routes(f"{modality} features", mesh, wait_s, sends, receives, len(wanted[ring_rank]))
    features: Tensor = run_compared(routes.mesh, routes.name, _Exchanged.apply, rows_NE, routes)
    return features


def _make_axes_numbering(base: Any) -> Callable[[Batch], Tensor]:
    """Return what numbers the tokens of a batch on the axes of time, height and width: [B, T, 3]."""
    takes = inspect.signature(base.get_rope_index).parameters

    def number(batch: Batch) -> Tensor:
        if "mm_token_type_ids" in takes and batch.get("mm_token_type_ids") is None:
            raise RingShapeError.wrong(
                "batch", "mm_token_type_ids with images", "none", "use the model's processor"
            )
        arguments = {key: batch[key] for key in takes if key in batch}
        mask_BT = arguments.get("attention_mask")
        if mask_BT is not None and "mm_token_type_ids" in takes and bool((mask_BT.long().diff() <= 0).all()):
            # padding after all tokens: numbered as text, as a model without a mask does (verify_first_batch)
            del arguments["attention_mask"]
        if "second_per_grids" in takes and "video_second_per_grid" in batch:  # Qwen's Omni models
            arguments["second_per_grids"] = batch["video_second_per_grid"]
        positions_3BT = base.get_rope_index(**arguments)[0]
        return positions_3BT.permute(1, 2, 0).contiguous()

    return number
