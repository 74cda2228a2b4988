"""Labels in ``config.json``: the number that transformers derives, with the stored names.

Decides the handling of tables with gaps, of numbers that contradict them, and of unknown problem types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flodl.errors import ConfigError, printable, shown

__all__ = ["MAX_LABELS", "PROBLEM_TYPES", "label_names", "renamed", "without_unknown_problem"]

MAX_LABELS = 100_000
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


def without_unknown_problem(source: Mapping[str, Any], overruled: list[str] | None) -> Mapping[str, Any]:
    """Return the file without a problem type that transformers ignores; report it in ``overruled`` if given."""
    found = source.get("problem_type")
    if not isinstance(found, str) or found in PROBLEM_TYPES or (found and overruled is None):
        return source
    if found and overruled is not None:
        overruled.append(
            f"problem_type: {shown(found, 40)}, which is none of {', '.join(PROBLEM_TYPES)}; none is taken"
        )
    return {key: value for key, value in source.items() if key != "problem_type"}


def label_names(
    source: Mapping[str, Any], problems: list[str], notes: list[str], overruled: list[str] | None = None
) -> list[str]:
    """Return label names by id: the number that transformers derives, absent names as LABEL_i.

    Args:
        source: the file.
        problems: receives refused values.
        notes: receives notes for the reader.
        overruled: receives names of no label; None if such names are refused.
    """
    overruled = problems if overruled is None else overruled
    names = source.get("id2label")
    stated = source.get("num_labels")
    if stated is not None and (isinstance(stated, bool) or not isinstance(stated, int) or not 0 < stated <= MAX_LABELS):
        problems.append(f"num_labels: found {shown(stated, 40)}; expected an integer from 1 to {MAX_LABELS}")
        return []
    if names is None:
        return [f"LABEL_{i}" for i in range(stated or 2)]
    if not isinstance(names, Mapping) or len(names) > MAX_LABELS:
        problems.append(f"id2label: found {shown(names, 60)}; expected a table of at most {MAX_LABELS} names by id")
        return []
    if stated is not None and names and len(names) != stated:
        # transformers takes the number and drops all names, so that no name is given to a wrong class.
        notes.append(f"id2label: names {len(names)} labels, num_labels is {stated}; the number is used, without names")
        return [f"LABEL_{i}" for i in range(stated)]
    by_id: dict[int, str] = {}
    for key, name in names.items():
        index = int(key) if re.fullmatch(r"-?[0-9]{1,7}", str(key)) else None
        beyond = stated is not None and index is not None and not 0 <= index < stated
        if index is None or beyond or not isinstance(name, (str, int, float)) or index in by_id:
            problems.append(
                f"id2label: found {printable(str(key), 40)}: {shown(name, 40)}; expected one name for each "
                f"id from 0{'' if stated is None else f' to num_labels - 1 = {stated - 1}'}"
            )
            return []
        by_id[index] = str(name)
    size = stated or len(by_id) or 2
    if strays := sorted(by_id.keys() - set(range(size))):
        # Transformers counts the names, whatever their numbers.
        ids = ", ".join(map(str, strays[:5])) + (", ..." if len(strays) > 5 else "")
        overruled.append(
            f"id2label: names {size} labels, and their ids are not 0 to {size - 1}: there are {size} labels, the names "
            f"of {ids} are no label's, and labels without a name are LABEL_i"
        )
    return [by_id.get(i, f"LABEL_{i}") for i in range(size)]


def renamed(
    labels: Sequence[str], thresholds: Mapping[str, float] | None, names: Mapping[int, str]
) -> tuple[tuple[str, ...], dict[str, float] | None]:
    """Return labels and thresholds under other names.

    Args:
        labels: the labels in the order of their ids.
        thresholds: thresholds by label, if there are any.
        names: the new names by id.

    Raises:
        ConfigError: the ids are not those of the labels.
    """
    numbered = {int(number): str(name) for number, name in names.items()}
    if sorted(numbered) != list(range(len(labels))):
        raise ConfigError(
            f"id2label: found the ids {sorted(numbered)[:20]}, expected 0 to {len(labels) - 1}. Pass num_labels= or "
            "id2label= to from_pretrained for another number of labels.",
            problems=["id2label"],
        )
    new = {label: numbered[number] for number, label in enumerate(labels)}
    kept = None if thresholds is None else {new[label]: value for label, value in thresholds.items()}
    return tuple(numbered[number] for number in sorted(numbered)), kept
