"""Options of a fine-tuning run, each with its default and a one-line description.

``finetune``, the command line, recipe files and the model card use this table.
It checks single values; checks that need the data or the model are made where they are used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

from flodl.errors import ConfigError, capped, nearest
from flodl_hf.models.adapters.settings import Settings, adapter_of
from flodl_hf.training.option_checks import checked, combination_faults, schedule_values
from flodl_hf.training.training_arguments import TAKEN, translated

__all__ = ["BATCH_SIZE", "Options", "make_options", "read_options"]

BATCH_SIZE = 32
"""Default number of rows in a batch."""
TRACKERS = ("csv", "jsonl", "mlflow", "tensorboard", "wandb")
"""Names of `flodl.train.trackers`, which is imported when a run starts."""


def _opt(default: Any, says: str, **checks: Any) -> Any:
    return field(default=default, metadata={"help": says, **checks})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one run; the ``help`` of each field describes it."""

    task: str | None = _opt(
        None,
        "seqcls, tokcls (ner), qa, mlm, choice, nsp, pretrain, replaced, embedding, sparse, multivector or rank; by "
        "default inferred from the columns.",
    )
    columns: Mapping[str, str] | None = _opt(None, "Columns by role: text=headline.")
    labels: Sequence[str] | None = _opt(None, "Label names in order; by default the labels of the data.")
    new_head: bool | None = _opt(
        None,
        "Initialise a new head; by default if the label names or their order differ from those of the model; no "
        "keeps the old head with the new names.",
    )
    problem_type: str | None = _opt(
        None,
        "regression, single_label_classification or multi_label_classification; by default inferred from the labels.",
        among=("regression", "single_label_classification", "multi_label_classification"),
    )

    epochs: int = _opt(3, "Number of epochs.", least=1)
    max_steps: int | None = _opt(None, "Maximum number of optimiser steps.", least=1)
    batch_size: int | None = _opt(
        None,
        "Rows in a batch, over all devices together; by default 32, or 16, 8 or 4 if a run for classification or "
        "question answering would have too few steps.",
        least=1,
    )
    accumulate: int = _opt(1, "Gradient accumulation: batches per optimiser step.", least=1)
    micro_batch_size: int | str | None = _opt(
        None, "Maximum rows per forward pass, or auto for as many as fit; changes only the memory.",
        least=1, words=("auto",),
    )  # fmt: skip
    tokens_per_batch: int | None = _opt(
        None, "Maximum number of tokens per batch, instead of a number of rows.", least=1
    )
    group_by_length: bool | None = _opt(
        None,
        "Group rows of similar length, which saves padding; by default if rows are padded and an epoch has at least "
        "256 batches.",
    )
    layout: str = _opt(
        "auto",
        "padded, or packed (concatenated rows without padding); auto packs on CUDA in bf16 and fp16.",
        among=("auto", "padded", "packed"),
    )
    max_length: int | None = _opt(None, "Maximum number of tokens per row; by default the limit of the model.", least=4)
    stride: int | None = _opt(
        None, "Tokens shared by neighbouring windows of a long text (seqcls 0, tokcls 64, qa 128).", least=0
    )
    long_texts: str = _opt(
        "cut",
        "seqcls: cut texts that are longer than a row at their end, or read them in windows, each trained with the "
        "label; the evaluation uses the mean of the windows, as predict does.",
        among=("cut", "windows"),
    )

    lr: float = _opt(5e-5, "Highest learning rate.", least=0.0)
    schedule: Any = _opt(  # noqa: RUF009
        "linear",
        "linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt, warmup_stable_decay, constant, one_cycle or "
        "plateau.",
    )
    schedule_options: Mapping[str, Any] | None = _opt(
        None, "Options of the schedule, such as power=2 (polynomial) or decay=0.2 (warmup_stable_decay)."
    )
    warmup: float = _opt(0.0, "Warmup steps; below 1, a share of all steps.", least=0.0)
    optimizer: str = _opt("adamw", "adamw or sgd.", among=("adamw", "sgd"))
    weight_decay: float = _opt(0.0, "Weight decay, not applied to biases and norms.", least=0.0)
    beta1: float = _opt(0.9, "AdamW's decay of the mean; SGD's momentum.", least=0.0, most=1.0)
    beta2: float = _opt(0.999, "AdamW's decay of the variance.", least=0.0, most=1.0)
    eps: float = _opt(1e-8, "AdamW's epsilon.", least=0.0)
    max_grad_norm: float | None = _opt(1.0, "Clip the gradient to this 2-norm; 0 does not clip.", least=0.0)
    layerwise_decay: float | None = _opt(
        None, "Factor of the learning rate from each layer to the layer below.", least=0.0, most=1.0
    )
    freeze: Sequence[str] = _opt((), "Parts of the base model that are not trained: embeddings, layers.0-5, encoder.")
    class_weights: Any = _opt(None, "Weights of the labels in the loss, as a mapping or in order, or 'balanced'.")  # noqa: RUF009
    label_smoothing: float = _opt(
        0.0, "Label smoothing: share of the target that is spread over all labels.", least=0.0, most=1.0
    )
    dropout: float | None = _opt(
        None, "Dropout probability of all layers; by default that in the config.", least=0.0, most=0.99
    )

    lora: int | None = _opt(
        None, "Train a LoRA adapter of this rank and the head; all other weights are frozen.", least=1
    )
    lora_alpha: float | None = _opt(None, "lora: alpha; the scale is alpha / rank, by default 1.")
    lora_dropout: float = _opt(0.0, "lora: dropout of the adapter input.", least=0.0, most=1.0)
    lora_targets: Sequence[str] = _opt(
        (), "lora: names or patterns of projections, or all-linear; by default query and value."
    )
    lora_kinds: Sequence[str] = _opt(
        (), "lora: rslora (scale by the root of the rank), dora (learned lengths of rows).", each=("rslora", "dora")
    )

    ia3: Sequence[str] = _opt(
        (), "Train scales (IA3) of these projections and the head; 'usual' for key, value and the feed-forward part."
    )

    prompt_tokens: int | None = _opt(
        None, "Prompt tuning: number of trained vectors before each text; the head is trained too.", least=1
    )
    prompt_text: str | None = _opt(None, "prompt_tokens: text that initialises them; by default random words.")
    prompt_encoder: int | None = _opt(
        None, "prompt_tokens: width of the network that generates them (P-tuning).", least=1
    )
    prompt_encoder_kind: str = _opt("mlp", "prompt_encoder: kind of network.", among=("mlp", "lstm"))
    prefix_tokens: int | None = _opt(
        None, "Prefix tuning: number of trained keys and values per layer; the head is trained too.", least=1
    )
    prefix_encoder: int | None = _opt(None, "prefix_tokens: width of the network that generates them.", least=1)

    neftune: float | None = _opt(
        None, "Noise on word embeddings in training, alpha of arXiv:2310.05914 (5 is usual).", least=0.0
    )
    ema: float | None = _opt(
        None,
        "Evaluate and keep a moving average of the weights with this decay (0.999).",
        least=0.0,
        most=1.0,
    )

    precision: str = _opt("fp32", "fp32, tf32, bf16 or fp16.", among=("fp32", "tf32", "bf16", "fp16"))
    gradient_checkpointing: bool = _opt(False, "Recompute layers in the backward pass to save memory.")
    attention: str = _opt("sdpa", "sdpa or eager.", among=("sdpa", "eager"))
    seed: int = _opt(42, "Seed of new weights, data order, dropout and masking.")
    deterministic: bool = _opt(False, "Use deterministic kernels only.")
    capture: bool = _opt(True, "Capture steps as CUDA graphs, one per batch shape, if possible.")
    fused: bool = _opt(True, "Compute encoder layers by fused kernels on CUDA in half precision.")
    compile: bool = _opt(False, "Compile the model with torch.compile before training.")
    log_every: int = _opt(20, "Steps between reads of metrics from a CUDA device.", least=1)
    on_nan: str = _opt("stop", "stop or skip if the loss or gradient is not finite.", among=("stop", "skip"))
    compat: str | None = _opt(
        None,
        "transformers: compute the losses of its Trainer: gradients of accumulated batches are added without division, "
        "and the loss of answers includes padding.",
        among=("transformers",),
    )

    eval_every: int | None = _opt(
        None, "Steps between evaluations; default: after each epoch. The last model is always evaluated.", least=1
    )
    eval_batch_size: int | None = _opt(
        None, "Rows per evaluation batch; by default batch_size if given, else 32.", least=1
    )
    metric: str | None = _opt(None, "Metric that selects the best model; '-name' if lower is better.")
    keep_best: bool = _opt(True, "Keep the best model instead of the last.")
    tune_thresholds: bool = _opt(
        False,
        "Choose decision thresholds (of each label, or of the second label of two) on the evaluation data; the model "
        "stores them for predict(threshold='tuned').",
    )
    early_stopping: int | None = _opt(None, "Stop after this number of evaluations without improvement.", least=1)

    concatenate: bool = _opt(False, "mlm: concatenate lines with separators, and split them into full rows.")
    whole_words: bool = _opt(False, "mlm, pretrain, generator: mask whole words.")
    mask_probability: float = _opt(
        0.15, "mlm, pretrain: share of the tokens that are masked; replaced: that are replaced.", least=0.0, most=1.0
    )
    generator: str | None = _opt(
        None,
        "replaced: folder or name of a masked language model that is trained jointly and samples the replacements "
        "(the training of ELECTRA); by default they are drawn from the vocabulary.",
    )

    vector_loss: Any = _opt(  # noqa: RUF009
        None,
        "embedding, sparse, multivector, rank: the loss, by sentence-transformers' name (MultipleNegativesRankingLoss, "
        "CoSENTLoss, LambdaLoss, ...), or a mapping of tables to losses; the default depends on the columns.",
    )
    loss_options: Mapping[str, Any] | None = _opt(
        None,
        "embedding, sparse, multivector, rank: settings of the loss: scale=50, margin=0.2, directions=query_to_doc.",
    )
    matryoshka: Sequence[str] = _opt((), "embedding: sizes of truncated vectors; the loss is the sum over all sizes.")
    guide: str | None = _opt(
        None, "embedding: folder or name of a second model: the guide of GISTEmbedLoss, the teacher of MSELoss."
    )
    pooling: str | None = _opt(
        None, "embedding: mean, cls, max, ... or several (mean+max); by default that of the folder, else mean."
    )
    normalize: bool | None = _opt(None, "embedding: scale vectors to length 1; by default as in the folder, else yes.")
    prompts: Any = _opt(  # noqa: RUF009
        None,
        "embedding, sparse: a text before each text of the loss, or a mapping of columns to such texts. "
        "Metrics use the prompts of the folder, as sentence-transformers does.",
    )
    projection: Mapping[str, Any] | None = _opt(
        None,
        "multivector: settings of a new projection: size=128, query_length=32, document_length=180, query_marker, "
        "document_marker, expanded=yes, attended=no, punctuation=no (documents have no vectors of them).",
    )
    no_duplicates: bool = _opt(True, "embedding: exclude repeated texts from a batch with in-batch negatives.")
    mixing: str = _opt(
        "proportional",
        "embedding: sample batches of several tables in proportion to their rows, or alternate until one table ends.",
        among=("proportional", "round_robin"),
    )
    cache_tokens: int | None = _opt(
        None,
        "embedding: maximum tokens per forward pass; a batch is processed in parts, twice, with the same step, so "
        "that memory limits only the vectors (gradient caching).",
        least=16,
    )

    trackers: Sequence[str] = _opt((), "Trackers of metrics: csv, jsonl, tensorboard, wandb, mlflow.", each=TRACKERS)
    log_dir: str | None = _opt(None, "Folder of trackers; by default next to the result.")
    profile: str | None = _opt(None, "Folder for traces of torch.profiler over some steps.")
    report: bool = _opt(True, "Write report.html into the result: curves, and predictions for the evaluation data.")

    save_every: int | None = _opt(None, "Steps between checkpoints, in addition to one per epoch.", least=1)
    checkpoints: str | None = _opt(None, "Folder of checkpoints; by default next to the result.")
    keep_last: int = _opt(1, "Number of newest checkpoints to keep, in addition to the best one.", least=1)
    keep_checkpoints: bool = _opt(False, "Keep the checkpoints at the end of the run.")
    resume: bool = _opt(False, "Resume an interrupted run from its checkpoints.")
    allow_change: Sequence[str] = _opt((), "With resume: names of settings that may differ from the checkpoint.")

    devices: Any = _opt(None, "Number or names of devices (cpu,cpu), or auto for all; not needed under torchrun.")  # noqa: RUF009
    policy: str | None = _opt(
        None,
        "sync, cadence or async; default: sync, or cadence where device names differ.",
        among=("sync", "cadence", "async"),
    )
    shard: str | None = _opt(
        None, "fsdp: shard weights, gradients and optimiser state over the devices.", among=("fsdp",)
    )

    revision: str | None = _opt(None, "Branch, tag or commit of the model on the Hub.")
    local_files_only: bool = _opt(False, "Do not connect to the Hub.")

    @property
    def adapter(self) -> Settings | None:
        """The trained adapter; None if all weights are trained."""
        return adapter_of(self)

    @property
    def places(self) -> int | str | list[str] | None:
        """The training devices of this machine; None leaves the choice to the launcher.

        Raises:
            DeviceError: a device is missing.
        """
        # With torch, which naming options does without.
        from flodl.devices import training_devices

        return training_devices(self.devices)

    @property
    def masks_padding(self) -> bool:
        """Whether the loss of answers excludes padding."""
        return self.compat is None

    @property
    def rows_in_batch(self) -> int:
        """The batch size; 32 if it is not set yet."""
        return self.batch_size or BATCH_SIZE

    @property
    def ranks(self) -> int:
        """Number of processes that share a batch."""
        places = self.places
        if places is None or isinstance(places, str):  # one device of each process that a launcher started
            return max(1, int(os.environ.get("WORLD_SIZE", "1")))
        return places if isinstance(places, int) else len(places)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a mapping, as JSON values where possible."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def make_options(given: Mapping[str, Any], where: str = "finetune") -> Options:
    """Return the options that ``given`` contains, with defaults for the rest.

    Words of transformers stand for ours where they mean the same (`flodl_hf.training.training_arguments`).

    Raises:
        ConfigError: names that are no options, or invalid values; ``problems`` lists all of them.
    """
    options, problems = read_options(given)
    if problems:
        raise ConfigError(f"{where}: options that cannot be:\n{capped(problems)}", problems=problems, where=where)
    return options


def read_options(given: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """Return the valid options of ``given``, with defaults for the rest, and all problems, each with its option."""
    table = {f.name: f for f in fields(Options)}
    hints = get_type_hints(Options)
    values: dict[str, Any] = {}
    given, problems = translated(given, table)
    problems += [f"{name}: no such option{nearest(name, [*table, *TAKEN])}" for name in given if name not in table]
    for name, value in given.items():
        if name not in table:
            continue
        try:
            values[name] = checked(value, hints[name], table[name].metadata)
        except ValueError as fault:
            problems.append(f"{name}: {fault}")
    options, invalid = Options(**values), [name for name in given if name not in values]
    # What depends on an invalid value is not known.
    problems += [p for p in combination_faults(options) if not any(re.search(rf"\b{name}\b", p) for name in invalid)]
    if options.schedule_options and not problems:
        options = replace(options, schedule_options=schedule_values(options.schedule, options.schedule_options)[0])
    return options, problems
