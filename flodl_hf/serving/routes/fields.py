"""Fields of requests: validation, normalization to one form, and JSON schema.

`Route.fields` lists the fields of a route. Other fields are refused with status 422.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from flodl.errors import nearest, shown
from flodl_hf.serving.http_errors import RefusedError


@dataclass(frozen=True)
class Field:
    """A field of a request.

    Attributes:
        name: its name in JSON.
        kind: a name of `KINDS`.
        description: its description.
        required: whether it is required.
        effect: False for a field that clients send and that does not change results.
        fields: the fields of an object.
    """

    name: str
    kind: str
    description: str
    required: bool = False
    effect: bool = True
    fields: tuple[Field, ...] = ()

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema."""
        found = {**KINDS[self.kind][0], "description": self.description}
        return found | (schema_of(self.fields) if self.fields else {})


def schema_of(fields: Sequence[Field]) -> dict[str, Any]:
    """Return the JSON schema of an object with only these fields."""
    return {
        "type": "object",
        "properties": {field.name: field.schema() for field in fields},
        "required": [field.name for field in fields if field.required],
        "additionalProperties": False,
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: Any) -> list[str] | None:
    found = [value] if isinstance(value, str) else value
    return found if isinstance(found, list) and set(map(type, found)) <= {str} else None


def _inputs(value: Any) -> list[Any] | None:
    if not isinstance(value, list):
        return [value] if isinstance(value, str) else None
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    rows = [row for row in value if type(row) is list] if list in kinds else []
    right = kinds <= {str, list} and set(map(type, chain.from_iterable(rows))) <= {int}
    return value if right else None


def _rows(value: Any) -> list[list[int]] | None:
    if not isinstance(value, list):
        return None
    kinds = set(map(type, value))
    if kinds == {list}:
        return value if set(map(type, chain.from_iterable(value))) <= {int} else None
    return [value] if kinds <= {int} else None


def is_pair(item: Any) -> bool:
    """Return whether an item is a list of two strings."""
    return isinstance(item, list) and len(item) == 2 and all(isinstance(part, str) for part in item)


def _pairs(value: Any) -> list[Any] | None:
    if not isinstance(value, list):
        return [value] if isinstance(value, str) else None
    return value if all(isinstance(item, str) or is_pair(item) for item in value) else None


def _documents(value: Any) -> list[Any] | None:
    if not isinstance(value, list):
        return None
    found = [item.get("text") if isinstance(item, dict) else item for item in value]
    return found if all(isinstance(item, str) for item in found) else None


def _questions(value: Any) -> list[Any] | None:
    given = value if isinstance(value, list) else [value]
    found = [[item.get("question"), item.get("context")] if isinstance(item, dict) else item for item in given]
    return found if all(map(is_pair, found)) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value >= 1 else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _thresholds(value: Any) -> Any:
    if isinstance(value, dict):
        return value if all(_number(part) is not None for part in value.values()) else None
    return _number(value)


def _word(*words: str) -> tuple[dict[str, Any], str, Callable[[Any], Any]]:
    def check(value: Any) -> str | None:
        word = value.lower() if isinstance(value, str) else None
        return word if word in words else None

    return {"type": "string", "enum": list(words)}, f"one of {', '.join(words)}", check


def _encodings(value: Any) -> list[str] | None:
    return value if isinstance(value, list) and value and all(one in ("float", "base64") for one in value) else None


def _tokens(value: Any) -> int | None:
    return value if type(value) is int and (value == -1 or value >= 1) else None


def _labels(value: Any) -> list[str] | None:
    return _texts([label.strip() for label in value.split(",")] if isinstance(value, str) else value)


_STRING = {"type": "string"}
_LIST = {"type": "array", "items": _STRING}
_NUMBERS = {"type": "array", "items": {"type": "integer"}}
_PAIR = {"type": "array", "items": _STRING, "minItems": 2, "maxItems": 2}

KINDS: dict[str, tuple[dict[str, Any], str, Callable[[Any], Any]]] = {
    "text": (_STRING, "a string", _text),
    "texts": ({"oneOf": [_STRING, _LIST]}, "a string or a list of strings", _texts),
    "inputs": (
        {"oneOf": [_STRING, _NUMBERS, {"type": "array", "items": {"oneOf": [_STRING, _NUMBERS]}}]},
        "a string, a list of ids, or a list of strings and lists of ids",
        _inputs,
    ),
    "rows": ({"oneOf": [_NUMBERS, {"type": "array", "items": _NUMBERS}]}, "a list of ids or several", _rows),
    "pairs": (
        {"oneOf": [_STRING, {"type": "array", "items": {"oneOf": [_STRING, _PAIR]}}]},
        "a string, or a list of strings and pairs of them",
        _pairs,
    ),
    "documents": (
        {"type": "array", "items": {"oneOf": [_STRING, {"type": "object", "properties": {"text": _STRING}}]}},
        'a list of strings or of {"text": ...}',
        _documents,
    ),
    "questions": (
        {"oneOf": [{"type": "object"}, {"type": "array", "items": {"oneOf": [{"type": "object"}, _PAIR]}}]},
        '{"question": ..., "context": ...}, or a list of such, or of pairs',
        _questions,
    ),
    "whole": ({"type": "integer", "minimum": 1}, "an integer from 1", _whole),
    "thresholds": (
        {"oneOf": [{"type": "number"}, {"type": "object"}]},
        "a number, or a number for each label",
        _thresholds,
    ),
    "flag": ({"type": "boolean"}, "true or false", _flag),
    "object": ({"type": "object"}, "an object", lambda value: value if isinstance(value, dict) else None),
    "objects": (
        {"type": "array", "items": {"type": "object"}},
        "a list of objects",
        lambda value: value if isinstance(value, list) and all(isinstance(one, dict) for one in value) else None,
    ),
    "any": ({}, "anything", lambda value: value),
    "tokens": ({"type": "integer", "minimum": -1}, "-1, or an integer from 1", _tokens),
    "labels": ({"oneOf": [_STRING, _LIST]}, "a list of labels, or comma-separated labels", _labels),
    "true": ({"const": True}, "true, the only value that is supported", lambda value: value if value is True else None),
    "text fields": ({"const": ["text"]}, '["text"]', lambda value: value if value == ["text"] else None),
    "direction": _word("left", "right"),
    "float": _word("float"),
    "float32": _word("float32"),
    "endianness": _word("native", "little"),
    "modality": _word("text"),
    "pooling task": _word("embed", "token_embed", "classify"),
    "encoding": _word("float", "base64"),
    "encodings": (_LIST, "a list of float and base64", _encodings),
    "truncated side": _word("none", "start", "end"),
    "input_type": _word(
        "query", "document", "passage", "search_query", "search_document", "classification", "clustering"
    ),
    "aggregation": _word("first", "average", "max", "simple", "none"),
    "activation": _word("softmax", "sigmoid", "none"),
    "long texts": _word("windows", "truncate", "error"),
    "long texts in windows": _word("windows", "error"),
    "long tokens": _word("truncate", "error"),
}
"""JSON schema, description, and function to the normalized value (None if invalid) of each kind."""


_LISTED = ("inputs", "rows", "pairs", "documents", "questions", "objects", "any")


def read(fields: Sequence[Field], body: Any, *, most: int, path: str = "") -> dict[str, Any]:
    """Return the normalized fields of a request; absent and null fields are None.

    Args:
        fields: the fields of the route.
        body: the JSON value.
        most: maximum number of inputs; longer lists are refused before their members are checked.
        path: prefix of field names in messages.

    Raises:
        RefusedError: a field is missing, invalid or unknown.
    """
    if not isinstance(body, Mapping):
        raise RefusedError(f"found {shown(body, 60)}, expected a JSON object with fields", "body")
    found: dict[str, Any] = {}
    known = [field.name for field in fields]
    for field in fields:
        value = body.get(field.name)
        if value is None:
            if field.required:
                others = [shown(name, 40) for name in islice(body, 9) if name not in known]
                unknown = f" (unknown: {', '.join(others[:3])})" if others else ""
                raise RefusedError(
                    f"{path}{field.name} is missing{unknown}, expected {KINDS[field.kind][1]}", "field",
                    param=path + field.name,
                )  # fmt: skip
            found[field.name] = None
            continue
        if field.kind in _LISTED and isinstance(value, list) and len(value) > most and type(value[0]) is not int:
            raise RefusedError(
                f"{path}{field.name} has {len(value)} inputs, expected at most {most} in a request",
                "limit",
                param=path + field.name,
            )
        _, words, check = KINDS[field.kind]
        found[field.name] = checked = check(value)
        if checked is None:
            raise RefusedError(
                f"{path}{field.name}{_wrong(field.kind, value, check)}, expected {words}", "field",
                param=path + field.name,
            )  # fmt: skip
        if field.fields:
            found[field.name] = read(field.fields, value, most=most, path=f"{path}{field.name}.")
    for name, value in body.items():
        if name not in found and value is not None:
            raise not_a_field(path + name, [path + name for name in known])
    return found


def not_a_field(name: str, known: Sequence[str]) -> RefusedError:
    """Return the error for a field that the route, or the task of the model, does not have."""
    return RefusedError(
        f"unknown field {shown(name, 60)}{nearest(name, known)}, expected {', '.join(known)}", "unknown", param=name
    )


def _wrong(kind: str, value: Any, check: Callable[[Any], Any]) -> str:
    """Return a description of an invalid value; of a list, its first invalid member."""
    if kind in (*_LISTED, "texts") and isinstance(value, list):
        for at, part in enumerate(islice(value, 10_000)):
            if check([part]) is None:
                return f": entry {at} is {shown(part, 60)}"
    return f" is {shown(value, 60)}"
