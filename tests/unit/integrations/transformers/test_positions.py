"""Models that number tokens by their ids: with documents in a row, each as transformers numbers it alone."""

from __future__ import annotations

import torch
from transformers import RobertaConfig, RobertaModel

from ds_ring.integrations.deepspeed.packing import DOCUMENT_IDS
from ds_ring.integrations.transformers.positions import numbering_of

PADDING = 1


def test_padding_in_packed_documents_has_the_number_of_padding() -> None:
    """Behind the documents, and between them: what no document holds has the padding's row of the table."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = RobertaModel(RobertaConfig(vocab_size=32, pad_token_id=PADDING, **sizes))
    numbered, alone = numbering_of(model), model.embeddings.create_position_ids_from_input_ids
    assert numbered is not None
    gap = torch.full((1, 2), PADDING)
    parts = [x for length in (4, 1, 7) for x in (torch.arange(5, 5 + length)[None], gap)]
    row, want = torch.cat(parts, dim=1), torch.cat([alone(x, PADDING) for x in parts], dim=1)
    places = torch.cat([torch.arange(x.shape[1])[None] for x in parts], dim=1)
    ids = torch.repeat_interleave(torch.tensor([0, -1, 1, -1, 2, -1]), torch.tensor([4, 2, 1, 2, 7, 2]))
    found = numbered({"input_ids": row, "position_ids": places, DOCUMENT_IDS: ids[None]})
    assert found.tolist() == want.tolist() and (found[row == PADDING] == PADDING).all()
    plain = torch.cat([row[:, :4], gap], dim=1)
    assert numbered({"input_ids": plain}).tolist() == alone(plain, PADDING).tolist()
