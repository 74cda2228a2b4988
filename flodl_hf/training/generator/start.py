"""A generator put beside a discriminator, with embeddings that both share, and taken away when the run is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flodl.errors import ConfigError
from flodl_hf.models.building import tie_tensors

if TYPE_CHECKING:
    from flodl_hf.heads.masked_lm import MaskedLM
    from flodl_hf.models.adapters.settings import Settings
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["GeneratorStart", "taken_out"]

EMBEDDINGS = "encoder.embeddings"


@dataclass(frozen=True)
class GeneratorStart:
    """Puts a generator beside a model; does nothing where it is there already.

    Args:
        name: folder or Hub name.
        seed: of what is drawn where the folder has no head of masked words.
        options: further options of ``from_pretrained``.
        adapter: added to the generator, to learn in place of its own weights; None for none.
    """

    name: str
    seed: int
    options: dict[str, Any]
    adapter: Settings | None = None

    def __call__(self, model: EncoderModel) -> None:
        """Give the model its generator.

        Raises:
            ConfigError: the two are of different families or read different words, or the adapter does not fit.
        """
        there: Any = model.beside
        if there is not None and there.__dict__.get("begun_from") == self:
            return
        from flodl_hf.auto import head_named

        kind: Any = head_named("masked_lm").model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            generator = kind.from_pretrained(
                self.name, dtype=torch.float32, **{"weights": "memory", **self.options}
            )  # fmt: skip
            self._check(model, generator)
            if generator.tokenizer is None:
                generator.tokenizer = model.tokenizer
            if self.adapter is not None:
                self._adapt(generator)
        if model.active_adapter is None and generator.active_adapter is None:
            _share(model, generator)  # those of a base stay its own, or its adapter would belong to another
        generator.__dict__["begun_from"] = self
        model.beside = generator

    def _adapt(self, generator: MaskedLM) -> None:
        try:
            generator.add_adapter(self.adapter)
        except ConfigError as fault:
            raise ConfigError(f"generator: {self.name}: {fault.message}", problems=fault.problems) from None

    def _check(self, model: EncoderModel, generator: MaskedLM) -> None:
        """Refuse a generator whose words mean something else to the discriminator.

        Raises:
            ConfigError: all that is wrong.
        """
        own, other, problems = model.config, generator.config, []
        if other.model_type != own.model_type:
            problems.append(f"found a {other.model_type} model; expected {own.model_type}, as the discriminator is")
        if other.encoder.vocab_size != own.encoder.vocab_size:
            problems.append(
                f"found a vocabulary of {other.encoder.vocab_size:,} words; expected the {own.encoder.vocab_size:,} of "
                "the discriminator"
            )
        elif generator.tokenizer is not None and model.tokenizer is not None:
            theirs, ours = generator.tokenizer.get_vocab(), model.tokenizer.get_vocab()
            apart = [word for word, number in theirs.items() if ours.get(word) != number]
            if apart:
                problems.append(
                    f"found {len(apart):,} words under other numbers than the discriminator has them, such as "
                    f"{apart[0]!r} as {theirs[apart[0]]}; expected one vocabulary"
                )
        if problems:
            raise ConfigError(f"generator: {self.name}: {'; '.join(problems)}", problems=problems)


def _share(model: EncoderModel, generator: MaskedLM) -> None:
    """Have the generator's embeddings be the discriminator's where they are as wide."""
    ours = dict(model.graph.get_submodule(EMBEDDINGS).named_parameters())
    theirs = dict(generator.graph.get_submodule(EMBEDDINGS).named_parameters())
    alike = [name for name, value in theirs.items() if name in ours and ours[name].shape == value.shape]
    _put(generator, {name: ours[name] for name in alike})


def shared_names(model: EncoderModel, generator: MaskedLM) -> list[str]:
    """Return the embeddings of a generator that are the discriminator's, by their names."""
    ours = dict(model.graph.get_submodule(EMBEDDINGS).named_parameters())
    theirs = generator.graph.get_submodule(EMBEDDINGS).named_parameters()
    return [name for name, value in theirs if ours.get(name) is value]


def _put(generator: MaskedLM, tables: dict[str, nn.Parameter]) -> None:
    """Give the generator's embeddings these parameters, and its decoder the words where it had them before."""
    graph = generator.graph
    parameters = dict(graph.named_parameters(remove_duplicate=False))
    ties = generator.config.family.heads["masked_lm"].ties
    tied = [tie for tie in ties if parameters[tie.kept] is parameters[tie.also]]
    embeddings = graph.get_submodule(EMBEDDINGS)
    for name, table in tables.items():
        inside, _, leaf = name.rpartition(".")
        setattr(embeddings.get_submodule(inside), leaf, table)
    tie_tensors(graph, tied)


def taken_out(model: EncoderModel) -> MaskedLM | None:
    """Return the generator beside a model, with embeddings of its own from now on; None where there is none."""
    generator: Any = model.beside
    if generator is None:
        return None
    model.beside = None
    theirs = dict(generator.graph.get_submodule(EMBEDDINGS).named_parameters())
    names = shared_names(model, generator)
    _put(generator, {name: nn.Parameter(theirs[name].detach().clone()) for name in names})
    return generator
