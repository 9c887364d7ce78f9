"""Generate q, k and v from a seed and a position, so that nothing has to be stored.

The generator is splitmix64 (Steele, Lea, Flood 2014) used by counter: word w of a stream is the finaliser of
key + (w + 1) * GAMMA, so the value of a position does not depend on the order of reads or on the sharding.
One word is eight values. The only state is scratch memory that fits into a processor's second cache.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.masks.slots import IntArray
from ds_ring.ops.checks import DTYPES, check_heads
from ds_ring.schedule.layout import expand_runs
from ds_ring.simulation.rank import GlobalSizes

GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: the step of splitmix64's counter
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
WORD_VALUES = 8
SCRATCH_WORDS = 1 << 13  # 64 KiB for the words and as much for the shifted words
ONE = 64  # a byte over this is a value: -2 to 2 in steps of 1 / 64, exact in every dtype


class GeneratedSource:
    """Generate q, k, v and grad_out of any length at the positions that are read.

    A value is a signed byte over 64 (so between -2 and 2, standard deviation 1.15): the same bits in float64,
    float32, bfloat16 and float16. The byte is number d mod 8 (little-endian) of the word
    position * ceil(D / 8) + d // 8 of the stream of (seed, name, batch entry, head).

    Args:
        tokens: T.
        heads: H.
        kv_heads: G; None is H.
        head_dim: D.
        batch: B.
        dtype: of the generated tensors.
        seed: 0 to 2^64 - 1.
        v_head_dim: E of values and outputs; None is D.

    Raises:
        RingShapeError: sizes that are not positive integers, H not a multiple of G, no floating dtype.
        RingConfigError: no such seed.
    """

    def __init__(
        self,
        tokens: int,
        heads: int = 1,
        kv_heads: int | None = None,
        head_dim: int = 64,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        v_head_dim: int | None = None,
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "batch": batch}
        sizes["v_head_dim"] = v_head_dim
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise RingShapeError(f"GeneratedSource: {name}: expected a positive integer, got {size!r}")
        if max(head_dim, v_head_dim) > SCRATCH_WORDS * WORD_VALUES:
            most = SCRATCH_WORDS * WORD_VALUES
            raise RingShapeError(f"head_dim: expected at most {most}, got {max(head_dim, v_head_dim)}")
        if dtype not in DTYPES:
            raise RingShapeError(f"GeneratedSource: dtype: expected one of {DTYPES}, got {dtype!r}")
        if not isinstance(seed, int) or not 0 <= seed <= MASK:
            raise RingConfigError(f"GeneratedSource: seed: expected 0 to 2^64 - 1, got {seed!r}")
        check_heads(heads, kv_heads, 1)
        self.geometry = GlobalSizes(batch, heads, kv_heads, tokens, head_dim, dtype, v_head_dim)
        self.seed = seed
        self._words = np.empty(SCRATCH_WORDS, dtype=np.uint64)
        self._shifted = np.empty(SCRATCH_WORDS, dtype=np.uint64)
        self._ramp = np.arange(SCRATCH_WORDS, dtype=np.uint64) * np.uint64(GAMMA)

    def fill(self, name: str, heads: slice, runs: IntArray, out: Tensor) -> None:
        """Write generated tokens into `out`; any other `name` is a stream of its own."""
        all_heads = self.geometry.heads(name)
        numbers = range(*heads.indices(all_heads))
        for batch, (place, head) in itertools.product(range(out.shape[0]), enumerate(numbers)):
            key = _stream_key(self.seed, name, batch * all_heads + head)
            self._fill_stream(key, runs, out[batch, place])

    def _fill_stream(self, key: int, runs: IntArray, out: Tensor) -> None:
        """Fill one head of one batch entry: out [n, D]."""
        width = -(-out.shape[1] // WORD_VALUES)
        # As many rows as the scratch memory holds: it stays in the processor's cache.
        rows = max(SCRATCH_WORDS // width, 1)
        offset = 0
        one_by_one = len(runs) <= 16 or int(runs[:, 2].mean()) >= 256  # many short runs are faster by index
        for start, step, length in runs.tolist() if one_by_one else []:
            if step != 1:
                # Words of strided tokens do not follow each other: they have no ramp.
                positions = start + step * np.arange(length)
                self._scattered(key, positions, out[offset : offset + length], width, rows)
            else:
                for first in range(0, length, rows):
                    count = min(rows, length - first)
                    words, word = count * width, (start + first) * width
                    base = (key + (word + 1) * GAMMA) & MASK
                    np.add(self._ramp[:words], np.uint64(base), out=self._words[:words])
                    self._finish(words, out[offset + first : offset + first + count])
            offset += length
        if not offset:
            self._scattered(key, expand_runs(runs), out, width, rows)

    def _scattered(self, key: int, positions: IntArray, out: Tensor, width: int, rows: int) -> None:
        for first in range(0, len(positions), rows):
            part = positions[first : first + rows]
            words = len(part) * width
            number = part[:, None] * width + np.arange(1, width + 1)
            np.multiply(number.astype(np.uint64).reshape(-1), np.uint64(GAMMA), out=self._words[:words])
            self._words[:words] += np.uint64(key)
            self._finish(words, out[first : first + rows])

    def _finish(self, words: int, out: Tensor) -> None:
        """Apply splitmix64's finaliser to the first words in place; write their bytes to out."""
        z, shifted = self._words[:words], self._shifted[:words]
        for shift, factor in ((30, MIX_1), (27, MIX_2)):
            np.right_shift(z, np.uint64(shift), out=shifted)
            np.bitwise_xor(z, shifted, out=z)
            np.multiply(z, np.uint64(factor), out=z)
        np.right_shift(z, np.uint64(31), out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        values = torch.from_numpy(z.view(np.int8)).view(len(out), -1)
        out.copy_(values[:, : out.shape[1]]).mul_(1 / ONE)


def _stream_key(seed: int, name: str, number: int) -> int:
    """Return where a stream begins on the counter: far from every other one, in all likelihood."""
    key = _mixed((seed + GAMMA) & MASK)
    for letter in name.encode():
        key = _mixed((key ^ letter) + GAMMA & MASK)
    return _mixed((key + (number + 1) * GAMMA) & MASK)


def _mixed(z: int) -> int:
    """Apply splitmix64's finaliser to one word."""
    z = (z ^ z >> 30) * MIX_1 & MASK
    z = (z ^ z >> 27) * MIX_2 & MASK
    return z ^ z >> 31
