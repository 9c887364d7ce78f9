"""The table of everything that ds_ring replaces, wraps or hooks in transformers and in a model of it.

The hooks of one object run in the table's order. The features provide functions and objects; `attached.py`
applies the rows of a model. Imports neither torch nor transformers, since `attention_name.py` uses it while
transformers is imported.
"""

from __future__ import annotations

from ds_ring.integrations.adapter import FeatureTable as PatchTable
from ds_ring.integrations.adapter import feature_row as Patch

# Functions of modeling files by which layers pass a state on, or look back a few tokens (recurrent.py).
RECURRENT_FUNCTIONS = (
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
    "mamba2_split_conv1d_scan_combined",
    "mamba_inner_fn",
    "rwkv_linear_attention",
)
RECURRENT_METHODS = (  # of layers that do so by themselves (recurrent_parts.py)
    "MiniMaxLightningAttention.forward",
    "RecurrentGemmaRglru._rnn_scan",
    "ZayaCCAProjection.forward",
    "xLSTMBackend.forward",
    "Qwen4ExpTextNGramEmbedding.forward",
)
_PRETRAINED = "transformers.modeling_utils.PreTrainedModel"

TABLE = PatchTable(
    "transformers",
    ">=5",
    [
        Patch(
            "loader.exec_module", "at_import", "wrapped", "name.import",
            "registers the name without importing transformers",
            when="transformers was not imported before ds_ring",
        ),
        Patch(
            f"{_PRETRAINED}.get_correct_attn_implementation", "around_init", "wrapped", "name",
            "a class that does not support the name raises RingConfigError (Falcon's was a KeyError)",
        ),
        Patch(
            "transformers.AttentionInterface", "at_import", "registered", "attention function",
            'attn_implementation="ds_ring"',
        ),
        Patch(
            "transformers.AttentionMaskInterface", "at_import", "registered", "mask function",
            'attn_implementation="ds_ring"',
        ),
        *(
            Patch(
                f"modeling.{name}", "around_call", "wrapped", f"recurrence.{name}",
                "adds what comes from tokens on other ranks; calls the original for other models",
                when="a layer of the model calls it",
            )
            for name in (*RECURRENT_FUNCTIONS, *RECURRENT_METHODS)
        ),
        Patch(
            "model.set_attn_implementation", "at_initialize", "registered", "attention",
            "every model inside the model gets the name; image encoders keep their own attention",
        ),
        Patch(
            "config._attn_implementation", "at_initialize", "set", "attention.none",
            "the name, of a model without the interface",
            when="transformers cannot set it (RWKV, model types of written_out.py)",
        ),
        Patch(
            "written.forward", "around_forward", "wrapped", "written out",
            "computes what the module writes out as softmax(q @ k.T) @ v on the ring",
            when="the attention bypasses transformers' interface",
        ),
        Patch(
            "checkpointed", "before_forward", "hook", "written out.layer",
            "the mask of a layer knows its batch, also when a checkpointed layer runs again",
            when="the attention bypasses transformers' interface",
        ),
        Patch(
            "numbers.forward", "around_forward", "wrapped", "own positions",
            "numbers tokens by the batch's positions", when="the model takes no position_ids",
        ),
        Patch(
            "layer.forward", "around_forward", "replaced", "tiled layers",
            "calls the original tile by tile; MLPs also get deepspeed.utils.set_z3_leaf_module",
            when="long_sequence.tiled_mlp",
        ),
        Patch(
            "latent.expand_kv", "around_forward", "replaced", "latents",
            "returns the latent and the rotary key, which the ring sends and expands on arrival",
            when='"latents" in the section, and the layer has an up-projection',
        ),
        Patch(
            "terms.prepare_dynamic_mask", "around_forward", "replaced", "key terms",
            "hands the terms of keys on, which travel with the keys; calls the original without a ring",
            when="a layer adds a learned term of each key (Doge)",
        ),
        Patch(
            "biased.compute_bias", "around_forward", "replaced", "relative bias",
            "hands the table of the bias on; calls the original without a ring",
            when="attention adds a learned bias for each bucket of distances (T5)",
        ),
        Patch(
            "biased.has_relative_attention_bias", "around_forward", "set", "relative bias.on",
            "cross attention asks for its bias, too, in place of zeros for all pairs",
            when="attention adds a learned bias for each bucket of distances (T5)",
        ),
        Patch(
            "head.forward", "around_forward", "replaced", "tiled loss",
            "returns deferred logits", when="long_sequence.tiled_loss",
        ),
        Patch(
            "model.loss_function", "around_loss", "replaced", "tiled loss",
            "computes the loss of deferred logits, calls the original for others",
            when="long_sequence.tiled_loss",
        ),
        Patch(
            "model.loss_function", "around_loss", "replaced", "loss guard",
            "calls the function before it; refuses a mean over local tokens and labels that are not shifted",
        ),
        Patch(
            "model", "before_forward", "hook", "generation",
            "cuts the prompt, so that the other hooks get this rank's tokens", options=("prepend",),
        ),
        Patch(
            "generator.generate", "around_generate", "replaced", "generation",
            "calls the original with the ring's cache, compares the arguments of the ranks",
        ),
        Patch(
            "model", "before_forward", "hook", "tiled loss",
            "finds out whether the forward pass computes a loss", when="long_sequence.tiled_loss",
        ),
        Patch(
            "model", "after_forward", "hook", "tiled loss",
            "returns to plain logits", when="long_sequence.tiled_loss", options=("always_call",),
        ),
        Patch(
            "model", "before_forward", "hook", "offloaded checkpoints",
            "checkpointing may have been switched on anew", when="long_sequence.offload_checkpoints",
        ),
        Patch(
            "checkpointed._gradient_checkpointing_func", "around_forward", "replaced",
            "offloaded checkpoints.layers",
            "calls the original under torch's saved_tensors_hooks, which keep tensors on the host",
            when="long_sequence.offload_checkpoints",
        ),
        Patch(
            "model", "before_forward", "hook", "numbering",
            "notes the position ids of the first forward pass, then removes itself",
        ),
        Patch(
            "slot.function", "after_forward", "wrapped", "neftune",
            "scales and draws the noise by the whole sequence; calls the original without a ring",
            when="NEFTune is on",
        ),
        Patch("model", "after_forward", "hook", "numbering", "removes the hooks of the numbering check"),
        Patch(
            "part", "before_forward", "hook", "numbering.part",
            "refuses a model that numbers its tokens by itself, in the first forward pass",
        ),
        Patch(
            "part", "before_forward", "hook", "rotary length",
            "appends the greatest position of the batch", when="the rotary embedding depends on the length",
        ),
        Patch(
            "part", "after_forward", "hook", "rotary length",
            "removes the row of that position", when="the rotary embedding depends on the length",
        ),
        Patch(
            "recurrent", "before_forward", "hook", "recurrence",
            "tells the functions that the layer calls how the batch is sharded",
            when="the layer calls a function of the rows above",
        ),
        Patch(
            "recurrent", "after_forward", "hook", "recurrence",
            "ends that", when="the layer calls a function of the rows above", options=("always_call",),
        ),
        Patch(
            "shift.forward", "around_call", "wrapped", "recurrence.shift",
            "takes tokens from other ranks; calls the original without a ring",
            when="a layer shifts its tokens by one (RWKV)",
        ),
        Patch(
            "convolution.forward", "around_call", "wrapped", "recurrence.convolution",
            "takes tokens from other ranks; calls the original without a ring",
            when="a layer calls an nn.Conv1d (Recurrent Gemma, Qwen 4)",
        ),
        Patch(
            "scaling", "before_forward", "hook", "query scale",
            "switches the layer's own scaling off", when="attn_temperature_tuning (Llama 4)",
        ),
        Patch(
            "scaling.attn_temperature_tuning", "around_forward", "set", "query scale.off",
            "the layer would scale by local positions", when="attn_temperature_tuning (Llama 4)",
        ),
        Patch(
            "q_proj", "after_forward", "hook", "query scale",
            "scales queries by global positions", when="attn_temperature_tuning (Llama 4)",
        ),
        Patch(
            "scaling", "after_forward", "hook", "query scale",
            "switches the layer's own scaling on, also after an error",
            when="attn_temperature_tuning (Llama 4)",
            options=("always_call",),
        ),
        Patch(
            "indexed", "before_forward", "hook", "chosen keys",
            "notes the batch's sharding, which the layer does not hand down to its indexer",
            when="an indexer selects the keys of a layer",
        ),
        Patch(
            "indexer", "before_forward", "hook", "chosen keys",
            "gives an object that stands for the keys of all ranks in place of a cache",
            when="an indexer selects the keys of a layer",
        ),
        Patch(
            "indexed", "before_forward", "hook", "chosen blocks",
            "notes the batch's sharding and the mask, which the layer does not hand down to its indexer",
            when="an indexer selects blocks of keys (Qwen 4, MiniMax M3, GLM-5.3)",
        ),
        Patch(
            "indexer.forward", "around_forward", "wrapped", "chosen blocks",
            "selects from the blocks of all ranks; calls the original without a ring",
            when="an indexer selects blocks of keys (Qwen 4, MiniMax M3, GLM-5.3)",
        ),
        Patch(
            "masking.build_attention_mask_from_topk", "around_forward", "wrapped", "chosen blocks.mask",
            "hands on what was chosen; calls the original without a ring",
            when="the layer makes a mask of chosen keys (GLM-5.3)",
        ),
        Patch(
            "compressing", "before_forward", "hook", "compressed entries",
            "notes the batch's sharding, which the layer does not hand down to its compressor",
            when="a layer attends to compressed entries (DeepSeek V4)",
        ),
        Patch(
            "compressor.forward", "around_forward", "replaced", "compressed entries",
            "calls the original with this rank's windows in place of a cache",
            when="a layer attends to compressed entries (DeepSeek V4)",
        ),
        Patch(
            "scorer.forward", "around_forward", "wrapped", "compressed entries.scorer",
            "calls the original with the entries of all ranks, shard by shard",
            when="an indexer selects compressed entries (DeepSeek V4)",
        ),
        Patch(
            "base", "before_forward", "hook", "images",
            "gives the features of this rank's image tokens", when="the model takes images",
        ),
        Patch(
            "model", "after_forward", "hook", "router loss",
            "replaces the load balancing loss by that of all tokens",
        ),
        Patch(
            "model", "before_forward", "hook", "pooled token",
            "notes the token ids", when="GenericForSequenceClassification",
        ),
        Patch(
            "score", "after_forward", "hook", "pooled token",
            "gives every rank the logits of the last token", when="GenericForSequenceClassification",
        ),
        Patch(
            "model", "before_forward", "hook", "sharding",
            "checks the call, passes use_cache=False and the batch's sharding",
        ),
        Patch(
            "encoder", "before_forward", "hook", "two sequences",
            "passes the sharding of the encoder's sequence", when="the model is an encoder-decoder",
        ),
        Patch(
            "model", "after_forward", "hook", "sharding",
            "checks the output and its loss; computes that of an encoder-decoder",
        ),
        Patch(
            "config._attn_implementation", "around_off", "set", "attention.off",
            "engine.ring.off(): the model's own attention; its hooks are removed meanwhile",
        ),
        Patch("model.loss_function", "around_off", "set", "loss guard.off", "engine.ring.off()"),
        Patch("generator.generate", "around_off", "set", "generation.off", "engine.ring.off()"),
    ],
    classes={
        "loader": "",
        "modeling": "",
        "recurrent": "torch.nn.Module",
        "slot": "",  # neftune.py's, of a hook that was registered
        "shift": "torch.nn.ZeroPad2d",
        "convolution": "torch.nn.Conv1d",
        "model": _PRETRAINED,
        "generator": "transformers.GenerationMixin",
        "layer": "torch.nn.Module",
        "latent": "",  # one of many classes; latents.py looks for the method
        "biased": "",  # score_terms.py looks for the method
        "terms": "",  # score_terms.py looks for the method
        "masking": "",  # attached.py looks for the method
        "head": "torch.nn.Linear",
        "checkpointed": _PRETRAINED,
        "part": "torch.nn.Module",
        "written": "torch.nn.Module",
        "numbers": "torch.nn.Module",
        "scaling": "transformers.models.llama4.modeling_llama4.Llama4TextAttention",
        "q_proj": "torch.nn.Linear",
        "indexed": "torch.nn.Module",
        "indexer": "torch.nn.Module",
        "compressing": "torch.nn.Module",
        "compressor": "torch.nn.Module",
        "scorer": "torch.nn.Module",
        "base": _PRETRAINED,
        "encoder": _PRETRAINED,
        "score": "torch.nn.Linear",
        "config": "transformers.PreTrainedConfig",
    },
)  # fmt: skip
MODEL = TABLE.given("model", _PRETRAINED)
