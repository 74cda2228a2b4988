"""From a server's answer to its grade: who is at fault, whether the words are clear, whether the answer is right."""

from __future__ import annotations

import re
from typing import Any

from flodl.errors import printable, visible
from tests.torture.case import Grade, Verdict, refusal, silent
from tests.torture.wire import Answer

__all__ = ["refused", "told"]

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


def refused(answer: Answer | None, *, key: str = "") -> Verdict:
    """Return the grade of an answer that has to be a refusal.

    Args:
        answer: the answer; None where the connection was closed without one.
        key: what its words have to name.
    """
    if answer is None:
        return Verdict(Grade.UNNAMED, "the connection is closed without an answer")
    text = told(answer)
    said = f"{answer.status}: {visible(text[:300])}"
    if answer.status < 400:
        return silent(f"answered: {visible(answer.body[:200].decode('utf-8', 'replace'))}")
    if answer.status >= 500:
        return Verdict(Grade.BARE, said, str(answer.status))
    if _PYTHONS.match(text):
        return Verdict(Grade.BARE, said, str(answer.status))
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
