"""Find the Python objects behind the integers that a compiled graph carries.

One table maps handles to objects. It holds weak references, so somebody else keeps an object alive: a context
is kept by its mesh.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from typing import Any, TypeVar

from ds_ring.compat.torch import assume_constant

_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_made = itertools.count()
_COUNT_BITS = 24
T = TypeVar("T")


def get_object(handle: int, kind: type[T]) -> T:
    """Return the object behind a handle."""
    value = _objects.get(handle)
    assert isinstance(value, kind), (
        f"{kind.__name__} {handle} is gone: its mesh, model or batch was dropped before this call"
    )
    return value


# [Note: handles in compiled code]
# torch.compile runs a function marked `assume_constant_result` while it traces and keeps the result, here the
# integer by which the operator finds pattern, layout, mesh and options. It guards the arguments: numbers and
# texts by value, objects that come from outside by identity ([Note: guards of functions] in
# `traced_objects.py` has those of functions). An object that the traced code itself makes is
# handed over without its attributes, so that nothing may be wrapped into an object before such a call: it
# would arrive with its defaults.


# [Note: handles in caches on disk]
# Inductor and AOTAutograd keep compiled graphs in files, which all ranks and later runs share, by the text of
# the traced graph. What fake results and gradients read from the object behind a handle (runs of a rank, the
# Ulysses rank, options) is not in that text. So the upper bits of a handle are a digest of it.
@assume_constant
def new_handle(owner: object, *facts: object) -> int:
    """Return the integer by which an operator finds this object; `facts` are what a graph may depend on."""
    text = " | ".join(map(str, (type(owner).__name__, *facts)))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (_COUNT_BITS + 1)
    while (handle := digest << _COUNT_BITS | next(_made) % (1 << _COUNT_BITS)) in _objects:
        pass
    _objects[handle] = owner
    return handle
