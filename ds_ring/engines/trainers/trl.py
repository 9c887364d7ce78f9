"""Let TRL's distillation run on a ring: its loss reads hidden states of the models' backbones.

TRL computes the loss inside a forward pass of the student whose arguments are the loss function's
(`_ForwardRedirection`), so that ZeRO's hooks have the weights of the head there. A ring has to know the
batch. So the pass gets the batch, as any other. Inside of it the backbones and the loss get this rank's
tokens, and the ranks' losses are added ([Note: what a script sees] in enable.py).

Shapes: B samples, T tokens, S local tokens, H hidden.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ds_ring.data.batch import IGNORE, LABEL_KEYS
from ds_ring.data.outputs import LocalOutput
from ds_ring.engines.deepspeed.enable import find_whole_batches
from ds_ring.errors import RingConfigError
from ds_ring.patches import PatchTable, applied, apply, patch
from ds_ring.schedule.layout import Layout

TRL = PatchTable("trl", ">=0.24")
_BASE = TRL.given("base", "transformers.PreTrainedModel")
_BASE_FEATURE = "redirection.base"
_FOUND = "found"
_IMAGES = ("pixel", "image", "spatial_shapes", "token_type_ids")  # in the names of tensors of images
_NOT_OF_BACKBONES = (*LABEL_KEYS, "num_items_in_batch")


class _Output(LocalOutput):
    """Hold what was computed of local tokens."""

    def __getattr__(self, name: str) -> Any:  # ZeRO 3's hooks read outputs as those of transformers
        if name == _FOUND:
            return self[_FOUND]
        raise AttributeError(name)


@functools.cache
def enable_distillation() -> None:
    """Replace the redirection of forward passes; once, when TRL has been imported."""
    apply(_Distillation())


class _Distillation:
    """Stand in front of TRL's redirection; the loss of a student calls it again, for the teacher."""

    def __init__(self) -> None:
        self._batch: dict[str, Tensor] = {}  # the student's, while its loss is computed
        self._layout: Layout | None = None

    @patch(
        TRL.imported("trl.models.utils._ForwardRedirection"), "__call__", stage="at_enable",
        feature="redirection", when="trl.models.utils is imported",
        reason="runs the loss of a distillation in a forward pass of its batch, which a ring can cut; calls"
        " the original without a ring",
    )  # fmt: skip
    def redirected(
        self,
        call: Callable[..., Any],
        redirection: Any,
        wrapper: nn.Module,
        module: nn.Module,
        method: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call `method` inside a forward pass of `wrapper`, an engine on a ring or its module."""
        whole = find_whole_batches(wrapper)
        if whole is None:
            return call(redirection, wrapper, module, method, *args, **kwargs)
        arguments: dict[str, Any] = inspect.signature(method).bind(*args, **kwargs).arguments
        if "inputs" not in arguments:  # the teacher's hidden states

            def hidden_states(local: dict[str, Any]) -> tuple[Tensor]:
                self._check_layout(whole.layout)
                return (method(**arguments),)

            return _passed(wrapper, module, self._batch, hidden_states)[0]
        batch, labels_BT = _read_batch(arguments["inputs"])
        count = (labels_BT[:, 1:] != IGNORE).sum()
        items = arguments["num_items_in_batch"]
        items = count.clamp_min(1) if items is None else items

        def loss(local: dict[str, Any]) -> Any:
            self._batch, self._layout = batch, whole.layout
            ids_BS = local["input_ids"]
            none_B0, real_BS = ids_BS[:, :0], (local["shift_labels"] != IGNORE).to(ids_BS.dtype)
            inputs = {
                "prompt_ids": none_B0, "prompt_mask": none_B0, "completion_ids": ids_BS,
                "completion_mask": real_BS,
            }  # fmt: skip
            return method(**arguments | {"inputs": inputs, "num_items_in_batch": items * whole.share})

        local_loss, entropies, _ = _passed(wrapper, module, batch | {"labels": labels_BT}, loss)
        return whole.shown(local_loss), whole.summed(entropies), count

    def _check_layout(self, layout: Layout) -> None:
        mine = self._layout
        assert mine is not None
        if not np.array_equal(mine.slots_by_position(), layout.slots_by_position()):
            raise RingConfigError(
                f'distillation: expected one layout, got {mine.name} and {layout.name}: set "layout"'
            )


def _passed(
    wrapper: nn.Module,
    module: nn.Module,
    batch: dict[str, Tensor],
    compute: Callable[[dict[str, Any]], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """Return what `compute` makes of this rank's part of a whole batch, inside a forward pass."""
    model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
    with applied(partial(_compute_inside, model, compute), model=model):
        values: tuple[Any, ...] = getattr(wrapper(**batch), _FOUND)
    return values


@patch(
    TRL.given("model", "transformers.PreTrainedModel"), "forward", stage="around_forward", kind="replaced",
    feature="redirection.model", reason="computes that loss; taken back after the pass",
)  # fmt: skip
def _compute_inside(
    model: PreTrainedModel, compute: Callable[[dict[str, Any]], tuple[Any, ...]], **inputs: Any
) -> _Output:
    local = {key: value for key, value in inputs.items() if value is not None}
    of_backbone = {key: value for key, value in local.items() if key not in _NOT_OF_BACKBONES}
    with applied(partial(_local_tokens, of_backbone), _a_token_more, base=model.base_model):
        return _Output({_FOUND: compute(local)})


@patch(
    _BASE, stage="before_forward", feature=_BASE_FEATURE, options=("prepend",),
    reason="gives the backbone this rank's tokens; taken back after the pass",
)  # fmt: skip
def _local_tokens(of_backbone: dict[str, Any], *_: Any) -> tuple[tuple[()], dict[str, Any]]:
    return (), of_backbone


@patch(_BASE, stage="after_forward", feature=_BASE_FEATURE, reason="a token more, which TRL drops")
def _a_token_more(_: nn.Module, __: Any, ___: Any, output: Any) -> BaseModelOutput:
    # TRL drops the last token, which predicts none; here the labels were shifted before the cut.
    return BaseModelOutput(last_hidden_state=nn.functional.pad(output.last_hidden_state, (0, 0, 0, 1)))


def _read_batch(inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the batch of prompts and completions, and its labels [B, T]: tokens that count in the loss."""
    others = [key for key, value in inputs.items() if value is not None and any(x in key for x in _IMAGES)]
    if others:
        raise RingConfigError(f"distillation: expected text alone on a ring, got {others[0]}; leave it out")
    ids_BT = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask_BT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    counts = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    counts_BT = torch.cat([torch.zeros_like(inputs["prompt_mask"]), counts], dim=1)
    return {"input_ids": ids_BT, "attention_mask": mask_BT}, ids_BT.masked_fill(counts_BT == 0, IGNORE)
