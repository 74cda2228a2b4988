"""What model calls return: records with transformers' field names, readable by attribute, key or position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor


@dataclass
class Output:
    """A record that omits absent (None) fields when it is read by key or position."""

    def keys(self) -> list[str]:
        """Return the names of the present fields."""
        return [f.name for f in fields(self) if getattr(self, f.name) is not None]

    def values(self) -> list[Any]:
        """Return the present fields."""
        return [getattr(self, name) for name in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        """Return names with fields."""
        return [(name, getattr(self, name)) for name in self.keys()]

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the present fields as a tuple."""
        return tuple(self.values())

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            if key not in self.keys():
                raise KeyError(key)
            return getattr(self, key)
        return self.to_tuple()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


@dataclass
class BaseOutput(Output):
    """Token states ``(batch, seq, hidden)`` and, where there is a pooler, one state a text ``(batch, hidden)``."""

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class ScoresOutput(Output):
    """Scores of a head; ``loss`` is a scalar when labels were given."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class SequenceClassificationOutput(ScoresOutput):
    """Label scores ``(batch, labels)`` before any activation; ``loss`` is a scalar when labels were given."""


class TokenClassificationOutput(ScoresOutput):
    """Label scores of every token ``(batch, seq, labels)``; ``loss`` is a scalar when labels were given."""


@dataclass
class QuestionAnsweringOutput(Output):
    """Scores of each token to open and to close the answer, each ``(batch, seq)``."""

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class MaskedLMOutput(ScoresOutput):
    """Scores of every word at every token ``(batch, seq, vocab)``; ``loss`` is a scalar when labels were given."""


class MultipleChoiceOutput(ScoresOutput):
    """A score of every choice ``(batch, choices)``; ``loss`` is a scalar when labels were given."""


class NextSentenceOutput(ScoresOutput):
    """Scores that the second text follows and that it does not, ``(batch, 2)``; ``loss`` when labels were given."""


@dataclass
class PretrainingOutput(Output):
    """Scores of every word at every token, and of how two texts belong together under the name their family gives."""

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    sop_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class ReplacedTokensOutput(ScoresOutput):
    """The score of every token to have been replaced ``(batch, seq)``; ``loss`` is a scalar when labels were given."""


def _parts(output: Output) -> tuple[list[Any], tuple[str, ...]]:
    return output.values(), tuple(output.keys())


def _named_parts(output: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple[str, ...]]:
    named: list[tuple[Any, Any]] = [(pytree.MappingKey(name), value) for name, value in output.items()]
    return named, tuple(output.keys())


# What torch.export, torch.compile and torch.func take apart and put together again.
for _kind in (*Output.__subclasses__(), *ScoresOutput.__subclasses__()):
    pytree.register_pytree_node(
        _kind,
        _parts,
        lambda values, names, kind=_kind: kind(**dict(zip(names, values, strict=True))),
        serialized_type_name=f"flodl_hf.{_kind.__name__}",
        flatten_with_keys_fn=_named_parts,
    )
