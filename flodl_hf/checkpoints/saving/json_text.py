"""Change values in a JSON text; an unchanged text stays as its author wrote it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from flodl.errors import printable
from flodl_hf.checkpoints.folders import refused
from flodl_hf.errors import ExportError

_WHAT = "JSON text to be changed"


def patch_json(source_text: str, changes: Mapping[str, Any], *, remove: Collection[str] = ()) -> str:
    """Return ``source_text`` with the top-level keys of ``changes`` set to their values.

    Without an effective change (types and the order of keys count) the result is the identical text. Otherwise the
    object is written again with the order, indentation and line ends of the source. New keys are inserted in sorted
    order if the source is sorted, else at the end.

    Args:
        source_text: a JSON object.
        changes: key to new value, of JSON types.
        remove: keys to remove if present.

    Raises:
        ExportError: the text is not one JSON object, or a value is not JSON
            (NaN and infinities are not).
    """
    try:
        source = json.loads(source_text)
    except (ValueError, RecursionError) as error:
        raise refused(_WHAT, f"not JSON ({error})", "one object", kind=ExportError) from error
    if not isinstance(source, dict):
        raise refused(_WHAT, f"a JSON {type(source).__name__}", "one object", kind=ExportError)
    table = {key: value for key, value in source.items() if key not in remove} | dict(changes)
    for key, value in changes.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            found, expected = f"key {printable(key)}: {error}", "numbers, texts, lists and tables"
            raise refused(_WHAT, found, expected, kind=ExportError, key=key) from error
    if json.dumps(table) == json.dumps(source):
        return source_text
    json.loads(source_text, parse_float=_finite)
    if list(source) == sorted(source):
        table = dict(sorted(table.items()))
    indent = re.match(r"\s*\{\r?\n([ \t]*)", source_text)
    spaced = re.search(r'":\s', source_text) is not None
    separators = ("," if indent else ", ", ": ") if spaced or not source else (",", ":")
    style: dict[str, Any] = {"indent": indent and indent[1], "separators": separators}
    text = json.dumps(table, ensure_ascii=source_text.isascii(), **style)
    if any("\ud800" <= char <= "\udfff" for char in text):  # half of a character, which UTF-8 cannot encode
        text = json.dumps(table, **style)
    newline = "\r\n" if "\r\n" in source_text else "\n"
    return text.replace("\n", newline) + source_text[len(source_text.rstrip()) :]


def _finite(digits: str) -> float:
    """Refuse a number that would be written as the constant Infinity."""
    value = float(digits)
    if math.isinf(value):
        raise refused(_WHAT, f"the number {printable(digits)}, which is too large", "one object", kind=ExportError)
    return value
