"""A WordPiece tokenizer learned from texts, for models that start from nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from flodl_hf.tokenizer import Tokenizer

__all__ = ["learn_word_piece"]


def learn_word_piece(texts: Sequence[str], size: int, specials: Sequence[str]) -> Tokenizer:
    """Return a lower-casing WordPiece tokenizer as BERT's is, learned from ``texts``.

    Args:
        texts: what to learn from.
        size: most tokens of the vocabulary.
        specials: the special tokens in the order padding, unknown, classification, separator, mask.
    """
    pad, unk, cls, sep, mask = specials
    inner = tokenizers.Tokenizer(models.WordPiece(unk_token=unk))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(specials), show_progress=False)
    inner.train_from_iterator(texts, trainer)
    ids = {name: inner.token_to_id(name) for name in (cls, sep)}
    inner.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=list(ids.items())
    )
    settings = {
        "tokenizer_class": "BertTokenizer", "do_lower_case": True, "pad_token": pad, "unk_token": unk,
        "cls_token": cls, "sep_token": sep, "mask_token": mask, "model_max_length": 64,
    }  # fmt: skip
    return Tokenizer.from_files(
        {
            "tokenizer.json": inner.to_str(pretty=True).encode(),
            "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
        },
        folder="learned from texts",
        model_type="bert",
    )
