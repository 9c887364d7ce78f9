"""Compare a transformers model on a ring with itself on one process: `ds-ring check-model`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from typing import Any

from ds_ring.plugin import SESSION_METHODS

from .parsers import (
    Commands,
    add_command,
    add_json,
    read_tokens,
    refuse_extra,
    require_deadline,
    require_packages,
    require_sizes,
)

_HELP = "compare a few layers of a transformers model on a ring with one process"
_DESCRIPTION = (
    "Make a small model of a transformers configuration (at least one layer of each type, random "
    "weights; nothing is downloaded), run it on one process and on ranks of this machine through "
    "ds_ring.initialize, and compare logits, loss and every gradient by itself."
)
_EXAMPLE = """\
examples:
  ds-ring check-model llama                                 a model type of transformers
  ds-ring check-model my-model/config.json                  what save_pretrained wrote; weights are not read
  ds-ring check-model mistral --config ds_config.json       with the section of a DeepSpeed JSON
  ds-ring check-model gemma2 --batch packed                 with "documents": true
  ds-ring check-model qwen3 --head token-classification --ring-size 4 --tokens 90 --json
  ds-ring check-model --all --jobs 2                        the model types of transformers, in four groups
  ds-ring check-model --all --head image-text --json        one group; a line of JSON for each type

prints exact, refused (with the reason) or WRONG (with the layer and the parameters that differ), and with
--all a row for each model type, "no model" among them where no small model can be made of its defaults;
exit status 0 for exact and refused, 1 for WRONG, 2 for wrong input
"""
_HEADS = (
    "causal-lm", "masked-lm", "seq2seq-lm", "speech-seq2seq-lm", "image-text", "sequence-classification",
    "token-classification", "base",
)  # fmt: skip
_GROUPS = ("causal-lm", "image-text", "masked-lm", "seq2seq-lm")  # of --all
_FORMS = ("plain", "padded", "packed", *(["tree"] if "tree_batch" in SESSION_METHODS else []))
_RESULTS = {"exact": "exact", "refused": "refused", "invalid": "no model", "WRONG": "WRONG"}
_SHOWN = 12


def add(commands: Commands) -> None:
    """Add the command."""
    check = add_command(commands, "check-model", run, _HELP, _DESCRIPTION, _EXAMPLE)
    check.add_argument(
        "model", metavar="CONFIG|NAME", nargs="?", help="a config.json, its folder, or a model type: llama"
    )
    check.add_argument(
        "--all",
        action="store_true",
        help="each model type of transformers with that head; without --head: " + ", ".join(_GROUPS),
    )
    check.add_argument("--jobs", type=int, default=1, metavar="N", help="of --all: N types at once")
    check.add_argument("--ring-size", type=int, metavar="P", help="default: the section's, or 2")
    check.add_argument(
        "--tokens",
        type=read_tokens,
        default=61,
        metavar="T",
        help="of each sample, say 4096 or 4k (default 61)",
    )
    check.add_argument("--layers", type=int, default=2, metavar="N", help="at least so many (default 2)")
    check.add_argument("--head", choices=_HEADS, help="default: what the family is mostly used with")
    check.add_argument(
        "--config", metavar="DS_JSON", help="the section; default: what the model's attention is"
    )
    check.add_argument(
        "--batch",
        choices=_FORMS,
        default="plain",
        help="plain, padded on the right, packed documents, or a tree of rollouts",
    )
    check.add_argument("--seed", type=int, default=0, help="of weights and batch (default 0)")
    check.add_argument(
        "--deadline-seconds", type=float, default=120, help="all ranks are ended then (default 120)"
    )
    add_json(check)


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Print the result; RingConfigError for what cannot be checked."""
    from ds_ring.errors import RingConfigError

    from ..run.local_ranks import RanksError, run_ranks

    refuse_extra("check-model", extra_args)
    require_sizes(options, {"tokens": 65536, "layers": 1024})
    section, processes = _section(options)
    for name, least in (("tokens", 2 * processes), ("seed", 0)):
        if getattr(options, name) < least:
            raise RingConfigError(f"--{name}: expected at least {least}, got {getattr(options, name)}")
    require_deadline(options.deadline_seconds)
    if options.all == (options.model is not None):
        raise RingConfigError("model: expected a configuration, a model type or --all, and one of them only")
    if not 1 <= options.jobs <= 64:
        raise RingConfigError(f"--jobs: expected 1 to 64, got {options.jobs}")
    require_packages("check-model", "transformers")
    request = {name: getattr(options, name) for name in ("tokens", "layers", "head", "seed")}
    request |= {"section": section, "forms": (options.batch,)}
    # what was asked, of a crash and of a model that cannot be made, too: tools/model_table.py joins by it
    shape = f"{processes}x{options.tokens}x{options.layers}"
    about = {"shape": shape, "seed": options.seed, "form": options.batch}
    with _stdout_to_stderr():  # DeepSpeed speaks when it is imported
        _import(options.model)
        sys.stdout.flush()

    def check(source: str) -> dict[str, Any]:
        told = (request | {"source": source},)
        try:
            reports = run_ranks(
                _check, processes, told, threads=1, deadline_s=options.deadline_seconds, imported=True
            )
        except RanksError as error:  # what a rank refuses it reports: these have crashed, or hang
            return {"source": source, "model": "", "result": "WRONG", "reason": str(error)} | about
        report: dict[str, Any] = reports[0]
        return report | about

    if options.all:
        codes = []
        for head in (options.head,) if options.head else _GROUPS:
            request["head"] = head
            codes.append(_check_all(check, head, options))
        return max(codes)
    report = check(options.model)
    if report["result"] == "invalid":
        raise RingConfigError(report["reason"])
    print(json.dumps(report) if options.json else _text(report))
    return 1 if report["result"] == "WRONG" else 0


def _types(head: str) -> list[str]:
    """Return the model types of transformers that have a head."""
    from ..check.small_model import HEADS

    return sorted(HEADS[head].families)


def _check_all(check: Callable[[str], dict[str, Any]], head: str, options: argparse.Namespace) -> int:
    """Print a row for each model type as soon as those before it are done, then the counts."""
    counts: Counter[str] = Counter()
    types, today = _types(head), datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    about = {"head": head, "transformers": version("transformers"), "date": today}
    with ThreadPool(options.jobs) as pool:  # of daemon threads, which a forked rank does not wait for
        for report in pool.imap(check, types):
            counts[report["result"]] += 1
            row = f"{_RESULTS[report['result']]:<9} {report['source']}"
            reason = " ".join(report["reason"].split())
            print(
                json.dumps(report | about) if options.json else row + f": {reason}" * bool(reason), flush=True
            )
    if not options.json:
        totals = ", ".join(f"{counts[key]} {_RESULTS[key]}" for key in _RESULTS)
        print(f"{len(types)} model types ({head}, transformers {about['transformers']}, {today}): {totals}")
    return 1 if counts["WRONG"] else 0


def _section(options: argparse.Namespace) -> tuple[dict[str, Any] | None, int]:
    """Return the "ring_attention" section, None without --config, and the number of ranks."""
    from ds_ring.config.json_text import read_object
    from ds_ring.config.section import RingConfig
    from ds_ring.errors import RingConfigError

    if options.ring_size is not None and not 1 <= options.ring_size <= 64:
        raise RingConfigError(f"--ring-size: expected 1 to 64 ranks of this machine, got {options.ring_size}")
    if options.config is None:
        return None, options.ring_size or 2
    config = RingConfig.from_deepspeed(options.config)
    section = read_object(options.config)["ring_attention"]
    ring_size = options.ring_size or config.ring_size
    return section | {"ring_size": ring_size}, ring_size * config.ulysses_size


def _import(model: str | None) -> None:
    """Import what takes most of the command's seconds, once and not on every rank."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore")
    from ..check.small_model import read_config

    if model is not None:
        read_config(model)  # before DeepSpeed is imported, which a word that is wrong need not wait for
    import ds_ring_launcher.check.model_check  # noqa: F401


def _check(request: dict[str, Any]) -> dict[str, Any]:
    """Return the report, as JSON values. On a rank."""
    from ..check.model_check import CheckRequest, check_forms

    with _stdout_to_stderr():
        return check_forms(CheckRequest(**request))[0].as_json()


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what libraries print to stderr: it must not mix with the command's output."""
    stdout_copy = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def _text(report: dict[str, Any]) -> str:
    what = report["model"] or report["source"]
    if report["result"] == "refused":
        return f"refused: {what}: {report['reason']}"
    if report["result"] == "WRONG" and not report.get("differences"):
        return f"WRONG: {what}: {report['reason']}"
    size = f"{report['layers']} layers, {report['tokens']} tokens, {report['ring_size']} ranks"
    errors = [
        f"{kind} {error['error']:.1e} {error['name']}".rstrip() for kind, error in report["largest"].items()
    ]
    lines = [f"{report['result']}: {what}, {size}", f"  largest relative errors: {', '.join(errors)}"]
    rounding = ", ".join(f"{kind} {error['error']:.1e}" for kind, error in report["rounding"].items())
    lines.append(f"  rounding of one process ({report['measured']}): {rounding}; 10 times that is allowed")
    for tip in report["tipped"][:_SHOWN]:
        what = f"{tip['kind']} {tip['name']} by {tip['error']:.1e}"
        lines.append(f"  a threshold that rounding tips on one process, too: {what}")
    if report["eager_differs"]:
        lines.append(f"  the model's eager attention, not compared, differs: {report['eager_differs']}")
    if report["tipped"]:
        lines.append(f"  a ring in float64, where nothing is near it: {report['in_float64']}")
    differences = report["differences"]
    lines += [
        f"  {difference['kind']} {difference['name']}: {difference['error']:.1e}"
        for difference in differences[:_SHOWN]
    ]
    if len(differences) > _SHOWN:
        lines.append(f"  and {len(differences) - _SHOWN} more; --json has all")
    return "\n".join(lines)
