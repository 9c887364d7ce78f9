"""Files that are written where others may write, too: no planted link is followed, modes follow the umask."""

from __future__ import annotations

import ast
import json
import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ring.written_files import append_text, replace_text, replaced, write_at_once
from ds_ring_launcher import cli
from ds_ring_launcher.doctor.probe import _mark, _marked_folders
from ds_ring_launcher.run.run_folder import ATTEMPTS, RunFolder, write_exit

ROOT = Path(__file__).resolve().parents[2]

# Text files written inside a folder of mode 0700 that this process has made.
IN_A_FOLDER_OF_OUR_OWN = {
    "launcher/run/process.py": 1,
    "launcher/run/local_ranks.py": 2,
    "launcher/run/run_lock.py": 1,  # the lock file, which filelock has opened without following a link
    "launcher/doctor/findings.py": 3,
    "launcher/compare/group.py": 1,
    "launcher/compare/worker.py": 1,
}


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file elsewhere, which must stay as it is."""
    path = tmp_path / "victim"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious", "a planted link was written through"


def test_the_name_beside_a_file_cannot_be_guessed(tmp_path: Path, victim: Path) -> None:
    (tmp_path / f".status.html.{os.getpid()}").symlink_to(victim)
    replace_text(tmp_path / "status.html", "page")
    seen = set()
    for _ in range(3):
        with replaced(tmp_path / "status.html") as file:
            seen.add(os.readlink(f"/proc/self/fd/{file.fileno()}"))
            file.write(b"page")
    assert len(seen) == 3 and (tmp_path / "status.html").read_text() == "page"


def test_a_link_of_the_final_name_is_replaced(tmp_path: Path, victim: Path) -> None:
    for write in (replace_text, write_at_once):
        path = tmp_path / write.__name__
        path.symlink_to(victim)
        write(path, "new")
        assert path.read_text() == "new" and not path.is_symlink()


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(TypeError), replaced(tmp_path / "a") as file:
        file.write("no bytes")  # type: ignore[arg-type]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_what_is_appended_to_is_a_regular_file(tmp_path: Path, victim: Path) -> None:
    append_text(tmp_path / "a", "1\n")
    append_text(tmp_path / "a", "2\n")
    assert (tmp_path / "a").read_text() == "1\n2\n"
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "new").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link", "new", "fifo"):
        with pytest.raises(OSError, match=r"symbolic links|expected a regular file"):
            append_text(tmp_path / name, "text")
    os.close(reader)
    with pytest.raises(OSError, match="No such device"):  # nobody reads it: not waited for
        append_text(tmp_path / "fifo", "text")
    assert not (tmp_path / "nothing").exists()


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_at_once(tmp_path / "latest", "checkpoint")
        run = RunFolder(tmp_path / "run")
        run.start_attempt()
        run.record("start", 1)
        write_exit(run.attempt(1), 0, 0)
        os.umask(0o027)
        write_at_once(tmp_path / "group", "")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert modes.pop("group") == 0o640
    assert set(modes.values()) == {0o600}, modes
    assert len(modes) == 3 and ATTEMPTS in modes


def test_links_in_a_run_folder_are_not_followed(tmp_path: Path, victim: Path) -> None:
    run = RunFolder(tmp_path / "run")
    folder = run.attempt(run.start_attempt())
    for path in (run.path / ATTEMPTS, folder / "rank-0.exit.json"):
        path.symlink_to(victim)
    run.record("start", 1)  # is left out, as on a full disk
    write_exit(folder, 0, 0)
    assert json.loads((folder / "rank-0.exit.json").read_text())["status"] == 0


def test_a_mark_of_the_doctor_is_made_by_it(tmp_path: Path, victim: Path) -> None:
    request = {"folders": [str(tmp_path)], "token": "abc", "index": 0}
    _mark(str(tmp_path), request).symlink_to(tmp_path / "nothing")
    assert _marked_folders(request) == {str(tmp_path): "File exists"}
    assert not (tmp_path / "nothing").exists()


DRY_RUN = """\
engine: deepspeed
hosts: local
slots: 2
device: cpu
master_port: 29513
script: train.py
deepspeed_config: ds.json
"""


def test_a_dry_run_writes_into_a_folder_of_its_own(
    tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not into one of /tmp whose name everybody can guess."""
    work = tmp_path / "it's here"
    (work / "tmp").mkdir(parents=True)
    (work / "train.py").touch()
    (work / "ds.json").write_text('{"train_batch_size": 2, "ring_attention": {"ring_size": 2}}')
    (work / "cluster.yaml").write_text(DRY_RUN)
    assert cli.main(["launch", str(work / "cluster.yaml"), "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "/ds-ring-agent-folder" not in script and "ds-ring-29513" not in script
    show = "exec printf '%s\\n' "
    ran = subprocess.run(
        ["sh", "-c", re.sub(r"^exec ", show, script, flags=re.MULTILINE)],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(work / "tmp")},
    )
    assert ran.returncode == 0, ran.stderr
    hostfile = next(line for line in ran.stdout.splitlines() if line.startswith("--hostfile="))
    path = Path(hostfile.removeprefix("--hostfile="))
    assert path.read_text() == "localhost slots=2\n" and path.parent.parent == work / "tmp"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


WRITERS = ("write_text", "write_bytes", "copyfile", "copy2", "mkstemp", "touch", "open", "savefig")


def writers(tree: ast.AST) -> Iterator[int]:
    """Yield lines of calls that would follow a link of the name that they are given."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name not in WRITERS:
            continue
        options = {one.arg: ast.unparse(one.value) for one in call.keywords}
        words = ast.unparse(call)
        if name == "open" and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, int):
            continue  # a descriptor, and no name
        if (
            name in WRITERS[:5]
            or (name == "touch" and options.get("exist_ok") != "False")
            or (name == "open" and "O_CREAT" in words and "O_NOFOLLOW" not in words and "flags" not in words)
            or (name == "savefig" and ast.unparse(call.args[0]) != "file")
            or (name == "open" and "os.open" not in words and re.search(r"""['"][wax]b?\+?['"]""", words))
        ):
            yield call.lineno


def test_all_of_ds_ring_and_the_launcher_write_by_these_functions() -> None:
    found = {
        str(path.relative_to(ROOT)): len(list(writers(ast.parse(path.read_text()))))
        for folder in ("ds_ring", "launcher")
        for path in (ROOT / folder).rglob("*.py")
    }
    got = {name: count for name, count in found.items() if count and name != "ds_ring/written_files.py"}
    assert got == IN_A_FOLDER_OF_OUR_OWN, "write by replaced, replace_text, write_at_once or append_text"
    seeded = "open(p, 'w'); p.write_text(t); p.touch(); os.open(p, os.O_CREAT); f.savefig(p)"
    assert len(list(writers(ast.parse(seeded)))) == 5
    assert not list(writers(ast.parse("open(1, 'w', closefd=False)")))
