"""A model: a graph with its configuration, tokenizer and source, called as transformers' models are.

Decides how a graph is put together for a task, how it is filled from a folder, and how a call with
Hugging Face's keyword arguments becomes a call of the graph. What a task returns and computes
stands in its head's file; which classes exist for which folder is `flodl_hf.auto`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from flodl.errors import CheckpointError, ConfigError
from flodl.graph import FlowBuilder, Graph
from flodl_hf.activations import Activation
from flodl_hf.attention import check_implementation
from flodl_hf.config import ModelConfig
from flodl_hf.errors import ExportError, PredictError
from flodl_hf.familiar import Familiar
from flodl_hf.forked import entered
from flodl_hf.layout import Padded
from flodl_hf.loading import LoadReport
from flodl_hf.ranges import beyond_tables, check_rows
from flodl_hf.watching import given_embeddings, ids_for, watched
from flodl_hf.words import LOAD, SAVE, taking

if TYPE_CHECKING:
    from flodl_hf.runtime.explain import Explanation
    from flodl_hf.runtime.options import RunKeywords, RunOptions
    from flodl_hf.runtime.precision import Precision
    from flodl_hf.sentence import SentenceRecipe
    from flodl_hf.source import Source
    from flodl_hf.tokenizer import Tokenizer

__all__ = ["EncoderModel", "LoadKeywords", "build_graph"]


class LoadKeywords(TypedDict, total=False):
    """Keywords of `EncoderModel.from_pretrained`, for those who hand them on."""

    revision: str | None
    subfolder: str
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    dtype: torch.dtype | str | None
    device: torch.device | str | None
    attention: str
    labels: Sequence[str] | None
    num_labels: int | None
    problem_type: str | None
    ignore_config_keys: Sequence[str]
    strict_config: bool
    allow_nonfinite: bool
    mapped: bool | None
    verified: bool | str


def build_graph(config: ModelConfig, head: str, *, pooler: bool) -> Graph:
    """Return the graph of one task: ids to token states, then the pooler and the head that it takes.

    Args:
        config: the model's configuration.
        head: a head's name, or "base".
        pooler: for "base", also compute the pooler's output (named ``pooler_output``).

    Raises:
        ConfigError: the family has no such head.
    """
    family = config.family
    flow = (
        FlowBuilder(family.encoder(config.encoder), name="encoder")
        .input("token_type_ids", "position_ids", default=None)
        .input("layout")
        .using("token_type_ids", "position_ids", "layout")
        .tag("last_hidden_state")
    )
    if head == "base":
        if pooler and family.pooler is not None:
            flow = flow.fork(family.pooler(config.encoder), name="pooler").using("layout").tag("pooler_output")
        return flow.build()
    spec = family.heads.get(head)
    if spec is None:
        raise ConfigError(f"{family.model_type} has no {head} head; it has {', '.join(family.heads)}", problems=[head])
    if spec.pooled:
        assert family.pooler is not None
        flow = flow.through(family.pooler(config.encoder), name="pooler").using("layout").tag("pooler_output")
    return flow.through(spec.body(config.encoder, config.num_labels), name="head").using("layout").build()


class EncoderModel(Familiar):
    """An encoder with one task's head.

    Made by ``from_pretrained`` or ``from_config``; called with Hugging Face's keyword arguments.

    Attributes:
        graph: the network, a plain `flodl.graph.Graph` with the same vocabulary in every family.
        config: the configuration.
        tokenizer: the folder's tokenizer, or None.
        load_report: what became of every tensor, or None for a model made from a configuration.
    """

    head: ClassVar[str] = "base"
    per_text: ClassVar[bool] = False
    """Whether the head scores whole texts rather than tokens."""
    config: ModelConfig
    load_report: LoadReport | None

    def __init__(self, config: ModelConfig, graph: Graph) -> None:
        super().__init__()
        self.config = config
        # Not as "graph": modules that torch generates, as torch.export does, have an attribute of that name.
        self.network = graph
        self.register_load_state_dict_pre_hook(_as_network)
        self.load_report = None
        self.source: Source | None = None
        self._tokenizer: Tokenizer | None = None
        self.sentence_recipe: SentenceRecipe | None = None
        self._untouched: dict[str, int] = {}
        self._run_options: RunOptions | None = None

    # --- making ---------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: ModelConfig, *, pooler: bool = True, dtype: torch.dtype | None = None) -> Self:
        """Return a model with fresh random weights, drawn as transformers does (normal, ``initializer_range``)."""
        model = cls(config, build_graph(config, cls.head, pooler=pooler))
        scale = float(config.source.get("initializer_range", 0.02))
        initialise(model.graph, (), scale)
        tie_tensors(model.graph, declared_ties(config, cls.head))
        model.mark_untrained(name for name, _ in model.graph.named_parameters())
        if dtype is not None:
            model.to(dtype)
        return model

    @classmethod
    @taking(LOAD, ConfigError)
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        attention: str = "sdpa",
        labels: Sequence[str] | None = None,
        num_labels: int | None = None,
        problem_type: str | None = None,
        ignore_config_keys: Sequence[str] = (),
        strict_config: bool = False,
        allow_nonfinite: bool = False,
        mapped: bool | None = None,
        verified: bool | str = False,
    ) -> Self:
        """Return the model that a folder or Hub repository holds; all of it, or an error that lists what is wrong.

        Args:
            name_or_path: a local folder, ``"owner/name"`` or ``"owner/name@revision"``.
            revision: branch, tag or commit on the Hub.
            subfolder: folder inside the repository.
            token: Hub token; None takes the environment's.
            cache_dir: where downloads are kept; None takes the Hub's cache.
            local_files_only: open no connection.
            dtype: cast the weights to this; None keeps what is stored, "auto" takes what ``config.json`` states, as
                transformers does. Files of several dtypes are cast to one: the configuration's, else the first's.
            device: where to put the model; None is the CPU, "auto" the best device there is.
            attention: "sdpa" (fused kernels) or "eager" (plain products).
            labels: names of a new head's labels; a classifier of another size starts fresh.
            num_labels: the same by number alone.
            problem_type: "regression", "single_label_classification" or "multi_label_classification".
            ignore_config_keys: keys of ``config.json`` to pass over although they are not understood.
            strict_config: refuse keys of ``config.json`` that no family knows; else the load report notes them.
            allow_nonfinite: load weights that hold NaN or infinite values, or such that do not fit into ``dtype``.
            mapped: show the weight file instead of copying it: ready at once, but the file must not be
                changed while the model lives. None does so for the Hub's cache, whose files never change.
            verified: compare every file first with what ``checksums.json`` or the Hub's cache says of it; a text is
                the fingerprint that the folder must have, as ``flodl-hf verify`` tells it.

        Raises:
            HubError: the name leads nowhere.
            ConfigError: the configuration is wrong or not understood.
            CheckpointError: tensors are missing, unexpected, mis-shaped, damaged or not finite.
            DeviceError: the device is not there.
            TokenizerError: the tokenizer is damaged or has more tokens than the model.
        """
        from flodl_hf.source import load_model, numbered_labels

        return load_model(
            cls,
            name_or_path,
            hub={
                "revision": revision,
                "subfolder": subfolder,
                "token": token,
                "cache_dir": cache_dir,
                "local_files_only": local_files_only,
            },
            dtype=dtype,
            device=device,
            attention=attention,
            labels=labels if labels is not None else numbered_labels(num_labels),
            problem_type=problem_type,
            ignore_config_keys=ignore_config_keys,
            strict_config=strict_config,
            allow_nonfinite=allow_nonfinite,
            mapped=mapped,
            verified=verified,
        )

    # --- calling --------------------------------------------------------------------------------

    def run_graph(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        outputs: Sequence[str] = (),
        *,
        embeds: Tensor | None = None,
        hidden_states: bool = False,
        attentions: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, tuple[Tensor, ...]]]:
        """Return the graph's result, the named outputs, and what was asked for of its inside, by outputs' names."""
        if (input_ids is None) == (embeds is None):
            raise PredictError("expected either input_ids or inputs_embeds, found both or neither")
        if embeds is not None:
            input_ids = ids_for(self.graph, embeds)
        assert input_ids is not None
        if not torch.compiler.is_compiling():
            check_rows(input_ids)
            entered()
        given: dict[str, Any] = {
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "layout": Padded.of(attention_mask),
        }
        seen: dict[str, list[Tensor]] = {}
        with ExitStack() as stack:
            if embeds is not None:
                stack.enter_context(given_embeddings(self.graph, embeds))
            if hidden_states or attentions:
                inside = watched(self.graph, hidden_states=hidden_states, attentions=attentions)
                seen = stack.enter_context(inside)
            try:
                if outputs:
                    result, named = self.graph(input_ids, **given, outputs=list(outputs))
                else:
                    result, named = self.graph(input_ids, **given), {}
            except IndexError as fault:
                raise beyond_tables(self.config, input_ids, token_type_ids, position_ids) or fault from fault
        return result, named, {name: tuple(values) for name, values in seen.items()}

    def set_attention(self, implementation: str) -> Self:
        """Choose "sdpa", "eager" or "fast" attention in every layer; returns the model.

        Raises:
            ConfigError: there is no such implementation.
        """
        check_implementation(implementation)
        for module in self.modules():
            if hasattr(module, "implementation"):
                module.implementation = implementation  # type: ignore[assignment]
        return self

    def mark_untrained(self, names: Iterable[str]) -> None:
        """Remember tensors that hold random values, until something writes to them."""
        self._untouched = {name: self.graph.get_parameter(name)._version for name in names}

    @property
    def untrained(self) -> list[str]:
        """Names of tensors that still hold the random values they were made with."""
        return [name for name, version in self._untouched.items() if self.graph.get_parameter(name)._version == version]

    def __getstate__(self) -> dict[str, Any]:
        # Versions count what was written to these very tensors; a copy's begin anew.
        return {**self.__dict__, "_untouched": self.untrained}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_untrained(state["_untouched"])

    def ready(self, task: str, *, untrained: bool = False) -> Tokenizer:
        """Return the tokenizer if the model can predict.

        Args:
            task: the method that asks, for the message.
            untrained: go on although parts of the model hold random values.

        Raises:
            PredictError: there is no tokenizer, or parts of the model were never trained.
        """
        fresh = [] if untrained else self.untrained
        if fresh:
            raise PredictError(
                f"{task}: {len(fresh)} tensors of this model are new and untrained ({', '.join(fresh[:4])}"
                f"{', ...' if len(fresh) > 4 else ''}), so its answers would be random. Load a checkpoint that was "
                "written for this task, train the model, or pass untrained=True.",
                untrained=fresh,
            )
        if self.tokenizer is None:
            raise PredictError(
                f"{task}: the model has no tokenizer, because its folder holds none; expected tokenizer.json (or "
                "vocab.txt, vocab.json and merges.txt, a sentencepiece model) beside the weights; put it there, or set "
                "model.tokenizer."
            )
        return self.tokenizer

    @property
    def max_tokens(self) -> int | None:
        """The longest row of tokens that the model and its tokenizer allow; None where nothing bounds it."""
        bounds = [self.config.max_tokens, self.tokenizer.model_max_length if self.tokenizer else None]
        return min((bound for bound in bounds if bound), default=None)

    @property
    def run_options(self) -> RunOptions:
        """How predictions of this model run where a call does not say."""
        if self._run_options is None:
            from flodl_hf.runtime.options import RunOptions

            self._run_options = RunOptions()
        return self._run_options

    def runtime(self, **run: Unpack[RunKeywords]) -> Self:
        """Set how predictions run where a call does not say; returns the model.

        Args:
            **run: ``precision``, ``token_budget``, ``devices``, ``batch_invariant``, ``window``; see
                `flodl_hf.runtime.RunOptions`. What is not named stays.

        Raises:
            PredictError: a value makes no sense.
        """
        self._run_options = self.run_options.changed(dict(run))
        return self

    def explain(
        self, device: torch.device | str | None = None, precision: Precision | None = None, *, training: bool = False
    ) -> Explanation:
        """Return what runs each layer on a device, by which kernels, what is recorded, and why not where not.

        Args:
            device: where; None is the model's own. A device that is not here is explained as far as can be known.
            precision: see `flodl_hf.runtime.Precision`; None keeps the weights' own dtype.
            training: explain training steps under autocast in ``precision`` rather than prediction.

        Raises:
            PredictError: the precision is unknown, or the device lacks it.
        """
        from flodl_hf.runtime.explain import explain

        return explain(self, device, precision, training=training)

    def compute_loss(self, encoding: Mapping[str, Tensor], labels: Any) -> Tensor:
        """Return the loss of one batch, a scalar with its gradient.

        Args:
            encoding: what the tokenizer returned: ``input_ids``, ``attention_mask``, ...
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

    # --- what belongs to it ---------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The network; its parameters are named without a prefix, those of the model begin with ``network.``."""
        return self.network

    @graph.setter
    def graph(self, graph: Graph) -> None:
        self.network = graph

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the folder the model came from, or the one that was set."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the word table."""
        return next(self.parameters()).dtype

    @property
    def num_labels(self) -> int:
        """How many labels the configuration names."""
        return self.config.num_labels

    @taking(SAVE, ExportError)
    def save_pretrained(
        self,
        folder: str | Path,
        *,
        overwrite: bool = False,
        max_shard_size: int | str | None = None,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Write the model as a Hugging Face folder; see `flodl_hf.export.export_model`."""
        from flodl_hf.export import export_model

        return export_model(
            self, folder, overwrite=overwrite, max_shard_size=max_shard_size, extra_files=extra_files
        )  # fmt: skip


def _as_network(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take tensors under the names of former versions, which had "graph" for "network"."""
    before = f"{prefix}graph."
    for name in [name for name in state if name.startswith(before)]:
        state[f"{prefix}network.{name.removeprefix(before)}"] = state.pop(name)


def declared_ties(config: ModelConfig, head: str) -> tuple[Any, ...]:
    """Return the ties of one head that the configuration asks for."""
    if head == "base" or not config.tie_words:
        return ()
    return config.family.heads[head].ties


def tie_tensors(graph: Graph, ties: Iterable[Any]) -> None:
    """Make each tie's second name hold the first one's parameter."""
    for tie in ties:
        module, _, leaf = tie.also.rpartition(".")
        setattr(graph.get_submodule(module), leaf, graph.get_parameter(tie.kept))


def assign(graph: Graph, tensors: Mapping[str, Tensor], owners: Mapping[str, nn.Module] | None = None) -> None:
    """Give each named parameter its tensor, without a copy.

    Args:
        graph: whose parameters.
        tensors: by parameter name.
        owners: the graph's modules by name, for callers with many tensors.
    """
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        owner = graph.get_submodule(module) if owners is None else owners[module]
        if leaf not in owner._parameters:
            raise CheckpointError(f"{name} is not a parameter of the model", name=name)
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


def initialise(graph: nn.Module, only: Iterable[str], scale: float) -> None:
    """Give fresh values to parameters as transformers does: normal weights, zero biases, norms at one.

    Args:
        graph: the network.
        only: names to initialise; empty means all.
        scale: standard deviation of weights.
    """
    chosen = set(only)
    for prefix, module in graph.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if chosen and name not in chosen:
                continue
            with torch.no_grad():
                if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                    parameter.fill_(1.0 if leaf == "weight" else 0.0)
                elif leaf == "bias":
                    parameter.zero_()
                elif not isinstance(module, Activation):
                    parameter.normal_(0.0, scale)
                    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                        parameter[module.padding_idx].zero_()
