"""``flodl-hf predict``: texts in, answers out, for whatever task the checkpoint was written for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from flodl.errors import PredictError
from flodl_hf.cli.shared import Json, Local, Model, Revision, plain, reporting, say

NAME = "predict"


@reporting
def command(
    model: Model,
    text: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; none reads lines from stdin.")
    ] = None,
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="The question, for question answering.")
    ] = None,
    head: Annotated[
        str, typer.Option(help="auto (what the file was written for), base, seqcls, tokcls, qa or mlm.")
    ] = "auto",
    top_k: Annotated[int | None, typer.Option(help="Most answers for each text.")] = None,
    strict: Annotated[
        bool, typer.Option(help="Refuse texts longer than one window instead of reading them in several.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    revision: Revision = None,
    local_files_only: Local = False,
    json_output: Json = False,
) -> None:
    """Predict from texts, or from the lines of standard input.

    Labels for texts, entities, an answer (--question), the words behind [MASK], or an embedding,
    as the checkpoint says.
    """
    from flodl_hf.auto import load

    if text is None and sys.stdin.isatty():
        say("reading texts from standard input, one a line (Ctrl-D ends)")
    texts = iter(text) if text is not None else (line.rstrip("\n") for line in sys.stdin)
    loaded = load(model, head=head, revision=revision, local_files_only=local_files_only, device=device)
    answers = answer(loaded, texts, question=question, top_k=top_k, strict=strict)
    for given, found in answers:
        if json_output:
            # One object a line, so that any number of texts can be piped on.
            typer.echo(json.dumps({"text": given, "result": plain(found)}, ensure_ascii=False))
        else:
            typer.echo(f"{given}\n{show(found)}")


def answer(
    model: Any, texts: Iterator[str], *, question: str | None, top_k: int | None, strict: bool
) -> Iterator[tuple[str, Any]]:
    """Yield each text with its answer, some at a time."""
    from flodl_hf.runtime.stream import WINDOW

    def results(chunk: list[str]) -> list[Any]:
        if model.head == "question_answering":
            if question is None:
                raise PredictError("predict: this checkpoint answers questions; give one with --question")
            pairs = [(question, context) for context in chunk]
            return model.answer_batch(pairs, top_k=top_k or 1, strict=strict)
        if model.head == "masked_lm":
            return model.fill_mask(chunk, top_k=top_k or 5)
        if model.head == "base":
            return [[round(x, 6) for x in row] for row in model.embed(chunk, strict=strict).tolist()]
        if model.head == "token_classification":
            return model.predict(chunk, strict=strict)
        return model.predict(chunk, top_k=top_k, strict=strict)

    chunk: list[str] = []
    size = 1 if sys.stdin.isatty() else WINDOW
    for text in texts:
        chunk.append(text)
        if len(chunk) == size:
            yield from zip(chunk, results(chunk), strict=True)
            chunk = []
    if chunk:
        yield from zip(chunk, results(chunk), strict=True)


def show(found: Any) -> str:
    """Return an answer as indented lines."""
    lines: list[str] = []
    if found and isinstance(found[0], float):
        return (
            "  " + " ".join(f"{x:.4f}" for x in found[:8]) + (f" ... ({len(found)} numbers)" if len(found) > 8 else "")
        )
    for item in found:
        if isinstance(item, list):
            lines += ["  mask:", *("  " + line for line in show(item).splitlines())]
        elif hasattr(item, "label") and hasattr(item, "start"):
            lines.append(f"  {item.label:<12} {item.score:.4f}  {item.word}  [{item.start}:{item.end}]")
        elif hasattr(item, "label"):
            note = f"  ({item.windows} windows)" if item.windows > 1 else ""
            lines.append(f"  {item.label:<12} {item.score:.4f}{note}")
        elif hasattr(item, "token"):
            lines.append(f"  {item.token:<12} {item.score:.4f}  {item.sequence}")
        elif item.no_answer:
            lines.append(f"  (no answer)  {item.score:.4f}")
        else:
            lines.append(f"  {item.text}  {item.score:.4f}  [{item.start}:{item.end}]")
    return "\n".join(lines) or "  (nothing found)"
