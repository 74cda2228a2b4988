"""JSON files that say whether they are as they were written: a hash of their values stands among them.

Decides what is hashed (the values in a canonical spelling, so that white space is free) and what is taken for whole.
Files from before there were seals are known by having exactly the keys of their time; a file that lost its seal to a
flipped bit has others, and is damaged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["SEAL", "seal", "unseal"]

SEAL = "seal"


def seal(value: Mapping[str, Any]) -> bytes:
    """Return ``value`` as JSON with its seal as the last key.

    Raises:
        TypeError: it holds what JSON cannot.
    """
    text = json.dumps({**value})
    return json.dumps({**json.loads(text), SEAL: _digest(json.loads(text))}, indent=1).encode()


def unseal(data: bytes, before: Collection[str] | None = None) -> dict[str, Any]:
    """Return the values of a sealed file, its seal left out.

    Args:
        data: the file.
        before: the keys of such a file from before there were seals, taken as it is; None where there was none.

    Raises:
        ValueError: it is no JSON object, or not as it was written.
    """
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}, expected a JSON object")
    if before is not None and value.keys() == set(before):
        return value
    found = value.pop(SEAL, None)
    if found is None:
        raise ValueError("it has no seal")
    if found != _digest(value):
        raise ValueError("its seal is not that of its values, so it is not as it was written")
    return value


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
