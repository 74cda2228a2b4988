"""The vocabulary of a tokenizer: its tokens, their ids, the special tokens, and conversion of ids to text.

Also checks whether a tokenizer belongs to a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Inner

from flodl.errors import capped, printable
from flodl_hf.errors import TokenizerError

from .backend import Backend
from .guard import translated_errors
from .settings import ROLES, Settings, vocabulary_file

_IN_NO_VOCABULARY = "\U00010380"  # a letter of Ugaritic, which no normalizer removes
_CLEAN_UP = (
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")), (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)  # fmt: skip


_SHOWN = ("pad_token", "mask_token", "cls_token", "sep_token", "unk_token", "bos_token", "eos_token")


def _token(role: str) -> property:
    return property(lambda self: self.settings.special.get(role), doc=f"The {role} of the settings, or ``None``.")


def _token_id(role: str) -> property:
    def get(self: Vocabulary) -> int | None:
        token = self.settings.special.get(role)
        return None if token is None else self._inner.token_to_id(token)

    return property(get, doc=f"Id of the {role}, or ``None``.")


class Vocabulary:
    """The tokens of a loaded tokenizer and their roles; nothing in it changes."""

    _files: Mapping[str, bytes]
    _folder: str
    _backend: Backend
    _inner: Inner
    settings: Settings

    is_fast = True

    def __len__(self) -> int:
        return self.vocab_size

    def __bool__(self) -> bool:
        return True

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @property
    def model_max_length(self) -> int | None:
        """Longest input in tokens as ``tokenizer_config.json`` states it, or ``None``."""
        return self.settings.model_max_length

    @property
    def padding_side(self) -> str:
        """Side of padding, ``"left"`` or ``"right"``."""
        return self.settings.padding_side

    @property
    def truncation_side(self) -> str:
        """Which end of a text truncation removes, ``"left"`` or ``"right"``."""
        return self.settings.truncation_side

    @property
    def name_or_path(self) -> str:
        """The folder of the tokenizer."""
        return self._folder

    @property
    def init_kwargs(self) -> dict[str, Any]:
        """The contents of ``tokenizer_config.json``."""
        return dict(self.settings.raw)

    @property
    def model_input_names(self) -> list[str]:
        """The entries that a call returns by default."""
        return list(self.settings.input_names)

    pad_token_type_id = 0

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Role (``"mask_token"``) to token; roles without token are left out."""
        return {**self.special_tokens, **self.settings.named_special}

    @property
    def vocab(self) -> dict[str, int]:
        """Token to id, added tokens included."""
        return self.get_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Id to token (`tokenizers.AddedToken`), for special and other added tokens."""
        return dict(sorted(self._inner.get_added_tokens_decoder().items()))

    def get_added_vocab(self) -> dict[str, int]:
        """Return token to id, for special and other added tokens."""
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    def get_special_tokens_mask(
        self,
        token_ids_0: Sequence[int],
        token_ids_1: Sequence[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        """Return 1 for each special token of a row of ids, else 0.

        Args:
            token_ids_0: the ids, with special tokens.
            token_ids_1: not supported, as in transformers.
            already_has_special_tokens: must be true, as in transformers.

        Raises:
            NotImplementedError: the ids are without special tokens.
        """
        if token_ids_1 is not None or not already_has_special_tokens:
            raise NotImplementedError(
                "get_special_tokens_mask: found ids without special tokens, expected already_has_special_tokens=True. "
                "Call the tokenizer with return_special_tokens_mask=True."
            )
        special = set(self.all_special_ids)
        return [int(int(number) in special) for number in token_ids_0]

    @property
    def special_tokens(self) -> dict[str, str]:
        """Role (``"mask_token"``) to token; roles without token are left out."""
        return dict(self.settings.special)

    @cached_property
    def all_special_ids(self) -> list[int]:
        """Ids of every special token, first the tokens with a role, as in transformers."""
        special = self.settings.special
        tokens = [special[role] for role in ROLES if role in special] + list(self.settings.extra_special)
        if "tokenizer.json" not in self._files or self._backend.by_code:
            # A class adds special tokens to its vocabulary. T5 numbers its sentinels from the last one.
            stated = self.settings.raw.get("added_tokens_decoder") or {}
            decoder = self.added_tokens_decoder.items()
            added = [token.content for number, token in decoder if token.special and str(number) not in stated]
            tokens += sorted(added, key=lambda token: int(token[10:-1]) if token.startswith("<extra_id_") else -1)
        ids = map(self._inner.token_to_id, tokens)
        return list(dict.fromkeys(i for i in ids if i is not None))

    @property
    def all_special_tokens(self) -> list[str]:
        """The tokens of `all_special_ids`."""
        return self._tokens_of(self.all_special_ids)

    pad_token, mask_token, cls_token, sep_token, unk_token, bos_token, eos_token = map(_token, _SHOWN)
    pad_token_id, mask_token_id, cls_token_id, sep_token_id, unk_token_id, bos_token_id, eos_token_id = map(
        _token_id, _SHOWN
    )

    def get_vocab(self) -> dict[str, int]:
        """Return token to id, added tokens included."""
        return self._inner.get_vocab(with_added_tokens=True)

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Return how many special tokens one text (or a pair) is given."""
        return self._inner.num_special_tokens_to_add(pair)

    def few_tokens(self, vocab_rows: int) -> str | None:
        """Return a note where much of an embedding has no token, as after a vocabulary file was cut; else None."""
        # Converting 250,000 tokens to Python objects takes a quarter of a second, so the table is read only if
        # necessary.
        if self._inner.get_vocab_size(with_added_tokens=False) >= 0.9 * vocab_rows:
            return None
        count = len(self.get_vocab())
        if count >= 0.9 * vocab_rows:
            return None
        return (
            f"{vocabulary_file(self._files)}: has {count:,} tokens, and the embedding {vocab_rows:,} rows; if it "
            "should have as many, fetch it again"
        )

    def _highest_id(self) -> int:
        """Return the highest id of a token; -1 for no tokens."""
        inner = self._inner
        if type(inner.model).__name__ != "Unigram":
            return max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        # Pieces are a list, and their ids their places in it.
        return max((inner.get_vocab_size(with_added_tokens=False) - 1, *inner.get_added_tokens_decoder()))

    def check_fits(self, vocab_rows: int, type_rows: int | None = None) -> None:
        """Raise if a token has no row in an embedding of ``vocab_rows`` rows.

        Args:
            vocab_rows: rows of the word table.
            type_rows: rows of the table of token types; None for models that take none. A template that has higher
                types for a second text alone is refused when pairs are tokenised.

        Raises:
            TokenizerError: naming the tokens with the highest ids (``worst``: pairs of id and token), or the token
                type that is too high.
        """
        backend = self._backend
        backend.pair_fault = None
        # A template may contain ids that are not in the vocabulary.
        framed = [backend.encodings([text], pair)[0] for pair in (None, ["a"]) for text in ("", "a")]
        # A model without its unknown token fails at the first unknown word, so one is encoded here.
        backend.encodings([_IN_NO_VOCABULARY])
        for encodings, what in ((framed[:2], "a text"), (framed[2:], "second texts")):
            highest = max((kind for encoding in encodings for kind in encoding.type_ids), default=0)
            if type_rows is None or highest < type_rows:
                continue
            fault = (
                f"{self._folder}: the template of tokenizer.json gives {what} the token type {highest}, expected 0 to "
                f"{type_rows - 1}, which the model has; correct type_id in its post_processor, or take the tokenizer "
                "that belongs to the model"
            )
            if what == "a text":
                raise TokenizerError(fault, folder=self._folder, found=highest, expected=type_rows - 1)
            backend.pair_fault = fault
        if max((self._highest_id(), *(i for encoding in framed for i in encoding.ids))) >= vocab_rows:
            ids = {i: token for token, i in self.get_vocab().items()}
            for encoding in framed:
                for i, token in zip(encoding.ids, encoding.tokens, strict=True):
                    ids.setdefault(i, token)
            worst = sorted(((i, token) for i, token in ids.items() if i >= vocab_rows), reverse=True)
            listed = capped([f"id {i}: {printable(token, 60)}" for i, token in worst], limit=5)
            raise TokenizerError(
                f"{self._folder}: {len(worst)} of {len(ids)} tokens of {vocabulary_file(self._files)} have ids for "
                f"which the embedding has no row (it has {vocab_rows}):\n{listed}\nexpected ids below {vocab_rows}; "
                "use the tokenizer that belongs to this checkpoint, or enlarge the embedding",
                where=self._folder,
                found=worst[0][0] + 1,
                expected=vocab_rows,
                worst=worst[:20],
            )

    def _warn_of_long(self, rows: Sequence[Sized]) -> None:
        """Warn once if a row is longer than the model's limit."""
        limit = self.settings.model_max_length
        longest = max(map(len, rows), default=0)
        if limit is not None and longest > limit and not self.__dict__.get("_warned"):
            self.__dict__["_warned"] = True
            warnings.warn(
                f"{self._folder}: a text has {longest} tokens, and the model's limit is {limit}: the model fails or "
                "truncates it. Pass truncation=True to shorten texts.",
                UserWarning,
                stacklevel=3,
            )

    # Ids to text

    def _tokens_of(self, ids: Sequence[int]) -> list[str]:
        with translated_errors("converting ids", "pass ids of this tokenizer"):
            return [self._inner.id_to_token(i) or "" for i in ids]

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or ``None`` if the vocabulary lacks it."""
        with translated_errors("looking up a token", "pass a string", [token]):
            return self._inner.token_to_id(token)

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return the id of a token or the ids of several; unknown ones give the unknown token's id."""
        if isinstance(tokens, str):
            found = self.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> Any:
        """Return the token of an id or the tokens of several, ``""`` for ids that the vocabulary lacks."""
        if not isinstance(ids, Iterable):
            return self._tokens_of([int(ids)])[0]
        skip = set(self.all_special_ids) if skip_special_tokens else ()
        return self._tokens_of([i for i in map(int, ids) if i not in skip])

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        """Return the text of one sequence of ids, or a list of texts for several sequences.

        Args:
            token_ids: an id, a list, an array or a tensor; of two dimensions for several sequences.
            skip_special_tokens: leave special tokens out.
            clean_up_tokenization_spaces: remove the space before punctuation and contractions; by default as in
                ``tokenizer_config.json``. Ignored for byte-level BPE, which preserves the spaces of the text.
        """
        given = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [given] if isinstance(given, int) else [i.tolist() if hasattr(i, "tolist") else i for i in given]
        if ids and isinstance(ids[0], (list, tuple)):
            return [self.decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in ids]
        with translated_errors("decoding", "pass ids of this tokenizer, none of them negative"):
            text = self._inner.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)
        clean = self.settings.clean_up if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        if clean and not self._backend.is_bpe:
            for old, new in _CLEAN_UP:
                text = text.replace(old, new)
        return text

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens as the vocabulary writes them; without a decoder they are joined by spaces."""
        decoder = self._inner.decoder
        if decoder is None:
            return " ".join(tokens)
        with translated_errors("joining tokens", "pass tokens of this tokenizer", tokens):
            return decoder.decode(list(tokens))

    @property
    def continuing_prefix(self) -> str | None:
        """The mark of a piece inside a word, such as ``"##"``; ``None`` if beginnings of words are marked."""
        return getattr(self._inner.model, "continuing_subword_prefix", None) or None

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **options: Any) -> list[str]:
        """Return the text of each sequence of ids; options as in `decode`."""
        return [self.decode(ids, skip_special_tokens, **options) for ids in sequences]
