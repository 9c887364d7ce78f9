"""Real text of every machine: the sources of Python's standard library, as packed byte tokens.

Every file is a document; a token is a byte, and one more token ends each document. Documents are packed one
after another and cut into samples of equal length; the attention pattern decides whether they see each other.
The same interpreter gives the same data on every rank and host.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

END_OF_DOCUMENT = 256
VOCABULARY = 257
HELD_OUT_EVERY = 20  # every 20th document is never trained on
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def source_files() -> list[Path]:
    """Return the standard library's Python files without its own tests, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))


class PackedBytes(Dataset[dict[str, Tensor]]):
    """Hold samples of `tokens` bytes, cut from packed documents.

    Args:
        tokens: length of a sample.
        held_out: the documents kept for evaluation instead of those to train on.
        seed: order of the documents.
        document_ids: add the document of each token to every sample ("documents": true in the JSON).
    """

    def __init__(
        self, tokens: int, *, held_out: bool = False, seed: int = 0, document_ids: bool = False
    ) -> None:
        last = HELD_OUT_EVERY - 1
        files = [path for i, path in enumerate(source_files()) if (i % HELD_OUT_EVERY == last) == held_out]
        random.Random(seed).shuffle(files)
        documents = [np.array([*path.read_bytes(), END_OF_DOCUMENT], dtype=np.uint16) for path in files]
        self.tokens, self.document_ids = tokens, document_ids
        self.stream = np.concatenate(documents)
        self.ends = np.cumsum([len(document) for document in documents])
        if len(self) == 0:
            raise ValueError(f"expected samples of at most {len(self.stream)} tokens, got {tokens}")

    def __len__(self) -> int:
        return len(self.stream) // self.tokens

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        places = np.arange(index * self.tokens, (index + 1) * self.tokens)
        ids_T = torch.from_numpy(self.stream[places].astype(np.int64))
        sample = {"input_ids": ids_T, "labels": ids_T}
        if self.document_ids:
            sample["document_ids"] = torch.from_numpy(np.searchsorted(self.ends, places, side="right"))
        return sample
