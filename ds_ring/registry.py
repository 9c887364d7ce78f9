"""Name what there are several of: public names, layouts, kernels. One row makes a new one known everywhere.

Words of the JSON, help texts, candidates of `ds-ring tune` and the tables of tests come from here. A row says
where a thing stands; it is imported when it is first asked for, so that names take neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

# What `ds_ring` gives by name, and where each stands. The rows are lines of __init__.pyi, where type checkers
# read them, too: "from ds_ring.masks.catalog import Causal as Causal".
_ROWS = (line.split() for line in Path(__file__).with_name("__init__.pyi").read_text().splitlines())
PUBLIC = {row[-1]: f"{row[1]}.{row[3]}" for row in _ROWS if row[:1] == ["from"]}


class JsonKey(NamedTuple):
    """Describe the key of "pattern" by which the JSON has a pattern: one that takes a number of tokens.

    Attributes:
        name: the key.
        meaning: what the pattern does with its n tokens.
        beside: other keys, and why the pattern has no effect beside them ("which ...").
    """

    name: str
    meaning: str
    beside: dict[str, str] = {}  # noqa: RUF012


# Functions of tokens T, ring size P, what each shard's slots are a multiple of, and the patterns (`Mix`).
LAYOUTS = {
    "auto": "ds_ring.schedule.choose.make_auto",
    "contiguous": "ds_ring.schedule.layout.make_contiguous",
    "zigzag": "ds_ring.schedule.layout.make_zigzag",
    "striped": "ds_ring.schedule.layout.make_striped",
    "residue": "ds_ring.schedule.choose.make_residue",
    "balanced": "ds_ring.schedule.choose.make_balanced",
    "document_zigzag": "ds_ring.schedule.choose.make_document_zigzag",
}


class KernelRow(NamedTuple):
    """Describe a kernel without importing it.

    Attributes:
        home: the class.
        device: the kind of device for which "auto" takes the kernel; None: for none.
        anywhere: whether it also runs on other kinds of devices.
        first_for: kinds of tiles (`Pattern.tile_kind`) for which "auto" prefers it to the kernel that the
            device has for all patterns; empty for that kernel.
        takes_blocks: whether it takes `block_size` of the JSON.
        takes_scores: whether it can change scores pair by pair (`score_mod`).
        refuses: function of `KernelNeeds` that returns the error for what the kernel cannot do, or None;
            None: it can do all.
        workspace: function that returns what it allocates; None: nobody has worked it out.
    """

    home: str
    device: str | None = None
    anywhere: bool = False
    first_for: frozenset[str] = frozenset()
    takes_blocks: bool = False
    takes_scores: bool = False
    refuses: str | None = None
    workspace: str | None = None

    def runs_on(self, device_type: str) -> bool:
        """Return whether it runs on a kind of device."""
        return self.anywhere or self.device in (None, device_type)


KERNELS = {
    "reference": KernelRow("ds_ring.kernels.reference.ReferenceKernel", takes_scores=True),
    "cpu": KernelRow(
        "ds_ring.kernels.cpu.kernel.CpuKernel", "cpu", workspace="ds_ring.kernels.cpu.workspace.cpu_bytes"
    ),
    "flex": KernelRow(
        "ds_ring.kernels.flex.FlexKernel", "cuda", takes_blocks=True, takes_scores=True,
        workspace="ds_ring.kernels.flex_workspace.flex_bytes",
    ),
    "flash": KernelRow(
        "ds_ring.kernels.flash.kernel.FlashKernel", "cuda", anywhere=True,
        first_for=frozenset({"full", "causal", "window"}), refuses="ds_ring.kernels.flash.kernel.refused",
        workspace="ds_ring.kernels.flash.workspace.flash_bytes",
    ),
}  # fmt: skip
# What "auto" takes on a kind of device, for all patterns.
FAST_KERNELS = {
    row.device: name for name, row in KERNELS.items() if row.device is not None and not row.first_for
}


def unmeasured(device_type: str, kinds: Iterable[str], able: Iterable[str]) -> str:
    """Return the kernel that "auto" takes without rates; see [Note: which kernel auto is].

    Args:
        device_type: "cpu" or "cuda".
        kinds: of the tiles: of `Pattern.tile_kind`.
        able: names of the kernels that can do what is asked.
    """
    first = (name for name in able if KERNELS[name].device == device_type and KERNELS[name].first_for)
    kinds = tuple(kinds)
    return next(
        (name for name in first if KERNELS[name].first_for.issuperset(kinds)), FAST_KERNELS[device_type]
    )


def load(home: str) -> Any:
    """Import what a row names, "package.module.name"."""
    module, _, name = home.rpartition(".")
    return getattr(import_module(module), name)
