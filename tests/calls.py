"""One call of attention from a table of arguments: of `ring_attention`, or of the function they ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

import ds_ring
from ds_ring import PassOptions, ring_attention

_OPTIONS = frozenset(PassOptions.model_fields)


def attend(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
    """Attend; keys of `PassOptions` may be given by name; see `function_of`."""
    function, rest = function_of(given)
    return function(q, k, v, **rest)


def function_of(arguments: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function of q, k and v, and its arguments with the options in one object.

    `queries="replicated"` asks for `decode_attention`, `up_projection` for `latent_attention`.
    """
    given = {name: value for name, value in arguments.items() if name != "up_projection" or value is not None}
    function: Callable[..., Any] = ring_attention
    if given.pop("queries", "sharded") == "replicated":
        function = ds_ring.decode_attention
    elif "up_projection" in given:
        function = partial(_latents, given.pop("up_projection"))
    names = [name for name in given if name in _OPTIONS]
    options = {name: given.pop(name) for name in names if name != "kernel" or function is not ring_attention}
    return function, given | ({"options": PassOptions(**options)} if options else {})


def _latents(up_projection: Tensor, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
    return ds_ring.latent_attention(q, k, v, up_projection, **given)
