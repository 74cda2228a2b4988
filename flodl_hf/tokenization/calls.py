"""Calls of a tokenizer: texts to rows of token ids, and padding of encoded texts.

Arguments, defaults and entries of the result are the same as in transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

from flodl.errors import nearest
from flodl_hf.errors import OptionError, TokenizerError
from flodl_hf.tokenization.backend import Backend, beginnings
from flodl_hf.tokenization.cuts import Cut, Overflow, Row, cut_each, with_space
from flodl_hf.tokenization.encoded import Encoded, as_lists, as_tensors
from flodl_hf.tokenization.guard import check_batch
from flodl_hf.tokenization.vocabulary import Vocabulary

# Names of transformers: which text is truncated, and the length to which rows are padded.
TRUNCATIONS: dict[Any, Cut | None] = {
    False: None,
    "do_not_truncate": None,
    True: "longest",
    "longest_first": "longest",
    "only_first": "first",
    "only_second": "second",
}
PADDINGS: dict[Any, str | None] = {
    False: None,
    "do_not_pad": None,
    True: "longest",
    "longest": "longest",
    "max_length": "max_length",
}
JOINED = (
    "is_split_into_words: this tokenizer marks a word by the space before it, so words are joined by spaces. "
    "transformers glues them together instead, unless it is loaded with add_prefix_space=True"
)
# Characters of a long text for each token that fits.
_LONG_CHARS = 16
_TEXTS = ("self", "text", "text_pair", "text_target", "text_pair_target")


class Calls(Vocabulary):
    """The calls of a loaded tokenizer."""

    def encode_rows(
        self,
        texts: Sequence[str] | Sequence[Sequence[str]],
        pairs: Sequence[str] | Sequence[Sequence[str]] | None = None,
        *,
        max_tokens: int | None = None,
        stride: int = 0,
        cut: Cut | None = None,
        words: bool = False,
        add_special_tokens: bool = True,
        overflow: Overflow = "windows",
        snap: bool = True,
        offsets: bool = True,
    ) -> list[list[Row]]:
        """Return for each text its windows in order, without padding.

        Args:
            texts: texts, or lists of words with ``words=True``.
            pairs: second texts, one for each text.
            max_tokens: most tokens in a window, special tokens included; ``None`` never cuts.
            stride: tokens that neighbouring windows share.
            cut: which text is cut; by default the second of a pair, else the first. ``"longest"`` only
                truncates.
            words: the texts are split into words already. ``offsets`` then count characters within the word.
            add_special_tokens: put the template's special tokens around the texts.
            overflow: for a text that does not fit: windows, removing its end, or an error.
            snap: start and end windows between words where a border is near (see ``plan_windows``).
            offsets: fill ``Row.offsets`` and ``Row.word_ids``; without them encoding is faster.

        Raises:
            TokenizerError: for a text that is not a valid string, or that does not fit with
                ``overflow="error"``.
        """
        check_batch(texts, "text", words)
        if pairs is not None:
            check_batch(pairs, "second text", words)
        cut = cut or ("first" if pairs is None else "second")
        if cut == "second" and pairs is None:
            raise TokenizerError("cut is 'second', but there are no second texts; pass pairs, or cut='first'")
        if stride < 0 or (max_tokens is not None and max_tokens < 1):
            raise TokenizerError(
                f"max_tokens is {max_tokens} and stride is {stride}; expected max_tokens > 0 <= stride"
            )
        if not len(texts):
            return []
        if overflow == "truncate" and max_tokens is not None and not words:
            texts, pairs = self._shorten(texts, pairs, max_tokens, cut)
        rows = self._backend.rows(texts, pairs, words=words, special=add_special_tokens, fast=not offsets)
        if snap and overflow == "windows" and not offsets and max_tokens is not None:
            # Cutting these rows needs word borders.
            long = [index for index, row in enumerate(rows) if len(row) > max_tokens]
            if long:
                seconds = None if pairs is None else [pairs[index] for index in long]
                again = self._backend.rows(
                    [texts[index] for index in long], seconds, words=words, special=add_special_tokens
                )
                for index, row in zip(long, again, strict=True):
                    rows[index] = row
        side = self.settings.truncation_side
        return cut_each(rows, max_tokens, stride=stride, cut=cut, overflow=overflow, snap=snap, side=side)

    def _shorten(
        self, texts: Sequence[Any], pairs: Sequence[Any] | None, max_tokens: int, cut: Cut
    ) -> tuple[Sequence[Any], Sequence[Any] | None]:
        """Return the texts, long ones without most of the characters that truncation removes."""
        if self.settings.truncation_side == "left" or not self._backend.splits_at_spaces:
            return texts, pairs

        def shorten(batch: Sequence[str]) -> Sequence[str]:
            # Prefixes are tokenized twice, which is faster than once for texts of many tokens only.
            if max(map(len, batch), default=0) <= _LONG_CHARS * (max_tokens + 1):
                return batch
            # One token more than fits, so that the row still records a truncation.
            return beginnings(batch, max_tokens + 1, self._backend.flat)[0]

        firsts = texts if cut == "second" else shorten(texts)
        return firsts, pairs if cut == "first" or pairs is None else shorten(pairs)

    def __call__(
        self,
        text: Any = None,
        text_pair: Any = None,
        text_target: Any = None,
        text_pair_target: Any = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: Literal["pt", "np"] | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        verbose: bool = True,
        split_special_tokens: bool | None = None,
    ) -> Encoded:
        """Return model inputs for one text or a batch, with the arguments and ids of transformers.

        Args:
            text: a string, a list of strings, a list of pairs, or (lists of) words with
                ``is_split_into_words``.
            text_pair: second text or texts.
            text_target: text or texts, encoded into ``labels``; without ``text``, into the inputs.
            text_pair_target: second text or texts of these.
            add_special_tokens: put the template's special tokens around the texts.
            padding: ``True`` or ``"longest"``, ``"max_length"``, or ``False``.
            truncation: ``True`` (tokens of the longer text are removed), ``"only_first"``, ``"only_second"`` or
                ``False``.
            max_length: limit in tokens; by default ``model_max_length``.
            stride: tokens shared by neighbours when overflowing tokens are returned.
            is_split_into_words: the texts are lists of words.
            pad_to_multiple_of: round the padded length up.
            padding_side: overrides the tokenizer's.
            return_tensors: ``"pt"``, ``"np"``, or lists.
            return_token_type_ids: include ``token_type_ids``; by default as in `model_input_names`.
            return_attention_mask: include ``attention_mask``; by default as in `model_input_names`.
            return_overflowing_tokens: return the removed tokens as further rows, with
                ``overflow_to_sample_mapping``.
            return_special_tokens_mask: include ``special_tokens_mask``.
            return_offsets_mapping: include ``offset_mapping``.
            return_length: include ``length``, the number of tokens of each row with its padding.
            verbose: ignored.
            split_special_tokens: read special tokens in the text as plain text; by default as in
                ``tokenizer_config.json``.

        Raises:
            TokenizerError: for invalid texts.
            OptionError: for invalid options, or rows of unequal length with ``return_tensors``.
        """
        if text_target is not None:
            given = {name: value for name, value in locals().items() if name not in _TEXTS}
            targets = self(text_target, text_pair_target, **given)
            if text is None:
                return targets
            found = self(text, text_pair, **given)
            found["labels"] = targets["input_ids"]
            return found
        if text is None:
            raise OptionError(
                "tokenizer: found neither text nor text_target, expected one of them; pass a text", field="text"
            )
        if truncation is None:
            truncation = "longest_first" if max_length is not None and padding is False else False
        cut = _option(TRUNCATIONS, truncation, "truncation")
        pad = _option(PADDINGS, padding, "padding")
        if isinstance(text, str) and text_pair == "" and not self._backend.by_code:
            text_pair = None  # as in transformers: an empty second text beside one text is none
        texts, pairs, single = _as_batch(text, text_pair, is_split_into_words)
        if is_split_into_words and self._backend.joins_words:
            warnings.warn(JOINED, UserWarning, stacklevel=2)
        limit = max_length if max_length is not None else self.settings.model_max_length
        if cut == "longest" and (pairs is None or return_overflowing_tokens):
            cut = "first"
        if cut is not None and limit is not None and not (return_overflowing_tokens or is_split_into_words):
            texts, pairs = self._shorten(texts, pairs, limit, cut)
        multiple = pad_to_multiple_of
        if cut is not None and pad is not None and multiple and limit is not None and limit % multiple:
            raise OptionError(
                f"pad_to_multiple_of is {multiple} and max_length is {limit}, expected a multiple of {multiple}; "
                f"pass max_length={limit - limit % multiple or multiple}, or another pad_to_multiple_of",
                field="pad_to_multiple_of",
                found=multiple,
                expected=limit,
            )
        backend = self._backend if split_special_tokens is None else self._reading(split_special_tokens)
        whole = backend.rows(texts, pairs, words=is_split_into_words, special=add_special_tokens)
        if cut is None and max_length is None and pad != "max_length":
            self._warn_of_long(whole)
        groups = [[row] for row in whole]
        if cut is not None and limit is not None:
            overflow: Overflow = "windows" if return_overflowing_tokens else "truncate"
            side = self.settings.truncation_side
            groups = cut_each(whole, limit, stride=stride, cut=cut, overflow=overflow, snap=False, side=side)
            if backend.keeps_space:
                groups = [[with_space(part, row) for part in parts] for parts, row in zip(groups, whole, strict=True)]
        rows: list[Row] = [row for group in groups for row in group]
        width = max(map(len, rows), default=0) if pad == "longest" else limit if pad == "max_length" else None
        names = self.settings.input_names
        data: dict[str, Any] = {"input_ids": [list(row.ids) for row in rows]}
        if "token_type_ids" in names if return_token_type_ids is None else return_token_type_ids:
            data["token_type_ids"] = [list(row.type_ids) for row in rows]
        if "attention_mask" in names if return_attention_mask is None else return_attention_mask:
            data["attention_mask"] = [[1] * len(row) for row in rows]
        if return_special_tokens_mask:
            data["special_tokens_mask"] = [list(map(int, row.special)) for row in rows]
        if return_offsets_mapping:
            data["offset_mapping"] = [list(row.offsets) for row in rows]
        lead = self._fill(data, width, multiple, padding_side, {"offset_mapping": (0, 0)})
        if return_overflowing_tokens:
            data["overflow_to_sample_mapping"] = [index for index, group in enumerate(groups) for _ in group]
        if return_length:
            data["length"] = list(map(len, data["input_ids"]))
        if return_tensors is not None:
            data = as_tensors(data, return_tensors)
        elif single and not return_overflowing_tokens:
            # As in transformers, the length of one text is a list, unless Python code splits the words.
            listed = () if self._backend.by_code else ("length",)
            data = {key: values if key in listed else values[0] for key, values in data.items()}
        return Encoded(data, rows, lead, self._tokens_of)

    def _fill(
        self,
        data: dict[str, Any],
        width: int | None,
        multiple: int | None,
        side: str | None,
        further: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Pad the entries in place; return how much padding precedes each row.

        Args:
            data: entries, a list for each row.
            width: tokens per row, or ``None`` to leave rows as long as they are. Longer rows stay longer.
            multiple: round the width up to a multiple of this.
            side: side of the padding; by default the tokenizer's.
            further: padding of further entries.

        Raises:
            TokenizerError: a row needs padding and there is no padding token.
        """
        rows = data["input_ids"]
        if width is None:
            return [0] * len(rows)
        if multiple:
            width = -(-width // multiple) * multiple
        missing = [max(0, width - len(row)) for row in rows]
        if self.pad_token_id is None and any(missing):
            raise TokenizerError(
                f"{self._folder}: there is no padding token; name one as pad_token in tokenizer_config.json, or encode "
                "without padding"
            )
        fills = {
            "input_ids": self.pad_token_id, "token_type_ids": self.pad_token_type_id, "attention_mask": 0,
            "special_tokens_mask": 1, **further,
        }  # fmt: skip
        left = (side or self.padding_side) == "left"
        for key in data.keys() & fills.keys():
            pairs = zip(data[key], ([fills[key]] * count for count in missing), strict=True)
            data[key] = [new + row if left else row + new for row, new in pairs]
        return missing if left else [0] * len(rows)

    def _reading(self, split: bool) -> Backend:
        """Return the tokenizer that does or does not split special tokens in a text."""
        if split == self.settings.split_special:
            return self._backend
        other = self.__dict__["_splitting"]
        if other is None:
            restore, arguments = cast("Any", self.__reduce__())
            inner = restore(*arguments)._inner
            inner.encode_special_tokens = split
            other = self.__dict__["_splitting"] = Backend(inner, self._folder)
        return other

    def encode(self, text: str, text_pair: str | None = None, add_special_tokens: bool = True, **options: Any) -> Any:
        """Return the ids of one text or pair, a tensor with ``return_tensors``; options as in calling the tokenizer."""
        return self(text, text_pair, add_special_tokens=add_special_tokens, **options)["input_ids"]

    def tokenize(self, text: str, pair: str | None = None, *, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as strings."""
        second = None if pair is None else [pair]
        words = None if pair is not None or add_special_tokens else self._backend.word_tokens(text)
        return self._backend.encodings([text], second, special=add_special_tokens)[0].tokens if words is None else words

    def pad(
        self,
        encoded_inputs: Any,
        padding: bool | str = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_attention_mask: bool | None = None,
        return_tensors: Literal["pt", "np"] | None = None,
        verbose: bool = True,
    ) -> Encoded:
        """Return encoded texts, padded to one length, as the data collators of transformers need them.

        Args:
            encoded_inputs: one encoded text, a batch, or a list of dictionaries, one for each text. Entries that
                a tokenizer does not make, such as ``labels``, are returned unchanged.
            padding: ``True`` or ``"longest"``, ``"max_length"``, or ``False``.
            max_length: length for ``"max_length"``; by default ``model_max_length``.
            pad_to_multiple_of: round the padded length up.
            padding_side: overrides the tokenizer's.
            return_attention_mask: include ``attention_mask``; by default if the model takes it.
            return_tensors: ``"pt"``, ``"np"``, or lists; by default as the entries are.
            verbose: ignored.

        Raises:
            OptionError: there are no ``input_ids``, or rows do not make a tensor.
            TokenizerError: there is no padding token.
        """
        batch, kind = as_lists(encoded_inputs)
        rows = batch.get("input_ids")
        if rows is None:
            raise OptionError(
                f"pad: found the entries {list(batch)}, expected input_ids. Pass the result of the tokenizer.",
                found=list(batch),
            )
        if not len(rows):
            return Encoded({**batch, **({"attention_mask": []} if return_attention_mask else {})})
        single = not isinstance(rows[0], (list, tuple))
        if single:
            batch = {key: [value] for key, value in batch.items()}
        pad = _option(PADDINGS, padding, "padding")
        limit = max_length if max_length is not None else self.model_max_length
        width = max(map(len, batch["input_ids"])) if pad == "longest" else limit if pad == "max_length" else None
        if return_attention_mask is None:
            return_attention_mask = "attention_mask" in self.model_input_names
        if return_attention_mask and "attention_mask" not in batch:
            batch["attention_mask"] = [[1] * len(row) for row in batch["input_ids"]]
        self._fill(batch, width, pad_to_multiple_of, padding_side)
        if single:
            batch = {key: value[0] for key, value in batch.items()}
        kind = return_tensors or kind
        return Encoded(batch if kind is None else as_tensors(batch, kind), tokens=self._tokens_of)


def _option(table: Mapping[Any, Any], value: Any, name: str) -> Any:
    """Return the entry of an option's value, or raise an error with the valid values."""
    if isinstance(value, (bool, str)) and value in table:
        return table[value]
    known = [key for key in table if isinstance(key, str)]
    raise OptionError(
        f"{name} is {value!r}, expected True, False or one of {known}{nearest(str(value), known)}",
        field=name,
        found=value,
        expected=known,
    )


def _as_batch(text: Any, pair: Any, words: bool) -> tuple[Sequence[Any], Sequence[Any] | None, bool]:
    """Return texts, second texts, and whether a single text was passed.

    Args:
        text: a string, a list of strings or of pairs; with ``words`` a list of words or a list of such lists.
        pair: second text or texts in the same form, or ``None``.
        words: the texts are split into words.
    """
    is_list = isinstance(text, (list, tuple))
    single = (is_list and (not text or isinstance(text[0], str))) if words else not is_list
    texts = [text] if single else text
    pairs = None if pair is None else [pair] if single else pair
    may_be_pairs = not single and not words and pair is None and len(texts)
    if may_be_pairs and all(isinstance(item, (list, tuple)) and len(item) == 2 for item in texts):
        texts, pairs = [item[0] for item in texts], [item[1] for item in texts]
    check_batch(texts, "text", words)
    if pairs is not None:
        check_batch(pairs, "second text", words)
    return texts, pairs, single
