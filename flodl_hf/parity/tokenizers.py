"""Compare two descriptions of one tokenizer: ``tokenizer.json`` and the vocabulary files of the folder.

Decides: the compared texts and the definition of a difference.
Others decide: its display, and which of the two is right.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flodl_hf.parity.cell import AWKWARD_TEXTS
from flodl_hf.tokenization.settings import read_source
from flodl_hf.tokenization.tokenizer import Tokenizer

# Each text has made two implementations disagree somewhere: spaces, marks, scripts, special tokens.
PROBES = (
    *AWKWARD_TEXTS,
    "The quick brown fox doesn't jump over 1,234.56 lazy dogs!",
    "  leading, double  and trailing spaces ",
    "``quoted'' 'text' and dots…",
    "ΟΔΥΣΣΕΥΣ Ελλάδα Москва, Россия straße",
    "ｶﾞｷﾞｸﾞ नमस्ते दुनिया ภาษาไทย",
    "zero\u200bwidth\u200djoiner",
    "control\x07character",
    "Paris is the [MASK] of France. Paris is the <mask> of France. [CLS] </s>",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A text that two sources of a tokenizer treat differently.

    Attributes:
        text: the text.
        ids_by_json: ids by ``tokenizer.json``, special tokens included.
        ids_by_files: ids by the vocabulary files.
        tokens_by_json: the same as strings.
        tokens_by_files: the same as strings.
    """

    text: str
    ids_by_json: tuple[int, ...]
    ids_by_files: tuple[int, ...]
    tokens_by_json: tuple[str, ...]
    tokens_by_files: tuple[str, ...]


def compare_sources(
    folder: str | os.PathLike[str], texts: Sequence[str] = PROBES, *, model_type: str | None = None
) -> list[Difference]:
    """Return the texts for which ``tokenizer.json`` and the vocabulary files give different ids.

    The list is empty if they agree, and if the folder has only one of the two.

    Args:
        folder: folder with the tokenizer files.
        texts: what to try.
        model_type: family, if it is not to be read from the folder.

    Raises:
        TokenizerError: if one of the sources is damaged.
    """
    path = Path(folder)
    by_json = Tokenizer.from_folder(path, model_type=model_type)
    files = read_source(path)
    without = {name: data for name, data in files.items() if name != "tokenizer.json"}
    vocabulary = {"vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spm.model", "spiece.model"}
    if "tokenizer.json" not in files or not vocabulary & set(files):
        return []
    by_files = Tokenizer.from_files(without, folder=path, model_type=by_json.settings.model_type)
    sides = by_json, by_files
    found = []
    for text, *rows in zip(texts, *(side.encode_rows(texts) for side in sides), strict=True):
        ids = [tuple(row.ids) for (row,) in rows]
        if ids[0] != ids[1]:
            tokens = [tuple(side.convert_ids_to_tokens(own)) for side, own in zip(sides, ids, strict=True)]
            found.append(Difference(text, *ids, *tokens))
    return found
