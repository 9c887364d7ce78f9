"""Estimate memory, bytes and time of a run before it is started: `ds-ring plan`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_ring.errors import RingConfigError
from ds_ring.plugin import LAYOUTS

from ..plan import known_hardware, known_models
from .parsers import Commands, add_command, add_json, read_tokens, refuse_extra, require_writable

_HELP = "memory, traffic and time of a run that is not started yet"
_DESCRIPTION = "Memory by component, FLOPs, bytes and time of one training step on given hardware."
_EXAMPLE = """\
examples:
  ds-ring plan --hf-config config.json --tokens 1048576 --devices 32 --hardware h100
  ds-ring plan --hf-config config.json --tokens 1048576 --hardware h100      the fewest devices that fit
  ds-ring plan --layers 32 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 14336 --vocab 128256 \\
      --devices 8 --hardware h200 --fit                                      the longest sequence that fits
  ds-ring plan --hf-config config.json --tokens 131072 --config ds_config.json --hardware cpu --json
  ds-ring plan --hf-config config.json --tokens 8388608 --devices 64 --hardware a100 \\
      --pattern '{"segment_lengths": [2048, 16384], "dilation_rates": [1, 8]}'
"""

_HARDWARE = "h100"
_TOKENS = "of one sequence, say 131072 or 128k; default: the most that fits"
_SIZES = {
    "layers": "decoder layers",
    "hidden": "width of the residual stream",
    "heads": "query heads",
    "kv-heads": "K/V heads; default: as many as --heads",
    "head-dim": "default: hidden / heads",
    "intermediate": "width of the gated MLP; default: 4 x hidden",
    "vocab": "rows of the embedding",
}


def add(commands: Commands) -> None:
    """Add the command."""
    plan = add_command(commands, "plan", run, _HELP, _DESCRIPTION, _EXAMPLE)
    plan.add_argument(
        "--tokens",
        type=read_tokens,
        metavar="T",
        help=_TOKENS,
    )
    plan.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="default: the fewest of 1, 2, 4, ... or of whole nodes that fit",
    )
    plan.add_argument("--ring-size", type=int, metavar="P", help="default: devices / Ulysses size")
    shape = "default: 1; --fit tries the most inside a node, too"
    plan.add_argument("--ulysses-size", type=int, metavar="U", help=shape)
    plan.add_argument("--batch", type=int, metavar="B", help="sequences of one ring at a time; default: 1")
    known = f"{', '.join(known_hardware())}, or a YAML file; default: {_HARDWARE}"
    plan.add_argument("--hardware", default=_HARDWARE, metavar="NAME|FILE", help=known)
    plan.add_argument("--config", metavar="DS_JSON", help="a DeepSpeed JSON; options come before it")
    model = plan.add_argument_group("model")
    model.add_argument(
        "--hf-config",
        metavar="NAME|FILE|JSON",
        help=f"a transformers config.json, its text, or one of {', '.join(known_models())}",
    )
    for name, text in _SIZES.items():
        model.add_argument(f"--{name}", type=int, metavar="N", help=text)
    how = plan.add_argument_group("how it is trained")
    how.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), help="default: 3")
    how.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16")
    how.add_argument("--pattern", metavar="JSON", help='as in the JSON section, say {"window": 4096}')
    how.add_argument("--layout", help=", ".join(LAYOUTS))
    how.add_argument("--activation-checkpointing", action="store_true", help="layers are computed again")
    how.add_argument("--recompute-attention", action="store_true", help="under checkpointing, attention too")
    how.add_argument(
        "--recompute-half-of-attention", action="store_true", help="the sequence's first half of it"
    )
    for part in ("loss", "MLP"):
        says = f"{part} in tiles of N tokens; without N as true in the JSON"
        how.add_argument(
            f"--tiled-{part.lower()}", type=read_tokens, nargs="?", const=2**40, metavar="N", help=says
        )
    how.add_argument("--offload-checkpoints", action="store_true", help="checkpoints are on the host")
    how.add_argument(
        "--offload-attention", action="store_true", help="q, k, v, out wait on the host for the backward pass"
    )
    how.add_argument("--offload-optimizer", action="store_true", help="ZeRO's optimizer is on the host")
    how.add_argument("--offload-param", action="store_true", help="ZeRO 3's parameters are on the host")
    how.add_argument("--fit", action="store_true", help="turn on the cheapest of these that make it fit")
    plan.add_argument("--compare", action="store_true", help="beside DeepSpeed Ulysses, ALST, torch's ring")
    plan.add_argument(
        "--more-devices",
        action="store_true",
        help="2, 3 (whole hosts), 4 and 8 times as many devices, for one sequence and by data replicas",
    )
    plan.add_argument("--picture", metavar="FILE", help="draw memory by part; .svg, .png or .pdf")
    add_json(plan)


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Print the plan; RingError for what cannot be planned."""
    from ..plan.advice import advise
    from ..plan.compare import compare
    from ..plan.estimate import estimate
    from ..plan.inputs import make_request
    from ..plan.more_devices import plan_more_devices
    from ..plan.options import find_roomier
    from ..plan.report import as_json, print_report

    refuse_extra("plan", extra_args)
    if options.picture is not None:
        require_writable(Path(options.picture), "--picture")
    with _show_progress() as say:
        request = make_request(options, say)
        planned = estimate(
            request.setting, lambda done, total: say(f"rank {done + 1} of {total} that are looked at")
        )
        if options.compare and planned.other_layers:
            kind = planned.other_layers[0].kind.name
            raise RingConfigError(f"--compare: expected a model of softmax attention alone, got {kind}")
        before_fit, section = request.before_fit if options.fit else None, request.section
        advice = advise(planned, say, before_fit, section.timeouts, section.pattern.documents)
        rows = compare(planned, advice.reach.longest_tokens) if options.compare else []
        sizes = request.names_ring, request.config.get("train_batch_size")
        left_out: list[str] = []
        counts = (
            plan_more_devices(request.before_fit, say, *sizes, left_out.append)
            if options.more_devices
            else []
        )
        advice = advice._replace(warnings=(*advice.warnings, *left_out))
        spare = [find_roomier(plan, request.before_fit) if plan.fits else None for plan in counts]
        if options.picture is not None:
            from ..plan.picture import plot_memory, save_figure

            save_figure(plot_memory(planned), options.picture)
    if options.json:
        print(as_json(planned, advice, request.config, rows, counts))
    else:
        print_report(planned, advice, request.config, rows, counts, spare)
    return 0


@contextmanager
def _show_progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that says what is computed: on terminals only, once it has taken two seconds."""
    from tqdm import tqdm

    with tqdm(bar_format="ds-ring plan: {desc} ...", delay=2, leave=False, disable=None) as line:

        def say(what: str) -> None:
            line.set_description_str(what, refresh=False)
            line.update()

        yield say
