"""Tokenizers of sentencepiece models, as transformers 5 builds them with the tokenizers library.

Decides: numbering of the pieces, normalizers, splitting at spaces.
Leaves to others: reading the model file (``sentencepiece.py``), special tokens of roles, the template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from flodl_hf.errors import TokenizerError

from .charsmap import check_table
from .sentencepiece import BPE, CONTROL, NORMAL, USER_DEFINED, SentencePieceModel, read_model
from .settings import content
from .source import Source

_SPACE = "\u2581"
_QUOTES = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
_ACCENTS = [normalizers.NFKD(), normalizers.StripAccents()]
_SPACES = [normalizers.Replace(Regex(" {2,}"), " ")]
_BLANKS = [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC(), normalizers.Strip(False, True)]

Step = Callable[[Source, list[normalizers.Normalizer]], Sequence[normalizers.Normalizer]]

# Each returns normalizers, given the table of the model as a list of one or none.
STEPS: Mapping[str, Step] = {
    "quotes": lambda _, table: _QUOTES,
    "accents": lambda _, table: _ACCENTS,
    "accents unless kept": lambda source, _: [] if source.flag("keep_accents", not source.rules.cleaned) else _ACCENTS,
    "lower": lambda source, _: [normalizers.Lowercase()] if source.flag("do_lower_case", _lower(source)) else [],
    "charsmap": lambda _, table: table,
    "charsmap or lines": lambda _, table: table or [normalizers.Replace("\n", " ")],
    "spaces": lambda _, table: _SPACES,
    "marked spaces": lambda _, table: [normalizers.Replace(Regex(" {2,}"), _SPACE)],
    "marks": lambda _, table: [normalizers.Replace(" ", _SPACE)],
    "blanks": lambda _, table: _BLANKS,
}


def _lower(source: Source) -> bool:
    return source.rules.lowercase is True


def _read(source: Source) -> SentencePieceModel:
    name = source.rules.files[0]
    return read_model(source.files[name], f"{source.folder}/{name}")


def _merges(model: SentencePieceModel, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return merges by which BPE arrives at the pieces, best score first."""
    usable = {piece.text for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED)} & set(ids)
    ranked = sorted((piece for piece in model.pieces if piece.text in usable), key=lambda piece: -piece.score)
    return [
        (piece.text[:cut], piece.text[cut:])
        for piece in ranked
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in usable and piece.text[cut:] in usable
    ]


def _tokens(source: Source, entry: str) -> list[str]:
    """Return the tokens of an entry of ``first`` or ``last``."""
    if entry == "extra_ids":
        count = source.settings.get("extra_ids", 100)
        return [f"<extra_id_{number}>" for number in range(count - 1, -1, -1)]
    role, _, default = entry.partition("=")
    stated = content(source.settings.get(role)) if default else source.tokens.get(role)
    return [stated or default or role]


def _scheme(source: Source) -> str:
    """Return the scheme of Metaspace: which words begin with a mark."""
    if not source.rules.prefix or source.flag("add_prefix_space", True):
        return "always"
    return "first" if source.rules.spaces == "first" else "never"


def pieces(source: Source) -> Tokenizer:
    """Return a tokenizer with the numbering and the normalizers that the rules of the class list."""
    rules = source.rules
    model = _read(source)
    scored = [(piece.text, piece.score) for piece in model.pieces]
    first, last = ([text for entry in part for text in _tokens(source, entry)] for part in (rules.first, rules.last))
    if source.rows is not None:
        last = last[: max(0, source.rows - len(first) - len(scored) + rules.skipped)]
    vocab = [*((text, 0.0) for text in first), *scored[rules.skipped :], *((text, 0.0) for text in last)]
    ids = {text: number for number, (text, _) in enumerate(vocab)}
    unknown = ids.get(source.tokens["unk_token"], model.unk_id) if rules.unknown is None else rules.unknown
    unknown = min(unknown, len(vocab) - 1)
    if rules.build == "bpe":
        merges = _merges(model, ids)
        tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=vocab[unknown][0], fuse_unk=True))
    else:
        tokenizer = Tokenizer(models.Unigram(vocab, unknown, False))
    check_table(model.charsmap, f"{source.folder}/{rules.files[0]}")
    table: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    steps = [normalizer for name in rules.steps for normalizer in STEPS[name](source, table)]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    _split(tokenizer, source)
    _add_kinds(tokenizer, model, rules.skipped)
    roles = {token for role, token in source.tokens.items() if role.endswith("_token")}
    extra = [text for text in (*first, *last) if text not in roles and not text.endswith("NOTUSED")]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in extra])
    return tokenizer


def _split(tokenizer: Tokenizer, source: Source) -> None:
    """Set the pre-tokenizer that marks the beginnings of words, and its decoder."""
    rules, scheme = source.rules, _scheme(source)
    if not rules.spaces:
        tokenizer.decoder = decoders.Replace(_SPACE, " ")
        return
    splitters: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Metaspace(_SPACE, scheme)]
    if rules.spaces == "words":
        splitters.insert(0, pre_tokenizers.WhitespaceSplit())
    if rules.split_punctuation is not None and source.flag("split_by_punct", rules.split_punctuation):
        splitters.insert(0, pre_tokenizers.Punctuation("isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.Metaspace(_SPACE, scheme)


def _add_kinds(tokenizer: Tokenizer, model: SentencePieceModel, skipped: int = 0) -> None:
    """Match control pieces and user-defined pieces as whole tokens; control pieces are special."""
    for piece in model.pieces[skipped:]:
        if piece.kind in (CONTROL, USER_DEFINED):
            special = piece.kind == CONTROL
            tokenizer.add_tokens([AddedToken(piece.text, normalized=False, special=special)])


def llama(source: Source) -> Tokenizer:
    """Return a tokenizer of BPE with byte pieces that marks a space before a text and does not split words."""
    model = _read(source)
    if model.algorithm != BPE:
        raise TokenizerError(
            f"{source.folder}/{source.rules.files[0]}: found a unigram model, expected BPE. Correct tokenizer_class.",
            where=source.folder,
        )
    ids = {piece.text: number for number, piece in enumerate(model.pieces)}
    tokenizer = Tokenizer(models.BPE(ids, _merges(model, ids), fuse_unk=True, byte_fallback=True))
    prefix = source.flag("add_prefix_space", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first" if prefix else "never", split=False)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    _add_kinds(tokenizer, model)
    return tokenizer


def sentencepiece_pieces(source: Source) -> Tokenizer:
    """Return a tokenizer with the pieces that the package sentencepiece finds."""
    from .python_words import sentencepieces, splitter

    name = source.rules.files[0]
    model = _read(source)
    vocab = {piece.text: number for number, piece in enumerate(model.pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=model.pieces[model.unk_id].text))
    tokenizer.pre_tokenizer = splitter(sentencepieces(source.files[name]))
    stripped = decoders.Replace(Regex(r"\A\s+|\s+\z"), "")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.Fuse(), stripped])
    return tokenizer
