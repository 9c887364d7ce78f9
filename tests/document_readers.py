"""Reads what a document says to run, without running it: command lines, and python of others' packages.

Owns the checks of text that is only read; what is run, and how, is test_documents.py's.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import shlex
import sys
from typing import Any

import pytest

from launcher.commands.parsers import Parser
from tests.documents import ROOT


class Parsed(Exception):
    """A command line was read to its end."""


def read_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command's own parser read it, and run nothing; files that pytest is given must be there."""
    words = shlex.split(command, comments=True)
    if words[0] == "pytest":
        assert all((ROOT / word).exists() for word in words[1:] if not word.startswith("-")), command
        return
    parse = Parser.parse_args, argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any, **options: Any) -> None:
        parse[not isinstance(self, Parser)](self, *arguments, **options)
        raise Parsed

    script = next(i for i, word in enumerate(words) if word.startswith(("tools", "ds-ring")))
    name = words[script].removesuffix(".py").replace("/", ".")
    is_named_only = name == "ds-ring" and len(words) == 2  # `ds-ring plan`, in a sentence
    with monkeypatch.context() as patched:
        patched.syspath_prepend(ROOT / "tools")  # a script finds its neighbours
        patched.setattr(sys, "argv", words[script:] + ["--help"] * is_named_only)
        for parser in (Parser, argparse.ArgumentParser):
            patched.setattr(parser, "parse_args", parse_and_stop)
        with pytest.raises(SystemExit if is_named_only else Parsed) as stopped:
            importlib.import_module("launcher.cli" if name == "ds-ring" else name).main()
    assert not is_named_only or stopped.value.code == 0


def read_python(text: str) -> None:
    """Compile it; what it imports of installed packages must be there and take its keywords."""
    tree, names = ast.parse(text), dict[str, Any]()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("torch", "deepspeed"):
            exec(ast.unparse(node), names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in names:
            called = inspect.signature(eval(ast.unparse(node.func), names))
            assert {word.arg for word in node.keywords} <= set(called.parameters), ast.unparse(node)
