"""The result of calling a tokenizer: named arrays, with the position of each token in its text.

Entries have the names of transformers.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

from flodl_hf.errors import OptionError
from flodl_hf.tokenization.cuts import Row


class Encoded(UserDict[str, Any]):
    """Named model inputs, to be passed as ``model(**encoded)``, with their link to the text.

    Entries are lists, NumPy arrays or tensors of shape ``(batch, seq)``; they are also attributes
    (``encoded.input_ids``). Entries can be added, replaced and removed. A number instead of a name gives the `Encoding`
    of one row.

    Attributes:
        data: the entries as a dict.
        rows: the rows without padding.
    """

    is_fast = True

    def __init__(
        self, data: dict[str, Any], rows: Sequence[Row] = (), lead: Sequence[int] = (), tokens: Any = None
    ) -> None:
        self.data = data
        self._ids = data.get("input_ids")  # the link to the text remains when the entry is removed
        self.rows = rows
        # Padding before each row; token positions count it.
        self._lead = lead
        self._tokens = tokens
        self._found: dict[int, Encoding] = {}

    @property
    def encodings(self) -> list[Encoding] | None:
        """Each row with its padding, or ``None`` if the entries were not made from texts."""
        return [self._row(number) for number in range(len(self.rows))] or None

    @property
    def n_sequences(self) -> int | None:
        """1 for texts, 2 for pairs, ``None`` if the entries were not made from texts."""
        return self._row(0).n_sequences if self.rows else None

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.data[key]
        if self.encodings is None:
            raise KeyError(f"found {key!r}, expected the name of an entry: rows exist only for texts")
        return self.encodings[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "data":
            raise AttributeError(name)
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(f"no entry {name!r}; there are {sorted(self.data)}") from None

    def __repr__(self) -> str:
        return f"Encoded({self.data!r})"

    def copy(self) -> Encoded:
        """Return a copy with the same entries, which can be replaced independently."""
        return Encoded(dict(self.data), self.rows, self._lead, self._tokens)

    def _row(self, number: int) -> Encoding:
        if number not in self._found:
            ids: Any = self._ids
            # The entries of one text are flat lists.
            own = ids if not len(ids) or isinstance(ids[0], int) else ids[number]
            self._found[number] = Encoding(own, self.rows[number], self._lead[number], self._tokens)
        return self._found[number]

    def word_ids(self, batch_index: int = 0) -> list[int | None]:
        """Return for each token the number of its word, ``None`` for special tokens and padding."""
        return list(self._row(batch_index).word_ids)

    def sequence_ids(self, batch_index: int = 0) -> list[int | None]:
        """Return for each token 0 or 1 for its text, ``None`` for special tokens and padding."""
        return list(self._row(batch_index).sequence_ids)

    def tokens(self, batch_index: int = 0) -> list[str]:
        """Return the tokens of one row as strings, padding included."""
        return self._row(batch_index).tokens

    def _place(self, first: int, second: int | None) -> tuple[Encoding, int]:
        """Return row and index of arguments that may be the index alone, in the only row or the first."""
        return (self._row(0), first) if second is None else (self._row(first), second)

    def _of_token(self, first: int, second: int | None, name: str) -> Any:
        """Return an attribute of a token; ``None`` for special tokens and padding."""
        row, index = self._place(first, second)
        if not -len(row) <= index < len(row):
            raise IndexError(f"token {index} of {len(row)}")
        return row._value(name, index)

    def token_to_chars(self, batch_or_token_index: int, token_index: int | None = None) -> tuple[int, int] | None:
        """Return ``(start, end)`` of a token in its text, ``None`` for special tokens and padding.

        Args:
            batch_or_token_index: the row; or the token, where the batch is of one text.
            token_index: the token's position in the row.
        """
        return self._of_token(batch_or_token_index, token_index, "offsets")

    def token_to_word(self, batch_or_token_index: int, token_index: int | None = None) -> int | None:
        """Return the number of a token's word, ``None`` for special tokens and padding; see `token_to_chars`."""
        return self._of_token(batch_or_token_index, token_index, "word_ids")

    def token_to_sequence(self, batch_or_token_index: int, token_index: int | None = None) -> int | None:
        """Return 0 or 1 for a token's text, ``None`` for special tokens and padding; see `token_to_chars`."""
        return self._of_token(batch_or_token_index, token_index, "sequence_ids")

    def char_to_token(
        self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0
    ) -> int | None:
        """Return the position of the first token that covers a character of a text, or ``None``.

        Args:
            batch_or_char_index: the row; or the character, where the batch is of one text.
            char_index: the character's place in its text.
            sequence_index: 1 for the second text.
        """
        row, index = self._place(batch_or_char_index, char_index)
        for at, ((start, end), sequence) in enumerate(zip(row.offsets, row.sequence_ids, strict=True)):
            if sequence == sequence_index and start <= index < end:
                return at
        return None

    def char_to_word(
        self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0
    ) -> int | None:
        """Return the number of the word that covers a character of a text, or ``None``; see `char_to_token`."""
        at = self.char_to_token(batch_or_char_index, char_index, sequence_index)
        return None if at is None else self._place(batch_or_char_index, char_index)[0].word_ids[at]

    def word_to_tokens(
        self, batch_or_word_index: int, word_index: int | None = None, sequence_index: int = 0
    ) -> tuple[int, int] | None:
        """Return the half-open range of positions of a word's tokens, or ``None`` if it has none.

        Args:
            batch_or_word_index: the row; or the word, where the batch is of one text.
            word_index: the word's number in its text.
            sequence_index: 1 for the second text.
        """
        row, index = self._place(batch_or_word_index, word_index)
        pairs = zip(row.word_ids, row.sequence_ids, strict=True)
        found = [at for at, pair in enumerate(pairs) if pair == (index, sequence_index)]
        return (found[0], found[-1] + 1) if found else None

    def word_to_chars(
        self, batch_or_word_index: int, word_index: int | None = None, sequence_index: int = 0
    ) -> tuple[int, int] | None:
        """Return ``(start, end)`` of a word in its text, or ``None`` if it has no tokens; see `word_to_tokens`."""
        found = self.word_to_tokens(batch_or_word_index, word_index, sequence_index)
        offsets = self._place(batch_or_word_index, word_index)[0].offsets
        return (offsets[found[0]][0], offsets[found[1] - 1][1]) if found else None

    def to(self, device: Any) -> Encoded:
        """Move every tensor to ``device`` and return this object."""
        self.data.update({key: value.to(device) for key, value in self.data.items() if hasattr(value, "to")})
        return self

    def convert_to_tensors(self, tensor_type: str | None = None, prepend_batch_axis: bool = False) -> Encoded:
        """Replace lists by tensors (``"pt"``) or arrays (``"np"``) and return this object.

        Args:
            tensor_type: which; None changes nothing.
            prepend_batch_axis: make a batch of one row.

        Raises:
            OptionError: the rows have different lengths.
        """
        if tensor_type is not None:
            lists = {key: [value] if prepend_batch_axis else value for key, value in self.data.items()}
            self.data.update(as_tensors(lists, tensor_type))
        return self


def _field(name: str, fill: Any, doc: str) -> cached_property[list[Any]]:
    """Return a property with a value of each token of a row, and ``fill`` for padding."""
    found = cached_property(lambda self: self._padded(getattr(self._row, name), fill))
    found.__doc__ = doc
    return found


class Encoding:
    """One row of an `Encoded`, with its padding."""

    def __init__(self, ids: Any, row: Row, lead: int, tokens: Callable[[list[int]], list[str]]) -> None:
        self._ids, self._row, self._lead, self._tokens = ids, row, lead, tokens

    def _padded(self, values: Sequence[Any], fill: Any) -> list[Any]:
        """Return a value of each token of the row in a new list, with ``fill`` for padding."""
        return [fill] * self._lead + list(values) + [fill] * (len(self) - self._lead - len(values))

    def _value(self, name: str, index: int) -> Any:
        """Return one value of a field of the row; ``None`` for special tokens and padding."""
        at = index % len(self) - self._lead
        is_text = 0 <= at < len(self._row) and self._row.sequence_ids[at] is not None
        return getattr(self._row, name)[at] if is_text else None

    @cached_property
    def ids(self) -> list[int]:
        """The ids, padding included."""
        return _numbers(self._ids)

    @cached_property
    def attention_mask(self) -> list[int]:
        """1 for a token and 0 for padding."""
        return self._padded([1] * len(self._row), 0)

    @cached_property
    def special_tokens_mask(self) -> list[int]:
        """1 for special tokens and padding."""
        return self._padded(list(map(int, self._row.special)), 1)

    type_ids = _field("type_ids", 0, "The number of the text of each token; 0 for padding.")
    offsets = _field(
        "offsets", (0, 0), "Start and end of each token in its text; (0, 0) for special tokens and padding."
    )
    word_ids = _field("word_ids", None, "The number of the word of each token; None for special tokens and padding.")
    sequence_ids = _field("sequence_ids", None, "0 or 1 for the text of a token; None for special tokens and padding.")

    @property
    def n_sequences(self) -> int:
        """1 for a text, 2 for a pair."""
        return 2 if 1 in self._row.sequence_ids else 1

    @property
    def tokens(self) -> list[str]:
        """The tokens as strings."""
        before, after = self._ids[: self._lead], self._ids[self._lead + len(self._row) :]
        return [*self._tokens(_numbers(before)), *self._row.tokens, *self._tokens(_numbers(after))]

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"Encoding(num_tokens={len(self)}, tokens={self.tokens})"


def _numbers(ids: Any) -> list[int]:
    return ids.tolist() if hasattr(ids, "tolist") else list(map(int, ids))


def as_lists(inputs: Any) -> tuple[dict[str, Any], str | None]:
    """Return the entries of encoded texts as lists, and "pt" or "np" if they were tensors or arrays.

    Args:
        inputs: dictionary of entries, or a list of such mappings, one for each text.
    """
    if isinstance(inputs, (list, tuple)):
        inputs = {key: [row[key] for row in inputs] for key in inputs[0]} if inputs else {"input_ids": []}
    ids = inputs.get("input_ids")
    first = ids[0] if ids is not None and len(ids) else None
    kind = {"torch": "pt", "numpy": "np"}.get(type(first).__module__.partition(".")[0])

    def plain(value: Any) -> Any:
        if hasattr(value, "tolist"):
            return value.tolist()
        return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value

    return {key: plain(value) for key, value in inputs.items()}, kind


def as_tensors(data: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the entries as tensors (``"pt"``) or arrays (``"np"``); integers have 64 bits.

    Raises:
        OptionError: the rows of an entry have different lengths, or the kind is unknown.
    """
    if kind not in ("pt", "np"):
        raise OptionError(f"return_tensors is {kind!r}, expected 'pt', 'np' or None", found=kind)
    widths = sorted({len(ids) for ids in data.get("input_ids", ()) if hasattr(ids, "__len__")})
    if len(widths) > 1:
        raise OptionError(
            f"rows of {widths[0]} to {widths[-1]} tokens do not make a tensor; pass padding=True",
            found=widths,
        )
    make: Any = import_module("numpy").asarray if kind == "np" else import_module("torch").as_tensor
    found = {}
    for key, values in data.items():
        try:
            made = make(values)
        except (ValueError, TypeError) as fault:
            raise OptionError(
                f"{key}: found values that do not make a tensor ({fault}), expected numbers in rows of one length. "
                "Pad or remove this entry.",
                field=key,
            ) from None
        # An array without values has no type of integers.
        found[key] = made if len(made.reshape(-1)) else made.astype("int64") if kind == "np" else made.long()
    return found
