"""Count the reads and writes of a ring pass on a GPU without its attention kernels. Needs no GPU.

The production pass of one rank runs on fake CUDA tensors with the kernel "flash": nothing is computed, and
every operator is recorded with the bytes of its operands and results. Merges and sums of parts count as what
they are on a GPU: one kernel that reads every part once and writes the result once (`cuda/merge.py`).
Attention operators and views count nothing. The modelled share is attention / (attention + own traffic), at
assumed rates; transfers, launches and the host are left out. `copies` are all copies of a pass, `packing`
those of them that put tokens of a message side by side.

Example:
    python -m tools.pass_traffic --local-tokens 8192 32768 --ring-size 8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ring import Causal, build_plan, make_layout
from ds_ring.comm.messages import Counters, InFlight, check_messages
from ds_ring.comm.streams import HOST, Streams
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.ring import accumulator as parts
from ds_ring.ring import buffers
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule.lowering import CHUNK_BYTES_GPU, stage_shards
from ds_ring.schedule.steps import Send
from tests.fake_cuda import cuda_guard, fake_tensors

BYTES_PER_S = 2.85e12  # of an H100's memory, as triad measures it
FLOPS_PER_S = {"FA2": (370e12, 300e12), "FA3": (640e12, 550e12)}  # forward and backward, D 128, bf16
ELEMENT_BYTES = 2
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "detach")
COPIES = ("copy_", "clone", "_to_copy", "index_select", "cat")


class NoExchange:
    """Messages that arrive at once."""

    def __init__(self) -> None:
        self.counters = Counters()

    def route(self, sends: Any, receives: Any) -> None:
        """Check the messages as the real exchange does."""
        check_messages(sends)
        check_messages(receives)

    def start(self, *_: Any) -> InFlight:
        """Return what `wait` of arrives."""
        return self

    def wait(self) -> None:
        """Return."""

    def streams(self, tensor: Tensor) -> Streams:
        """Return none to order."""
        return HOST


class OwnTraffic(TorchDispatchMode):
    """Bytes of operators, and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.copies = self.packing = 0
        self._is_packing = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0]
        # prim: what a tensor's device is, say
        if function.is_view or function.namespace != "aten" or name in FREE or "attention" in name:
            return result
        self.copies += name in COPIES
        self.packing += name in COPIES and self._is_packing
        # What is only written is not read.
        read = args[1:] if name in ("copy_", "zero_", "fill_") else args
        self.bytes += sum(x.nbytes for x in (*read, result) if isinstance(x, Tensor))
        return result

    @contextmanager
    def counting(self) -> Iterator[OwnTraffic]:
        """Count inside the block; merges count as one kernel each."""

        def merge_parts(out: Tensor, lse: Tensor, given: Any) -> None:
            self.bytes += sum(x.nbytes for part in given for x in part) + out.nbytes + lse.nbytes

        def add_parts(total: Tensor, given: Any) -> None:
            self.bytes += sum(x.nbytes for x in given) + total.nbytes

        def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
            merge_parts(out, lse, [(out, lse), (part, part_lse)])

        def move(target: Any, source: Any, step: Any, tables: Any, **how: Any) -> None:
            self._is_packing = isinstance(step, Send) or not how.get("add")
            real(target, source, step, tables, **how)
            self._is_packing = False

        real = buffers._move
        with ExitStack() as stack:
            kernels = {"merge_parts_": merge_parts, "add_parts_": add_parts, "merge_": merge}
            for name, counted in kernels.items():
                stack.enter_context(mock.patch.object(parts, name, counted))
            stack.enter_context(mock.patch.object(buffers, "_move", move))
            yield stack.enter_context(self)


def traffic_of(ring_rank: int, options: Any, local_tokens: int) -> tuple[OwnTraffic, OwnTraffic, int]:
    """Return the traffic of a rank's forward and backward pass, causal zigzag, and its attended pairs."""
    size, heads, kv_heads, width = options.ring_size, options.heads, options.kv_heads, options.head_dim
    layout = make_layout("zigzag", tokens=local_tokens * size, ring_size=size)
    shard_bytes = 2 * local_tokens * kv_heads * width * ELEMENT_BYTES
    most = stage_shards(options.stage_bytes, "cuda", size, size, shard_bytes)  # all ranks in one node
    plan = build_plan(Causal(), layout, query_heads=heads, kv_heads=kv_heads, stage_shards=most).rank(
        ring_rank
    )
    forward, backward = OwnTraffic(), OwnTraffic()
    with cuda_guard(), fake_tensors():
        made = RingPass(plan, FlashKernel(), NoExchange(), width**-0.5, chunk_bytes=CHUNK_BYTES_GPU)
        # Tokens before heads, as a model's projections write them.
        shapes = [(1, local_tokens, count, width) for count in (heads, kv_heads, kv_heads, heads)]
        q, k, v, grad = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for shape in shapes
        )
        with forward.counting():
            out, lse = made.forward(q, k, v)
        with backward.counting():
            made.backward(grad, q, k, v, out, lse)
    return forward, backward, plan.pairs


def main(arguments: list[str] | None = None) -> int:
    """Print the traffic of the first and the last rank, forward and backward."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local-tokens", type=int, nargs="+", default=[8192], help="tokens of a rank")
    for name, usual in (("ring-size", 8), ("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--all-ranks", action="store_true", help="not only the first, middle and last one")
    parser.add_argument(
        "--stage-bytes", type=lambda x: x if x == "auto" else int(x), default="auto",
        help="of K and V of a stage, as in the JSON; 0: hop by hop",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    for local_tokens in options.local_tokens:
        some = {0, options.ring_size // 2, options.ring_size - 1}
        for rank in range(options.ring_size) if options.all_ranks else sorted(some):
            *both, pairs = traffic_of(rank, options, local_tokens)
            for which, (name, found) in enumerate(zip(("forward", "backward"), both, strict=True)):
                row: dict[str, Any] = {"local_tokens": local_tokens, "rank": rank, "pass": name}
                elements = local_tokens * options.heads * options.head_dim
                row |= {"copies": found.copies, "packing": found.packing}
                row |= {"bytes_an_element": round(found.bytes / elements, 1)}
                flops = (4, 10)[which] * pairs * options.head_dim
                for kernel, rates in FLOPS_PER_S.items():
                    attention_s, own_s = flops / rates[which], found.bytes / BYTES_PER_S
                    row[f"own_percent_of_{kernel}"] = round(100 * own_s / attention_s, 1)
                    row[f"share_of_{kernel}"] = round(attention_s / (attention_s + own_s), 3)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
