"""Rollouts that share prefixes as trees: one row of tokens that has each common prefix once.

Owns the merging of token lists into a tree (`TreeBatch`), and how a tree is written into a batch's tensors
and read again. The pattern is core's `Tree`.

[Note: trees]
A batch describes its trees by `tree_ends` [B, T]: for each token, one past the last position of the row that
may attend to it. Nodes are in depth-first order, so the tokens of a subtree have no gap; 0 marks padding. One
row may hold several trees, one after the other. `position_ids` count along each path.

[Note: one next token for each]
A token at the end of a shared prefix has several next tokens, and a position of a row has one label. So each
branch begins with a copy of the last shared token, which sees the prefix and itself, as the original would:
the same hidden state, once for each branch. The prefix ends one token earlier. This costs one token for each
branch.

Shapes: B samples, T tokens of the row, S local tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.device_tables import on_device
from ds_ring.data.batch import IGNORE, LOSS_WEIGHTS, Batch
from ds_ring.data.packing import DOCUMENT_IDS, RowKind
from ds_ring.data.session import RingSession
from ds_ring.errors import RingPatternError, RingShapeError, shown
from ds_ring.masks.catalog import Causal
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import IntArray
from ds_ring.patterns.documents.pattern import Tree

TREE_ENDS = "tree_ends"


class TreeRows(RowKind):
    """Rows that are trees, by `tree_ends`; see [Note: trees]."""

    key = TREE_ENDS

    def check(self, tensors: Batch, pattern: Pattern, has_more: bool) -> None:
        """Check the trees of a batch, and add positions if there are none."""
        if pattern != Causal() or has_more or DOCUMENT_IDS in tensors:
            raise RingPatternError(
                f"batch[{TREE_ENDS!r}]: expected Causal() and no documents or attention_mask with trees,"
                f" got {pattern}{' and one of these' if has_more or DOCUMENT_IDS in tensors else ''}; give"
                " each document a root of its own"
            )
        if "labels" in tensors:
            raise RingShapeError.wrong(
                "batch", "shift_labels with a tree", "labels", "use engine.ring.tree_batch"
            )
        depths = [torch.from_numpy(tree.depths) for tree in read_trees(tensors[TREE_ENDS])]
        tensors.setdefault("position_ids", torch.stack(depths).to(tensors[TREE_ENDS].device))

    def make_row_pattern(self, row_T: IntArray) -> Tree:
        """Return the tree of a row."""
        return make_tree(row_T)


class TreeBatch:
    """Hold rollouts as one row in which their common prefixes are there once.

    Attributes:
        batch: what `shard_batch` takes: input_ids, position_ids, shift_labels and tree_ends, int64 [1, T],
            and the summed loss_weights float32 [1, T] where weights were given.
        tree: who sees whom.
        places: for each rollout, the position in the row of each of its tokens, int64 [tokens].
    """

    def __init__(
        self, rollouts: Sequence[Any], weights: Sequence[Any] | None = None, tokens: int | None = None
    ) -> None:
        ids = [_read_token_ids(number, rollout) for number, rollout in enumerate(rollouts)]
        if not ids:
            raise RingShapeError("tree_batch: expected at least one rollout, got none")
        nodes, self.places = _merged(ids)
        self.tree = Tree(
            tuple(parent for parent, _ in nodes), tuple(len(node_ids) for _, node_ids in nodes), tokens
        )
        length = self.tree.tokens or 0
        row, labels = np.zeros(length, dtype=np.int64), np.full(length, IGNORE, dtype=np.int64)
        row[: self.tree.starts[-1]] = np.concatenate([node_ids for _, node_ids in nodes])
        for node_ids, places in zip(ids, self.places, strict=True):
            labels[places[:-1]] = node_ids[1:]
        columns = {
            "input_ids": row, "position_ids": self.tree.depths, "shift_labels": labels,
            TREE_ENDS: find_ends(self.tree),
        }  # fmt: skip
        self.batch: dict[str, Tensor] = {name: torch.from_numpy(x)[None] for name, x in columns.items()}
        if weights is not None:
            self.batch[LOSS_WEIGHTS] = self._summed(ids, weights)[None]

    def of_rollouts(self, whole: Tensor) -> list[Tensor]:
        """Return what each rollout has of values of all tokens, a list of [tokens - 1]. Differentiable.

        Args:
            whole: [1, T] or [T], of the tokens that predict (log-probabilities, say), in the order of the
                row. Entry i of a rollout is that of its token i + 1.
        """
        if whole.numel() != self.tree.tokens:
            raise RingShapeError(
                f"of_rollouts: expected {self.tree.tokens} values, got {list(whole.shape)}; gather them"
            )
        flat = whole.flatten()
        return [flat[on_device(places[:-1], flat.device)] for places in self.places]

    def _summed(self, ids: list[IntArray], weights: Sequence[Any]) -> Tensor:
        """Return the sum of the rollouts' weights where tokens predict, float32 [T]."""
        total = torch.zeros(self.tree.tokens or 0, dtype=torch.float32, device="cpu")
        values = [torch.as_tensor(weight, dtype=torch.float32, device="cpu") for weight in weights]
        if [tuple(row.shape) for row in values] != [row.shape for row in ids]:
            raise RingShapeError.wrong(
                "tree_batch: weights", f"one for each token, {list(map(len, ids))}", values, "add the others"
            )
        for row, places in zip(values, self.places, strict=True):
            total[torch.from_numpy(places[:-1])] += row[1:]
        return total


def tree_batch(
    session: RingSession,
    rollouts: Sequence[Any],
    weights: Sequence[Any] | None = None,
    *,
    tokens: int | None = None,
) -> TreeBatch:
    """Return a batch of one row that has the common prefixes of rollouts once: see `TreeBatch`.

        tree = engine.ring.tree_batch(rollouts)
        batch = engine.ring.shard_batch(tree.batch)
        whole = engine.ring.gather(engine.ring.logprobs(engine, batch))
        loss = policy_loss(tree.of_rollouts(whole))  # a list of [tokens - 1], the same on every rank
        engine.backward(loss)

    Args:
        rollouts: token ids, integers [tokens] each; those of one sequence group are equal on its ranks.
        weights: of each rollout's tokens in the loss, [tokens] each; token 0 is predicted by none. The
            batch then has their sums by the token that predicts, "loss_weights" [1, T].
        tokens: pad the row to so many.

    Raises:
        RingShapeError: no rollout, an empty one, or other than one integer for each token.
    """
    return TreeBatch(rollouts, weights, tokens)


def _read_token_ids(number: int, rollout: Any) -> IntArray:
    ids = np.asarray(rollout.cpu() if isinstance(rollout, Tensor) else rollout)
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise RingShapeError(
            f"tree_batch: rollout {number}: expected token ids, integers [tokens], got {shown(rollout)}"
        )
    return ids.astype(np.int64)


def _merged(ids: list[IntArray]) -> tuple[list[tuple[int, IntArray]], list[IntArray]]:
    """Return the nodes, (parent, token ids) in depth-first order, and the place of each token of each list.

    See [Note: one next token for each].
    """
    # After sorting, lists with a common prefix are adjacent, the shortest first.
    order = sorted(range(len(ids)), key=lambda index: ids[index].tolist())
    lists = [ids[index] for index in order]
    shared = np.array([_count_common(a, b) for a, b in itertools.pairwise(lists)], dtype=np.int64)

    def parts(low: int, high: int, end: int) -> list[tuple[int, int]]:
        """Cut a range of lists that share `end` tokens where their next tokens differ."""
        cuts = low + 1 + np.flatnonzero(shared[low : high - 1] <= end)
        return list(itertools.pairwise([low, *cuts.tolist(), high]))

    nodes, places, tokens = list[tuple[int, IntArray]](), [np.zeros(len(x), dtype=np.int64) for x in ids], 0
    # ranges of lists, their first token that is not in a node yet, and the node above; the next one last
    waiting = [(low, high, 0, -1) for low, high in reversed(parts(0, len(lists), 0))]
    while waiting:
        low, high, first, parent = waiting.pop()
        end = int(min(len(lists[low]), *shared[low : high - 1])) if high - low > 1 else len(lists[low])
        going_on = low + sum(len(row) == end for row in lists[low:high])
        below = parts(going_on, high, end) if going_on < high else []
        last = end - 1 if len(below) > 1 else end
        if first < last:
            for index in order[low:high]:
                places[index][first:last] = np.arange(tokens, tokens + last - first)
            nodes.append((parent, lists[low][first:last]))
            parent, tokens = len(nodes) - 1, tokens + last - first
        for index in order[low:going_on]:
            places[index][last:end] = tokens  # the copy with which the first branch begins
        waiting += [(a, b, last, parent) for a, b in reversed(below)]
    return nodes, places


def _count_common(a: IntArray, b: IntArray) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def find_ends(tree: Tree) -> IntArray:
    """Return `tree_ends` [T] of a tree whose nodes are in depth-first order; see [Note: trees]."""
    ends = tree.starts[1:].copy()
    for node in range(len(ends) - 1, -1, -1):
        if tree.parents[node] >= 0:
            ends[tree.parents[node]] = max(ends[tree.parents[node]], ends[node])
    result = np.zeros(tree.tokens or 0, dtype=np.int64)
    result[: tree.starts[-1]] = np.repeat(ends, tree.lengths)
    return result


def make_tree(ends_T: IntArray) -> Tree:
    """Return the tree that `tree_ends` of a row describe; see [Note: trees].

    Raises:
        RingPatternError: subtrees that overlap without nesting.
    """
    tokens = int(np.count_nonzero(ends_T))
    starts = np.append(0, np.flatnonzero(np.diff(ends_T)) + 1)
    starts = starts[starts < tokens]
    ends = ends_T[starts].tolist()
    lengths = np.diff(starts, append=tokens)
    parents, above = list[int](), list[int]()
    for node, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        while above and ends[above[-1]] <= start:
            above.pop()
        most = ends[above[-1]] if above else tokens
        if not start + length <= ends[node] <= most:
            raise RingPatternError(
                f"batch[{TREE_ENDS!r}]: expected one past the last token that sees token {start}, from"
                f" {start + length} to {most}, got {ends[node]}; use engine.ring.tree_batch"
            )
        parents.append(above[-1] if above else -1)
        above.append(node)
    if not parents or ends_T[tokens:].any():
        raise RingPatternError.wrong(
            f"batch[{TREE_ENDS!r}]", "tokens, then padding (0)", ends_T.tolist(), "use engine.ring.tree_batch"
        )
    return Tree(tuple(parents), tuple(lengths.tolist()), len(ends_T))


def read_trees(ends_BT: Tensor) -> list[Tree]:
    """Return the tree of each row."""
    if ends_BT.ndim != 2 or ends_BT.is_floating_point() or ends_BT.dtype == torch.bool:
        raise RingShapeError.wrong(
            TREE_ENDS, "integers [samples, tokens]", f"{ends_BT.dtype} {[*ends_BT.shape]}", "use tree_batch"
        )
    return [make_tree(row) for row in ends_BT.cpu().numpy()]
