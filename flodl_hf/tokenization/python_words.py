"""Words that Python code splits: fairseq's BPE (PhoBERT, BERTweet), sentencepiece and Japanese analysers.

Each is a pre-tokenizer of the tokenizers library, so added tokens, offsets and templates work as in other tokenizers.
Such a tokenizer has no ``tokenizer.json``. A WordPiece vocabulary is learned by the same merges of pairs.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from html.entities import name2codepoint
from itertools import count, pairwise
from typing import Any

from tokenizers import NormalizedString, PreTokenizedString, Regex, normalizers, pre_tokenizers

from flodl.errors import nearest, shown
from flodl_hf.errors import TokenizerError


def choice_of(values: Mapping[str, Any], key: str, default: str, known: tuple[Any, ...]) -> Any:
    """Return a setting, which must be one of the known values."""
    value = values.get(key, default)
    if value not in known:
        raise TokenizerError(
            f"tokenizer_config.json: {key} is {shown(value, 60)}, expected one of {', '.join(map(str, known))}"
            f"{nearest(str(value), list(map(str, known)))}; correct the file",
            field=key,
            found=value,
            expected=known,
        )
    return value


# A word, or a part of one, and its first and last character (exclusive) in the text.
Part = tuple[str, int, int]
Words = Callable[[str], Iterable[Part]]


def _rewrite(piece: NormalizedString, part: str) -> None:
    """Change the characters of a piece one by one, so that its place in the text stays as it is."""
    old = str(piece)
    if part != old and not part.startswith(old):
        # The last character stays, however short the new text is.
        kept = {*range(len(part) - 1), len(old) - 1}
        numbers = count()
        piece.filter(lambda _: next(numbers) in kept)
        characters = iter(part)
        piece.map(lambda _: next(characters))
    piece.append(part[len(old) :])


class _Splitter:
    """Pre-tokenizer of the tokenizers library that splits a text into the parts that a function returns."""

    def __init__(self, words: Words) -> None:
        self._words = words
        # Analysers are not safe to share between threads.
        self._lock = threading.Lock()

    def _split(self, _: int, text: NormalizedString) -> list[NormalizedString]:
        with self._lock:
            parts = list(self._words(str(text)))
        out = []
        for part, start, stop in parts:
            # A part without characters is placed at the next character, or at the last.
            piece = text[start:stop] if start < stop else text[start : start + 1] or text[start - 1 : start]
            if piece is not None:
                _rewrite(piece, part)
                out.append(piece)
        return out

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        """Split a text; called by the tokenizers library."""
        text.split(self._split)


def splitter(words: Words) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits a text into the parts that ``words`` returns."""
    return pre_tokenizers.PreTokenizer.custom(_Splitter(words))


def located(words: Iterable[str], text: str) -> Iterator[Part]:
    """Yield each word with its place in ``text``; a word that was changed is placed after the one before it."""
    at = 0
    for word in words:
        bare = word.lstrip("\u2581")  # the mark of sentencepiece is no character of the text
        start = max(at, text.find(bare, at, at + len(bare) + 80))
        at = min(start + len(bare), len(text))
        if word:
            yield word, start, at


# fairseq


def fairseq_words(merges: Iterable[tuple[str, str]]) -> Words:
    """Return a function that splits the words of a text by merges; each part but the last of a word ends in "@@".

    Args:
        merges: pairs of parts by rank; the last part of a word ends in ``</w>``.
    """
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    known: dict[str, list[str]] = {}

    def parts(word: str) -> list[str]:
        if word not in known:
            if len(known) > 100_000:
                known.clear()
            known[word] = _merged(word, ranks)
        return known[word]

    def words(text: str) -> Iterator[Part]:
        for match in re.finditer(r"\S+\n?", text):
            at, found = match.start(), parts(match[0])
            for part in found[:-1]:
                yield f"{part}@@", at, at + len(part)
                at += len(part)
            yield found[-1], at, match.end()

    return words


def merge_pair(parts: Sequence[str], pair: tuple[str, str], joined: str) -> list[str]:
    """Return parts with each occurrence of a pair replaced by one part."""
    merged, at = [], 0
    while at < len(parts):
        is_pair = tuple(parts[at : at + 2]) == pair
        merged.append(joined if is_pair else parts[at])
        at += 2 if is_pair else 1
    return merged


def _merged(word: str, ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Return the parts of a word, without the mark of its end."""
    if len(word) == 1:
        return [word]
    parts = [*word[:-1], f"{word[-1]}</w>"]
    while len(parts) > 1:
        best = min(pairwise(parts), key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        parts = merge_pair(parts, best, "".join(best))
    return [*parts[:-1], parts[-1][: -len("</w>")]]


# sentencepiece


def sentencepieces(data: bytes) -> Words:
    """Return a function that splits a text into the pieces that sentencepiece finds.

    Args:
        data: contents of the model file.
    """
    package = _imported("sentencepiece", "a tokenizer of a sentencepiece model")
    processor = package.SentencePieceProcessor(model_proto=data)
    return lambda text: located(processor.encode(text, out_type=str), text)


# Japanese analysers


def _needed(package: str, what: str, error: ImportError) -> TokenizerError:
    return TokenizerError(
        f"{what} needs the package {package}: {error}. Install it with: pip install 'flodl-hf[japanese]' {package}",
        needs=package,
    )


def _imported(name: str, what: str) -> Any:
    """Return a package.

    Raises:
        TokenizerError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _needed(name.replace("_", "-"), what, error) from error


def _mecab(options: Mapping[str, Any]) -> Callable[[str], Iterable[str]]:
    fugashi = _imported("fugashi", "word_tokenizer_type 'mecab'")
    name, option = options.get("mecab_dic", "unidic_lite"), options.get("mecab_option") or ""
    if name is not None:
        choice_of(options, "mecab_dic", name, ("unidic_lite", "ipadic", "unidic"))
        folder = _imported(name, f"mecab_dic {name!r}").DICDIR
        if not os.path.isdir(folder):
            raise TokenizerError(
                f"mecab_dic {name!r}: the package has no dictionary at {folder}, expected a folder. "
                "Download it with: python -m unidic download",
                field="mecab_dic",
                found=name,
            )
        option = f'-d "{folder}" -r "{os.path.join(folder, "mecabrc")}" {option}'
    tagger = fugashi.GenericTagger(option)
    return lambda text: [word.surface for word in tagger(text)]


def _trimmed(words: list[str], options: Mapping[str, Any]) -> list[str]:
    return [word.strip() for word in words if word.strip()] if options.get("trim_whitespace") else words


def _sudachi(options: Mapping[str, Any]) -> Callable[[str], Iterable[str]]:
    sudachi = _imported("sudachipy", "word_tokenizer_type 'sudachi'")
    mode = choice_of(options, "sudachi_split_mode", "A", ("A", "B", "C"))
    kind = options.get("sudachi_dict_type", "core")
    try:
        words = sudachi.Dictionary(
            config_path=options.get("sudachi_config_path"), resource_dir=options.get("sudachi_resource_dir"), dict=kind
        )
    except ImportError as error:
        raise _needed(f"sudachidict-{kind}", f"sudachi_dict_type {kind!r}", error) from error
    projection = options.get("sudachi_projection")
    more = {"projection": projection} if projection else {}
    analyser = words.create(getattr(sudachi.SplitMode, mode), **more)
    return lambda text: _trimmed([word.surface() for word in analyser.tokenize(text)], options)


def _jumanpp(options: Mapping[str, Any]) -> Callable[[str], Iterable[str]]:
    rhoknp = _imported("rhoknp", "word_tokenizer_type 'jumanpp'")
    analyser = rhoknp.Jumanpp()
    return lambda text: _trimmed([part.text for part in analyser.apply_to_sentence(text.strip()).morphemes], options)


# The value of word_tokenizer_type, with a function that makes the analyser from its settings.
ANALYSERS: Mapping[str, Callable[[Mapping[str, Any]], Callable[[str], Iterable[str]]]] = {
    "mecab": _mecab,
    "sudachi": _sudachi,
    "jumanpp": _jumanpp,
}


# ---- tweets: user names, addresses and emojis become words, by the patterns of NLTK, as BERTweet was trained ----

_EMOTICON = r"""
    (?:[<>]?[:;=8][\-o\*\']?[\)\]\(\[dDpP/\:\}\{@\|\\]
      |[\)\]\(\[dDpP/\:\}\{@\|\\][\-o\*\']?[:;=8][<>]?
      |<3)"""
_NESTED = r"\([^\s()]*?\([^\s()]+\)[^\s()]*?\)"
# In the middle one character at a time, so that an address without a valid end does not take exponential time.
_URL = rf"""
    (?:https?:(?:/{{1,3}}|[a-z0-9%])|[a-z0-9.\-]+[.](?:[a-z]{{2,13}})/)
    (?:[^\s()<>{{}}\[\]]|{_NESTED}|\([^\s]+?\))+
    (?:{_NESTED}|\([^\s]+?\)|[^\s`!()\[\]{{}};:'".,<>?«»“”‘’])
    |(?:(?<!@)[a-z0-9]+(?:[.\-][a-z0-9]+)*[.](?:[a-z]{{2,13}})\b/?(?!@))"""
_WORDS = (
    _URL,
    r"(?:(?:\+?[01][\ *\-.\)]*)?(?:[\(]?\d{3}[\ *\-.\)]*)?\d{3}[\ *\-.\)]*\d{4})",  # telephone numbers
    _EMOTICON,
    r"<[^>\s]+>",
    r"[\-]+>|<[\-]+",
    r"(?:@[\w_]+)",
    r"(?:\#+[\w_]+[\w\'_\-]*[\w_]+)",
    r"[\w.+-]+@[\w-]+\.(?:[\w-]\.?)+[\w-]",
    r"(?:[^\W\d_](?:[^\W\d_]|['\-_])+[^\W\d_])",
    r"(?:[+\-]?\d+[,/.:-]\d+[+\-]?)",
    r"(?:[\w_]+)",
    r"(?:\.(?:\s*\.){1,})",
    r"(?:\S)",
)
# Word characters of Oniguruma include marks, as in the package regex, which also includes joiners.
_JOINERS = r"\x{200c}\x{200d}"
_PATTERN = "|".join(_WORDS).replace(r"[\w", rf"[\w{_JOINERS}").replace(r"[^\W\d_]", rf"[[^\W\d_]{_JOINERS}]")
_WORD = pre_tokenizers.Split(Regex(f"(?ix){_PATTERN}"), "removed", invert=True)
_REPEATED = re.compile(r"([^a-zA-Z0-9])\1{3,}")
_ENTITY = re.compile(r"&(#?(x?))([^&;\s]+);")
_PUNCTUATION = {"’": "'", "…": "..."}
_CONTRACTIONS = (
    ("cannot ", "can not "), ("n't ", " n't "), ("n 't ", " n't "), ("ca n't", "can't"), ("ai n't", "ain't"),
    *((f"'{end} ", f" '{end} ") for end in ("m", "re", "s", "ll", "d", "ve")),
    (" p . m .", "  p.m."), (" p . m ", " p.m "), (" a . m .", " a.m."), (" a . m ", " a.m "),
)  # fmt: skip


def _entity(match: re.Match[str]) -> str:
    try:
        number = int(match[3], 16 if match[2] else 10) if match[1] else name2codepoint[match[3]]
        return bytes((number,)).decode("cp1252") if match[1] and 0x80 <= number <= 0x9F else chr(number)
    except (KeyError, ValueError, OverflowError):
        return ""


@cache
def _emoji() -> Callable[[str], str] | None:
    try:
        return importlib.import_module("emoji").demojize
    except ImportError:
        warnings.warn(
            "the package emoji is not installed, so emojis are not converted into words; "
            "install it with: pip install emoji",
            UserWarning,
            stacklevel=2,
        )
        return None


def _word(token: str) -> str:
    if token.startswith("@"):
        return "@USER"
    if token.lower().startswith(("http", "www")):
        return "HTTPURL"
    if len(token) > 1:
        return token
    if token in _PUNCTUATION:
        return _PUNCTUATION[token]
    demojize = _emoji()
    return token if demojize is None else demojize(token)


def normalize_tweet(text: str) -> str:
    """Return a tweet with its words separated by spaces and its user names, addresses and emojis replaced."""
    for old, new in _PUNCTUATION.items():
        text = text.replace(old, new)
    text = _REPEATED.sub(r"\1\1\1", _ENTITY.sub(_entity, text))
    text = " ".join(_word(token) for token, _ in _WORD.pre_tokenize_str(text))
    for old, new in _CONTRACTIONS:
        text = text.replace(old, new)
    return " ".join(text.split())


def normalized_words(words: Words, normalize: Callable[[str], str]) -> Words:
    """Return a function that splits a normalized text into parts, with their places in the original text."""

    def split(text: str) -> Iterator[Part]:
        for word, start, stop in located(normalize(text).split(), text):
            for part, first, last in words(word):
                same = text[start:stop] == word
                yield (part, start + first, start + last) if same else (part, start, stop)

    return split


_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def wordpiece_files(texts: Iterable[str], vocab_size: int, *, lowercase: bool, max_length: int) -> dict[str, bytes]:
    """Return the files of a BERT tokenizer with a vocabulary learned from ``texts``, the same for the same texts.

    Args:
        texts: training texts.
        vocab_size: most tokens, special ones included.
        lowercase: fold case and strip accents.
        max_length: ``model_max_length`` of ``tokenizer_config.json``.
    """
    normalizer, splitter = normalizers.BertNormalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    vocab = _learn(words, vocab_size)
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": lowercase,
        "model_max_length": max_length,
        **{f"{token[1:-1].lower()}_token": token for token in _SPECIAL},
    }
    return {
        "tokenizer_config.json": json.dumps(settings, indent=2).encode("utf-8"),
        "vocab.txt": "".join(f"{token}\n" for token in vocab).encode("utf-8"),
    }


def _learn(words: Counter[str], size: int) -> list[str]:
    """Return the tokens: special tokens, characters by frequency, then merges of the most frequent pair.

    Ties are broken by spelling: the trainers of the tokenizers library follow the order of a hash table, so
    that two runs on the same texts may differ.
    """
    splits = {word: [word[0], *(f"##{char}" for char in word[1:])] for word in words}
    characters: Counter[str] = Counter()
    for word, parts in splits.items():
        for part in parts:
            characters[part] += words[word]
    ranked = sorted(characters, key=lambda part: (-characters[part], part))
    vocab = list(_SPECIAL) + ranked[: max(0, size - len(_SPECIAL))]
    known = set(vocab)
    while len(vocab) < size:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in splits.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        pair = min(pairs, key=lambda pair: (-pairs[pair], pair))
        token = pair[0] + pair[1].removeprefix("##")
        if token not in known:
            known.add(token)
            vocab.append(token)
        for word, parts in splits.items():
            if pair[0] in parts:
                splits[word] = merge_pair(parts, pair, token)
    return vocab
