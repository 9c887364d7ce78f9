"""The key "verify_first_batch" of the section."""

from __future__ import annotations

from pydantic import Field

from ds_ring.config.messages import Flag, Section


class FirstBatchKeys(Section):
    """Say whether the first step is compared with one process."""

    verify_first_batch: Flag = Field(
        default=False,
        description="compare the first step with one process: logits, loss, every gradient",
    )
