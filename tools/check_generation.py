"""Generation on a ring against one process: tokens, logits, memory of the cache, and time.

A small Llama with random weights on gloo ranks of this machine: a long prompt, then greedy tokens. Each rank
runs the model alone as well, and compares.

Example:
    python tools/check_generation.py                   # 4 Ki tokens, then 64; rings of 2 and 4; a minute
    python tools/check_generation.py --prompt 16384 --ring-sizes 4 --stage 3
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, NamedTuple

import torch
from common import engine_of, llama, parser_of, print_row

from ds_ring_launcher.run.local_ranks import run_ranks

MAX_LOGITS = 1e-4  # relative error


class GenerationRequest(NamedTuple):
    """What is generated, and where."""

    ring_size: int
    prompt: int
    tokens: int
    stage: int


def generate(model: Any, request: GenerationRequest) -> tuple[Any, int, float]:
    """What the model generates, the bytes of its cache on this rank, and the seconds that it took."""
    ids = torch.randint(1, 512, (1, request.prompt), generator=torch.Generator().manual_seed(0))
    started = time.monotonic()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.tokens, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    seconds = time.monotonic() - started
    layers = output.past_key_values.layers
    return output, sum(layer.keys.nbytes + layer.values.nbytes for layer in layers), seconds


def build(request: GenerationRequest) -> Any:
    """A Llama whose attention decides on the next token, and which never ends a text."""
    tokens = request.prompt + request.tokens
    return llama(tokens, 512, 128, 256, 4, 4, 2, initializer_range=0.15, eos_token_id=None).eval()


def on_a_rank(request: GenerationRequest) -> dict[str, Any]:
    """One rank: the model alone, then on the ring."""
    alone, alone_bytes, alone_seconds = generate(build(request), request)
    engine = engine_of(build(request), request.ring_size, {}, {"stage": request.stage}, sgd=0.0)
    engine.eval()
    ring, ring_bytes, ring_seconds = generate(engine, request)
    logits = [torch.stack(output.logits) for output in (ring, alone)]
    return {
        "equal_tokens": int((ring.sequences == alone.sequences).all(0).sum()) - request.prompt,
        "different_tokens_generated": len(set(ring.sequences[0, request.prompt :].tolist())),
        "logits_off": float((logits[0] - logits[1]).abs().max() / logits[1].abs().max()),
        "cache_bytes": ring_bytes,
        "cache_share": round(ring_bytes / alone_bytes, 4),
        "seconds": round(ring_seconds, 1),
        "seconds_alone": round(alone_seconds, 1),
    }


def faults(ranks: list[dict[str, Any]], request: GenerationRequest) -> list[str]:
    """What is wrong with what the ranks found; tokens alone would be equal without a ring, too."""
    wrong = []
    for one in ranks:
        if one["equal_tokens"] != request.tokens:
            wrong.append(f"{one['equal_tokens']} of {request.tokens} tokens are those of one process")
        if not one["logits_off"] <= MAX_LOGITS:
            wrong.append(f"logits are off by {one['logits_off']:.1e}, expected at most {MAX_LOGITS:.0e}")
        if not one["cache_share"] < (1 + 1 / request.ring_size) / 2:  # short caches have room to spare
            wrong.append(f"a rank holds {one['cache_share']} of the cache: it is not sharded")
        if one["different_tokens_generated"] < 2 <= request.tokens:
            wrong.append("one token again and again, which proves nothing")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """One row a ring size; exit status 1 if a token or a logit differs, or the cache is not sharded."""
    parser = parser_of(
        __doc__, prompt=4096, tokens=(64, "tokens to generate"), ring_sizes=[2, 4], stage=(0, "of ZeRO")
    )
    options = parser.parse_args(arguments)
    os.environ["DS_ACCELERATOR"] = "cpu"
    wrong = 0
    for ring_size in options.ring_sizes:
        request = GenerationRequest(ring_size, options.prompt, options.tokens, options.stage)
        found = run_ranks(on_a_rank, ring_size, (request,), threads=1, deadline_s=600.0)
        row = {key: max(one[key] for one in found) for key in found[0]}
        row["equal_tokens"] = min(one["equal_tokens"] for one in found)
        row |= {"wrong": (told := faults(found, request))}
        wrong += len(told)
        print_row({"ring_size": ring_size, "of_tokens": options.tokens} | row)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
