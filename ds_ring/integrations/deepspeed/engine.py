"""Everything that ds_ring changes in DeepSpeed, in an engine, and in Python and torch for an engine.

Rows are applied where their feature begins: in `enable`, `initialize`, a save, a load, a loader. Of two rows
that wrap one method, the later one is outside.
"""

from __future__ import annotations

from ds_ring.integrations.adapter import Patch, PatchTable

_RING = "the session; finds where each batch lies"
_FIRST = "records the first step and compares it with one process"
_MONITOR = "writes Ring/* events after an optimizer step; counts training passes only"
_SPEEDS = "deals out work by the time that the hops of each rank take"
_REPORT = "writes this rank's latest figures to the folder of the run"
_NO_OPTIMIZER = "DeepSpeed fails an assertion: raises a typed error"
_SEALED = "sealed checkpoints, one decision of all ranks; DeepSpeed's method is called inside"
_SETTLED = "waits until all messages have arrived, since the result lasts"
_CULPRITS = "raises RingPeerError in place of a broken connection"
_WRAPPER = "a module that reads across tokens beside its transformers model gets whole sequences"
_IS_WRAPPER = "a module of one's own has a transformers model inside"
_WHOLE = "shards whole batches and gathers the outputs"

_ROWS = (
    # the process
    Patch("deepspeed.initialize", "at_enable", "replaced", "enable",
        "scripts and trainers that know nothing of a ring call it"),
    Patch("deepspeed.runtime.engine.DeepSpeedEngine.__init__", "around_init", "wrapped", "enable",
        "an earlier `from deepspeed import initialize` would leave the section unread: raises"),
    Patch("deepspeed.ops.__compatible_ops__.deepspeed_shm_comm", "at_initialize", "set", "gloo",
        "its build takes two minutes and needs ninja; gloo serves without it", when="the device is the CPU"),
    Patch("sys.excepthook", "at_exit", "wrapped", "culprit_at_exit",
        "names the culprit before the traceback"),
    Patch("signal.signal", "at_exit", "registered", "stop_request",
        "SIGTERM and SIGUSR1: leave after a step", when="engine.ring.should_stop() was called"),
    # an engine
    Patch("engine.ring", "at_initialize", "added", "session", _RING),
    Patch("engine", "before_forward", "hook", "session", f"{_RING}; engine.compile compiles only the model"),
    Patch("engine", "before_forward", "hook", "wrapper", _WRAPPER, when=_IS_WRAPPER),
    Patch("module", "before_forward", "hook", "wrapper", _WRAPPER, when=_IS_WRAPPER),
    Patch("module", "after_forward", "hook", "wrapper", _WRAPPER, when=_IS_WRAPPER, options=("always_call",)),
    Patch("engine.forward", "around_forward", "wrapped", "ring_use",
        "raises if no ring pass ran in the first forward, or plain attention over this rank's tokens did"),
    Patch("engine.backward", "around_backward", "wrapped", "ring_use",
        "a batch without labels has no loss: raises a typed error"),
    Patch("engine.forward", "around_forward", "wrapped", "first_batch", _FIRST, when="verify_first_batch"),
    Patch("engine.step", "around_step", "wrapped", "first_batch", _FIRST, when="verify_first_batch"),
    Patch("layer", "after_forward", "hook", "first_batch.layers", "outputs by layer",
        when="verify_first_batch"),
    Patch("layer", "before_forward", "hook", "first_batch.masks",
        "models inside a module get no padding mask, on the copy of one process", when="verify_first_batch"),
    Patch("tensor", "in_backward", "hook", "first_batch.gradients",
        "what the training loop made of the loss and the logits", when="verify_first_batch"),
    Patch("engine.compile", "around_compile", "wrapped", "compile",
        'backend="ds_ring" gets the session; DeepCompile and a second backend are refused'),
    Patch("module._compiled_call_impl", "around_compile", "set", "compile.graph",
        "a graph of the ring ends with the engine", when='engine.compile(backend="ds_ring") was called'),
    Patch("engine", "before_forward", "hook", "monitor", _MONITOR, when="monitor"),
    Patch("engine", "after_forward", "hook", "monitor", _MONITOR, when="monitor"),
    Patch("engine.step", "around_step", "wrapped", "monitor", _MONITOR, when="monitor"),
    Patch("engine", "after_forward", "hook", "rank_speeds", _SPEEDS, when='"rank_speeds": "measured"'),
    Patch("engine.step", "around_step", "wrapped", "rank_speeds", _SPEEDS, when='"rank_speeds": "measured"'),
    Patch("engine", "before_forward", "hook", "run_report", _REPORT, when="a run folder is named"),
    Patch("engine", "after_forward", "hook", "run_report", _REPORT, when="a run folder is named"),
    Patch("engine.step", "around_step", "wrapped", "run_report", _REPORT, when="a run folder is named"),
    Patch("engine._backward_prologue", "around_backward", "wrapped", "direct_backward",
        "DeepSpeed divides the gradients of a direct loss.backward() by the accumulated steps twice: raises",
        versions="<0.20", when="ZeRO 1 or 2 accumulates gradients"),
    Patch("engine.backward", "around_backward", "wrapped", "evaluation", _NO_OPTIMIZER, when="no optimizer"),
    Patch("engine.step", "around_step", "wrapped", "evaluation", _NO_OPTIMIZER, when="no optimizer"),
    Patch("engine.scale", "around_call", "wrapped", "evaluation", _NO_OPTIMIZER, when="no optimizer"),
    Patch("engine.save_checkpoint", "around_save", "wrapped", "no_checkpoints",
        "DeepSpeed has no checkpoints there: raises a typed error", when="ZeRO 3 without an optimizer"),
    Patch("engine.load_checkpoint", "around_load", "wrapped", "no_checkpoints",
        "DeepSpeed has no checkpoints there: raises a typed error", when="ZeRO 3 without an optimizer"),
    Patch("engine.save_checkpoint", "around_save", "replaced", "checkpoint", _SEALED),
    Patch("engine.load_checkpoint", "around_load", "replaced", "checkpoint", _SEALED),
    Patch("engine.checkpoint_engine.save", "around_save", "wrapped", "checkpoint.files",
        "knows which files were written; keeps an error until all ranks hear of it"),
    Patch("engine._copy_recovery_script", "around_save", "wrapped", "checkpoint.script",
        "its error must not leave the other ranks in DeepSpeed's barrier"),
    Patch("shutil.copytree", "around_save", "wrapped", "checkpoint.swapped",
        "DeepSpeed copies swapped-out tensors by it; its error must not leave the others in a barrier"),
    Patch("torch.load", "around_load", "wrapped", "checkpoint.weights_only",
        "weights_only=True for every file of the checkpoint, whoever calls it"),
    Patch("engine._config.load_universal_checkpoint", "around_load", "set", "checkpoint.universal",
        "a folder is loaded as what it is"),
    Patch("engine.step", "around_step", "wrapped", "settled", _SETTLED),
    *(Patch(f"engine.{method}", "around_save", "wrapped", "settled", _SETTLED) for method in (
        "save_checkpoint", "save_16bit_model", "save_fp16_model", "module_state_dict")),
    Patch("engine.destroy", "around_call", "wrapped", "end", "takes the ring off the model"),
    # The outermost: a rank's failure is named whatever was called.
    *(Patch(f"engine.{method}", "around_call", "wrapped", "culprits", _CULPRITS) for method in (
        "forward", "backward", "step", "allreduce_gradients", "save_checkpoint", "load_checkpoint",
        "save_16bit_model", "save_fp16_model", "module_state_dict", "load_module_state_dict",
        "get_global_grad_norm", "destroy")),
    Patch("engine.training_dataloader", "at_initialize", "set", "loader",
        "each rank reads its tokens", when="training_data is given"),
    Patch("sampler.generator", "in_loader", "set", "one_order", "all ranks draw one order",
        when="the batch sampler of a given DataLoader has none"),
    Patch("engine.__reduce_ex__", "around_save", "replaced", "pickled",
        "hooks of a ring cannot be pickled or copied: raises a typed error"),
    Patch("module.__reduce_ex__", "around_save", "replaced", "pickled",
        "hooks of a ring cannot be pickled or copied: raises a typed error"),
    # A Trainer evaluates the module without the engine; the outer of two calls does the work.
    Patch("module", "before_forward", "hook", "whole_batches", _WHOLE, when="ds_ring.enable()",
        options=("prepend",)),
    Patch("module", "after_forward", "hook", "whole_batches", _WHOLE, when="ds_ring.enable()",
        options=("always_call",)),
    Patch("engine", "before_forward", "hook", "whole_batches", _WHOLE, when="ds_ring.enable()",
        options=("prepend",)),
    Patch("engine", "after_forward", "hook", "whole_batches", _WHOLE, when="ds_ring.enable()",
        options=("always_call",)),
)  # fmt: skip

DEEPSPEED = PatchTable(
    "deepspeed",
    ">=0.19.8,<0.20",
    _ROWS,
    {
        "engine": "deepspeed.runtime.engine.DeepSpeedEngine",
        "engine.checkpoint_engine": "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine",
        "engine._config": "deepspeed.runtime.config.DeepSpeedConfig",
        "module": "torch.nn.Module",
        "layer": "torch.nn.Module",
        "tensor": "torch.Tensor",
        "sampler": "torch.utils.data.RandomSampler",
    },
)
