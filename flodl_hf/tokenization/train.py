"""A WordPiece tokenizer trained on texts, with the special tokens of BERT, for models without pre-trained weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from tokenizers import normalizers, pre_tokenizers

from flodl_hf.tokenization.python_words import merge_pair

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
