"""Partial results to merge, and what the merge of each must be, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.kernels.interface import Rows

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
        return self.rows.select(out), self.rows.select(lse)


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
                shape = rows.select(out).shape
                part_out, part_lse = random(*shape).to(dtype), rows.select(lse) + _gaps(shape[:-1])
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
        case.rows.select(old).copy_(case.rows.select(x))
        if not torch.equal(x, old):
            found.append("slots that are not of these rows")
    return [f"{case.name}: {what}" for what in found]


def into_accumulator(launch: Callable[..., None]) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """The merge of a part into an accumulator, which is the first part and the result."""
    return lambda out, lse, part, of: launch(out, lse, [(out, lse), (part, of)])


def wrong_parts(case: Case, launch: Callable[..., None]) -> list[str]:
    """Merge and add one to five parts of a case, into 16 bits, too; what came out otherwise, in words."""
    found = []
    accumulator, part = case.views, (case.part_out, case.part_lse)
    shifted = (-case.part_out.roll(1, -1), case.part_lse.roll(1, -1))
    empty = (torch.zeros_like(case.part_out), torch.full_like(case.part_lse, -INF))
    shifted[0].masked_fill_((shifted[1] == -INF).unsqueeze(-1), 0)
    for parts in ([part], [part, empty], [empty, part, shifted], [accumulator, part, empty, shifted, part]):
        lse = torch.stack([of.double() for _, of in parts]).logsumexp(0)
        base = lse.clamp_min(-1e300)
        want = sum(x.double() * (of.double() - base).exp().unsqueeze(-1) for x, of in parts)
        total = sum(x.double() for x, _ in parts)
        # Triton's interpreter cuts bfloat16 off, a GPU rounds it.
        for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7)):
            out = lse.new_full(want.shape, float("nan"), dtype=dtype)  # type: ignore[union-attr]
            added, got_lse = out.clone(), lse.new_full(lse.shape, float("nan"), dtype=torch.float32)
            launch(out, got_lse, parts)
            launch(added, None, [(x, None) for x, _ in parts])
            for name, got, due in (("out", out, want), ("sum", added, total)):
                gap = (got.double() - due).abs() - bound * (1 + due.abs())  # type: ignore[union-attr]
                if not bool((gap <= 0).all()):
                    found.append(f"{case.name}: {name} of {len(parts)} in {dtype} by {float(gap.max()):.1e}")
            if not torch.allclose(got_lse.double(), lse, rtol=1.2e-7, atol=5e-7):
                found.append(f"{case.name}: lse of {len(parts)}")
    return found
