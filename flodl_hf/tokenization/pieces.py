"""Tokenizers of sentencepiece models, numbered and normalized as each tokenizer class does.

The families of this package segment as sentencepiece itself does (``pipeline.py``). The other classes have the
normalizers, the numbering and the unknown id that transformers 5 gives them.

Leaves to others: reading the model file (``sentencepiece.py``), special tokens of roles, the template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from flodl_hf.errors import TokenizerError

from . import pipeline
from .charsmap import CharsMap
from .sentencepiece import BPE, BYTE, CONTROL, NORMAL, UNIGRAM, USER_DEFINED, SentencePieceModel, read_model
from .settings import ROLES, content
from .source import Source

__all__ = ["fairseq_numbers", "llama", "own_numbers", "pieces"]


def _segmenter(
    model: SentencePieceModel, vocab: Sequence[tuple[str, float]], unknown: int, source: Source
) -> Tokenizer:
    """Return a tokenizer with the segmentation model alone, ``vocab`` being in the order of ids."""
    if model.algorithm == BPE:
        ids = {text: index for index, (text, _) in enumerate(vocab)}
        return Tokenizer(
            models.BPE(
                ids,
                _merges(model, ids),
                unk_token=vocab[unknown][0],
                fuse_unk=True,
                byte_fallback=model.byte_fallback,
            )
        )
    return Tokenizer(models.Unigram(list(vocab), unknown, model.byte_fallback and source.byte_fallback))


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


def _scores(model: SentencePieceModel) -> list[tuple[str, float]]:
    """Return the pieces with scores that make Unigram treat each kind as sentencepiece does."""
    normal = [piece.score for piece in model.pieces if piece.kind == NORMAL] or [0.0]
    lowest, highest = min(normal), max(normal)
    out = []
    for piece in model.pieces:
        if piece.kind == USER_DEFINED:
            # sentencepiece's rule: such a symbol beats any other way to cover its bytes.
            score = max(len(piece.text.encode("utf-8")) * highest - 0.1, lowest)
        elif piece.kind == NORMAL:
            score = piece.score
        else:
            # Never matched in text: byte pieces by their spelling, the others because they are added tokens.
            score = lowest if piece.kind == BYTE else 0.0
        out.append((piece.text, score))
    return out


def _read_spm(source: Source, name: str) -> tuple[SentencePieceModel, str]:
    where = f"{source.folder}/{name}"
    return read_model(source.files[name], where), where


def _scheme(source: Source) -> str:
    """Return the scheme of Metaspace: whether words begin with a mark."""
    return "never" if source.rules.prefix and not source.flag("add_prefix_space", True) else "always"


def _finish(
    tokenizer: Tokenizer,
    model: SentencePieceModel,
    where: str,
    before: list[normalizers.Normalizer],
    source: Source,
    split_punctuation: bool = False,
) -> Tokenizer:
    # Offsets of words without the space before them, for the classes that have them in transformers.
    words = source.rules.spaces == "words" and pipeline.splits_words(model)
    tokenizer.normalizer = pipeline.normalizer(model, where, before, split_punctuation, words)
    if words:
        marks = pre_tokenizers.Metaspace(pipeline.SPACE, _scheme(source))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), marks])
    elif _scheme(source) == "never":
        raise TokenizerError(
            f"{source.folder}/tokenizer_config.json: add_prefix_space is false, expected true for a model whose "
            "pieces span words; correct the file, or save the tokenizer as tokenizer.json",
            where=f"{source.folder}/tokenizer_config.json",
            field="add_prefix_space",
            found=False,
        )
    elif (parts := pipeline.splitter(model, split_punctuation)) is not None:
        tokenizer.pre_tokenizer = parts
    tokenizer.decoder = pipeline.decoder()
    if model.algorithm == BPE:
        # No chain of merges leads to such a symbol, so it is taken out of the text beforehand.
        whole = [piece.text for piece in model.pieces if piece.kind == USER_DEFINED and len(piece.text) > 1]
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole])
    controls = [piece.text for piece in model.pieces if piece.kind == CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in controls if tokenizer.token_to_id(t) is not None]
    )
    return tokenizer


def own_numbers(source: Source, name: str = "") -> Tokenizer:
    """Return a tokenizer whose ids are those of a sentencepiece model, by default of the first file of the class."""
    rules = source.rules
    model, where = _read_spm(source, name or rules.files[0])
    vocab = _scores(model)
    lower = rules.lowercase is not None and source.flag("do_lower_case", rules.lowercase)
    before = pipeline.lowercase() if lower else []
    if rules.cleaned:
        # "9," is taken apart wherever it is met; a hopeless score keeps such pieces from being chosen.
        vocab = [(text, score - 100 if text[-1:] == "," and text[-2:-1].isdigit() else score) for text, score in vocab]
        before = pipeline.cleaning(keep_accents=source.flag("keep_accents", False), lower=lower)
    split = rules.split_punctuation is not None and source.flag("split_by_punct", rules.split_punctuation)
    return _finish(_segmenter(model, vocab, model.unk_id, source), model, where, before, source, split)


def fairseq_numbers(source: Source) -> Tokenizer:
    """Return a tokenizer numbered as in fairseq: the family's first tokens, then the other pieces."""
    rules = source.rules
    model, where = _read_spm(source, rules.files[0])
    skip = rules.skipped
    if len(model.pieces) <= skip or any(piece.kind == NORMAL for piece in model.pieces[:3]) or model.unk_id != 0:
        raise TokenizerError(
            f"{where}: starts with {[piece.text for piece in model.pieces[:3]]}, expected the unknown "
            "piece and two control pieces; it belongs to another family: correct tokenizer_class in "
            "tokenizer_config.json",
            where=where,
        )
    first = [source.tokens.get(name, name) for name in rules.first]
    vocab = [*((text, 0.0) for text in first), *_scores(model)[skip:], (source.tokens["mask_token"], 0.0)]
    unknown = next(i for i, (text, _) in enumerate(vocab) if text == source.tokens["unk_token"])
    tokenizer = _finish(_segmenter(model, vocab, unknown, source), model, where, [], source)
    unused = [text for text in rules.first if text not in ROLES]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in unused])
    return tokenizer


def _token(source: Source, entry: str) -> list[str]:
    """Return the tokens of an entry of ``first`` or ``last``."""
    if entry == "extra_ids":
        count = source.settings.get("extra_ids", 100)
        return [f"<extra_id_{number}>" for number in range(count - 1, -1, -1)]
    role, _, default = entry.partition("=")
    stated = content(source.settings.get(role)) if default else source.tokens.get(role)
    return [stated or default or role]


_QUOTES = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
_ACCENTS = [normalizers.NFKD(), normalizers.StripAccents()]
_SPACES = [normalizers.Replace(Regex(" {2,}"), " ")]
_BLANKS = [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC(), normalizers.Strip(False, True)]

Step = Callable[[Source, list[normalizers.Normalizer]], Sequence[normalizers.Normalizer]]

# Each returns normalizers, given the table of the model as a list of one or none.
STEPS: Mapping[str, Step] = {
    "quotes": lambda _, table: _QUOTES,
    "accents": lambda _, table: _ACCENTS,
    "accents unless kept": lambda source, table: [] if source.flag("keep_accents", True) else _ACCENTS,
    "lower": lambda source, table: [normalizers.Lowercase()] if source.flag("do_lower_case", False) else [],
    "charsmap": lambda _, table: table,
    "charsmap or lines": lambda _, table: table or [normalizers.Replace("\n", " ")],
    "spaces": lambda _, table: _SPACES,
    "spaces after charsmap": lambda _, table: _SPACES if table else [],
    "marked spaces": lambda _, table: [normalizers.Replace(Regex(" {2,}"), pipeline.SPACE)],
    "marks": lambda _, table: [normalizers.Replace(" ", pipeline.SPACE)],
    "blanks": lambda _, table: _BLANKS,
}


def pieces(source: Source) -> Tokenizer:
    """Return a tokenizer with the numbering and the normalizers that the rules of the class list."""
    rules = source.rules
    model, where = _read_spm(source, rules.files[0])
    if model.algorithm not in (UNIGRAM, BPE):
        raise TokenizerError(f"{where}: found another algorithm, expected unigram or BPE", where=where)
    scored = [(piece.text, piece.score) for piece in model.pieces]
    first, last = ([text for entry in part for text in _token(source, entry)] for part in (rules.first, rules.last))
    if source.rows is not None:
        last = last[: max(0, source.rows - len(first) - len(scored) + rules.skipped)]
    vocab = [*((text, 0.0) for text in first), *scored[rules.skipped :], *((text, 0.0) for text in last)]
    ids = {text: number for number, (text, _) in enumerate(vocab)}
    unknown = rules.unknown
    if unknown is None:
        unknown = ids.get(source.tokens["unk_token"], model.unk_id)
    tokenizer = _segmenter(model, vocab, min(unknown, len(vocab) - 1), source)
    table: list[normalizers.Normalizer] = (
        [normalizers.Precompiled(model.charsmap)] if CharsMap(model.charsmap, where) else []
    )
    steps = [normalizer for name in rules.steps for normalizer in STEPS[name](source, table)]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = _scheme(source)
    marks = pre_tokenizers.Metaspace(pipeline.SPACE, scheme)
    if rules.spaces:
        splitters = [pre_tokenizers.WhitespaceSplit(), marks] if rules.spaces == "words" else [marks]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
        tokenizer.decoder = decoders.Metaspace(pipeline.SPACE, scheme)
    else:
        tokenizer.decoder = decoders.Replace(pipeline.SPACE, " ")
    _add_kinds(tokenizer, model, rules.skipped)
    roles = {token for role, token in source.tokens.items() if role.endswith("_token")}
    extra = [text for text in (*first, *last) if text not in roles]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in extra])
    return tokenizer


def _add_kinds(tokenizer: Tokenizer, model: SentencePieceModel, skipped: int = 0) -> None:
    """Match control pieces and user-defined pieces as whole tokens; control pieces are special."""
    for piece in model.pieces[skipped:]:
        if piece.kind in (CONTROL, USER_DEFINED):
            special = piece.kind == CONTROL
            tokenizer.add_tokens([AddedToken(piece.text, normalized=False, special=special)])


def llama(source: Source) -> Tokenizer:
    """Return a tokenizer of BPE with byte pieces that marks a space before a text and does not split words."""
    model, where = _read_spm(source, source.rules.files[0])
    if model.algorithm != BPE:
        raise TokenizerError(f"{where}: found a unigram model, expected BPE; correct tokenizer_class", where=where)
    ids = {piece.text: number for number, piece in enumerate(model.pieces)}
    tokenizer = Tokenizer(models.BPE(ids, _merges(model, ids), fuse_unk=True, byte_fallback=True))
    prefix = source.flag("add_prefix_space", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(pipeline.SPACE, "first" if prefix else "never", split=False)
    parts = [decoders.Replace(pipeline.SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    _add_kinds(tokenizer, model)
    return tokenizer
