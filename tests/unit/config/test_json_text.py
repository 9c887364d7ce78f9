"""Files that are no DeepSpeed JSON: the message names path, line and fault."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from ds_ring.config.json_text import read_small
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError
from tests.clock import unqueued_seconds

SOUND = '{"ring_attention": {"ring_size": 4}}'


def refusal(source: str | os.PathLike[str]) -> str:
    started = unqueued_seconds()
    with pytest.raises(RingConfigError) as caught:
        RingConfig.from_deepspeed(source)
    assert unqueued_seconds() - started < 0.5
    error = caught.value  # no traceback of json or of the file system stands above ours
    assert error.__cause__ is None and (error.__suppress_context__ or error.__context__ is None)
    return str(error)


def refusal_of(text: str | bytes, folder: Path) -> str:
    path = folder / "ds_config.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    return message


@pytest.mark.parametrize("as_text", [True, False])
def test_a_path_may_be_a_string_or_a_path(tmp_path: Path, as_text: bool) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(SOUND)
    assert RingConfig.from_deepspeed(str(path) if as_text else path).ring_size == 4


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "windows.json"
    path.write_bytes(b"\xef\xbb\xbf" + SOUND.encode())
    assert RingConfig.from_deepspeed(path).ring_size == 4


# (text, where json says that the fault is)
BROKEN = [
    ('{\n  "a": 1,\n  "b": 2,\n}', "line (3|4) column "),
    ('{"a": [1, 2,]}', "line 1 column 1[23]"),
    ('{\n  // the ring\n  "a": 1}', "line 2 column 3"),
    ("{'a': 1}", "line 1 column 2"),
    ('{"a": True}', "Expecting value: line 1 column 7"),
    ('{\n  "a": 1\n  "b": 2\n}', "Expecting ',' delimiter: line 3 column 3"),
    ('{"a": 1', "line 1 column 8"),
    ('{"a": "x}', "Unterminated string starting at: line 1 column 7"),
    ('{"a": 1} {"b": 2}', "Extra data: line 1 column 10"),
    ('{"a" 1}', "Expecting ':' delimiter: line 1 column 6"),
    ("ring_size: 4", "Expecting value: line 1 column 1"),
]


@pytest.mark.parametrize(("text", "where"), BROKEN, ids=[text for text, _ in BROKEN])
def test_broken_json_is_refused_in_the_words_of_json(tmp_path: Path, text: str, where: str) -> None:
    message = refusal_of(text, tmp_path)
    assert re.search(f"not JSON: .*{where}", message)
    assert message.endswith("; JSON has no comments, no trailing commas, and strings in double quotes")


@pytest.mark.parametrize("text", ["[1, 2]", '"x"', "4", "null", "true"])
def test_the_top_level_must_be_an_object(tmp_path: Path, text: str) -> None:
    assert f"expected a JSON object {{...}} at the top level, got {text}; write" in refusal_of(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    {
        "": "Expecting value: line ",
        " \n\t ": "Expecting value: line ",
        "[" * 100_000: "cannot be read as JSON: ",
        '{"a": ' + "[" * 64 + "1" + "]" * 64 + "}": "expected at most 64 brackets in each other, got more",
        '{"a": ' + "9" * 10_000 + "}": "cannot be read as JSON: ",
        '{"ring_attention": {"ring_size": 2, "layout": 1}}': "ring_attention.layout: ",
    }.items(),
    ids=["empty", "blanks", "nested", "a little nested", "long number", "a problem in the section"],
)
def test_a_text_is_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal_of(text, tmp_path)


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    message = refusal_of('{"a": "ü"}'.encode("latin-1"), tmp_path)
    assert "expected text in UTF-8, got the byte 0xfc at offset 7; save the file as UTF-8" in message
    assert "expected text in UTF-8, got the byte 0xff" in refusal_of(SOUND.encode("utf-16"), tmp_path)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"ring_attention": {"layout": "auto", "layout": "zigzag"}}', "layout"),
        ('{"ring_attention": {}, "ring_attention": {}}', "ring_attention"),
        ('{"ring_attention": {}, "list": [{"x": 1, "x": 1}]}', "x"),
        ('{"a": {"layout": 1, "layout": 2}, "a": {}}', "layout"),
    ],
)
def test_a_key_that_stands_twice(tmp_path: Path, text: str, key: str) -> None:
    expected = f"expected each key once in an object, got '{key}' twice; keep one of them"
    assert expected in refusal_of(text, tmp_path)


@pytest.mark.parametrize(
    ("number", "got"), [("NaN", "nan"), ("Infinity", "inf"), ("-Infinity", "-inf"), ("1e999", "inf")]
)
def test_numbers_that_json_does_not_have(tmp_path: Path, number: str, got: str) -> None:
    message = refusal_of(f'{{"optimizer": {{"lr": [1, {number}]}}, "ring_attention": {{}}}}', tmp_path)
    assert f"optimizer.lr[1]: expected a finite number, got {got}; JSON has no NaN" in message


def test_a_missing_file_offers_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(SOUND)
    missing = tmp_path / "ds_confg.json"
    assert refusal(missing) == f"{missing}: the file does not exist; did you mean ds_config.json?"
    assert "the file does not exist; the current folder is " in refusal(tmp_path / "zzz")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "expected a JSON file, got a directory; name a file in it" in refusal(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    words = "expected a regular file, got a pipe, a device or a socket; write its contents to a file"
    assert words in refusal(tmp_path / "pipe")


def test_an_object_without_an_end_is_refused() -> None:
    endless: dict[str, object] = {"ring_size": 2}
    endless["pattern"] = [endless]
    words = "the DeepSpeed configuration: expected at most 64 brackets in each other, got more; is this"
    assert words in refusal({"ring_attention": endless})  # type: ignore[arg-type]


def test_json_text_in_place_of_a_path() -> None:
    assert "expected the path of a file, got JSON text; pass json.loads(text)" in refusal(SOUND)
    assert "expected the path of a file, got JSON text" in refusal(json.dumps({"k" * 300: 1}))


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", ""], ids=["long", "NUL", "empty"])
def test_names_that_no_file_can_have(path: str) -> None:
    assert refusal(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(SOUND)
    path.chmod(0)
    assert "expected a file that can be read" in refusal(path)


def test_a_file_of_the_most_bytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "three.json"
    path.write_text("abc")
    assert read_small(path, 3) == "abc"
    with pytest.raises(RingConfigError, match="expected at most 2 bytes, got more"):
        read_small(path, 2)
