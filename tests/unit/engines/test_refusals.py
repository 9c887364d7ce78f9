"""Refusals that no model of transformers triggers today: each is raised by the call that it guards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig, pattern_from_config
from ds_ring.contrib import ring_flash_attn
from ds_ring.contrib.compile.engine import compile_with_ring
from ds_ring.contrib.encoder_decoder.batch import Pairs
from ds_ring.contrib.images import model as images
from ds_ring.contrib.images.batch import Images
from ds_ring.data import batch, loader
from ds_ring.data.packing import DOCUMENT_IDS
from ds_ring.decode import generation, ring_cache
from ds_ring.engines.deepspeed import enable, initialize
from ds_ring.engines.deepspeed.refusals import RingUse, _model_features
from ds_ring.engines.first_batch import first_batch
from ds_ring.errors import (
    RingConfigError,
    RingError,
    RingMeshError,
    RingPatternError,
    RingShapeError,
    RingVerifyError,
)
from ds_ring.masks.catalog import Causal
from ds_ring.memory.host import offloaded_checkpoints
from ds_ring.memory.tiles import models_head as head
from ds_ring.memory.tiles import models_layers as layers
from ds_ring.models import attention_call, checks, families, layer_masks, positions, wrappers
from ds_ring.models.attach import attach
from ds_ring.models.attention_name import NAME
from ds_ring.plugin import load
from ds_ring.schedule.grid import Grid
from ds_ring.schedule.layout import make_layout
from ds_ring_launcher.check.small_model import build, read_config, shrink
from tests.dist.contrib.images import test_images
from tests.refusals import Refusals, refuse
from tests.sessions import session_of
from tests.unit.models.calls import IDS, REQUEST, attend, sharding

Given = Any
IMAGES = Images({"image": 3})


def compiled(**inputs: Any) -> Any:
    session = SimpleNamespace(
        needs=SimpleNamespace(batches=inputs.get("batches")),
        config={"dynamic_ring": inputs.get("dynamic_ring", False)},
    )
    engine = SimpleNamespace(
        is_deepcompile_enabled=lambda: inputs.get("deepcompile", False),
        is_compiled=inputs.get("is_compiled", False),
    )
    return compile_with_ring(engine, session, [], lambda *_: None, "ds_ring")  # type: ignore[arg-type]


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Pooled(nn.Module):
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(pad_token_id=0))

    def forward(self, input_ids: Any) -> None: ...


def pooled(_: Given) -> Any:
    current = SimpleNamespace(mesh=SimpleNamespace(sequence_size=1), layout=SimpleNamespace(tokens=4))
    session: Any = SimpleNamespace(
        run_mesh=SimpleNamespace(sequence_size=2), batches=SimpleNamespace(current=current)
    )
    model: Any = Pooled()
    return families.make_pooling_hooks(model, session)[1](model, (), {}, torch.zeros(1, 4, 1))


def routed(**output: Any) -> Any:
    session: Any = SimpleNamespace(run_mesh=RingMesh.single(), gradient_divisor=1.0)
    model: Any = nn.Linear(1, 1)
    hook = families.router_loss(model, None, session)  # type: ignore[arg-type]
    return hook(model, (), {}, SimpleNamespace(aux_loss=torch.zeros(()), loss=None, **output))


def generated(**inputs: Any) -> Any:
    cache = object.__new__(generation._cache_class())
    return generation.Generation.before(SimpleNamespace(), {"past_key_values": cache} | inputs)  # type: ignore[arg-type]


def pruned() -> Any:
    base = SimpleNamespace(get_video_features=None)
    return SimpleNamespace(
        config=SimpleNamespace(model_type="nemotron_h_omni", video_pruning_rate=0.5), base_model=base
    )


def offloading(model: Any) -> Any:
    config = SimpleNamespace(
        long_sequence=SimpleNamespace(offload_checkpoints=True), recompute_attention=False
    )
    session: Any = SimpleNamespace(config=config, device=torch.device("cpu"), run_mesh=RingMesh.single())
    hook: Any = offloaded_checkpoints.offloaded_checkpoints(model, session)
    return hook()


CASES: dict[str, tuple[Callable[[Given], Any], type[RingError], str]] = {
    "a layer without keys": (
        lambda _: RingConfig.from_deepspeed(
            {"sequence_parallel_size": 2, "ring_attention": {"pattern": {"layers": {"0": 5}}}}
        ),
        RingConfigError,
        "an object of pattern keys",
    ),
    "labels of samples in a short batch": (
        lambda _: batch.split_samples({"input_ids": IDS, "labels": torch.ones(2)}, 0, 2),
        RingShapeError,
        "expected one for each token, got one for ",
    ),
    "images without ids": (
        lambda _: IMAGES.add_columns({"inputs_embeds": torch.ones(2, 4, 8)}, {}),
        RingShapeError,
        "expected input_ids with images",
    ),
    "images in documents": (
        lambda _: Images({"image": 3}, lambda x: IDS).add_columns({"input_ids": IDS, DOCUMENT_IDS: IDS}, {}),
        RingConfigError,
        "expected images without documents",
    ),
    "images and videos of one token": (
        lambda _: Images({"image": 3, "video": 3}).add_columns(
            {"input_ids": IDS}, {"pixel_values": IDS, "pixel_values_videos": IDS}
        ),
        RingConfigError,
        "expected images or videos, whose tokens are the same, got both",
    ),
    "videos that lose tokens": (
        lambda _: images._check_given(pruned(), {"pixel_values_videos": IDS}, ["video"]),
        RingConfigError,
        "expected all tokens of a video, got a video_pruning_rate",
    ),
    "no output": (lambda _: first_batch.read_outputs("text"), RingVerifyError, "got str"),
    "no copy": (lambda _: first_batch.skeleton(Locked()), RingConfigError, "a model that can be copied"),
    "compiled pair": (lambda _: compiled(batches=Pairs(len)), RingConfigError, "got an encoder-decoder"),
    "compiled by DeepCompile": (lambda _: compiled(deepcompile=True), RingConfigError, "compile.deepcompile"),
    "compiled twice": (lambda _: compiled(is_compiled=True), RingConfigError, "engine that is not compiled"),
    "compiled for one ring": (
        lambda _: compiled(dynamic_ring=True),
        RingConfigError,
        "false in a compiled graph",
    ),
    "documents that do not divide": (
        lambda _: ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 5]), True, 0, 2),
        RingShapeError,
        "expected a multiple of 2 tokens",
    ),
    "more keys": (lambda _: attend(keys=5), RingShapeError, "as many local tokens as queries, 4, got 5"),
    "a mask tensor": (
        lambda _: attention_call.check_attention_call("A", IDS, 0.0, {}), RingPatternError, "no mask tensor"
    ),
    "sinks for the backend": (
        lambda _: attention_call.refuse_foreign_arguments("A", {"sinks": 1}),
        RingPatternError,
        "expected no sinks",
    ),
    "a short batch to classify": (pooled, RingShapeError, "expected a sharded sequence"),
    "routers that were dropped": (
        lambda _: routed(router_logits=None), RingConfigError, "expected router_logits with aux_loss"
    ),
    "routers of nobody": (
        lambda _: routed(router_logits=(IDS,)), RingConfigError, "expected no aux_loss, got one"
    ),
    "generating from nothing": (lambda _: generated(), RingShapeError, "expected input_ids or inputs_embeds"),
    "patches that do not fit": (
        lambda _: images._share(
            None,
            {"image_grid_thw": torch.tensor([[1, 2, 2]]), "pixel_values": torch.ones(5, 3)},
            {},
            RingMesh.single(),
        ),
        RingShapeError,
        r"4 patches \(image_grid_thw\), got 5",
    ),
    "image tokens without types": (
        lambda _: images._make_axes_numbering(
            SimpleNamespace(get_rope_index=lambda mm_token_type_ids: 0),
        )({}),
        RingShapeError,
        "expected mm_token_type_ids",
    ),
    "a window on two sides": (
        lambda _: layer_masks.read_call_pattern(nn.Linear(1, 1), {"sliding_window": 3, "is_causal": False}),
        RingPatternError,
        "expected a mask beside the two-sided",
    ),
    "a mask that hides all": (
        lambda _: layer_masks.choose_layer_pattern(nn.Linear(1, 1), sharding(), None),
        RingPatternError,
        "a mask that hides all",
    ),
    "layers that cannot be run again": (
        lambda _: offloading(SimpleNamespace(supports_gradient_checkpointing=False)),
        RingConfigError,
        "layers that can be checkpointed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case: str) -> None:
    call, error, words = CASES[case]
    config = RingConfig.from_deepspeed({"sequence_parallel_size": 1, "ring_attention": {}})
    assert pattern_from_config(config) == Causal()
    with pytest.raises(error, match=words):
        call(config)


# What compiled code is refused: the call says so while `torch.compiler.is_compiling`.


class Graph(nn.Module):
    """A model that compiled code calls."""

    loss_function = len

    def forward(self, hidden: Any) -> Any:
        return hidden


def tiled_head(deferring: bool = True) -> Any:
    tiled = head.TiledHead(nn.Linear(1, 1), 1, strict=True)
    tiled.deferring = deferring
    return tiled


def starting(model: Any) -> Any:
    session: Any = SimpleNamespace(batches=SimpleNamespace(defers_logits=False))
    hooks = {item.__name__: item for item in tiled_head().patches(model, session, None)[2:]}
    return hooks["before"](model, (), {})


def tiled_module() -> Any:
    session: Any = SimpleNamespace(batches=SimpleNamespace(is_off=False))
    module: Any = layers._TiledModule(nn.Bilinear(1, 1, 1), True, session, 1)
    return module.forward(torch.ones(2, 1), torch.ones(3, 1))


def megatron() -> Any:
    pytest.importorskip("megatron.core")
    from ds_ring.contrib.megatron import core_attention

    return core_attention


def packed(**inputs: Any) -> Any:
    lengths = torch.tensor([0, 4])
    told = SimpleNamespace(
        **{"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "qkv_format": "thd"} | inputs,
        cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
    )  # fmt: skip
    return megatron().RingCoreAttention._packing(SimpleNamespace(_packed=None), told)


def checkpointed() -> Any:
    module = nn.Linear(1, 1)
    by_deepspeed = lambda: None  # noqa: E731
    by_deepspeed.__module__ = "deepspeed.checkpointing"
    vars(module)[offloaded_checkpoints._FUNCTION] = by_deepspeed
    model: Any = SimpleNamespace(
        supports_gradient_checkpointing=True, is_activation_checkpointing=True, modules=lambda: [module]
    )
    return offloading(model)


SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "pad_token_id": 0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
KYUTAI = {
    "audio_pad_token_id": 1, "ffn_dim": 32, "head_dim": 8, "num_codebooks": 1, "codebook_vocab_size": 61,
}  # fmt: skip


def small_config(family: str, **values: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**SMALL | values)


def on_ring(family: str, **values: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(
        small_config(family, **values), attn_implementation=NAME
    )
    attach(model, session_of())
    return model.eval()


def windowed() -> Any:
    """A session whose pattern a model as it is does not have, on one rank, too."""
    return session_of(pattern={"window": 3})


class Choosy(transformers.LlamaForCausalLM):
    """A class with a mind of its own about which attention it takes."""

    takes: Any = None

    def _check_and_adjust_attn_implementation(self, *_: Any, **__: Any) -> str:
        if self.takes is False:
            raise ValueError("only sdpa")
        return "sdpa"

    @classmethod
    def small(cls, takes: bool) -> Any:
        model = cls(small_config("Llama"))
        model.takes = takes
        return model


class WithoutInterface(transformers.LlamaForCausalLM):
    _supports_attention_backend = False


def llava_of_ones_own() -> Any:
    model = test_images.build("llava")
    model.config.model_type = "llava_of_ones_own"
    return model


def llava() -> Any:
    """Images that a forward pass gets, but not the batch that was sharded."""
    model, session = test_images.build("llava"), windowed()
    attach(model, session)
    batch = test_images.batch_of("llava")
    texts = session.shard_batch({"input_ids": batch["input_ids"].clamp(max=test_images.IMAGE - 1)})
    return model(**texts, pixel_values=batch["pixel_values"])


def phi4(**inputs: Any) -> Any:
    """Images or sounds of a model whose texts alone are exact."""
    model, session = build(shrink(read_config("phi4_multimodal"), 61), "causal-lm", 0), windowed()
    attach(model, session)
    return model(**session.shard_batch({"input_ids": IDS}), **inputs)


class Faulty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = on_ring("Llama")

    def forward(self, input_ids: Any, position_ids: Any) -> Any:
        raise KeyError("not of tokens")


def wrapping() -> Any:
    module, session = Faulty(), session_of()
    wrappers.WrappedModel(module, session, [module.base])
    return module(**session.shard_batch({"input_ids": IDS}))


COMPILED: Refusals = {
    "another mask than the pattern": (
        lambda: attend(is_causal=False), RingPatternError, "set pattern.causal in the JSON"
    ),
    "a tiled loss": (lambda: starting(Graph()), RingConfigError, "a model that is not compiled"),
}  # fmt: skip
MORE: Refusals = {
    "logits at once": (
        lambda: tiled_head().loss_function(len)(torch.zeros(1, 2, 3)),
        RingConfigError,
        "expected logits by get_output_embeddings",
    ),
    "tensors of other tokens": (tiled_module, RingConfigError, "expected Bilinear called with tensors"),
    "checkpoints of DeepSpeed": (checkpointed, RingConfigError, "got DeepSpeed's"),
    "no process group": (lambda: ring_flash_attn.mesh_of(None), RingMeshError, "init_process_group first"),
    "rows that are not packed": (
        lambda: ring_flash_attn.create_ring_flash_attention_forward(None, 1)[0](  # type: ignore[arg-type]
            torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8), None, 4, True
        ),
        RingShapeError,
        "one row of packed documents",
    ),
    "documents that nobody told": (
        lambda: ring_flash_attn.create_ring_flash_attention_forward(None, 1)[0](  # type: ignore[arg-type]
            torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 8), None, 4, True
        ),
        RingConfigError,
        "update_ring_flash_attn_params",
    ),
    "packing of Megatron's own": (
        lambda: packed(cp_group=1), RingShapeError, "expected None, got 1"
    ),
    "packing in another format": (lambda: packed(qkv_format="sbhd"), RingShapeError, 'qkv_format "thd"'),
    "another softmax of Megatron's": (
        lambda: megatron()._sinks(SimpleNamespace(softmax_type="x", use_cpu_initialization=True), 2),
        RingConfigError,
        "expected vanilla, off-by-one or learnable",
    ),
    "a batch that torch cannot collate": (
        lambda: loader.stacked([[1, 2], [1]]), RuntimeError, "should be of equal size"
    ),
    "samples of several lengths": (
        lambda: loader.stacked([{"a": torch.zeros(3)}, {"a": torch.zeros(2)}]),
        RingShapeError,
        "samples of a batch: expected one length, got 2, 3 tokens; give lengths",
    ),
    "an index beyond a whole sequence": (
        lambda: alone().around_forward(IDS.__getitem__, 2), IndexError, "index 2 is out of bounds"
    ),
    "an index of the whole sequence": (
        lambda: alone(2).around_forward(IDS.__getitem__, (0, 7)), RingShapeError,
        "Graph: .*; a rank has 4 of 8 tokens, so an index of the whole sequence does not fit: use",
    ),
    "an index of the whole sequence of one dimension": (
        lambda: alone(2).around_forward(IDS.select, -1, 7), RingShapeError,
        "a rank has 4 of 8 tokens",
    ),
    "a token above the vocabulary": (
        lambda: alone(2).around_forward(torch.ones(5).__getitem__, 7), IndexError, "with size 5",
    ),
    "an error of an index that names no size": (
        lambda: alone(2).around_forward([].__getitem__, 7), IndexError, "list index out of range",
    ),
    "enabled too late": (lambda: enabled_late(), RingConfigError,
        "expected no TrainingArguments whose DeepSpeed JSON has the 'ring_attention' section yet, got one"),
    "an attention that a model does not take": (
        lambda: attach(Choosy.small(takes=False), windowed()), RingConfigError, "got 'sdpa' and only sdpa"
    ),
    "an attention that a model ignores": (
        lambda: attach(Choosy.small(takes=True), windowed()), RingConfigError, "over this rank's tokens only"
    ),
    "no attention interface": (
        lambda: checks.check_class(WithoutInterface(small_config("Llama")), REQUEST),
        RingConfigError,
        "bypasses",
    ),
    "a cache without positions": (
        lambda: on_ring("Llama")(IDS, past_key_values=ring_cache.RingCache(0, 1)),
        RingShapeError,
        r"expected position_ids \[samples, tokens\], got others",
    ),
    "an image encoder that nobody compared": (
        lambda: attach(llava_of_ones_own(), windowed()), RingConfigError, "no test compares its images"
    ),
    "images beside the batch": (llava, RingShapeError, "images: expected those of the batch"),
    "images of a model whose texts are exact": (
        lambda: phi4(image_pixel_values=torch.ones(1, 1, 3, 8, 8)),
        RingConfigError,
        "expected texts, got image_pixel_values",
    ),
    "sounds of a model whose texts are exact": (
        lambda: phi4(audio_input_features=torch.ones(1, 4, 8)),
        RingConfigError,
        "expected texts, got audio_input_features",
    ),
    "rotary lengths inside layers": (
        lambda: positions.check_lengths(
            transformers.KyutaiSpeechToTextModel(
                small_config("KyutaiSpeechToText", rope_parameters=DYNAMIC, **KYUTAI)
            )
        ),
        RingConfigError,
        "computed inside each layer",
    ),
    "a fault of a wrapper's own": (wrapping, KeyError, "not of tokens"),
}  # fmt: skip


def alone(ranks: int = 1) -> RingUse:
    """The first passes of an engine, whose rank has 4 tokens."""
    current: Any = sharding()
    if ranks > 1:
        layout = make_layout("contiguous", tokens=4 * ranks, ring_size=ranks)
        current = replace(current, layout=layout, mesh=RingMesh(Grid(ranks, ranks), 0))
    session: Any = SimpleNamespace(batches=SimpleNamespace(is_off=False, current=current))
    engine = SimpleNamespace(module=Graph(), is_compiled=True)
    return RingUse(session, engine, is_own=False)


def enabled_late() -> None:
    """Arguments that a script has made before it calls `ds_ring.enable()`; garbage does not count."""
    args: Any = object.__new__(transformers.TrainingArguments)
    args.hf_deepspeed_config = SimpleNamespace(config={"ring_attention": {}})
    enable._refuse_to_be_late()


test_compiled_code_is_refused = refuse(COMPILED, compiling=True)


def test_compiled_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, and windows of layers that only the backend reads: compiled code begins after the batch."""
    session, images = windowed(), test_images.build("llava")
    attach(images, session)
    shown = session.shard_batch(test_images.batch_of("llava"))
    windows = small_config("Mistral", sliding_window=2)
    model, second = (
        transformers.AutoModelForCausalLM.from_config(windows, attn_implementation=NAME),
        session_of(),
    )
    attach(model, second)
    texts = second.shard_batch({"input_ids": IDS})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RingConfigError, match="no compiled model with images"):
        images(**shown)
    with pytest.raises(RingPatternError, match="a layer sees 2 of 4 tokens"):
        model(**texts)


test_it_is_refused_too = refuse(MORE)


def test_a_pipeline_is_a_feature_that_a_ring_excludes() -> None:
    what, why = next(_model_features(object.__new__(PipelineModule)))
    assert what == "a PipelineModule" and "use ZeRO" in why


def test_a_row_is_an_object_or_the_name_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that its plug-in needs is named with the command that installs it."""
    assert load(len) is len and load("ds_ring.errors.RingError") is RingError
    home = "ds_ring.contrib.megatron.core_attention.RingCoreAttention"
    for name in [*sys.modules]:
        if name.startswith(("megatron.", "ds_ring.contrib.megatron.core")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(RingConfigError, match=r"megatron needs megatron: pip install 'ds_ring\[megatron\]'"):
        load(home)


def test_a_package_that_mpi4py_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a launcher, where an mpi4py is broken."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("import nosuchlibrary\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mpi4py", raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="nosuchlibrary"):
        initialize.init_distributed()
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RingConfigError, match="that a launcher has started, got none of RANK, WORLD_"):
        initialize.init_distributed()
    enable._refuse_to_be_late()  # nothing is left of other tests


def test_a_model_with_an_image_encoder_is_refused_without_the_row_of_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ds_ring.models import attach as attaching
    from ds_ring.models import variants as table

    others = tuple(item for item in table.variants() if not item.encoder_types)
    for module in (attaching, table):
        monkeypatch.setattr(module, "variants", lambda: others)
    with pytest.raises(RingConfigError, match=r"no test compares its images.*use its language part alone$"):
        attach(test_images.build("llava"), windowed())
