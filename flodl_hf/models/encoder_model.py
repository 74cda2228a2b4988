"""A model: a graph with its configuration, tokenizer and source, called as transformers' models are.

The base class of all tasks: created from a configuration or a folder, run, explained, written and uploaded. The
file of each head implements its task; `flodl_hf.heads.auto` selects the class for a folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from torch import Tensor

from flodl.errors import nearest
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.checkpoints.keywords import SAVE, accept_keywords
from flodl_hf.errors import ExportError, PredictError
from flodl_hf.families import model_types
from flodl_hf.families.schema.tasks import HEADS, Task, task_named
from flodl_hf.models.building import build_graph, initialise, tie_tensors
from flodl_hf.models.opening import FromPretrained
from flodl_hf.models.transformers_methods import TransformersMethods

if TYPE_CHECKING:
    from flodl_hf.inference.evaluation_result import EvaluationResult
    from flodl_hf.inference.explain import Explanation
    from flodl_hf.inference.options import Precision, RunKeywords, RunOptions


class EncoderModel(FromPretrained, TransformersMethods):
    """An encoder with one task's head.

    Made by ``from_pretrained`` or ``from_config``; called with Hugging Face's keyword arguments.

    Attributes:
        graph: the network, a plain `flodl.graph.Graph` with the same vocabulary in every family.
        config: the configuration.
        tokenizer: the folder's tokenizer, or None.
        load_report: what became of every tensor, or None for a model made from a configuration.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            config = self.__dict__.get("config")
            if config is not None and name in config.family.methods:
                module, _, function = config.family.methods[name].partition(":")
                return partial(getattr(import_module(module), function), self)
            raise AttributeError(attribute_error_message(type(self), name)) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.config.family.methods]

    @property
    def base_model(self) -> EncoderModel:
        """The model without its head; both have the same parameters."""
        kind: Any = import_module("flodl_hf.heads.auto").head_named("base").model
        if isinstance(self, kind):
            return self
        parts = {name: part for name, part in self.graph.named_children() if name != "head"}
        with torch.device("meta"):
            base = kind(self.config, build_graph(self.config, "base", pooler="pooler" in parts))
        for name, part in parts.items():
            setattr(base.graph, name, part)
        base.tokenizer, base.source = self.tokenizer, self.source
        return base.train(self.training)

    # --- making ---------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: ModelConfig, *, pooler: bool = True, dtype: torch.dtype | None = None) -> Self:
        """Return a model with fresh random weights, drawn as transformers does (normal, ``initializer_range``)."""
        model = cls(config, build_graph(config, cls.head, pooler=pooler))
        scale = float(config.source.get("initializer_range", 0.02))
        initialise(model.graph, (), scale)
        if cls.head != "base" and config.tie_words:
            tie_tensors(model.graph, config.family.heads[cls.head].ties)
        model._mark_untrained(name for name, _ in model.graph.named_parameters())
        if dtype is not None:
            model.to(dtype)
        return model

    @property
    def run_options(self) -> RunOptions:
        """Default options of predictions of this model."""
        from flodl_hf.inference.options import RunOptions

        return self._run_options or RunOptions()

    def runtime(self, **run: Unpack[RunKeywords]) -> Self:
        """Set default options of predictions; returns the model.

        Args:
            **run: ``precision``, ``token_budget``, ``devices``, ``batch_invariant``, ``window``; see
                `flodl_hf.inference.RunOptions`. Options that are not passed stay unchanged.

        Raises:
            PredictError: a value makes no sense.
        """
        self._run_options = self.run_options.changed(dict(run))
        return self

    @property
    def max_seq_length(self) -> int | None:
        """Most tokens of a text, as sentence-transformers has it: longer texts are truncated; None for no limit.

        Setting it changes the tokenizer and the settings of ``sentence_bert_config.json``, and is saved with the model.
        """
        recipe = self.sentence_recipe
        return self._most_tokens(recipe.max_tokens if recipe is not None else None)

    @max_seq_length.setter
    def max_seq_length(self, length: int) -> None:
        from flodl_hf.models.pretrained import overridden
        from flodl_hf.models.sentence_folder import with_length

        places = self.config.max_tokens
        if type(length) is not int or length < 3 or (places is not None and length > places):
            raise PredictError(
                f"max_seq_length: found {length!r}, expected an integer from 3 to {places or 'any number'}. The model "
                "has no positions for longer texts.",
                max_seq_length=length,
            )
        if self.sentence_recipe is not None:
            self.sentence_recipe = with_length(self.sentence_recipe, length)
        if self.tokenizer is not None:
            folder = Path(self.source.folder) if self.source is not None else Path()
            given = {"model_max_length": length}
            self.tokenizer = overridden(self.tokenizer, given, folder, self.config.model_type)

    def explain(
        self, device: torch.device | str | None = None, precision: Precision | None = None, *, training: bool = False
    ) -> Explanation:
        """Return which kernels run each layer on a device, whether calls are recorded, and the reasons if not.

        Args:
            device: the device; None is the model's own. An absent device is explained as far as possible.
            precision: see `flodl_hf.inference.Precision`; None keeps the weights' own dtype.
            training: explain training steps under autocast in ``precision`` rather than prediction.

        Raises:
            PredictError: the precision is unknown, or the device lacks it.
        """
        from flodl_hf.inference.explain import explain

        return explain(self, device, precision, training=training)

    def compute_loss(self, encoding: Mapping[str, Tensor], labels: Any) -> Tensor:
        """Return the loss of one batch, a scalar with its gradient.

        Args:
            encoding: the tokenizer's output: ``input_ids``, ``attention_mask``, ...
            labels: the head's labels; for question answering a pair of start and end positions.

        Raises:
            PredictError: the head has no loss.
        """
        names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        inputs = {name: torch.as_tensor(encoding[name], device=self.device) for name in names if name in encoding}
        if not self.config.token_types:
            inputs.pop("token_type_ids", None)
        if self.head == "base":
            raise PredictError("compute_loss: the encoder alone has no loss; load a task's model")
        if self.head == "question_answering":
            starts, ends = labels
            given = {"start_positions": torch.as_tensor(starts), "end_positions": torch.as_tensor(ends)}
        else:
            given = {"labels": torch.as_tensor(labels, device=self.device)}
        return self(**inputs, **given).loss

    def evaluate(self, data: Any, **options: Any) -> EvaluationResult:
        """Return the metrics of the model on labelled data, as `flodl_hf.evaluate` does.

        Args:
            data: a file or rows with labels, as ``eval`` of `flodl_hf.finetune`; or a mapping of names to data sets.
            **options: as of `flodl_hf.evaluate`.

        Raises:
            DataError: the data cannot be read, or has labels that the model does not have.
            PredictError: the head of the model is not trained.
        """
        # Fine-tuning imports the models, so that they import it when it is called.
        return import_module("flodl_hf.training").evaluate(self, data, **options)

    def _hub_metadata(self) -> dict[str, Any]:
        """Return the metadata of a model card: library, task, and the base model with its commit."""
        from flodl_hf.checkpoints.hub.request import hub_name

        is_vectors = self.head == "base" and self.sentence_recipe is not None
        library = "sentence-transformers" if self.sentence_recipe is not None else "transformers"
        if self.active_adapter is not None and not self._held_adapters.merged:
            library = "peft"
        base = hub_name(self.source.name) if self.source is not None else None
        return {
            "library_name": library,
            "pipeline_tag": "sentence-similarity" if is_vectors else task_named(self.head).hub_tag,
            "base_model": base,
            "base_model_revision": self.source.commit if base is not None and self.source is not None else None,
            "tags": ["flodl-hf"],
        }

    def to_transformers(self) -> Any:
        """Return a ``PreTrainedModel`` of transformers with the same parameters; see `flodl_hf.compat.transformers`."""
        return import_module("flodl_hf.compat.transformers").pretrained_model(self)

    @accept_keywords(SAVE, ExportError)
    def save_pretrained(
        self,
        folder: str | Path,
        *,
        overwrite: bool = False,
        max_shard_size: int | str | None = None,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Write the model as a Hugging Face folder; see `flodl_hf.models.saving.export_model`.

        With an adapter in it the adapter and its head are written, see `save_adapter`; merged, the whole model is.
        """
        if self.active_adapter is not None and not self._held_adapters.merged:
            return self.save_adapter(folder, overwrite=overwrite, extra_files=extra_files)
        from flodl_hf.models.saving import export_model

        return export_model(
            self, folder, overwrite=overwrite, max_shard_size=max_shard_size, extra_files=extra_files
        )  # fmt: skip

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload model",
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        card: str | Path | None = None,
        results: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> str:
        """Write the model into a repository of the Hub, which is made if need be; return the commit's address.

        The uploaded files are those that `save_pretrained` writes, complete and compared, and a card with
        ``library_name``, ``pipeline_tag`` and ``base_model``.

        Args:
            repo_id: "owner/name".
            commit_message: of the commit.
            private: whether a new repository is.
            token: Hub token; None takes the environment's.
            revision: branch; None is the main one.
            create_pr: open a pull request instead.
            card: text or file of the model card, such as the ``README.md`` that `flodl_hf.finetune` wrote; None for a
                card of metadata only.
            results: evaluations on benchmark data sets of the Hub, each with ``dataset_id``, ``task_id``, ``value`` and
                perhaps ``dataset_revision``, a commit.
            **options: of `save_pretrained`.

        Raises:
            HubError: the Hub refuses, or a result has other fields or a revision that is not a commit.
        """
        from flodl_hf.checkpoints.hub.request import card_file, results_file, upload_folder

        files = {**card_file(card, self._hub_metadata()), **results_file(results), **options.pop("extra_files", {})}
        with TemporaryDirectory(prefix="flodl-hf-") as space:
            folder = self.save_pretrained(Path(space) / "model", extra_files=files, **options)
            return upload_folder(
                folder, repo_id, message=commit_message, private=private, token=token, revision=revision,
                create_pr=create_pr,
            )  # fmt: skip


METHODS: dict[str, list[Task]] = {
    method: [head for head in HEADS if method in head.methods]
    for method in dict.fromkeys(method for head in HEADS for method in head.methods)
}
"""Each method that takes texts, and the tasks that have it."""

FAMILIAR = {
    "entities": "entities are what predict finds, of AutoModelForTokenClassification",
    "classify": "labels are what predict finds, of AutoModelForSequenceClassification",
    "rank": "rerank orders texts by a query, of AutoModelForSequenceClassification",
    "get_sentence_embedding_dimension": "config.hidden_size is the width of its states",
    "get_max_seq_length": "max_seq_length is the number of tokens that longer texts are truncated to",
    "save": "save_pretrained writes a folder",
    "tokenize": "tokenizer(texts, padding=True, return_tensors='pt') returns the inputs of a call",
    "encode_multi_process": "encode(texts, devices=[...]) uses several devices",
    "start_multi_process_pool": "encode(texts, devices=[...]) uses several devices",
    **dict.fromkeys(
        ("classifier", "score", "qa_outputs", "cls", "lm_head"),
        "graph.get_submodule('head') is the head, and freeze=['encoder'] trains it alone",
    ),
    **dict.fromkeys(
        ("encoder", "embeddings", "transformer", "pooler", *(name.replace("-", "_") for name in model_types())),
        "base_model is the model without its head, and graph.get_submodule('encoder') its encoder",
    ),
    "generate": "encoders generate no text; fill_mask finds the word behind a mask, of AutoModelForMaskedLM",
}
"""What other libraries' models have, and what stands for it here."""


def attribute_error_message(kind: type, name: str) -> str:
    """Return the message for an attribute that a class of models does not have."""
    plain = f"{kind.__name__!r} object has no attribute {name!r}"
    if name.startswith("_"):
        return plain
    own = [method for method in METHODS if hasattr(kind, method)]
    if name in METHODS:
        classes = " or ".join(f"AutoModel{head.hf_suffix.removeprefix('Model')}" for head in METHODS[name][:2])
        return f"{plain}; expected one of {', '.join(own)}, which answer texts: {name} is a method of {classes}"
    if name in FAMILIAR:
        return f"{plain}; {FAMILIAR[name]}"
    return plain + nearest(name, [known for known in dir(kind) if not known.startswith("_")])
