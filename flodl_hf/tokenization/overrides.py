"""Settings of ``tokenizer_config.json`` that replace parts of ``tokenizer.json``, as in transformers 4 and 5.

Decides: which keys replace what: ``do_lower_case``, ``strip_accents``, ``tokenize_chinese_chars``, ``keep_accents`` the
normalizer; ``add_prefix_space`` and ``split_by_punct`` the pre-tokenizer.
Leaves to others: everything else in ``tokenizer.json``, which is used as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flodl_hf.families.schema import FamilyTokenizer

Part = dict[str, Any]
_INSIDE = ("normalizers", "pretokenizers", "processors")


def parts_of(component: Part | None) -> Iterator[Part]:
    """Yield a component and the components in it."""
    if isinstance(component, dict):
        yield component
        for key in _INSIDE:
            for part in component.get(key) or ():
                yield from parts_of(part)


def _set(component: Part | None, kind: str, key: str, value: Any) -> list[Any]:
    """Set a key of every part of a kind; return the values that differed."""
    found = [part for part in parts_of(component) if part.get("type") == kind and part.get(key) != value]
    old = [part.get(key) for part in found]
    for part in found:
        part[key] = value
    return old


def _steps(component: Part | None, kind: str) -> Part:
    """Return a component as a sequence."""
    if isinstance(component, dict) and component.get("type") == "Sequence":
        return component
    inside = "normalizers" if kind == "normalizer" else "pretokenizers"
    return {"type": "Sequence", inside: [] if component is None else [component]}


def _switch(definition: Part, kinds: tuple[str, ...], wanted: bool, first: tuple[str, ...] = ()) -> list[Any]:
    """Add or remove normalizers without settings; return the former state if it differed.

    Args:
        definition: the content of ``tokenizer.json``.
        kinds: the normalizers, in order.
        wanted: whether they are wanted.
        first: normalizers that come before them.
    """
    sequence = _steps(definition.get("normalizer"), "normalizer")
    parts = sequence["normalizers"]
    present = any(part.get("type") in kinds for part in parts)
    if present == wanted:
        return []
    if wanted:
        at = max((i + 1 for i, part in enumerate(parts) if part.get("type") in first), default=0)
        parts[at:at] = [{"type": kind} for kind in kinds]
    else:
        sequence["normalizers"] = [part for part in parts if part.get("type") not in kinds]
    definition["normalizer"] = sequence
    return [present]


def _lower(definition: Part, rules: FamilyTokenizer, value: bool) -> list[Any]:
    if rules.lowercase is None:
        return []
    if any(part.get("type") == "BertNormalizer" for part in parts_of(definition.get("normalizer"))):
        return _set(definition["normalizer"], "BertNormalizer", "lowercase", value)
    if not rules.files[0].endswith(".model"):
        return []
    return _switch(definition, ("Lowercase",), value, ("StripAccents", "Replace") if rules.steps else ())


def _accents(definition: Part, rules: FamilyTokenizer, kept: bool) -> list[Any]:
    if "accents unless kept" not in rules.steps:
        return []
    return [not state for state in _switch(definition, ("NFKD", "StripAccents"), not kept, ("Replace",))]


def _prefix(definition: Part, rules: FamilyTokenizer, value: bool) -> list[Any]:
    splitter = definition.get("pre_tokenizer")
    if rules.files[0] == "vocab.json" and rules.build != "suffixed":
        _set(definition.get("post_processor"), "RobertaProcessing", "add_prefix_space", value)
        return _set(splitter, "ByteLevel", "add_prefix_space", value)
    if not rules.prefix:
        return []
    scheme = "always" if value else "never"
    if value and any(part.get("prepend_scheme") == "first" for part in parts_of(splitter)):
        return []
    return _set(splitter, "Metaspace", "prepend_scheme", scheme)


def _trim(definition: Part, rules: FamilyTokenizer, value: bool) -> list[Any]:
    if rules.template != "roberta" or rules.files[0] != "vocab.json":
        return []
    return _set(definition.get("post_processor"), "RobertaProcessing", "trim_offsets", value)


def _punctuation(definition: Part, rules: FamilyTokenizer, value: bool) -> list[Any]:
    if rules.split_punctuation is None:
        return []
    sequence = _steps(definition.get("pre_tokenizer"), "pre_tokenizer")
    parts = sequence["pretokenizers"]
    if (present := any(part.get("type") == "Punctuation" for part in parts)) == value:
        return []
    others = [part for part in parts if part.get("type") != "Punctuation"]
    sequence["pretokenizers"] = [{"type": "Punctuation", "behavior": "Isolated"}, *others] if value else others
    definition["pre_tokenizer"] = sequence
    return [present]


def applied(definition: Part, rules: FamilyTokenizer, stated: Mapping[str, Any]) -> list[str]:
    """Change a definition where settings replace its parts; return a note for each change.

    Args:
        definition: the content of ``tokenizer.json``, at least its normalizer, pre-tokenizer and post-processor.
        rules: of the tokenizer class.
        stated: ``tokenizer_config.json``.
    """
    notes = []
    changes = {
        "do_lower_case": _lower, "keep_accents": _accents, "add_prefix_space": _prefix, "split_by_punct": _punctuation,
        "trim_offsets": _trim,
    }  # fmt: skip
    for key, change in changes.items():
        if isinstance(value := stated.get(key), bool):
            notes += [_note(key, value, old) for old in change(definition, rules, value)[:1]]
    if rules.lowercase is not None:
        for key, name in (("strip_accents", "strip_accents"), ("tokenize_chinese_chars", "handle_chinese_chars")):
            value = stated.get(key)
            if isinstance(value, bool) or (key == "strip_accents" and key in stated and value is None):
                old = _set(definition.get("normalizer"), "BertNormalizer", name, value)
                notes += [_note(key, value, state) for state in old[:1]]
    return notes


def _note(key: str, value: Any, old: Any) -> str:
    old = {"always": True, "never": False}.get(old, old)
    return (
        f"{key}: {value} in tokenizer_config.json and {old} in tokenizer.json; the former is used, as in transformers"
    )
