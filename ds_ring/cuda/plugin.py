"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.cuda.merge import launch
from ds_ring.cuda.patience import patience_s
from ds_ring.cuda.streams import CudaStreams
from ds_ring.cuda.warm_up import warm_up
from ds_ring.cuda.watchdog import WorkWatchdog
from ds_ring.plugin import DeviceRow, Plugin

PLUGIN = Plugin(
    order=10,
    devices={
        "cuda": DeviceRow(
            streams=CudaStreams, watchdog=WorkWatchdog, merge=launch, patience=patience_s, warm_up=warm_up
        )
    },
)
