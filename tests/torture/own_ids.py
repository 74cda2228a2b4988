"""Token ids of the tokenizers library for a definition, to compare with those of this library."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["library_ids"]


def library_ids(definition: str, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts, special tokens included, without the definition's truncation and padding.

    Args:
        definition: the text of a ``tokenizer.json``.
        texts: texts.

    Raises:
        Exception: the library cannot read the definition.
    """
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(definition)
    inner.no_truncation()
    inner.no_padding()
    return [list(inner.encode(text).ids) for text in texts]
