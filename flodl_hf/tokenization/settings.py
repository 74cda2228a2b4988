"""The tokenizer files of a folder, and their settings: special tokens, maximum length, sides of padding and truncation.

``special_tokens_map.json`` takes precedence over ``tokenizer_config.json``, unless the latter lists tokens by id; then
the defaults of the tokenizer class follow. A special token that the vocabulary lacks is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from flodl.errors import nearest, printable, shown
from flodl.files import POINTER_ADVICE, is_pointer, make_folders, write_atomically
from flodl_hf.checkpoints.folders import TOKENIZER_FILES, read_member
from flodl_hf.errors import ExportError, TokenizerError
from flodl_hf.families import by_tokenizer_class, named
from flodl_hf.families.schema import Family, FamilyTokenizer
from flodl_hf.tokenization.classes import ALIASES, CLASSES, GENERIC

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

# The largest tokenizer.json among the supported families (XLM-R, 250,002 pieces) is 17 MB.
MAX_BYTES = 64 * 1024 * 1024


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the contents of a regular file of at most ``limit`` bytes.

    Raises:
        UnsafeFileError: if it is a link that leads out of its folder.
        TokenizerError: if it is missing, not a regular file (reading a pipe would block), too large, or a git-lfs
            pointer.
    """
    data = read_member(path.parent, path.name, limit, TokenizerError)
    if is_pointer(data):
        raise TokenizerError(f"{path}: {POINTER_ADVICE}", path=str(path))
    return data


def read_source(folder: Path) -> dict[str, bytes]:
    """Return the contents of the tokenizer files in ``folder``, with file names as keys."""
    if not folder.is_dir():
        raise TokenizerError(
            f"{folder}: is not a folder; pass the folder that contains the tokenizer files", path=str(folder)
        )
    return {name: read_bytes(folder / name) for name in TOKENIZER_FILES if os.path.lexists(folder / name)}


def vocabulary_file(files: Mapping[str, bytes]) -> str:
    """Return the name of the file among these that a vocabulary is read from."""
    return next((name for name in TOKENIZER_FILES if name in files and name not in _SETTINGS), "tokenizer.json")


def with_settings(files: Mapping[str, bytes], changes: Mapping[str, Any], folder: str) -> dict[str, bytes]:
    """Return tokenizer files with other settings; special tokens are replaced in ``special_tokens_map.json`` as well.

    Args:
        files: contents of the files.
        changes: settings of ``tokenizer_config.json``.
        folder: the folder of the files, for messages.
    """
    found = dict(files)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        stated = parse_file(files, name, folder)
        here = changes if name == "tokenizer_config.json" else {key: changes[key] for key in changes.keys() & stated}
        if here:
            found[name] = json.dumps({**stated, **here}, indent=2, ensure_ascii=False).encode()
    return found


def decode_text(data: bytes, path: str) -> str:
    """Return the text in ``data``.

    Raises:
        TokenizerError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{path}: byte {error.start} is not UTF-8; expected UTF-8 text; save the file so, or fetch it again",
            where=path,
        ) from error


def parse_json(data: bytes, path: str) -> dict[str, Any]:
    """Return the JSON object in ``data``.

    Raises:
        TokenizerError: if it is not UTF-8, not JSON, nested too deeply, or not an object.
    """
    value, text = None, decode_text(data, path)
    try:
        value = json.loads(text)
        reason = f"found a JSON {type(value).__name__}"
    except (ValueError, RecursionError) as error:
        reason = (
            f"not valid JSON: {'nested too deeply' if isinstance(error, RecursionError) else printable(str(error))}"
        )
    if isinstance(value, dict):
        return value
    raise TokenizerError(f"{path}: {reason}; expected an object; fetch the file again", where=path, reason=reason)


def parse_file(files: Mapping[str, bytes], name: str, folder: str) -> dict[str, Any]:
    """Return the JSON object in one of the files; an empty one without the file."""
    return parse_json(files[name], f"{folder}/{name}") if name in files else {}


def wrong_value(path: str, key: str, value: Any, expected: str, hint: str = "") -> TokenizerError:
    """Return the error of a setting with an invalid value; the message has a hint after the expected values."""
    text = f"{path}: {key} is {shown(value, 60)}, expected {expected}{hint}; correct the file"
    return TokenizerError(text, where=path, field=key, found=value, expected=expected)


def write_files(files: Mapping[str, bytes], folder: Path) -> tuple[str, ...]:
    """Write ``files`` into ``folder``, each under a temporary name that is then renamed; return their paths.

    Raises:
        ExportError: the folder cannot be made, or a file not be written; the others are as they were, or whole.
    """
    try:
        make_folders(folder)
        for name, data in files.items():
            write_atomically(folder / name, [data])
    except OSError as error:
        raise ExportError(
            f"{folder}: cannot be written: {error}; expected to write the tokenizer's files, each whole or not at all. "
            "Free some space, or check that the folder may be written, and save again",
            path=str(folder),
            problems=[str(error)],
            errno=error.errno,
        ) from error
    return tuple(str(folder / name) for name in files)


@dataclass(frozen=True, slots=True)
class Source:
    """Files, settings and rules of a tokenizer that is built or read.

    Attributes:
        files: contents of the files.
        folder: the folder of the files, for messages.
        settings: ``tokenizer_config.json``.
        mapped: ``special_tokens_map.json``.
        added: ``added_tokens.json``.
        rules: of the tokenizer class, or of the model's family.
        tokens: special tokens by role; defaults of the class are included where a tokenizer is built.
        rows: rows of the model's word table, if known.
    """

    files: Mapping[str, bytes]
    folder: str
    settings: Mapping[str, Any]
    mapped: Mapping[str, Any]
    added: Mapping[str, Any]
    rules: FamilyTokenizer
    tokens: Mapping[str, str]
    rows: int | None = None

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean setting, the default if it is absent or null."""
        value = self.settings.get(name)
        return default if value is None else bool(value)


# Classes


def class_name(stated: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return the class that a folder names in ``tokenizer_config.json`` or ``config.json``; None for a generic one."""
    for source in (stated, config):
        name = source.get("tokenizer_class")
        if isinstance(name, str) and name:
            return None if _word(name) in GENERIC else name
    return None


def _word(name: str) -> str:
    return name.removesuffix("Fast").removesuffix("Tokenizer").lower()


_RULES = {name.lower(): rules for name, rules in CLASSES.items()}
_ALIASES = {name.lower(): other for name, other in ALIASES.items()}


def class_rules(name: str | None) -> FamilyTokenizer | None:
    """Return the rules of a tokenizer class, or None for a class that is generic or not supported."""
    if name is None:
        return None
    word = _ALIASES.get(_word(name), _word(name))
    family = None if word in _RULES else by_tokenizer_class(word)
    return _RULES.get(word) if family is None else family.tokenizer


def class_family(stated: Mapping[str, Any]) -> str | None:
    """Return the family of ``tokenizer_class``, or None if the class is absent or belongs to no family."""
    name = class_name(stated, {})
    family = None if name is None else by_tokenizer_class(_word(name))
    return None if family is None else family.model_type


def guess_model_type(config: Mapping[str, Any], stated: Mapping[str, Any]) -> str | None:
    """Return the family in ``config.json``, else the family of the tokenizer class, else None."""
    name = config.get("model_type")
    return name if isinstance(name, str) and name else class_family(stated)


def rules_of(family: Family | None) -> FamilyTokenizer:
    """Return the tokenizer rules of a family; empty ones for a family that has none or is unknown."""
    rules = None if family is None else family.tokenizer
    return rules or FamilyTokenizer(special={}, type_ids=True)


# Settings

Side = Literal["left", "right"]
_NUMBER = (int, float)
# Settings that are applied, with the types of their values; null is the default of the class.
APPLIED: Mapping[str, tuple[type, ...]] = {
    "tokenizer_class": (str,), "model_max_length": _NUMBER, "max_len": _NUMBER, "padding_side": (str,),
    "truncation_side": (str,), "added_tokens_decoder": (dict,), "additional_special_tokens": (list,),
    "extra_special_tokens": (list, dict), "model_input_names": (list,), "clean_up_tokenization_spaces": (bool,),
    "split_special_tokens": (bool,), "do_lower_case": (bool,), "strip_accents": (bool,), "clean_text": (bool,),
    "tokenize_chinese_chars": (bool,), "keep_accents": (bool,), "split_by_punct": (bool,), "add_prefix_space": (bool,),
    "trim_offsets": (bool,), "add_bos_token": (bool,), "add_eos_token": (bool,), "extra_ids": (int,),
    "src_lang": (str,), "normalization": (bool,), "do_word_tokenize": (bool,), "do_subword_tokenize": (bool,),
    "word_tokenizer_type": (str,), "subword_tokenizer_type": (str,), "never_split": (list,), "mecab_kwargs": (dict,),
    "sudachi_kwargs": (dict,), "jumanpp_kwargs": (dict,),
}  # fmt: skip

# Settings that change nothing here, because transformers 5 reads them for other classes, for calls or never.
INERT = frozenset((
    "add_blank", "auto_map", "backend", "chat_template", "commit_hash", "config", "device_map", "do_basic_tokenize",
    "do_normalize", "errors", "fast", "fix_mistral_regex", "from_slow", "full_tokenizer_file", "image_token_id",
    "init_inputs", "is_local", "lang", "language", "language_codes", "legacy", "legacy_behaviour",
    "local_files_only", "max_length", "max_question_length", "merges_file", "model_specific_special_tokens",
    "model_type", "name_or_path", "num_madeup_words", "offset", "only_label_first_subword", "package_versions",
    "pad_to_multiple_of", "pad_token_label", "pad_token_type_id", "padding", "post_processor", "pre_tokenizer",
    "processor_class", "remove_space", "response_schema", "return_token_type_ids", "sp_model_kwargs",
    "spaces_between_special_tokens", "special_tokens", "special_tokens_map_file", "spm_file", "stride", "task",
    "tgt_lang", "tokenizer_file", "tokenizer_type", "tokenizer_version", "transformers_version", "truncation",
    "truncation_strategy", "trust_remote_code", "unk_id", "use_default_system_prompt", "use_fast", "verbose",
    "vocab_file", "vocab_size", "wordpieces_prefix",
))  # fmt: skip


def _refused(key: str, value: Any, rules: FamilyTokenizer) -> str | None:
    """Return the expected value of a setting that cannot be applied; None for a valid setting."""
    if key == "sp_model_kwargs" and rules.build == "sentencepiece":
        return None if not (isinstance(value, Mapping) and value) else "no options of sentencepiece"
    if key == "offset" and any(entry.startswith("mask_token_sent") for entry in rules.first):
        return None if value == 103 else "103"
    if key == "wordpieces_prefix" and rules.template == "funnel":
        return None if value == "##" else "'##'"
    return None


def check_keys(stated: Mapping[str, Any], mapped: Mapping[str, Any], rules: FamilyTokenizer, folder: str) -> list[str]:
    """Return a note about unknown keys, empty for none.

    Args:
        stated: ``tokenizer_config.json``.
        mapped: ``special_tokens_map.json``.
        rules: of the tokenizer class, if it has any.
        folder: the folder of the files, for messages.

    Raises:
        TokenizerError: if a setting has a value that cannot be applied; ``where``, ``field`` and ``found`` name it.
    """
    unknown = []
    for name, content in (("tokenizer_config.json", stated), ("special_tokens_map.json", mapped)):
        for key, value in content.items():
            types = APPLIED.get(key)
            expected = None if value is None else _refused(key, value, rules)
            # bool is an int for Python and no number for JSON.
            is_typed = types and isinstance(value, types) and (bool in types or not isinstance(value, bool))
            if types and value is not None and not is_typed:
                expected = " or ".join(_JSON[kind] for kind in types)
            if expected is not None:
                raise wrong_value(f"{folder}/{name}", key, value, expected)
            is_token = key.endswith(("_token", "_token_id")) or key.startswith("_")
            if types is None and key not in INERT and not is_token:
                unknown.append(f"{key} ({name})")
    return [f"unknown settings are ignored: {', '.join(unknown)}"] if unknown else []


_JSON = {
    bool: "true or false", str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object",
}  # fmt: skip


ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Families with the default tokens of a folder without class and family.
_USUAL = ("bert", "roberta")

# transformers writes int(1e30) for no limit; no supported model has a million positions.
_NO_LIMIT = 10**6


@dataclass(frozen=True)
class Settings:
    """The settings of a tokenizer, with defaults.

    Attributes:
        special: role (``"mask_token"``) to token, only for tokens in the vocabulary.
        extra_special: further special tokens in the files.
        named_special: special tokens with further roles, by role.
        model_max_length: longest input in tokens, or ``None`` if no limit is stated.
        padding_side: ``"left"`` or ``"right"``.
        truncation_side: ``"left"`` or ``"right"``.
        clean_up: whether decoding removes the space before punctuation.
        input_names: the entries that a call returns by default.
        split_special: whether special tokens in a text are read as plain text.
        model_type: family, if known.
    """

    special: Mapping[str, str]
    extra_special: tuple[str, ...] = ()
    named_special: Mapping[str, str] = field(default_factory=dict)
    model_max_length: int | None = None
    padding_side: Side = "right"
    truncation_side: Side = "right"
    clean_up: bool = False
    input_names: tuple[str, ...] = ("input_ids", "token_type_ids", "attention_mask")
    split_special: bool = False
    model_type: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def type_ids(self) -> bool:
        """Whether segment ids are returned by default."""
        return "token_type_ids" in self.input_names


def content(value: Any) -> str | None:
    """Return the text of a token as settings files write it: a string, or an object with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def said_of(role: str, stated: Mapping[str, Any], mapped: Mapping[str, Any]) -> list[Any]:
    """Return the entries of a role in ``tokenizer_config.json`` and ``special_tokens_map.json``, by precedence.

    As in transformers, the map replaces the settings, unless these list tokens by id.
    """
    both = [stated.get(role), mapped.get(role)]
    return both if "added_tokens_decoder" in stated else both[::-1]


def named_tokens(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``tokenizer_config.json`` for special tokens with further roles."""
    listed = stated.get("extra_special_tokens")
    more = {key: value for key, value in stated.items() if key.endswith("_token") and key not in ROLES}
    return {**(listed if isinstance(listed, Mapping) else {}), **more}


def extra_tokens(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the further special tokens of settings files, in their order, with their entries."""
    listed = [source.get(key) for source in sources for key in ("extra_special_tokens", "additional_special_tokens")]
    values = [value for part in listed if isinstance(part, list) for value in part]
    found: dict[str, Any] = {}
    for value in (*named_tokens(sources[0]).values(), *values):
        if text := content(value):
            found.setdefault(text, value)
    return found


def _side(config: Mapping[str, Any], key: str, path: str, default: str = "right") -> Side:
    value = config.get(key, default)
    if value not in ("left", "right"):
        raise wrong_value(path, key, value, "'left' or 'right'", nearest(str(value), ("left", "right")))
    return value


def _max_length(config: Mapping[str, Any], path: str) -> int | None:
    # Files of transformers 2 have the old name.
    field = "model_max_length" if config.get("model_max_length") is not None else "max_len"
    value = config.get(field)
    if value is None or (isinstance(value, (int, float)) and value > _NO_LIMIT):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1 or value != int(value):
        raise wrong_value(path, field, value, "a positive number of tokens")
    return int(value)


def read_settings(
    files: Mapping[str, bytes],
    known: Callable[[str], bool],
    *,
    folder: str,
    model_type: str | None,
    config: Mapping[str, Any],
    pad_token: str | None = None,
    sides: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings that ``files`` state.

    Args:
        files: the tokenizer files of a folder.
        known: whether the vocabulary contains a token.
        folder: the folder of the files, for messages.
        model_type: family, if the caller knows it.
        config: the model's ``config.json``, or an empty mapping.
        pad_token: pad token named by the padding section of ``tokenizer.json``.
        sides: ``padding_side`` and ``truncation_side`` of its sections, the defaults of the settings files.

    Raises:
        TokenizerError: if a settings file is damaged or contains an invalid value.
    """
    where, sides = f"{folder}/tokenizer_config.json", sides or {}
    stated, mapped = (parse_file(files, f"{name}.json", folder) for name in ("tokenizer_config", "special_tokens_map"))
    known_as = model_type or guess_model_type(config, stated)
    family = named(known_as)
    by_class = class_rules(class_name(stated, config))
    rules = by_class or rules_of(family)
    named_class = any(isinstance(source.get("tokenizer_class"), str) for source in (stated, config))
    input_names = stated.get("model_input_names")
    if not isinstance(input_names, list):
        # As in transformers, a class without rules returns no token types.
        is_known = by_class is not None or not named_class
        types = ["token_type_ids"] * (is_known and rules.type_ids)
        input_names = (is_known and rules.inputs) or ("input_ids", *types, "attention_mask")
    # A class that only wraps tokenizer.json has no default special tokens.
    generic = named_class and class_name(stated, config) is None
    custom = {} if generic else rules.special
    fallback = {"pad_token": pad_token} if pad_token else {}
    special = {}
    for role in ROLES:
        sources = [*said_of(role, stated, mapped), fallback.get(role), custom.get(role)]
        if not custom and not generic:
            sources += [rules_of(named(usual)).special.get(role) for usual in _USUAL]
        token = next((token for token in map(content, sources) if token and known(token)), None)
        if token is not None:
            special[role] = token
    own = {role: token for role, token in custom.items() if role.endswith("_token") and role not in ROLES}
    further = {role: content(value) for role, value in {**own, **named_tokens(stated)}.items()}
    return Settings(
        special=special,
        extra_special=tuple(filter(known, extra_tokens(stated, mapped))),
        named_special={role: text for role, text in further.items() if text},
        model_max_length=_max_length(stated, where),
        padding_side=_side(stated, "padding_side", where, sides.get("padding_side", rules.padding_side)),
        truncation_side=_side(stated, "truncation_side", where, sides.get("truncation_side", "right")),
        clean_up=stated.get("clean_up_tokenization_spaces") is True,
        input_names=tuple(input_names),
        split_special=stated.get("split_special_tokens") is True,
        model_type=known_as,
        raw=stated,
    )
