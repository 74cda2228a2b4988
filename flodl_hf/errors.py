"""The errors of models, tokenizers and folders; those that any program meets are in `flodl.errors`.

FlodlError
├── TokenizerError        a tokenizer file or a text that cannot be turned into tokens
│   ├── TextTooLongError  a text of more tokens than the model takes, where it may not be shortened
│   └── OptionError       an invalid option of a tokenizer call; a ValueError as well
├── HubError              a name that cannot be resolved to a folder of files
├── PredictError          a prediction that cannot be made as asked
├── ExportError           a folder that cannot be written
└── ParityError           two sides that were to be equal and are not
"""

from __future__ import annotations

from flodl.errors import FlodlError

__all__ = [
    "ExportError",
    "HubError",
    "OptionError",
    "ParityError",
    "PredictError",
    "TextTooLongError",
    "TokenizerError",
    "no_tokenizer",
]


class TokenizerError(FlodlError):
    """A tokenizer file that cannot be used, or a text that cannot be turned into tokens."""


class TextTooLongError(TokenizerError):
    """A text of more tokens than the model takes, where it may not be shortened.

    Attributes:
        found: its tokens.
        expected: the most tokens that fit.
    """

    found: int
    expected: int


class OptionError(TokenizerError, ValueError):
    """An invalid option of a tokenizer call, for which transformers raises ValueError."""


class HubError(FlodlError):
    """A repository name or file that cannot be resolved."""


class PredictError(FlodlError):
    """A prediction that cannot be made as asked."""


class ExportError(FlodlError):
    """A folder that cannot be written."""


class ParityError(FlodlError):
    """Two sides that were to be equal and are not."""


def no_tokenizer(task: str) -> PredictError:
    """Return what is said of a model without a tokenizer where ``task`` has texts for it."""
    return PredictError(
        f"{task}: the model has no tokenizer, because its folder holds none of use; expected tokenizer.json "
        "(or vocab.txt, vocab.json and merges.txt, a sentencepiece model) beside the weights; put it there, or set "
        "model.tokenizer."
    )
