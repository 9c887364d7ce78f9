"""Masks of block diffusion and of drafters, pair by pair, from the papers. Shares no code with ds_ring.

BD3-LM: `block_diff_mask` of kuleshov-group/bd3lms. EAGLE-3: the training-time test of SpecForge's
drafters, in which step i at token t reads the trunk up to t and the keys of steps 1 .. i at t. DFlash:
`dflash_mask` of NeMo Automodel.
"""

from __future__ import annotations

import numpy as np


def block_diffusion(
    block: int, tokens: int, ids: np.ndarray | None = None, window: int | None = None, *,
    causal: bool = False, corrupted_first: bool = False, padding: int = 0,
) -> np.ndarray:  # fmt: skip
    """M_BD + M_OBC + M_BC: a block itself, corrupted to earlier clean blocks, clean to clean blocks."""
    ids = np.zeros(tokens, dtype=int) if ids is None else ids
    begin = {int(one): int(np.flatnonzero(ids == one)[0]) for one in ids}
    seen = np.zeros((2 * tokens + padding,) * 2, dtype=bool)
    for q in range(2 * tokens):
        x_q, t_q = (q < tokens) == corrupted_first, q % tokens
        start = begin[int(ids[t_q])]
        b_q = (t_q - start) // block
        for k in range(2 * tokens):
            x_k, t_k = (k < tokens) == corrupted_first, k % tokens
            if ids[t_q] != ids[t_k] or ids[t_q] < 0:
                continue
            b_k = (t_k - start) // block
            near = window is None or t_k > start + b_q * block - window
            diagonal = x_q and x_k and b_q == b_k
            offset = x_q and not x_k and b_q > b_k and near
            clean = not x_q and not x_k and b_q >= b_k and near
            if causal:
                clean = not x_q and not x_k and t_k <= t_q and (window is None or t_q - t_k < window)
            seen[q, k] = diagonal or offset or clean
    return seen


def eagle(trunk: int, draft: int, ids: np.ndarray | None = None) -> np.ndarray:
    ids = np.zeros(trunk, dtype=int) if ids is None else ids
    seen = np.zeros((trunk * (1 + draft),) * 2, dtype=bool)
    for q in range(len(seen)):
        (i, t) = divmod(q, trunk)
        for k in range(len(seen)):
            (j, s) = divmod(k, trunk)
            same = ids[t] == ids[s] and ids[t] >= 0
            seen[q, k] = same and (s <= t if j == 0 else s == t and 1 <= j <= i)
    return seen


def dflash(
    trunk: int, draft: int, anchors: tuple[int, ...], ids: np.ndarray | None = None, causal: bool = False
) -> np.ndarray:
    ids = np.zeros(trunk, dtype=int) if ids is None else ids
    seen = np.zeros((trunk + draft * len(anchors),) * 2, dtype=bool)
    for q in range(len(seen)):
        for k in range(len(seen)):
            if q < trunk:
                seen[q, k] = k <= q and ids[q] == ids[k] and ids[q] >= 0
                continue
            (b, i) = divmod(q - trunk, draft)
            anchor = anchors[b]
            if anchor < 0 or ids[anchor] < 0:
                continue
            if k < trunk:
                seen[q, k] = k < anchor and ids[k] == ids[anchor]
            else:
                (c, j) = divmod(k - trunk, draft)
                seen[q, k] = b == c and (j <= i or not causal)
    return seen
