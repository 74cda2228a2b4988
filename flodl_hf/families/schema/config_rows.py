"""Rows of ``config.json``: how one key becomes one field, and how all other keys are treated.

A key is *used* (a row reads it into a field), *ignored* (known to have no effect, with the reason, sometimes only for
one value), *refused* (it changes the numbers and is not supported), or *noted*: no family knows it, its value is plain,
and it has no effect on numbers here or in transformers. All faults of a file are collected and raised once. The file
of a family defines its fields; ``shared_keys.py`` defines the keys that all families share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from flodl.errors import ConfigError, capped, nearest, shown
from flodl_hf.nn.layers import ACTIVATIONS

REQUIRED: Any = object()
"""The default of a row whose key has to be in the file."""


@dataclass(frozen=True)
class Check:
    """A test of one value.

    Args:
        expected: a description of the accepted values.
        accepts: returns the value to use, or raises ValueError.
        names: the known spellings; the nearest is suggested.
    """

    expected: str
    accepts: Callable[[Any], Any]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One line of a family's table: our field, the key in ``config.json``, its check and its default.

    ``aliases`` are further names of the key. With ``win``, the value of an alias replaces the value of the key, as in
    transformers.
    """

    field: str
    key: str
    check: Check
    default: Any = REQUIRED
    aliases: tuple[str, ...] = ()
    win: bool = False


def changed(rows: Sequence[Row], changes: Mapping[str, Mapping[str, Any]]) -> tuple[Row, ...]:
    """Return ``rows`` with other checks or defaults for some fields.

    Raises:
        KeyError: a field that no row has.
    """
    fields = {row.field for row in rows}
    if unknown := [name for name in changes if name not in fields]:
        raise KeyError(f"changed: no row has the field {unknown[0]!r}; expected one of {', '.join(sorted(fields))}")
    return tuple(replace(row, **changes.get(row.field, {})) for row in rows)


@dataclass(frozen=True)
class IgnoredKey:
    """A key without effect.

    With ``only``, it has no effect for these values, or switched off where null is one of them; with ``repeats``, if it
    equals our field of that name (``head_width`` is the width of a head). Other values are refused, or ignored where
    transformers does not read a key that ``repeats``; ``read`` means that transformers reads it. The load report
    lists a ``noted`` key that differs from ``usual`` or from the value that it repeats.
    """

    key: str
    reason: str
    only: tuple[Any, ...] | None = None
    repeats: str | None = None
    read: bool = False
    noted: bool = False
    usual: Any = False


@dataclass(frozen=True)
class Foreign:
    """A key of another architecture; it changes the numbers, so it is refused unless it is switched off."""

    key: str
    what: str


def _number(value: Any) -> bool:
    if isinstance(value, int):  # math functions accept no integer of any size
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


def count(least: int = 1, most: int = 65_536) -> Check:
    """An integer from ``least`` to ``most``."""

    def accepts(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError
        return value

    return Check(f"an integer from {least} to {most}", accepts)


def token_id() -> Check:
    """A token's id: an integer from 0."""
    return count(0, 100_000_000)


def padding_id() -> Check:
    """The padding id: null, the id of a token, or -1, which torch reads as the last row of the word table."""
    return optional(count(-1, 100_000_000))


def within_vocabulary(token: int) -> Callable[[Mapping[str, Any]], int | None]:
    """Return a row's default for the id of a token: this one, or None if the vocabulary is too small."""

    def default(fields: Mapping[str, Any]) -> int | None:
        return token if token < fields.get("vocab_size", token + 1) else None

    default.__doc__ = f"{token}, where the vocabulary contains it"
    return default


def number(expected: str, within: Callable[[float], bool]) -> Check:
    """A finite number for which ``within`` is true."""

    def accepts(value: Any) -> float:
        if not _number(value) or not within(value):
            raise ValueError
        return float(value)

    return Check(expected, accepts)


def fraction() -> Check:
    """A dropout probability from 0 to below 1."""
    return number("a number in [0, 1)", lambda value: 0 <= value < 1)


def epsilon() -> Check:
    """A small number that keeps a division finite; zero adds nothing."""
    return number("a number in [0, 1]", lambda value: 0 <= value <= 1)


def boolean() -> Check:
    """True or false."""
    return replace(one_of(True, False), expected="true or false")


def one_of(*values: Any) -> Check:
    """One of the listed values."""

    def accepts(value: Any) -> Any:
        if not any(value == known and type(value) is type(known) for known in values):
            raise ValueError
        return value

    return Check("one of " + ", ".join(map(repr, values)), accepts, tuple(v for v in values if isinstance(v, str)))


def activation() -> Check:
    """The name of an activation function."""
    return one_of(*ACTIVATIONS)


def optional(check: Check) -> Check:
    """Null, or a value that ``check`` accepts."""
    return Check(f"null or {check.expected}", lambda value: None if value is None else check.accepts(value))


def read_rows(
    source: Mapping[str, Any],
    rows: Sequence[Row],
    problems: list[str],
    overruled: list[str] | None = None,
    left_out: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields that ``rows`` read from ``source``; faults are appended to ``problems``.

    A callable default receives the fields that were read before it. ``overruled`` receives a sentence for each value
    that another name of its key replaces in transformers; without it such a value is a fault. ``left_out`` contains
    values of required fields without a key; other required fields without a key are faults.
    """
    fields: dict[str, Any] = {}
    usual = left_out or {}
    for row in rows:
        named = [key for key in (row.key, *row.aliases) if key in source]
        if not named:
            if row.default is REQUIRED and row.field in usual:
                fields[row.field] = usual[row.field]
            elif row.default is REQUIRED:
                problems.append(f"{row.key}: missing; expected {row.check.expected}")
            else:
                fields[row.field] = row.default(fields) if callable(row.default) else row.default
            continue
        accepted: dict[str, Any] = {}
        for key in named:
            try:
                accepted[key] = row.check.accepts(source[key])
            except (ValueError, TypeError):
                hint = nearest(source[key], row.check.names) if isinstance(source[key], str) else ""
                problems.append(f"{key}: found {shown(source[key], 60)}{hint}; expected {row.check.expected}")
        differing = [key for key in accepted if accepted[key] != accepted.get(named[0])]
        if len(accepted) == len(named) == 2 and differing and row.win and overruled is not None:
            first, holds = named
            said = f"{holds}, another name of the same setting, says {accepted[holds]}"
            overruled.append(f"{first}: {shown(source[first], 60)}; {said}")
            fields[row.field] = accepted[holds]
        elif differing and named[0] in accepted:
            problems.append(
                f"{named[0]}: found {shown(source[named[0]], 60)} and {differing[0]} "
                f"{shown(source[differing[0]], 60)}, another name of the same setting; expected one value"
            )
        elif len(accepted) == len(named):
            fields[row.field] = accepted[named[0]]
    return fields


def _off(value: Any) -> bool:
    """Return whether a value is off: null, false, empty, or only empty values."""
    if isinstance(value, Mapping):
        return all(map(_off, value.values()))
    return value is None or value is False or value == "" or (isinstance(value, list) and all(map(_off, value)))


class _Verdict(NamedTuple):
    """What is reported of a key that no row reads: a note, or a fault; nothing if both are empty.

    Attributes:
        note: on a key without effect.
        fault: why the file is refused.
        ignored: replaces the fault where settings that transformers ignores are ignored.
    """

    note: str = ""
    fault: str = ""
    ignored: str = ""


def triage(
    source: Mapping[str, Any], fields: Mapping[str, Any], problems: list[str], *, rows: Sequence[Row],
    ignored_keys: Sequence[IgnoredKey], foreign: Sequence[Foreign], elsewhere: Callable[[str], Row | None],
    read: Sequence[str] = (), overruled: list[str] | None = None, strict: bool = False,
) -> list[str]:  # fmt: skip
    """Decide on keys that no row reads: add faults to ``problems``, and return notes on keys without effect.

    Keys that begin with an underscore are ignored, and so are unknown keys that are switched off (null, false, or
    an empty list, text or table).

    Args:
        source: the file.
        fields: the values read by the rows.
        problems: receives the faults.
        rows: the family's rows and the shared ones.
        ignored_keys: keys without effect, first of the family, then common ones.
        foreign: keys of other architectures, which change the numbers.
        elsewhere: ``elsewhere(key)`` returns the row of another family that reads a key, or None.
        read: keys read by other means than rows, and those that the caller ignores.
        overruled: receives a sentence for each setting that contradicts the family's own and that transformers ignores;
            None refuses such settings.
        strict: also refuse keys that are unknown to every family.
    """
    used = {key for row in rows for key in (row.key, *row.aliases)}
    ignored = {entry.key: entry for entry in reversed(ignored_keys)}
    others = {entry.key: entry for entry in foreign}
    notes: list[str] = []
    for key, value in source.items():
        if key in used or key in read or (key not in ignored and (key.startswith("_") or _off(value))):
            continue
        if key in ignored and _is_usual(ignored[key], value, fields):
            continue
        name = key if len(key) <= 100 else key[:97] + "..."
        found = f"{name}: found {shown(value, 60)}"
        if key in ignored:
            verdict = _without_effect(ignored[key], value, fields)
        elif key in others:
            verdict = _Verdict(
                fault=f"{found}; expected it absent or off, for {others[key].what}. transformers without the code of "
                "the repository ignores it and gives other numbers than the model was trained with"
            )
        elif (row := elsewhere(key)) is not None:
            verdict = _of_others(row, key, value, fields, rows)
        elif meant := _misspelt(key, source, rows):
            verdict = _Verdict(
                ignored=f"{name}: {shown(value, 60)}; {meant} is absent and takes its default",
                fault=f"{found}, a setting that is not understood; expected one that is, did you mean {meant!r}? "
                "transformers ignores it and uses the default",
            )
        elif strict or (isinstance(value, Mapping) and source.get("auto_map")):
            # Code of the repository may read a table; without such code transformers ignores it.
            hint = nearest(key, [*used, *read, *ignored])
            verdict = _Verdict(fault=f"{found}, a setting that is not understood; expected one that is{hint}")
        else:
            verdict = _Verdict(note=f"{name}: {shown(value, 60)} is not known to any family and changes nothing")
        if verdict.note:
            notes.append(verdict.note)
        elif verdict.ignored and overruled is not None:
            overruled.append(verdict.ignored)
        elif verdict.fault:
            problems.append(verdict.fault)
    return notes


def _is_usual(entry: IgnoredKey, value: Any, fields: Mapping[str, Any]) -> bool:
    """Return whether nothing is reported of a key that has no effect."""
    if entry.repeats is not None:
        expected = _repeated(entry.repeats, fields)
        return _off(value) or expected is None or value == expected
    if entry.only is not None and value not in entry.only and not (None in entry.only and _off(value)):
        return False
    return not entry.noted or value is None or value == entry.usual or (entry.usual is False and _off(value))


def _without_effect(entry: IgnoredKey, value: Any, fields: Mapping[str, Any]) -> _Verdict:
    """Return the verdict on a key that has no effect, for a value that `_is_usual` does not accept."""
    found, note = f"{entry.key}: found {shown(value, 60)}", ""
    if entry.noted:
        note = f"{entry.key}: {shown(value, 60)} changes no number here ({entry.reason})"
    if entry.repeats is not None:
        expected = _repeated(entry.repeats, fields)
        fault = f"{found}; expected {expected!r} ({entry.reason})"
        if entry.noted or entry.read:
            return _Verdict(note, fault)
        ignored = f"{entry.key}: {shown(value, 60)}; the sizes give {expected!r}"
        return _Verdict(fault=f"{fault}; transformers ignores it", ignored=ignored)
    if entry.only is not None and value not in entry.only and not (None in entry.only and _off(value)):
        allowed = " or ".join(repr(v) for v in entry.only)
        return _Verdict(fault=f"{found}, which is not supported; expected {allowed} ({entry.reason})")
    return _Verdict(note)


def _of_others(row: Row, key: str, value: Any, fields: Mapping[str, Any], rows: Sequence[Row]) -> _Verdict:
    """Return the verdict on a key that another family reads and that transformers ignores in this one."""
    own = next((mine.key for mine in rows if mine.field == row.field), None)
    if row.field.endswith("dropout"):
        return _Verdict(f"{key}: {shown(value, 60)} is a dropout of other families and changes nothing")
    if own and row.field not in fields:  # wrong itself, and reported already
        return _Verdict()
    expected = fields[row.field] if own else _usual(row, fields)
    try:
        read = row.check.accepts(value)
    except (ValueError, TypeError):
        read = value
    if read == expected:
        return _Verdict()
    wanted = f"{own}, which this family reads" if own else "it absent, for this family has none"
    return _Verdict(
        ignored=f"{key}: {shown(value, 60)}; {f'{own} is {expected!r}' if own else 'this family has none'}",
        fault=f"{key}: found {shown(value, 60)}, a setting of other families; expected {wanted}",
    )


def _misspelt(key: str, source: Mapping[str, Any], rows: Sequence[Row]) -> str | None:
    """Return the similar key that a row reads and that the file lacks; None without one."""
    absent = [row.key for row in rows if not any(name in source for name in (row.key, *row.aliases))]
    return next(iter(get_close_matches(key, absent, n=1, cutoff=0.88)), None)


def refuse(problems: Sequence[str], source: str, model_type: str) -> ConfigError:
    """Return the error that lists ``problems`` of one file."""
    return ConfigError(
        f"{source}: {len(problems)} problem(s) in this {model_type} configuration:\n{capped(list(problems))}\n"
        "Correct the values, or remove what does not belong; a key that you know to be harmless can be ignored "
        'with ignore_config_keys=("the_key",).',
        where=source,
        model_type=model_type,
        problems=list(problems),
    )


def _repeated(field: str, fields: Mapping[str, Any]) -> Any:
    """Return our field, or the width of a head; None if the file has a fault in it."""
    if field == "head_width":
        hidden, heads = fields.get("hidden_size"), fields.get("num_heads")
        return hidden // heads if hidden and heads else None
    return fields.get(field)


def _usual(row: Row, fields: Mapping[str, Any]) -> Any:
    """Return the value of another family's row for a file without its key; None if it depends on that family."""
    try:
        usual = row.default(fields) if callable(row.default) else row.default
    except KeyError:
        return None
    return None if usual is REQUIRED else usual
