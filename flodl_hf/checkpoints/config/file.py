"""``config.json`` as a file: found in a folder and read strictly, before its keys are interpreted."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flodl.errors import ConfigError, printable
from flodl_hf.checkpoints.weights.checkpoint.safe_open import is_entry, read_member
from flodl_hf.checkpoints.weights.file_names import CONFIG_NAME

MAX_CONFIG_BYTES = 1_000_000  # the largest on the Hub are label lists of some ten thousand entries
_MOST_DIGITS = 400  # more than the largest float has
_MOST_LEVELS = 100  # those on the Hub have less than ten


# Other kinds of folders without config.json.
_ANOTHERS = {
    "gliner_config.json": (
        "By gliner_config.json this is GLiNER, another architecture, which finds spans of any label; its own library "
        "runs it. "
    ),
}


def config_text_of(folder: Path) -> str:
    """Return the text of a folder's ``config.json``.

    Raises:
        ConfigError: there is none, or it is no text.
    """
    path = folder / CONFIG_NAME
    if not is_entry(folder, CONFIG_NAME):
        another = next((said for name, said in _ANOTHERS.items() if is_entry(folder, name)), "")
        present = sorted(p.name for p in folder.iterdir())[:12] if folder.is_dir() else []
        raise ConfigError(
            f"{path} does not exist; expected the configuration of a Hugging Face model. The folder contains: "
            f"{', '.join(present) or 'nothing'}. {another}Give the folder of config.json and the weights.",
            where=str(path),
            problems=["config.json"],
        )
    data = read_member(folder, CONFIG_NAME, MAX_CONFIG_BYTES, ConfigError)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise ConfigError(
            f"{path}: not UTF-8 text at byte {fault.start}; expected JSON in UTF-8. Save it so, or fetch it again.",
            where=str(path),
            problems=["encoding"],
        ) from None


@dataclass(frozen=True)
class _NoNumber:
    """Placeholder for an invalid number until its key is known."""

    why: str


def _whole_number(digits: str) -> Any:
    # Python refuses to read longer ones, without reporting their position.
    return int(digits) if len(digits) <= _MOST_DIGITS else _NoNumber(f"a number of {len(digits):,} digits")


@dataclass
class Odd:
    """Deviations from JSON that Python's reader, and so transformers, accepts.

    Attributes:
        twice: duplicate keys of one table, at any depth; the last of them counts.
        not_finite: top-level keys with a NaN or an infinity in their value.
    """

    twice: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)


def _holds_no_number(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_no_number, value.values()))
    if isinstance(value, list):
        return any(map(_holds_no_number, value))
    return isinstance(value, float) and not math.isfinite(value)


def _is_deep(value: Any) -> bool:
    """Return whether tables and lists are nested deeper than recursive functions can follow."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        inside = (part.values() if isinstance(part, dict) else part for part in level)
        level = [one for values in inside for one in values if isinstance(one, (dict, list))]
        if not level:
            return False
    return True


def read_json(text: str | bytes, where: str, odd: Odd | None = None) -> dict[str, Any]:
    """Return the object in ``text``, read strictly.

    Args:
        text: the JSON.
        where: its name, for messages.
        odd: receives duplicate keys and keys with NaN, which are refused without it.

    Raises:
        ConfigError: too large, not UTF-8, not JSON, not an object, a duplicate key, NaN, or nested too deeply.
    """

    def fault(found: str) -> ConfigError:
        return ConfigError(
            f"{where}: {found}; expected a JSON object. Fetch the file again or correct it.",
            where=where,
            problems=[found],
        )

    if len(text) > MAX_CONFIG_BYTES:
        raise fault(f"{len(text)} bytes, above the limit of {MAX_CONFIG_BYTES}")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise fault(f"not UTF-8 text at byte {error.start}") from None

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            twice = [name for name, times in Counter(name for name, _ in items).items() if times > 1]
            if odd is None:
                raise fault(f"key {printable(twice[0])} is present twice")
            odd.twice += [name for name in twice if name not in odd.twice]
        for name, value in items:
            for part in value if isinstance(value, list) else (value,):
                if isinstance(part, _NoNumber):
                    raise fault(f"{printable(name)} is {part.why}")
        return result

    def no_number(word: str) -> Any:
        return _NoNumber(f"{word}, which JSON does not have") if odd is None else float(word)

    try:
        value = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_constant=no_number,
            parse_int=_whole_number,
        )
    except ConfigError:
        raise
    except RecursionError:
        raise fault("nested too deeply") from None
    except ValueError as error:
        raise fault(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise fault(f"a JSON {type(value).__name__}")
    if _is_deep(value):
        raise fault("nested too deeply")
    if odd is not None and ("NaN" in text or "Infinity" in text):
        odd.not_finite += [name for name, one in value.items() if _holds_no_number(one)]
    return value
