"""The task of a generator and a discriminator: rows of plain text, the loss of both, and how each is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flodl.errors import ConfigError
from flodl.metrics import Accuracy, Classification, Metric
from flodl_hf.inference.decode.metrics import Perplexity
from flodl_hf.readers.columns import Columns, infer_columns
from flodl_hf.training.generator.batches import CollateMasked
from flodl_hf.training.generator.start import GeneratorStart, shared_names, taken_out
from flodl_hf.training.generator.step import JointObjective
from flodl_hf.training.masked import MaskedTask
from flodl_hf.training.options import Options
from flodl_hf.training.rows import CollateRows, EncodedRows, Masking
from flodl_hf.training.step import Kind
from flodl_hf.training.task import Prepared

if TYPE_CHECKING:
    from flodl_hf.heads.masked_lm import MaskedLM
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["GeneratorTask", "plan_generator"]

MASK_SHARE = 0.85
"""Of the tokens that the generator has to find, so many are masked; the others stay what they are, as published."""


@dataclass(frozen=True)
class GeneratorTask(MaskedTask):
    """Whether each token is the text's own, where others are a generator's, which learns the words behind masks.

    Args:
        columns: which column holds texts.
        concatenate: put lines end to end and cut them into full rows.
        options: the run's.
    """

    head: str = "replaced_tokens"
    kind: Kind = "replaced"
    options: Options = field(default_factory=Options)

    @property
    def start(self) -> GeneratorStart:
        """What puts the generator beside a model, on every rank."""
        options = self.options
        opening = {"attention": options.attention, "local_files_only": options.local_files_only}
        shown = {"mapped": True} if options.shard and options.ranks > 1 else {}  # as the discriminator is opened
        return GeneratorStart(str(options.generator), options.seed, {**shown, **opening}, options.adapter)

    def settle(self, model: EncoderModel) -> list[str]:
        """Give the model its generator; return what is to be said of it."""
        self.start(model)
        generator: Any = model.beside
        shared = shared_names(model, generator)
        own, other = model.config.encoder, generator.config.encoder
        widths = f"the generator is {other.hidden_size} wide, the discriminator {own.hidden_size}"
        adapted = [name for name, part in (("discriminator", model), ("generator", generator)) if part.active_adapter]
        if adapted:
            return [f"{widths}; embeddings are not shared: an adapter of the {' and of the '.join(adapted)} learns"]
        if not shared:
            return [f"{widths}; embeddings are not shared, since one has {other.embedding_size} features, the other "
                    f"{own.embedding_size}"]  # fmt: skip
        names = sorted({name.partition(".")[0] for name in shared})
        return [f"{widths}; they share the discriminator's embeddings ({', '.join(names)})"]

    def bounds(self, model: EncoderModel) -> list[int]:
        """Return the most tokens of a row that the generator takes, where anything bounds it."""
        generator: Any = model.beside
        return [] if generator.max_tokens is None else [generator.max_tokens]

    def conclude(self, model: EncoderModel) -> MaskedLM | None:
        """Take the generator away and return it; None where it was taken already."""
        return taken_out(model)

    def masking(self, tokenizer: Tokenizer) -> Masking:
        """Return what masks tokens."""
        return Masking(
            tokenizer.mask_token_id or 0, tokenizer.vocab_size, self.options.mask_probability, self.options.whole_words,
            mask_share=MASK_SHARE, random_share=0.0,
        )  # fmt: skip

    def objective(self) -> JointObjective:
        """Return the loss."""
        weight = self.options.discriminator_weight
        return JointObjective() if weight is None else JointObjective(weight=weight)

    def shares(self, usual: CollateRows, rows: EncodedRows, batches: Any, accumulate: int) -> CollateMasked:
        """Return the collate function of some batches, where a step has ``accumulate`` of them."""
        probability = self.options.mask_probability
        return CollateMasked.of_step(usual, rows, batches, accumulate, by_rows=False, probability=probability)

    def scorer(self, prepared: Prepared) -> Any:
        """Return a scorer that has seen nothing."""
        return _Scorer()


class _Scorer:
    def __init__(self) -> None:
        self.tokens, self.first, self.words = Classification(2, "binary"), Accuracy(), Perplexity()

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any]:
        """Take in what both models say of one row; return which tokens are taken for replaced, and which are."""
        score, replaced, right, lost = scores[0].unbind(-1)
        found, true = (score > 0).long(), replaced.long()
        self.tokens.update(found, true)
        masked = right >= 0
        self.first.update(right[masked].long(), torch.ones_like(right[masked], dtype=torch.long))
        self.words.add(lost.sum(dtype=torch.float64), masked.sum())
        return found.tolist(), true.tolist()

    def metrics(self) -> Sequence[Metric]:
        """Return what was counted."""
        return [self.tokens, self.first, self.words]

    def compute(self) -> dict[str, float]:
        """Return how well replaced tokens are found, and how well the generator finds words behind masks."""
        figures = self.tokens.compute()
        figures.pop("count", None)
        return {
            **figures,
            "generator_accuracy": self.first.compute()["accuracy"],
            "generator_perplexity": self.words.compute()["perplexity"],
        }


def plan_generator(rows: Sequence[Mapping[str, Any]], options: Options) -> GeneratorTask:
    """Return the task of a generator and a discriminator.

    Raises:
        ConfigError: columns that are no texts.
    """
    columns = infer_columns(rows, **dict(options.columns or {}))
    text = columns.text if columns.words is None else None
    if text is None:
        raise ConfigError(
            f"generator: found the columns {list(rows[0])}; expected texts, whose tokens it replaces",
            problems=["generator"],
        )
    return GeneratorTask(Columns(task="masked-lm", text=text), options.concatenate, options=options)
