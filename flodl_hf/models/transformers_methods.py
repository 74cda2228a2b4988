"""Methods that people know from transformers' models, under the same names and with the same outcome.

Parts to freeze are named by short paths.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from flodl.errors import ConfigError, nearest
from flodl_hf.models.adapted import Adapted


def size_text(nbytes: int) -> str:
    """Return a number of bytes for people: ``438.0 MB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


class TransformersMethods(Adapted):
    """Methods of models other than their task, with the names of transformers' ``PreTrainedModel``."""

    # --- size -----------------------------------------------------------------------------------

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameter elements of the model; a shared tensor counts once.

        Args:
            only_trainable: leave frozen ones out.
            exclude_embeddings: leave tables of embeddings out.
        """
        tables = {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding)} if exclude_embeddings else set()
        wanted = [p for p in self.parameters() if id(p) not in tables]
        return sum(p.numel() for p in wanted if p.requires_grad or not only_trainable)

    def get_memory_footprint(self) -> int:
        """Return how many bytes parameters and buffers take."""
        return sum(t.numel() * t.element_size() for t in (*self.parameters(), *self.buffers()))

    # --- words ----------------------------------------------------------------------------------

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the table of words, a module that is called with ids."""
        return self.graph.get_submodule("encoder.embeddings.word")  # type: ignore[return-value]

    def set_input_embeddings(self, table: nn.Embedding) -> None:
        """Put another table of words in place; one tied to it follows. See `resize_token_embeddings` for more rows.

        Raises:
            ConfigError: it is not of the same size.
        """
        shape, wanted = tuple(table.weight.shape), tuple(self.get_input_embeddings().weight.shape)
        if shape != wanted:
            raise ConfigError(
                f"set_input_embeddings: found a table of shape {shape}, expected {wanted}", problems=["shape"]
            )
        self._put_words(table.weight)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Give the table of words, and a masked-word head's, another number of rows; returns the table.

        New rows come last. The configuration's ``vocab_size`` and saved folders are updated.

        Args:
            new_num_tokens: how many; None keeps the number.
            pad_to_multiple_of: round the number up to a multiple, 8 or 64 for fast products.
            mean_resizing: new rows are the mean of the old ones (Hewitt 2021), which leaves scores of old words nearly
                as they are; False draws them at random.

        Raises:
            ConfigError: a number below 1.
        """
        table = self.get_input_embeddings()
        old = table.num_embeddings
        new = old if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            new = -(-new // pad_to_multiple_of) * pad_to_multiple_of
        if new < 1:
            raise ConfigError(
                f"resize_token_embeddings: {new} tokens; expected at least 1", problems=["new_num_tokens"]
            )
        if new == old:
            return table
        scale = float(self.config.source.get("initializer_range", 0.02)) if not mean_resizing else None
        tied, decoder = self._put_words(_resized(table.weight, new, scale)), self._decoder()
        if decoder is not None:
            if not tied:
                self._put("head.decoder.weight", _resized(decoder.weight, new, scale))
            for name in ("head.decoder.bias", "head.lm_bias.bias"):  # where a family has the bias of each word
                bias = dict(self.graph.named_parameters()).get(name)
                if bias is not None:
                    self._put(name, _resized(bias, new, None if scale is None else 0.0))
            decoder.out_features = new
        self.config = self.config.changed(encoder=replace(self.config.encoder, vocab_size=new))
        return table

    def _decoder(self) -> nn.Linear | None:
        """Return the projection onto words of a masked-word head."""
        head = dict(self.graph.named_children()).get("head")
        return dict(head.named_children()).get("decoder") if head is not None else None  # type: ignore[return-value]

    def _put_words(self, weight: Tensor) -> bool:
        """Put another weight into the table of words, and a tied projection; return whether it is tied."""
        table, decoder = self.get_input_embeddings(), self._decoder()
        tied = decoder is not None and decoder.weight is table.weight
        self._put("encoder.embeddings.word.weight", weight)
        table.num_embeddings = len(weight)
        if tied and decoder is not None:
            decoder.weight = table.weight
        return tied

    def _put(self, name: str, values: Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        owner = self.graph.get_submodule(module)
        before = getattr(owner, leaf)
        setattr(owner, leaf, nn.Parameter(values.detach().to(before), requires_grad=before.requires_grad))
        if self._untouched.get(name) == before._version:
            self._untouched[name] = getattr(owner, leaf)._version

    # --- training -------------------------------------------------------------------------------

    def freeze(self, *paths: str) -> Self:
        """Freeze parts; returns the model. The parts of an attached adapter remain trainable.

        Args:
            *paths: such as "embeddings", "layers.0-5", "layers.3.attention", "encoder"; none for all parameters,
                including an adapter's.

        Raises:
            ConfigError: a path matches nothing; the model is unchanged then.
        """
        for parameter in _parameters_at(self, paths, parts=False) if paths else self.graph.parameters():
            parameter.requires_grad_(False)
        return self

    def unfreeze(self, *paths: str) -> Self:
        """Let parts learn again; see `freeze`."""
        for parameter in _parameters_at(self, paths, parts=True) if paths else self.graph.parameters():
            parameter.requires_grad_(True)
        return self

    # --- being looked at ------------------------------------------------------------------------

    def _summary(self) -> dict[str, Any]:
        """Return a short description of the model as a mapping."""
        config, encoder = self.config, self.config.encoder
        count = self.num_parameters()
        number = f"{count / 1e6:.1f} million" if count >= 1_000_000 else f"{count:,}"
        names = list(config.labels) if self.head.endswith("classification") else []
        untrained = self.untrained
        dtypes = {str(p.dtype).removeprefix("torch.") for p in self.parameters()}
        found = {
            "family": config.model_type,
            "layers": f"{encoder.num_layers} of width {encoder.hidden_size}",
            "parameters": f"{number} ({size_text(self.get_memory_footprint())})",
            "dtype": ", ".join(sorted(dtypes)),
            "device": str(next(self.parameters()).device),
            "labels": ", ".join(names[:6]) + (f", ... {len(names)} in all" if len(names) > 6 else ""),
            "untrained": f"{len(untrained)} tensors have random values" if untrained else "",
            "from": self.source.name if self.source is not None else "",
        }
        return {name: value for name, value in found.items() if value}

    def __repr__(self) -> str:
        shown = self._summary()
        family = shown.pop("family")
        return f"{type(self).__name__} ({family}): " + "; ".join(f"{name} {value}" for name, value in shown.items())

    def _repr_html_(self) -> str:
        from html import escape

        from flodl_hf.inference.result_pages import table

        rows = [(escape(name), escape(value)) for name, value in self._summary().items()]
        return f"<div><b>{escape(type(self).__name__)}</b></div>{table(rows)}"


def _resized(values: Tensor, rows: int, scale: float | None) -> Tensor:
    """Return values with so many rows: cut, or extended with the mean of the existing rows, or drawn with ``scale``."""
    values = values.detach()
    if rows <= len(values):
        return values[:rows].clone()
    more = values.float().mean(0, keepdim=True).to(values).expand(rows - len(values), *values.shape[1:]).clone()
    if scale is not None:
        more = torch.randn_like(more) * scale
    return torch.cat([values, more])


def frozen_paths(model: Adapted, paths: Sequence[str]) -> list[str]:
    """Return the full paths that short ones stand for: ``layers.0-2`` is three layers of the encoder.

    Raises:
        ConfigError: a path matches nothing; ``problems`` lists these paths.
    """
    names = [name for name, _ in model.graph.named_parameters()]
    parents = {".".join(parts[:k]) for name in names for parts in [name.split(".")] for k in range(1, len(parts) + 1)}
    found, problems = [], []
    for path in paths:
        match = re.fullmatch(r"(.*?)(\d+)-(\d+)(.*)", path)
        if match:
            places, fault = _range(match, parents)
            found += places
            problems += [f"{path}{fault}"] if fault else []
        elif full := next((p for p in (path, f"encoder.{path}") if p in parents), None):
            found.append(full)
        else:
            known = {p.removeprefix("encoder.") for p in parents} | parents
            problems.append(f"{path}{nearest(path, known)}")
    if problems:
        roots = sorted({name.split(".")[0] for name in names})
        raise ConfigError(
            f"freeze: no module at {'; '.join(problems)}. Expected paths such as embeddings, layers.0-5, "
            f"layers.3.attention or one of {', '.join(roots)}",
            problems=problems,
        )
    return found


def _range(written: re.Match[str], parents: Collection[str]) -> tuple[list[str], str]:
    """Return the paths of a range, and its problem as text, "" for none."""
    head, first, last, tail = written.groups()
    ends = int(first), int(last)
    for start in (head, f"encoder.{head}"):
        numbers = sorted(
            int(number)
            for path in parents
            if path.startswith(start) and path.endswith(tail)
            if (number := path[len(start) : len(path) - len(tail)]).isdecimal()
        )
        if not numbers:
            continue
        there = f"; there are {head}{numbers[0]}-{numbers[-1]}{tail}"
        if ends[0] > ends[1]:
            return [], f" ends before it begins{there}"
        if ends[0] < numbers[0] or ends[1] > numbers[-1]:
            return [], there
        return [f"{start}{number}{tail}" for number in numbers if ends[0] <= number <= ends[1]], ""
    return [], f" has no numbered parts under {head.rstrip('.') or 'no name'}"


def _parameters_at(model: Adapted, paths: Sequence[str], *, parts: bool) -> list[nn.Parameter]:
    """Return the parameters at paths, with or without the parts of the active adapter."""
    held, places = model._held_adapters, frozen_paths(model, paths)
    adapter = () if parts or held.active is None else held.known[held.active].parts.values()
    excluded = {id(parameter) for part in adapter for parameter in part.parameters()}
    return [
        parameter
        for name, parameter in model.graph.named_parameters()
        if id(parameter) not in excluded and any(name == place or name.startswith(place + ".") for place in places)
    ]


def frozen_parameters(model: Adapted, paths: Sequence[str]) -> list[nn.Parameter]:
    """Return the parameters of the base model at ``paths``, without the parts of an adapter.

    Raises:
        ConfigError: a path matches nothing, or no parameter would be left to train.
    """
    if not paths:
        return []
    found = _parameters_at(model, paths, parts=False)
    chosen = {id(parameter) for parameter in found}
    if not any(p.requires_grad and id(p) not in chosen for p in model.parameters()):
        raise ConfigError(
            f"freeze: found {', '.join(paths)}, which leaves nothing to train; expected fewer parts",
            problems=["freeze"],
        )
    return found


def freeze(model: Adapted, paths: Sequence[str]) -> None:
    """Exclude the base model's parameters at ``paths`` from training; see `frozen_parameters`.

    Raises:
        ConfigError: a path matches nothing, or no parameter would be left to train.
    """
    for parameter in frozen_parameters(model, paths):
        parameter.requires_grad_(False)
