"""What differs between versions of torch: each difference is found by looking for the feature.

Owns nothing else: a module that needs one of these imports it from here, and works with all versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

# Each operator of ds_ring: opaque to torch.compile, and never captured in a CUDA graph.
# torch 2.11 takes a sequence of tags only.
operator = partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))


# [Note: constants from objects]
# Dynamo calls a function that is marked as constant with real values in place of its variables. Up to torch
# 2.11 it has none for objects that are not constants. `_Held` is a variable that has: `_hold` puts it in the
# place of the argument, and guards the argument's identity as later versions do.
def assume_constant(function: F) -> F:
    """Do what `torch.compiler.assume_constant_result` does, without importing Dynamo (1.3 s).

    The function may be given objects, which are guarded by identity: [Note: constants from objects].
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and not _takes_objects():
            from ds_ring.compat.dynamo import hold

            return function(*[hold(argument) for argument in args])
        return function(*args)

    vars(call).clear()  # `wraps` has copied the mark
    return call  # type: ignore[return-value]


def _takes_objects() -> bool:
    from ds_ring.compat.dynamo import takes_objects

    return takes_objects()


_takes_objects._dynamo_marked_constant = True  # type: ignore[attr-defined]
