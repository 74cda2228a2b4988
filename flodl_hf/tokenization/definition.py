"""Definitions of tokenizers: settings replace parts of ``tokenizer.json``, add tokens, and set those around texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from flodl.errors import capped, printable
from flodl_hf.errors import TokenizerError
from flodl_hf.families.schema import FamilyTokenizer
from flodl_hf.tokenization.guard import Part, check_definition, parts_of, translated_errors
from flodl_hf.tokenization.settings import (
    ROLES,
    Source,
    content,
    decode_text,
    extra_tokens,
    parse_json,
)


def load_json(data: bytes, path: str) -> Tokenizer:
    """Return the tokenizer that the bytes of a ``tokenizer.json`` define.

    Raises:
        TokenizerError: if the definition is damaged.
    """
    text = decode_text(data, path)
    check_definition(data, path)
    try:
        return Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = str(error) or type(error).__name__
    # Unused sections must not make a good vocabulary unusable.
    value = parse_json(data, path)
    if value.get("padding") or value.get("truncation"):
        value.update(padding=None, truncation=None)
        with translated_errors(path, "the tokenizer definition is damaged; fetch the file again"):
            return Tokenizer.from_str(json.dumps(value))
    raise TokenizerError(
        f"{path}: not a usable tokenizer definition: {printable(reason, 300)}; expected one as the tokenizers "
        "library writes it; fetch the file again, or delete it if the folder contains vocabulary files",
        where=path,
        reason=reason,
    )


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


def _replaced(definition: Part, rules: FamilyTokenizer, key: str, value: Any) -> list[Any]:
    """Replace the part of a definition that a setting concerns; return the former values if they differed."""
    normalizer, splitter, template = map(definition.get, ("normalizer", "pre_tokenizer", "post_processor"))
    if key in _OF_BERT and rules.lowercase is not None:
        if key != "do_lower_case" or any(part.get("type") == "BertNormalizer" for part in parts_of(normalizer)):
            return _set(normalizer, "BertNormalizer", _OF_BERT[key], value)
        if rules.files[0].endswith(".model"):
            before = ("StripAccents", "Replace") if rules.steps else ()
            return _switch(definition, "normalizer", [{"type": "Lowercase"}], value, before)
    elif key == "keep_accents" and "accents unless kept" in rules.steps:
        steps = [{"type": "NFKD"}, {"type": "StripAccents"}]
        return [not state for state in _switch(definition, "normalizer", steps, not value, ("Replace",))]
    elif key == "split_by_punct" and rules.split_punctuation is not None:
        return _switch(definition, "pre_tokenizer", [{"type": "Punctuation", "behavior": "Isolated"}], value)
    elif key == "trim_offsets" and rules.template == "roberta" and rules.files[0] == "vocab.json":
        return _set(template, "RobertaProcessing", "trim_offsets", value)
    elif key == "add_prefix_space" and rules.files[0] == "vocab.json" and rules.build != "suffixed":
        _set(template, "RobertaProcessing", "add_prefix_space", value)
        return _set(splitter, "ByteLevel", "add_prefix_space", value)
    elif key == "add_prefix_space" and rules.prefix:
        is_first = value and any(part.get("prepend_scheme") == "first" for part in parts_of(splitter))
        return [] if is_first else _set(splitter, "Metaspace", "prepend_scheme", "always" if value else "never")
    return []


# Settings that replace parts of a definition, in the order of their notes.
_REPLACING = (
    "do_lower_case", "keep_accents", "add_prefix_space", "split_by_punct", "trim_offsets", "strip_accents",
    "tokenize_chinese_chars",
)  # fmt: skip
# Settings of BERT's normalizer, and their names in it.
_OF_BERT = {
    "do_lower_case": "lowercase", "strip_accents": "strip_accents", "tokenize_chinese_chars": "handle_chinese_chars",
}  # fmt: skip


def overridden(backend: Tokenizer, source: Source) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer with the settings that replace parts of its definition, and a note for each."""
    if not source.rules.files:
        return backend, []
    components = {
        name: json.loads(part.__getstate__())
        for name in ("normalizer", "pre_tokenizer", "post_processor")
        if (part := getattr(backend, name)) is not None
    }
    notes, stated = [], source.settings
    for key in _REPLACING:
        value = stated.get(key)
        if isinstance(value, bool) or (key == "strip_accents" and key in stated and value is None):
            for former in _replaced(components, source.rules, key, value)[:1]:
                old = {"always": True, "never": False}.get(former, former)
                notes.append(
                    f"{key}: {value} in tokenizer_config.json and {old} in tokenizer.json; the former is used, as in "
                    "transformers"
                )
    unknown = source.tokens.get("unk_token")
    former = getattr(backend.model, "unk_token", None)
    usable = all(backend.token_to_id(str(token)) is not None for token in (unknown, former))
    if unknown is None or unknown == former or not usable:
        unknown = None
    else:
        notes.append(_used("unk_token", unknown, str(former)))
    if not notes:
        return backend, []
    # Loaded again, so that added tokens are normalized by the changed normalizer.
    path = f"{source.folder}/tokenizer.json"
    definition = {**parse_json(source.files["tokenizer.json"], path), **components}
    if unknown is not None:
        definition["model"]["unk_token"] = unknown
    return load_json(json.dumps(definition).encode(), path), notes


def framed(backend: Tokenizer, source: Source) -> list[str]:
    """Set the special tokens around texts where settings name others, or no post-processor adds any; return notes."""
    special, tokens = source.rules.special, source.tokens
    if backend.post_processor is None:
        try:
            frame(backend, source, {**special, **tokens})
        except TokenizerError:
            lacking = "the vocabulary lacks special tokens of its class, so that none are added"
            return [f"tokenizer.json has no post_processor: {lacking}"]
        if not backend.num_special_tokens_to_add(False):
            return []
        around = " and ".join(dict.fromkeys(_around(backend)))
        return [f"tokenizer.json has no post_processor: {around} are added as its class does, as in transformers 5"]
    around = _around(backend)
    # Only of templates with one token before a text and one behind it.
    parts = TEMPLATES.get(source.rules.template.replace("roberta", "doubled"), ("", ""))[0].split()
    if len(around) < 2 or parts[1:2] != ["$A"]:
        return []
    former = {parts[0].partition(":")[0]: around[0], parts[2].partition(":")[0]: around[-1]}
    changed = {
        role: tokens[role]
        for role, token in former.items()
        if tokens.get(role, token) != token and backend.token_to_id(tokens[role]) is not None
    }
    if changed:
        frame(backend, source, {**special, **former, **changed})
    return [_used(role, token, former[role]) for role, token in changed.items()]


def _around(backend: Tokenizer) -> list[str]:
    """Return the special tokens around one text, read from the definition of the post-processor."""
    for part in parts_of(json.loads(backend.post_processor.__getstate__())):
        if part.get("type") == "TemplateProcessing":
            return [piece["SpecialToken"]["id"] for piece in part["single"] if "SpecialToken" in piece]
        if part.get("type") in ("RobertaProcessing", "BertProcessing"):
            return [part["cls"][0], part["sep"][0]]
    return []


def _used(role: str, token: str, former: str) -> str:
    new, old = printable(token, 40), printable(former, 40)
    return f"{role}: {new} by the settings files and {old} in tokenizer.json; the former is used, as in transformers 5"


def added_token(text: str, stated: Any, *, special: bool, lstrip: bool = False) -> AddedToken:
    """Return a token with the flags of its entry in the settings files.

    As in transformers, a token is matched in the normalized text unless it is special or its entry specifies it.

    Args:
        text: the token.
        stated: its entry, of which only a mapping has flags.
        special: whether it is special.
        lstrip: whether it includes the space before it by default.
    """
    flags = {"lstrip": lstrip, "rstrip": False, "single_word": False, "normalized": not special}
    for name in flags if isinstance(stated, Mapping) else ():
        if isinstance(stated.get(name), bool):
            flags[name] = stated[name]
    return AddedToken(text, special=special, **flags)


def _numbered(source: Source) -> list[tuple[int, AddedToken]]:
    """Return the tokens that ``added_tokens_decoder`` or ``added_tokens.json`` number, by id."""
    faults = []
    named = {content(stated.get(role)) for stated in (source.settings, source.mapped) for role in ROLES}
    named |= set(extra_tokens(source.settings, source.mapped))
    decoder = source.settings.get("added_tokens_decoder")
    entries = [(number, content(value), value) for number, value in (decoder or {}).items()]
    if decoder is None:
        entries = [(str(number) if type(number) is int else "", text, None) for text, number in source.added.items()]
    wanted = []
    for number, text, value in entries:
        if not number.isdecimal() or len(number) > 10 or not text:
            faults.append(f"{printable(str(text), 40)}: found the id {printable(number, 40)}")
        else:
            is_special = value.get("special") is True if isinstance(value, Mapping) else not value and text in named
            wanted.append((int(number), added_token(text, value, special=is_special)))
    _raise(faults, "a token and a number in each entry", source)
    return sorted(wanted, key=lambda entry: entry[0])


def _raise(faults: Sequence[str], expected: str, source: Source) -> None:
    if faults:
        file = "added_tokens.json" if source.settings.get("added_tokens_decoder") is None else "tokenizer_config.json"
        raise TokenizerError(
            f"{source.folder}/{file}: added tokens do not fit the vocabulary:\n{capped(faults)}\n"
            f"expected {expected}. Fetch vocabulary and added tokens from the same place.",
            where=source.folder,
            problems=faults,
        )


def add_tokens(tokenizer: Tokenizer, source: Source, roles: Sequence[AddedToken] | None = None) -> list[str]:
    """Add the tokens that settings files contain and the vocabulary lacks, in the order of transformers; return notes.

    Each gets the next free id; one beyond the rows of the model's word table is not added.

    Args:
        tokenizer: the tokenizer to change.
        source: the settings files.
        roles: special tokens of a tokenizer built from vocabulary files, in which each token must have its stated id;
            None for a tokenizer of ``tokenizer.json``.

    Raises:
        TokenizerError: an entry is invalid, or a token does not have its stated id.
    """
    numbered, rows = _numbered(source), source.rows
    listed = extra_tokens(source.settings, source.mapped)
    extra = [added_token(text, value, special=True) for text, value in listed.items()]
    notes, faults = [], []
    for number, token in (*numbered, *((None, token) for token in (*(roles or ()), *extra))):
        text, limited = token.content, roles is None or token in extra
        found, free = tokenizer.token_to_id(text), tokenizer.get_vocab_size(with_added_tokens=True)
        if limited and found is None and rows is not None and free >= rows:
            notes.append(
                f"{printable(text, 40)} is in the settings files alone and the model has no row for its id {free}, so "
                "it is read as plain text (transformers adds it, and its model fails)"
            )
            continue
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        here = tokenizer.token_to_id(text)
        differs = number is not None and number != here
        if differs and roles is not None:
            faults.append(f"{printable(text, 40)}: found id {here}, expected {number}")
        if found is None:
            stated = f", although {number} is stated" if differs else ""
            alone = f"{printable(text, 40)} is in the settings files alone"
            notes.append(f"{alone}; as in transformers it was added as id {here}{stated}")
    _raise(faults, "the stated ids", source)
    for role in ROLES:
        text = content(source.settings.get(role)) or content(source.mapped.get(role))
        if text and tokenizer.token_to_id(text) is None:
            notes.append(
                f"{role} is {printable(text, 40)} in the settings files and not in the vocabulary; the template of "
                "tokenizer.json is used (transformers adds a new token)"
            )
    return notes


# One text and two texts; a role stands for its token, and a number is a token type.
TEMPLATES: Mapping[str, tuple[str, str]] = {
    "bert": ("cls_token $A sep_token", "cls_token $A sep_token $B:1 sep_token:1"),
    "doubled": ("cls_token $A sep_token", "cls_token $A sep_token sep_token $B sep_token"),
    "doubled ends": ("bos_token $A eos_token", "bos_token $A eos_token eos_token $B eos_token"),
    "none": ("$A", "$A $B:1"),
    "end": ("$A eos_token", "$A $B eos_token"),
    "ends": ("$A eos_token", "$A eos_token $B eos_token"),
    "funnel": ("cls_token:2 $A sep_token", "cls_token:2 $A sep_token $B:1 sep_token:1"),
    "xlnet": ("$A sep_token cls_token:2", "$A sep_token $B:1 sep_token:1 cls_token:2"),
    "splinter": ("cls_token $A sep_token", "cls_token $A question_token . sep_token $B:1 sep_token:1"),
    "splinter left": ("cls_token $A sep_token", "cls_token $A sep_token $B:1 question_token . sep_token:1"),
    "language last": ("$A eos_token src_lang", "$A $B eos_token src_lang"),
    "language first": ("src_lang $A eos_token", "src_lang $A $B eos_token"),
}


def frame(tokenizer: Tokenizer, source: Source, tokens: Mapping[str, str]) -> None:
    """Set the special tokens around one text or two by the template of the tokenizer's class.

    A template is a name in `TEMPLATES`, ``"roberta"`` ("doubled" with offsets that leave out leading spaces), or
    ``"bytes"`` (no tokens, and offsets that include spaces).

    Args:
        tokenizer: the tokenizer to change.
        source: the rules of the class, and the settings.
        tokens: token by role.

    Raises:
        TokenizerError: if the vocabulary lacks a token of the template.
    """
    template, settings = source.rules.template, source.settings
    if template == "bytes":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return
    if template == "splinter" and settings.get("padding_side", "right") == "left":
        template = "splinter left"
    single, pair = TEMPLATES["doubled" if template == "roberta" else template]
    if template == "none":
        ends = (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token"))
        bos, eos = (role if settings.get(key) is True and role in tokens else "" for key, role in ends)
        single = f"{bos} $A {eos}"
        pair = f"{single} {bos}:1 $B:1 {eos}:1".replace(" :1", "")
    used: dict[str, int | None] = {}

    def piece(part: str) -> str:
        role, _, number = part.partition(":")
        if role.startswith("$"):
            return f"{role}:{number or 0}"
        token = tokens.get(role) or (tokens["eos_token"] if role == "sep_token" else role)
        used[token] = tokenizer.token_to_id(token)
        return f"{token}:{number or 0}"

    # Lists, because a token may contain the space that separates the parts of a template string.
    parts = [[piece(part) for part in text.split()] for text in (single, pair)]
    missing = [printable(token, 40) for token, number in used.items() if number is None]
    if missing:
        raise TokenizerError(
            f"{source.folder}: the vocabulary lacks {' and '.join(missing)}, expected every token of the template; "
            "name the special tokens of the vocabulary in tokenizer_config.json",
            where=source.folder,
            missing=missing,
        )
    known = [(token, number) for token, number in used.items() if number is not None]
    if template == "roberta":
        (first, last) = (known[0], known[-1])
        tokenizer.post_processor = processors.RobertaProcessing(
            last, first, trim_offsets=source.flag("trim_offsets", True),
            add_prefix_space=source.flag("add_prefix_space", source.rules.prefix),
        )  # fmt: skip
        return
    tokenizer.post_processor = processors.TemplateProcessing(single=parts[0], pair=parts[1], special_tokens=known)
