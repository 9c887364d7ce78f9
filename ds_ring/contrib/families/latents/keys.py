"""The key "latents" of the section."""

from __future__ import annotations

from pydantic import Field

from ds_ring.config.messages import Section, Switch


class LatentKeys(Section):
    """Say what multi-head latent attention sends around the ring."""

    latents: Switch = Field(
        default="auto",
        description="multi-head latent attention (DeepSeek, Kimi) sends latents in place of K/V",
    )
