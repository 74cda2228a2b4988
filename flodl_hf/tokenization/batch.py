"""Arguments of a tokenizer in one form, and conversion of lists into arrays.

Determines which arguments are one text and which are a batch, and raises errors for mixed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flodl.errors import nearest
from flodl_hf.errors import OptionError, TokenizerError

from .cuts import Cut
from .guard import check_text

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


def option(table: Mapping[Any, Any], value: Any, name: str) -> Any:
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


def check_multiple(multiple: int | None, limit: int | None, cut: Cut | None, pad: str | None) -> None:
    """Raise if rows are both truncated and padded, and the limit is no multiple of ``pad_to_multiple_of``."""
    if cut is not None and pad is not None and multiple and limit is not None and limit % multiple:
        raise OptionError(
            f"pad_to_multiple_of is {multiple} and max_length is {limit}, expected a multiple of {multiple}; "
            f"pass max_length={limit - limit % multiple or multiple}, or another pad_to_multiple_of",
            field="pad_to_multiple_of",
            found=multiple,
            expected=limit,
        )


def check_batch(texts: Any, name: str, words: bool) -> None:
    """Raise unless ``texts`` is a sequence of strings, or of lists of words: a lone string is neither."""
    if isinstance(texts, (str, bytes)) or not hasattr(texts, "__len__") or not hasattr(texts, "__getitem__"):
        raise TokenizerError(
            f"{name}: found {type(texts).__name__}, expected a list of texts; put a single text into a list",
            field=name,
            found=type(texts).__name__,
        )
    if not words and set(map(type, texts)) <= {str}:
        return
    for index, text in enumerate(texts):
        if not words:
            # The library reads two strings as a pair, and reports other types without their position.
            if not isinstance(text, str):
                check_text(text, f"{name} {index}")
        elif isinstance(text, (str, bytes)) or not isinstance(text, Sequence):
            raise TokenizerError(
                f"{name} {index}: found {type(text).__name__}, expected a list of words; "
                "split it, or leave words=False",
                field=name,
                position=index,
                found=type(text).__name__,
            )


def as_batch(text: Any, pair: Any, words: bool) -> tuple[Sequence[Any], Sequence[Any] | None, bool]:
    """Return texts, second texts, and whether a single text was passed.

    Args:
        text: a string, a list of strings or of pairs; with ``words`` a list of words or a list of such lists.
        pair: second text or texts in the same form, or ``None``.
        words: the texts are split into words.
    """
    if words:
        single = isinstance(text, (list, tuple)) and (not text or isinstance(text[0], str))
    else:
        single = not isinstance(text, (list, tuple))
    texts = [text] if single else text
    pairs = None if pair is None else [pair] if single else pair
    if (
        not single
        and pair is None
        and not words
        and texts
        and all(isinstance(item, (list, tuple)) and len(item) == 2 for item in texts)
    ):
        texts, pairs = [item[0] for item in texts], [item[1] for item in texts]
    check_batch(texts, "text", words)
    if pairs is not None:
        check_batch(pairs, "second text", words)
    return texts, pairs, single


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
    make = _array if kind == "np" else _tensor
    found = {}
    for key, values in data.items():
        try:
            found[key] = make(values)
        except (ValueError, TypeError) as fault:
            raise OptionError(
                f"{key}: found values that do not make a tensor ({fault}), expected numbers in rows of one length. "
                "Pad or remove this entry.",
                field=key,
            ) from None
    return found


def _array(values: Any) -> Any:
    import numpy

    made = numpy.asarray(values)
    return made if made.size else made.astype(numpy.int64)


def _tensor(values: Any) -> Any:
    import torch

    made = torch.as_tensor(values)
    return made if made.numel() else made.long()
