"""The result of calling a tokenizer: named arrays, with the position of each token in its text.

Entries have the names of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from .rows import Row


class Encoded(MutableMapping[str, Any]):
    """Named model inputs, to be passed as ``model(**encoded)``, with their link to the text.

    Entries are lists, NumPy arrays or tensors of shape ``(batch, seq)``; they are also attributes
    (``encoded.input_ids``). Entries can be added, replaced and removed. A number instead of a name gives the `Encoding`
    of one row.
    """

    is_fast = True

    def __init__(
        self, data: dict[str, Any], rows: Sequence[Row] = (), lead: Sequence[int] = (), tokens: Any = None
    ) -> None:
        self._data = data
        self._ids = data.get("input_ids")  # the link to the text remains when the entry is removed
        self._rows = rows
        # Padding before each row; token positions count it.
        self._lead = lead
        self._tokens = tokens

    @property
    def data(self) -> dict[str, Any]:
        """The entries as a dict."""
        return self._data

    @property
    def rows(self) -> Sequence[Row]:
        """The rows without padding."""
        return self._rows

    @property
    def encodings(self) -> list[Encoding] | None:
        """Each row with its padding, or ``None`` if the entries were not made from texts."""
        return [Encoding(self, number) for number in range(len(self._rows))] or None

    @property
    def n_sequences(self) -> int | None:
        """1 for texts, 2 for pairs, ``None`` if the entries were not made from texts."""
        return self.encodings[0].n_sequences if self.encodings else None

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._data[key]
        if self.encodings is None:
            raise KeyError(f"found {key!r}, expected the name of an entry: rows exist only for texts")
        return self.encodings[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._data[key] = value

    def __delitem__(self, key: str) -> None:
        del self._data[key]

    def __contains__(self, key: object) -> bool:
        return key in self._data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._data[name]
        except KeyError:
            raise AttributeError(f"no entry {name!r}; there are {sorted(self._data)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return f"Encoded({self._data!r})"

    def copy(self) -> Encoded:
        """Return a copy with the same entries, which can be replaced independently."""
        return Encoded(dict(self._data), self._rows, self._lead, self._tokens)

    def _width(self, row: int) -> int:
        ids: Any = self._ids
        # One text without tokens is a list of none.
        return len(ids) if not len(ids) or isinstance(ids[0], int) else len(ids[row])

    def _aligned(self, row: int, values: Sequence[Any], fill: Any) -> list[Any]:
        lead = [fill] * self._lead[row]
        return lead + list(values) + [fill] * (self._width(row) - len(lead) - len(values))

    def word_ids(self, batch_index: int = 0) -> list[int | None]:
        """Return for each token the number of its word, ``None`` for special tokens and padding."""
        return self._aligned(batch_index, self._rows[batch_index].word_ids, None)

    def sequence_ids(self, batch_index: int = 0) -> list[int | None]:
        """Return for each token 0 or 1 for its text, ``None`` for special tokens and padding."""
        return self._aligned(batch_index, self._rows[batch_index].sequence_ids, None)

    def tokens(self, batch_index: int = 0) -> list[str]:
        """Return the tokens of one row as strings, padding included."""
        ids: Any = self._ids
        ids = ids if not len(ids) or isinstance(ids[0], int) else ids[batch_index]
        row, lead = self._rows[batch_index].tokens, self._lead[batch_index]
        after = lead + len(row)
        return [*self._tokens([int(i) for i in ids[:lead]]), *row, *self._tokens([int(i) for i in ids[after:]])]

    def _place(self, first: int, second: int | None) -> tuple[int, int]:
        """Return row and index of arguments that may be the index alone, in the only row or the first."""
        return (0, first) if second is None else (first, second)

    def _at(self, first: int, second: int | None) -> tuple[Row, int | None]:
        """Return the row of a token and its index there; ``None`` for special tokens and padding."""
        number, index = self._place(first, second)
        width = self._width(number)
        if not -width <= index < width:
            raise IndexError(f"token {index} of {width}")
        row, at = self._rows[number], index % width - self._lead[number]
        return row, at if 0 <= at < len(row.ids) and row.sequence_ids[at] is not None else None

    def token_to_chars(self, batch_or_token_index: int, token_index: int | None = None) -> tuple[int, int] | None:
        """Return ``(start, end)`` of a token in its text, ``None`` for special tokens and padding.

        Args:
            batch_or_token_index: the row; or the token, where the batch is of one text.
            token_index: the token's position in the row.
        """
        row, at = self._at(batch_or_token_index, token_index)
        return None if at is None else row.offsets[at]

    def token_to_word(self, batch_or_token_index: int, token_index: int | None = None) -> int | None:
        """Return the number of a token's word, ``None`` for special tokens and padding; see `token_to_chars`."""
        row, at = self._at(batch_or_token_index, token_index)
        return None if at is None else row.word_ids[at]

    def token_to_sequence(self, batch_or_token_index: int, token_index: int | None = None) -> int | None:
        """Return 0 or 1 for a token's text, ``None`` for special tokens and padding; see `token_to_chars`."""
        row, at = self._at(batch_or_token_index, token_index)
        return None if at is None else row.sequence_ids[at]

    def char_to_token(
        self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0
    ) -> int | None:
        """Return the position of the first token that covers a character of a text, or ``None``.

        Args:
            batch_or_char_index: the row; or the character, where the batch is of one text.
            char_index: the character's place in its text.
            sequence_index: 1 for the second text.
        """
        number, index = self._place(batch_or_char_index, char_index)
        row = self._rows[number]
        for at, (start, end) in enumerate(row.offsets):
            if row.sequence_ids[at] == sequence_index and start <= index < end:
                return at + self._lead[number]
        return None

    def char_to_word(
        self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0
    ) -> int | None:
        """Return the number of the word that covers a character of a text, or ``None``; see `char_to_token`."""
        number, index = self._place(batch_or_char_index, char_index)
        at = self.char_to_token(number, index, sequence_index)
        return None if at is None else self._rows[number].word_ids[at - self._lead[number]]

    def word_to_tokens(
        self, batch_or_word_index: int, word_index: int | None = None, sequence_index: int = 0
    ) -> tuple[int, int] | None:
        """Return the half-open range of positions of a word's tokens, or ``None`` if it has none.

        Args:
            batch_or_word_index: the row; or the word, where the batch is of one text.
            word_index: the word's number in its text.
            sequence_index: 1 for the second text.
        """
        number, index = self._place(batch_or_word_index, word_index)
        found = self._of_word(number, index, sequence_index)
        lead = self._lead[number]
        return (found[0] + lead, found[-1] + 1 + lead) if found else None

    def word_to_chars(
        self, batch_or_word_index: int, word_index: int | None = None, sequence_index: int = 0
    ) -> tuple[int, int] | None:
        """Return ``(start, end)`` of a word in its text, or ``None`` if it has no tokens; see `word_to_tokens`."""
        number, index = self._place(batch_or_word_index, word_index)
        found = self._of_word(number, index, sequence_index)
        offsets = self._rows[number].offsets
        return (offsets[found[0]][0], offsets[found[-1]][1]) if found else None

    def _of_word(self, number: int, word: int, sequence: int) -> list[int]:
        row = self._rows[number]
        return [at for at, found in enumerate(row.word_ids) if found == word and row.sequence_ids[at] == sequence]

    def to(self, device: Any) -> Encoded:
        """Move every tensor to ``device`` and return this object."""
        self._data.update({key: value.to(device) for key, value in self._data.items() if hasattr(value, "to")})
        return self

    def convert_to_tensors(self, tensor_type: str | None = None, prepend_batch_axis: bool = False) -> Encoded:
        """Replace lists by tensors (``"pt"``) or arrays (``"np"``) and return this object.

        Args:
            tensor_type: which; None changes nothing.
            prepend_batch_axis: make a batch of one row.

        Raises:
            OptionError: the rows have different lengths.
        """
        from .batch import as_tensors

        if tensor_type is not None:
            lists = {key: [value] if prepend_batch_axis else value for key, value in self._data.items()}
            self._data.update(as_tensors(lists, tensor_type))
        return self


class Encoding:
    """One row of an `Encoded`, with its padding.

    Attributes:
        ids: token ids.
        tokens: the tokens as strings.
        type_ids: segment of each token.
        attention_mask: 1 for tokens, 0 for padding.
        special_tokens_mask: 1 for special tokens and padding.
        offsets: ``(start, end)`` of each token in its text.
        word_ids: number of each token's word, ``None`` for special tokens and padding.
        sequence_ids: 0 or 1 for a token's text, ``None`` for special tokens and padding.
        n_sequences: 1 for a text, 2 for a pair.
    """

    def __init__(self, batch: Encoded, number: int) -> None:
        row, ids = batch._rows[number], batch._ids
        one: Any = ids if ids is None or not len(ids) or isinstance(ids[0], int) else ids[number]
        self.ids: list[int] = [int(i) for i in one]
        self.tokens: list[str] = batch.tokens(number)
        self.type_ids: list[int] = batch._aligned(number, row.type_ids, 0)
        self.attention_mask: list[int] = batch._aligned(number, [1] * len(row), 0)
        self.special_tokens_mask: list[int] = batch._aligned(number, list(map(int, row.special)), 1)
        self.offsets: list[tuple[int, int]] = batch._aligned(number, row.offsets, (0, 0))
        self.word_ids: list[int | None] = batch.word_ids(number)
        self.sequence_ids: list[int | None] = batch.sequence_ids(number)
        self.n_sequences: int = 2 if 1 in row.sequence_ids else 1

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Encoding(num_tokens={len(self)}, tokens={self.tokens})"


def pad_rows(
    rows: Sequence[Row],
    width: int | None,
    *,
    multiple: int | None,
    side: str,
    pad_id: int,
    type_ids: bool,
    attention: bool,
    special: bool,
    offsets: bool,
) -> tuple[dict[str, list[Any]], list[int]]:
    """Return the entries of ``rows`` as padded lists, and how much padding precedes each row.

    Args:
        rows: rows without padding.
        width: tokens per row, or ``None`` to leave rows as long as they are. Longer rows stay longer.
        multiple: round the width up to a multiple of this.
        side: side of the padding.
        pad_id: token id of padding.
        type_ids: include ``token_type_ids``.
        attention: include ``attention_mask``.
        special: include ``special_tokens_mask``.
        offsets: include ``offset_mapping``.
    """
    if width is not None and multiple:
        width = -(-width // multiple) * multiple
    data: dict[str, list[Any]] = {"input_ids": []}
    for key, wanted in (
        ("token_type_ids", type_ids),
        ("attention_mask", attention),
        ("special_tokens_mask", special),
        ("offset_mapping", offsets),
    ):
        if wanted:
            data[key] = []
    lead: list[int] = []
    for row in rows:
        missing = max(0, (width or 0) - len(row.ids))

        def fill(values: Sequence[Any], pad: Any, missing: int = missing) -> list[Any]:
            padding = [pad] * missing
            return padding + list(values) if side == "left" else list(values) + padding

        lead.append(missing if side == "left" else 0)
        data["input_ids"].append(fill(row.ids, pad_id))
        if type_ids:
            data["token_type_ids"].append(fill(row.type_ids, 0))
        if attention:
            data["attention_mask"].append(fill([1] * len(row.ids), 0))
        if special:
            data["special_tokens_mask"].append(fill([int(flag) for flag in row.special], 1))
        if offsets:
            data["offset_mapping"].append(fill(row.offsets, (0, 0)))
    return data, lead
