"""Japanese BERT: words of a morphological analyser, then word pieces, characters or a sentencepiece model.

Decides: the normalizers and splitters of each setting of ``BertJapaneseTokenizer``.
Leaves to others: the analysers and their packages (``python_words.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from flodl.errors import nearest, shown
from flodl_hf.errors import TokenizerError

from .plain_files import read_vocab_txt
from .python_words import ANALYSERS, Part, Words, located, sentencepieces, splitter
from .sentencepiece import read_model
from .source import Source


def _choice(source: Source, key: str, default: str, known: tuple[str, ...]) -> str:
    value = source.settings.get(key, default)
    if value not in known:
        raise TokenizerError(
            f"{source.folder}/tokenizer_config.json: {key} is {shown(value, 60)}, expected one of {', '.join(known)}"
            f"{nearest(str(value), known)}; correct the file",
            where=source.folder,
            field=key,
            found=value,
            expected=known,
        )
    return value


def _analysed(source: Source, kind: str, options: Mapping[str, Any], lower: bool) -> Words:
    """Return a function that splits a text into the words of an analyser."""
    analyser = ANALYSERS[kind](options)
    kept = set(source.settings.get("never_split") or ())

    def words(text: str) -> Iterator[Part]:
        for word, start, stop in located(analyser(text), text):
            yield word.lower() if lower and word not in kept else word, start, stop

    return words


def build(source: Source) -> Tokenizer:
    """Return the tokenizer of a folder of Japanese BERT.

    Raises:
        TokenizerError: if the package of an analyser is not installed, or a setting has an unknown value.
    """
    lower = source.flag("do_lower_case", False)
    subwords = _choice(source, "subword_tokenizer_type", "wordpiece", ("wordpiece", "character", "sentencepiece"))
    kind = _choice(source, "word_tokenizer_type", "basic", ("basic", *ANALYSERS))
    prepare: list[normalizers.Normalizer] = []
    split: list[pre_tokenizers.PreTokenizer] = []
    if source.flag("do_word_tokenize", True):
        if kind == "basic":
            basic = normalizers.BertNormalizer(handle_chinese_chars=False, lowercase=lower)
            prepare, split = [normalizers.NFC(), basic], [pre_tokenizers.BertPreTokenizer()]
        else:
            options = source.settings.get(f"{kind}_kwargs") or {}
            prepare = [normalizers.NFKC()] if options.get("normalize_text", True) else []
            split = [splitter(_analysed(source, kind, options, lower))]
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
        split.append(splitter(sentencepieces(source.files[name])))
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
