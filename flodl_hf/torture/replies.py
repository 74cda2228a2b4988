"""From a server's answer to its grade: who is at fault, whether the words are clear, whether the answer is right."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from flodl.errors import printable, visible
from flodl_hf.torture.case import Grade, Verdict, refusal, right, silent
from flodl_hf.torture.served import Server, spoken
from flodl_hf.torture.wire import Answer

__all__ = ["graded", "refused", "told"]

_PYTHONS = re.compile(r"^[A-Za-z_.]*(Error|Exception|Interrupt|Exit)\b ?:")
_SAYS = re.compile(
    r"(?i)\b(expect(s|ed)?|must|at most|at least|ask|see|send|name|allow|choose|leave|cut|install|is no|has no)\b"
)
MAX_CHARACTERS = 4_000


def told(answer: Answer) -> str:
    """Return the words of a refusal."""
    try:
        data = answer.json
    except ValueError:
        return answer.body.decode("utf-8", "replace")
    found: Any = data
    if isinstance(data, dict):
        found = data.get("error", data.get("message"))
        found = found.get("message") if isinstance(found, dict) else found
    return found if isinstance(found, str) else ""


def refused(
    answer: Answer | None, *, key: str = "", closing: bool = False, also: Collection[int] = (), plain: bool = False
) -> Verdict:
    """Return the grade of an answer that has to be a refusal.

    Args:
        answer: the answer; None where the connection was closed without one.
        key: what its words have to name.
        closing: closing the connection is a good answer too.
        also: statuses beside those of the client's own fault.
        plain: there is no request whose fields could be named, so that a word is enough.
    """
    if answer is None:
        return refusal("closed") if closing else Verdict(Grade.UNNAMED, "the connection is closed without an answer")
    text = told(answer)
    said = f"{answer.status}: {visible(text[:300])}"
    if answer.status < 400:
        return silent(f"answered: {visible(answer.body[:200].decode('utf-8', 'replace'))}")
    if answer.status >= 500 and answer.status not in also:
        return Verdict(Grade.BARE, said, str(answer.status))
    if _PYTHONS.match(text):
        return Verdict(Grade.BARE, said, str(answer.status))
    if plain and text:
        return refusal(said, str(answer.status))
    fault = _wording(text)
    if not fault and key and not any(form in text for form in (key, visible(key)[:40], printable(key, 60)[1:40])):
        fault = f"does not name {visible(key[:40])}"
    return (
        Verdict(Grade.UNNAMED, f"{fault}: {said}", str(answer.status)) if fault else refusal(said, str(answer.status))
    )


def _wording(text: str) -> str:
    if not text:
        return "has no words"
    if text != visible(text):
        return "prints characters that move a terminal"
    if len(text) > MAX_CHARACTERS:
        return f"is {len(text):,} characters long"
    return "" if _SAYS.search(text) else "does not say what was expected or what to do"


def graded(server: Server, path: str, answer: Answer | None, *, closing: bool = False, plain: bool = False) -> Verdict:
    """Return the grade of an answer that may be the right one to a door's plain request, or a refusal."""
    if answer is not None and answer.status == 200:
        return right() if spoken(answer) == server.right[path] else silent(f"{path}: another answer")
    return refused(answer, closing=closing, plain=plain)
