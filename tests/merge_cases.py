"""Partial results to merge, and what the merge of each must be, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.runtime.kernels.interface import Rows

INF = float("inf")
GAPS = (0.0, 1.0, -1.0, 88.0, 89.0, -89.0, 1000.0, -1000.0, INF, -INF)
SLOTS = 24
VIEWS: dict[str, Rows] = {
    "dense": Rows(0, 1, SLOTS),
    "a part of the slots": Rows(5, 1, 7),
    "every third slot": Rows(1, 3, 8),
    "repeated": Rows(2, 1, 3, 4, 5),
}


class Case(NamedTuple):
    """An accumulator, whose rows are views, and a part of their shape."""

    name: str
    whole: tuple[Tensor, Tensor]
    rows: Rows
    part_out: Tensor
    part_lse: Tensor

    def on(self, device: str) -> Case:
        """The same on a device."""
        out, lse = self.whole
        whole = (out.to(device), lse.to(device))
        return Case(self.name, whole, self.rows, self.part_out.to(device), self.part_lse.to(device))

    @property
    def views(self) -> tuple[Tensor, Tensor]:
        out, lse = self.whole
        return self.rows.of(out), self.rows.of(lse)


def cases(head_dims: tuple[int, ...] = (64, 80, 5)) -> Iterator[Case]:
    """Every gap and empty rows on both sides, in views with gaps and of all part dtypes."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for head_dim in head_dims:
        for name, rows in VIEWS.items():
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                # Some of the heads of a larger tensor, tokens before heads, as FlashAttention has them.
                out = random(2, SLOTS, 6, head_dim).transpose(1, 2)[:, 1::2]
                lse = random(2, 6, SLOTS)[:, 1::2] * 3
                shape = rows.of(out).shape
                part_out, part_lse = random(*shape).to(dtype), rows.of(lse) + _gaps(shape[:-1])
                empty = torch.rand(lse.shape, generator=generator) < 0.3
                lse.masked_fill_(empty, -INF)
                out.masked_fill_(empty.unsqueeze(-1), 0)
                part_out.masked_fill_((part_lse == -INF).unsqueeze(-1), 0)
                part_lse = torch.where(part_lse == INF, random(*shape[:-1]), part_lse)
                yield Case(f"{name}, {dtype}, {head_dim}", (out, lse), rows, part_out, part_lse)


def _gaps(shape: torch.Size) -> Tensor:
    """All gaps, one after the other; infinity stands for an accumulator that is empty in the end."""
    return torch.tensor(GAPS).repeat(-(-shape.numel() // len(GAPS)))[: shape.numel()].view(shape)


def wrong(case: Case, merge: Callable[[Tensor, Tensor, Tensor, Tensor], None]) -> list[str]:
    """Merge a case; what came out otherwise than it should, in words."""
    out, lse = (x.double() for x in case.views)
    part_out, part_lse = case.part_out.double(), case.part_lse.double()
    want_lse = torch.logaddexp(lse, part_lse)
    finite = want_lse.clamp_min(-1e300)
    want = out * (lse - finite).exp().unsqueeze(-1) + part_out * (part_lse - finite).exp().unsqueeze(-1)
    before = [x.clone() for x in case.whole]
    merge(*case.views, case.part_out, case.part_lse)
    got, got_lse = (x.double() for x in case.views)
    found, seen = [], want_lse.isfinite()
    if not torch.equal(got_lse.isfinite(), seen) or not got_lse[~seen].eq(-INF).all():
        found.append("lse of rows that saw no key")
    if not got[~seen].eq(0).all():
        found.append("out of rows that saw no key")
    if float((got - want).abs().max()) > 1e-6 or not got.isfinite().all():
        found.append(f"out by {float((got - want).abs().max()):.1e}")
    # The lse is up to 1000, so its rounding is relative.
    if not torch.allclose(got_lse[seen], want_lse[seen], rtol=1.2e-7, atol=3e-7):
        found.append(f"lse by {float((got_lse - want_lse)[seen].abs().max()):.1e}")
    for x, old in zip(case.whole, before, strict=True):
        case.rows.of(old).copy_(case.rows.of(x))
        if not torch.equal(x, old):
            found.append("slots that are not of these rows")
    return [f"{case.name}: {what}" for what in found]
