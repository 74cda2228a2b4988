"""The tokenizer of a folder's files: of ``tokenizer.json`` with its settings, or built from the vocabulary files.

Rules of the classes are in ``classes.py``, sentencepiece models in ``sentencepiece.py``, words that Python splits
in ``python_words.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from flodl.errors import capped, printable
from flodl_hf.checkpoints.folders import vocabularies_below
from flodl_hf.errors import TokenizerError
from flodl_hf.families import families, named
from flodl_hf.families.schema import FamilyTokenizer
from flodl_hf.tokenization.classes import PYTHON_BUILDERS, WITHOUT_CLASS
from flodl_hf.tokenization.definition import add_tokens, added_token, frame, framed, load_json, overridden
from flodl_hf.tokenization.guard import translated_errors
from flodl_hf.tokenization.sentencepiece import llama, pieces, read_model, sentencepiece_pieces
from flodl_hf.tokenization.settings import (
    ROLES,
    TOKENIZER_FILES,
    Source,
    check_keys,
    class_name,
    class_rules,
    content,
    decode_text,
    guess_model_type,
    parse_file,
    parse_json,
    rules_of,
    said_of,
    vocabulary_file,
)

# How notes begin that are warnings as well: they concern every row, or settings that nothing reads.
WARNED = ("cls_token", "sep_token", "tokenizer.json ", "unknown settings")

# Ids are 32-bit numbers in the tokenizers library, and rows of an embedding in every model.
_MAX_ID = 10_000_000


def _lines(data: bytes, path: str) -> list[str]:
    # Only line feeds end a line: vocabularies contain characters at which str.splitlines would split.
    lines = decode_text(data, path).replace("\r\n", "\n").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _refuse(path: str, faults: list[str], remedy: str) -> None:
    if faults:
        raise TokenizerError(
            f"{path}: {len(faults)} faults:\n{capped(faults, 10)}\n{remedy}", where=path, problems=faults
        )


def read_vocab_txt(data: bytes, path: str) -> dict[str, int]:
    """Return token to id from a file with one token a line, the first being id 0.

    A token that occurs twice has the id of its last line, as in transformers.

    Raises:
        TokenizerError: if the file is empty.
    """
    vocab = {token: number for number, token in enumerate(_lines(data, path))}
    _refuse(path, ["the file is empty"] * (not vocab), "expected a token on each line; fetch the file again")
    return vocab


def read_fairseq(data: bytes, path: str, first: Sequence[str]) -> dict[str, int]:
    """Return token to id from a file with a token and its count on each line, numbered after ``first``.

    Raises:
        TokenizerError: if a line has no count.
    """
    vocab = {token: number for number, token in enumerate(first)}
    faults = []
    for number, line in enumerate(_lines(data, path), start=1):
        token, space, _ = line.strip().rpartition(" ")
        if not space:
            faults.append(f"line {number}: {printable(line, 40)} is not a token and its count")
        vocab[token] = len(vocab)
    _refuse(path, faults, "expected the vocabulary of fairseq; fetch the file again, or correct tokenizer_class")
    return vocab


def read_vocab_json(data: bytes, path: str) -> dict[str, int]:
    """Return token to id from a JSON object.

    Raises:
        TokenizerError: if it is not an object of distinct small numbers, or a token occurs twice.
    """
    vocab = parse_json(data, path)
    faults = [
        f"{printable(token, 40)} has id {printable(str(number), 40)}"
        for token, number in vocab.items()
        if type(number) is not int or not 0 <= number < _MAX_ID
    ]
    faults += ["the object is empty"] * (not vocab)
    if not faults:
        tokens = Counter(token for token, _ in json.loads(data, object_pairs_hook=list))
        faults = [f"{printable(token, 40)} occurs twice" for token, count in tokens.items() if count > 1]
        faults += [f"{count} tokens have id {number}" for number, count in Counter(vocab.values()).items() if count > 1]
    _refuse(path, faults, f"expected distinct numbers from 0 to {_MAX_ID - 1}; fetch the file again")
    return vocab


def read_merges(data: bytes, path: str, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges of byte-level BPE in order of rank.

    Args:
        data: contents of ``merges.txt``.
        path: its name, for messages.
        vocab: token to id; both parts and their union must be in it.

    Raises:
        TokenizerError: if a line is not two tokens of the vocabulary with a union in the vocabulary.
    """
    merges: list[tuple[str, str]] = []
    faults = []
    for number, line in enumerate(_lines(data, path), start=1):
        if number == 1 and line.startswith("#version"):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            faults.append(f"line {number}: {printable(line, 40)} is not two tokens with a space between")
            continue
        unknown = [token for token in (*parts, "".join(parts)) if token not in vocab]
        if unknown:
            faults.append(f"line {number}: {printable(unknown[0], 40)} is not in the vocabulary")
        merges.append((parts[0], parts[1]))
    _refuse(
        path,
        faults,
        "expected two tokens of vocab.json on each line; fetch vocab.json and merges.txt from the same place",
    )
    return merges


def _word_pieces(source: Source) -> Tokenizer:
    vocab = read_vocab_txt(source.files["vocab.txt"], f"{source.folder}/vocab.txt")
    _require(source, vocab, ("unk_token", "cls_token", "sep_token"), "vocab.txt")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=source.tokens["unk_token"]))
    strip = source.settings.get("strip_accents")
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=source.rules.template != "funnel" or source.flag("clean_text", True),
        handle_chinese_chars=source.flag("tokenize_chinese_chars", True),
        strip_accents=None if strip is None else source.flag("strip_accents", False),
        lowercase=source.flag("do_lower_case", source.rules.lowercase is not False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _anywhere(source: Source) -> Tokenizer:
    vocab = read_vocab_txt(source.files["vocab.txt"], f"{source.folder}/vocab.txt")
    _require(source, vocab, ("unk_token", "cls_token", "eos_token"), "vocab.txt")
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=source.tokens["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in vocab if token.strip()])
    return tokenizer


def _merged(source: Source, unknown: str | None = None, suffix: str = "") -> Tokenizer:
    """Return BPE over ``vocab.json`` and ``merges.txt``, without normalizer and splitter."""
    vocab = read_vocab_json(source.files["vocab.json"], f"{source.folder}/vocab.json")
    merges = read_merges(source.files["merges.txt"], f"{source.folder}/merges.txt", vocab)
    required = [role for role in ("cls_token", "sep_token") if role in source.rules.special]
    _require(source, vocab, required, "vocab.json")
    options: dict[str, Any] = {} if suffix else {"continuing_subword_prefix": ""}
    if unknown is not None:
        options["unk_token"] = unknown
    return Tokenizer(models.BPE(vocab, merges, end_of_word_suffix=suffix, fuse_unk=False, **options))


def _byte_level(source: Source) -> Tokenizer:
    tokenizer = _merged(source)
    prefix = source.flag("add_prefix_space", source.rules.prefix)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    if source.rules.build in ("byte_level_nfc", "qwen2"):
        tokenizer.normalizer = normalizers.NFC()
    if source.rules.build == "qwen2":
        words = pre_tokenizers.Split(Regex(_QWEN2), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    return tokenizer


_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _suffixed(source: Source) -> Tokenizer:
    """Return BPE in which words end in ``</w>``, split as by BERT."""
    tokenizer = _merged(source, source.tokens["unk_token"], "</w>")
    lower = source.rules.lowercase is True
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=None if lower else False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


def _fairseq(source: Source) -> Tokenizer:
    """Return BPE over fairseq's ``vocab.txt`` and ``bpe.codes``."""
    from flodl_hf.tokenization.python_words import fairseq_words, normalize_tweet, normalized_words, splitter

    first = [source.tokens[role] for role in ("bos_token", "pad_token", "eos_token", "unk_token")]
    vocab = read_fairseq(source.files["vocab.txt"], f"{source.folder}/vocab.txt", first)
    lines = source.files["bpe.codes"].decode("utf-8").split("\n")[:-1]
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=source.tokens["unk_token"]))
    words = fairseq_words((parts[0], parts[1]) for line in lines if len(parts := line.split()) > 1)
    if source.rules.build == "bertweet" and source.flag("normalization", False):
        words = normalized_words(words, normalize_tweet)
    tokenizer.pre_tokenizer = splitter(words)
    spaced = decoders.WordPiece(prefix="\U0010ffff", cleanup=False)  # a prefix that no token has
    parts = [spaced, decoders.Fuse(), decoders.Replace("@@ ", ""), decoders.Replace(Regex(r"\A\s+|\s+\z"), "")]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _japanese(source: Source) -> Tokenizer:
    """Return the tokenizer of a folder of Japanese BERT.

    Raises:
        TokenizerError: if the package of an analyser is not installed, or a setting has an unknown value.
    """
    from flodl_hf.tokenization import python_words

    lower = source.flag("do_lower_case", False)
    subwords = python_words.choice_of(
        source.settings, "subword_tokenizer_type", "wordpiece", ("wordpiece", "character", "sentencepiece")
    )
    kind = python_words.choice_of(source.settings, "word_tokenizer_type", "basic", ("basic", *python_words.ANALYSERS))
    prepare: list[normalizers.Normalizer] = []
    split: list[pre_tokenizers.PreTokenizer] = []
    if source.flag("do_word_tokenize", True):
        if kind == "basic":
            basic = normalizers.BertNormalizer(handle_chinese_chars=False, lowercase=lower)
            prepare, split = [normalizers.NFC(), basic], [pre_tokenizers.BertPreTokenizer()]
        else:
            options = source.settings.get(f"{kind}_kwargs") or {}
            prepare = [normalizers.NFKC()] if options.get("normalize_text", True) else []

            analyser, kept = python_words.ANALYSERS[kind](options), set(source.settings.get("never_split") or ())
            split = [python_words.splitter(lambda text: (
                (word.lower() if lower and word not in kept else word, start, stop)
                for word, start, stop in python_words.located(analyser(text), text)
            ))]  # fmt: skip
    if not source.flag("do_subword_tokenize", True):
        subwords = "none"
    name = "spiece.model" if subwords == "sentencepiece" else "vocab.txt"
    if name not in source.files:
        raise TokenizerError(
            f"{source.folder}: {name} is missing, expected it for subword_tokenizer_type {subwords!r}; copy the "
            "tokenizer files of the checkpoint there",
            where=source.folder,
            field="subword_tokenizer_type",
            found=subwords,
        )
    model: models.Model
    if subwords == "sentencepiece":
        pieces = read_model(source.files[name], f"{source.folder}/{name}").pieces
        model = models.WordLevel(
            {piece.text: n for n, piece in enumerate(pieces)}, unk_token=source.tokens["unk_token"]
        )
        split.append(python_words.splitter(python_words.sentencepieces(source.files[name])))
    else:
        vocab = read_vocab_txt(source.files["vocab.txt"], f"{source.folder}/vocab.txt")
        kind_of_model = models.WordLevel if subwords == "none" else models.WordPiece
        model = kind_of_model(vocab, unk_token=source.tokens["unk_token"])
    if subwords == "wordpiece":
        split.append(pre_tokenizers.WhitespaceSplit())  # an analyser may return white space as a part of a word
    if subwords == "character":
        prepare.append(normalizers.NFKC())
        split.append(pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"))
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(prepare) if prepare else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split) if split else None
    if subwords == "sentencepiece":
        tokenizer.decoder = decoders.Metaspace("\u2581", "always")
    else:
        tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer


_BUILDERS: Mapping[str, Callable[[Source], Tokenizer]] = {
    "vocab.txt": _word_pieces,
    "vocab.json": _byte_level,
    "anywhere": _anywhere,
    "byte_level_nfc": _byte_level,
    "qwen2": _byte_level,
    "suffixed": _suffixed,
    "fairseq": _fairseq,
    "bertweet": _fairseq,
    "japanese": _japanese,
    "pieces": pieces,
    "bpe": pieces,
    "sentencepiece": sentencepiece_pieces,
    "llama": llama,
}


def _require(source: Source, vocab: Mapping[str, int], roles: Sequence[str], name: str) -> None:
    missing = [f"{role} {printable(source.tokens[role], 40)}" for role in roles if source.tokens[role] not in vocab]
    if missing:
        raise TokenizerError(
            f"{source.folder}/{name}: lacks\n{capped(missing)}\nexpected every special token in it; fetch the file "
            "again, or name the right tokens in tokenizer_config.json",
            where=f"{source.folder}/{name}",
            missing=missing,
        )


def _choose(source: Source, model_type: str | None, config: Mapping[str, Any]) -> FamilyTokenizer:
    """Return the rules of the tokenizer class, else of the model's family, else of a family with these files."""
    files, folder = source.files, source.folder
    name = class_name(source.settings, config)
    if name is not None:
        rules = class_rules(name)
        if rules is None:
            raise TokenizerError(
                f"{folder}: tokenizer_class is {name!r}, which is not supported without tokenizer.json; expected a "
                "class of the table in the guide to tokenizers. Save it as tokenizer.json with transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
                where=folder,
                field="tokenizer_class",
                found=name,
            )
        missing = [file for file in rules.files if file not in files and rules.build != "japanese"]
        if not rules.words and (missing or not rules.files):
            raise TokenizerError(
                f"{folder}: tokenizer_class is {name!r} and {', '.join(missing) or 'tokenizer.json'} is missing; "
                f"expected {' and '.join(rules.files) or 'tokenizer.json'}; copy the tokenizer files of the checkpoint "
                "there, or correct tokenizer_class",
                where=folder,
                field="tokenizer_class",
                found=name,
                expected=rules.files,
            )
        return rules
    present = [f for f in families() if rules_of(f).files and all(name in files for name in rules_of(f).files)]
    if (family := next((family for family in present if family.model_type == model_type), None)) is not None:
        return rules_of(family)
    if not present:
        advice = "copy the tokenizer files of the checkpoint there"
        for below in vocabularies_below(Path(folder))[:1]:
            advice = f"the folder {below!r} in it has one: pass subfolder={below!r}"
        raise TokenizerError(
            f"{folder}: there is no tokenizer; expected tokenizer.json, vocab.txt, vocab.json with merges.txt, or a "
            f"sentencepiece model; {advice}",
            where=folder,
            found=sorted(files),
            expected=TOKENIZER_FILES,
        )
    # Two classes can read this sentencepiece model, and their ids differ.
    chosen = rules_of(present[0])
    others = [f for f in present if rules_of(f).files == chosen.files and rules_of(f).first != chosen.first]
    if others and model_type is None:
        names = [family.class_prefix for family in (present[0], others[0])]
        raise TokenizerError(
            f"{folder}: {chosen.files[0]} may be of {names[0]} or of {names[1]}, which number it differently; "
            "pass model_type, or add config.json to the folder",
            where=folder,
            found=[present[0].model_type, *(family.model_type for family in others)],
        )
    return chosen


def build_backend(source: Source, model_type: str | None, config: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that vocabulary files define.

    Args:
        source: the files and settings; the rules of the class and its special tokens are determined here.
        model_type: family of the model, if known.
        config: ``config.json`` of the model, or an empty mapping.

    Raises:
        TokenizerError: if there are no vocabulary files, they are damaged, or the tokenizer class is not supported.
    """
    own, settings = _choose(source, model_type, config), source.settings
    file = f"{source.folder}/{vocabulary_file(source.files)}"
    if own.words:
        raise TokenizerError(
            f"{file}: the tokenizer splits words by {own.words}, which is not supported; expected tokenizer.json or "
            "another tokenizer_class. Pass token ids that transformers returns, or add a tokenizer.json.",
            where=source.folder,
            words=own.words,
        )
    decoder = settings.get("added_tokens_decoder")
    by_text = {content(v): v for v in decoder.values()} if isinstance(decoder, Mapping) else {}
    roles = tuple(dict.fromkeys((*ROLES, *own.special)))
    stated = {role: next(filter(None, said_of(role, settings, source.mapped)), None) for role in roles}
    # A string does not specify the spaces around a token; the entry with its id may.
    stated = {role: by_text.get(v, v) if isinstance(v, str) else v for role, v in stated.items()}
    tokens = {**own.special, **{role: text for role, v in stated.items() if (text := content(v))}}
    source = replace(source, rules=own, tokens=tokens)
    with translated_errors(file, "the vocabulary files are damaged; fetch them again"):
        tokenizer = _BUILDERS[own.build or own.files[0]](source)
        special = [
            added_token(text, stated.get(role), special=True, lstrip=own.mask_takes_space and role == "mask_token")
            for role, text in tokens.items()
            if role.endswith("_token")
        ]
        add_tokens(tokenizer, source, special)
        frame(tokenizer, source, tokens)
    return tokenizer


def read_backend(
    files: Mapping[str, bytes],
    folder: str,
    model_type: str | None,
    config: Mapping[str, Any],
) -> tuple[Tokenizer, list[str], bool]:
    """Return the tokenizer of a folder, notes about contradictions, and whether it differs from ``tokenizer.json``.

    Args:
        files: contents of the tokenizer files.
        folder: the folder of the files, for messages.
        model_type: family, if the caller specifies it.
        config: ``config.json`` of the model, or an empty mapping.

    Raises:
        TokenizerError: if the files are damaged, or the tokenizer class is not supported.
    """
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    stated, mapped, added = (parse_file(files, name, folder) for name in names)
    size = config.get("vocab_size")
    rows = size if isinstance(size, int) else None
    rules = class_rules(class_name(stated, config))
    # The rules of the class that transformers takes for a folder that names none; empty if it has no class.
    has_class = any(isinstance(source.get("tokenizer_class"), str) for source in (stated, config))
    family = None if has_class else model_type or guess_model_type(config, stated)
    effective = rules or rules_of(None if family in WITHOUT_CLASS else named(family))
    ignored = check_keys(stated, mapped, effective, folder)
    source = Source(files, folder, stated, mapped, added, effective, {}, rows)
    # No definition contains words that Python code splits, so transformers reads the files of such a class.
    by_code = (
        rules is not None
        and rules.build in PYTHON_BUILDERS
        and any(name in files for name in (rules.files[0], "spiece.model"))
    )
    if "tokenizer.json" not in files or by_code:
        return build_backend(source, model_type or guess_model_type(config, stated), config), ignored, False
    backend = load_json(files["tokenizer.json"], f"{folder}/tokenizer.json")
    tokens = {
        role: text
        for role in ROLES
        if (text := next(filter(None, map(content, said_of(role, stated, mapped))), None)) is not None
    }
    source = replace(source, tokens=tokens)
    backend, changes = overridden(backend, source)
    with translated_errors(f"{folder}/tokenizer_config.json", "the settings are damaged; fetch them again"):
        notes = add_tokens(backend, source)
        if effective.files:
            changes += framed(backend, source)
    if rules is not None and rules.words:
        notes.append(f"tokenizer.json is read as it is; its class splits words by {rules.words}: ids may differ")
    return backend, ignored + notes + changes, bool(changes)
