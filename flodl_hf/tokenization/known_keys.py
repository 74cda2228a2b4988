"""The known keys of ``tokenizer_config.json`` and ``special_tokens_map.json``.

A setting that changes token ids is applied, or loading fails and the error names file, key and value. A setting without
effect is ignored, an unknown one with a warning.

Decides: which keys are known, and which values are refused.
Leaves to others: applying a setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flodl.errors import shown
from flodl_hf.errors import TokenizerError
from flodl_hf.families.schema import FamilyTokenizer

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


def check_keys(
    stated: Mapping[str, Any], mapped: Mapping[str, Any], rules: FamilyTokenizer | None, folder: str
) -> list[str]:
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
            expected = None if value is None else _refused(key, value, rules) if rules is not None else None
            # bool is an int for Python and no number for JSON.
            if (
                types
                and value is not None
                and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types))
            ):
                expected = " or ".join(_JSON[kind] for kind in types)
            if expected is not None:
                raise TokenizerError(
                    f"{folder}/{name}: {key} is {shown(value, 60)}, expected {expected}; correct the file",
                    where=f"{folder}/{name}",
                    field=key,
                    found=value,
                    expected=expected,
                )
            if (
                types is None
                and key not in INERT
                and not key.endswith(("_token", "_token_id"))
                and not key.startswith("_")
            ):
                unknown.append(f"{key} ({name})")
    return [f"unknown settings are ignored: {', '.join(unknown)}"] if unknown else []


_JSON = {
    bool: "true or false", str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object",
}  # fmt: skip
