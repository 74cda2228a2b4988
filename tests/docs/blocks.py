"""Parse and execute the code blocks of Markdown documents.

``python blocks.py PAGE...`` executes pages in the current folder. It needs the installed package with the extra
``cli`` only, so that it also tests a wheel in an empty environment.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_FENCE = re.compile(r"^(?P<indent> *)```(?P<words>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,._]*")
NO_RUN = "no-run"


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        path: the document.
        line: the line of the document on which the body begins, from 1.
        language: first word after the fence.
        marks: the other words after the fence.
        body: the text between the fences.
        around: the paragraphs before and after, which give the reason for a block that is not executed.
    """

    path: Path
    line: int
    language: str
    marks: tuple[str, ...]
    body: str
    around: str

    @property
    def is_run(self) -> bool:
        return NO_RUN not in self.marks

    @property
    def library(self) -> str | None:
        """The module of a library that the block needs (``needs=MODULE``)."""
        return next((mark.removeprefix("needs=") for mark in self.marks if mark.startswith("needs=")), None)


def blocks_of(path: Path) -> list[Block]:
    """Return the fenced blocks of a document in order."""
    text = path.read_text("utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, *marks = match["words"].split() or [""]
        before = text[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
        after = text[match.end() :].lstrip().split("\n\n", 1)[0]
        line = text[: match.start("body")].count("\n") + 1
        found.append(Block(path, line, language, tuple(marks), match["body"], before + "\n" + after))
    return found


@dataclass(frozen=True)
class Command:
    """A command of a console block with the output that the document shows; without output nothing is compared."""

    line: int
    words: tuple[str, ...]
    stdin: str | None
    shown: tuple[str, ...]


def commands_of(block: Block) -> list[Command]:
    """Return the ``$ flodl-hf`` commands of a console block; ``echo TEXT |`` before one is its input."""
    found: list[Command] = []
    lines = block.body.splitlines()
    at = 0
    while at < len(lines):
        line, start = lines[at], at
        at += 1
        if not line.startswith("$ "):
            continue
        while line.endswith("\\"):
            line = line[:-1] + lines[at]
            at += 1
        shown = []
        while at < len(lines) and not lines[at].startswith("$ "):
            shown.append(lines[at])
            at += 1
        words, stdin = shlex.split(line[2:], comments=True), None
        if "|" in words:
            pipe = words.index("|")
            assert words[0] == "echo", f"{block.path}:{block.line + start}: expected echo before the pipe"
            stdin, words = " ".join(words[1:pipe]) + "\n", words[pipe + 1 :]
        if words and words[0] == "flodl-hf":
            found.append(Command(block.line + start, tuple(words[1:]), stdin, tuple(shown)))
    return found


def differs(shown: tuple[str, ...], printed: str) -> str | None:
    """Return the first line of a document's output that was not printed, or None.

    Numbers and spacing are not compared; a line of ``...`` replaces any number of lines.
    """
    wanted = [_shape(line) for line in shown if line.strip()]
    real = [_shape(line) for line in printed.splitlines() if line.strip()]
    at = 0
    anywhere = False
    for line in wanted:
        if line == "...":
            anywhere = True
            continue
        places = range(at, len(real)) if anywhere else range(at, min(at + 1, len(real)))
        found = next((i for i in places if real[i] == line), None)
        if found is None:
            return line
        at, anywhere = found + 1, False
    return None if anywhere or not wanted or at == len(real) else f"(the document ends before) {real[at]}"


def _shape(line: str) -> str:
    return _NUMBER.sub("N", " ".join(line.split()))


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    """Execute a block; a traceback shows the document's own lines."""
    source = "\n" * (block.line - 1) + block.body
    exec(compile(source, str(block.path), "exec"), namespace)


def run_console(block: Block) -> None:
    """Execute the commands of a block and compare their output."""
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    for command in commands_of(block):
        result = CliRunner().invoke(app, list(command.words), input=command.stdin, prog_name="flodl-hf")
        where = f"{block.path.name}:{command.line}: flodl-hf {' '.join(command.words)}"
        assert result.exit_code == 0, f"{where}\n{result.output}\n{result.exception!r}"
        missing = differs(command.shown, result.stdout)
        assert missing is None, f"{where}\nshows: {missing}\nprinted:\n{result.stdout}"


def run_document(path: Path, module: ModuleType) -> int:
    """Execute the blocks of a document that need no library, in order, and return how many there were."""
    found = (block for block in blocks_of(path) if block.is_run and block.library is None)
    blocks = [block for block in found if block.language in ("python", "console")]
    for block in blocks:
        if block.language == "python":
            run_python(block, module.__dict__)
        else:
            run_console(block)
    return len(blocks)


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        started = time.monotonic()
        sys.modules["document"] = ModuleType("document")
        count = run_document(page.resolve(), sys.modules["document"])
        print(f"{page.name}: {count} blocks executed in {time.monotonic() - started:.0f} s", flush=True)
