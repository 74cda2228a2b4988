"""A tokenizer of the tokenizers library that is checked at load and never changed afterwards; ids of many texts.

Padding and truncation sections of the definition are removed; only their sides are used. Settings files, windows and
padding are in other modules.

Creating an encoding for each text takes longer than computing its ids. The library tokenises the parts of a pre-split
text separately, exactly as it does texts. Therefore several texts are passed as parts of one, with a special token
after each that marks its end.

Of a long text that is truncated, a prefix is tokenised, and a longer one if its tokens do not suffice. A prefix ends
before a space where the tokenizer splits the text, so its tokens are the first tokens of the whole text. A tokenizer
that does not split at spaces reads whole texts.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from struct import pack
from typing import Any, TypeVar

import numpy as np
import tokenizers

from flodl.errors import printable
from flodl_hf.errors import TokenizerError
from flodl_hf.tokenization.cuts import Row, rows_from_joined
from flodl_hf.tokenization.guard import (
    MAX_GROWTH,
    check_texts,
    growth,
    parts_of,
    raise_translated,
    strings_of,
    translated_errors,
)

# Values of TOKENIZERS_PARALLELISM that the library reads as "no".
_OFF = ("", "off", "false", "f", "no", "n", "0")
# With fewer texts, starting threads takes longer than it saves.
_LEAST = 256


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def over_threads(run: Callable[[list[Any]], list[Any]], batch: list[Any], each: int = 1) -> list[Any]:
    """Return ``run(batch)``, in parallel parts if the library itself uses one core.

    Args:
        run: tokenises a list and releases the interpreter lock.
        batch: texts, pairs, or blocks of texts.
        each: texts in each of them.
    """
    if len(batch) * each < _LEAST or os.environ.get("TOKENIZERS_PARALLELISM", "true").lower() not in _OFF:
        return run(batch)
    limit = os.environ.get("RAYON_NUM_THREADS", "")
    workers = min(16, cores(), int(limit) if limit.isdecimal() and int(limit) else 16)
    if workers == 1:
        return run(batch)
    # More parts than threads: texts differ in length.
    size = max(_LEAST // 4 // each, 1, -(-len(batch) // (4 * workers)))
    with ThreadPoolExecutor(workers, thread_name_prefix="flodl-hf-tokenise") as pool:
        parts = pool.map(run, [batch[i : i + size] for i in range(0, len(batch), size)])
        return [encoding for part in parts for encoding in part]


R = TypeVar("R")

PATIENCE_S = 30.0
PER_CHARACTER_S = 50e-6  # published patterns take less than a fiftieth
# Patterns of the tokenizers that transformers itself writes.
KNOWN = (" {2,}", "\\s+", "\\s", "[^\\S\\n]+", "[\\r\\n]+")


def foreign_patterns(*parts: Any) -> tuple[str, ...]:
    """Return the regular expressions of parts of a definition that no published tokenizer has."""
    found = (pattern for part in parts for pattern in strings_of(part, "Regex"))
    return tuple(dict.fromkeys(pattern for pattern in found if pattern not in KNOWN))


def within_time(run: Callable[[], R], characters: int, patterns: tuple[str, ...], source: str) -> R:
    """Return ``run()``, which must release the interpreter lock.

    Args:
        run: function without arguments. If it exceeds the limit, its thread continues until the process ends.
        characters: number of characters of the texts.
        patterns: the regular expressions, for messages.
        source: the tokenizer.

    Raises:
        TokenizerError: it took too long.
    """
    future: Future[R] = Future()

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    limit = PATIENCE_S + PER_CHARACTER_S * characters
    threading.Thread(target=work, name="flodl-hf-pattern", daemon=True).start()
    if wait([future], limit).done:
        return future.result()
    listed = ", ".join(printable(pattern, 80) for pattern in patterns[:3])
    raise TokenizerError(
        f"{source}: splitting {characters:,} characters took more than {limit:.0f} s by the patterns of its "
        f"tokenizer.json ({listed}), which may not end on some texts. Do not use this tokenizer unless you know "
        "who made it, or give it shorter texts.",
        where=source,
        patterns=list(patterns),
        limit_s=limit,
    )


Flat = tuple[np.ndarray, np.ndarray]
"""Ids of many texts end to end, without specials, ``(tokens,)``, and how many each has, ``(texts,)``."""

Mark = tuple[str, int]
"""A special token that ends each text of a block, and its id."""

# Most texts in a block, and about the fewest characters: each block costs an object, and texts of a block are tokenised
# one after the other.
MAX_TEXTS = 64
LEAST_CHARS = 512
_PROBES = ("a", "", "a, b", " b a ")


def mark_of(inner: tokenizers.Tokenizer) -> Mark | None:
    """Return a special token that rarely occurs in texts; None if no token separates texts without changing their ids.

    Args:
        inner: the tokenizer.
    """
    if inner.encode_special_tokens:
        return None
    unknown = getattr(inner.model, "unk_token", None)
    added = sorted(inner.get_added_tokens_decoder().items())
    special = [(token.content, i) for i, token in added if token.special and token.content != unknown]
    # Texts do not contain the padding token.
    special.sort(key=lambda entry: "pad" not in entry[0].lower())
    run = partial(inner.encode_batch_fast, is_pretokenized=True, add_special_tokens=False)
    alone = [encoding.ids for encoding in inner.encode_batch_fast(list(_PROBES), add_special_tokens=False)]
    for mark in special[:4]:
        if run([[mark[0]]])[0].ids != [mark[1]] or any(mark[1] in ids for ids in alone):
            continue
        found = _in_blocks(_PROBES, mark, run, len(_PROBES))
        if found and [part.tolist() for part in found] == [list(chain(*alone)), list(map(len, alone))]:
            return mark
    return None


def _in_blocks(
    texts: Sequence[str], mark: Mark, run: Callable[[list[Any]], list[tokenizers.Encoding]], size: int
) -> Flat | None:
    """Return the ids of all texts, tokenised in blocks of ``size`` texts; None if a text contains the mark."""
    parts: list[str] = [mark[0]] * (2 * len(texts))
    parts[::2] = texts
    encodings = run([parts[i : i + 2 * size] for i in range(0, len(parts), 2 * size)])
    ids = packed(map(attrgetter("ids"), encodings))
    ends = np.flatnonzero(ids == mark[1])
    # One mark follows each text; further marks are in the texts.
    if len(ends) != len(texts):
        return None
    return np.delete(ids, ends), np.diff(ends, prepend=-1) - 1


def packed(lists: Iterable[Sequence[int]]) -> np.ndarray:
    """Return the numbers of many lists as one int32 array; faster than one iterator of all numbers."""
    parts = bytearray()
    for numbers in lists:
        parts += pack(f"{len(numbers)}i", *numbers)
    return np.frombuffer(parts, np.int32)


# Assumed characters of a token; English has four or five.
CHARS = 6
# Tokens behind the requested ones, although the tokens before a split do not depend on the text behind it.
MARGIN = 8
_SPLIT_PROBES = ("ab cd", "a1 2b", "x, y")


def splits_at_spaces(inner: tokenizers.Tokenizer) -> bool:
    """Return whether no token depends on the characters behind the first space after it."""
    # A prefix could end inside an added token with white space.
    added = inner.get_added_tokens_decoder().values()
    if inner.pre_tokenizer is None or any(char.isspace() for token in added for char in token.content):
        return False

    def pieces(text: str) -> list[str]:
        text = inner.normalizer.normalize_str(text) if inner.normalizer else text
        return [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str(text)]

    for probe in _SPLIT_PROBES:
        before, whole = pieces(probe.partition(" ")[0]), pieces(probe)
        if len(before) == len(whole) or whole[: len(before)] != before:
            return False
    return True


def prefix(text: str, size: int) -> str:
    """Return a prefix of about ``size`` characters that ends with a letter or digit before a space, or all of a text.

    A special token may contain all white space before it, and normalization may remove other characters.
    """
    end = size
    while 0 < end < len(text):
        end = text.rfind(" ", size // 2, end)
        if end > 0 and text[end - 1].isalnum():
            return text[:end]
    return text if size >= len(text) else prefix(text, 2 * size)


def beginnings(texts: Sequence[str], wanted: int, flat: Callable[[Sequence[str]], Flat]) -> tuple[list[str], Flat]:
    """Return prefixes of texts with at least ``wanted`` tokens, or whole texts, and their ids.

    Args:
        texts: texts for a tokenizer of which `splits_at_spaces` is True.
        wanted: number of requested tokens.
        flat: ids of texts, without special tokens.
    """
    size = CHARS * (wanted + MARGIN)
    read = [text if len(text) <= size else prefix(text, size) for text in texts]
    ids, counts = flat(read)
    while True:
        few = [at for at in np.flatnonzero(counts < wanted + MARGIN).tolist() if len(read[at]) < len(texts[at])]
        if not few:
            return read, (ids, counts)
        size *= 2
        longer = [prefix(texts[at], size) for at in few]
        for at, text in zip(few, longer, strict=True):
            read[at] = text
        ids, counts = replaced((ids, counts), few, flat(longer))


def replaced(flat: Flat, texts: list[int], others: Flat) -> Flat:
    """Return the ids of texts, of which some are replaced by other ids."""
    ids, counts = flat
    chosen = np.zeros(len(counts), bool)
    chosen[texts] = True
    kept = ids[np.repeat(~chosen, counts)]
    counts = counts.copy()
    counts[texts] = others[1]
    mask = np.repeat(chosen, counts)
    found = np.empty(len(mask), ids.dtype)
    found[mask], found[~mask] = others[0], kept
    return found, counts


# With fewer texts, one encoding for each is as fast as blocks.
FEW_TEXTS = 32
MAX_FRAME = 64  # special tokens around two texts; published templates have at most five


def joins_words(splitter: dict[str, Any] | None) -> bool:
    """Return whether pre-split words must be joined by spaces, from the definition of the pre-tokenizer.

    Byte-level BPE without ``add_prefix_space`` would glue pre-split words together, so the words are joined by single
    spaces, tokenized as one text, and found again by offsets.
    """
    return any(
        (part.get("type") == "ByteLevel" and not part.get("add_prefix_space"))
        or (part.get("type") == "Metaspace" and part.get("prepend_scheme") == "never")
        for part in parts_of(splitter)
    )


class Backend:
    """A frozen tokenizer of the tokenizers library; every method may be called from any thread."""

    def __init__(self, inner: tokenizers.Tokenizer, source: str) -> None:
        """Check and store a tokenizer, which must not be changed afterwards.

        Args:
            inner: the tokenizer.
            source: its source, for messages.

        Raises:
            TokenizerError: if its normalizer could exhaust memory on a short text.
        """
        self.source = source
        with translated_errors(source, "the tokenizer definition is damaged; fetch it again"):
            padding, truncation = inner.padding or {}, inner.truncation or {}
            # Both change the tokenizer, which is why they are called here once and never again.
            inner.no_padding()
            inner.no_truncation()
            normalizer = json.loads(inner.normalizer.__getstate__()) if inner.normalizer else {}
            splitter: Any = {}
            try:
                splitter = json.loads(inner.pre_tokenizer.__getstate__()) if inner.pre_tokenizer else {}
            except Exception as error:
                if "Custom PreTokenizer" not in str(error):
                    raise
                splitter = None  # Python code cannot be serialized
        factor, added = growth(normalizer), inner.num_special_tokens_to_add(True)
        for found, limit, what, why in (
            (
                factor,
                MAX_GROWTH,
                f"the normalizer can turn one character into {factor}",
                "a short text could exhaust memory",
            ),
            (added, MAX_FRAME, f"the template puts {added:,} special tokens around two texts", "no text would fit"),
        ):
            if found > limit:
                fault = f"{source}: {what}; at most {limit} are allowed, because {why}; do not use this file"
                raise TokenizerError(fault, where=source, found=found, expected=limit)
        self.inner = inner
        self.by_code = splitter is None
        self._splits_as_bert = splitter is not None and splitter.get("type") == "BertPreTokenizer"
        self.patterns = foreign_patterns(normalizer, splitter)
        self.pair_fault: str | None = None  # why pairs cannot be framed for the model
        # Used only if the token and its id agree.
        pad_token, pad_id = padding.get("pad_token"), padding.get("pad_id")
        agree = isinstance(pad_token, str) and inner.token_to_id(pad_token) == pad_id
        self.pad_token: str | None = pad_token if agree else None
        directions = {"padding_side": padding.get("direction"), "truncation_side": truncation.get("direction")}
        self.sides = {name: side for name, side in directions.items() if side in ("left", "right")}
        self.joins_words = joins_words(splitter)
        template = json.loads(inner.post_processor.__getstate__()) if inner.post_processor else {}
        # Whether the first token of each window keeps one space in its offsets, as the library trims them.
        self.keeps_space = bool(template.get("trim_offsets") and template.get("add_prefix_space"))
        self.is_bpe = type(inner.model).__name__ == "BPE"

    @cached_property
    def ids_show_words(self) -> bool:
        """Whether `continued` gives the borders between words.

        It does after BERT's split, which leaves no word that begins with WordPiece's prefix of continuations.
        """
        prefix = getattr(self.inner.model, "continuing_subword_prefix", None)
        if not prefix or not self._splits_as_bert:
            return False
        return not any(token.content.startswith(prefix) for token in self.inner.get_added_tokens_decoder().values())

    @cached_property
    def continued(self) -> np.ndarray:
        """Whether each id continues a word, ``(vocabulary,)``."""
        prefix, vocabulary = self.inner.model.continuing_subword_prefix, self.inner.get_vocab()
        found = np.zeros(max(vocabulary.values()) + 1, bool)
        found[[number for token, number in vocabulary.items() if token.startswith(prefix)]] = True
        return found

    def encodings(
        self,
        texts: Sequence[Any],
        pairs: Sequence[Any] | None = None,
        *,
        words: bool = False,
        special: bool = True,
        fast: bool = False,
    ) -> list[tokenizers.Encoding]:
        """Return one encoding for each text or pair.

        Args:
            texts: strings, or lists of words.
            pairs: as many second texts.
            words: the texts are lists of words.
            special: add the template's special tokens.
            fast: leave out offsets and word numbers.
        """
        if pairs is not None and len(pairs) != len(texts):
            raise TokenizerError(
                f"{len(texts)} texts and {len(pairs)} second texts; pass one second text for each text",
                found=len(pairs),
                expected=len(texts),
            )
        if pairs is not None and special and self.pair_fault is not None:
            raise TokenizerError(self.pair_fault, where=self.source)
        batch = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        try:
            if len(batch) == 1 and not fast and not self.patterns:
                # Starting threads for a batch takes as long as encoding one text.
                pair = (batch[0], None) if pairs is None else batch[0]
                return [self.inner.encode(*pair, is_pretokenized=words, add_special_tokens=special)]
            run = self.inner.encode_batch_fast if fast else self.inner.encode_batch
            run = partial(run, is_pretokenized=words, add_special_tokens=special)
            return self._run(run, batch, [texts, pairs or ()])
        except BaseException as cause:
            remedy = "the tokenizer cannot treat one of the texts; check its files"
            raise_translated(cause, f"{self.source}: encoding", remedy, texts, pairs)

    def word_tokens(self, text: str) -> list[str] | None:
        """Return the words that Python code splits, known or not; None where the vocabulary has parts of words."""
        if not self.by_code or type(self.inner.model).__name__ != "WordLevel":
            return None
        added = {number: token.content for number, token in self.inner.get_added_tokens_decoder().items()}
        (encoding,) = self.encodings([text], special=False)
        normalizer, splitter = self.inner.normalizer, self.inner.pre_tokenizer

        def split(part: str) -> list[str]:
            part = normalizer.normalize_str(part) if normalizer else part
            return [word for word, _ in splitter.pre_tokenize_str(part)] if splitter and part else []

        out, at = [], 0
        for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if added.get(number) == text[start:end].strip():
                out += [*split(text[at:start]), added[number]]
                at = end
        return out + split(text[at:])

    def _run(
        self,
        run: Callable[[list[Any]], list[tokenizers.Encoding]],
        batch: list[Any],
        texts: Sequence[Any],
        each: int = 1,
    ) -> list[tokenizers.Encoding]:
        if not self.patterns:
            return over_threads(run, batch, each)
        characters = sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in chain(*texts))
        return within_time(lambda: run(batch), characters, self.patterns, self.source)

    @cached_property
    def _mark(self) -> Mark | None:
        return mark_of(self.inner)

    @cached_property
    def splits_at_spaces(self) -> bool:
        """Whether a prefix of a text that ends before a space has the first tokens of the text."""
        return not self.by_code and not self.patterns and splits_at_spaces(self.inner)

    def flat(self, texts: Sequence[str]) -> Flat:
        """Return the ids of texts."""
        if len(texts) > 1 and texts[0] == texts[-1] and texts.count(texts[0]) == len(texts):
            ids, counts = self.flat(texts[:1])  # the query of many documents
            return np.tile(ids, len(texts)), np.repeat(counts, len(texts))
        if len(texts) >= FEW_TEXTS and (mark := self._mark):
            least = LEAST_CHARS * len(texts) // max(1, sum(map(len, texts)))
            size = max(1, min(MAX_TEXTS, max(least, len(texts) // (8 * cores()))))
            run = partial(self.inner.encode_batch_fast, is_pretokenized=True, add_special_tokens=False)
            with translated_errors(f"{self.source}: encoding", "the tokenizer cannot treat one of the texts", texts):
                found = _in_blocks(texts, mark, lambda blocks: self._run(run, blocks, [texts], size), size)
            if found is not None:
                return found
        encodings = self.encodings(texts, special=False, fast=True)
        counts = np.fromiter(map(len, encodings), np.int64, len(encodings))
        ids = chain.from_iterable(map(attrgetter("ids"), encodings))
        return np.fromiter(ids, np.int32, int(counts.sum())), counts

    def rows(
        self,
        texts: Sequence[Any],
        pairs: Sequence[Any] | None = None,
        *,
        words: bool = False,
        special: bool = True,
        fast: bool = False,
    ) -> list[Row]:
        """Return one uncut row for each text or pair; arguments as in `encodings`."""
        firsts, seconds = texts, pairs
        is_joined = words and self.joins_words
        if is_joined:
            check_texts(texts, "text")
            check_texts(pairs or (), "second text")
            # An empty word has no tokens, and a space for it would have some.
            firsts = [" ".join(filter(None, text)) for text in texts]
            seconds = None if pairs is None else [" ".join(filter(None, text)) for text in pairs]
            words = fast = False
        rows = [
            Row(
                ids=encoding.ids,
                type_ids=encoding.type_ids,
                offsets=() if fast else encoding.offsets,
                word_ids=() if fast else encoding.word_ids,
                sequence_ids=encoding.sequence_ids,
                special=[flag == 1 for flag in encoding.special_tokens_mask],
                tokens=() if fast else encoding.tokens,
            )
            for encoding in self.encodings(firsts, seconds, words=words, special=special, fast=fast)
        ]
        return rows_from_joined(rows, texts, pairs) if is_joined else rows
