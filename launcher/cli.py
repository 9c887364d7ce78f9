"""The command `ds-ring`: options, and the way from them to a run. Reads the environment for all below it."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

_EXAMPLE = """\
examples:
  ds-ring launch configs/quickstart.yaml                   train on this machine
  ds-ring launch configs/quickstart.yaml --dry-run         print the command as a shell script, start nothing
  ds-ring launch configs/quickstart.yaml -- --steps 300    more arguments for the script
  ds-ring launch cluster.yaml --node-rank 1                this is host 1 of a YAML with ssh: false
  ds-ring verify-checkpoint runs/train_lm/checkpoints      read the latest checkpoint, compare its manifest
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status (2: wrong input)."""
    own, extra = _split(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(own)
    from ds_ring.errors import RingError  # imports torch, and `--help` should not wait for it

    try:
        return int(options.run(options, extra))
    except RingError as error:
        print(f"ds-ring: error: {error}", file=sys.stderr)
        return 2


def _split(argv: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """What stands before `--` is ours, what stands after it is the script's."""
    where = argv.index("--") if "--" in argv else len(argv)
    return argv[:where], tuple(argv[where + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-ring",
        description="Ring attention for DeepSpeed: start a training run, check what it saved.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    launch = commands.add_parser(
        "launch",
        help="start the script that a cluster YAML names, on the hosts that it names",
        description="Start a script on one or more hosts with an engine that exists already.",
        usage="ds-ring launch [-h] [--dry-run] [--node-rank N] CONFIG.yaml [-- SCRIPT_ARGS ...]",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    launch.add_argument("config", metavar="CONFIG.yaml", type=Path, help="the cluster YAML")
    launch.add_argument("--dry-run", action="store_true", help="print the command as a script, start nothing")
    launch.add_argument(
        "--node-rank", type=int, metavar="N", help="with ssh: false: which host this is, from 0"
    )
    launch.set_defaults(run=_launch)
    verify = commands.add_parser(
        "verify-checkpoint",
        help="compare a checkpoint with its manifest",
        description="Read every file of a checkpoint and compare sizes and sha256 with its manifest.",
    )
    verify.add_argument("folder", metavar="DIR", type=Path, help="what save_checkpoint was given")
    verify.add_argument("--tag", help="which checkpoint; by default the one that DIR/latest names")
    verify.add_argument(
        "--accept",
        action="store_true",
        help="write the manifest of a checkpoint that has none and that you know to be whole; needs --tag",
    )
    verify.set_defaults(run=_verify_checkpoint)
    return parser


def _verify_checkpoint(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    from ds_ring.errors import RingConfigError
    from ds_ring.integrations.manifest import accept_checkpoint, verify_checkpoint

    if extra_args:
        raise RingConfigError(f"verify-checkpoint: expected nothing after --, got {' '.join(extra_args)}")
    if options.accept and options.tag is None:
        raise RingConfigError("--accept: expected --tag with it, got none; name the checkpoint to accept")
    if options.accept:
        accept_checkpoint(options.folder, options.tag)
    manifest = verify_checkpoint(options.folder, options.tag)
    total_bytes = sum(record.bytes for record in manifest.files)
    print(f"whole: {len(manifest.files)} files, {total_bytes:,} bytes, after step {manifest.global_steps}")
    return 0


def _launch(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    from . import checks, engines, process
    from .cluster_file import read_cluster
    from .job import Job

    cluster = read_cluster(options.config)
    node_rank = checks.resolve_node_rank(cluster, options.node_rank)
    checks.require_inputs(cluster)
    port = checks.resolve_port(cluster, node_rank)
    caller = dict(os.environ)

    if options.dry_run:
        folder = Path(tempfile.gettempdir()) / f"ds-ring-{port}"
        print(engines.build(Job(cluster, node_rank, port, folder, caller, extra_args)).as_shell())
        return 0

    with tempfile.TemporaryDirectory(prefix="ds-ring-") as name:
        invocation = engines.build(Job(cluster, node_rank, port, Path(name), caller, extra_args))
        for program, advice in invocation.programs.items():
            checks.require_program(program, invocation.environment["PATH"], advice)
        hosts = "this machine" if cluster.is_local else ", ".join(host.name for host in cluster.hosts)
        what = f"{cluster.world_size} processes on {hosts} by {cluster.engine}, master port {port}"
        print(f"ds-ring: {what}", file=sys.stderr, flush=True)
        return process.run(invocation, caller, str(cluster.script))


if __name__ == "__main__":
    sys.exit(main())
