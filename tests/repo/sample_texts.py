"""Print a random sample of docstrings and error messages of an earlier commit beside today's text.

    python tests/repo/sample_texts.py 80320ff [--seed 0] [--docstrings 20] [--messages 10]

The counterpart of a function is the function with the most similar code, without docstrings. The same seed selects the
same sample.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import tarfile
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIMILAR = 0.4
"""Minimum similarity of code for a counterpart."""


@dataclass(frozen=True)
class Function:
    """A function with its texts.

    Attributes:
        place: file and name.
        doc: docstring; "" without one.
        messages: texts of errors that it raises.
        code: lines of code without strings.
    """

    place: str
    doc: str
    messages: tuple[str, ...]
    code: tuple[str, ...]


def functions(files: dict[str, str]) -> list[Function]:
    """Return all functions and methods of some sources, in the order of files."""
    found = []
    for path, text in sorted(files.items()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                doc = ast.get_docstring(node) or ""
                raised = [part.exc for part in ast.walk(node) if isinstance(part, ast.Raise)]
                calls = [part for part in raised if isinstance(part, ast.Call) and part.args]
                messages = (ast.unparse(call.args[0]) for call in calls)
                body = node.body[1:] if doc else node.body
                code = re.sub(r"f?(['\"]).*?\1", "text", "\n".join(map(ast.unparse, body))).splitlines()
                texts = tuple(text for text in messages if len(text.split()) >= 6)
                found.append(Function(f"{path}: {node.name}", doc, texts, tuple(code)))
    return found


def earlier(commit: str) -> dict[str, str]:
    """Return the sources of ``flodl_hf`` in a commit by path."""
    archive = subprocess.run(["git", "archive", commit, "flodl_hf"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        members = [member for member in opened if member.name.endswith(".py")]
        return {member.name: opened.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]


def counterpart(function: Function, others: list[Function]) -> Function | None:
    """Return the most similar function; a function of the same name is preferred."""

    def similarity(other: Function) -> float:
        matcher = SequenceMatcher(None, function.code, other.code, autojunk=False)
        same = function.place.rpartition(" ")[2] == other.place.rpartition(" ")[2]
        return min(matcher.real_quick_ratio(), matcher.quick_ratio()) + 0.3 * same

    best = max(others, key=similarity)
    return best if similarity(best) >= SIMILAR else None


def nearest(message: str, now: Function) -> str:
    """Return the message of a function that is most similar to another message."""
    return max(now.messages, key=lambda text: SequenceMatcher(None, message, text).ratio(), default="(no message)")


def main() -> None:
    """Print the sample as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docstrings", type=int, default=20)
    parser.add_argument("--messages", type=int, default=10)
    options = parser.parse_args()
    before = functions(earlier(options.commit))
    now = functions({str(path.relative_to(ROOT)): path.read_text("utf-8") for path in ROOT.glob("flodl_hf/**/*.py")})
    draw = random.Random(options.seed)
    documented = draw.sample([one for one in before if one.doc and len(one.code) > 2], options.docstrings)
    raising = draw.sample([one for one in before if one.messages], options.messages)
    for title, sample in (("Docstrings", documented), ("Messages", raising)):
        print(f"## {title}\n")
        for number, one in enumerate(sample, 1):
            found = counterpart(one, now)
            old = one.doc if title == "Docstrings" else draw.choice(one.messages)
            new = "(removed)" if found is None else found.doc if title == "Docstrings" else nearest(old, found)
            print(f"{number}. `{one.place}` -> `{found.place if found else 'removed'}`\n")
            print(f"   before: {' '.join(old.split())}\n\n   now: {' '.join(new.split())}\n")


if __name__ == "__main__":
    main()
