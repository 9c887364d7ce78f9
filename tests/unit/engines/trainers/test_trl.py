"""What TRL's distillation gets of a forward pass: an output that ZeRO's hooks read by attributes."""

from __future__ import annotations

import pytest
import torch

from ds_ring.engines.trainers import trl


def test_an_output_of_local_tokens_has_what_was_found_and_nothing_else() -> None:
    found = torch.ones(2)
    output = trl._Output({trl._FOUND: found})
    assert output.found is found
    with pytest.raises(AttributeError, match="last_hidden_state"):
        output.last_hidden_state  # noqa: B018
