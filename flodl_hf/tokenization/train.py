"""A WordPiece tokenizer trained on texts, with the special tokens of BERT, for models without pre-trained weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def wordpiece_files(texts: Iterable[str], vocab_size: int, *, lowercase: bool, max_length: int) -> dict[str, bytes]:
    """Return the files of a BERT tokenizer with a vocabulary learned from ``texts``, the same for the same texts.

    Args:
        texts: training texts.
        vocab_size: most tokens, special ones included.
        lowercase: fold case and strip accents.
        max_length: ``model_max_length`` of ``tokenizer_config.json``.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    splitter = pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    vocab = _learn(words, vocab_size)
    inner = Inner(models.WordPiece(vocab, unk_token="[UNK]"))
    inner.normalizer = normalizer
    inner.pre_tokenizer = splitter
    inner.decoder = decoders.WordPiece(prefix="##")
    inner.add_special_tokens(list(_SPECIAL))
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": lowercase,
        "model_max_length": max_length,
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    by_id = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.json": inner.to_str(pretty=True).encode("utf-8"),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode("utf-8"),
        "vocab.txt": "".join(f"{token}\n" for token in by_id).encode("utf-8"),
    }


def _learn(words: Counter[str], size: int) -> dict[str, int]:
    """Return token to id: special tokens, characters by frequency, then merges of the most frequent pair.

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
                splits[word] = _merge(parts, pair, token)
    return {token: number for number, token in enumerate(vocab)}


def _merge(parts: list[str], pair: tuple[str, str], token: str) -> list[str]:
    out = []
    at = 0
    while at < len(parts):
        if at + 1 < len(parts) and (parts[at], parts[at + 1]) == pair:
            out.append(token)
            at += 2
        else:
            out.append(parts[at])
            at += 1
    return out
