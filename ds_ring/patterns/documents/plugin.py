"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.patterns.documents.document_zigzag import make_document_zigzag
from ds_ring.patterns.documents.shared import whole_and_shared
from ds_ring.plugin import LayoutRow, Plugin

PLUGIN = Plugin(
    order=30,
    layouts={"document_zigzag": LayoutRow(home=make_document_zigzag, for_labels=whole_and_shared)},
)
