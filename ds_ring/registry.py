"""Name what there are several of: public names, layouts, kernels, passes. One row makes a new one known.

Words of the JSON, help texts, candidates of `ds-ring tune` and the tables of tests come from here. A row has
the dotted name of an object, which is imported at its first use, so that names need neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

# The public names of `ds_ring` and their modules. The rows are lines of __init__.pyi, where type checkers
# read them, too: "from ds_ring.masks.catalog import Causal as Causal".
_ROWS = (line.split() for line in Path(__file__).with_name("__init__.pyi").read_text().splitlines())
PUBLIC = {row[-1]: f"{row[1]}.{row[3]}" for row in _ROWS if row[:1] == ["from"]}


class JsonKey(NamedTuple):
    """The key of the JSON's "pattern" section for a pattern that takes a number of tokens.

    Attributes:
        name: the key.
        meaning: of the pattern with n tokens.
        conflicts: other keys with which the pattern has no effect, and the reasons ("which ...").
    """

    name: str
    meaning: str
    conflicts: dict[str, str] = {}  # noqa: RUF012


class LayoutRow(NamedTuple):
    """Say where a layout is made.

    All are functions of tokens T, ring size P, what each shard's slots are a multiple of, and the patterns
    (`Mix`).

    Attributes:
        home: returns the layout.
        takes_speeds: whether `home` deals out work by the `speeds` of the ranks, too.
        if_uneven: returns candidates, given the speeds, for "auto" where contiguous and zigzag are uneven.
        always: returns candidates that "auto" compares with contiguous and zigzag, for their own patterns.
        for_labels: returns layouts that keep tokens of equal labels on few ranks; "auto" compares them, too,
            where contiguous and zigzag are uneven, and takes the one whose modelled time is least.
        for_blocks: returns layouts that "auto" compares for a kernel in blocks; None: not for these patterns.
    """

    home: str
    takes_speeds: bool = False
    if_uneven: str | None = None
    always: str | None = None
    for_blocks: str | None = None
    for_labels: str | None = None


LAYOUTS = {
    "auto": LayoutRow("ds_ring.schedule.choose.make_auto", takes_speeds=True),
    "contiguous": LayoutRow("ds_ring.schedule.layout.make_contiguous"),
    "zigzag": LayoutRow("ds_ring.schedule.layout.make_zigzag"),
    "striped": LayoutRow("ds_ring.schedule.layout.make_striped"),
    "residue": LayoutRow(
        "ds_ring.patterns.dilated.residue_layout.make_residue",
        for_blocks="ds_ring.patterns.dilated.residue_layout.for_blocks",
    ),
    "balanced": LayoutRow(
        "ds_ring.layouts.balanced.pieces.make_balanced",
        takes_speeds=True,
        if_uneven="ds_ring.layouts.balanced.pieces.even_pieces",
    ),
    "document_zigzag": LayoutRow(
        "ds_ring.patterns.documents.document_zigzag.make_document_zigzag",
        for_labels="ds_ring.patterns.documents.shared.whole_and_shared",
    ),
    "private": LayoutRow(
        "ds_ring.patterns.private.private_layout.make_private",
        always="ds_ring.patterns.private.private_layout.candidates",
    ),
}


# Keys of "pattern" in the JSON for patterns that take more than a number of tokens (`FurtherKeys` in
# `config/messages.py`), in the order in which they are composed.
PATTERN_KEYS = {
    "dilated": "ds_ring.patterns.dilated.keys.DilatedKeys",
    "slices": "ds_ring.patterns.slices.keys.SliceKeys",
    "mask_mod": "ds_ring.patterns.captured.keys.MaskModKeys",
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
        rates_layouts: function that rates the candidates of the layout "auto" by the work of its blocks.
        takes_scores: whether it can change scores pair by pair (`score_mod`).
        refuses: function of `KernelNeeds` that returns the error for what the kernel cannot do, or None;
            None: it can do all.
        workspace: function that returns its allocations; None if unknown.
    """

    home: str
    device: str | None = None
    anywhere: bool = False
    first_for: frozenset[str] = frozenset()
    takes_blocks: bool = False
    rates_layouts: str | None = None
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
        "ds_ring.kernels.flex.kernel.FlexKernel", "cuda", takes_blocks=True, takes_scores=True,
        rates_layouts="ds_ring.kernels.flex.layouts.rate_in_blocks",
        workspace="ds_ring.kernels.flex.workspace.flex_bytes",
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
# What finds the fastest of some kernels on a kind of device, by measured rates.
RATES = {
    "cuda": "ds_ring.measure.rates.fastest_here",
}


class DeviceRow(NamedTuple):
    """Name what ring passes use on a kind of device, beside its kernels.

    Attributes:
        streams: class that orders the streams of a device; without a row the host waits.
        watchdog: class that enforces the deadlines of messages for which a stream waits.
        merge: function that merges partial results in one pass over memory; without it torch's operators do.
        patience: function of the seconds that a rank asks the others for, because it compiles.
        warm_up: function that makes the first calls of new process groups; without it the first pass does.
    """

    streams: str
    watchdog: str
    merge: str
    patience: str
    warm_up: str


DEVICES = {
    "cuda": DeviceRow(
        streams="ds_ring.cuda.streams.CudaStreams",
        watchdog="ds_ring.cuda.watchdog.WorkWatchdog",
        merge="ds_ring.cuda.merge.launch",
        patience="ds_ring.cuda.patience.patience_s",
        warm_up="ds_ring.cuda.warm_up.warm_up",
    ),
}


class PassRow(NamedTuple):
    """Say where a pass is made, and what others must know before it is imported.

    A pass attends over the keys of all ranks, forward and backward (`Pass` in `ops/passes.py`).

    Attributes:
        home: function that makes it: of the context, `Prepared`, `Operands`, and what ends the header check.
        exchange: class that sends its messages; None: `comm.exchange.Exchange`.
        no_hops: why payload dtypes, chunks, stages and overlap have no effect; None: K/V go hop by hop.
        no_offload: why its operands cannot wait on the host; None: they can.
        no_hop_sums: why no kernel may keep a sum over the hops of a rank; None: one may.
        whole_blocks: its layouts have runs of whole blocks of `block_size` tokens.
        checks_layout: function of a layout and `block_size` that raises RingLayoutError for one that has not.
        shares_memory: ranks copy out of memory that those of one node share; no backend sees a message.
        few_queries: function that makes its forward pass of queries that all ranks have; None: the usual.
    """

    home: str
    exchange: str | None = None
    no_hops: str | None = None
    no_offload: str | None = None
    no_hop_sums: str | None = None
    whole_blocks: bool = False
    checks_layout: str | None = None
    shares_memory: bool = False
    few_queries: str | None = None


class CodecRow(NamedTuple):
    """Describe how tensors are written while they travel, without importing the code that writes them.

    Attributes:
        home: class that encodes K and V (`Codec` in `ring/pair.py`); None: they are cast, if at all.
        element_bytes: bytes of an element in a message; None: those of the tensors.
        row_bytes: further bytes for each row of K and of V, that is, for one token of one head.
        exact: what arrives equals what was sent.
    """

    home: str | None = None
    element_bytes: int | None = None
    row_bytes: int = 0
    exact: bool = True

    def bytes_each(self, own: int) -> int:
        """Return the bytes of an element in a message; `own` of the tensors themselves."""
        return own if self.element_bytes is None else self.element_bytes

    def pair_bytes(self, elements: int, own: int) -> int:
        """Return the bytes of a row of K and of V in a message, which have so many elements together."""
        return elements * self.bytes_each(own) + 2 * self.row_bytes


# The values of "kv_payload" and of "gradient_payload". Gradients are added in the accumulators' dtype,
# for every dtype of messages: [Note: where gradients are added] in `schedule/head_class.py`.
KV_PAYLOADS = {
    "as_is": CodecRow(),
    "float8": CodecRow(
        "ds_ring.codecs.float8.Float8Rows",
        element_bytes=1,
        row_bytes=1,
        exact=False,
    ),
}
GRADIENT_PAYLOADS = {
    "float32": CodecRow(),
    "bfloat16": CodecRow(
        element_bytes=2,
        exact=False,
    ),
}

# What makes a function of pairs a value that ranks compare. Its `for_heads` returns `Scores` in
# `kernels/interface.py`. `captured` holds what a function captured; its `is_same` compares another function.
TRACERS = {
    "score_mod": "ds_ring.patterns.captured.score_mod.ScoreMod",
    "captured": "ds_ring.patterns.captured.traced.CapturedValues",
}


# What keeps tensors for a pass's gradient (`SavedTensors` in `ops/passes.py`): (out, lse) of checkpointed
# regions, and q, k, v, out, lse on the host, by its key of the JSON.
SAVED_TENSORS = {
    "results": "ds_ring.memory.saved_results.keep_results.KeepResults",
    "offload_attention": "ds_ring.memory.host.head_stream.OnHost",
}


# The values of "transport". Each has a file of its own, and nothing else names it.
PASSES = {
    "ring": PassRow("ds_ring.ops.ring_op.make_pass"),
    "pull": PassRow(
        "ds_ring.transports.pull.signals.make_pass",
        exchange="ds_ring.transports.pull.signals.PullExchange",
        no_offload="needs them on the device",
        shares_memory=True,
    ),
    "reproducible": PassRow(
        "ds_ring.transports.reproducible.sharded.make_pass",
        no_hops="passes nothing on",
        no_offload="takes all of them at once",
        no_hop_sums="adds the gradients of blocks in an order of its own",
        whole_blocks=True,
        checks_layout="ds_ring.transports.reproducible.blocks.check_blocks",
        few_queries="ds_ring.transports.reproducible.few_queries.make_forward",
    ),
    "tiles": PassRow(
        "ds_ring.transports.tiles.tile_pass.make_pass",
        no_hops="goes by tiles of its own",
        no_offload="takes all of them at once",
        no_hop_sums="adds gradients of other ranks' queries, too",
    ),
    "all_gather": PassRow(
        "ds_ring.transports.all_gather.gather_pass.make_pass",
        no_hops="has no hops",
        no_offload="takes all of them at once",
    ),
}


# What capabilities add to an engine (`data/engine_part.py`), from the inside out.
ENGINE_PARTS = {
    "compile": "ds_ring.contrib.compile.engine.CompiledEngine",
    "monitor": "ds_ring.measure.step_metrics.Monitor",
    "rank_speeds": "ds_ring.measure.rank_speeds.RankSpeeds",
    "run_report": "ds_ring.measure.run_report.RunReport",
    "checkpoint": "ds_ring.checkpoint.engine.SealedCheckpoints",
    "sharded_tables": "ds_ring.layers.ngrams.sharded_tables.ShardedTables",
    "random_draws": "ds_ring.data.random_draws.RandomDraws",
}

# What capabilities add to a transformers model (`models/model_part.py`); those of
# "long_sequence" by their keys in the JSON: without its row a key is refused.
MODEL_PARTS = {
    "images": "ds_ring.contrib.images.model.ImagePart",
    "sound": "ds_ring.contrib.sound.model.SoundPart",
    "tiled_loss": "ds_ring.memory.tiles.models_head.TiledLoss",
    "tiled_mlp": "ds_ring.memory.tiles.models_layers.TiledMLPs",
    "offload_checkpoints": "ds_ring.memory.host.offloaded_checkpoints.OffloadedCheckpoints",
    "generation": "ds_ring.decode.generation.generation_of",
}

# Kinds of rows by the tensor of a batch that has their patterns (`RowKind` in `engines/deepspeed`).
ROW_KINDS = {
    "tree_ends": "ds_ring.contrib.policies.trees.TreeRows",
    "diffusion_blocks": "ds_ring.contrib.diffusion.batch.DiffusionRows",
    "image_block_ids": "ds_ring.contrib.images.blocks.BlockRows",
}

# Functions that are methods of `engine.ring`, too: their first argument is the session.
SESSION_METHODS = {
    "tree_batch": "ds_ring.contrib.policies.trees.tree_batch",
    "batch_invariant": "ds_ring.contrib.batch_invariant.session.batch_invariant",
    "generated_logprobs": "ds_ring.contrib.batch_invariant.session.generated_logprobs",
    "diffusion_batch": "ds_ring.contrib.diffusion.batch.diffusion_batch",
    "drafter_batch": "ds_ring.contrib.drafter.batch.drafter_batch",
    "draft_attention": "ds_ring.contrib.drafter.attention.draft_attention",
    "draft_loss": "ds_ring.contrib.drafter.attention.draft_loss",
    "states_by_heads": "ds_ring.contrib.whole_heads.by_heads.states_by_heads",
}

# What gives kinds of layers the bits of a generation in `engine.ring.batch_invariant()`: functions of the
# session and the mode that return a context.
INVARIANT_PARTS = {
    "recurrences": "ds_ring.contrib.batch_invariant.steps.in_steps",
    "choices": "ds_ring.contrib.batch_invariant.chosen.query_by_query",
}

# Functions that put the trainers of a package on a ring; `ds_ring.enable` calls those of installed packages.
TRAINERS = {
    "accelerate": "ds_ring.engines.trainers.accelerate.enable_accelerate",
    "transformers": "ds_ring.engines.trainers.transformers.enable_trainer_config",
}


def unmeasured(device_type: str, kinds: Iterable[str], able: Iterable[str]) -> str:
    """Return the kernel that "auto" takes without rates; see [Note: which kernel auto is].

    Args:
        device_type: "cpu" or "cuda".
        kinds: of the tiles: of `Pattern.tile_kind`.
        able: names of the kernels that can compute it.
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
