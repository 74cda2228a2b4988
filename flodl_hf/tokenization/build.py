"""A tokenizer built from vocabulary files, without transformers and without sentencepiece.

Decides: which family's rules apply, which special tokens there are, and their ids.
Leaves to others: reading sentencepiece models (``sentencepiece.py``), normalization (``pipeline.py``),
settings files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from flodl.errors import capped, printable, shown
from flodl_hf.errors import TokenizerError
from flodl_hf.families import families
from flodl_hf.family import Family, FamilyTokenizer
from flodl_hf.weights.file_names import vocabularies_below

from . import pipeline
from .added import add_missing, add_roles, add_stated, frame
from .guard import guarded
from .plain_files import read_merges, read_vocab_json, read_vocab_txt
from .sentencepiece import BPE, BYTE, CONTROL, NORMAL, USER_DEFINED, SentencePieceModel, read_model
from .settings import ROLES, class_family, content, cuts_by, rules_of, said_of
from .source import TOKENIZER_FILES, parse_json, vocabulary_file

__all__ = ["build_backend"]


@dataclass(frozen=True, slots=True)
class Source:
    """What a builder gets to see.

    Attributes:
        files: file contents by name.
        folder: where they came from, for messages.
        settings: ``tokenizer_config.json``.
        rules: of the family, for what these do not say.
        tokens: special tokens by role, after the family's defaults.
        byte_fallback: whether byte pieces of a unigram model are used.
    """

    files: Mapping[str, bytes]
    folder: str
    settings: Mapping[str, Any]
    rules: FamilyTokenizer
    tokens: Mapping[str, str]
    byte_fallback: bool = False

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean setting, the default if it is absent or null."""
        value = self.settings.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise TokenizerError(
                f"{self.folder}/tokenizer_config.json: {name} is {shown(value, 60)}, expected true or false; "
                "correct the file",
                where=self.folder,
                field=name,
                found=value,
            )
        return value


def _word_pieces(source: Source) -> Tokenizer:
    vocab = read_vocab_txt(source.files["vocab.txt"], f"{source.folder}/vocab.txt")
    unknown = source.tokens["unk_token"]
    _require(source, vocab, ("unk_token", "cls_token", "sep_token"), "vocab.txt")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    strip = source.settings.get("strip_accents")
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
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


def _byte_level(source: Source) -> Tokenizer:
    vocab = read_vocab_json(source.files["vocab.json"], f"{source.folder}/vocab.json")
    merges = read_merges(source.files["merges.txt"], f"{source.folder}/merges.txt", vocab)
    _require(source, vocab, ("cls_token", "sep_token"), "vocab.json")
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    )
    prefix = source.flag("add_prefix_space", False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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


def _finish(
    tokenizer: Tokenizer,
    model: SentencePieceModel,
    where: str,
    before: list[normalizers.Normalizer],
    split_punctuation: bool = False,
) -> Tokenizer:
    tokenizer.normalizer = pipeline.normalizer(model, where, before, split_punctuation)
    words = pipeline.splitter(model, split_punctuation)
    if words is not None:
        tokenizer.pre_tokenizer = words
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


def _own_numbers(source: Source) -> Tokenizer:
    """Return a tokenizer whose ids are those of the sentencepiece model."""
    rules = source.rules
    model, where = _read_spm(source, rules.files[0])
    vocab = _scores(model)
    lower = rules.lowercase is not None and source.flag("do_lower_case", rules.lowercase)
    before = pipeline.lowercase() if lower else []
    if rules.cleaned:
        # "9," is taken apart wherever it is met; a hopeless score keeps such pieces from being chosen.
        vocab = [(text, score - 100 if text[-1:] == "," and text[-2:-1].isdigit() else score) for text, score in vocab]
        before = pipeline.cleaning(keep_accents=source.flag("keep_accents", False), lower=lower)
    split = rules.split_punctuation is not None and source.flag("split_by_punct", rules.split_punctuation)
    return _finish(_segmenter(model, vocab, model.unk_id, source), model, where, before, split)


def _fairseq_numbers(source: Source) -> Tokenizer:
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
    tokenizer = _finish(_segmenter(model, vocab, unknown, source), model, where, [])
    unused = [text for text in rules.first if text not in ROLES]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in unused])
    return tokenizer


def _builder(rules: FamilyTokenizer) -> Callable[[Source], Tokenizer]:
    """Return what makes a tokenizer of a family's files."""
    known = {"vocab.txt": _anywhere if rules.anywhere else _word_pieces, "vocab.json": _byte_level}
    return known.get(rules.files[0], _fairseq_numbers if rules.first else _own_numbers)


def _require(source: Source, vocab: Mapping[str, int], roles: Sequence[str], name: str) -> None:
    missing = [f"{role} {printable(source.tokens[role], 40)}" for role in roles if source.tokens[role] not in vocab]
    if missing:
        raise TokenizerError(
            f"{source.folder}/{name}: lacks\n{capped(missing)}\n"
            "expected every special token in it; fetch the file again, or name the right tokens in "
            "tokenizer_config.json",
            where=f"{source.folder}/{name}",
            missing=missing,
        )


def _choose(files: Mapping[str, bytes], folder: str, model_type: str | None, settings: Mapping[str, Any]) -> Family:
    """Return whose rules apply: the tokenizer's class decides, else the model's family, else the files."""
    present = [f for f in families() if rules_of(f).files and all(name in files for name in rules_of(f).files)]
    for word in (class_family(settings), model_type):
        for family in present:
            if family.model_type == word:
                return family
    if not present:
        below = vocabularies_below(Path(folder))
        raise TokenizerError(
            f"{folder}: there is no tokenizer; expected tokenizer.json, vocab.txt, vocab.json with "
            "merges.txt, "
            "sentencepiece.bpe.model, spm.model or spiece.model; "
            + (
                f"the folder {below[0]!r} in it has one: pass subfolder={below[0]!r}"
                if below
                else "copy the tokenizer files of the checkpoint there"
            ),
            where=folder,
            found=sorted(files),
            expected=TOKENIZER_FILES,
        )
    # Two readings of one sentencepiece model are plausible, and their ids differ.
    chosen = rules_of(present[0])
    others = [f for f in present if rules_of(f).files == chosen.files and rules_of(f).first != chosen.first]
    if others and model_type is None:
        names = [family.class_prefix for family in (present[0], others[0])]
        raise TokenizerError(
            f"{folder}: {chosen.files[0]} may be of {names[0]} or of {names[1]}, which number it differently; "
            "pass model_type, or put config.json beside it",
            where=folder,
            found=[present[0].model_type, *(family.model_type for family in others)],
        )
    return present[0]


def build_backend(
    files: Mapping[str, bytes],
    *,
    folder: str,
    model_type: str | None,
    settings: Mapping[str, Any],
    rows: int | None = None,
    byte_fallback: bool = False,
) -> Tokenizer:
    """Return the tokenizer that vocabulary files define.

    Args:
        files: tokenizer files by name.
        folder: where they came from, for messages.
        model_type: family of the model, if known.
        settings: ``tokenizer_config.json``.
        rows: rows of the model's word table, if known: further special tokens beyond them are not added.
        byte_fallback: split what a sentencepiece model of the unigram kind does not know into its byte pieces, as
            sentencepiece does; transformers gives the unknown token.

    Raises:
        TokenizerError: if there are no vocabulary files, or they are damaged, or do not say how words are cut.
    """
    if words := cuts_by(model_type, settings):
        raise TokenizerError(
            f"{folder}/{vocabulary_file(files)}: this tokenizer cuts words by {words}, which is not here; expected "
            "tokenizer.json, or another tokenizer_class. Give ids that transformers' tokenizer makes, or put a "
            "tokenizer.json there that cuts as you want.",
            where=folder,
            words=words,
        )
    family = _choose(files, folder, model_type, settings)
    own = rules_of(family)
    mapped: Mapping[str, Any] = {}
    if "special_tokens_map.json" in files:
        mapped = parse_json(files["special_tokens_map.json"], f"{folder}/special_tokens_map.json")
    decoder = settings.get("added_tokens_decoder")
    by_text = {content(v): v for v in decoder.values()} if isinstance(decoder, Mapping) else {}
    stated = {role: next(filter(None, said_of(role, settings, mapped)), None) for role in ROLES}
    # A bare name says nothing about spaces; the entry with its id may.
    stated = {role: by_text.get(v, v) if isinstance(v, str) else v for role, v in stated.items()}
    tokens = {**own.special, **{role: text for role, v in stated.items() if (text := content(v))}}
    source = Source(files, folder, settings, own, tokens, byte_fallback)
    with guarded(f"{folder}/{vocabulary_file(files)}", "the vocabulary files are damaged; fetch them again"):
        tokenizer = _builder(own)(source)
        # First those whose ids are stated: a role's token that the vocabulary lacks takes the next free id.
        add_stated(tokenizer, files, settings, folder)
        add_roles(tokenizer, tokens, stated, mask_takes_space=own.mask_takes_space)
        add_missing(tokenizer, settings, mapped, {}, rows, decoder=False)
        frame(tokenizer, own.template, tokens, folder, prefix=source.flag("add_prefix_space", False))
    return tokenizer
