"""Change values in a JSON text and keep everything else as its author wrote it.

Decides that a source text is patched and never regenerated: order, indentation, spelling of numbers and
unknown keys stay.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from flodl.errors import printable
from flodl_hf.errors import ExportError

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class _Member:
    key: str
    key_start: int
    value_start: int
    end: int
    value: Any


def patch_json(source_text: str, changes: Mapping[str, Any], *, remove: Collection[str] = ()) -> str:
    """Return ``source_text`` with the top-level keys of ``changes`` set to their values.

    A value equal to the one in the text (type included) is not changed, so without an effective change the
    result is the identical text; with one, only the last of duplicate keys remains. New keys are inserted in sorted
    order if the source is sorted, else at the end.

    Args:
        source_text: a JSON object.
        changes: key to new value, of JSON types.
        remove: keys to remove if present.

    Raises:
        ExportError: the text is not one JSON object, or a value is not JSON
            (NaN and infinities are not).
    """
    every, opening, closing = _members(source_text)
    present = {member.key: member for member in every}
    members = [member for member in every if present[member.key] is member]  # of a key that stands twice the last holds
    spelled = {key: _canonical(key, value) for key, value in changes.items()}
    gone = set(remove) & set(present)
    replaced = {key for key in changes if key in present and _canonical(key, present[key].value, True) != spelled[key]}
    added = [key for key in changes if key not in present]
    if not gone and not replaced and not added:
        return source_text
    style = _Style(source_text, every, opening)
    pieces: list[tuple[str, str]] = []
    for member in members:
        if member.key in gone:
            continue
        text = source_text[member.key_start : member.end]
        if member.key in replaced:
            text = source_text[member.key_start : member.value_start] + style.value(changes[member.key])
        pieces.append((member.key, text))
    in_order = [member.key for member in members] == sorted(present)
    for key in added:
        text = style.string(key) + style.colon + style.value(changes[key])
        at = next((i for i, (other, _) in enumerate(pieces) if other > key), len(pieces)) if in_order else len(pieces)
        pieces.insert(at, (key, text))
    if not pieces:
        return source_text[: opening + 1] + "}" + source_text[closing + 1 :]
    body = style.comma.join(text for _, text in pieces)
    return source_text[: opening + 1] + style.first + body + style.last + source_text[closing:]


class _Style:
    """How a text spaces and spells its members, taken from its first ones."""

    def __init__(self, text: str, members: list[_Member], opening: int) -> None:
        self.ascii = text.isascii()
        newline = "\r\n" if "\r\n" in text else "\n"
        if not members:
            self.first, self.comma, self.colon, self.last = f"{newline}  ", f",{newline}  ", ": ", newline
        else:
            start = members[0]
            self.first = text[opening + 1 : start.key_start]
            self.colon = text[_after_string(text, start.key_start) : start.value_start]
            closing = text.index("}", members[-1].end)
            self.last = text[members[-1].end : closing]
            multiline = "\n" in self.first
            self.comma = (
                text[start.end : members[1].key_start] if len(members) > 1 else "," + (self.first if multiline else " ")
            )
        line = self.first.rpartition("\n")
        self.indent = line[2] if line[1] else None
        self.newline = newline
        self.spaced = self.colon.endswith(" ")

    def string(self, value: str) -> str:
        return json.dumps(value, ensure_ascii=self.ascii)

    def value(self, value: Any) -> str:
        separators = ("," if self.indent is not None else ", ", ": ") if self.spaced else (",", ":")
        text = json.dumps(value, ensure_ascii=self.ascii, indent=self.indent, separators=separators)
        return text.replace("\n", self.newline + self.indent) if self.indent is not None else text


def _members(text: str) -> tuple[list[_Member], int, int]:
    """Return the top-level members and the positions of the outer braces."""
    decoder = json.JSONDecoder()

    def fail(found: str) -> ExportError:
        return ExportError(
            f"JSON text to be changed: {found}; expected one object; fix the source file",
            problems=[found],
        )

    def skip(at: int) -> int:
        while at < len(text) and text[at] in _SPACE:
            at += 1
        return at

    opening = skip(0)
    if text[opening : opening + 1] != "{":
        raise fail(f"begins with {printable(text[opening : opening + 8])}")
    members: list[_Member] = []
    at = skip(opening + 1)
    try:
        while text[at : at + 1] != "}":
            if members:
                if text[at : at + 1] != ",":
                    raise fail(f"no comma at character {at}")
                at = skip(at + 1)
            if text[at : at + 1] != '"':
                raise fail(f"no key at character {at}")
            key, after = scanstring(text, at + 1, True)
            colon = skip(after)
            if text[colon : colon + 1] != ":":
                raise fail(f"no colon at character {colon}")
            value_start = skip(colon + 1)
            value, end = decoder.raw_decode(text, value_start)
            members.append(_Member(key, at, value_start, end, value))
            at = skip(end)
    except (ValueError, RecursionError) as error:
        raise fail(f"not JSON ({error})") from error
    if skip(at + 1) != len(text):
        raise fail(f"more text after the object, at character {at + 1}")
    return members, opening, at


def _after_string(text: str, start: int) -> int:
    return scanstring(text, start + 1, True)[1]


def _canonical(key: str, value: Any, stored: bool = False) -> str:
    """Return a spelling that is equal exactly for values equal in type, order of keys included."""
    try:
        return json.dumps(value, allow_nan=stored)
    except (TypeError, ValueError) as error:
        raise ExportError(
            f"JSON key {printable(key)}: found {printable(repr(value))}, expected a value "
            f"that JSON can represent ({error}); give numbers, texts, lists and tables",
            problems=[str(error)],
            key=key,
        ) from error
