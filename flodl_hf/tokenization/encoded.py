"""The result of calling a tokenizer: named arrays, and the way from a token back to its text.

Decides: how rows are padded into a rectangle and what the entries are called (the names transformers uses).
Leaves to others: tokenization and windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .rows import Row

__all__ = ["Encoded", "pad_rows"]


class Encoded(Mapping[str, Any]):
    """Named model inputs, to be passed as ``model(**encoded)``, with their link to the text.

    Entries are lists, NumPy arrays or tensors of shape ``(batch, seq)``; they are also attributes
    (``encoded.input_ids``).
    """

    def __init__(self, data: dict[str, Any], rows: Sequence[Row], lead: Sequence[int], tokens: Any) -> None:
        self._data = data
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

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

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

    def _width(self, row: int) -> int:
        ids = self._data["input_ids"]
        if len(ids) and isinstance(ids[0], int):
            return len(ids)
        return len(ids[row])

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
        ids = self._data["input_ids"]
        row = ids if len(ids) and isinstance(ids[0], int) else ids[batch_index]
        return self._tokens([int(i) for i in row])

    def token_to_chars(self, batch_index: int, token_index: int) -> tuple[int, int] | None:
        """Return ``(start, end)`` of a token in its text, ``None`` for special tokens and padding."""
        row, at = self._rows[batch_index], token_index - self._lead[batch_index]
        if not 0 <= at < len(row.ids) or row.sequence_ids[at] is None:
            return None
        return row.offsets[at]

    def char_to_token(self, batch_index: int, char_index: int, sequence_index: int = 0) -> int | None:
        """Return the position of the first token that covers a character of a text, or ``None``."""
        row = self._rows[batch_index]
        for at, (start, end) in enumerate(row.offsets):
            if row.sequence_ids[at] == sequence_index and start <= char_index < end:
                return at + self._lead[batch_index]
        return None

    def word_to_tokens(self, batch_index: int, word_index: int, sequence_index: int = 0) -> tuple[int, int] | None:
        """Return the half-open range of positions of a word's tokens, or ``None`` if it has none."""
        row = self._rows[batch_index]
        found = [
            at for at, word in enumerate(row.word_ids) if word == word_index and row.sequence_ids[at] == sequence_index
        ]
        if not found:
            return None
        lead = self._lead[batch_index]
        return found[0] + lead, found[-1] + 1 + lead

    def to(self, device: Any) -> Encoded:
        """Return the same entries with every tensor on ``device``."""
        moved = {key: value.to(device) if hasattr(value, "to") else value for key, value in self._data.items()}
        return Encoded(moved, self._rows, self._lead, self._tokens)


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
        rows: what to lay out.
        width: tokens per row, or ``None`` to leave rows as long as they are. Longer rows stay longer.
        multiple: round the width up to a multiple of this.
        side: where the padding goes.
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
