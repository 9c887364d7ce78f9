"""Patterns of a shared sequence and private tokens, which only queries of the same block or branch read.

`BlockDiffusion` is the training mask of block diffusion: of BD3-LM (Arriola et al. 2025, arXiv 2503.09573;
`block_diff_mask` of github.com/kuleshov-group/bd3lms), and of models that are trained as it is (LLaDA 2;
arXiv 2609.19242). `Drafter` is the mask of drafters: the training-time test of EAGLE-3 (Li et al. 2025, arXiv
2503.01840) as SpecForge trains it, and the blocks of DFlash, which begin at anchors (NeMo Automodel,
`components/attention/dflash_mask`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ds_ring.errors import RingPatternError, check_bool, check_whole_number, shown
from ds_ring.masks.branches import Branch, Partition
from ds_ring.masks.catalog import Causal, Full, SlidingWindow
from ds_ring.masks.pattern import Pattern, QueryHead, check_numbers
from ds_ring.masks.slots import IntArray
from ds_ring.masks.tiles import UNBOUNDED
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.patterns.documents.table import Table
from ds_ring.patterns.private.ranges import PrivateTable, Stretches, label_ranges, seen_ranges


def document_ranges(documents: Documents | None, tokens: int, name: str) -> IntArray:
    """Return the first position and end of each document, int64 [n, 2]; of all tokens without documents.

    Raises:
        RingPatternError: documents of another length, or one that is in two places.
    """
    if documents is None:
        return np.array([[0, tokens]])
    if not isinstance(documents, Documents) or documents.tokens != tokens:
        raise RingPatternError.wrong(
            f"{name}: documents", f"Documents of {tokens} tokens", str(documents), "number the shared tokens"
        )
    ids, starts = np.array(documents.ids), np.array(documents.starts)
    if len(np.unique(ids[ids >= 0])) < (ids >= 0).sum():
        raise RingPatternError.wrong(
            f"{name}: documents", "each in one place", str(documents), "give each run an id of its own"
        )
    return np.stack([starts, np.append(starts[1:], tokens)], axis=1)[ids >= 0]


@dataclass(frozen=True)
class BlockDiffusion(Pattern):
    """Attend as block diffusion does in training: a sequence [clean; corrupted] of two copies of a text.

    The tokens of a clean block attend to the clean blocks up to their own. Those of a corrupted block attend
    to the clean blocks before it, and to the corrupted block itself, both ways. The last block of a document
    may be short. BD3-LM (arXiv 2503.09573) puts the corrupted copy first.

    Attributes:
        block: tokens of a block.
        tokens: of the clean copy; the sequence has twice as many, and `padding`.
        documents: `Documents` of the clean copy; blocks begin with each of them. None: one document.
        window: a token sees at most window - 1 clean tokens before its block, or before itself where clean
            tokens are causal; None for all.
        causal: clean tokens see clean tokens up to themselves, not up to the end of their block.
        corrupted_first: the sequence is [corrupted; clean].
        padding: tokens after both copies, which take no part.

    Raises:
        RingPatternError: a number below 1, or documents that are not those of the clean copy.
    """

    block: int
    tokens: int
    documents: Documents | None = None
    window: int | None = None
    causal: bool = False
    corrupted_first: bool = False
    padding: int = 0

    def __post_init__(self) -> None:
        check_numbers(self, "block", "tokens", *(["window"] if self.window is not None else []))
        for name in ("causal", "corrupted_first"):
            check_bool(getattr(self, name), f"BlockDiffusion: {name}", RingPatternError)
        document_ranges(self.documents, self.tokens, "BlockDiffusion")

    def narrowed(self, layer_pattern: Pattern) -> BlockDiffusion:
        """Return the pattern of a layer that asks for all earlier tokens, or for a window of them.

        Raises:
            RingPatternError: another pattern.
        """
        windows = [self.window] if self.window is not None else []
        for part in layer_pattern.conjuncts:
            if isinstance(part, SlidingWindow):
                windows.append(part.window)
            elif part not in (Causal(), Full()):
                expected = "Causal(), Full() or a SlidingWindow with block diffusion"
                raise RingPatternError.wrong("a layer", expected, str(layer_pattern), "take another model")
        return replace(self, window=min(windows)) if windows else self

    @property
    def pairs(self) -> int:
        """Return the number of pairs of a query and a key, a window apart."""
        first, end, document = self.blocks.T
        return int(((end - first) * 2 * (end - document)).sum())

    @cached_property
    def blocks(self) -> IntArray:
        """Return first token, end and first token of the document of each block of a copy, int64 [n, 3]."""
        parts = [
            np.stack([first := np.arange(start, end, self.block), np.minimum(first + self.block, end),
                      np.full(len(first), start)], axis=1)
            for start, end in document_ranges(self.documents, self.tokens, "BlockDiffusion").tolist()
        ]  # fmt: skip
        return np.concatenate(parts) if parts else np.zeros((0, 3), dtype=np.int64)

    @cached_property
    def _all(self) -> tuple[Branch, ...]:
        clean, corrupted = (self.tokens, 0) if self.corrupted_first else (0, self.tokens)
        total = 2 * self.tokens + self.padding
        first, end, document = self.blocks.T
        before = document if self.window is None else np.maximum(document, first - self.window + 1)
        queries = [np.stack([first, end], axis=1) + corrupted]
        keys = [np.stack([before, first], axis=1) + clean]
        branches = list[Branch]()
        if self.causal:
            most = UNBOUNDED if self.window is None else self.window - 1
            ranges = np.unique(document, return_inverse=True)[1]
            table = Table(*label_ranges(np.stack([first, end], axis=1) + clean, ranges, total), total)
            clean_tokens = Partition(clean, clean + self.tokens, (table,))
            branches.append(Branch(clean_tokens, clean_tokens, 0, most))
        else:
            queries.append(np.stack([first, end], axis=1) + clean)
            keys.append(np.stack([before, end], axis=1) + clean)
        branches += seen_ranges(np.concatenate(queries), np.concatenate(keys), total)
        places: Stretches = tuple(
            zip((first + corrupted).tolist(), (end - first).tolist(), (first + clean).tolist(), strict=True)
        )
        numbers = label_ranges(queries[0], np.arange(len(first)), total)
        table = PrivateTable(*numbers, total, (clean, clean + self.tokens), places)
        private = Partition(corrupted, corrupted + self.tokens, (table,))
        return (*branches, Branch(private, private))

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return self._all

    def __str__(self) -> str:
        documents = "" if self.documents is None else f", {self.documents}"
        rest = {"window": self.window, "causal": self.causal, "corrupted_first": self.corrupted_first}
        options = "".join(f", {name} {value}" for name, value in rest.items() if value)
        padded = f" and {self.padding}" * (self.padding > 0)
        return f"BlockDiffusion(blocks of {self.block}, 2 x {self.tokens}{padded} tokens{documents}{options})"


@dataclass(frozen=True)
class Drafter(Pattern):
    """Attend as a drafter does in training: branches of `draft` tokens beside a shared trunk.

    Trunk tokens attend causally. Without anchors each trunk token t has a branch (EAGLE-3's training-time
    test). The sequence is [trunk; step 1; ..; step `draft`], each of `trunk` tokens. Token t of a step
    attends to the trunk up to t, and to token t of the steps up to its own. With anchors (DFlash) it is
    [trunk; branch 0; ..]. A branch attends to the trunk before its anchor, and to itself.

    Attributes:
        trunk: tokens of the trunk.
        draft: tokens of a branch.
        anchors: for each branch the trunk position of its first token, which the trunk before it precedes; -1
            for a branch that takes no part. None: EAGLE-3's branches.
        documents: `Documents` of the trunk; a branch belongs to that of its anchor. None: one document.
        causal: a branch with an anchor attends to itself causally (JetSpec), not both ways (DFlash).
        last_step: only the tokens of EAGLE-3's last step are queries: see `step`.

    Raises:
        RingPatternError: a number below 1, anchors outside the trunk, or documents of another length.
    """

    trunk: int
    draft: int
    anchors: tuple[int, ...] | None = None
    documents: Documents | None = None
    causal: bool = False
    last_step: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "trunk", "draft")
        for name in ("causal", "last_step"):
            check_bool(getattr(self, name), f"Drafter: {name}", RingPatternError)
        if self.last_step and self.anchors is not None:
            raise RingPatternError("Drafter: last_step: expected no anchors, got some; they take one pass")
        document_ranges(self.documents, self.trunk, "Drafter")
        if self.anchors is not None:
            anchors = np.asarray(self.anchors)
            integers = anchors.ndim == 1 and np.issubdtype(anchors.dtype, np.integer) and len(anchors)
            if not integers or anchors.min() < -1 or anchors.max() >= self.trunk:
                raise RingPatternError(
                    f"Drafter: anchors: expected trunk positions from -1 (none) to {self.trunk - 1}, got"
                    f" {shown(self.anchors)}; leave them out for a branch at each token"
                )
            object.__setattr__(self, "anchors", tuple(anchors.tolist()))

    @property
    def tokens(self) -> int:
        """Return the tokens of the whole sequence."""
        branches = self.trunk if self.anchors is None else len(self.anchors)
        return self.trunk + branches * self.draft

    def step(self, number: int) -> Drafter:
        """Return what step `number` of EAGLE-3 attends to, over [trunk; step 1; ..; step `number`].

        The steps of a training-time test are one after the other, since each reads the output of the one
        before it. So each is a pass of its own, in which only its tokens are queries.

        Raises:
            RingPatternError: branches with anchors, or no number from 1 to `draft`.
        """
        number = check_whole_number(number, "Drafter: step", RingPatternError, self.draft)
        return replace(self, draft=number, last_step=True)

    @cached_property
    def _all(self) -> tuple[Branch, ...]:
        documents = document_ranges(self.documents, self.trunk, "Drafter")
        numbers = np.arange(len(documents))
        if self.anchors is not None:
            return self._at_anchors(documents, np.array(self.anchors))
        copies = 1 + self.draft
        ranges = np.concatenate([documents + copy * self.trunk for copy in range(copies)])
        labels = label_ranges(ranges, np.tile(numbers, copies), self.tokens)
        trunk = Partition(0, self.trunk, (Table(*labels, self.tokens),))
        places: Stretches = tuple((copy * self.trunk, self.trunk, 0) for copy in range(1, copies))
        table = PrivateTable(*labels, self.tokens, (0, self.trunk), places, whole=False)
        private = Partition(self.trunk, self.tokens, (table,))
        steps = [
            replace(trunk, first=copy * self.trunk, end=(copy + 1) * self.trunk) for copy in range(copies)
        ]
        queries = private
        if self.last_step:
            steps, queries = steps[-1:], replace(private, first=steps[-1].first)
        branches = [Branch(step, trunk, least=step.first) for step in steps]
        gaps = [gap * self.trunk for gap in range(self.draft)]
        return (*branches, *(Branch(queries, private, gap, gap) for gap in gaps))

    def _at_anchors(self, documents: IntArray, anchors: IntArray) -> tuple[Branch, ...]:
        labels = label_ranges(documents, np.arange(len(documents)), self.tokens)
        trunk = Partition(0, self.trunk, (Table(*labels, self.tokens),))
        first = self.trunk + self.draft * np.arange(len(anchors))
        document = np.searchsorted(documents[:, 0], anchors, side="right") - 1
        # in padding of the trunk, or -1: no branch
        held = (anchors >= 0) & (document >= 0)
        held &= anchors < (documents[np.maximum(document, 0), 1] if len(documents) else 0)
        first, anchors, document = first[held], anchors[held], document[held]
        queries = np.stack([first, first + self.draft], axis=1)
        before = np.stack([documents[document, 0], anchors], axis=1)
        places: Stretches = tuple((start, self.draft, home) for start, home in
            zip(first.tolist(), anchors.tolist(), strict=True))  # fmt: skip
        numbers = label_ranges(queries, np.arange(len(first)), self.tokens)
        table = PrivateTable(*numbers, self.tokens, (0, self.trunk), places)
        private = Partition(self.trunk, self.tokens, (table,))
        branch = Branch(private, private, 0 if self.causal else -UNBOUNDED)
        return (Branch(trunk, trunk, least=0), *seen_ranges(queries, before, self.tokens), branch)

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return self._all

    def __str__(self) -> str:
        documents = "" if self.documents is None else f", {self.documents}"
        anchors = "" if self.anchors is None else f" at {len(self.anchors)} anchors, {hash(self.anchors)}"
        causal = ", causal" * (self.causal and self.anchors is not None)
        last = ", the last step" * self.last_step
        return f"Drafter(trunk of {self.trunk}, branches of {self.draft}{anchors}{documents}{causal}{last})"
