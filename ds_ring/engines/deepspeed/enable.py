"""Make `deepspeed.initialize` honour the "ring_attention" section, for trainers and scripts that call it.

Owns the hooks around their forward passes, which shard whole batches and return outputs as if this rank had
computed its whole batch. `plugin.TRAINERS` names what changes in trainers.
"""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ring.compat import get_imported
from ds_ring.config.json_text import SECTION
from ds_ring.data.batch import EMBEDS, IGNORE, cache_in, warn_about_shifted_padding
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.engine import DEEPSPEED, ENGINE, MODULE, is_transformers_model
from ds_ring.data.loss import ITEMS, get_mesh_number, sequence_sum_op
from ds_ring.data.outputs import Gather, is_number, make_whole_output
from ds_ring.data.session import RingSession
from ds_ring.engines.deepspeed.initialize import leave_shm_out
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.ops.shard import gather_sequence
from ds_ring.patches import apply, patch
from ds_ring.plugin import TRAINERS, load
from ds_ring.schedule.layout import Layout
from ds_ring.start import initialize

# What TRL's fused head returns for each label: one fewer than tokens where it shifts the labels itself.
_OF_LABELS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
# Sums over the tokens of TRL's head before 1.16.
_COUNTS = ("num_correct_tokens", "entropy_sum", "num_valid_tokens")
_KEEP = "logits_to_keep"  # transformers' argument
_LABELS = ("labels", "shift_labels", ITEMS)
# Where documents begin, for kernels of variable length; position ids say the same.
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def enable() -> None:
    """Make deepspeed.initialize start a ring, by itself and inside Accelerate, Trainer and TRL.

    Call it once, before anything of theirs is made; the script stays as it is otherwise:

        import ds_ring; ds_ring.enable()
        trainer = Trainer(model=model, args=TrainingArguments(deepspeed="ds_config.json", ...), ...)

    From then on the ranks of one sequence get the same batches, count as one data replica, and hand whole
    batches to the engine, which shards them; the replicas' losses have the mean over all labelled tokens as
    their mean, and logits are gathered when they are read (collective: on every rank, or on none). A
    configuration without the section raises RingConfigError: its ranks would train by themselves.

    Raises:
        RingConfigError: an engine, Accelerator or TrainingArguments with the section was made before.
    """
    if deepspeed.initialize is _initialize_whole:
        return
    _refuse_to_be_late()
    apply(_initialize_whole)
    leave_shm_out()
    for package, home in TRAINERS.items():
        if find_spec(package) is not None:
            load(home)()


# What reads the DeepSpeed JSON when it is made, and where it has it.
_READERS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("deepspeed.runtime.engine", "DeepSpeedEngine", lambda engine: engine._config._param_dict),
    (
        "accelerate.accelerator",
        "Accelerator",
        lambda accelerator: accelerator.state.deepspeed_plugin.deepspeed_config,
    ),
    ("transformers.training_args", "TrainingArguments", lambda args: args.hf_deepspeed_config.config),
)


def _refuse_to_be_late() -> None:
    """Refuse to begin where something has read a JSON with the section, and knows of no ring."""
    late = _made_before()
    if late:
        gc.collect()  # engines that are garbage do not count
        late = _made_before()
    if late:
        raise RingConfigError(
            f"ds_ring.enable(): expected no {late} whose DeepSpeed JSON has the {SECTION!r} section yet, got"
            " one, which would train without a ring; call ds_ring.enable() at the head of the script"
        )


def _made_before() -> str:
    """Return the name of a class of which an object has read the section without a ring; "" if none has."""
    objects = gc.get_objects()
    for file, name, json_of in _READERS:
        kind: Any = get_imported(file, name)
        for candidate in objects if kind is not None else ():
            if issubclass(type(candidate), kind) and "ring" not in vars(candidate):
                with suppress(AttributeError):  # without DeepSpeed
                    if SECTION in json_of(candidate):
                        return name
    return ""


@patch(
    DEEPSPEED.imported("deepspeed"), "initialize", stage="at_enable", kind="replaced", feature="enable",
    reason="scripts and trainers that know nothing of a ring call it",
)  # fmt: skip
@functools.wraps(initialize)
def _initialize_whole(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    engine, optimizer, loader, scheduler = initialize(*args, **kwargs)
    if engine.ring.gradient_divisor != dist.get_world_size():
        raise RingConfigError('gradient_allreduce_op: expected "mean" under ds_ring.enable(), got "sum"')
    if engine.ring.config.get("dynamic_ring"):
        raise RingConfigError("dynamic_ring: expected false under ds_ring.enable(), got true; remove it")
    whole = WholeBatches(engine.ring, engine.module)
    apply(whole, session=engine.ring, engine=engine, module=engine.module)
    _of_modules[engine] = _of_modules[engine.module] = whole
    if loader is not None:
        loader.shard_batch = dict  # batches stay as they are: the engine shards them
    return engine, optimizer, loader, scheduler


_whole_patch = partial(
    patch, feature="whole_batches", when="ds_ring.enable()",
    reason="shards whole batches and gathers the outputs",
)  # fmt: skip


# [Note: what a script sees]
# A trainer treats the W ranks as W replicas whose gradients DeepSpeed averages. On a ring, the P ranks of a
# sequence get the same batch and return the same results, so there are R = W / P replicas.
# A rank computes a loss l of its own tokens ([Note: gradient scale] in loss.py), whose gradient is exact
# after DeepSpeed's division by D. The script receives a loss with the gradient of l and with the value of the
# replica: the sum of l over the ring, times R / D. The mean over the replicas is the mean over all tokens of
# the world.
# If num_items_in_batch = n is given (Trainer), a replica's loss is the sum over its tokens divided by n; then
# l is the rank's sum times D / (R n). The same holds without gradients, with the replica's number of tokens
# as n. If a script computes a loss from gathered outputs, it does so on all P ranks. The gradient of the
# gathering adds P equal gradients, and DeepSpeed's division by W leaves the mean over the R replicas.
class WholeBatches:
    """Shard the inputs of an engine or of its `module`, whose forward names them, and gather the outputs.

    Attributes:
        share: R / D of [Note: what a script sees].
    """

    def __init__(self, session: RingSession, module: nn.Module) -> None:
        self._session, self._module = session, module
        self.share = session.run_mesh.data_size / session.gradient_divisor
        self._parameters = inspect.signature(module.forward).parameters
        self._nested = 0  # calls of the outermost module inside its call
        self._outermost: tuple[nn.Module, BatchSharding, bool, Tensor | None, Any] | None = None

    # A Trainer evaluates the module without the engine; the outer of two calls does the work.
    @_whole_patch(MODULE, stage="before_forward", options=("prepend",))
    @_whole_patch(ENGINE, stage="before_forward", options=("prepend",))
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Shard a batch. The engine and its module call this; the outer of two calls does the work."""
        if self._outermost is not None:
            self._nested += self._outermost[0] is module  # a trial call of its forward, before its own call
            return None
        if self._session.batches.is_off or torch.compiler.is_compiling():
            return None
        if cache_in(kwargs) is not None:  # `generate` cuts its prompts itself
            return None
        arguments = self._named(args, kwargs)
        items, keep = arguments.pop(ITEMS, None), self._kept_logits(arguments)
        batch = {key: x for key, x in arguments.items() if isinstance(x, Tensor) and x.ndim > 0}
        flushed, left_B1 = self._flushed(_without_borders(batch))
        local: dict[str, Any] = dict(self._session.shard_batch(flushed))
        if ITEMS in local and (items is not None or not torch.is_grad_enabled()):
            if items is None:  # the labelled tokens of this rank's sequences
                mine = (local["shift_labels"] != IGNORE).sum().float()
                items = sequence_sum_op(mine, get_mesh_number(self._session.run_mesh)).clamp_min(1)
            items = torch.as_tensor(items, device=self._session.device)
            local[ITEMS] = items * self.share
        shifts = "labels" in arguments and "shift_labels" not in arguments
        self._outermost = module, self._session.batches.current, shifts, left_B1, keep
        rest = {key: x for key, x in arguments.items() if key not in batch and key not in _BORDERS}
        return (), rest | {key: x for key, x in local.items() if self._takes(key)}

    @_whole_patch(MODULE, stage="after_forward", options=("always_call",))
    @_whole_patch(ENGINE, stage="after_forward", options=("always_call",))
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Gather the outputs of the call that sharded the batch."""
        if self._outermost is None or self._outermost[0] is not module:
            return None
        if self._nested:
            self._nested -= 1
            return None
        _, sharding, shifts, left_B1, keep = self._outermost
        self._outermost = None
        if output is None:  # the call failed
            return None
        if is_number(output) and ITEMS not in self._parameters:
            raise RingConfigError(
                f"{type(self._module).__name__}: expected logits, or a loss by {ITEMS}, got a tensor"
                f" {list(output.shape)}; return logits, or divide the sum of the loss by {ITEMS}"
            )
        whole = partial(_whole, self._session, sharding, left_B1)
        by_name: dict[str, Gather] = {}
        if sharding.encoder is not None:
            of_encoder = partial(_whole, self._session, sharding.encoder, None)
            names = output if isinstance(output, dict) else ()
            by_name = {name: of_encoder for name in names if name.startswith("encoder_")}
        if shifts and isinstance(output, dict) and "log_probs" in output:
            by_name |= {name: lambda x: whole(x)[:, :-1] for name in _OF_LABELS}
        if isinstance(output, dict):
            by_name |= {name: lambda x: self.summed(x.float()) for name in _COUNTS if name in output}
        if keep is not None:
            by_name |= {"logits": lambda x: _kept(whole(x), keep)}
        return make_whole_output(output, self.shown, whole, by_name)

    def _kept_logits(self, arguments: dict[str, Any]) -> Any:
        """Take the tokens out of a call of which transformers returns logits; None for all.

        Raises:
            RingConfigError: there are labels as well.
        """
        if not is_transformers_model(self._module):
            return None
        keep = arguments.pop(_KEEP, None)
        tokens = next(
            (arguments[name].shape[1] for name in ("input_ids", EMBEDS) if arguments.get(name) is not None), 0
        )
        if keep is None or (isinstance(keep, int) and (keep == 0 or keep >= tokens)):
            return None
        if arguments.get("labels") is not None:  # of other tokens than the logits: transformers raises
            got = list(keep.shape) if isinstance(keep, Tensor) else keep
            raise RingConfigError.wrong(
                f"{type(self._module).__name__}: {_KEEP}", f"none, or all {tokens} tokens, with labels", got,
                "leave it out, and give tokens without a loss the label -100",
            )  # fmt: skip
        return keep

    @property
    def layout(self) -> Layout:
        """Return the layout of the batch of the call under way."""
        return self._session.layout

    def summed(self, local: Tensor) -> Tensor:
        """Return the sum over the ranks of a sequence, without a gradient. Collective."""
        return sequence_sum_op(local.detach(), get_mesh_number(self._session.run_mesh))

    def shown(self, local_loss: Tensor) -> Tensor:
        """Return a loss with the gradient of this rank's and the value of the replica's. Collective."""
        shown: Tensor = _Shown.apply(local_loss, self.summed(local_loss) * self.share)
        return shown

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, parameter in self._parameters.items() if parameter.kind in by_place]
        if len(args) > len(names):
            raise RingShapeError.wrong(
                type(self._module).__name__, "arguments by name", f"{len(args)}", "name them"
            )
        return dict(zip(names, args, strict=False)) | kwargs

    def _flushed(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return a batch with its padding on the right, and how many tokens of each row stood on the left.

        Prompts of rollouts have padding on the left. Tokens keep their positions.
        """
        session, mask_BT = self._session, batch.get("attention_mask")
        documents = session.config.pattern.documents
        if mask_BT is None or mask_BT.ndim != 2 or documents or not session.pattern.is_causal:
            return batch, None
        if session.needs.batches is not None:  # an encoder's mask: its padding may be anywhere
            return batch, None
        if bool(mask_BT[:, 0].all()):
            return batch, None
        left_B1 = mask_BT.bool().long().argmax(dim=1, keepdim=True)
        tokens = mask_BT.shape[1]
        if "labels" in batch and batch["labels"].shape == mask_BT.shape and "shift_labels" not in batch:
            next_BT = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
            is_last_padding_BT = torch.arange(tokens, device=mask_BT.device) == left_B1 - 1
            if bool((next_BT != IGNORE)[is_last_padding_BT].any()):
                warn_about_shifted_padding()
            batch = batch | {"shift_labels": next_BT.masked_fill(is_last_padding_BT, IGNORE)}
            del batch["labels"]
        by_token = {key for key, x in batch.items() if x.shape[:2] == mask_BT.shape}
        by_token -= session.needs.whole.names if session.needs.whole is not None else set()
        flushed = {key: _rolled(x, left_B1) if key in by_token else x for key, x in batch.items()}
        if session.needs.number_tokens is None and not session.needs.skips_padding:
            places_T = torch.arange(tokens, device=mask_BT.device)
            flushed.setdefault("position_ids", (places_T + left_B1).clamp_max(tokens - 1))
        return flushed, left_B1

    def _takes(self, key: str) -> bool:
        """Return whether the module takes an argument; it must take position_ids, or count from 0."""
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values())
        if key == "position_ids" and not takes_all and key not in self._parameters:
            raise RingConfigError(
                f"{type(self._module).__name__}.forward: expected position_ids, got {list(self._parameters)};"
                " take them as an argument, and number tokens by them: a rank has a part of the sequence"
            )
        return takes_all or key in self._parameters or key not in _LABELS


_of_modules: weakref.WeakKeyDictionary[nn.Module, WholeBatches] = weakref.WeakKeyDictionary()


def find_whole_batches(module: nn.Module) -> WholeBatches | None:
    """Return what shards the batches of an engine or of its module; None where neither is on a ring."""
    return _of_modules.get(module)


def _without_borders(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out where documents begin, if position ids say it, too."""
    borders = [key for key in _BORDERS if key in batch]
    if borders and "position_ids" not in batch:
        raise RingPatternError.wrong(
            "batch", f"position_ids with {borders[0]}", "none", 'set "documents": true'
        )
    return {key: x for key, x in batch.items() if key not in borders}


class _Shown(torch.autograd.Function):
    """Show another value than the loss whose gradient is taken."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _kept(logits_BTV: Tensor, keep: Any) -> Tensor:
    """Return the logits that transformers keeps: the last `keep`, or those of a tensor of places."""
    if isinstance(keep, Tensor) and keep.ndim == 2:
        keep = keep.to(logits_BTV.device)
        return logits_BTV[keep] if keep.dtype == torch.bool else logits_BTV.take_along_dim(keep[..., None], 1)
    return logits_BTV[:, slice(-keep, None) if isinstance(keep, int) else keep]


def _rolled(x: Tensor, by_B1: Tensor) -> Tensor:
    """Return [B, T, ...] with each row moved left by its number of tokens; the first ones go to its end."""
    places_BT = (torch.arange(x.shape[1], device=x.device) + by_B1.to(x.device)) % x.shape[1]
    return x.gather(1, places_BT.view(*places_BT.shape, *[1] * (x.ndim - 2)).expand_as(x))


def _whole(session: RingSession, sharding: BatchSharding, left_B1: Tensor | None, output: Tensor) -> Tensor:
    """Return the whole sequence of a local result; another tensor as it is. Collective."""
    if output.ndim < 2 or output.shape[1] != sharding.local_tokens:
        return output
    if sharding.mesh is not session.run_mesh:
        raise RingShapeError(
            f"outputs: expected a sharded sequence, got {sharding.layout.tokens} tokens, below"
            ' min_sequence_length; read nothing but the loss, or set "min_sequence_length": 0'
        )
    sent = output.to(torch.uint8) if output.dtype is torch.bool else output  # no message has that type
    whole = gather_sequence(sent, sharding.layout, mesh=session.run_mesh, dim=1).to(output.dtype)
    whole = whole.contiguous()  # as a module returns it: scripts call view
    return whole if left_B1 is None else _rolled(whole, -left_B1)
