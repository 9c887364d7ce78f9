"""Make transformers know `attn_implementation="ds_ring"`, and import neither it nor torch for that.

The name is registered when transformers has been imported: at once by ds_ring/__init__.py, or by its finder
afterwards. attention.py is imported by the first call of the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ds_ring.models.attention_name import NAME
from ds_ring.models.model import PRETRAINED, TABLE
from ds_ring.patches import apply, patch

_WHY = 'attn_implementation="ds_ring"'


@patch(
    TABLE.given("loader"), "exec_module", stage="at_import", feature="name.import",
    reason="registers the name without importing transformers",
    when="transformers was not imported before ds_ring",
)  # fmt: skip
def execute_and_register(execute: Callable[[Any], None], module: Any) -> None:
    """Execute transformers.modeling_utils, then register the name."""
    execute(module)
    register()


def register() -> None:
    """Register the name, and check which classes are given it."""
    name_them(_attention, _mask)
    apply(_choose_or_refuse)


def name_them(attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register an attention function and its mask function under the name."""
    apply(partial(_register_attention, attention), partial(_register_mask, mask))


@patch(
    TABLE.imported("transformers"), "AttentionInterface", stage="at_import", kind="registered",
    feature="attention function", reason=_WHY,
)  # fmt: skip
def _register_attention(attention: Callable[..., Any]) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


@patch(
    TABLE.imported("transformers"), "AttentionMaskInterface", stage="at_import", kind="registered",
    feature="mask function", reason=_WHY,
)  # fmt: skip
def _register_mask(mask: Callable[..., Any]) -> None:
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(NAME, mask)


@patch(
    TABLE.imported(PRETRAINED), "get_correct_attn_implementation", stage="around_init", feature="name",
    reason="a class that does not support the name raises RingConfigError (Falcon's was a KeyError)",
)  # fmt: skip
def _choose_or_refuse(
    choose: Callable[..., str], model: Any, requested_attention: str | None, *args: Any, **kwargs: Any
) -> str:
    # A class that does not support the name: Falcon raises a KeyError, others ignore it.
    if requested_attention == NAME:
        from ds_ring.models.checks import make_bypass_error, uses_interface

        if not uses_interface(type(model)):
            raise make_bypass_error(type(model))
    return choose(model, requested_attention, *args, **kwargs)


def _attention(*args: Any, **kwargs: Any) -> Any:
    from ds_ring.models.attention import attention

    return attention(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    from ds_ring.models.attention import mask

    return mask(*args, **kwargs)
