"""What the documents say is so: their code runs, their commands print what is shown, their links lead somewhere."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.blocks import Block, blocks_of, commands_of, differs, run_document, run_python

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "skills/**/*.md") for path in ROOT.glob(pattern)
)
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
    run_document(path, module)


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


PAGES = [path for path in DOCUMENTS if path.parent.name not in ("reference", "api", "decisions")]


def test_pages_have_at_most_250_lines() -> None:
    assert [name(path) for path in PAGES if len(path.read_text("utf-8").splitlines()) > 250] == []
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_sentences_are_short(path: Path) -> None:
    """The mean sentence of a page has at most 20 words; code, tables and headings do not count."""
    text = re.sub(r"^ *```.*?^ *```\s*$", "\n\n", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    prose = "\n".join("" if line.lstrip().startswith(("|", "#", "<", ":::")) else line for line in text.splitlines())
    prose = re.sub(r"`[^`]*`", "X", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose))
    lengths = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            words = len(re.findall(r"[\w'’-]+", sentence))
            lengths += [words] if words > 1 else []
    assert not lengths or sum(lengths) / len(lengths) <= 20
