"""A tokenizer of the tokenizers library that is checked at load and never changed afterwards.

Padding and truncation sections of the definition are removed; only their sides are used. Settings files, windows and
padding are in other modules.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, TypeVar

import numpy as np
import tokenizers

from flodl.errors import printable
from flodl_hf.errors import TokenizerError
from flodl_hf.tokenization.blocks import Flat, Mark, in_blocks, mark_of, splits_at_spaces
from flodl_hf.tokenization.charsmap import check_definition, strings_of
from flodl_hf.tokenization.cuts import Row
from flodl_hf.tokenization.guard import MAX_GROWTH, check_texts, growth, translated_errors
from flodl_hf.tokenization.source import decode_text, parse_json
from flodl_hf.tokenization.words import join, joins_words, rows_from_joined

_VARIABLE = "TOKENIZERS_PARALLELISM"
# Values that the library reads as "no".
_OFF = ("", "off", "false", "f", "no", "n", "0")
# With fewer texts, starting threads takes longer than it saves.
_LEAST = 256


def switched_off() -> bool:
    """Return whether the library uses one core now."""
    value = os.environ.get(_VARIABLE)
    return value is not None and value.lower() in _OFF


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
    if len(batch) * each < _LEAST or not switched_off():
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


def foreign_patterns(*parts: str | bytes) -> tuple[str, ...]:
    """Return the regular expressions of parts of a definition (JSON texts) that no published tokenizer has."""
    found = (pattern for part in parts for pattern in strings_of(json.loads(part), "Regex"))
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
    result: list[R] = []
    fault: list[BaseException] = []

    def work() -> None:
        try:
            result.append(run())
        except BaseException as error:
            fault.append(error)

    limit = PATIENCE_S + PER_CHARACTER_S * characters
    thread = threading.Thread(target=work, name="flodl-hf-pattern", daemon=True)
    thread.start()
    thread.join(limit)
    if fault:
        raise fault[0]
    if result:
        return result[0]
    listed = ", ".join(printable(pattern, 80) for pattern in patterns[:3])
    raise TokenizerError(
        f"{source}: splitting {characters:,} characters took more than {limit:.0f} s by the patterns of its "
        f"tokenizer.json ({listed}), which may not end on some texts. Do not use this tokenizer unless you know "
        "who made it, or give it shorter texts.",
        where=source,
        patterns=list(patterns),
        limit_s=limit,
    )


# With fewer texts, one encoding for each is as fast as blocks.
FEW_TEXTS = 32
MAX_FRAME = 64  # special tokens around two texts; published templates have at most five


def load_json(data: bytes, path: str) -> tokenizers.Tokenizer:
    """Return the tokenizer that the bytes of a ``tokenizer.json`` define.

    Raises:
        TokenizerError: if the definition is damaged.
    """
    text = decode_text(data, path)
    check_definition(data, path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = str(error) or type(error).__name__
    # Unused sections must not make a good vocabulary unusable.
    value = parse_json(data, path)
    if value.get("padding") or value.get("truncation"):
        value.update(padding=None, truncation=None)
        with translated_errors(path, "the tokenizer definition is damaged; fetch the file again"):
            return tokenizers.Tokenizer.from_str(json.dumps(value))
    raise TokenizerError(
        f"{path}: not a usable tokenizer definition: {printable(reason, 300)}; expected one as the tokenizers "
        "library writes it; fetch the file again, or delete it if the folder contains vocabulary files",
        where=path,
        reason=reason,
    )


def row_of(encoding: tokenizers.Encoding, fast: bool = False) -> Row:
    """Return an encoding as a row, without offsets and words where ``fast``."""
    return Row(
        ids=encoding.ids,
        type_ids=encoding.type_ids,
        offsets=() if fast else encoding.offsets,
        word_ids=() if fast else encoding.word_ids,
        sequence_ids=encoding.sequence_ids,
        special=[flag == 1 for flag in encoding.special_tokens_mask],
        tokens=() if fast else encoding.tokens,
    )


def _splitting(inner: tokenizers.Tokenizer) -> bytes | None:
    """Return the serialized pre-tokenizer; None for one of Python code, which cannot be serialized."""
    if inner.pre_tokenizer is None:
        return b"{}"
    try:
        return inner.pre_tokenizer.__getstate__()
    except Exception as error:
        if "Custom PreTokenizer" not in str(error):
            raise
        return None


def _characters(texts: Sequence[Any]) -> int:
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)


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
            normalizer = inner.normalizer.__getstate__() if inner.normalizer else b"{}"
            pre_tokenizer = _splitting(inner)
        factor = growth(normalizer)
        if factor > MAX_GROWTH:
            raise TokenizerError(
                f"{source}: the normalizer can turn one character into {factor}; at most {MAX_GROWTH} are allowed, "
                "because a short text could exhaust memory; do not use this file",
                where=source,
                found=factor,
                expected=MAX_GROWTH,
            )
        added = inner.num_special_tokens_to_add(True)
        if added > MAX_FRAME:
            raise TokenizerError(
                f"{source}: the template puts {added:,} special tokens around two texts; at most {MAX_FRAME} are "
                "allowed, because they would leave no space for the texts; do not use this file",
                where=source,
                found=added,
                expected=MAX_FRAME,
            )
        self.inner = inner
        self.by_code = pre_tokenizer is None
        pre_tokenizer = pre_tokenizer or b"{}"
        self._mark: Mark | Literal[False] | None = False  # not determined yet
        self.patterns = foreign_patterns(normalizer, pre_tokenizer)
        self.pair_fault: str | None = None  # why pairs cannot be framed for the model
        # Used only if the token and its id agree.
        pad_token, pad_id = padding.get("pad_token"), padding.get("pad_id")
        agree = isinstance(pad_token, str) and inner.token_to_id(pad_token) == pad_id
        self.pad_token: str | None = pad_token if agree else None
        sections = {"padding_side": padding, "truncation_side": truncation}
        self.sides = {
            name: side for name, said in sections.items() if (side := said.get("direction")) in ("left", "right")
        }
        self.joins_words = joins_words(pre_tokenizer)
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
        if not prefix or self.by_code or json.loads(_splitting(self.inner) or b"{}").get("type") != "BertPreTokenizer":
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
        with translated_errors(f"{self.source}: encoding", "the tokenizer cannot treat one of the texts", texts, pairs):
            if len(batch) == 1 and not fast and not self.patterns:
                # Starting threads for a batch takes as long as encoding one text.
                pair = (batch[0], None) if pairs is None else batch[0]
                return [self.inner.encode(*pair, is_pretokenized=words, add_special_tokens=special)]
            run = self.inner.encode_batch_fast if fast else self.inner.encode_batch
            run = partial(run, is_pretokenized=words, add_special_tokens=special)
            return self._run(run, batch, lambda: _characters(texts) + _characters(pairs or ()))

    def word_tokens(self, text: str) -> list[str] | None:
        """Return the words that Python code splits, known or not; None where the vocabulary has parts of words."""
        if not self.by_code or type(self.inner.model).__name__ != "WordLevel":
            return None
        added = {number: token.content for number, token in self.inner.get_added_tokens_decoder().items()}
        (encoding,) = self.encodings([text], special=False)
        out, at = [], 0
        for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if added.get(number) == text[start:end].strip():
                out += [*self._words(text[at:start]), added[number]]
                at = end
        return out + self._words(text[at:])

    def _words(self, text: str) -> list[str]:
        normalizer, splitter = self.inner.normalizer, self.inner.pre_tokenizer
        text = normalizer.normalize_str(text) if normalizer else text
        return [word for word, _ in splitter.pre_tokenize_str(text)] if splitter and text else []

    def _run(
        self,
        run: Callable[[list[Any]], list[tokenizers.Encoding]],
        batch: list[Any],
        characters: Callable[[], int],
        each: int = 1,
    ) -> list[tokenizers.Encoding]:
        if self.patterns:
            return within_time(lambda: run(batch), characters(), self.patterns, self.source)
        return over_threads(run, batch, each)

    @cached_property
    def splits_at_spaces(self) -> bool:
        """Whether a prefix of a text that ends before a space has the first tokens of the text."""
        return not self.by_code and not self.patterns and splits_at_spaces(self.inner)

    def flat(self, texts: Sequence[str]) -> Flat:
        """Return the ids of texts."""
        if len(texts) > 1 and texts[0] == texts[-1] and texts.count(texts[0]) == len(texts):
            ids, counts = self.flat(texts[:1])  # the query of many documents
            return np.tile(ids, len(texts)), np.repeat(counts, len(texts))
        if len(texts) >= FEW_TEXTS:
            if self._mark is False:
                self._mark = mark_of(self.inner)
            if self._mark:
                run = partial(self.inner.encode_batch_fast, is_pretokenized=True, add_special_tokens=False)

                def blocks(batch: list[Any], each: int) -> list[tokenizers.Encoding]:
                    return self._run(run, batch, lambda: _characters(texts), each)

                with translated_errors(
                    f"{self.source}: encoding", "the tokenizer cannot treat one of the texts", texts
                ):
                    found = in_blocks(texts, self._mark, blocks, cores())
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
        if not words or not self.joins_words:
            found = self.encodings(texts, pairs, words=words, special=special, fast=fast)
            return [row_of(encoding, fast) for encoding in found]
        check_texts(texts, "text")
        check_texts(pairs or (), "second text")
        first = [join(text) for text in texts]
        second = None if pairs is None else [join(text) for text in pairs]
        found = self.encodings(first, second, special=special)
        return rows_from_joined([row_of(encoding, False) for encoding in found], texts, pairs)
