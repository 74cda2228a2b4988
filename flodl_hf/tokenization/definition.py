"""The tokenizer of a folder's files: ``tokenizer.json``, or one that is built from the vocabulary files.

Decides: which of the two is read, and that a definition without post-processor gets the template of its class.
Leaves to others: building (``build.py``), tokens that only settings
files name (``added.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tokenizers

from flodl.errors import printable
from flodl_hf.errors import TokenizerError
from flodl_hf.families import named
from flodl_hf.families.schema import FamilyTokenizer
from flodl_hf.tokenization.added import add_tokens
from flodl_hf.tokenization.backend import load_json
from flodl_hf.tokenization.classes import (
    PYTHON_BUILDERS,
    WITHOUT_CLASS,
    class_name,
    class_rules,
    guess_model_type,
    rules_of,
)
from flodl_hf.tokenization.guard import translated_errors
from flodl_hf.tokenization.settings import ROLES, check_keys, content, said_of
from flodl_hf.tokenization.source import Source, parse_json
from flodl_hf.tokenization.templates import frame, template_ends
from flodl_hf.tokenization.words import Part, parts_of


def _set(component: Part | None, kind: str, key: str, value: Any) -> list[Any]:
    """Set a key of every part of a kind; return the values that differed."""
    found = [part for part in parts_of(component) if part.get("type") == kind and part.get(key) != value]
    old = [part.get(key) for part in found]
    for part in found:
        part[key] = value
    return old


def _switch(definition: Part, name: str, steps: list[Part], wanted: bool, first: tuple[str, ...] = ()) -> list[Any]:
    """Add or remove steps of a component; return the former state if it differed.

    Args:
        definition: the content of ``tokenizer.json``.
        name: "normalizer" or "pre_tokenizer".
        steps: the steps, in order.
        wanted: whether they are wanted.
        first: kinds of steps that come before them.
    """
    inside = "normalizers" if name == "normalizer" else "pretokenizers"
    sequence = definition.get(name)
    if not isinstance(sequence, dict) or sequence.get("type") != "Sequence":
        sequence = {"type": "Sequence", inside: [] if sequence is None else [sequence]}
    parts, kinds = sequence[inside], {step["type"] for step in steps}
    present = any(part.get("type") in kinds for part in parts)
    if present == wanted:
        return []
    if wanted:
        at = max((i + 1 for i, part in enumerate(parts) if part.get("type") in first), default=0)
        parts[at:at] = steps
    else:
        sequence[inside] = [part for part in parts if part.get("type") not in kinds]
    definition[name] = sequence
    return [present]


def _lower(definition: Part, rules: FamilyTokenizer, value: bool) -> list[Any]:
    if rules.lowercase is None:
        return []
    if any(part.get("type") == "BertNormalizer" for part in parts_of(definition.get("normalizer"))):
        return _set(definition["normalizer"], "BertNormalizer", "lowercase", value)
    if not rules.files[0].endswith(".model"):
        return []
    before = ("StripAccents", "Replace") if rules.steps else ()
    return _switch(definition, "normalizer", [{"type": "Lowercase"}], value, before)


def _accents(definition: Part, rules: FamilyTokenizer, value: bool) -> list[Any]:
    if "accents unless kept" not in rules.steps:
        return []
    steps = [{"type": "NFKD"}, {"type": "StripAccents"}]
    return [not state for state in _switch(definition, "normalizer", steps, not value, ("Replace",))]


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
    return _switch(definition, "pre_tokenizer", [{"type": "Punctuation", "behavior": "Isolated"}], value)


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


# How notes begin that are warnings as well: they concern every row, or settings that nothing reads.
WARNED = ("cls_token", "sep_token", "tokenizer.json ", "unknown settings")


def read_backend(
    files: Mapping[str, bytes],
    folder: str,
    model_type: str | None,
    config: Mapping[str, Any],
) -> tuple[tokenizers.Tokenizer, list[str], bool]:
    """Return the tokenizer of a folder, notes about contradictions, and whether it differs from ``tokenizer.json``.

    Args:
        files: contents of the tokenizer files.
        folder: the folder of the files, for messages.
        model_type: family, if the caller specifies it.
        config: ``config.json`` of the model, or an empty mapping.

    Raises:
        TokenizerError: if the files are damaged, or the tokenizer class is not supported.
    """
    stated, mapped, added = (
        parse_json(files[name], f"{folder}/{name}") if name in files else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    size = config.get("vocab_size")
    rows = size if isinstance(size, int) else None
    rules = class_rules(class_name(stated, config))
    effective = rules or _family_rules(stated, config, model_type)
    ignored = check_keys(stated, mapped, effective, folder)
    source = Source(files, folder, stated, mapped, added, effective, {}, rows)
    # No definition contains words that Python code splits, so transformers reads the files of such a class.
    by_code = (
        rules is not None
        and rules.build in PYTHON_BUILDERS
        and any(name in files for name in (rules.files[0], "spiece.model"))
    )
    if "tokenizer.json" not in files or by_code:
        from .build import build_backend

        return build_backend(source, model_type or guess_model_type(config, stated), config), ignored, False
    backend = load_json(files["tokenizer.json"], f"{folder}/tokenizer.json")
    tokens = {
        role: text
        for role in ROLES
        if (text := next(filter(None, map(content, said_of(role, stated, mapped))), None)) is not None
    }
    source = replace(source, tokens=tokens)
    backend, changes = _overridden(backend, source)
    with translated_errors(f"{folder}/tokenizer_config.json", "the settings are damaged; fetch them again"):
        notes = add_tokens(backend, source)
        if effective.files:
            changes += (_framed if backend.post_processor is None else _reframed)(backend, source)
    if rules is not None and rules.words:
        notes.append(f"tokenizer.json is read as it is; its class splits words by {rules.words}: ids may differ")
    return backend, ignored + notes + changes, bool(changes)


def _family_rules(stated: Mapping[str, Any], config: Mapping[str, Any], model_type: str | None) -> FamilyTokenizer:
    """Return the rules of the class that transformers takes for a folder that names none; empty if it has no class."""
    has_class = any(isinstance(source.get("tokenizer_class"), str) for source in (stated, config))
    family = None if has_class else model_type or guess_model_type(config, stated)
    return rules_of(None if family in WITHOUT_CLASS else named(family))


def _overridden(backend: tokenizers.Tokenizer, source: Source) -> tuple[tokenizers.Tokenizer, list[str]]:
    """Return the tokenizer with the settings that replace parts of its definition, and notes."""
    if not source.rules.files:
        return backend, []
    components = {
        name: json.loads(part.__getstate__())
        for name in ("normalizer", "pre_tokenizer", "post_processor")
        if (part := getattr(backend, name)) is not None
    }
    notes = applied(components, source.rules, source.settings)
    unknown = source.tokens.get("unk_token")
    former = getattr(backend.model, "unk_token", None)
    usable = all(backend.token_to_id(str(token)) is not None for token in (unknown, former))
    if unknown is not None and unknown != former and usable:
        notes.append(_used("unk_token", unknown, str(former)))
    else:
        unknown = None
    if not notes:
        return backend, []
    # Loaded again, so that added tokens are normalized by the changed normalizer.
    path = f"{source.folder}/tokenizer.json"
    definition = {**parse_json(source.files["tokenizer.json"], path), **components}
    if unknown is not None:
        definition["model"]["unk_token"] = unknown
    return load_json(json.dumps(definition).encode(), path), notes


def _framed(backend: tokenizers.Tokenizer, source: Source) -> list[str]:
    """Add the template of the class to a definition without post-processor; return notes."""
    rules, stated = source.rules, source.settings
    prefix = stated.get("add_prefix_space", rules.prefix) is True
    tokens = {**rules.special, **source.tokens}
    try:
        frame(backend, rules.template, tokens, source.folder, prefix=prefix, settings=stated)
    except TokenizerError:
        lacking = "the vocabulary lacks special tokens of its class, so that none are added"
        return [f"tokenizer.json has no post_processor: {lacking}"]
    if not backend.num_special_tokens_to_add(False):
        return []
    around = " and ".join(dict.fromkeys(_around(backend)))
    return [f"tokenizer.json has no post_processor: {around} are added as its class does, as in transformers 5"]


def _around(backend: tokenizers.Tokenizer) -> list[str]:
    """Return the special tokens around one text, read from the definition of the post-processor."""
    for part in parts_of(json.loads(backend.post_processor.__getstate__())):
        if part.get("type") == "TemplateProcessing":
            return [piece["SpecialToken"]["id"] for piece in part["single"] if "SpecialToken" in piece]
        if part.get("type") in ("RobertaProcessing", "BertProcessing"):
            return [part["cls"][0], part["sep"][0]]
    return []


def _reframed(backend: tokenizers.Tokenizer, source: Source) -> list[str]:
    """Replace tokens of the template by the tokens of the settings; return notes."""
    rules, tokens = source.rules, source.tokens
    around = _around(backend)
    roles = template_ends(rules.template)
    if len(around) < 2 or roles is None:
        return []
    former = dict(zip(roles, (around[0], around[-1]), strict=True))
    changed = {
        role: tokens[role]
        for role, token in former.items()
        if tokens.get(role, token) != token and backend.token_to_id(tokens[role]) is not None
    }
    if changed:
        stated, tokens = source.settings, {**rules.special, **former, **changed}
        prefix = stated.get("add_prefix_space", rules.prefix) is True
        frame(backend, rules.template, tokens, source.folder, prefix=prefix, settings=stated)
    return [_used(role, token, former[role]) for role, token in changed.items()]


def _used(role: str, token: str, former: str) -> str:
    new, old = printable(token, 40), printable(former, 40)
    return f"{role}: {new} by the settings files and {old} in tokenizer.json; the former is used, as in transformers 5"


def with_sections(text: str, pad_token: str | None, sides: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a definition, with sections for padding and truncation, which a loaded one lacks.

    Args:
        text: the definition.
        pad_token: the token of the padding section.
        sides: ``padding_side`` and ``truncation_side``, as far as there are sections.
    """
    backend = tokenizers.Tokenizer.from_str(text)
    if pad_token is not None or "padding_side" in sides:
        found = None if pad_token is None else backend.token_to_id(pad_token)
        backend.enable_padding(
            direction=sides.get("padding_side", "right"), pad_token=pad_token or "", pad_id=found or 0
        )
    if "truncation_side" in sides:
        backend.enable_truncation(1, direction=sides["truncation_side"])
    return backend
