"""``config.json`` as a file, read before its keys are interpreted and changed for an export; and the labels in it.

Decides the handling of label tables with gaps, of numbers that contradict them, and of unknown problem types.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl.errors import ConfigError, printable, shown
from flodl_hf.checkpoints.folders import ADAPTER_CONFIG, CONFIG_NAME, is_entry, read_member, refused
from flodl_hf.errors import ExportError, PredictError

if TYPE_CHECKING:
    from torch import Tensor

MAX_CONFIG_BYTES = 1_000_000  # the largest on the Hub are label lists of some ten thousand entries
_MOST_DIGITS = 300  # less than the largest float has

# Other kinds of folders without config.json.
_ANOTHERS = {
    "gliner_config.json": "By gliner_config.json this is GLiNER, another architecture; its own library runs it. ",
    ADAPTER_CONFIG: (
        f"By {ADAPTER_CONFIG} this is an adapter; `flodl-hf merge BASE ADAPTER --out DIR` writes a whole model. "
    ),
}


def config_text_of(folder: Path) -> str:
    """Return the text of a folder's ``config.json``.

    Raises:
        ConfigError: there is none, or it is no text.
    """
    path = folder / CONFIG_NAME
    if not is_entry(folder, CONFIG_NAME):
        another = next((hint for name, hint in _ANOTHERS.items() if is_entry(folder, name)), "")
        present = sorted(p.name for p in folder.iterdir())[:12] if folder.is_dir() else []
        found = f"does not exist. The folder contains: {', '.join(present) or 'nothing'}. {another}It is needed"
        expected = "the configuration of a Hugging Face model. Give the folder of config.json and the weights"
        raise refused(path, found, expected, problems=[CONFIG_NAME], kind=ConfigError)
    data = read_member(folder, CONFIG_NAME, MAX_CONFIG_BYTES, ConfigError)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        found = f"not UTF-8 text at byte {fault.start}"
        expected = "JSON in UTF-8. Save it so, or fetch it again"
        raise refused(path, found, expected, problems=["encoding"], kind=ConfigError) from None


def read_json(text: str | bytes, path: str, repeated: list[str] | None = None) -> dict[str, Any]:
    """Return the object in ``text``.

    Args:
        text: the JSON.
        path: its name, for messages.
        repeated: receives duplicate keys, of which the last counts as in transformers, and permits NaN and infinities;
            without it both are refused.

    Raises:
        ConfigError: too large, not UTF-8, not JSON, not an object, or nested too deeply.
    """

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
            if repeated is None:
                raise ValueError(f"key {printable(names[0])} is present twice")
            repeated.extend(names)
        return found

    def constant(word: str) -> float:
        if repeated is None:
            raise ValueError(f"{word}, which JSON does not have")
        return float(word)

    try:
        if len(text) > MAX_CONFIG_BYTES:
            raise ValueError(f"{len(text)} bytes, above the limit of {MAX_CONFIG_BYTES}")
        # Python refuses to read very long integers; as floats they are infinite, which no key accepts.
        value = json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            parse_int=lambda digits: int(digits) if len(digits) <= _MOST_DIGITS else float(digits),
            parse_constant=constant,
            object_pairs_hook=table,
        )
        if not isinstance(value, dict):
            raise ValueError(f"a JSON {type(value).__name__}")
        copy.deepcopy(value)  # recursive functions can follow it
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        found = f"not JSON that can be used ({problem})"
        expected = "a JSON object. Fetch the file again or correct it"
        raise refused(path, found, expected, problems=[problem], kind=ConfigError) from None
    return value


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


LABEL_THRESHOLDS = "label_thresholds"
"""The key: a table of numbers from 0 to 1 by label name."""


def thresholds_of(stated: Any, labels: Sequence[str], notes: list[str]) -> dict[str, float] | None:
    """Return the thresholds in a file's key, in the order of the labels; None if absent or invalid.

    Args:
        stated: the key's value.
        labels: names of the model's labels.
        notes: receives a sentence if the value is not a threshold for each label.
    """
    if stated is None:
        return None
    values: list[Any] = list(stated.values()) if isinstance(stated, Mapping) and set(stated) == set(labels) else [None]
    if all(type(value) in (int, float) and 0 <= value <= 1 for value in values):
        return {name: float(stated[name]) for name in labels}
    notes.append(
        f"{LABEL_THRESHOLDS}: found {shown(stated, 60)}; expected a number from 0 to 1 for each of the labels; predict "
        "knows no tuned thresholds"
    )
    return None


def tuned_thresholds(
    thresholds: Mapping[str, float] | None, threshold: str, function_to_apply: str | None
) -> Mapping[str, float]:
    """Return the stored thresholds by label, if a call requests them.

    Args:
        thresholds: the thresholds of the configuration.
        threshold: the string that the call passed.
        function_to_apply: the function that the call requests; None for the configuration's.

    Raises:
        PredictError: the string is not "tuned", the model stores none, or the scores use another function than the
            one that the thresholds were chosen for.
    """
    if threshold == "tuned" and thresholds is not None and function_to_apply is None:
        return thresholds
    function = "" if function_to_apply is None else f" with function_to_apply={function_to_apply!r}"
    raise PredictError(
        f"predict: threshold={printable(threshold, 40)}{function}; expected a number, numbers by label, or 'tuned' for "
        f"a model with {LABEL_THRESHOLDS} in config.json and the scores that they were chosen for. "
        "finetune(tune_thresholds=True) stores them",
        threshold=threshold,
        function_to_apply=function_to_apply,
    )


ACTIVATIONS = (
    "Identity", "Sigmoid", "Softmax", "Tanh", "ReLU", "GELU", "SiLU", "CELU", "ELU", "GLU", "Hardshrink", "Hardsigmoid",
    "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid", "LogSoftmax", "Mish", "RReLU", "ReLU6", "SELU", "Softmin",
    "Softplus", "Softshrink", "Softsign", "Tanhshrink",
)  # fmt: skip
"""Classes of ``torch.nn``; each is applied as in evaluation mode, along the last dimension where it has one."""

_SCORES_KEY, _OLD_KEY = "sentence_transformers", "sbert_ce_default_activation_function"
_OVER_ONE_DIMENSION = ("Softmax", "Softmin", "LogSoftmax")


def activation_at(path: Any) -> str | None:
    """Return the class name of the activation at a dotted path such as ``torch.nn.modules.activation.Tanh``.

    None if the path is not in torch, or names a class that is not in `ACTIVATIONS`.
    """
    module, _, name = str(path).rpartition(".")
    inside_torch = module == "torch.nn" or module.startswith("torch.nn.modules.")
    return name if inside_torch and name in ACTIVATIONS else None


@cache
def _module(name: str) -> Any:
    from torch import nn

    options = {"dim": -1} if name in _OVER_ONE_DIMENSION else {}
    return getattr(nn, name)(**options).eval()


def activate(name: str, values: Tensor) -> Tensor:
    """Return the values after the activation of this class name."""
    return _module(name)(values)


def stored_activation(source: Mapping[str, Any]) -> str | None:
    """Return the path of the activation's class that a configuration stores; None if it stores none."""
    settings = source.get(_SCORES_KEY)
    stated = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    found = stated or source.get(_OLD_KEY)
    return None if found is None else str(found)


def activation_changes(source: Mapping[str, Any], activation: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return the keys to write and the keys to remove so that a configuration stores this activation."""
    if activation == stored_activation(source):
        return {}, []
    changed = {} if activation is None else {_SCORES_KEY: {"activation_fn": activation}}
    return changed, [key for key in (_SCORES_KEY, _OLD_KEY) if key in source and key not in changed]


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
