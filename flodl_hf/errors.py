"""The errors of models, tokenizers and folders; those that any program meets are in `flodl.errors`.

FlodlError
├── TokenizerError        a tokenizer file or a text that cannot be turned into tokens; a ValueError
│   ├── TextTooLongError  a text of more tokens than the model takes, where it may not be shortened
│   └── OptionError       an invalid option of a tokenizer call
├── HubError              a name that cannot be resolved to a folder of files; an OSError
├── PredictError          a prediction that is impossible with these inputs and options; a ValueError
│   ├── InputTypeError    an input or an option of a wrong type; a TypeError
│   └── MissingKeyError   an input without a key that the task needs; a KeyError
├── CheckpointError       (`flodl.errors`)
│   └── MissingWeightsError  a folder without weights; a FileNotFoundError
├── ConfigError           (`flodl.errors`); a ValueError
│   └── UnknownTaskError  a task that no pipeline has; a KeyError
├── ExportError           a folder that cannot be written
└── ParityError           outputs differ from the reference
"""

from __future__ import annotations

from flodl.errors import CheckpointError, ConfigError, FlodlError

__all__ = [
    "ExportError",
    "HubError",
    "InputTypeError",
    "MissingKeyError",
    "MissingWeightsError",
    "OptionError",
    "ParityError",
    "PredictError",
    "TextTooLongError",
    "TokenizerError",
    "UnknownTaskError",
]


class TokenizerError(FlodlError, ValueError):
    """A tokenizer file that cannot be used, or a text that cannot be turned into tokens; a ValueError."""


class TextTooLongError(TokenizerError):
    """A text of more tokens than the model takes, where it may not be shortened.

    Attributes:
        found: its tokens.
        expected: the most tokens that fit.
    """

    found: int
    expected: int


class OptionError(TokenizerError):
    """An invalid option of a tokenizer call."""


class HubError(FlodlError, OSError):
    """A folder, repository or file that cannot be found; an OSError, as in transformers."""


class MissingWeightsError(CheckpointError, FileNotFoundError):
    """A folder without weights; a FileNotFoundError, as transformers raises OSError."""


class UnknownTaskError(ConfigError, KeyError):
    """A task that no pipeline has; a KeyError, as in transformers."""


class PredictError(FlodlError, ValueError):
    """A prediction that cannot be made with these inputs and options; a ValueError, as in transformers."""


class MissingKeyError(PredictError, KeyError):
    """An input without a key that the task needs."""


class InputTypeError(PredictError, TypeError):
    """An input or an option whose type is wrong, for which transformers raises TypeError or ValueError."""


class ExportError(FlodlError):
    """A folder that cannot be written."""


class ParityError(FlodlError):
    """Outputs differ from the reference."""


def no_tokenizer(task: str) -> PredictError:
    """Return what is said of a model without a tokenizer where ``task`` has texts for it."""
    return PredictError(
        f"{task}: the model has no tokenizer, because its folder holds none of use; expected tokenizer.json "
        "(or vocab.txt, vocab.json and merges.txt, a sentencepiece model) beside the weights; put it there, or set "
        "model.tokenizer."
    )
