"""Which columns of a data set Trainer keeps for the ring."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import Trainer

from ds_ring.engines.trainers.transformers import _with_documents
from ds_ring.patches import applied

IDS = [[1, 2, 3, 4]]
DATA = Dataset.from_dict({"input_ids": IDS, "labels": IDS, "document_ids": [[0, 0, 1, 1]], "other": [[1]]})


class Model(torch.nn.Module):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return input_ids


def trainer_of(section: dict[str, Any] | None) -> Trainer:
    made: Any = Trainer.__new__(Trainer)
    json = {"sequence_parallel_size": 2} | ({} if section is None else {"ring_attention": section})
    config = SimpleNamespace(config=json)
    made.args = SimpleNamespace(remove_unused_columns=True, hf_deepspeed_config=config)
    made.model, made.label_names, made._signature_columns = Model(), ["labels"], None
    return made


@pytest.mark.parametrize(
    ("section", "kept"),
    [({"pattern": {"documents": True}}, True), ({"pattern": {"causal": True}}, False), (None, False)],
)
def test_documents_are_kept_if_the_pattern_has_them(section: dict[str, Any] | None, kept: bool) -> None:
    trainer = trainer_of(section)
    with applied(_with_documents):
        columns = trainer._remove_unused_columns(DATA).column_names
        collate: Any = trainer._get_collator_with_removed_columns(lambda samples: samples)
        (sample,) = collate([DATA[0]])
    expected = {"input_ids", "labels"} | ({"document_ids"} if kept else set())
    assert set(columns) == expected == set(sample)
    assert set(trainer_of(section)._remove_unused_columns(DATA).column_names) == {"input_ids", "labels"}
