"""Models that number tokens by their ids: with documents in a row, each as transformers numbers it alone."""

from __future__ import annotations

import pytest
import torch
from transformers import RobertaConfig, RobertaModel

from ds_ring.data.packing import DOCUMENT_IDS
from ds_ring.models.positions import find_numbering

PADDING = 1
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
MODEL = RobertaModel(RobertaConfig(vocab_size=32, pad_token_id=PADDING, **SIZES))


def test_padding_in_packed_documents_has_the_number_of_padding() -> None:
    """Behind the documents, and between them: what no document holds has the padding's row of the table."""
    numbered, alone = find_numbering(MODEL), MODEL.embeddings.create_position_ids_from_input_ids
    gap = torch.full((1, 2), PADDING)
    parts = [x for length in (4, 1, 7) for x in (torch.arange(5, 5 + length)[None], gap)]
    row, want = torch.cat(parts, dim=1), torch.cat([alone(x, PADDING) for x in parts], dim=1)
    places = torch.cat([torch.arange(x.shape[1])[None] for x in parts], dim=1)
    ids = torch.repeat_interleave(torch.tensor([0, -1, 1, -1, 2, -1]), torch.tensor([4, 2, 1, 2, 7, 2]))
    found = numbered({"input_ids": row, "position_ids": places, DOCUMENT_IDS: ids[None]})
    assert found.tolist() == want.tolist() and (found[row == PADDING] == PADDING).all()
    plain = torch.cat([row[:, :4], gap], dim=1)
    assert numbered({"input_ids": plain}).tolist() == alone(plain, PADDING).tolist()


@pytest.mark.situation("inputs", "packed rows of a RoBERTa decoder with padding tokens inside documents")
@pytest.mark.parametrize("kind", ["documents", "trees"])
def test_padding_tokens_inside_a_document_are_not_counted(kind: str) -> None:
    numbered, alone = find_numbering(MODEL), MODEL.embeddings.create_position_ids_from_input_ids
    documents = [[7, PADDING, 9, 4], [5], [6, 8, PADDING, PADDING, 3]]
    if kind == "trees":  # two branches behind the first document's tokens
        trees = pytest.importorskip("ds_ring.contrib.policies.trees")
        tree = trees.TreeBatch([documents[0] + branch for branch in ([5], [PADDING, 6, 8, PADDING, 3])])
        found = numbered(tree.batch)[0]
        for branch, places in zip(([5], [PADDING, 6, 8, PADDING, 3]), tree.places, strict=True):
            want = alone(torch.tensor([documents[0] + branch]), PADDING)[0]
            assert found[torch.as_tensor(places)].tolist() == want.tolist()
        return
    row = torch.tensor([[token for one in documents for token in one]])
    lengths = torch.tensor([*map(len, documents)])
    batch = {
        "input_ids": row,
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        DOCUMENT_IDS: torch.repeat_interleave(torch.arange(3), lengths)[None],
    }
    want = torch.cat([alone(torch.tensor([one]), PADDING) for one in documents], dim=1)
    assert numbered(batch).tolist() == want.tolist()


def test_rows_of_embeddings_are_counted_from_behind_the_number_of_padding() -> None:
    """Without ids no token is padding: transformers counts all of them."""
    numbered, embeds = find_numbering(MODEL), torch.zeros(1, 6, 8)
    want = MODEL.embeddings.create_position_ids_from_inputs_embeds(embeds, PADDING)
    assert (
        numbered({"inputs_embeds": embeds, "position_ids": torch.arange(6)[None]}).tolist() == want.tolist()
    )
