"""The table of everything that ds_ring replaces, wraps or hooks in transformers and in a model of it.

The hooks of one object run in the table's order. The features provide functions and objects;
`model_adapter.py` applies the rows of a model. A variant of attention adds its own rows. Imports neither
torch nor transformers, since `attention_name.py` uses it while transformers is imported.
"""

from __future__ import annotations

from ds_ring.integrations.adapter import FeatureTable as PatchTable
from ds_ring.integrations.adapter import feature_row as Patch

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
        Patch(
            "model.set_attn_implementation", "at_initialize", "registered", "attention",
            "every model inside the model gets the name; image encoders keep their own attention",
        ),
        Patch(
            "config._attn_implementation", "at_initialize", "set", "attention.none",
            "the name, of a model without the interface",
            when="transformers cannot set it",
        ),
        Patch(
            "layer.forward", "around_forward", "replaced", "tiled layers",
            "calls the original tile by tile; MLPs also get deepspeed.utils.set_z3_leaf_module",
            when="long_sequence.tiled_mlp",
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
            "model", "after_forward", "hook", "sharding",
            "checks the output and its loss",
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
        "slot": "",  # neftune.py's, of a hook that was registered
        "model": _PRETRAINED,
        "generator": "transformers.GenerationMixin",
        "layer": "torch.nn.Module",
        "head": "torch.nn.Linear",
        "checkpointed": _PRETRAINED,
        "part": "torch.nn.Module",
        "base": _PRETRAINED,
        "score": "torch.nn.Linear",
        "config": "transformers.PreTrainedConfig",
    },
)  # fmt: skip
MODEL = TABLE.given("model", _PRETRAINED)
