"""The parts around the model of a sentencepiece tokenizer: normalization and splitting that keep its ids.

sentencepiece replaces the longest match at each position; the tokenizers library applies the same table to
whole grapheme clusters and takes the shortest match, which loses combining marks. So a mark is separated from
its base before the table is applied, and canonical composition does what the table's longer rules would have
done.

Decides: the sequence of normalizers and pre-tokenizers. Leaves to others: vocabularies and special tokens.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from itertools import groupby

from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from .charsmap import CharsMap
from .sentencepiece import BYTE, CONTROL, UNKNOWN, UNUSED, SentencePieceModel

__all__ = ["SPACE", "cleaning", "decoder", "lowercase", "normalizer", "splits_words", "splitter"]

SPACE = "\u2581"

# A noncharacter, which no text holds; it parts a mark from its base while the table is applied.
_PART = "\U0010ffff"

# Another noncharacter, which parts what is to be treated as texts of their own.
_CUT = "\U0010fffe"
_PUNCTUATION = r"[\p{P}$+<=>^`|~]"
_BESIDE_PUNCTUATION = f"(?<=[\\s\\S])(?={_PUNCTUATION})|(?<={_PUNCTUATION})(?=[\\s\\S])"

# Inside a grapheme cluster: before what extends one, in a line end, after what begins one. Not before the
# first character of a text, where the library loses count.
_CLUSTER = (
    r"(?<=[\s\S])(?=[\p{M}\x{200c}\x{200d}\x{e33}\x{eb3}\x{ff9e}\x{ff9f}\x{1f3fb}-\x{1f3ff}])"
    r"|(?<=\r)(?=\n)"
    r"|(?<=[\x{600}-\x{605}\x{6dd}\x{70f}\x{890}\x{891}\x{8e2}])(?=[\s\S])"
)

# What Python's str.split() takes for white space.
_PYTHON_SPACE = "\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"

# Word-internal characters of Unicode's Final_Sigma rule, as far as they occur beside Greek letters.
_FINAL_SIGMA = r"(?<=\p{L})Σ(?!['’.:·\p{Mn}]*\p{L})"


def _replace(pattern: str, content: str) -> normalizers.Normalizer:
    return normalizers.Replace(Regex(pattern), content)


def lowercase() -> list[normalizers.Normalizer]:
    """Return normalizers that lower-case as Python's ``str.lower`` does, final sigma included."""
    return [_replace(_FINAL_SIGMA, "ς"), normalizers.Lowercase()]


@cache
def _combining() -> str:
    """Return the characters of non-zero combining class, as the inside of a character class."""
    marks = [code for code in range(0x110000) if unicodedata.combining(chr(code))]
    spans = []
    for _, run in groupby(enumerate(marks), lambda pair: pair[1] - pair[0]):
        codes = [code for _, code in run]
        spans.append(f"\\x{{{codes[0]:x}}}-\\x{{{codes[-1]:x}}}")
    return "".join(spans)


def cleaning(*, keep_accents: bool, lower: bool) -> list[normalizers.Normalizer]:
    """Return what ALBERT and its like do to a text before sentencepiece sees it."""
    out = [
        _replace(f"[{_PYTHON_SPACE}]+", " "),
        normalizers.Replace("``", '"'),
        normalizers.Replace("''", '"'),
    ]
    if not keep_accents:
        # Marks of combining class zero (most vowel signs of Indian scripts) stay, unlike with StripAccents.
        out += [normalizers.NFKD(), _replace(f"[{_combining()}]", "")]
    return out + lowercase() if lower else out


def normalizer(
    model: SentencePieceModel,
    where: str,
    before: list[normalizers.Normalizer],
    split_punctuation: bool = False,
    words: bool = False,
) -> normalizers.Normalizer:
    """Return the normalizer that prepares a text as sentencepiece does, spaces as U+2581.

    Args:
        model: the model file.
        where: its name, for messages.
        before: what the family does first.
        split_punctuation: punctuation will be split off, and each part treated like a text of its own.
        words: the pre-tokenizer splits at spaces and marks them.
    """
    out = list(before)
    if split_punctuation:
        # On the text as it is written: replacements may make several characters of one, which stay together.
        out.append(_replace(_BESIDE_PUNCTUATION, _CUT))
    table = CharsMap(model.charsmap, where)
    if table:
        composes = table.get("e\u0301") == "é"
        if composes:
            out.append(normalizers.NFC())
        out += [
            _replace(_CLUSTER, _PART),
            normalizers.Precompiled(model.charsmap),
            normalizers.Replace(_PART, ""),
        ]
        if composes:
            # Rules such as half-width kana with a half-width sound mark become composable only now.
            out.append(normalizers.NFC())
    if model.remove_extra_whitespaces:
        out += [_replace(" {2,}", " "), _replace(f"\\A +|[ {SPACE}]+\\z", "")]
    if split_punctuation:
        # Spaces are left to the pre-tokenizer, which gives each part one.
        return normalizers.Sequence([*out, _replace(f" *{_CUT}+ *", _CUT)])
    if words:
        return normalizers.Sequence(out)
    if model.add_dummy_prefix:
        out.append(normalizers.Prepend(SPACE))
    out.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(out)


def splits_words(model: SentencePieceModel) -> bool:
    """Return whether no piece of a model spans words, so that a text can be split at its spaces."""
    usable = [piece.text for piece in model.pieces if piece.kind not in (UNKNOWN, CONTROL, UNUSED, BYTE)]
    inner = any(SPACE in text[1:] for text in usable)
    return SPACE in usable and not inner and model.add_dummy_prefix and model.remove_extra_whitespaces


def splitter(model: SentencePieceModel, split_punctuation: bool = False) -> pre_tokenizers.PreTokenizer | None:
    """Return the pre-tokenizer that makes words, or ``None`` where a piece may span words.

    Args:
        model: the model file.
        split_punctuation: make every punctuation character a word.
    """
    usable = [piece.text for piece in model.pieces if piece.kind not in (UNKNOWN, CONTROL, UNUSED, BYTE)]
    if SPACE not in usable:
        # Unknown spaces melt with their unknown neighbours, across words.
        return None
    inner = [text for text in usable if SPACE in text[1:]]
    if not inner:
        words = pre_tokenizers.Split(SPACE, "merged_with_next")
    elif all(SPACE not in text.lstrip(SPACE) for text in inner):
        words = pre_tokenizers.Split(Regex(f"{SPACE}+"), "merged_with_next")
    else:
        return None
    if not split_punctuation:
        return words
    # Each part of a text is given a space, as each is a text of its own for sentencepiece.
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_CUT, "removed"),
            pre_tokenizers.Metaspace(SPACE, "always" if model.add_dummy_prefix else "never"),
        ]
    )


def decoder() -> decoders.Decoder:
    """Return the decoder that turns pieces back into text."""
    return decoders.Metaspace(SPACE, "always")
