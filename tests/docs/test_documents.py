"""What the documents say is so: their code runs, their commands print what is shown, their links lead somewhere."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<words>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,._]*")
NO_RUN = "no-run"


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        path: the document.
        line: the document's line on which the body begins, from 1.
        language: first word after the fence.
        marks: the other words after the fence.
        body: the text between the fences.
        around: the paragraphs before and after, where a block that is not run has to say why.
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


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    """Execute a block; a traceback shows the document's own lines."""
    source = "\n" * (block.line - 1) + block.body
    exec(compile(source, str(block.path), "exec"), namespace)


@dataclass(frozen=True)
class Command:
    """A command of a console block with the output that the document shows; none shown, none compared."""

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
            assert words[0] == "echo", f"{block.path}:{block.line + start}: only echo may stand before a pipe"
            stdin, words = " ".join(words[1:pipe]) + "\n", words[pipe + 1 :]
        if words and words[0] == "flodl-hf":
            found.append(Command(block.line + start, tuple(words[1:]), stdin, tuple(shown)))
    return found


def differs(shown: tuple[str, ...], printed: str) -> str | None:
    """Return the first line of a document's output that was not printed, or None.

    Numbers and spacing are not compared; a line of ``...`` stands for any lines.
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


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WITH_CODE = [path for path in DOCUMENTS if any(b.language in ("python", "console") for b in blocks_of(path))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# An external address, an anchor within the page, or mail: nothing to look up.
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_documents_are_found() -> None:
    guides = {name(path) for path in DOCUMENTS if path.parent.name == "guides"}
    assert len(guides) >= 8
    assert guides <= set(map(name, WITH_CODE)), "every guide shows code, and its code runs"
    assert {"README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/adding-a-family.md"} <= set(
        map(name, DOCUMENTS)
    )


@pytest.mark.parametrize("path", WITH_CODE, ids=name)
@pytest.mark.usefixtures("working_folder", "demo_is_trained")
def test_the_blocks_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)
    for block in blocks_of(path):
        if not block.is_run:
            continue
        if block.language == "python":
            run_python(block, module.__dict__)
        elif block.language == "console":
            run_console(block)


def run_console(block: Block) -> None:
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    for command in commands_of(block):
        result = CliRunner().invoke(app, list(command.words), input=command.stdin, prog_name="flodl-hf")
        where = f"{name(block.path)}:{command.line}: flodl-hf {' '.join(command.words)}"
        assert result.exit_code == 0, f"{where}\n{result.output}\n{result.exception!r}"
        missing = differs(command.shown, result.stdout)
        assert missing is None, f"{where}\nshows: {missing}\nprinted:\n{result.stdout}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_a_block_that_is_not_run_says_why(path: Path) -> None:
    for block in blocks_of(path):
        if not block.is_run:
            assert re.search(r"\b(needs?|because|only|network|download|not run)\b", block.around), (
                f"{name(path)}:{block.line}: the text around says no reason"
            )


# The tasks of the first hour have a test each, in tests/examples.
@pytest.mark.parametrize(
    "path", [pytest.param(p, id=name(p), marks=[pytest.mark.slow] * (p.stem == "first_hour")) for p in EXAMPLES]
)
@pytest.mark.usefixtures("working_folder", "demo_is_trained")
def test_the_examples_run(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [path.name])
    status = None
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        status = end.code
    assert not status
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text("utf-8")
    for block in blocks_of(path):
        text = text.replace(block.body, "")
    dead = []
    for target in _LINK.findall(text):
        if "://" in target or target.startswith(("#", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        place = path.parent / file
        if not place.exists() or (anchor and anchor not in anchors(place)):
            dead.append(target)
    assert not dead


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower().replace(" ", "-") for heading in headings}


def test_a_wrong_document_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "Text.\n\n```python no-run\nx\n```\n\n```console\n$ flodl-hf a \\\n  b\nseen 12\n$ echo hi | flodl-hf c\n```\n"
    )
    silent, console = blocks_of(path)
    assert not silent.is_run
    assert (silent.line, console.line) == (4, 8)
    first, second = commands_of(console)
    assert (first.words, first.shown, second.stdin) == (("a", "b"), ("seen 12",), "hi\n")
    assert differs(("seen 12",), "seen 7\n") is None
    assert differs(("seen 12",), "heard 12\n") == "seen N"
    assert differs(("a", "...", "c"), "a\nb\nc\n") is None
    assert differs(("a",), "a\nb\n") is not None
    with pytest.raises(ZeroDivisionError):
        run_python(Block(path, 9, "python", (), "1 / 0", ""), {})


def test_every_page_stands_in_the_book() -> None:
    listed = set()
    for path in (ROOT / "docs").rglob("*.md"):
        for body in re.findall(r"^```\{toctree\}\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            for entry in (line for line in body.splitlines() if line and not line.startswith(":")):
                listed |= {found.resolve() for found in path.parent.glob(entry + ".md")}
    pages = {path.resolve() for path in (ROOT / "docs").rglob("*.md")} - {(ROOT / "docs" / "index.md").resolve()}
    assert sorted(map(name, pages - listed)) == []
